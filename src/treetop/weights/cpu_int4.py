"""Products of 4-bit integers on a CPU that stay packed: PyTorch's own, in bfloat16.

The operation multiplies inputs in bfloat16 with (code - 8) * scale + number of code 8, in float32 of scales and numbers
in bfloat16, and adds along a row one after another: a row's bits depend on it alone, for any number of rows. A weight
differs from the decoded one by the rounding of its group's two numbers, where that one is rounded itself.
Few rows read a quarter of bfloat16's bytes; many rows are slower than oneDNN's product where a CPU has a unit for that.
In float32 the operation is slower than what it would replace: there weights are decoded.
Source: PyTorch 2.13, `aten/src/ATen/native/cpu/int4mm_kernel.cpp`.
"""

from math import prod

import torch
from torch import Tensor

from treetop.kernels.gemm.quantized_weight import MIDDLE, QuantizedWeight, QuantScheme

_GROUPS = (32, 64, 128, 256)
_LINES = 16
"""Lines of a weight are a multiple of it."""


def takes(scheme: QuantScheme, shape: tuple[int, ...]) -> bool:
    """Whether the operation has weights of a scheme and shape."""
    fits = scheme.numbers == "int4" and scheme.scales == "float32" and scheme.group in _GROUPS
    return fits and len(shape) == 2 and shape[0] % _LINES == 0 and shape[1] % scheme.group == 0


class Int4Linear:
    """`Linear` over a weight [out, in] that `takes` has, for x in bfloat16."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        assert takes(weight.scheme, tuple(weight.shape))
        codes = torch.stack([weight.codes & 0xF, weight.codes >> 4], -1).flatten(-2)
        if weight.minimum is not None:
            middle = weight.minimum + MIDDLE * weight.scale
        elif weight.zero is not None:
            middle = (MIDDLE - weight.zero.float()) * weight.scale
        else:
            middle = torch.zeros_like(weight.scale)
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        self._group, self._out, self._bias = weight.scheme.group, weight.shape[0], bias
        self._numbers = torch.stack([weight.scale, middle], -1).transpose(0, 1).to(torch.bfloat16).contiguous()
        self.numbers = prod(weight.shape)
        self._nbytes: int = self._codes.nbytes + self._numbers.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, self._group, self._numbers)
        return (out if self._bias is None else out + self._bias).view(*x.shape[:-1], self._out)

    def parts(self, x: Tensor) -> Tensor:
        return self(x)[None]

    def read_bytes(self, rows: int) -> int:
        return self._nbytes
