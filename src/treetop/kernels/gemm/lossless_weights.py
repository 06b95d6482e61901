"""Weights in 12 bits instead of 16, without loss, for products of so few rows that reading weights is all their time.

A bfloat16 is a sign, 8 bits of exponent and 7 of mantissa. The exponents of a weight's row nearly all lie within 15 of
the largest: of normally distributed weights all but one in ten thousand. So 4 bits say which it is, and the few others
are listed apart. That exponents of trained weights carry some 3 bits: DFloat11, arXiv:2504.11651.

A row's code c means the exponent `largest - 15 + c`, and the weight 0 if c and the mantissa are 0. Words of 16 bits lie
as [n / 64, k / 128, 3, 64, 32]: tiles of 64 rows, blocks of 128 columns in four quarters. The words of the first three
quarters hold their own weights in bits 15 (sign) and 10 .. 0 (code and mantissa), and in bits 14 .. 11 what the fourth
quarter's weight needs: its code; its upper mantissa; its lower mantissa and sign. So what a program reads lies in one
piece, and 8 weights take 15 instructions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.gate import Gate, activated
from treetop.kernels.gemm.adapter_sums import AdapterSums, add_sums, arguments, ask_for_sums
from treetop.kernels.gemm.skinny_gemm import gated_rows_reference
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

TILE, BLOCK, QUARTER = 64, 128, 32
MAX_ROWS = 32
_STEPS_OUTLIERS = 16
"""Outliers of a tile for each of its blocks of columns, beyond which none is worth it, and steps may not suffice."""
_TILES_AT_ONCE = 32
_NOT_FINITE = 255
_MIN_EXPONENT = 1


@dataclass(frozen=True, slots=True)
class LosslessLaunch:
    """How a product is cut: lines of a block, splits of k, pipeline stages, warps, outliers that a step adds."""

    block_n: int
    splits: int
    num_stages: int
    num_warps: int
    picks: int


@dataclass(frozen=True, slots=True)
class LosslessWeight:
    """A weight [n, k] in 12 bits a number.

    gated: tiles of its first and of its second half lie in turn.
    words: [n / 64, k / 128, 3, 64, 32] int16.
    scale: [n] float32, a power of two a row. Outliers lie tile by tile, those of tile i from starts[i] to starts[i +
        1]: lines, int32, the row in the order of tiles; columns, int32; values, bfloat16, over the row's scale.
    starts: [n / 64 + 1] int32. The lists end at starts[-1]; behind it is room.
    crowd: lines of a block -> outliers of the block that has most, when it was made.
    """

    words: Tensor
    scale: Tensor
    starts: Tensor
    lines: Tensor
    columns: Tensor
    values: Tensor
    gated: bool
    crowd: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it."""
        outliers = int(self.starts[-1]) * (self.lines.itemsize + self.columns.itemsize + self.values.itemsize)
        return self.words.nbytes + self.scale.nbytes + self.starts.nbytes + outliers


def is_whole(n: int, k: int, gated: bool) -> bool:
    """Whether a weight [n, k] lies in whole tiles, of both halves if gated, and blocks."""
    return n % (2 * TILE if gated else TILE) == 0 and k % BLOCK == 0


def has_steps(weight: LosslessWeight, launch: LosslessLaunch) -> bool:
    """Whether a launch adds all of a block's outliers, so many a step, within the steps that it has."""
    return weight.crowd[launch.block_n] <= launch.picks * weight.words.shape[1]


def compress(weight: Tensor, gated: bool, most_outliers: int | None = None) -> LosslessWeight | None:
    """weight: [n, k] bfloat16. None if it does not lie in whole tiles and blocks, or its numbers range too widely.

    That is if a tile has more outliers than most_outliers; the first such tile ends it.
    """
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or not is_whole(n, k, gated):
        return None
    maximum = min(k // BLOCK * _STEPS_OUTLIERS, k * TILE if most_outliers is None else most_outliers)
    words = torch.empty((n // TILE, k // BLOCK, 3, TILE, QUARTER), dtype=torch.int16, device=weight.device)
    scale = torch.empty((n // TILE, TILE), dtype=torch.float32, device=weight.device)
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for at in range(0, n // TILE, _TILES_AT_ONCE):
        tiles = _tiles(weight, at, gated)
        here = slice(at, at + len(tiles))
        words[here], largest, outlying = _encode(tiles)
        worst, exponent = torch.stack([outlying.sum((1, 2)).max(), largest.max()]).tolist()
        if worst > maximum or exponent == _NOT_FINITE:
            return None
        scale[here] = (largest << 23).view(torch.float32)
        tile, line, column = outlying.nonzero(as_tuple=True)
        found.append((at + tile, line, column, tiles[tile, line, column].double()))
    tile, line, column, number = (torch.cat(each) for each in zip(*found, strict=True))
    factor = scale[tile, line].double()
    values = (number / factor).to(weight.dtype)
    if not torch.equal(values.double() * factor, number):
        return None
    counts = torch.bincount(tile, minlength=n // TILE)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=weight.device)
    starts[1:] = counts.cumsum(0)
    lines, columns = (tile * TILE + line).to(torch.int32), column.to(torch.int32)
    lines, columns, values = _with_room(lines), _with_room(columns), _with_room(values)
    return LosslessWeight(words, scale.flatten(), starts, lines, columns, values, gated, _crowd(counts.tolist()))


def _with_room(listed: Tensor) -> Tensor:
    """A quarter longer, so that other numbers of the same weight fit in its place."""
    room = torch.zeros(len(listed) + len(listed) // 4 + 64, dtype=listed.dtype, device=listed.device)
    room[: len(listed)] = listed
    return room


def _crowd(counts: list[int]) -> dict[int, int]:
    """`LosslessWeight.crowd`, from the outliers of each tile."""
    sizes = [size for size in (1, 2, 4) if len(counts) % size == 0]
    return {size * TILE: max(sum(counts[i : i + size]) for i in range(0, len(counts), size)) for size in sizes}


def decompress(weight: LosslessWeight) -> Tensor:
    """The weight [n, k] bfloat16 again, every bit of it."""
    tiles, blocks = weight.words.shape[:2]
    w0, w1, w2 = (weight.words.to(torch.int32) & 0xFFFF).unbind(2)
    w3 = ((w0 >> 4) & 0x780) | ((w1 >> 8) & 0x78) | ((w2 >> 12) & 7) | ((w2 << 4) & 0x8000)
    bits = torch.stack([w0, w1, w2, w3], 3) & 0x87FF
    bits = bits.permute(0, 2, 1, 3, 4).reshape(tiles * TILE, blocks * BLOCK)
    some = bits & 0x7FF != 0
    largest = weight.scale.view(torch.int32) >> 23
    bits = torch.where(some, bits + ((largest - 15) << 7)[:, None], bits)
    out = _as_int16(bits).view(torch.bfloat16)
    count = int(weight.starts[-1])
    line = weight.lines[:count].long()
    values = weight.values[:count].double() * weight.scale[line].double()
    out[line, weight.columns[:count].long()] = values.to(out.dtype)
    halves = 2 if weight.gated else 1
    return out.view(-1, halves, TILE, out.shape[1]).transpose(0, 1).reshape(out.shape)


def _tiles(weight: Tensor, at: int, gated: bool) -> Tensor:
    """Up to `_TILES_AT_ONCE` tiles [tiles, 64, k] from tile `at` on; of a gated weight its halves' in turn."""
    halves = 2 if gated else 1
    both = weight.view(halves, -1, TILE, weight.shape[1])
    return both[:, at // halves : (at + _TILES_AT_ONCE) // halves].transpose(0, 1).reshape(-1, TILE, weight.shape[1])


def _encode(tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words, each row's largest exponent, at least 1, and which numbers are outliers, of tiles [tiles, 64, k]."""
    bits = tiles.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponent = (bits >> 7) & 0xFF
    largest = exponent.amax(-1, keepdim=True).clamp(min=_MIN_EXPONENT)
    code = exponent - largest + 15
    zero = bits & 0x7FFF == 0
    outlying = ~zero & ((code < 1) | (exponent == 0))
    own = torch.where(outlying | zero, 0, (code << 7) | (bits & 0x7F)) | torch.where(outlying, 0, bits & 0x8000)
    w0, w1, w2, w3 = own.unflatten(-1, (-1, 4, QUARTER)).permute(0, 2, 3, 1, 4).unbind(2)
    w0 = w0 | ((w3 & 0x780) << 4)
    w1 = w1 | ((w3 & 0x78) << 8)
    w2 = w2 | ((w3 & 7) << 12) | ((w3 & 0x8000) >> 4)
    return _as_int16(torch.stack([w0, w1, w2], 2)), largest[..., 0], outlying


def _as_int16(bits: Tensor) -> Tensor:
    """The lower 16 bits, contiguous."""
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).contiguous()


def lossless_gemm_reference(x: Tensor, weight: LosslessWeight, kind: Gate = "silu") -> Tensor:
    """The sum of the parts in float32 [rows, n], or the rounded product of activated gate and up [rows, n / 2]."""
    whole = decompress(weight)
    return gated_rows_reference(x, whole, kind) if weight.gated else x.to(torch.float32) @ whole.to(torch.float32).T


def lossless_gemm(
    x: Tensor,
    weight: LosslessWeight,
    launch: LosslessLaunch,
    gpu: GpuTraits,
    kind: Gate = "silu",
    sums: AdapterSums | None = None,
) -> Tensor:
    """The product as `kernels.gemm.skinny_gemm` gives it: parts [parts, rows, n], or [rows, n / 2] of a gated weight.

    x: [rows, k] bfloat16 (in the interpreter float32), contiguous, rows <= MAX_ROWS. The weight's n is a multiple of
    `block_n`, which is one of 64, or 128 if gated; k is one of `128 * splits`. Several splits give their parts in
    float32. sums: what adapters add, in the first split, to gates and ups before they are activated.
    """
    rows, k = x.shape
    lines = len(weight.scale)
    n = lines // 2 if weight.gated else lines
    assert rows <= MAX_ROWS
    assert lines % launch.block_n == 0
    assert k % (launch.splits * BLOCK) == 0
    assert x.is_contiguous()
    shape = (rows, n) if weight.gated else (launch.splits, rows, n)
    out = torch.empty(shape, dtype=x.dtype if launch.splits == 1 else torch.float32, device=x.device)
    assert has_steps(weight, launch)
    options, (added, sizes) = launch_options(gpu), arguments(sums, x)
    _compressed_kernel[(lines // launch.block_n, launch.splits)](
        out, x, weight.words, weight.scale, weight.starts, weight.lines, weight.columns, weight.values,
        rows, n, k, k // launch.splits, *added, **sizes, picks=launch.picks, block_m=max(16, power_of_two(rows)),
        block_n=launch.block_n, kind=kind if weight.gated else None, hopper=gpu.can_overlap, overlap=gpu.can_overlap,
        num_stages=launch.num_stages, num_warps=launch.num_warps, **options,
    )  # fmt: skip
    return out


@jit
def _compressed_kernel(
    out: Arg, x: Arg, words: Arg, scale: Arg, starts: Arg, lines: Arg, columns: Arg, values: Arg,
    rows: Arg, n: Arg, k: Arg, share: Arg, inner: Arg, b: Arg, bounds: Arg, slots: Arg, present: Arg, per_row: Arg,
    most: Arg, shares: constexpr, rank: constexpr, ranks: constexpr, joins: constexpr, picks: constexpr,
    block_m: constexpr, block_n: constexpr, kind: constexpr, hopper: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of lines, which are outputs or gates and ups, over one share of k. Grid (lines / block_n, splits).

    out: [splits, rows, n]; x: [rows, k]; the rest as in `LosslessWeight`. The block's outliers are shared among the
    splits. They are added `picks` a step, each with its number of x, in the first steps, whose other weights are on
    their way meanwhile; the launch has steps enough. inner .. joins: as of `_skinny_gemm_kernel`.
    """
    line = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(1)
    start = split * share
    block = (line // 64).to(tl.int64) * (k // 128) + start // 128
    at = words + block * 6144 + line % 64 * 32  # a block has 3 * 64 * 32 words
    if overlap:
        ask_for(at[:, None] + tl.minimum(tl.arange(0, 4) * 2048, share * 48 - 2048)[None, :])
    factor = tl.load(scale + line)[:, None]
    stride = tl.num_programs(1) * picks
    first = tl.load(starts + tl.program_id(0) * (block_n // 64)) + split * picks
    end = tl.load(starts + (tl.program_id(0) + 1) * (block_n // 64))
    pick = tl.arange(0, picks)
    where, column, value = _outliers(first + pick, end, lines, columns, values)
    pdl_wait(overlap, early=True)
    size = n if kind is None else 2 * n
    whose = line if kind is None else line // 128 * 64 + line % 64 + line // 64 % 2 * n
    if shares > 0 and overlap and split == 0:
        ask_for_sums(whose, size, b, present, most, rank)

    dtype: constexpr = x.dtype.element_ty
    row = tl.arange(0, block_m)
    there = (row < rows)[:, None]
    x_row = x + row[:, None] * k
    total = tl.zeros([block_n, block_m], tl.float32)
    lane = tl.arange(0, 32)[None, :]
    for i in range(0, share, 128):
        if first < end:
            picked = tl.load(x_row + column[None, :], mask=there, other=0.0)
            total = tl.dot(_spread(line, where, value, dtype), tl.trans(picked), total)
            first += stride
            where, column, value = _outliers(first + pick, end, lines, columns, values)
        word = at[:, None] + i * 48 + lane
        w0, w1, w2, w3 = _weights(_stream(word), _stream(word + 2048), _stream(word + 4096), dtype, hopper)
        x_at = x_row + start + i + lane
        total = tl.dot(w0, tl.trans(tl.load(x_at, mask=there, other=0.0)), total)
        total = tl.dot(w1, tl.trans(tl.load(x_at + 32, mask=there, other=0.0)), total)
        total = tl.dot(w2, tl.trans(tl.load(x_at + 64, mask=there, other=0.0)), total)
        total = tl.dot(w3, tl.trans(tl.load(x_at + 96, mask=there, other=0.0)), total)
    total *= factor
    if shares > 0 and split == 0:
        total = add_sums(
            total, whose, size, row, rows, inner, b, bounds, slots, present, per_row, most, shares, rank, ranks, joins,
            False,
        )  # fmt: skip

    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    if kind is not None:
        halves = tl.permute(tl.reshape(total, [block_n // 128, 2, 64, block_m]), [0, 2, 3, 1])
        gate, up = tl.split(halves)
        total = tl.reshape(activated(gate, kind) * up, [block_n // 2, block_m])
        output = tl.program_id(0) * (block_n // 2) + tl.arange(0, block_n // 2)
    out_at = out + (split * rows + row[None, :]) * n + output[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(row < rows)[None, :])


@jit
def _outliers(at: Arg, end: Arg, lines: Arg, columns: Arg, values: Arg) -> Arg:
    """Line, column and value of the outliers `at`; those past the end lie in no line."""
    there = at < end
    line = tl.load(lines + at, mask=there, other=-1)
    return line, tl.load(columns + at, mask=there, other=0), tl.load(values + at, mask=there, other=0.0)


@jit
def _spread(line: Arg, where: Arg, value: Arg, dtype: constexpr) -> Arg:
    """Outliers as a matrix [lines, outliers] that has each value in its line."""
    return tl.where(line[:, None] == where[None, :], value.to(dtype)[None, :], 0.0).to(dtype)


@jit
def _stream(at: Arg) -> Arg:
    """Words that no one will read again soon."""
    return tl.load(at, eviction_policy="evict_first")


@jit
def _weights(w0: Arg, w1: Arg, w2: Arg, dtype: constexpr, hopper: constexpr) -> Arg:
    """The weights of four quarters over their row's scale, from three words each, in `dtype`, on Hopper bfloat16.

    With its code as exponent a number is 2 ** 112 times too small, and 0, of code 0, stays what it is.
    """
    if hopper:  # two words at a time
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, s, up;
            mov.b32 up, 0x77807780;
            and.b32 a, $4, 0x87ff87ff;
            and.b32 b, $5, 0x87ff87ff;
            and.b32 c, $6, 0x87ff87ff;
            shr.b32 d, $4, 4;
            and.b32 d, d, 0x07800780;
            shr.b32 s, $5, 8;
            lop3.b32 d, s, 0x00780078, d, 0xea;
            shr.b32 s, $6, 12;
            lop3.b32 d, s, 0x00070007, d, 0xea;
            shl.b32 s, $6, 4;
            lop3.b32 d, s, 0x80008000, d, 0xea;
            mul.bf16x2 $0, a, up;
            mul.bf16x2 $1, b, up;
            mul.bf16x2 $2, c, up;
            mul.bf16x2 $3, d, up;
            }""",
            "=r,=r,=r,=r,r,r,r",
            [w0, w1, w2],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    w0, w1, w2 = w0.to(tl.int32), w1.to(tl.int32), w2.to(tl.int32)
    w3 = ((w0 >> 4) & 0x780) | ((w1 >> 8) & 0x78) | ((w2 >> 12) & 7) | ((w2 << 4) & 0x8000)
    return _number(w0).to(dtype), _number(w1).to(dtype), _number(w2).to(dtype), _number(w3).to(dtype)


@jit
def _number(bits: Arg) -> Arg:
    """2 ** 112 times the number that these bits, without the upper four of the exponent, are."""
    wide = ((bits & 0x87FF) << 16).to(tl.float32, bitcast=True)
    return wide * 5192296858534827628530496329220096.0
