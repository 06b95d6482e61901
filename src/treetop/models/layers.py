"""The two halves of a decoder layer, shared by target and draft head."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from treetop.attention.phase import Attend
from treetop.kernels.fused import HeadNorms
from treetop.kernels.ops import Ops
from treetop.models.checkpoint import Shapes
from treetop.models.spec import ModelSpec

Weights = MutableMapping[str, Tensor]
"""A checkpoint's tensors by name. Who fuses tensors takes them out, so that a model is never there twice."""


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.eps, self._ops = weight, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.add_rms_norm(x, None, self.weight, self.eps)[1]

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x plus the parts of delta [parts, ...], and its norm."""
        return self._ops.add_rms_norm(x, delta, self.weight, self.eps)


class SelfAttention:
    """Projections, norms of heads if there are any, rotation and attention. q, k and v come from one product."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str, layer: int, ops: Ops) -> None:
        self.layer, self.head_dim = layer, spec.head_dim
        self.qkv = ops.linear(*_fused(weights, [f"{prefix}.{name}_proj" for name in "qkv"]))
        self.output = ops.linear(*_fused(weights, [f"{prefix}.o_proj"]))
        self.norms = None
        if spec.qk_norm:
            both = [weights.pop(f"{prefix}.{name}_norm.weight") for name in "qk"]
            self.norms = HeadNorms(torch.stack(both), spec.norm_eps)

    def __call__(self, x: Tensor, angles: Any, attend: Attend) -> Tensor:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden]."""
        qkv = self.qkv.parts(x).unflatten(-1, (-1, self.head_dim))
        return self.output.parts(attend(self.layer, qkv, angles, self.norms).flatten(2))

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str, width: int) -> Shapes:
        """Tensors of an attention block whose input is `width` wide."""
        q, kv, hidden = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
        sizes = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (hidden, q)}
        norms = {f"{prefix}.{name}_norm.weight": (spec.head_dim,) for name in "qk"} if spec.qk_norm else {}
        return {**_linear_shapes(prefix, sizes, spec.attention_bias), **norms}


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up from one product."""

    def __init__(self, weights: Weights, prefix: str, ops: Ops) -> None:
        self.gate_up = ops.gated(*_fused(weights, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]))
        self.down = ops.linear(*_fused(weights, [f"{prefix}.down_proj"]))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., hidden]. Returns parts [parts, ..., hidden]."""
        return self.down.parts(self.gate_up(x))

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str) -> Shapes:
        inner, hidden = spec.intermediate_size, spec.hidden_size
        sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return _linear_shapes(prefix, sizes, spec.mlp_bias)


def _fused(weights: Weights, names: list[str]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of projections that share their input, as one."""
    parts = [weights.pop(f"{name}.weight") for name in names]
    biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts), torch.cat(biases) if biases else None


def _linear_shapes(prefix: str, sizes: Mapping[str, tuple[int, int]], bias: bool) -> Shapes:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{name}.weight": size for name, size in sizes.items()}
    if bias:
        shapes.update({f"{prefix}.{name}.bias": size[:1] for name, size in sizes.items()})
    return shapes
