"""Kimi delta attention (KDA): a gated delta net whose state decays by a number for each channel of the key.

    q, k, v = products of x, through a causal depthwise convolution and SiLU; q and k of length 1, q times dim^-1/2
    g = -e^A_log softplus(f_b(f_a(x)) + dt_bias), of each channel;  beta = sigmoid(b(x))
    out(norm(recurrence) * weight * sigmoid(g_b(g_a(x))))       the norm of each head

Of Ling 3 f and the gate are one product each, and decays have a floor (`KimiSpec.floor`), as a logarithm:
g = floor sigmoid(e^A_log (f(x) + dt_bias)).

In float32 at least from the recurrence's inputs to the gate. The recurrence is that of `kernels.recurrent.states`; what
decays between two tokens is a power of the sum of g between them, never a quotient of two powers, which float32 has not
got. Source: Kimi Linear, arXiv:2510.26692; `transformers`' kimi_linear and bailing_hybrid. A
checkpoint has a tensor for each part.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.recurrent.gates import LENGTH_EPS, rates_of
from treetop.kernels.recurrent.states import StateInputs
from treetop.kernels.table import Ops
from treetop.models.layers import Rotary
from treetop.models.mixers.recurrences import KimiSpec
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights


class KimiDelta:
    """An `Attention` whose `attend` keeps a state. name: of its parameters. eps: of the norm of its output."""

    def __init__(self, spec: KimiSpec, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> None:
        self.spec, self._layer, self._eps, self._ops = spec.of_rank(ops.parallel.size), layer, eps, ops
        names = ("qkv", "rate", "decay", "gate", "output")
        self.qkv, self.beta, self.decay, self.gate, self.output = (weights.linear(f"{name}.{each}") for each in names)
        self.products: list[Product] = [self.qkv, self.beta, self.decay, self.gate, self.output]
        self.narrow = weights.linear(f"{name}.narrow") if spec.narrow else None
        if self.narrow is not None:
            self.products.append(self.narrow)
        self._conv, self._norm = weights[f"{name}.conv"], weights[f"{name}.norm"]
        self._speed, self._bias = rates_of(weights[f"{name}.speed"]), weights[f"{name}.dt_bias"]

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        spec, wide, functions, total = self.spec, self._speed.dtype, self._ops.functions, self._ops.profile.total
        by_head = (spec.heads, spec.head_dim)
        mixed = functions.silu(attend.convolve(self._layer, self.qkv(x), self._conv, None)).to(wide)
        q, k, v = (each.unflatten(-1, by_head) for each in mixed.chunk(3, dim=-1))
        q, k = (each * torch.rsqrt(total(each.square()) + LENGTH_EPS) for each in (q, k))
        of_decay, of_gate = (x, x) if self.narrow is None else self.narrow(x).chunk(2, dim=-1)
        steps = (self.decay(of_decay).to(wide) + self._bias).unflatten(-1, by_head)
        beta = functions.sigmoid(self.beta(x).to(wide))
        inputs = StateInputs(q * spec.head_dim**-0.5, k, v.contiguous(), self._decays(steps), beta)
        out = attend.recur(self._layer, inputs)
        normed = out * torch.rsqrt(total(out.square()) / spec.head_dim + self._eps) * self._norm
        gated = normed.flatten(2) * functions.sigmoid(self.gate(of_gate).to(wide))
        return self._ops.parallel.share(self.output.parts(gated.to(x.dtype)))

    def _decays(self, steps: Tensor) -> Tensor:
        """Their logarithms. steps: [rows, n, heads, dim]."""
        functions, speed = self._ops.functions, self._speed[:, None]
        if self.spec.floor is None:
            return speed * functions.softplus(steps)
        return self.spec.floor * functions.sigmoid(-speed * steps)


def kimi_params(spec: KimiSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks have whole heads, and all of the narrow products."""
    dim, inner = spec.head_dim, spec.heads * spec.head_dim
    end, between = ("_b", dim) if spec.narrow else ("", hidden)

    def wide(each: str, width: int) -> CheckpointTensor:
        return CheckpointTensor(f"{stored}.{each}_proj.weight", (inner, width), unit=dim)

    taps = (
        CheckpointTensor(f"{stored}.{each}_conv1d.weight", (inner, 1, spec.taps), _squeezed, inner, unit=dim)
        for each in "qkv"
    )
    narrow = (CheckpointTensor(f"{stored}.{each}_a_proj.weight", (dim, hidden)) for each in "fg")
    shape = (1, 1, spec.heads, 1) if spec.narrow else (spec.heads,)
    speed = CheckpointTensor(f"{stored}.A_log", shape, partial(torch.reshape, shape=(spec.heads,)), spec.heads)
    return [
        matrix(f"{name}.qkv", *(wide(each, hidden) for each in "qkv"), shard=0),
        matrix(f"{name}.rate", CheckpointTensor(f"{stored}.b_proj.weight", (spec.heads, hidden)), shard=0),
        *([matrix(f"{name}.narrow", *narrow)] if spec.narrow else []),
        matrix(f"{name}.decay", wide(f"f{end}", between), shard=0),
        matrix(f"{name}.gate", wide(f"g{end}", between), shard=0),
        matrix(f"{name}.output", CheckpointTensor(f"{stored}.o_proj.weight", (hidden, inner), unit=dim), shard=1),
        Param(f"{name}.conv", (3 * inner, spec.taps), tuple(taps), "vector", 0),
        Param(f"{name}.speed", (spec.heads,), (speed,), "vector", 0, wide=True),
        replace(
            vector(f"{name}.dt_bias", CheckpointTensor(f"{stored}.dt_bias", (inner,), unit=dim), shard=0), wide=True
        ),
        replace(vector(f"{name}.norm", CheckpointTensor(f"{stored}.o_norm.weight", (dim,))), wide=True),
    ]


def _squeezed(stored: Tensor) -> Tensor:
    return stored.squeeze(1)
