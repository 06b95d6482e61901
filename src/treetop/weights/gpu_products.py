"""Products with weights on a GPU in which a row's bits depend on it alone (`--exactness bits`): k is never cut.

A product on tensor cores adds up k in one order and in float32; its bits depend on where k is cut, and on nothing else
of a launch. Few rows go to our kernel (`kernels.gemm.skinny_gemm`) with launches that do not cut it. More go to the
library at row counts of which a probe found that it does not either (`Probed.counts`), padded up to one of these, and
many in slices; where there is none, our kernel serves again. A sum is rounded; then comes a bias, which is rounded
again, or a gate. For the fewest rows a weight may be read in 13 bits (`weights.ordered`), if a probe finds the same
bits.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.exact.probe import adversarial, differing, same_bits
from treetop.kernels.exact import padded_rows
from treetop.kernels.fused import gate_mul
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.ordered_weights import MAX_ROWS as ORDERED_ROWS
from treetop.kernels.gemm.ordered_weights import ordered_gemm
from treetop.kernels.gemm.skinny_gemm import MAX_ROWS, choose_no_split_k, gated_rows, measured_no_split_k, skinny_gemm
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.weights.cpu_products import Shape
from treetop.weights.ordered import offers, ordered_if_faster

MOST_ROWS = 8192
"""Of one call of the library; what has more is cut."""
FEWEST_OF_LIBRARY = 65
"""Fewer rows always go to our kernel, and up to 256 where that was measured to be faster."""
_MOST_NUMBERS = 2**28
"""Of the result of one probed call, which bounds its memory."""
_MOST_PADDING = 1.5
"""Times the rows: a call of the library that is padded to more is slower than our kernel."""
COUNTS = tuple(sorted({padded_rows(rows) for rows in range(FEWEST_OF_LIBRARY, MOST_ROWS + 1)}))
"""Row counts at which the library is tried."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found of products with weights of a shape.

    counts: row counts of `COUNTS` at which the library's product has the bits of our kernel's, ascending.
    ordered: whether products with the weight in 13 bits have them.
    """

    shape: Shape
    counts: tuple[int, ...]
    ordered: bool = False

    def padded_to(self, rows: int) -> int | None:
        """The row count at which the library serves for `rows`; None where our kernel does."""
        at = bisect_left(self.counts, rows)
        found = self.counts[at] if at < len(self.counts) else None
        return found if found is not None and found <= _MOST_PADDING * rows else None

    def served(self) -> str:
        """Who serves, as text, the library's counts as spans of those that follow each other."""
        spans = list[str]()
        for first, last in _spans(self.counts):
            spans.append(f"{first} to {last}" if first < last else f"{first}")
        return f"the library at {', '.join(spans)} rows" if spans else "our kernel at all row counts"


def _spans(counts: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(counts) + 1):
        if at == len(counts) or COUNTS.index(counts[at]) != COUNTS.index(counts[at - 1]) + 1:
            yield counts[start], counts[at - 1]
            start = at


class NoSplitKProduct:
    """The product with a weight, of any number of rows; see the module.

    kind: of a gated weight's gate, or None.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: Gate | None,
        gpu: GpuTraits,
        probed: Probed,
        copies: bool = False,
    ) -> None:
        """weight: [n, k], float16 or bfloat16, k a multiple of 16. copies: keep it in 13 bits too, if that is faster
        and was probed.
        """
        self.weight, self._bias, self._kind, self._gpu, self._probed = weight.contiguous(), bias, kind, gpu, probed
        self._fused = kind if bias is None else None  # the kernel's gate has no bias
        ordered = copies and probed.ordered
        self._ordered = ordered_if_faster(self.weight, self._fused is not None, gpu) if ordered else None
        self._served = dict[int, int | None]()

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns [..., n], or [..., n / 2] of a gated weight; contiguous."""
        count = x.numel() // x.shape[-1]
        if self._rows_of_library(count) == count and _is_aligned(x):
            return self._finished(library(x, self.weight))
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._of_rows(rows if _is_aligned(rows) else rows.clone()).view(*x.shape[:-1], -1)

    def beside(self, new: "NoSplitKProduct") -> list[tuple[Any, Any]] | None:
        """`UpdatedInPlace`: who serves, and whether there are 13 bits, stays as it is. None for numbers that have none.

        The rows that each has served are no difference."""
        names = ("weight", "_bias", "_kind", "_fused", "_gpu", "_probed")
        pairs = [(getattr(self, name), getattr(new, name)) for name in names]
        if self._ordered is None:
            return pairs
        return None if new._ordered is None else [*pairs, (self._ordered, new._ordered)]

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weight that a product of so many rows reads."""
        ordered = None if self._ordered is None or self._ordered.launch(rows) is None else self._ordered.weight
        return self.weight.nbytes if ordered is None else ordered.nbytes

    def _rows_of_library(self, count: int) -> int | None:
        """With how many rows the library serves so many, at most `MOST_ROWS`; None where our kernel does, or slices."""
        if count not in self._served:
            (n, k), few = self.weight.shape, count < FEWEST_OF_LIBRARY
            ours = few or measured_no_split_k(count, n, k, self._fused is not None, self._gpu) is not None
            self._served[count] = None if ours or count > MOST_ROWS else self._probed.padded_to(count)
        return self._served[count]

    def _of_rows(self, x: Tensor) -> Tensor:
        count = len(x)
        if count > MOST_ROWS:
            return torch.cat([self._of_rows(part) for part in x.split(MOST_ROWS)])
        padded = self._rows_of_library(count)
        if padded is None:
            return self._kernel(x)
        if padded == count:
            return self._finished(library(x, self.weight))
        wider = x.new_empty((padded, x.shape[1]))  # a row has its bits beside any others
        wider[:count] = x
        return self._finished(library(wider, self.weight)[:count])

    def _finished(self, out: Tensor) -> Tensor:
        """Of the library's product."""
        if self._bias is not None:
            out += self._bias
        return out if self._kind is None else gate_mul(out, self._kind, self._gpu)

    def _kernel(self, x: Tensor) -> Tensor:
        few = None if self._ordered is None else self._ordered.launch(len(x))
        if self._ordered is not None and few is not None:
            out = ordered_gemm(x, self._ordered.weight, few, self._gpu, self._bias, self._fused or "silu")
            return out if self._kind is None or self._fused else gate_mul(out, self._kind, self._gpu)
        launch = choose_no_split_k(len(x), *self.weight.shape, self._fused is not None, self._gpu)
        assert launch is not None
        if self._fused is not None:
            return gated_rows(x, self.weight, launch, self._gpu, self._fused, rounds=True)
        out = skinny_gemm(x, self.weight, launch, self._gpu, self._bias, rounds=True)[0]
        return out if self._kind is None else gate_mul(out, self._kind, self._gpu)


def _is_aligned(x: Tensor) -> bool:
    """Contiguous and where a library's fastest kernels want it, as in a probe."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def library(x: Tensor, weight: Tensor) -> Tensor:
    """The library's product of x [..., k] and weight [n, k]: the call that is probed and that serves. Of rows in any
    shape it is one product of all, and takes the host less than one of x as rows."""
    return F.linear(x, weight)


def forbid_split_k() -> None:
    """Tell PyTorch, for the process, that its products in 16 bits are to be summed in float32 to their end, uncut.

    That k is not to be cut only cuBLASLt can be told, so its kernels serve.
    """
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = False, False  # and no split of k
    matmul.allow_fp16_reduced_precision_reduction = False, False
    matmul.allow_fp16_accumulation = False


def probe(
    shape: Shape, gated: bool, dtype: torch.dtype, device: torch.device, most: int = MOST_ROWS
) -> tuple[Probed, str | None]:
    """Compare the library at each of `COUNTS`, and our kernel at each kind of launch, with our kernel at most rows.

    gated: there are weights of this shape with a gate. most: rows that products will have. Returns what was found, and
    what of our own kernel has other bits, None if nothing has. Numbers are of widely different size, so that another
    order of a sum shows (`kernels.exact`).
    """
    n, k = shape
    most = max(FEWEST_OF_LIBRARY, min(most, MOST_ROWS, _MOST_NUMBERS // n))
    generator, gpu = torch.Generator(device).manual_seed(n + k), gpu_traits(device)
    weight = (torch.randn((n, k), generator=generator, device=device) * k**-0.5).to(dtype)
    x = adversarial((most, k), generator).to(dtype)
    launch = choose_no_split_k(MAX_ROWS + 1, n, k, False, gpu)
    assert launch is not None
    want = skinny_gemm(x, weight, launch, gpu, rounds=True)[0]

    def differ(call: Callable[[Tensor], Tensor], counts: tuple[int, ...]) -> list[int]:
        return list(differing(call, (x,), [rows for rows in counts if rows <= most], generator, want))

    not_alike = set(differ(partial(library, weight=weight), COUNTS))
    ordered = _is_ordered_alike(weight, gated, x[:ORDERED_ROWS], want, gpu)
    found = Probed(shape, tuple(rows for rows in COUNTS if rows <= most and rows not in not_alike), ordered)
    few = differ(NoSplitKProduct(weight, None, None, gpu, Probed(shape, ())), OWN_COUNTS)
    if few:
        return found, f"products [{n}, {k}] of {', '.join(map(str, few))} rows"
    if gated:
        for kind in get_args(Gate):
            fused = NoSplitKProduct(weight, None, kind, gpu, Probed(shape, ()))
            for rows in (rows for rows in OWN_COUNTS if rows <= most):
                if not same_bits(fused(x[:rows]), gate_mul(want[:rows], kind, gpu)):
                    return found, f"gated products [{n}, {k}], {kind}, of {rows} rows"
    return found, None


def _is_ordered_alike(weight: Tensor, gated: bool, x: Tensor, want: Tensor, gpu: GpuTraits) -> bool:
    """Whether products with a weight in 13 bits are offered and have the bits of `want`, of rows from the first on."""
    n, k = weight.shape
    able = Probed((n, k), (), True)
    if weight.dtype != torch.bfloat16 or not offers(n, k, gated, gpu):
        return False
    kinds: tuple[Gate | None, ...] = (None, *get_args(Gate)) if gated else (None,)
    counts = [rows for rows in OWN_COUNTS if rows <= len(x)]
    for kind in kinds:
        product = NoSplitKProduct(weight, None, kind, gpu, able, copies=True)
        for rows in counts:
            right = want[:rows] if kind is None else gate_mul(want[:rows], kind, gpu)
            if not same_bits(product(x[:rows]), right):
                return False
    return True


OWN_COUNTS = (1, 2, 7, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 193, 256, 257, 640)
"""Row counts of every kind of launch of our kernel, with last blocks of rows that are full and that are not."""
