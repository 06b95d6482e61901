"""Matrix products with weights, each in the form that is fastest where the weight lies.

On a CPU it is the call that timing chose for each number of rows (`kernels.products`). On a GPU a product of few rows
is a kernel of ours (`kernels.skinny_gemm`), for the fewest with the weight in 12 bits if it was compressed
(`kernels.packed_weights`), and one of many is the vendor's.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.fused import gate_mul, gate_mul_reference, joined
from treetop.kernels.gate import Gate
from treetop.kernels.packed_weights import compress_if_faster, compressed_rows
from treetop.kernels.products import ROW_CLASSES, Call, CpuProduct, default_call
from treetop.kernels.skinny_gemm import choose_launch, gated_rows, skinny_gemm
from treetop.kernels.triton_guard import GpuTraits


class Linear(Protocol):
    """`x @ weight.T + bias` for x [..., in], weight [out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [..., out]."""
        ...

    def parts(self, x: Tensor) -> Tensor:
        """Returns [parts, ..., out], float32 if there is more than one part; the product is their sum."""
        ...


GatedLinear = Callable[[Tensor], Tensor]
"""Activated gate times up for x [..., in], with gate and up the halves of a product. Returns [..., out / 2]."""


class LibraryLinear:
    """The library's product: on a CPU by the calls given, or `default_call`; elsewhere `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, calls: Sequence[Call] | None = None) -> None:
        """calls: by row class, see `kernels.products.ROW_CLASSES`."""
        self._product: Callable[[Tensor], Tensor] = lambda x: F.linear(x, weight, bias)
        if weight.device.type == "cpu":
            self._product = CpuProduct(weight, bias, calls or [default_call(weight.dtype)] * len(ROW_CLASSES))

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def parts(self, x: Tensor) -> Tensor:
        return self._product(x)[None]


class SkinnyLinear:
    """Few rows by a kernel of ours, more by `F.linear`. weight: [out, in], float16 or bfloat16.

    compressed: keep the weight in 12 bits too, if products with that are faster and there is no bias.
    """

    def __init__(self, weight: Tensor, gpu: GpuTraits, compressed: bool = False, bias: Tensor | None = None) -> None:
        self._weight = _GpuWeight(weight, None, gpu, compressed and bias is None, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return joined(self.parts(x)).to(x.dtype)

    def saved_bytes(self, rows: int) -> int:
        """Bytes less than the whole weight's that a product of so many rows reads of its weight."""
        return self._weight.saved_bytes(rows)

    def parts(self, x: Tensor) -> Tensor:
        parts = self._weight.few(x)
        return (
            F.linear(x, self._weight.whole, self._weight.bias)[None]
            if parts is None
            else parts.view(len(parts), *x.shape[:-1], -1)
        )


class SkinnyGated:
    """`GatedLinear` over a weight [2 * out, in], gate first, as `SkinnyLinear`."""

    def __init__(self, weight: Tensor, gpu: GpuTraits, compressed: bool = False, kind: Gate = "silu") -> None:
        self._weight, self._kind, self._gpu = _GpuWeight(weight, kind, gpu, compressed), kind, gpu

    def __call__(self, x: Tensor) -> Tensor:
        out = self._weight.few(x)
        if out is None:
            return gate_mul(F.linear(x, self._weight.whole), self._kind, self._gpu)
        return out.view(*x.shape[:-1], -1)

    def saved_bytes(self, rows: int) -> int:
        """As `SkinnyLinear.saved_bytes`."""
        return self._weight.saved_bytes(rows)


class _GpuWeight:
    """A weight, perhaps in 12 bits too, and its products of few rows. kind: of a gated one's gate."""

    def __init__(
        self, whole: Tensor, kind: Gate | None, gpu: GpuTraits, compressed: bool, bias: Tensor | None = None
    ) -> None:
        self.whole, self.bias, self._kind, self._gpu = whole.contiguous(), bias, kind, gpu
        self._compressed = compress_if_faster(self.whole, kind is not None, gpu) if compressed else None

    def saved_bytes(self, rows: int) -> int:
        if self._compressed is None or self._compressed.launch(rows) is None:
            return 0
        return self.whole.nbytes - self._compressed.weight.nbytes

    def few(self, x: Tensor) -> Tensor | None:
        """Parts [parts, rows, out], or [rows, out / 2] if gated, for x [..., in]; None where the vendor's is faster."""
        rows, kind, gpu = x.numel() // x.shape[-1], self._kind, self._gpu
        if self._compressed is not None:
            compressed_launch = self._compressed.launch(rows)
            if compressed_launch is not None:
                return compressed_rows(_as_rows(x), self._compressed.weight, compressed_launch, gpu, kind or "silu")
        launch = choose_launch(rows, *self.whole.shape, kind is not None, gpu)
        if launch is None:
            return None
        if kind is None:
            return skinny_gemm(_as_rows(x), self.whole, launch, gpu, self.bias)
        return gated_rows(_as_rows(x), self.whole, launch, gpu, kind)


def library_gated(
    weight: Tensor, bias: Tensor | None = None, calls: Sequence[Call] | None = None, kind: Gate = "silu"
) -> GatedLinear:
    """`GatedLinear` of library calls, as `LibraryLinear`."""
    linear = LibraryLinear(weight, bias, calls)
    return lambda x: gate_mul_reference(linear(x), kind)


def _as_rows(x: Tensor) -> Tensor:
    """x [..., in] as contiguous [rows, in]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
