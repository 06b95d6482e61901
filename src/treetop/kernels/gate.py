"""Activations of a gated feed-forward's gate: SiLU, GELU in its tanh form, and ReLU. In kernels in float32.

ReLU is of experts without a gate whose activation is relu(x)^2: x stands for gate and up.
"""

from typing import Literal

from torch import Tensor

from treetop.kernels.exact import LIBRARY, Functions
from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

Gate = Literal["silu", "gelu_tanh", "relu"]


def activated_reference(gate: Tensor, kind: Gate, functions: Functions = LIBRARY) -> Tensor:
    if kind == "relu":
        return gate.relu()
    return functions.silu(gate) if kind == "silu" else functions.gelu_tanh(gate)


@jit
def activated(gate: Arg, kind: constexpr) -> Arg:
    """Half of 1 + tanh(u) is the sigmoid of 2 u, and as good as 0 below -80. Source: arXiv:1606.08415, section 2."""
    if kind == "gelu_tanh":
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(tl.maximum(twice, -80.0))
    if kind == "relu":
        return tl.maximum(gate, 0.0)
    return gate * tl.sigmoid(gate)
