"""A prefill step: one chunk a row, K/V to the pages first, the first token of a prompt's last chunk sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.phase import CausalAttention, LayerKV
from treetop.engine.device import Device, head_scale
from treetop.kernels.kv import slots_of
from treetop.kernels.rows import Outcome, finish_reference, pick_reference
from treetop.types.layout import KVGroup
from treetop.types.messages import PrefillPlan
from treetop.types.phase import Phase
from treetop.types.sampling import Choice


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One prefill step on the device.

    rows: [rows] int64. tokens: [rows, n] int64, padded. query_len: [rows] int64, 0 for the dummy row. next_token:
    [rows] int64, the prompt token after the chunk; -1 for a prompt's last chunk. bound: no extent is larger.
    """

    rows: Tensor
    tokens: Tensor
    query_len: Tensor
    next_token: Tensor
    bound: int
    choice: Choice


def chunk_columns(plan: PrefillPlan, bucket: int) -> list[list[int]]:
    """A prefill's chunks as columns of integers: query_len and next_token of each row; place and id of each token."""
    chunks, width = plan.chunks, chunk_width(plan)
    padding = [0] * (bucket - len(chunks))
    return [
        [len(chunk.token_ids) for chunk in chunks] + padding,
        [-1 if chunk.next_token is None else chunk.next_token for chunk in chunks] + padding,
        [i * width + column for i, chunk in enumerate(chunks) for column in range(len(chunk.token_ids))],
        [token for chunk in chunks for token in chunk.token_ids],
    ]


def chunk_width(plan: PrefillPlan) -> int:
    return max((len(chunk.token_ids) for chunk in plan.chunks), default=1)


def make_batch(plan: PrefillPlan, rows: Tensor, columns: list[Tensor]) -> PrefillBatch:
    """rows: [bucket] int64. columns: those of `chunk_columns`, on the device."""
    query_len, next_token, place, ids = columns
    width = chunk_width(plan)
    bound = max((chunk.start + len(chunk.token_ids) for chunk in plan.chunks), default=1)
    tokens = rows.new_zeros(len(rows) * width).index_copy_(0, place, ids).view(len(rows), width)
    return PrefillBatch(rows, tokens, query_len, next_token, bound, plan.choice)


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a chunk's tokens stand. positions: [rows, n], 0 where padded. valid: [rows, n] bool. extent: [rows]."""

    positions: Tensor
    valid: Tensor
    extent: Tensor


def prefill(device: Device, batch: PrefillBatch) -> tuple[Tensor, Tensor]:
    """Process one chunk a row. Returns the first new token of each row [rows], and finite [rows] bool."""
    rows, query_len = batch.rows, batch.query_len
    start = device.state.committed[rows]
    columns = torch.arange(batch.tokens.shape[1], device=rows.device)
    valid = columns < query_len[:, None]
    span = _Span(torch.where(valid, start[:, None] + columns, 0), valid, start + query_len)
    attend = _attention(device, device.target_layers, device.target_groups, batch, span)
    output = device.target.forward(batch.tokens, span.positions, attend)
    last = (query_len - 1).clamp(min=0)
    logits = device.target.logits(pick_reference(output.hidden, last)[:, None])
    chosen = device.choose(logits, rows, (span.extent - 1)[:, None], batch.choice)
    first = chosen.token[:, 0]
    draft = None
    if device.head is not None:
        following = torch.where(batch.next_token >= 0, batch.next_token, first)
        shifted = torch.cat([batch.tokens[:, 1:], batch.tokens[:, :1]], dim=1)
        shifted = shifted.scatter(1, last[:, None], following[:, None])
        attend = _attention(device, device.draft_layers, device.draft_groups, batch, span)
        features = torch.cat(output.features, dim=-1)
        hidden = device.head.forward(shifted, device.head.fuse(features), span.positions, attend)
        draft = device.propose(hidden, last)
    live = rows != device.layout.dummy_row
    finish_reference(device.state.tables, rows, live, Outcome(query_len, first, draft))
    return first, chosen.finite[:, 0]


def _attention(
    device: Device, layers: list[LayerKV], groups: list[KVGroup], batch: PrefillBatch, span: _Span
) -> CausalAttention:
    slots, plans = {}, {}
    for group in groups:
        table = device.state.table_of(group.name).data
        slots[group.name] = slots_of(table, batch.rows, span.positions, span.valid, device.layout.page_size)
        prefix = device.begin(Phase.PREFILL, group.name, batch.rows, span.extent, batch.bound)
        plans[group.name] = device.backend.plan_causal(prefix, span.positions, group.window)
    return CausalAttention(device.backend, device.ops, layers, slots, plans, head_scale(groups[0]))
