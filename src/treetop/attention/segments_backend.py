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
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.segment_attention import folders, segment_attention
from treetop.kernels.attention.segment_prefill import segment_prefill
from treetop.kernels.attention.segments import SegmentPlan, block_of, plan_segments
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.ids import is_draft

CAPABILITIES = Capabilities(
    (torch.float32, *HALF), head_dims=tuple(range(2, 513)), captures_first_call=True, exact=True
)

Plan = SegmentPlan | AttentionMetadata
"""Of a decode phase of the target; of a prefill and of a draft, which need none."""


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
        group, (rows, n, _) = self._groups[metadata.table.group], metadata.mask.shape
        heads = group.kv_heads, group.heads // group.kv_heads, group.head_dim
        call = CallShape(rows, n, *heads, self._size, metadata.max_kv_len)
        block = block_of(group.head_dim, self._size)
        return plan_segments(metadata, folders(call, self._gpu), block, self._gpu)

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Plan, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        if isinstance(plan, AttentionMetadata):
            return self._draft.prefix_tail(q, kv, plan, tail, scale, sinks)
        return segment_attention(q, kv.data, plan, tail.data, scale, sinks, self._gpu)

    def causal(self, q: Tensor, kv: PagedKV, plan: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        assert isinstance(plan, AttentionMetadata)
        if is_draft(plan.table.group):
            return self._draft.causal(q, kv, plan, scale, sinks)
        return segment_prefill(q, kv.data, plan, scale, sinks, self._gpu)


def _make(need: Need) -> SegmentsBackend:
    return SegmentsBackend(need)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not,))
