"""Scales of weights in 4 bits, as tiles hold them for `decoding`: ready for one or two multiplications, the bits kept.

    levels  e4m3 alone, none negative: 21 more than the exponent in bits 7 .. 3, the mantissa in 2 .. 0, so subnormal
            codes are like others; 0 of zero.
    folded  bfloat16s of integers whose zeros are all 8, none of them zero or far from 1, in a word's upper half.
    halves  of two levels, for products in bfloat16, two groups in a word. A number in e2m1 is a power of two times 1 or
            1.5, so all weights of a group follow from the bfloat16s of s and of 1.5 * s. Those are the roundings of
            n * (h + l): h is the bfloat16 of s, and l is nothing or 3 / 8 of its last place, up or down. A half has h's
            exponent, less 2, and its mantissa in bits 13 .. 0, whether l is there in bit 14, and its sign in bit 15.

Where a scale is zero, levels and halves say nothing of it, and numbers are zero instead.
"""

from dataclasses import replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme, scales_of

_PIECE = 2**24
"""Scales that are made ready together."""
_LESS = 2 << 7
"""By which exponents of halves are smaller than a bfloat16's."""


def has_levels(weight: QuantizedWeight) -> bool:
    """Whether scales are e4m3 alone, without negative ones and NaN."""
    return weight.scheme.scales == "e4m3" and bool((weight.scale < 0x7F).all())


def can_fold(weight: QuantizedWeight) -> bool:
    """Whether scales are bfloat16s of integers with zeros of 8, such that all made of them is a normal number."""
    if weight.scheme.numbers != "int4" or weight.scheme.zeros:
        return False
    scale, size = weight.scale, weight.scale.abs()
    fits = (size > 2.0**-100) & (size < 8.0)
    return bool((fits & (scale.to(torch.bfloat16) == scale)).all())


def without_zero_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weights, of which numbers are zero where scales are."""
    none = scales_of(weight) == 0
    if not bool(none.any()):
        return weight
    in_bytes = none.repeat_interleave(weight.scheme.group // weight.scheme.in_byte, -1)
    return replace(weight, codes=weight.codes.masked_fill(in_bytes[..., : weight.codes.shape[-1]], 0))


@cache
def _of_codes(device: torch.device) -> Tensor:
    """The level of each code in e4m3 from 0 to 126, int32."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    mantissa, exponent = torch.frexp(every)  # from a half on
    level = (exponent + 20 << 3) + (16 * mantissa - 8).to(torch.int32)
    return torch.where(every == 0, 0, level).to(torch.int32).to(device)


def levels(codes: Tensor) -> Tensor:
    """Codes in e4m3, uint8, as levels, uint8."""
    return _of_codes(codes.device)[codes.int()].to(torch.uint8)


def codes_of_levels(found: Tensor) -> Tensor:
    """Codes in e4m3 of levels, both uint8."""
    every = _of_codes(found.device)
    back = torch.zeros(256, dtype=torch.uint8, device=found.device)
    back[every.long()] = torch.arange(127, dtype=torch.uint8, device=found.device)
    return back[found.int()]


def halves(weight: QuantizedWeight) -> Tensor | None:
    """Scales of two levels as halves, [..., groups] int32; None of others, and where one is out of range."""
    if weight.scheme.scales not in ("times", "over"):
        return None
    made, scales = [], scales_of(weight)
    for scale in scales.reshape(-1).split(_PIECE):
        high, more = scale.to(torch.bfloat16), (1.5 * scale).to(torch.bfloat16)
        bits = high.view(torch.int16).to(torch.int32)
        if bool(((scale != 0) & ((bits < 11 << 7) | (bits >= 129 << 7))).any()):
            return None
        low = torch.ldexp(torch.full_like(scale, 0.375), (bits >> 7) - 134)
        up, down = ((1.5 * (high.to(torch.float32) + each)).to(torch.bfloat16) == more for each in (low, -low))
        # l is nothing only where neither of the others will do, so 1.5 * h is no tie there
        half = bits - _LESS + torch.where(up, 0x4000, torch.where(down, 0xC000, 0))
        made.append(torch.where(scale == 0, 0, half).to(torch.int32))
    return torch.cat(made).view(scales.shape)


def more_as_halves(scheme: QuantScheme, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that scales of a weight [..., lines, columns] take more as halves, of 16 bits, than as codes of 8 and a
    factor a line, in tiles for products in `dtype`; 0 where they are none. Where one is out of range, halves are not
    taken.
    """
    if scheme.scales not in ("times", "over") or dtype != torch.bfloat16:
        return 0
    return prod(shape[:-1]) * (scheme.groups_of(shape[-1]) - 4)


def of_one_level(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight whose scales are halves, with what else it has."""
    clean = without_zero_scales(weight)
    return QuantizedWeight(replace(weight.scheme, scales="float32"), weight.columns, clean.codes, weight.scale)


def of_halves(found: Tensor) -> Tensor:
    """What halves stand for, h + l in float32."""
    high = (found & 0x3FFF) + _LESS << 16
    low = ((high & 0x7F800000) - (9 << 23) | 0x400000).view(torch.float32)
    signed = torch.where(found & 0x8000 != 0, -low, low)
    return high.view(torch.float32) + torch.where(found & 0x4000 != 0, signed, 0.0)
