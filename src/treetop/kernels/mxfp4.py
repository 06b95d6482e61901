"""MXFP4: weights of 4 bits, 32 of a row share a scale of 8. They stay packed where they lie, and are decoded as read.

A number is a sign, 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. It is multiplied by
2 ** (scale - 127); a scale of 255 is no number. Every product of both is a bfloat16, so decoding rounds nothing, up to
the largest: 4 and 6 have none above a scale of 252.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4.

A checkpoint's 32 numbers are 16 bytes, the earlier number of each two in the lower half; here their scale's byte
follows, so that a weight is one tensor [..., k / 32, 17] uint8. For a GPU they lie in tiles of 64 lines and blocks of
128 columns in four quarters, as words of 16 bits, each with one number of every quarter: sign and size of the first in
bits 15 and 8 .. 6, where a bfloat16 wants them; of the second in 12 and 5 .. 3, of the third in 9 and 2 .. 0, one shift
away; of the fourth in 10 and 14, 13, 11. So two neighbouring words of a register give two neighbouring numbers of each
quarter, side by side, and 8 weights take 15 instructions.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

GROUP, GROUP_BYTES = 32, 17
TILE, BLOCK, QUARTER = 64, 128, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
NOT_A_NUMBER = 255
_MAX_IN_ONE = 128
"""The largest scale of which 2 ** (scale - 1) is a bfloat16."""
LARGEST_SCALE = 252
"""Of which every number is finite in bfloat16 and float32."""


def join_groups(blocks: Tensor, scales: Tensor) -> Tensor:
    """A stored weight as one tensor. blocks: [..., k / 32, 16] uint8; scales: [..., k / 32] uint8."""
    return torch.cat([blocks, scales[..., None]], dim=-1)


def decode(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., k] of groups [..., k / 32, 17] uint8."""
    numbers = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=dtype, device=groups.device)
    codes, scale = _codes(groups), groups[..., 16:].to(torch.int32) - _BIAS
    return torch.ldexp(numbers[codes.long()], scale).flatten(-2)


def _codes(groups: Tensor) -> Tensor:
    """The 4 bits of each number [..., k / 32, 32] uint8, in order."""
    both = groups[..., :16]
    return torch.stack([both & 0xF, both >> 4], dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Experts' weights for a GPU.

    shape: (experts, lines, k).
    words: [experts, lines / 64, k / 128, 64, 32] int16.
    scales: [experts, lines / 64, k / 128, 64] int32, the four quarters' scales of a line, the first lowest. Lines and
        columns are filled up with zeros to whole tiles and blocks.
    wide: a scale is above 128, so that its weights take other arithmetic.
    """

    shape: tuple[int, int, int]
    words: Tensor
    scales: Tensor
    wide: bool

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def pack(groups: Tensor) -> Mxfp4Weight:
    """groups: [experts, ..., k / 32, 17] uint8, of which ... are the lines; any strides.

    One expert after another, so little is in memory twice.
    """
    experts, number, lines = groups.shape[0], groups.shape[-2], prod(groups.shape[1:-2])
    tiles, blocks = -(-lines // TILE), -(-number // 4)
    shape, device = (experts, tiles, blocks, TILE), groups.device
    words = torch.empty((*shape, QUARTER), dtype=torch.int16, device=device)
    scales = torch.empty(shape, dtype=torch.int32, device=device)
    wide = False
    for expert in range(experts):
        whole = groups.new_zeros((tiles * TILE, blocks * 4, GROUP_BYTES))
        whole[:lines, :number] = groups[expert].reshape(lines, number, GROUP_BYTES)
        split = whole.view(tiles, TILE, blocks, 4, GROUP_BYTES).transpose(1, 2)
        shift = torch.arange(0, 16, 4, dtype=torch.int32, device=device)
        words[expert] = _as_words(_codes(split).to(torch.int32))
        wide |= bool((split[..., 16] > _MAX_IN_ONE).any())
        four = split[..., 16].to(torch.int64) << (2 * shift)
        four = four.sum(-1)
        scales[expert] = torch.where(four > 0x7FFFFFFF, four - (1 << 32), four)
    return Mxfp4Weight((experts, lines, number * GROUP), words, scales, wide)


def _as_words(codes: Tensor) -> Tensor:
    """Four quarters' numbers [..., 4, 32] as words [..., 32] int16."""
    first, second, third, fourth = (((code & 8) << 12) | ((code & 7) << 6) for code in codes.unbind(-2))
    bits = first | (second >> 3) | (third >> 6)
    bits = bits | ((fourth & 0x180) << 6) | ((fourth & 0x40) << 5) | ((fourth & 0x8000) >> 5)
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16)


def _as_codes(words: Tensor) -> Tensor:
    """The numbers again."""
    bits = words.to(torch.int32)
    fourth = ((bits >> 6) & 0x180) | ((bits >> 5) & 0x40) | ((bits << 5) & 0x8000)
    four = torch.stack([bits, bits << 3, bits << 6, fourth], -2)
    return ((four & 0x8000) >> 12) | ((four & 0x1C0) >> 6)


def unpack(weight: Mxfp4Weight) -> Tensor:
    """The groups [experts, lines, k / 32, 17] again."""
    experts, lines, k = weight.shape
    shift = torch.arange(0, 16, 4, dtype=torch.int32, device=weight.words.device)
    pairs = _as_codes(weight.words).unflatten(-1, (16, 2))
    both = pairs[..., 0] | (pairs[..., 1] << 4)
    scale = (weight.scales[..., None].to(torch.int32) >> (2 * shift)) & 0xFF
    groups = torch.cat([both, scale[..., None]], dim=-1).to(torch.uint8)
    whole = groups.transpose(2, 3).reshape(experts, -1, groups.shape[2] * 4, GROUP_BYTES)
    return whole[:, :lines, : k // GROUP]


@jit
def decoded_quarters(words: Arg, scales: Arg, wide: constexpr, dtype: constexpr, hopper: constexpr) -> Arg:
    """Four quarters of a tile [lines, 32] each in `dtype`, from its words and the scales [lines] of its lines.

    As the end of a bfloat16's exponent and the start of its mantissa a number is 2 ** 126 times too small, 0.5
    subnormal. So one multiplication by 2 ** (scale - 1) gives a weight, unless that has no bfloat16 (`wide`).
    """
    if wide or not hopper:
        w0, w1, w2, w3 = _numbers(words.to(tl.int32))
        w0 *= _power(scales & 0xFF)[:, None]
        w1 *= _power((scales >> 8) & 0xFF)[:, None]
        w2 *= _power((scales >> 16) & 0xFF)[:, None]
        w3 *= _power((scales >> 24) & 0xFF)[:, None]
        return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)
    s0 = _spread_bits(scales << 7, words)
    s1 = _spread_bits(scales >> 1, words)
    s2 = _spread_bits(scales >> 9, words)
    s3 = _spread_bits(scales >> 17, words)
    w0, w1, w2, w3 = _two_words(words, s0, s1, s2, s3)
    return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)


@jit
def _spread_bits(scale: Arg, words: Arg) -> Arg:
    """2 ** (scale - 1) as bfloat16 for each word of a line, from a scale in bits 14 .. 7."""
    bits = ((scale & 0x7F80) + 126 * 128).to(tl.int16)
    return tl.broadcast_to(bits[:, None], words.shape)


@jit
def _power(scale: Arg) -> Arg:
    """2 ** (scale - 127) as float32; the least is a subnormal one."""
    return tl.maximum(scale << 23, 0x400000).to(tl.float32, bitcast=True)


@jit
def _numbers(bits: Arg) -> Arg:
    """The four numbers of words, without their scales, as float32."""
    last = ((bits >> 6) & 0x0180) | ((bits >> 5) & 0x0040) | ((bits << 5) & 0x8000)
    return _number(bits), _number(bits << 3), _number(bits << 6), _number(last)


@jit
def _number(bits: Arg) -> Arg:
    """The number whose sign is in bit 15 and whose other bits are bits 8 .. 6."""
    tiny = ((bits & 0x81C0) << 16).to(tl.float32, bitcast=True)
    return tiny * 85070591730234615865843651857942052864.0


@jit
def _two_words(words: Arg, s0: Arg, s1: Arg, s2: Arg, s3: Arg) -> Arg:
    """The numbers of two words at a time, times their scales, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s;
        and.b32 a, $4, 0x81c081c0;
        shl.b32 b, $4, 3;
        and.b32 b, b, 0x81c081c0;
        shl.b32 c, $4, 6;
        and.b32 c, c, 0x81c081c0;
        shr.b32 d, $4, 6;
        and.b32 d, d, 0x01800180;
        shr.b32 s, $4, 5;
        lop3.b32 d, s, 0x00400040, d, 0xea;
        shl.b32 s, $4, 5;
        lop3.b32 d, s, 0x80008000, d, 0xea;
        mul.bf16x2 $0, a, $5;
        mul.bf16x2 $1, b, $6;
        mul.bf16x2 $2, c, $7;
        mul.bf16x2 $3, d, $8;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
