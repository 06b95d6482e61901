"""Products of float32 numbers whose sums are exact, so that no order of a sum, and no library, changes a bit.

    a row's numbers     x = n * 2^u, rounded; n integers below 2^32 in two parts of 16 bits, u by the largest of the row
    a weight's line     w = m * 2^t, rounded; m integers below 2^26, t by the largest of the line
    the sum             of n * m over at most 2,048 numbers, in float64
    the result          the sums of both parts, times 2^(u + t), rounded to float32

Every term, and every sum of some of the terms, is an integer of at most 2^(16 + 26 + 11) = 2^53, which float64 holds.
So whatever adds them, with whatever instructions, threads and neighbours, adds without an error, and a row's result is
a function of the row and the weight alone. Longer sums are cut at fixed places, and the parts are added in their order.
Against the exact sum a result errs less than float32's own product of such a row, unless its largest number is some
thousand times the others. Source: the splitting of K. Ozaki et al., "Error-free transformations of matrix
multiplication by using fast routines of matrix multiplication and its applications", Numerical Algorithms 59 (2012).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PART = 16
"""Bits of either part of a row's number."""
LINE = 26
"""Bits of a weight's."""
LONGEST = 2**11
"""Terms of a sum."""
_LEAST = -200
"""Exponent of the largest number of a row; of a lesser one what lies below is 0."""


def on_grid(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers n [..., k], at most 2^bits, and unit [..., 1], a power of two: x [..., k] is about n * unit. In float64.

    What is not finite leaves its row's integers not finite.
    """
    wide = x.double()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    exponent = ((largest.view(torch.int64) >> 52) - 1022).clamp_(min=_LEAST)
    return (wide * _power(bits - exponent)).round_(), _power(exponent - bits)


def _power(exponent: Tensor) -> Tensor:
    """Two to an int64 exponent within float64's."""
    return ((exponent + 1023) << 52).view(torch.float64)


def in_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., rows, k] as integers [..., 2 * rows, k], the upper parts before the lower, and unit [..., rows, 1]."""
    whole, unit = on_grid(x, 2 * PART)
    upper = (whole * 2.0**-PART).round_()
    return torch.cat([upper, whole.sub_(upper, alpha=2.0**PART)], dim=-2), unit


def of_parts(sums: Tensor) -> Tensor:
    """The sums of `in_parts`, [..., 2 * rows, out], as one, [..., rows, out]."""
    rows = sums.shape[-2] // 2
    upper, lower = sums.split(rows, dim=-2) if rows else (sums, sums)
    return lower.add(upper, alpha=2.0**PART)


class FixedPointWeight:
    """A weight [out, in] as integers, and its product with float32 rows."""

    def __init__(self, weight: Tensor) -> None:
        self._pieces = [on_grid(piece, LINE) for piece in weight.split(LONGEST, dim=1)]
        self._out = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out], contiguous."""
        rows = x.reshape(-1, x.shape[-1])
        total: Tensor | None = None
        for part, (line, unit) in zip(rows.split(LONGEST, dim=1), self._pieces, strict=True):
            parts, row_unit = in_parts(part)
            own = of_parts(F.linear(parts, line)).mul_(row_unit).mul_(unit[:, 0])
            total = own if total is None else total.add_(own)
        assert total is not None
        return total.to(x.dtype).view(*x.shape[:-1], self._out)


def fixed_point_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of float32 x [rows, in] by `FixedPointWeight`, of a weight that lies as it is."""
    out = FixedPointWeight(weight)(x)
    return out if bias is None else out + bias


class FixedPointMatrices:
    """Matrices [batch, in, out], `in` at most `LONGEST`, and their products with float32 rows."""

    def __init__(self, matrices: Tensor) -> None:
        self._lines, self._unit = on_grid(matrices.transpose(-1, -2), LINE)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [batch, rows, in]. Returns [batch, rows, out]."""
        return fixed_point_scores(x, self._lines, self._unit)


def fixed_point_scores(q: Tensor, lines: Tensor, unit: Tensor) -> Tensor:
    """q @ k.T. q: [batch, queries, d]. lines, unit: k [batch, keys, d] by `on_grid` of `LINE` bits."""
    parts, row_unit = in_parts(q)
    sums = of_parts(torch.bmm(parts, lines.transpose(-1, -2)))
    return sums.mul_(row_unit).mul_(unit.transpose(-1, -2)).to(q.dtype)


def fixed_point_mean(weights: Tensor, lines: Tensor, unit: Tensor) -> Tensor:
    """Sum over keys of weights [batch, queries, keys] times values, lines and unit of which are as above.

    A key's unit is a part of its weight, so that one grid holds all keys. Nothing depends on their order, nor on keys
    without a weight. Returns float64 [batch, queries, d], rounded from the exact sum of either part.
    """
    parts, row_unit = in_parts(weights.double() * unit.transpose(-1, -2))
    sums = [
        torch.bmm(some, values)
        for some, values in zip(parts.split(LONGEST, dim=-1), lines.split(LONGEST, dim=-2), strict=True)
    ]
    return of_parts(_added(sums)).mul_(row_unit)


def _added(sums: list[Tensor]) -> Tensor:
    """The sum of integers of at most 2^53, which is rounded once: so it is one sum, however it was cut."""
    if len(sums) == 1:
        return sums[0]
    high = torch.stack([(each * 2.0**-LINE).round_() for each in sums])
    low = torch.stack(sums).sub_(high, alpha=2.0**LINE)
    return low.sum(dim=0).add_(high.sum(dim=0), alpha=2.0**LINE)


def fixed_point_sum(weights: Tensor) -> Tensor:
    """The sum over the last dimension, which stays, of weights from 0 to 1, each rounded to 2^-30. In float64."""
    return (weights.double() * 2.0**30).round_().sum(dim=-1, keepdim=True) * 2.0**-30
