"""The Triton backend: prefix and tail in one pass, pages read through the page table, nothing to plan."""

from dataclasses import replace

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec, TailKV
from treetop.kernels.attention.attention import paged_attention
from treetop.kernels.attention.index_topk import choose_paged_keys
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.attention.stream_k import make_arrivals
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits, why_not

CAPABILITIES = Capabilities(
    (torch.float32, *HALF),
    head_dims=tuple(range(2, 513)),
    latents=tuple(range(1, 513)),
    sparse=True,
    fp8_kv=True,
    captures_first_call=True,
    flat=True,
)


class TritonBackend:
    """Kernels read lengths, positions and masks where they lie: beginning and planning launch nothing."""

    name = "triton"
    capabilities = CAPABILITIES

    def __init__(self, device: torch.device) -> None:
        self._gpu = gpu_traits(device)
        self._arrivals = make_arrivals(device, self._gpu)

    def begin(self, metadata: AttentionMetadata) -> None:
        """Nothing is needed."""

    def plan(self, begun: None, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def choose(self, query: IndexQuery, kv: PagedKV, plan: AttentionMetadata, tail: TailKV | None) -> SparseKeys | None:
        """None is all, where there can be no more than are chosen: no kernel runs."""
        columns = 0 if tail is None else tail.data.shape[1]
        if plan.max_kv_len + columns <= query.top_k:
            return None
        return choose_paged_keys(query, kv.index_keys, plan, None if tail is None else tail.index_keys, self._gpu)

    def hidden(self, plan: AttentionMetadata, chosen: SparseKeys | None) -> Tensor:
        if chosen is None:
            return torch.full_like(plan.kv_len, -1)
        there = torch.arange(chosen.positions.shape[2], device=plan.kv_len.device) < chosen.count[..., None]
        wrong = there & ((chosen.positions < 0) | (chosen.positions >= plan.extents[..., None]))
        found = torch.where(wrong, chosen.positions.clamp(min=0), -1).flatten(1).amax(dim=1).to(torch.int64)
        if chosen.columns is None or plan.mask is None:
            return found
        wrong = (chosen.columns & ~plan.mask).any(dim=1)
        column = plan.max_kv_len + wrong.to(torch.int8).argmax(dim=1)
        return torch.where(wrong.any(dim=1), column, found)

    def narrowed(self, plan: AttentionMetadata, chosen: SparseKeys | None) -> AttentionMetadata:
        return plan if chosen is None else replace(plan, chosen=chosen, mask=chosen.columns)

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv, replace(plan, flat=None), tail.planes, scale, sinks)

    def flat_prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor | None:
        if kv.value_dim is not None or plan.chosen is not None:
            return None
        return self._attend(q, kv, plan, tail.planes, scale, sinks)

    def causal(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv, plan, None, scale, sinks)

    def _attend(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: Tensor | None, scale: float, sinks: Tensor | None
    ) -> Tensor:
        if kv.value_dim is None:
            return paged_attention(
                q, kv.data, plan, tail, scale, sinks, self._gpu, scales=kv.scales, arrivals=self._arrivals
            )[0]
        assert sinks is None, "no model has compressed attention and sinks"
        return latent_attention(
            q, kv.planes, plan, tail, kv.value_dim, scale, self._gpu, arrivals=self._arrivals, scales=kv.scales
        )


def _make(need: Need) -> TritonBackend:
    return TritonBackend(need.device)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not,))
