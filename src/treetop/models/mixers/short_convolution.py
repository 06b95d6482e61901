"""A short convolution between two gates: out((c * conv(b * x))), of which b, c and x are one product of the input.

No activation and no recurrence: what a row keeps is the convolution's last taps - 1 inputs.
Source: LFM2, `transformers`' lfm2.
"""

from functools import partial

from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.table import Ops
from treetop.models.layers import Rotary
from treetop.models.mixers.recurrences import ConvSpec
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights


class ShortConvolution:
    """An `Attention` whose `attend` keeps a window. name: of its parameters."""

    def __init__(self, weights: Weights, name: str, layer: int, ops: Ops) -> None:
        self._layer, self._ops = layer, ops
        self.inputs, self.output = weights.linear(f"{name}.bcx"), weights.linear(f"{name}.output")
        self.products: list[Product] = [self.inputs, self.output]
        self._conv, self._bias = weights[f"{name}.conv"], weights.pop(f"{name}.conv_bias")

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        before, after, x = self.inputs(x).chunk(3, dim=-1)
        out = after * attend.convolve(self._layer, before * x, self._conv, self._bias)
        return self._ops.parallel.share(self.output.parts(out))


def conv_params(spec: ConvSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks have equal parts of the channels."""
    wide = spec.channels

    def thirds(end: str, *shape: int) -> list[CheckpointTensor]:
        cuts = (partial(_third, index=index) for index in range(3))
        return [CheckpointTensor(f"{stored}.in_proj.{end}", (3 * wide, *shape), cut, wide) for cut in cuts]

    taps = CheckpointTensor(f"{stored}.conv.weight", (wide, 1, spec.taps), _squeezed, wide)
    params = [
        Param(f"{name}.bcx", (3 * wide, hidden), tuple(thirds("weight", hidden)), "matrix", 0),
        matrix(f"{name}.output", CheckpointTensor(f"{stored}.out_proj.weight", (hidden, wide)), shard=1),
        Param(f"{name}.conv", (wide, spec.taps), (taps,), "vector", 0),
    ]
    if spec.bias:
        params += [
            Param(f"{name}.bcx_bias", (3 * wide,), tuple(thirds("bias")), "vector", 0),
            vector(f"{name}.output_bias", CheckpointTensor(f"{stored}.out_proj.bias", (hidden,)), shard="first"),
            vector(f"{name}.conv_bias", CheckpointTensor(f"{stored}.conv.bias", (wide,)), shard=0),
        ]
    return params


def _third(stored: Tensor, index: int) -> Tensor:
    return stored.chunk(3)[index]


def _squeezed(stored: Tensor) -> Tensor:
    return stored.squeeze(1)
