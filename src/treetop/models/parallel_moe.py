"""Gemma 4's feed-forward with experts: a dense one and routed ones side by side, each behind norms of its own.

    y = norm_1(dense(x)) + norm_2(experts(pre_norm_2(stream)))        routed by the stream, normed and scaled by numbers

Source: `transformers`' gemma4.
"""

from functools import partial

import torch
from torch import Tensor

from treetop.checkpoints.params import Param, vector
from treetop.kernels.moe.routes import RoutedTokens
from treetop.kernels.table import Ops
from treetop.models.config import ParallelMoESpec
from treetop.models.experts import ExpertMLP, expert_params
from treetop.models.layers import RMSNorm, dense_mlp, mlp_params, norm_param
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights

_NORMS = {
    "dense_output_norm": "post_feedforward_layernorm_1",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_output_norm": "post_feedforward_layernorm_2",
}


class ParallelMoE:
    """A `FeedForward`; see the module."""

    def __init__(self, spec: ParallelMoESpec, weights: Weights, name: str, eps: float, ops: Ops) -> None:
        self._dense = dense_mlp(spec.dense, weights, f"{name}.dense", ops)
        self._experts = ExpertMLP(spec.experts, weights, f"{name}.experts", ops)
        norms = ("router_norm", *_NORMS)
        self._router_norm, self._dense_norm, self._expert_norm, self._output_norm = (
            RMSNorm(weights[f"{name}.{each}"], eps, ops) for each in norms
        )
        self.products: list[Product] = [*self._dense.products, *self._experts.products]

    def __call__(self, x: Tensor, tokens: RoutedTokens, stream: Tensor) -> Tensor:
        """Returns one part [1, ..., hidden]."""
        dense = self._dense_norm.of_parts(self._dense(x), x.dtype)
        routed = self._experts.routed(self._expert_norm(stream), tokens, self._router_norm(stream))
        added: Tensor = dense + self._output_norm.of_parts(routed, x.dtype)
        return added


def parallel_moe_params(spec: ParallelMoESpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of the dense one's tensors."""
    layer = stored.removesuffix(".mlp")
    scale = CheckpointTensor(f"{layer}.router.scale", (hidden,), partial(torch.mul, other=hidden**-0.5))
    return [
        *mlp_params(spec.dense, f"{name}.dense", stored, hidden),
        *expert_params(spec.experts, f"{name}.experts", stored, hidden),
        vector(f"{name}.router_norm", scale),
        *(norm_param(f"{name}.{ours}", f"{layer}.{theirs}.weight", hidden) for ours, theirs in _NORMS.items()),
    ]
