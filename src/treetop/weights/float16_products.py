"""Products of few float32 rows on a CPU with weights in 16 bits, where these lose nothing.

A product of few rows takes as long as its weight takes to be read. Numbers of a checkpoint in bfloat16 or float16 are,
but for one power of two, numbers of float16; FBGEMM holds a weight so, and makes float32 of it in registers: no term of
the sum is another. It goes through the weight once for as many rows as have a place in registers, 6 or 14.

Its sum is one chain, each output one accumulator that takes its terms in their order (but in pieces of 512 for what is
left of outputs in vectors). Another library's is a chain for each piece of k, and pieces are added one after another;
where k is cut alike the bits are the same. `same_sum` finds how, and so a row of few has the bits it has among many.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treetop.exact.probe import adversarial, same_bits

MOST_ROWS = 8
"""Of few."""
_PIECES = (1024, 512, 384, 256)
"""Of k, beside the whole, as libraries cut it."""
_TRIED = (1, 2, 3, 5, MOST_ROWS)


class Float16Weight:
    """A float32 weight [out, in] held in float16.

    unit: the power of two by which its numbers are divided. piece: columns of a sum that is a chain of its own.
    """

    def __init__(self, weight: Tensor, unit: float, piece: int) -> None:
        pack, scaled, self._call = torch.ops.quantized.linear_prepack_fp16, weight * (1 / unit), _operation()
        self._held: list[Any] = [pack(each.contiguous(), None) for each in scaled.split(piece, dim=1)]
        self._unit, self._piece = unit, piece

    @classmethod
    def of(cls, weight: Tensor, piece: int) -> "Float16Weight | None":
        """None of a weight with a number that is not float16's."""
        unit = unit_of(weight)
        return None if unit is None else cls(weight, unit, piece)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] float32, of two dimensions at least. Returns [..., out], contiguous.

        Below 2^-102 and above 2^112, where the largest weight is about 1, the power of two may lose bits of a sum.
        """
        if len(self._held) == 1:
            total: Tensor = self._call(x, self._held[0])
        else:
            first, *others = zip(x.split(self._piece, dim=-1), self._held, strict=True)
            total = self._call(*first)
            for each in others:
                total.add_(self._call(*each))
        return total.mul_(self._unit)

    def beside(self, new: "Float16Weight") -> None:
        """`UpdatedInPlace`: the library's own order takes no other numbers."""


def unit_of(weight: Tensor) -> float | None:
    """The power of two by which a float32 weight is float16's numbers, with the largest near their end; None where it
    is not."""
    largest = float(weight.abs().amax()) if weight.numel() else math.inf
    if not math.isfinite(largest):
        return None
    unit = 2.0 ** (math.frexp(largest)[1] - 16)
    return unit if torch.equal((weight * (1 / unit)).half().float() * unit, weight) else None


def same_sum(call: Callable[[Tensor], Tensor], weight: Tensor) -> int:
    """The pieces of k, `Float16Weight.piece`, with which few rows have the bits that `call` gives them among many.

    call: the product of [rows, in] with `weight`, [out, in], which are float16's numbers. 0 where there are none.
    Tried are numbers of widely different size.
    """
    width = weight.shape[1]
    x = adversarial((4 * MOST_ROWS, width), torch.Generator().manual_seed(width))
    want = call(x)
    for piece in (width, *(each for each in _PIECES if each < width)):
        own = Float16Weight.of(weight, piece)
        if own is None:
            return 0
        starts = [(start, count) for count in _TRIED for start in range(0, len(x) - count + 1, MOST_ROWS)]
        if all(same_bits(own(x[at : at + count]), want[at : at + count]) for at, count in starts):
            return piece
    return 0


@cache
def serves() -> bool:
    """Whether this build and CPU have it, and give a product."""
    try:
        return bool((Float16Weight(torch.full((64, 48), 0.5), 1.0, 48)(torch.ones(3, 48)) == 24).all())
    except (AttributeError, RuntimeError):
        return False


@cache
def _operation() -> Callable[..., Tensor]:
    """The call, without the look at each argument that Python takes for operations with objects of a library: that
    takes a quarter of a small product's time."""
    found = torch.ops.quantized.linear_dynamic_fp16.default
    return getattr(found, "_op", found)
