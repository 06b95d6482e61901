"""Which experts each token went to: kept in pages as its K/V are, and read from there for requests that ask.

    target's forward | experts [rows, n, layers * top_k] int16
    a prefill        | -> the pages, at the slots of its tokens
    a verification   | -> the tail; the accepted path goes from there to the pages with its K/V
    a step's end     | pages of those who ask -> the host

So a token that another request has left in the prefix cache has them too, and a rejected branch leaves nothing.
"""

from collections.abc import Iterator, Sequence
from ctypes import string_at

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.engine.model_runner import ModelRunner
from treetop.kernels.kv import PagedKV, slots_of, write_pages
from treetop.kernels.tree.commit import Paths
from treetop.models.config import ModelConfig
from treetop.models.target import TargetOutput
from treetop.types.errors import CheckError, ConfigError
from treetop.types.ids import EXPERTS
from treetop.types.kv import expert_ids
from treetop.types.layout import KVGroup, Layout
from treetop.types.messages import Chunk, PrefillPlan, RoundPlan
from treetop.types.routed_experts import ExpertLayers, ExpertShape, TokenExperts
from treetop.types.tree import FlatNodes

_FLAG = "--enable-return-routed-experts"


def expert_shape(model: ModelConfig) -> ExpertShape:
    """Of a model. Raises ConfigError for a model that has none, or not the same number in each layer."""
    top_k = {layer.experts.router.top_k for layer in model.layers if layer.experts is not None}
    most = max((layer.experts.router.num_experts for layer in model.layers if layer.experts is not None), default=0)
    if not top_k:
        raise ConfigError(f"{_FLAG}: this model has no experts; drop it")
    if len(top_k) > 1 or most > torch.iinfo(torch.int16).max:
        raise ConfigError(
            f"{_FLAG}: layers with {sorted(top_k)} experts a token, of {most}: one number a token, of 32767 at most, is"
            " built; drop it"
        )
    return ExpertShape(sum(layer.experts is not None for layer in model.layers), top_k.pop(), most)


def expert_layers(model: ModelConfig) -> ExpertLayers:
    """Of a model whose engine keeps them."""
    at = tuple(i for i, layer in enumerate(model.layers) if layer.experts is not None)
    return ExpertLayers(len(model.layers), at, expert_shape(model).num_experts)


def expert_group(shape: ExpertShape) -> KVGroup:
    """The pages that ids lie in."""
    return KVGroup(EXPERTS, 1, expert_ids(shape.num_ids))


def told(layout: Layout) -> ExpertShape:
    """Of an engine that keeps them."""
    assert layout.experts is not None
    return layout.experts


def keep_prompts(runner: ModelRunner, output: TargetOutput, rows: Tensor, positions: Tensor, valid: Tensor) -> None:
    """Of a prefill's tokens, to the pages. rows: [rows] int64. positions: [rows, n] int64. valid: [rows, n] bool."""
    if output.experts is None:
        return
    table, size = runner.state.table_of(EXPERTS).data, runner.layout.page_size
    pages = runner.pools[EXPERTS].data[0]
    write_pages(PagedKV(pages), slots_of(table, rows, positions, valid, size), _stored(output.experts, pages))


def keep_nodes(runner: ModelRunner, output: TargetOutput, flat: FlatNodes | None) -> None:
    """Of a verification's nodes, to the tail, before their path is committed."""
    if output.experts is None:
        return
    tail = runner.buffers.verify_tails[EXPERTS][0]
    ids = _stored(output.experts, tail)
    if flat is None:
        tail[: ids.shape[0], : ids.shape[1]].copy_(ids)
    else:
        tail.flatten(0, 1)[: len(ids)].copy_(ids[:, 0])


def _stored(experts: Tensor, like: Tensor) -> Tensor:
    """[rows, n, numbers] int16 as bytes, [rows, n, 1, 1, width]."""
    missing = like.shape[-1] // 2 - experts.shape[-1]
    whole = F.pad(experts, (0, missing)) if missing else experts.contiguous()
    return whole.view(torch.uint8)[:, :, None, None]


def experts_of_chunks(runner: ModelRunner, plan: PrefillPlan, rows: Tensor) -> Tensor | None:
    """Of the tokens that a prefill tells of, [tokens, ids] int16 on the host, in the order of its chunks: there at the
    step's end. rows: int64 on the device, those of the chunks first. None if nobody asks.

    A chunk may begin behind what the prefix cache had: so more may be told than it computes, a piece at a time.
    """
    spans = [(rows[i : i + 1], span) for i, chunk in enumerate(plan.chunks) for span in _pieces(runner, chunk)]
    if not spans:
        return None
    found = _on_host(runner, (sum(len(span) for _, span in spans),))
    end = 0
    for row, span in spans:
        positions = torch.arange(span.start, span.stop, device=row.device)[None]
        begin, end = end, end + len(span)
        ids = _read(runner, row, positions, torch.ones_like(positions, dtype=torch.bool))
        found[begin:end].copy_(ids[0], non_blocking=True)
    return found


def experts_of_round(runner: ModelRunner, paths: Paths) -> Tensor:
    """Of what a round has committed, [rows, S + 1, ids] int16 on the host: there at the step's end. Past a row's path
    they mean nothing.
    """
    ids = _read(runner, paths.rows, paths.positions, paths.kept)
    return _on_host(runner, ids.shape[:2]).copy_(ids, non_blocking=True)


def told_of(
    shape: ExpertShape, plan: PrefillPlan | RoundPlan, item: int, num_tokens: int, found: Tensor
) -> TokenExperts | None:
    """Of what a step has `found`, its row `item`'s part. num_tokens: that a round gave it."""
    if isinstance(plan, RoundPlan):
        start, part = 0, found[item, : num_tokens if plan.rows[item] in plan.told_experts else 0]
    else:
        before, chunk = sum(_num_told(chunk) for chunk in plan.chunks[:item]), plan.chunks[item]
        start, part = chunk.experts_from or 0, found[before : before + _num_told(chunk)]
    ids = string_at(part.data_ptr(), part.numel() * part.element_size()) if part.numel() else b""
    return TokenExperts(start, shape.layers, shape.top_k, ids) if ids else None


def check_told(shape: ExpertShape, found: Tensor) -> None:
    """Level 1: what is told are experts of the model, counted over all ranks. found: on the host. Raises CheckError."""
    least, most = (int(each) for each in found.aminmax())
    if least < 0 or most >= shape.num_experts:
        raise CheckError(f"experts of tokens: {least} to {most}, outside [0, {shape.num_experts})")


def _num_told(chunk: Chunk) -> int:
    return 0 if chunk.experts_from is None else chunk.start + len(chunk.token_ids) - chunk.experts_from


def _pieces(runner: ModelRunner, chunk: Chunk) -> Iterator[range]:
    """The positions that a chunk tells of, no more of them at a time than a step computes."""
    end, most = chunk.start + len(chunk.token_ids), runner.layout.chunk
    return (range(first, min(first + most, end)) for first in range(end - _num_told(chunk), end, most))


def _read(runner: ModelRunner, rows: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    """[rows, n, ids] int16, of the null slot where not visible."""
    layout, pages = runner.layout, runner.pools[EXPERTS].data[0]
    slots = slots_of(runner.state.table_of(EXPERTS).data, rows, positions, visible, layout.page_size)
    held = pages.view(len(pages), -1).index_select(0, slots.reshape(-1)).view(torch.int16)
    count = told(layout).num_ids
    return held[:, :count].reshape(*slots.shape, count)


def _on_host(runner: ModelRunner, shape: Sequence[int]) -> Tensor:
    pinned = runner.buffers.rows.device.type == "cuda"
    return torch.empty((*shape, told(runner.layout).num_ids), dtype=torch.int16, pin_memory=pinned)
