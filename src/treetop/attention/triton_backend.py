"""The Triton backend: prefix and tail in one pass, pages read through the page table, nothing to plan."""

import torch
from torch import Tensor

from treetop.attention.capabilities import CAPABILITIES, Need, require
from treetop.attention.contract import TailKV
from treetop.kernels.attention import paged_attention
from treetop.kernels.kv import PagedKV
from treetop.kernels.metadata import AttentionMetadata
from treetop.kernels.triton_guard import gpu_traits


class TritonBackend:
    """Kernels read lengths, positions and masks where they lie: beginning and planning launch nothing."""

    name = "triton"
    capabilities = CAPABILITIES["triton"]

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        require("triton", Need(dtype, device))
        self._gpu = gpu_traits(device)

    def begin(self, metadata: AttentionMetadata) -> None:
        """Nothing is needed."""

    def plan(self, begun: None, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return paged_attention(q, kv.data, plan, tail.data, scale, sinks, self._gpu)[0]

    def causal(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return paged_attention(q, kv.data, plan, None, scale, sinks, self._gpu)[0]
