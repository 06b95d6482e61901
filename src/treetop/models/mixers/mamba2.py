"""Mamba-2: a state space whose step, key and query depend on the token.

    z, x, B, C, dt = in(u)           x, B and C through a causal depthwise convolution and SiLU
    dt = clamp(softplus(dt + dt_bias), limits);  g = -e^A_log dt
    M <- e^g M + B^T (dt x);  y = C M + D x     the recurrence of `kernels.recurrent.states`, without its delta rule
    out(norm(y * SiLU(z))), or out(norm(y) * SiLU(z)), or without a norm

In float32 at least but for the products and the convolution. The norm is of parts of all heads' numbers.
Source: Transformers are SSMs, arXiv:2405.21060; `transformers`' nemotron_h, bamba, granitemoehybrid and falcon_h1,
whose path of one token leaves the limits out.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.recurrent.gates import rates_of
from treetop.kernels.recurrent.states import StateInputs
from treetop.kernels.table import Ops
from treetop.models.layers import Rotary
from treetop.models.mixers.recurrences import MambaSpec
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights


class Mamba2:
    """An `Attention` whose `attend` keeps a state. name: of its parameters."""

    def __init__(self, spec: MambaSpec, weights: Weights, name: str, layer: int, ops: Ops) -> None:
        self.spec, self._layer, self._ops = spec.of_rank(ops.parallel.size), layer, ops
        self.inputs, self.output = weights.linear(f"{name}.zxbcdt"), weights.linear(f"{name}.output")
        self.products: list[Product] = [self.inputs, self.output]
        self._conv, self._conv_bias = weights[f"{name}.conv"], weights.pop(f"{name}.conv_bias")
        self._rate, self._bias = rates_of(weights[f"{name}.rate"]), weights[f"{name}.dt_bias"]
        self._skip, self._norm = weights[f"{name}.skip"], weights.pop(f"{name}.norm")

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        spec, dtype = self.spec, x.dtype
        parts = self.inputs(x if spec.of_input == 1 else x * spec.of_input)
        widths = (spec.inner, spec.inner, spec.keys, spec.keys, spec.heads)
        each = parts.split(widths, dim=-1)
        if any(scale != 1 for scale in spec.scales):
            each = tuple(part * scale for part, scale in zip(each, spec.scales, strict=True))
        mixed = attend.convolve(self._layer, torch.cat(each[1:4], dim=-1), self._conv, self._conv_bias)
        wide = self._rate.dtype
        value, key, query = self._ops.functions.silu(mixed).to(wide).split(widths[1:4], dim=-1)
        value = value.unflatten(-1, (spec.heads, spec.head_dim))
        key, query = (part.unflatten(-1, (spec.groups, spec.state_dim)) for part in (key, query))
        step = self._ops.functions.softplus(each[4].to(wide) + self._bias).clamp(*spec.limits)
        given = StateInputs(query, key, step[..., None] * value, self._rate * step, None)
        out = attend.recur(self._layer, given) + self._skip[:, None] * value
        made = self.output.parts(self._gated(out.flatten(2), each[0].to(wide)).to(dtype))
        return self._ops.parallel.share(made if spec.of_output == 1 else made * spec.of_output)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z: [rows, n, inner]."""
        gate = self._ops.functions.silu(z)
        if self._norm is None:
            return y * gate
        if self.spec.norm == "norm first":
            return self._normed(y) * gate
        return self._normed(y * gate)

    def _normed(self, y: Tensor) -> Tensor:
        assert self._norm is not None
        by_group = y.unflatten(-1, (self.spec.norm_groups, -1))
        mean = self._ops.profile.total(by_group.square()) / by_group.shape[-1]
        normed: Tensor = (by_group * torch.rsqrt(mean + self.spec.norm_eps)).flatten(-2) * self._norm
        return normed


def mamba_params(spec: MambaSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks have whole groups of heads."""
    group = spec.inner // spec.groups  # numbers of a group's values
    widths = {"z": spec.inner, "x": spec.inner, "B": spec.keys, "C": spec.keys, "dt": spec.heads}
    units = {"z": group, "x": group, "B": spec.state_dim, "C": spec.state_dim, "dt": spec.heads // spec.groups}

    def cut(tensor: str, names: tuple[str, ...], *shape: int) -> tuple[CheckpointTensor, ...]:
        """Parts one below the other, each divided by itself. shape: of a row."""
        total, first, found = sum(widths[each] for each in names), 0, []
        for each in names:
            lines = partial(_lines, lines=slice(first, first + widths[each]), flat=shape[:1] == (1,))
            found.append(CheckpointTensor(f"{stored}.{tensor}", (total, *shape), lines, widths[each], unit=units[each]))
            first += widths[each]
        return tuple(found)

    everything, mixed = ("z", "x", "B", "C", "dt"), ("x", "B", "C")
    rows, channels = sum(widths.values()), spec.inner + 2 * spec.keys
    by_head = {"rate": "A_log", "dt_bias": "dt_bias", "skip": "D"}
    params = [
        Param(f"{name}.zxbcdt", (rows, hidden), cut("in_proj.weight", everything, hidden), "matrix", 0),
        Param(f"{name}.conv", (channels, spec.taps), cut("conv1d.weight", mixed, 1, spec.taps), "vector", 0),
        *(
            replace(
                vector(
                    f"{name}.{ours}", CheckpointTensor(f"{stored}.{theirs}", (spec.heads,), unit=units["dt"]), shard=0
                ),
                wide=True,
            )
            for ours, theirs in by_head.items()
        ),
        matrix(
            f"{name}.output", CheckpointTensor(f"{stored}.out_proj.weight", (hidden, spec.inner), unit=group), shard=1
        ),
    ]
    if spec.conv_bias:
        params.append(Param(f"{name}.conv_bias", (channels,), cut("conv1d.bias", mixed), "vector", 0))
    if spec.norm is not None:
        weight = CheckpointTensor(f"{stored}.norm.weight", (spec.inner,), unit=group)
        params.append(replace(vector(f"{name}.norm", weight, shard=0), wide=True))
    if spec.bias:
        params.append(Param(f"{name}.zxbcdt_bias", (rows,), cut("in_proj.bias", everything), "vector", 0))
        params.append(
            vector(f"{name}.output_bias", CheckpointTensor(f"{stored}.out_proj.bias", (hidden,)), shard="first")
        )
    return params


def _lines(stored: Tensor, lines: slice, flat: bool) -> Tensor:
    return stored[lines].squeeze(1) if flat else stored[lines]
