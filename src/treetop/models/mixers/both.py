"""Attention and Mamba-2 of the same normed input, added: the layers of Falcon-H1. Source: `transformers`' falcon_h1."""

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param
from treetop.kernels.fused import joined
from treetop.kernels.table import Ops
from treetop.models.config import BothSpec
from treetop.models.layers import Rotary, SelfAttention, self_attention_params
from treetop.models.mixers.mamba2 import Mamba2, mamba_params
from treetop.types.parallel import Summed, taken
from treetop.weights.format import Product
from treetop.weights.held import Weights


class BothMixer:
    """An `Attention`. name: of its parameters."""

    def __init__(self, spec: BothSpec, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> None:
        self._spec = spec
        self._attention = SelfAttention(spec.attention, weights, f"{name}.attention", layer, eps, ops)
        self._recurrent = Mamba2(spec.recurrent, weights, f"{name}.recurrent", layer, ops)
        self.products: list[Product] = [*self._attention.products, *self._recurrent.products]

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns one part [1, rows, n, hidden]."""
        attended = joined(taken(self._attention(x * self._spec.of_input, rotary, attend))) * self._spec.of_output
        found: Tensor = torch.add(attended, joined(taken(self._recurrent(x, rotary, attend))))
        return found[None]


def both_params(spec: BothSpec, name: str, stored: str, width: int, hidden: int) -> list[Param]:
    """stored: the prefix of its attention's tensors."""
    beside = f"{stored.rpartition('.')[0]}.{spec.recurrent.block}"
    return [
        *self_attention_params(spec.attention, f"{name}.attention", stored, width, hidden),
        *mamba_params(spec.recurrent, f"{name}.recurrent", beside, hidden),
    ]
