"""Linear attention with a delta rule: the gated delta net of Qwen3-Next and Qwen3.5.

q, k and v of a token go side by side through a causal depthwise convolution and SiLU; z, a and b do not. From there the
recurrence of `kernels.recurrent.states`, in float32: queries and keys of length 1, queries times key_dim^-1/2,
beta = sigmoid(b), g = -e^A_log softplus(a + dt_bias). What it gives is normed per value head, then gated by SiLU(z).

How checkpoints hold it (`LinearSpec.stored`): "by key head" has two tensors, whose rows are, of each key head, its q,
its k, and v and z of the value heads that read it; and b and a of these. "by part" has q, k and v in one, and z, b, a.
"by tensor" has each by itself, their convolutions too, as OLMo Hybrid, whose beta is up to 2.

Source: `transformers`' qwen3_next, qwen3_5 and olmo_hybrid; Gated Delta Networks, arXiv:2412.06464.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from treetop.attention.layer import Attend, nodes_of
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.recurrent.gates import rates_of
from treetop.kernels.recurrent.step import DeltaNet
from treetop.kernels.table import Ops
from treetop.models.config import LinearSpec
from treetop.models.layers import Rotary
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights
from treetop.weights.packed import one_below_the_other


class LinearAttention:
    """An `Attention` whose `attend` keeps a state. name: of its parameters. eps: of the norm of its output."""

    def __init__(self, spec: LinearSpec, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> None:
        self.spec, self.layer, self._ops = spec.of_rank(ops.parallel.size), layer, ops
        inputs, gates = weights.linear(f"{name}.qkvz"), weights.linear(f"{name}.ba")
        both = one_below_the_other(inputs, gates)
        self._read = [inputs, gates] if both is None else [both]
        self.output = weights.linear(f"{name}.output")
        self.products: list[Product] = [*self._read, self.output]
        rate, bias = rates_of(weights[f"{name}.rate"]), weights[f"{name}.dt_bias"]
        conv, norm = weights[f"{name}.conv"], weights[f"{name}.norm"]
        eps = eps if spec.norm_eps is None else spec.norm_eps
        self._net = DeltaNet(conv, norm, eps, rate, bias, self.spec.key_heads, spec.key_dim, spec.of_beta)

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        channels, values, nodes = sum(self.spec.widths), self.spec.widths[2], nodes_of(attend)
        qkvz, *apart = (read(x) for read in self._read)
        gates = apart[0] if apart else qkvz[..., channels + values :]
        mixed, z = qkvz[..., : channels + values].split([channels, values], dim=-1)
        out = None if nodes is None else nodes.step(self.layer, mixed, z, gates, self._net)
        if out is None:
            out = self._in_steps(mixed, z, gates, attend)
        return self._ops.parallel.share(self.output.parts(out))

    def _in_steps(self, mixed: Tensor, z: Tensor, gates: Tensor, attend: Attend) -> Tensor:
        """What the output's product reads, of any number of tokens a row."""
        net = self._net
        mixed = attend.convolve(self.layer, mixed, net.conv, None)
        inputs = self._ops.delta_inputs(mixed, gates, net.rate, net.bias, net.key_heads, net.key_dim)
        if net.of_beta != 1:
            inputs = inputs.with_beta(net.of_beta)
        return self._ops.gated_norm(attend.recur(self.layer, inputs), z, net.norm, net.eps)


def linear_params(spec: LinearSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks have whole key heads, and the value heads that read them."""
    each = spec.heads // spec.key_heads
    dim, values = spec.key_dim, each * spec.value_dim
    ends = ("norm", "out_proj")
    if spec.stored == "by tensor":
        qkvz, ends = _each(spec, stored, hidden), ("o_norm", "o_proj")
        ba = [CheckpointTensor(f"{stored}.{gate}_proj.weight", (spec.heads, hidden), unit=each) for gate in "ba"]
    elif spec.stored == "by key head":
        qkvz = _by_key_head(f"{stored}.in_proj_qkvz.weight", spec, (dim, dim, values, values), hidden)
        ba = _by_key_head(f"{stored}.in_proj_ba.weight", spec, (each, each), hidden)
    else:
        z = CheckpointTensor(f"{stored}.in_proj_z.weight", (spec.widths[2], hidden), unit=values)
        qkvz = [*_by_part(f"{stored}.in_proj_qkv.weight", spec, hidden), z]
        ba = [CheckpointTensor(f"{stored}.in_proj_{gate}.weight", (spec.heads, hidden), unit=each) for gate in "ba"]
    taps = [
        CheckpointTensor(part.name, (spec.channels, 1, spec.taps), part.transform, part.rows, part.unit)
        for part in _by_part(f"{stored}.conv1d.weight", spec, spec.taps, squeeze=True)
    ]
    if spec.stored == "by tensor":
        taps = [
            CheckpointTensor(f"{stored}.{part}_conv1d.weight", (rows, 1, spec.taps), _squeezed, rows, unit)
            for part, rows, unit in zip("qkv", spec.widths, (dim, dim, values), strict=True)
        ]
    return [
        Param(f"{name}.qkvz", (spec.channels + spec.widths[2], hidden), tuple(qkvz), "matrix", 0),
        Param(f"{name}.ba", (2 * spec.heads, hidden), tuple(ba), "matrix", 0),
        Param(f"{name}.conv", (spec.channels, spec.taps), tuple(taps), "vector", 0),
        _by_head(f"{name}.rate", f"{stored}.A_log", spec.heads, each),
        _by_head(f"{name}.dt_bias", f"{stored}.dt_bias", spec.heads, each),
        vector(f"{name}.norm", CheckpointTensor(f"{stored}.{ends[0]}.weight", (spec.value_dim,))),
        matrix(
            f"{name}.output",
            CheckpointTensor(f"{stored}.{ends[1]}.weight", (hidden, spec.widths[2]), unit=values),
            shard=1,
        ),
    ]


def _by_head(name: str, tensor: str, heads: int, unit: int) -> Param:
    """A number a value head."""
    return replace(vector(name, CheckpointTensor(tensor, (heads,), unit=unit), shard=0), wide=True)


def _by_key_head(tensor: str, spec: LinearSpec, widths: tuple[int, ...], hidden: int) -> list[CheckpointTensor]:
    """Parts whose rows stand one after the other within each key head's. widths: of a key head."""
    whole, first, found = (spec.key_heads * sum(widths), hidden), 0, []
    for width in widths:
        cut = partial(_of_each_head, heads=spec.key_heads, lines=slice(first, first + width))
        found.append(CheckpointTensor(tensor, whole, cut, spec.key_heads * width, unit=width))
        first += width
    return found


def _by_part(tensor: str, spec: LinearSpec, width: int, squeeze: bool = False) -> list[CheckpointTensor]:
    """q, k and v one below the other."""
    units = (spec.key_dim, spec.key_dim, spec.widths[2] // spec.key_heads)
    first, found = 0, []
    for rows, unit in zip(spec.widths, units, strict=True):
        cut = partial(_rows, lines=slice(first, first + rows), squeeze=squeeze)
        found.append(CheckpointTensor(tensor, (sum(spec.widths), width), cut, rows, unit=unit))
        first += rows
    return found


def _each(spec: LinearSpec, stored: str, hidden: int) -> list[CheckpointTensor]:
    """q, k, v and z, a tensor each."""
    values = spec.widths[2] // spec.key_heads
    widths = zip("qkvg", (*spec.widths, spec.widths[2]), (spec.key_dim, spec.key_dim, values, values), strict=True)
    return [CheckpointTensor(f"{stored}.{part}_proj.weight", (rows, hidden), unit=unit) for part, rows, unit in widths]


def _squeezed(stored: Tensor) -> Tensor:
    return stored.squeeze(1)


def _rows(stored: Tensor, lines: slice, squeeze: bool) -> Tensor:
    return stored[lines].squeeze(1) if squeeze else stored[lines]


def _of_each_head(stored: Tensor, heads: int, lines: slice) -> Tensor:
    by_head: Tensor = stored.unflatten(0, (heads, -1))
    return by_head[:, lines].flatten(0, 1)
