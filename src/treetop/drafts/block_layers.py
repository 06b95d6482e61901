"""DFlash 2's layers: what attention and feed-forward read, and what they give, is mixed with the slot before.

A kernel has a base and a part that the normed input makes, one number for each group of neighbouring features. Before a
block's first slot there is nothing; the context's K/V are not mixed.
Source: `speculators` 0.9.0 `models/dflash2`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix
from treetop.kernels.fused import joined
from treetop.kernels.moe.routes import ALL_LIVE, RoutedTokens
from treetop.models.decoder import DecoderLayer
from treetop.models.layers import Rotary
from treetop.types.parallel import Summed, taken
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights

_HALVES = ("attention", "mlp")


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """taps: slots that a kernel mixes, its own the first. group: features that share a number of the made part."""

    taps: int
    group: int
    hidden_size: int

    def params(self, name: str, stored: str) -> list[Param]:
        """Of one layer."""
        base, made = (2, self.taps, self.hidden_size), 2 * self.taps * (self.hidden_size // self.group)
        params = []
        for half in _HALVES:
            at = f"{stored}.{half}_conv"
            params += [
                Param(f"{name}.{half}_base", base, (CheckpointTensor(f"{at}.base_kernel", base),), "vector"),
                matrix(
                    f"{name}.{half}_made", CheckpointTensor(f"{at}.kernel_projection.weight", (made, self.hidden_size))
                ),
            ]
        return params


class Convolution:
    """Of one half of a layer, before and after it."""

    def __init__(self, spec: ConvolutionSpec, weights: Weights, name: str) -> None:
        self.spec, self.base, self.made = spec, weights[f"{name}_base"], weights.linear(f"{name}_made")

    def kernels(self, x: Tensor) -> Tensor:
        """x: [rows, n, hidden], the normed input. Returns [rows, n, 2, taps, hidden]."""
        made = self.made(x).unflatten(-1, (2, self.spec.taps, -1))
        whole: Tensor = self.base + made.repeat_interleave(self.spec.group, dim=-1)
        return whole

    @staticmethod
    def mixed(kernel: Tensor, x: Tensor) -> Tensor:
        """kernel: [rows, n, taps, hidden]. x: [rows, n, hidden]."""
        shifted = [F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(kernel.shape[2])]
        return (kernel * torch.stack(shifted, dim=2)).sum(dim=2)


class ConvolvedLayer:
    """A layer between whose norms and residual sums stand convolutions."""

    def __init__(self, layer: DecoderLayer, spec: ConvolutionSpec, weights: Weights, index: int) -> None:
        self.layer, self.input_norm, self.leave = layer, layer.input_norm, layer.leave
        self.attention_conv, self.mlp_conv = (Convolution(spec, weights, f"layers.{index}.{half}") for half in _HALVES)
        self.products: list[Product] = [*layer.products, self.attention_conv.made, self.mlp_conv.made]

    def __call__(
        self, x: Tensor, normed: Tensor, rotary: Rotary, attend: Attend, tokens: RoutedTokens = ALL_LIVE
    ) -> tuple[Tensor, Summed]:
        """See `DecoderLayer`."""
        layer, mixed = self.layer, Convolution.mixed
        kernels = self.attention_conv.kernels(normed)
        parts = layer.attention(mixed(kernels[:, :, 0], normed), rotary, attend)
        added = mixed(kernels[:, :, 1], joined(taken(parts)).to(x.dtype))
        x, normed = layer.mlp_norm.after(x, added[None])
        kernels = self.mlp_conv.kernels(normed)
        parts = layer.mlp(mixed(kernels[:, :, 0], normed), tokens, x)
        return x, mixed(kernels[:, :, 1], joined(taken(parts)).to(x.dtype))[None]
