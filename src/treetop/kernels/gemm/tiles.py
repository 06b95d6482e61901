"""Coded weights as a GPU reads them: tiles of 64 lines and 128 columns, decoded in registers on the way to a product.

A tile's codes are words of 16 bits, each with one code of every part of the tile's columns: two halves in e4m3, four
quarters in 4 bits. So two neighbouring words, which are a register, give two neighbouring weights of each part side by
side, where a tensor core wants them, and nothing moves between registers. Within a word:

    e4m3    the first half's code in bits 7 .. 0, the second's in 15 .. 8
    int4    the quarters' codes in bits 3 .. 0, 7 .. 4, 11 .. 8 and 15 .. 12
    e2m1    signs of the quarters in bits 15, 12, 9 and 10, sizes in 8 .. 6, 5 .. 3, 2 .. 0 and, of the last, 14, 13, 11

A line and group has one word of 32 bits of scales: a float32; or bits of a bfloat16 or a float16 in its upper half and
the group's zero in its lower half; or four scales of 8 bits; or what `scale_forms` makes of them. `decoding` is how a
weight is made of both.
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0; PTX ISA 8.5.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.gemm.decoding import moved_number, ready_times, times, times_256
from treetop.kernels.gemm.quantized_weight import MIDDLE, Numbers, QuantizedWeight, QuantScheme, decode
from treetop.kernels.gemm.scale_forms import (
    can_fold,
    codes_of_levels,
    halves,
    has_levels,
    levels,
    of_halves,
    of_one_level,
    without_zero_scales,
)
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl

TILE, BLOCK = 64, 128
_PIECE = 2**24
"""Numbers that are laid out together."""

Form = Literal["bfloat16", "float16", "float32", "bytes", "levels", "folded", "halves"]
"""Of scales in their words."""
Kind = Literal["e4m3", "int4", "folded", "e2m1", "e8m0", "levels", "halves"]
"""How weights are decoded: by their numbers alone, or by them and scales that lie ready or are powers of two."""
NUMBERS: dict[Kind, Numbers] = {
    **{"e4m3": "e4m3", "int4": "int4", "folded": "int4"},
    **dict.fromkeys(("e2m1", "e8m0", "levels", "halves"), "e2m1"),
}
_FOLDED = {"e4m3": 120, "e2m1": 126, "int4": 0}
"""Powers of two by which numbers are too small, that scales make up for."""


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """Weights of experts, or of one. Lines and columns are filled up with zeros to whole tiles.

    shape: ([experts,] lines, columns).
    words: [experts, tiles, blocks, TILE, 64 or 32] int16.
    scale: [experts, tiles, of columns, TILE] int32.
    factor: [experts, tiles, TILE] float32, of scales of two levels, or of sums.
    zero: as scale, where these are float32.
    form: of scales.
    wide: a scale is so large that decoding takes other arithmetic.
    """

    scheme: QuantScheme
    shape: tuple[int, ...]
    words: Tensor
    scale: Tensor
    factor: Tensor | None
    zero: Tensor | None
    form: Form
    wide: bool

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.words, self.scale, self.factor, self.zero) if each is not None)

    @property
    def kind(self) -> Kind:
        if self.form in ("folded", "levels", "halves"):
            return self.form
        return "e8m0" if self.scheme.scales == "e8m0" else self.scheme.numbers

    @property
    def per_block(self) -> int:
        """Words of scales of a line in one block, or in several."""
        return BLOCK // 32 if self.form == "halves" else _per_block(self.scheme)


def why_not_tiled(scheme: QuantScheme) -> str | None:
    """Why weights of a scheme do not lie in tiles; None if they can."""
    if scheme.minimums:
        return "groups with a minimum"
    if scheme.scales != "float32":
        return None if scheme.group in ((32,) if scheme.scales == "e8m0" else (16,)) else "groups of that size"
    fits = scheme.group % BLOCK == 0 or scheme.group in ((32, 64) if scheme.numbers == "e4m3" else (16, 32, 64))
    return None if fits else f"groups of {scheme.group} do not divide blocks of {BLOCK}"


def _per_block(scheme: QuantScheme) -> int:
    if scheme.scales == "float32":
        return 1 if scheme.group % BLOCK == 0 else BLOCK // scheme.group
    return BLOCK // scheme.group // 4


def tile(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> TiledWeight:
    """The tiles of a weight [experts, lines, columns] or [lines, columns], whose scheme can be in tiles.

    Some lines after the others, so that little is in memory twice. dtype: of all its products, where it is known:
    scales of two levels are then joined for bfloat16, of which `untile` finds others with the same weights in bfloat16.
    """
    assert weight.order is None
    assert why_not_tiled(weight.scheme) is None
    joined = halves(weight) if dtype == torch.bfloat16 else None
    if joined is not None:
        weight = of_one_level(weight)
    elif has_levels(weight):
        weight = without_zero_scales(weight)
    scheme, shape = weight.scheme, weight.shape
    lines, k = shape[-2:]
    number, device = prod(shape[:-2]), weight.codes.device
    tiles, blocks = -(-lines // TILE), -(-k // BLOCK)
    width = BLOCK // (2 if scheme.numbers == "e4m3" else 4)
    words = torch.empty((number, tiles, blocks, TILE, width), dtype=torch.int16, device=device)
    each = max(1, _PIECE // (TILE * BLOCK * blocks))
    runs = number if lines % TILE else 1  # where an expert ends with a tile, the next one goes on
    codes = weight.codes.reshape(runs, number // runs * lines, -1)
    for run, into in zip(codes, words.view(runs, -1, *words.shape[2:]), strict=True):
        for first in range(0, len(into), each):
            part = run[first * TILE : (first + each) * TILE]
            into[first : first + each] = _words_of(_filled(part, scheme, k, blocks), scheme)
    if joined is not None:
        two = _by_tile(joined.reshape(number, lines, -1), tiles, BLOCK // scheme.group * blocks).unflatten(2, (-1, 2))
        scale = two[:, :, :, 0] | two[:, :, :, 1] << 16
        return TiledWeight(scheme, (*shape,), words, scale, None, None, "halves", False)
    form = _form_of(weight)
    scale, zero = _scale_words(weight, form, tiles, blocks)
    factor = None
    if weight.factor is not None:
        factor = _by_tile(weight.factor.reshape(number, lines, 1), tiles, 1)[:, :, 0].contiguous()
    return TiledWeight(scheme, (*shape,), words, scale, factor, zero, form, _is_wide(weight))


def in_turn(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight [..., 2, n, columns] as [..., 2 * n, columns], in which lines of both take turns."""

    def turned(part: Tensor) -> Tensor:
        return part.transpose(-3, -2).flatten(-3, -2)

    factor, zero = (None if each is None else turned(each) for each in (weight.factor, weight.zero))
    return replace(weight, codes=turned(weight.codes), scale=turned(weight.scale), factor=factor, zero=zero)


def apart(lines: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The even and the odd ones along an axis: what `in_turn` put together."""
    first, second = lines.unflatten(axis, (-1, 2)).unbind(axis + 1 if axis >= 0 else axis)
    return first, second


def _filled(codes: Tensor, scheme: QuantScheme, k: int, blocks: int) -> Tensor:
    """Codes of lines [n, bytes] as [tiles, blocks, TILE, parts, columns] int32."""
    n = codes.shape[0]
    if scheme.in_byte == 2:
        codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)[:, :k]
    tiles, parts = -(-n // TILE), 2 if scheme.numbers == "e4m3" else 4
    whole = codes.new_zeros((tiles * TILE, blocks * BLOCK))
    whole[:n, :k] = codes
    return whole.view(tiles, TILE, blocks, parts, -1).transpose(1, 2).to(torch.int32)


def _words_of(codes: Tensor, scheme: QuantScheme) -> Tensor:
    """Parts [..., parts, columns] int32 as words [..., columns] int16."""
    if scheme.numbers == "e2m1":
        first, second, third, fourth = (((code & 8) << 12) | ((code & 7) << 6) for code in codes.unbind(-2))
        bits = first | (second >> 3) | (third >> 6)
        bits = bits | ((fourth & 0x180) << 6) | ((fourth & 0x40) << 5) | ((fourth & 0x8000) >> 5)
    else:
        shift = torch.arange(0, 16, 8 if scheme.numbers == "e4m3" else 4, dtype=torch.int32, device=codes.device)
        bits = (codes << shift[:, None]).sum(-2)
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16)


def _codes_of(words: Tensor, scheme: QuantScheme) -> Tensor:
    """The parts again."""
    bits = words.to(torch.int32)
    if scheme.numbers == "e2m1":
        fourth = ((bits >> 6) & 0x180) | ((bits >> 5) & 0x40) | ((bits << 5) & 0x8000)
        four = torch.stack([bits, bits << 3, bits << 6, fourth], -2)
        return ((four & 0x8000) >> 12) | ((four & 0x1C0) >> 6)
    step = 8 if scheme.numbers == "e4m3" else 4
    return torch.stack([(bits >> shift) & ((1 << step) - 1) for shift in range(0, 16, step)], -2)


def _form_of(weight: QuantizedWeight) -> Form:
    """The narrowest in which all scales are what they are."""
    if weight.scheme.scales != "float32":
        return "levels" if has_levels(weight) else "bytes"
    if can_fold(weight):
        return "folded"
    kinds: tuple[tuple[Form, torch.dtype], ...] = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    for name, dtype in kinds:
        if bool((weight.scale.to(dtype).to(torch.float32) == weight.scale).all()):
            return name
    return "float32"


def _is_wide(weight: QuantizedWeight) -> bool:
    """Whether a scale and what it makes up for is no bfloat16, or, of two levels, no float32 well inside its range."""
    scheme = weight.scheme
    if scheme.scales == "e8m0":
        return bool((weight.scale > 128).any())
    if scheme.scales == "e4m3":
        return False
    folded = 2.0 ** (126 - _FOLDED[scheme.numbers])
    if weight.factor is None:
        return scheme.numbers != "int4" and bool((weight.scale.abs() >= folded).any())
    largest = weight.factor.abs().max() if scheme.scales == "times" else 1 / weight.factor.abs().min().clamp(min=1e-30)
    return bool(448 * largest >= folded)


def _by_tile(scales: Tensor, tiles: int, groups: int) -> Tensor:
    """[experts, lines, g] as [experts, tiles, groups, TILE], filled up with zeros."""
    number, lines, g = scales.shape
    whole = scales.new_zeros((number, tiles * TILE, groups))
    whole[:, :lines, :g] = scales
    return whole.view(number, tiles, TILE, groups).transpose(2, 3).contiguous()


def _scale_words(weight: QuantizedWeight, form: Form, tiles: int, blocks: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros in words [experts, tiles, of columns, TILE] int32."""
    scheme, lines = weight.scheme, weight.shape[-2]
    groups = scheme.groups_of(weight.columns)
    scale = weight.scale.reshape(-1, lines, groups)
    if form == "levels":
        scale = levels(scale)
    if form in ("bytes", "levels"):
        four = _by_tile(scale, tiles, 4 * _per_block(scheme) * blocks).unflatten(2, (-1, 4)).to(torch.int64)
        joined = four[:, :, :, 0] | four[:, :, :, 1] << 8 | four[:, :, :, 2] << 16 | four[:, :, :, 3] << 24
        return _int32(joined), None
    whole = groups if scheme.group % BLOCK == 0 else _per_block(scheme) * blocks
    made = _by_tile(scale.to(torch.float32), tiles, whole)
    zero = None
    if scheme.zeros:
        assert weight.zero is not None
        zero = _by_tile(weight.zero.reshape(-1, lines, groups).to(torch.int32), tiles, whole)
    elif scheme.numbers == "int4":
        zero = torch.full_like(made, MIDDLE, dtype=torch.int32)
    if form == "float32":
        return made.view(torch.int32), zero if scheme.zeros else None
    bits = made.to(torch.float16 if form == "float16" else torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    return bits if zero is None else bits | zero, None


def _int32(words: Tensor) -> Tensor:
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def untile(weight: TiledWeight) -> QuantizedWeight:
    """What `tile` was given, [experts, lines, columns] or [lines, columns]."""
    scheme, (lines, k) = weight.scheme, weight.shape[-2:]
    lead = weight.shape[:-2]

    def lines_of(parts: Tensor) -> Tensor:
        """[experts, tiles, groups, TILE] as [..., lines, groups]."""
        return parts.transpose(2, 3).flatten(1, 2)[:, :lines].reshape(*lead, lines, -1)

    codes = _codes_of(weight.words, scheme).flatten(-2).transpose(2, 3).flatten(3).flatten(1, 2)[:, :lines, :k]
    codes = codes.to(torch.uint8)
    if scheme.in_byte == 2:
        even, odd = torch.nn.functional.pad(codes, (0, k % 2)).unflatten(-1, (-1, 2)).unbind(-1)
        codes = even | odd << 4
    codes = codes.reshape(*lead, lines, -1)
    words, zero, groups = weight.scale, weight.zero, scheme.groups_of(k)
    if weight.form in ("bytes", "levels"):
        shift = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
        scale = ((words[:, :, :, None] >> shift[:, None]) & 0xFF).flatten(2, 3).to(torch.uint8)
        if weight.form == "levels":
            scale = codes_of_levels(scale)
    elif weight.form == "halves":
        scale = of_halves(torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], 3).flatten(2, 3))
    elif weight.form == "float32":
        scale = words.view(torch.float32)
    else:
        dtype = torch.float16 if weight.form == "float16" else torch.bfloat16
        scale, zero = (words >> 16).to(torch.int16).view(dtype).to(torch.float32), words & 0xFF
    factor = None if weight.factor is None else lines_of(weight.factor[:, :, None])
    held = lines_of(zero)[..., :groups].to(torch.uint8) if scheme.zeros and zero is not None else None
    return QuantizedWeight(scheme, k, codes, lines_of(scale)[..., :groups], factor, held)


def decode_tiles_reference(
    weight: TiledWeight, first: int, stop: int, dtype: torch.dtype, parted: bool = False
) -> Tensor:
    """Lines from first up to stop of a weight of no experts, [lines, columns]; first is a multiple of TILE.

    parted: even lines come before odd ones, so gates before ups.
    """
    lines = decode(untile(weight).rows(first, stop)).to(dtype)
    return torch.cat(apart(lines, 0)) if parted else lines


# -------------------------------------------------------------------------------------------------------- the kernel


def decode_tiles(
    weight: TiledWeight, first: int, stop: int, dtype: torch.dtype, gpu: GpuTraits, parted: bool = False
) -> Tensor:
    """`decode_tiles_reference` in one launch."""
    assert first % TILE == 0
    assert not parted or stop % 2 == 0
    k, blocks = weight.shape[-1], weight.words.shape[2]
    out = torch.empty((stop - first, k), dtype=dtype, device=weight.words.device)
    _decode_tiles_kernel[(-(-(stop - first) // TILE), blocks)](
        out, *tile_arguments(weight), first // TILE, stop - first, k, **tile_options(weight, dtype, gpu),
        parted=parted, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


def tile_arguments(weight: TiledWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel reads of a weight."""
    words, scale, factor, zero = weight.words, weight.scale, weight.factor, weight.zero
    assert all(each.is_contiguous() for each in (words, scale))
    return words, scale, scale if factor is None else factor, scale if zero is None else zero


def tile_options(weight: TiledWeight, dtype: torch.dtype, gpu: GpuTraits) -> dict[str, object]:
    """What a kernel is compiled for. dtype: of the product."""
    scheme = weight.scheme
    return {
        "numbers": scheme.numbers, "scales": scheme.scales, "form": weight.form, "group": scheme.group,
        "has_zero": weight.zero is not None, "per": weight.per_block, "whole_blocks": weight.shape[-1] % BLOCK == 0,
        "fast": gpu.has_bfloat16 and dtype == torch.bfloat16 and not weight.wide,
    }  # fmt: skip


@jit
def _decode_tiles_kernel(
    out: Arg, words: Arg, scale: Arg, factor: Arg, zero: Arg, first: Arg, lines: Arg, k: Arg, numbers: constexpr,
    scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr, per: constexpr, whole_blocks: constexpr,
    fast: constexpr, parted: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The weights of a tile and block, without a factor of sums. Grid (tiles, blocks)."""
    pdl_wait(overlap)
    whole: constexpr = 64 if numbers == "e4m3" else 32
    width: constexpr = whole if group == 0 or group >= whole else group
    dtype: constexpr = out.dtype.element_ty
    block, blocks = tl.program_id(1), tl.num_programs(1)
    inside = tl.arange(0, 64)
    line = tl.program_id(0) * 64 + inside
    tile = first + tl.program_id(0) + inside * 0
    tile = tile.to(tl.int64)
    f = tl.load(factor + tile * 64 + inside) if scales == "times" or scales == "over" else inside.to(tl.float32)
    s, m = f, f
    if group % 128 == 0:
        of = tile * scale_blocks(k, group)
        if group > 0:
            of += block // (group // 128)
        s, m = _line_scale(scale, zero, f, of * 64 + inside, 0, numbers, scales, form, has_zero, fast)
    lane = tl.arange(0, width)[None, :]
    for piece in tl.static_range(0, whole // width):
        here = (tile * blocks + block) * 64 + inside
        word = tl.load(words + here[:, None] * whole + piece * width + lane)
        for part in tl.static_range(0, 128 // whole):
            w = _part(
                word, part, part * whole + piece * width, s, m, scale, zero, f,
                (tile * blocks + block) * (per * 64) + inside, numbers, scales, form, group, has_zero, fast, dtype,
            )  # fmt: skip
            if (scales == "e4m3" or form == "folded") and fast:
                w = times_256(w)
            column = block * 128 + part * whole + piece * width + lane
            there = (line < lines)[:, None] if whole_blocks else (line < lines)[:, None] & (column < k)
            place = line % 2 * (lines // 2) + line // 2 if parted else line
            tl.store(out + place.to(tl.int64)[:, None] * k + column, w, mask=there)


@jit
def tile_product(
    x_at: Arg, x_there: Arg, words: Arg, scale: Arg, factor: Arg, zero: Arg, tile: Arg, inside: Arg, first: Arg,
    last: Arg, k: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr,
    per: constexpr, whole_blocks: constexpr, fast: constexpr, block_m: constexpr, block_n: constexpr, dtype: constexpr,
) -> Arg:  # fmt: skip
    """The product of lines with rows over blocks first .. last, [block_n, block_m] float32, times a factor of sums.

    x_at: [block_m, 1], where rows begin; x_there: [block_m], whether they are there. tile, inside: [block_n], the tile
    of each line and its place in that. whole_blocks: k is a multiple of 128.
    """
    whole: constexpr = 64 if numbers == "e4m3" else 32
    width: constexpr = whole if group == 0 or group >= whole else group
    blocks = (k + 127) // 128
    groups = scale_blocks(k, group)
    lane = tl.arange(0, width)[None, :]
    tile = tile.to(tl.int64)
    f = tl.load(factor + tile * 64 + inside) if scales == "times" or scales == "over" else inside.to(tl.float32)
    total = tl.zeros([block_n, block_m], tl.float32)
    s, m = f, f
    if fast and (form == "folded" or form == "halves" or form == "levels" or scales == "e8m0"):
        s, m = inside.to(tl.int32), inside.to(tl.int32)
    if group == 0:
        s, m = _line_scale(scale, zero, f, tile * 64 + inside, 0, numbers, scales, form, has_zero, fast)
    word_at = words + ((tile * blocks + first) * 64 + inside)[:, None] * whole + lane
    of_block = (tile * blocks + first) * (per * 64) + inside
    x_at += first * 128 + lane
    for block in range(first, last):
        if group > 128 and group % 128 == 0:
            of = (tile * groups + block // (group // 128)) * 64 + inside
            s, m = _line_scale(scale, zero, f, of, 0, numbers, scales, form, has_zero, fast)
        elif group == 128:
            s, m = _line_scale(scale, zero, f, of_block, 0, numbers, scales, form, has_zero, fast)
        word = tl.load(word_at, eviction_policy="evict_first")
        late = word
        if width < whole:
            late = tl.load(word_at + width, eviction_policy="evict_first")
        for piece in tl.static_range(0, 128 // width):  # columns in their order
            w = _part(
                word if piece * width % whole == 0 else late, piece * width // whole, piece * width, s, m, scale, zero,
                f, of_block, numbers, scales, form, group, has_zero, fast, dtype,
            )  # fmt: skip
            there = x_there[:, None]
            if not whole_blocks:
                there = there & (block * 128 + piece * width + lane < k)
            values = tl.load(x_at + piece * width, mask=there, other=0.0)
            total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
        word_at += 64 * whole
        of_block += per * 64
        x_at += 128
    if scales == "e4m3":
        of_sums = tl.load(factor + tile * 64 + inside)
        total *= (of_sums * 256.0 if fast else of_sums)[:, None]
    elif form == "folded" and fast:
        total *= 256.0
    return total


@jit
def scale_blocks(k: Arg, group: constexpr) -> Arg:
    """Of a line's scales, each for whole blocks."""
    number = 1
    if group > 0:
        number = (k + group - 1) // group
    return number


@jit
def _part(
    word: Arg, part: constexpr, start: constexpr, s: Arg, m: Arg, scale: Arg, zero: Arg, f: Arg, at: Arg,
    numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr, fast: constexpr,
    dtype: constexpr,
) -> Arg:  # fmt: skip
    """A part's weights [lines, columns] in `dtype`, from the block's column `start` on, which are of one group.

    s, m: of the block, if all its columns share them. f: [lines], of scales of two levels. at: where words of the
    block's scales begin.
    """
    step: constexpr = start // group if group % 128 != 0 else 0
    if group % 128 != 0:
        s, m = _line_scale(scale, zero, f, at, step, numbers, scales, form, has_zero, fast)
    if fast and (form == "folded" or form == "halves" or form == "levels" or scales == "e8m0"):
        w = ready_times(word, s[:, None], part, step, form)
    else:
        n = _number(word, part, numbers, fast)
        w = times(n, s[:, None], m[:, None], numbers, form, scales, fast, dtype)
    return w


@jit
def _line_scale(
    scale: Arg, zero: Arg, f: Arg, at: Arg, step: constexpr, numbers: constexpr, scales: constexpr, form: constexpr,
    has_zero: constexpr, fast: constexpr,
) -> Arg:  # fmt: skip
    """Of each line the scale in float32, with what it makes up for if `fast`, and what integers are less by.

    Or the word that `ready_times` takes.
    """
    place: constexpr = step // 4 if form == "bytes" or form == "levels" else step // 2 if form == "halves" else step
    held = tl.load(scale + at + place * 64)
    m = tl.load(zero + at + step * 64) if has_zero else held
    if fast and (form == "folded" or form == "halves" or form == "levels" or scales == "e8m0"):
        s = held
    else:
        s, m = scale_of(held, m, f, step, numbers, scales, form, has_zero, fast)
    return s, m


@jit
def scale_of(
    held: Arg, m: Arg, f: Arg, step: constexpr, numbers: constexpr, scales: constexpr, form: constexpr,
    has_zero: constexpr, fast: constexpr,
) -> Arg:  # fmt: skip
    """What `_line_scale` returns in float32, of words that were loaded. m: of zeros, where there are some."""
    if form == "levels":
        s = (((held >> (step % 4 * 8)) & 0xFF) << 20 | 0x70000000).to(tl.float32, bitcast=True)
        if not fast:
            s = s * 3.009265538105056e-36
        m = s
    elif form == "halves":
        half = held >> (step % 2 * 16)
        less = 0x4000 if fast else 0x100
        bits = ((half & 0x3FFF) + less) << 16
        low = (((bits & 0x7F800000) - 0x4800000) | 0x400000 | (half << 16 & -2147483648)).to(tl.float32, bitcast=True)
        s = bits.to(tl.float32, bitcast=True) + tl.where((half & 0x4000) != 0, low, 0.0)
        m = s
    elif form == "bytes":
        if scales == "e8m0":
            bits = (held >> (step % 4 * 8)) & 0xFF
            if fast:
                s = ((bits + 126) << 23).to(tl.float32, bitcast=True)
            else:
                s = tl.maximum(bits << 23, 0x400000).to(tl.float32, bitcast=True)  # the least is a subnormal one
        else:  # the sign stays where it is, the rest moves to the end of the exponent
            bits = ((held << (24 - step % 4 * 8)) >> 4) & -0x78100000
            s = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
            if scales == "times":
                s = s * f
            elif scales == "over":
                s = tl.div_rn(s, tl.where(f == 0.0, 1.0, f))
        m = s
    else:
        if form == "float32":
            s = held.to(tl.float32, bitcast=True)
        elif form == "bfloat16" or form == "folded":
            s = (held & -65536).to(tl.float32, bitcast=True)
        else:
            s = (held >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if has_zero:
            m = m.to(tl.float32)
        elif form == "float32":
            m = (held * 0 + 8).to(tl.float32)
        else:
            m = (held & 0xFF).to(tl.float32)
    if fast and form != "levels" and form != "halves":
        if numbers == "int4":
            m = m + 128.0
        elif numbers == "e4m3":
            s = s * 1329227995784915872903807060280344576.0
        elif scales == "e4m3":
            s = s * 332306998946228968225951765070086144.0
        elif scales != "e8m0":
            s = s * 85070591730234615865843651857942052864.0
    return s, m


@jit
def _e4m3(code: Arg) -> Arg:
    """The numbers of codes that are no NaN, as float32: their bits with the exponent of a float32, 2 ** 120 apart."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0


@jit
def _number(word: Arg, part: constexpr, numbers: constexpr, fast: constexpr) -> Arg:
    """The numbers of a part: in float32; or if `fast` in bfloat16, too small or, of integers, 128 too large."""
    if fast:
        n = moved_number(word, part, numbers)
    elif numbers == "e4m3":
        n = _e4m3((word.to(tl.int32) >> (8 * part)) & 0xFF)
    elif numbers == "int4":
        n = ((word.to(tl.int32) >> (4 * part)) & 0xF).to(tl.float32)
    else:
        bits = word.to(tl.int32)
        moved = bits << (3 * part)
        if part == 3:
            moved = ((bits >> 6) & 0x0180) | ((bits >> 5) & 0x0040) | ((bits << 5) & 0x8000)
        n = ((moved & 0x81C0) << 16).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
    return n
