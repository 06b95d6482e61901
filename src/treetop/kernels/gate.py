"""Activations of a gated feed-forward's gate: SiLU, and GELU in its tanh form. In kernels in float32."""

from typing import Literal

from torch import Tensor

from treetop.kernels.exact import LIBRARY, Functions
from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

Gate = Literal["silu", "gelu_tanh"]


def activated_reference(gate: Tensor, kind: Gate, functions: Functions = LIBRARY) -> Tensor:
    return functions.silu(gate) if kind == "silu" else functions.gelu_tanh(gate)


@jit
def activated(gate: Arg, kind: constexpr) -> Arg:
    """Half of 1 + tanh(u) is the sigmoid of 2 u, and as good as 0 below -80. Source: arXiv:1606.08415, section 2."""
    if kind == "gelu_tanh":
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(tl.maximum(twice, -80.0))
    return gate * tl.sigmoid(gate)
