"""MXFP4: weights of 4 bits, 32 of a row share a scale of 8. They stay packed where they lie, and are decoded as read.

A number is a sign, 2 bits of exponent and 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. It is multiplied by
2 ** (scale - 127); a scale of 255 is no number. Every product of both is a bfloat16, so decoding rounds nothing, up to
the largest: 4 and 6 have none above a scale of 252.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4.

A checkpoint's 32 numbers are 16 bytes, the earlier number of each two in the lower half; here their scale's byte
follows, so that a weight is one tensor [..., k / 32, 17] uint8. For a GPU they lie in tiles of 64 lines and blocks of
128 columns in four quarters, as words of 16 bits: a word holds one number of each quarter, the first lowest. So two
neighbouring words of a register give two neighbouring numbers of each quarter, side by side.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

GROUP, GROUP_BYTES = 32, 17
TILE, BLOCK, QUARTER = 64, 128, 32
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
NOT_A_NUMBER = 255
LARGEST_SCALE = 252
"""Of which every number is finite in bfloat16 and float32."""


def join_groups(blocks: Tensor, scales: Tensor) -> Tensor:
    """A stored weight as one tensor. blocks: [..., k / 32, 16] uint8; scales: [..., k / 32] uint8."""
    return torch.cat([blocks, scales[..., None]], dim=-1)


def decode(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., k] of groups [..., k / 32, 17] uint8."""
    numbers = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)], dtype=dtype, device=groups.device)
    codes, scale = _codes(groups), groups[..., 16:].to(torch.int32) - _BIAS
    return torch.ldexp(numbers[codes.long()], scale).flatten(-2)


def _codes(groups: Tensor) -> Tensor:
    """The 4 bits of each number [..., k / 32, 32] uint8, in order."""
    both = groups[..., :16]
    return torch.stack([both & 0xF, both >> 4], dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Experts' weights for a GPU. shape: (experts, lines, k).

    words: [experts, lines / 64, k / 128, 64, 32] int16. scales: [experts, lines / 64, k / 128, 64] int32, the four
    quarters' scales of a line, the first lowest. Lines and columns are filled up with zeros to whole tiles and blocks.
    """

    shape: tuple[int, int, int]
    words: Tensor
    scales: Tensor

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
    for expert in range(experts):
        whole = groups.new_zeros((tiles * TILE, blocks * 4, GROUP_BYTES))
        whole[:lines, :number] = groups[expert].reshape(lines, number, GROUP_BYTES)
        split = whole.view(tiles, TILE, blocks, 4, GROUP_BYTES).transpose(1, 2)
        shift = torch.arange(0, 16, 4, dtype=torch.int32, device=device)
        bits = (_codes(split).to(torch.int32) << shift[:, None]).sum(-2, dtype=torch.int32)
        words[expert] = torch.where(bits > 0x7FFF, bits - 0x10000, bits)
        four = split[..., 16].to(torch.int64) << (2 * shift)
        four = four.sum(-1)
        scales[expert] = torch.where(four > 0x7FFFFFFF, four - (1 << 32), four)
    return Mxfp4Weight((experts, lines, number * GROUP), words, scales)


def unpack(weight: Mxfp4Weight) -> Tensor:
    """The groups [experts, lines, k / 32, 17] again."""
    experts, lines, k = weight.shape
    shift = torch.arange(0, 16, 4, dtype=torch.int32, device=weight.words.device)
    codes = (weight.words[..., None, :].to(torch.int32) >> shift[:, None]) & 0xF
    pairs = codes.unflatten(-1, (16, 2))
    both = pairs[..., 0] | (pairs[..., 1] << 4)
    scale = (weight.scales[..., None].to(torch.int32) >> (2 * shift)) & 0xFF
    groups = torch.cat([both, scale[..., None]], dim=-1).to(torch.uint8)
    whole = groups.transpose(2, 3).reshape(experts, -1, groups.shape[2] * 4, GROUP_BYTES)
    return whole[:, :lines, : k // GROUP]


@jit
def decoded_quarters(words: Arg, scales: Arg, dtype: constexpr, hopper: constexpr) -> Arg:
    """Four quarters of a tile [lines, 32] each in `dtype`, from its words and the scales [lines] of its lines."""
    s0 = _scale_bits(scales, 0)[:, None]
    s1 = _scale_bits(scales, 8)[:, None]
    s2 = _scale_bits(scales, 16)[:, None]
    s3 = _scale_bits(scales, 24)[:, None]
    if hopper:
        w0, w1, w2, w3 = _two_words(
            words,
            tl.broadcast_to(s0.to(tl.int16), words.shape),
            tl.broadcast_to(s1.to(tl.int16), words.shape),
            tl.broadcast_to(s2.to(tl.int16), words.shape),
            tl.broadcast_to(s3.to(tl.int16), words.shape),
        )
        return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)
    bits = words.to(tl.int32)
    w0 = _number(bits << 12, bits << 6) * _scale_of(s0)
    w1 = _number(bits << 8, bits << 2) * _scale_of(s1)
    w2 = _number(bits << 4, bits >> 2) * _scale_of(s2)
    w3 = _number(bits, bits >> 6) * _scale_of(s3)
    return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)


@jit
def _scale_bits(scales: Arg, shift: constexpr) -> Arg:
    """A scale as bfloat16, in the lower 16 bits; 2 ** -127 is a subnormal one."""
    return tl.maximum(((scales >> shift) & 0xFF) << 7, 0x40)


@jit
def _scale_of(bits: Arg) -> Arg:
    return (bits << 16).to(tl.float32, bitcast=True)


@jit
def _number(signs: Arg, sizes: Arg) -> Arg:
    """The number whose sign is in bit 15 of `signs` and whose other bits are bits 8 .. 6 of `sizes`, as float32.

    They are the end of a bfloat16's exponent and the start of its mantissa: 2 ** 126 times too small, 0.5 subnormal.
    """
    bits = (signs & 0x8000) | (sizes & 0x01C0)
    return (bits << 16).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@jit
def _two_words(words: Arg, s0: Arg, s1: Arg, s2: Arg, s3: Arg) -> Arg:
    """The same two words at a time, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s, up;
        mov.b32 up, 0x7e807e80;
        shl.b32 s, $4, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 a, $4, 6;
        lop3.b32 a, a, 0x01c001c0, s, 0xea;
        shl.b32 s, $4, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 b, $4, 2;
        lop3.b32 b, b, 0x01c001c0, s, 0xea;
        shl.b32 s, $4, 4;
        and.b32 s, s, 0x80008000;
        shr.b32 c, $4, 2;
        lop3.b32 c, c, 0x01c001c0, s, 0xea;
        and.b32 s, $4, 0x80008000;
        shr.b32 d, $4, 6;
        lop3.b32 d, d, 0x01c001c0, s, 0xea;
        mul.bf16x2 a, a, up;
        mul.bf16x2 b, b, up;
        mul.bf16x2 c, c, up;
        mul.bf16x2 d, d, up;
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
