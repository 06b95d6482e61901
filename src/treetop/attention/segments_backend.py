"""Attention on a GPU whose result depends on a query's position and its keys alone, to the bit:
`kernels.attention.segments`.
"""

from typing import Any

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec, TailKV
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.index_topk import choose_paged_keys
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_segments import ChosenSegments, choose_segments, prefill_latents, segment_latents
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.segment_attention import num_splits_of, segment_attention
from treetop.kernels.attention.segment_prefill import segment_prefill
from treetop.kernels.attention.segments import SegmentPlan, block_of, plan_segments
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.ids import is_draft

CAPABILITIES = Capabilities(
    (torch.float32, *HALF),
    head_dims=tuple(range(2, 513)),
    latents=tuple(range(1, 513)),
    sparse=True,
    fp8_kv=True,
    captures_first_call=True,
    exact=True,
)

Plan = SegmentPlan | ChosenSegments | AttentionMetadata
"""Of a decode phase of the target, and of what was chosen in one; of a prefill and of a draft, which need none."""


class SegmentsBackend:
    """The target's attention. Drafts, which change no token, have Triton's."""

    name = "segments"
    capabilities = CAPABILITIES

    def __init__(self, need: Need) -> None:
        self._gpu, self._size = gpu_traits(need.device), need.dtype.itemsize
        self._groups = {group.name: group for group in need.groups}
        self._draft = TritonBackend(need.device)

    def begin(self, metadata: AttentionMetadata) -> None:
        """Nothing is needed."""

    def plan(self, begun: None, metadata: AttentionMetadata) -> Plan:
        if metadata.causal or is_draft(metadata.table.group):
            return metadata
        assert metadata.mask is not None
        rows, n, _ = metadata.mask.shape
        return plan_segments(metadata, *self._cut(metadata, rows, n, metadata.max_kv_len), self._gpu)

    def _cut(self, metadata: AttentionMetadata, rows: int, n: int, longest: int) -> tuple[int, int]:
        """Programs that share a decode phase of a group's layers, and keys of a block."""
        group = self._groups[metadata.table.group]
        heads = group.kv_heads, group.heads // group.kv_heads, group.head_dim
        shares = num_splits_of(CallShape(rows, n, *heads, self._size, longest), self._gpu)
        return shares, block_of(group.head_dim, self._size)

    def choose(self, query: IndexQuery, kv: PagedKV, plan: Plan, tail: TailKV | None) -> ChosenSegments | Any:
        """As Triton's: None is all."""
        metadata = _metadata_of(plan)
        if is_draft(metadata.table.group):
            return self._draft.choose(query, kv, metadata, tail)
        if metadata.max_kv_len + (0 if tail is None else tail.data.shape[1]) <= query.top_k:
            return None
        of_tail = None if tail is None else tail.index_keys
        keys = choose_paged_keys(query, kv.index_keys, metadata, of_tail, self._gpu, exact=True)
        rows, n, top_k = keys.positions.shape
        return choose_segments(metadata, keys, *self._cut(metadata, rows * n, 1, top_k), self._gpu)

    def hidden(self, plan: Plan, chosen: Any) -> Tensor:
        return self._draft.hidden(_metadata_of(plan), chosen.keys if isinstance(chosen, ChosenSegments) else chosen)

    def narrowed(self, plan: Plan, chosen: Any) -> Plan:
        if not isinstance(chosen, ChosenSegments):
            return plan if chosen is None else self._draft.narrowed(_metadata_of(plan), chosen)
        return chosen.of(_metadata_of(plan))

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Plan, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(plan, AttentionMetadata):
            return self._draft.prefix_tail(q, kv, plan, tail, scale, sinks)
        if kv.value_dim is None:
            assert isinstance(plan, SegmentPlan)
            return segment_attention(q, kv.data, plan, tail.data, scale, sinks, self._gpu, scales=kv.scales)
        assert sinks is None, "no model has compressed attention and sinks"
        return segment_latents(q, kv.planes, plan, tail.planes, kv.value_dim, scale, self._gpu, scales=kv.scales)

    def causal(self, q: Tensor, kv: PagedKV, plan: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        assert isinstance(plan, AttentionMetadata)
        if is_draft(plan.table.group):
            return self._draft.causal(q, kv, plan, scale, sinks)
        if kv.value_dim is None:
            return segment_prefill(q, kv.data, plan, scale, sinks, self._gpu, scales=kv.scales)
        assert sinks is None, "no model has compressed attention and sinks"
        return prefill_latents(q, kv.planes, plan, kv.value_dim, scale, self._gpu, scales=kv.scales)


def _metadata_of(plan: Plan) -> AttentionMetadata:
    return plan if isinstance(plan, AttentionMetadata) else plan.metadata


def _make(need: Need) -> SegmentsBackend:
    return SegmentsBackend(need)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not,))
