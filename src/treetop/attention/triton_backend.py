"""The Triton backend: prefix and tail in one pass, pages read through the page table, nothing to plan."""

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec, TailKV
from treetop.kernels.attention import paged_attention
from treetop.kernels.kv import PagedKV
from treetop.kernels.latent_attention import latent_attention
from treetop.kernels.metadata import AttentionMetadata
from treetop.kernels.triton_guard import gpu_traits, why_not

CAPABILITIES = Capabilities(
    (torch.float32, *HALF), head_dims=tuple(range(2, 513)), latents=tuple(range(1, 513)), captures_first_call=True
)


class TritonBackend:
    """Kernels read lengths, positions and masks where they lie: beginning and planning launch nothing."""

    name = "triton"
    capabilities = CAPABILITIES

    def __init__(self, device: torch.device) -> None:
        self._gpu = gpu_traits(device)

    def begin(self, metadata: AttentionMetadata) -> None:
        """Nothing is needed."""

    def plan(self, begun: None, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv, plan, tail.data, scale, sinks)

    def causal(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv, plan, None, scale, sinks)

    def _attend(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: Tensor | None, scale: float, sinks: Tensor | None
    ) -> Tensor:
        if kv.value_dim is None:
            return paged_attention(q, kv.data, plan, tail, scale, sinks, self._gpu)[0]
        assert sinks is None, "no model has compressed attention and sinks"
        return latent_attention(q, kv.data, plan, tail, kv.value_dim, scale, self._gpu)


def _make(need: Need) -> TritonBackend:
    return TritonBackend(need.device)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not,))
