"""Weights as codes of 8 or 4 bits with scales, and what they are.

    weight[i, j] = (number(codes[i, j]) - zero[i, g]) * scale[i, g]        g = j // group, in float32
    weight[i, j] = codes[i, j] * scale[i, g] + minimum[i, g]               of integers with minimums

and then rounded to the dtype of the product: once. Here it lies by rows, as checkpoints have it, so that ranks cut rows
and groups; a GPU has it in tiles (`kernels.gemm.tiles`), and decodes it to the same bits.
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLE = 8
"""The code of 0 among integers without a zero."""

Numbers = Literal["e4m3", "e2m1", "int4"]
Scales = Literal["float32", "e8m0", "e4m3", "times", "over"]


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """What codes and scales mean.

    group: columns that share a scale; 0 for whole rows. The last group may have fewer.
    scales: float32; e8m0, a power of two; or e4m3, alone, times a row's factor or over it.
    zeros: integers have a zero each group, 0 to 16.
    minimums: integers from 0 have the number of code 0 each group instead.
    """

    numbers: Numbers
    group: int
    scales: Scales = "float32"
    zeros: bool = False
    minimums: bool = False

    @property
    def in_byte(self) -> int:
        """Codes that a byte holds."""
        return 1 if self.numbers == "e4m3" else 2

    def bytes_of(self, columns: int) -> int:
        """Of a row's codes."""
        return -(-columns // self.in_byte)

    def groups_of(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [..., columns], each row of which lies by itself.

    codes: [..., bytes] uint8.
    scale: [..., groups] float32, or uint8 where `QuantScheme.scales` says otherwise.
    factor: [..., 1] float32, of scales of two levels; 0 is of rows that are padding. Beside e4m3 alone it is no part of
        the weight: sums of a product are multiplied by it.
    zero: [..., groups] uint8.
    minimum: [..., groups] float32.
    order: [columns] int64, the group of each column where they do not follow each other.
    """

    scheme: QuantScheme
    columns: int
    codes: Tensor
    scale: Tensor
    factor: Tensor | None = None
    zero: Tensor | None = None
    order: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.factor, self.zero, self.minimum)
        return sum(each.nbytes for each in parts if each is not None)

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Those of axis 0."""
        return self._each(lambda part: part[start:stop])

    def halves(self) -> "QuantizedWeight":
        """A weight [2 * n, columns] as [2, n, columns]."""
        return self._each(lambda part: part.unflatten(0, (2, -1)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The same change of every tensor by rows."""
        factor, zero, minimum = (
            None if part is None else change(part) for part in (self.factor, self.zero, self.minimum)
        )
        return replace(
            self, codes=change(self.codes), scale=change(self.scale), factor=factor, zero=zero, minimum=minimum
        )


def factor_apart(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of scales of two levels whose factor goes to the sums; another as it is.

    What is left is exact in any dtype of products: a number of 2 significant bits times a scale of 4, from 2 ** -10 to
    2688. So a product rounds once, at its end. A factor that divides becomes its reciprocal, rounded to float32.
    """
    if weight.factor is None:
        return weight
    factor = weight.factor
    if weight.scheme.scales == "over":
        factor = 1 / factor.where(factor != 0, 1)
    return replace(weight, scheme=replace(weight.scheme, scales="e4m3"), factor=factor)


def decode(weight: QuantizedWeight) -> Tensor:
    """The numbers [..., columns] float32."""
    numbers, scale = _numbers(weight), scales_of(weight)
    if weight.order is not None:
        zero = MIDDLE if weight.zero is None else weight.zero[..., weight.order].to(torch.float32)
        return numbers.sub_(zero).mul_(scale[..., weight.order])
    scheme, k = weight.scheme, weight.columns
    excess = -k % scheme.group if scheme.group else 0
    whole = torch.nn.functional.pad(numbers, (0, excess)) if excess else numbers
    groups = whole.unflatten(-1, (scale.shape[-1], -1))
    if scheme.numbers == "int4" and weight.minimum is None:
        groups.sub_(MIDDLE if weight.zero is None else weight.zero[..., None].to(torch.float32))
    groups.mul_(scale[..., None])
    if weight.minimum is not None:
        groups.add_(weight.minimum[..., None])
    decoded: Tensor = groups.flatten(-2)[..., :k]
    return decoded


def _numbers(weight: QuantizedWeight) -> Tensor:
    """What the codes alone are, float32, in memory of its own."""
    if weight.scheme.numbers == "e4m3":
        return weight.codes.view(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.stack([weight.codes & 0xF, weight.codes >> 4], -1).flatten(-2)[..., : weight.columns]
    if weight.scheme.numbers == "int4":
        return codes.to(torch.float32)
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=codes.device)
    return table[codes.int()]


def scales_of(weight: QuantizedWeight) -> Tensor:
    """What its scales are, [..., groups] float32."""
    kind, scale = weight.scheme.scales, weight.scale
    if kind == "float32":
        return scale
    if kind == "e8m0":
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    levels = scale.view(torch.float8_e4m3fn).to(torch.float32)
    if kind == "e4m3":
        return levels
    assert weight.factor is not None
    return levels * weight.factor if kind == "times" else levels / weight.factor.where(weight.factor != 0, 1)
