"""Products with plain weights, each in the form that is fastest where the weight lies.

On a CPU it is the call that timing chose for each number of rows (`weights.cpu_products`). On a GPU a product of few
rows is a kernel of ours (`kernels.gemm.skinny_gemm`), for the fewest with the weight in 12 bits if it was compressed
(`weights.lossless`), and one of many is the vendor's. Where a row's bits may depend on it alone, k is not cut, and
the weight has its 16 bits, or for the fewest 13 (`weights.gpu_products`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, get_num_threads

from treetop.kernels.exact import LIBRARY
from treetop.kernels.fused import batch_invariant_functions, gate_mul, gate_mul_reference, join
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.adapter_rows import AdapterFactors, RowTiles
from treetop.kernels.gemm.adapter_sums import MOST_ROWS, AdapterSums, sums_of
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, lossless_gemm
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, choose_launch, gated_rows, skinny_gemm
from treetop.kernels.triton_guard import GpuTraits
from treetop.weights.cpu_products import ROW_CLASSES, ChosenProduct, CpuProduct, default_call
from treetop.weights.gpu_products import NoSplitKProduct
from treetop.weights.lossless import compress_if_faster


class LibraryLinear:
    """The library's product: on a CPU as it was chosen, or by `default_call`; elsewhere `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, chosen: ChosenProduct | None = None) -> None:
        self.numbers, self._nbytes = weight.numel(), weight.nbytes
        self._product: Callable[[Tensor], Tensor] = lambda x: F.linear(x, weight, bias)
        if chosen is not None:
            self._product = chosen.product(weight, bias)
        elif weight.device.type == "cpu":
            self._product = CpuProduct(weight, bias, [default_call(weight.dtype)] * len(ROW_CLASSES))

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def parts(self, x: Tensor) -> Tensor:
        return self._product(x)[None]

    def read_bytes(self, rows: int) -> int:
        return self._nbytes


class LibraryGated:
    """`GatedLinear` of library calls, as `LibraryLinear`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, chosen: ChosenProduct | None = None, kind: Gate = "silu"
    ) -> None:
        self.numbers, self._nbytes = weight.numel(), weight.nbytes
        exact = chosen is not None and chosen.exact
        functions = batch_invariant_functions(kind, weight.shape[0], get_num_threads()) if exact else LIBRARY
        gate = partial(gate_mul_reference, kind=kind, functions=functions)
        if chosen is not None:
            self._product = chosen.product(weight, bias, gate)
        else:
            linear = LibraryLinear(weight, bias)
            self._product = lambda x: gate(linear(x))

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def read_bytes(self, rows: int) -> int:
        return self._nbytes


class SkinnyLinear:
    """Few rows by a kernel of ours, more by `F.linear`.

    weight: [out, in], float16 or bfloat16.

    compressed: keep the weight in 12 bits too, if products with that are faster and there is no bias.
    """

    def __init__(self, weight: Tensor, gpu: GpuTraits, compressed: bool = False, bias: Tensor | None = None) -> None:
        self._weight, self._gpu = _GpuWeight(weight, None, gpu, compressed and bias is None, bias), gpu
        self.numbers, self.read_bytes = weight.numel(), self._weight.read_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return join(self.parts(x), x.dtype, self._gpu)

    def parts(self, x: Tensor) -> Tensor:
        parts = self._weight.few(x)
        return (
            F.linear(x, self._weight.whole, self._weight.bias)[None]
            if parts is None
            else parts.view(len(parts), *x.shape[:-1], -1)
        )

    def adapted(self, x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor | None:
        parts = self._weight.few_adapted(x, factors, tiles)
        return None if parts is None else parts.view(len(parts), *x.shape[:-1], -1)


class SkinnyGated:
    """`GatedLinear` over a weight [2 * out, in], gate first, as `SkinnyLinear`."""

    def __init__(self, weight: Tensor, gpu: GpuTraits, compressed: bool = False, kind: Gate = "silu") -> None:
        self._weight, self._kind, self._gpu = _GpuWeight(weight, kind, gpu, compressed), kind, gpu
        self.numbers, self.read_bytes = weight.numel(), self._weight.read_bytes

    def __call__(self, x: Tensor) -> Tensor:
        out = self._weight.few(x)
        if out is None:
            return gate_mul(F.linear(x, self._weight.whole), self._kind, self._gpu)
        return out.view(*x.shape[:-1], -1)

    def parts(self, x: Tensor) -> Tensor:
        """[1, ..., 2 * out]: gates and ups that are not activated, of many rows."""
        return F.linear(x, self._weight.whole)[None]

    def adapted_gates(self, x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor | None:
        out = self._weight.few_adapted(x, factors, tiles)
        return None if out is None else out.view(*x.shape[:-1], -1)


class NoSplitKLinear:
    """`Linear` of `NoSplitKProduct`; called without a gate's kind."""

    def __init__(self, product: NoSplitKProduct) -> None:
        self._product, self.numbers = product, product.weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def parts(self, x: Tensor) -> Tensor:
        return self._product(x)[None]

    def read_bytes(self, rows: int) -> int:
        return self._product.read_bytes(rows)


class _GpuWeight:
    """A weight, perhaps in 12 bits too, and its products of few rows. kind: of a gated one's gate."""

    def __init__(
        self, whole: Tensor, kind: Gate | None, gpu: GpuTraits, compressed: bool, bias: Tensor | None = None
    ) -> None:
        self.whole, self.bias, self._kind, self._gpu = whole.contiguous(), bias, kind, gpu
        self._compressed = compress_if_faster(self.whole, kind is not None, gpu) if compressed else None

    def beside(self, new: "_GpuWeight") -> list[tuple[Any, Any]] | None:
        """`UpdatedInPlace`: whatever a start would choose for the new numbers, launches stay as they are."""
        pairs = [(getattr(self, name), getattr(new, name)) for name in ("whole", "bias", "_kind", "_gpu")]
        if self._compressed is None:
            return pairs
        other = self._compressed.fitting(new.whole, new._compressed)
        return None if other is None else [*pairs, (self._compressed.weight, other)]

    def read_bytes(self, rows: int) -> int:
        if self._compressed is None or self._compressed.launch(rows) is None:
            return self.whole.nbytes
        return self._compressed.weight.nbytes

    def few(self, x: Tensor, sums: AdapterSums | None = None) -> Tensor | None:
        """Parts [parts, rows, out], or [rows, out / 2] if gated, for x [..., in]; None where the vendor's is faster.

        sums: what adapters add.
        """
        launch = self._launch(x)
        if launch is None:
            return None
        if isinstance(launch, LosslessLaunch):
            assert self._compressed is not None
            return lossless_gemm(_as_rows(x), self._compressed.weight, launch, self._gpu, self._kind or "silu", sums)
        if self._kind is None:
            return skinny_gemm(_as_rows(x), self.whole, launch, self._gpu, self.bias, sums=sums)
        return gated_rows(_as_rows(x), self.whole, launch, self._gpu, self._kind, sums=sums)

    def few_adapted(self, x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor | None:
        """`few` for x [rows, n, in] with what each row's adapter adds; None for more tokens, too."""
        if x.numel() // x.shape[-1] > MOST_ROWS or self._launch(x) is None:
            return None
        x = x.contiguous()  # by no launch between the two
        return self.few(x, sums_of(x, factors, tiles, self._gpu))

    def _launch(self, x: Tensor) -> RowsLaunch | LosslessLaunch | None:
        rows = x.numel() // x.shape[-1]
        compressed = None if self._compressed is None else self._compressed.launch(rows)
        return compressed or choose_launch(rows, *self.whole.shape, self._kind is not None, self._gpu)


def _as_rows(x: Tensor) -> Tensor:
    """x [..., in] as contiguous [rows, in]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
