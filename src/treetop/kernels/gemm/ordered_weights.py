"""Weights in 13 bits instead of 16, without loss and each at its place, for products of few rows whose k is not cut.

A code of 5 bits says which exponent a number has: nearly all lie within 30 of the largest of their row (of normally
distributed weights all but two in a thousand million), and 0 stays 0. So there is no list of outliers: the few times
128 rows with one lie in 16 bits. A decoded weight is the weight, and the tensor cores add up k as for 16 bits, so bits
are those of `kernels.gemm.skinny_gemm` without a cut.

Words of 16 bits lie as [n / 16, k / 256, 13, 32, 8]: tiles of 16 rows and 256 columns, in 16 parts of 16 columns. In
each plane a lane has eight words: for each of its eight weights of a part, as an operand of `mma.m16n8k16` has them in
registers, first those of the tile's rows up to 8, one word of all 16 parts.

    planes 0 .. 7     of parts 2i and 2i + 1 a byte each: the code's lowest bit and the mantissa
    planes 8 .. 11    of four parts the code's upper bits: 4i and 4i + 1 in the lower halves of the bytes, then the
                      two others in the upper
    plane 12          signs: of parts 2j and 2j + 1 in bits 7 - j and 15 - j

A byte, and one of the code's upper bits below the sign, are the two bytes of a bfloat16 whose exponent is the code; a
power of two for each row moves it where it belongs. So 8 weights take 15 instructions, and no layout changes. What has
16 bits lies as lanes have it, too, so that it is as quick.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options
from treetop.kernels.gate import Gate, activated
from treetop.kernels.gluon_guard import (
    async_gather,
    gather_commit,
    gather_wait,
    gl,
    gluon_jit,
    gluon_jit_for_any,
    mma_v2,
    why_no_gluon,
)
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, power_of_two, tl

GROUP, BLOCK, PLANES = 16, 256, 13
CHUNK = 8
"""Groups of lines that have codes, or none has: as many as a program has at most."""
MAX_ROWS = 32
_WORDS = PLANES * 256
"""Of a tile."""
_AT_ONCE = 2**19
"""Groups times k that are encoded at once, in some 350 MiB: an update keeps a GiB free for what is made on its way."""
_ROOM = 64
"""One in so many chunks may lie in 16 bits, and one more."""
_MOST_SHIFT = 127
"""Of the power of two that moves a row's codes: a bfloat16."""


@dataclass(frozen=True, slots=True)
class OrderedLaunch:
    """How a product is cut.

    groups: of 16 lines, of a program. slots: of its rings. num_warps: each has a group or two.
    rows_left: x is the left operand of the product, and four warps have half of a group each, of two.
    """

    groups: int
    slots: int
    num_warps: int
    rows_left: bool = False


@dataclass(frozen=True, slots=True)
class OrderedWeight:
    """A weight [n, k] in 13 bits a number.

    gated: each 16 lines are eight of its first half, and those of its second half.
    words: [n / 16, k / 256, 13, 32, 8] int16.
    scale: [n] bfloat16, a power of two a line, in the order of words.
    whole_at: [n / 128] int32, of each chunk where it lies in `whole`, or -1: it has codes.
    whole: [room, 8, k / 128, 8, 32, 8] bfloat16.
    """

    words: Tensor
    scale: Tensor
    whole_at: Tensor
    whole: Tensor
    gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it, where all lines are coded."""
        return self.words.nbytes + self.scale.nbytes + self.whole_at.nbytes


def why_not_ordered(dtype: torch.dtype, gpu: GpuTraits) -> str | None:
    """Why products with weights in 13 bits cannot run on a GPU; None if they can."""
    if dtype != torch.bfloat16:
        return "only bfloat16 weights have 13 bits"
    if not gpu.can_overlap:
        return "they need compute capability 9.0"
    return why_no_gluon(torch.device("cuda"))


def fits(n: int, k: int) -> bool:
    """Whether a weight [n, k] lies in whole tiles."""
    return n % GROUP == 0 and k % BLOCK == 0


def encode(weight: Tensor, gated: bool) -> OrderedWeight | None:
    """weight: [n, k] bfloat16, in whole tiles, contiguous. None if there is no room for all chunks without codes."""
    n, k = weight.shape
    assert weight.dtype == torch.bfloat16
    assert fits(n, k)
    groups, room, device = n // GROUP, _room(n), weight.device
    words = torch.empty((groups, k // BLOCK, PLANES, 32, 8), dtype=torch.int16, device=device)
    scale = torch.empty((groups, GROUP), dtype=torch.int16, device=device)
    coded = torch.ones(-(-groups // CHUNK) * CHUNK, dtype=torch.bool, device=device)
    lines = _lines(weight, gated)
    at_once = max(_AT_ONCE // k, 1)
    for at in range(0, groups, at_once):
        here = slice(at, min(at + at_once, groups))
        words[here], scale[here], coded[here] = _encoded(lines[here])
    chunks = len(coded) // CHUNK
    found = (~coded.view(chunks, CHUNK).all(1)).nonzero()[:, 0].tolist()
    if len(found) > room:
        return None
    whole_at = torch.full((chunks,), -1, dtype=torch.int32, device=device)
    whole = torch.zeros((room, CHUNK, k // 128, 8, 32, 8), dtype=weight.dtype, device=device)
    for place, chunk in enumerate(found):
        own = _in_parts(lines[chunk * CHUNK : (chunk + 1) * CHUNK])
        whole_at[chunk] = place
        whole[place, : len(own)] = own.view(-1, *whole.shape[2:])
    return OrderedWeight(words, scale.flatten().view(torch.bfloat16), whole_at, whole, gated)


def bytes_of(n: int, k: int) -> int:
    """Of a weight [n, k]: its words, and room for chunks in 16 bits."""
    return PLANES * n * k // 8 + 2 * _room(n) * CHUNK * GROUP * k


def _room(n: int) -> int:
    """Chunks of a weight of n lines that may lie in 16 bits."""
    return -(-n // (GROUP * CHUNK * _ROOM)) + 1


def decode(weight: OrderedWeight) -> Tensor:
    """The weight [n, k] bfloat16 again."""
    words = weight.words.to(torch.int32) & 0xFFFF
    low, codes, signs = words.split((8, 4, 1), 2)
    part = torch.arange(16, device=words.device)
    byte = (low[:, :, part // 2] >> (8 * (part % 2))[:, None, None]) & 0xFF
    code = (codes[:, :, part // 4] >> (8 * (part % 2) + 4 * (part // 2 % 2))[:, None, None]) & 0xF
    sign = (signs >> (7 - part // 2 + 8 * (part % 2))[:, None, None]) & 1
    lines = _of_parts(_as_int16(sign << 15 | code << 8 | byte).view(torch.bfloat16))
    lines *= weight.scale.view(-1, GROUP, 1)
    for chunk, place in enumerate(weight.whole_at.tolist()):
        if place >= 0:
            here = lines[chunk * CHUNK : (chunk + 1) * CHUNK]
            here[:] = _of_parts(weight.whole[place, : len(here)].reshape(len(here), -1, 16, 32, 8))
    halves = 2 if weight.gated else 1
    whole: Tensor = lines.unflatten(1, (halves, -1)).transpose(0, 1).reshape(-1, lines.shape[2])
    return whole


def _lines(weight: Tensor, gated: bool) -> Tensor:
    """A weight's lines in groups, [n / 16, 16, k]."""
    halves = 2 if gated else 1
    return weight.view(halves, -1, GROUP // halves, weight.shape[1]).transpose(0, 1).reshape(-1, GROUP, weight.shape[1])


def _encoded(lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Words, bits of the scale of each line, and whether a group's numbers all have codes, of lines [groups, 16, k]."""
    bits = lines.view(torch.int16).to(torch.int32) & 0xFFFF
    exponent, zero = (bits >> 7) & 0xFF, bits & 0x7FFF == 0
    shift = (exponent.amax(-1, keepdim=True) - 31).clamp(0, _MOST_SHIFT)
    code = torch.where(zero, 0, exponent - shift)
    coded = (zero | ((code > 0) & (code < 32) & (exponent > 0) & (exponent < 0xFF))).all(-1).all(-1)
    byte = _in_parts(bits & 0x7F | (code & 1) << 7)
    upper, sign = _in_parts(code >> 1 & 0xF), _in_parts(bits >> 15)
    low = byte[:, :, 0::2] | byte[:, :, 1::2] << 8
    quarters = upper.unflatten(2, (4, 4)).unbind(3)
    codes = quarters[0] | quarters[1] << 8 | quarters[2] << 4 | quarters[3] << 12
    place = torch.arange(16, device=lines.device)
    signs = (sign << (7 - place // 2 + 8 * (place % 2))[:, None, None]).sum(2, keepdim=True)
    words = torch.cat([low, codes, signs.to(low.dtype)], 2)
    return _as_int16(words), ((shift[..., 0] + 127) << 7).to(torch.int16), coded


def _in_parts(numbers: Tensor) -> Tensor:
    """[groups, 16, k] -> [groups, k / 256, 16, 32, 8]: of each part what a lane has of it."""
    groups, k = numbers.shape[0], numbers.shape[2]
    apart = numbers.view(groups, 2, 8, k // BLOCK, 16, 2, 4, 2)  # row, its lower 3 bits; part, 8, 2 and 1 columns
    return apart.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(groups, k // BLOCK, 16, 32, 8)


def _of_parts(numbers: Tensor) -> Tensor:
    """[groups, k / 256, 16, 32, 8] -> [groups, 16, k]."""
    apart = numbers.view(*numbers.shape[:3], 8, 4, 2, 2, 2).permute(0, 5, 3, 1, 2, 6, 4, 7)
    return apart.reshape(len(numbers), GROUP, -1)


def _as_int16(bits: Tensor) -> Tensor:
    """The lower 16 bits, contiguous."""
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).contiguous()


def shared_bytes(launch: OrderedLaunch, rows: int) -> int:
    """Shared memory of a launch: its slots of words and of x."""
    return 2 * launch.slots * (_WORDS * launch.groups + BLOCK * _block_rows(rows, launch))


def _block_rows(rows: int, launch: OrderedLaunch) -> int:
    return max(16 if launch.rows_left else 8, power_of_two(rows))


def ordered_gemm(
    x: Tensor,
    weight: OrderedWeight,
    launch: OrderedLaunch,
    gpu: GpuTraits,
    bias: Tensor | None = None,
    kind: Gate = "silu",
) -> Tensor:
    """The product as `skinny_gemm`, or `gated_rows` of a gated weight, gives it with `rounds`, to the bit.

    x: [rows, k] bfloat16, contiguous and where 16 bytes begin, rows <= MAX_ROWS. The weight's n is a multiple of 16
    times the launch's groups. bias: [n], of a weight without a gate. Returns [rows, n] or [rows, n / 2].
    """
    (rows, k), lines = x.shape, len(weight.scale)
    assert rows <= MAX_ROWS
    assert lines % (GROUP * launch.groups) == 0
    assert CHUNK % launch.groups == 0
    assert x.is_contiguous()
    assert bias is None or not weight.gated
    assert not launch.rows_left or ((launch.groups, launch.num_warps) == (2, 4) and not weight.gated)
    out = torch.empty((rows, lines // 2 if weight.gated else lines), dtype=x.dtype, device=x.device)
    _ordered_kernel[(lines // (GROUP * launch.groups),)](
        out, x, weight.words, weight.scale, weight.whole_at, weight.whole, weight.scale if bias is None else bias, rows,
        lines, k, has_bias=bias is not None, block_m=_block_rows(rows, launch), groups=launch.groups,
        kind=kind if weight.gated else None, slots=launch.slots, rows_left=launch.rows_left,
        num_warps=launch.num_warps, **launch_options(gpu),
    )  # fmt: skip
    return out


@gluon_jit_for_any("rows")
def _ordered_kernel(
    out: Arg, x: Arg, words: Arg, scale: Arg, whole_at: Arg, whole: Arg, bias: Arg, rows: Arg, lines: Arg, k: Arg,
    has_bias: constexpr, block_m: constexpr, groups: constexpr, kind: constexpr, slots: constexpr,
    rows_left: constexpr,
) -> None:  # fmt: skip
    """16 lines for each of `groups`, by all rows. Grid (lines / (16 * groups),).

    Each thread copies the words that it decodes, and waits for those of one block while others are on their way.
    """
    num_warps: gl.constexpr = gl.num_warps()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    low = gl.allocate_shared_memory(gl.int16, [slots, 8, groups, 32, 8], plain)
    codes = gl.allocate_shared_memory(gl.int16, [slots, 4, groups, 32, 8], plain)
    signs = gl.allocate_shared_memory(gl.int16, [slots, 1, groups, 32, 8], plain)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [slots, block_m, 256], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    row = gl.arange(0, block_m, layout=gl.SliceLayout(1, by_row))
    column = gl.arange(0, 256, layout=gl.SliceLayout(0, by_row))
    x_at = x + row[:, None] * k + column[None, :]
    first = gl.program_id(0) * groups
    place = gl.load(whole_at + first // 8)
    apart: gl.constexpr = num_warps // groups if num_warps > groups else 1
    own: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], [apart, num_warps // apart, 1, 1], [3, 2, 1, 0])
    halves: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 16, 0]],
        [[0, 0, 0, 4], [0, 1, 0, 0]],
        [],
        [1, 2, 32, 8],
    )
    lanes: gl.constexpr = halves if rows_left else own
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps] if rows_left else [num_warps, 1], [16, 8])
    shape: gl.constexpr = [block_m, 16 * groups] if rows_left else [16 * groups, block_m]
    total = gl.zeros(shape, gl.float32, layout=mma)
    if place < 0:
        rings = (low, codes, signs, x_ring)
        there = (row < rows)[:, None]
        total = _of_words(total, rings, x_at, there, words, scale, first, k, groups, slots, mma, own, lanes, rows_left)
    else:
        at = place * 8 + first % 8
        total = _of_whole(
            total, low, x_ring, x_at, row, column, whole, at, rows, k, groups, slots, mma, own, lanes, rows_left
        )  # fmt: skip
    if rows_left:
        total = gl.permute(total, (1, 0))
    if kind is not None:
        gate, up = gl.split(gl.permute(gl.reshape(total, [groups, 2, 8, block_m]), (0, 2, 3, 1)))
        gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        value = gl.reshape(activated(gate, kind) * up, [8 * groups, block_m])
        n = lines // 2
        line = gl.program_id(0) * (8 * groups) + gl.arange(0, 8 * groups, layout=gl.SliceLayout(1, value.type.layout))
    else:
        value, n = total.to(gl.bfloat16), lines
        line = gl.program_id(0) * (16 * groups) + gl.arange(0, 16 * groups, layout=gl.SliceLayout(1, value.type.layout))
        if has_bias:
            value = value.to(gl.float32) + gl.load(bias + line).to(gl.float32)[:, None]
    output_row = gl.arange(0, block_m, layout=gl.SliceLayout(0, value.type.layout))
    at = out + output_row.to(gl.int64)[None, :] * n + line[:, None]
    gl.store(at, value.to(gl.bfloat16), mask=(output_row < rows)[None, :])


@gluon_jit
def _of_words(
    total: Arg, rings: Arg, x_at: Arg, there: Arg, words: Arg, scale: Arg, first: Arg, k: Arg, groups: constexpr,
    slots: constexpr, mma: constexpr, own: constexpr, lanes: constexpr, rows_left: constexpr,
) -> Arg:  # fmt: skip
    """Add to sums, [lines, rows] or the other way round, what lines have that have codes. own, lanes: layouts
    of words, as they are copied and as they are decoded."""
    low, codes, signs, x_ring = rings
    blocks = k // 256
    at = words + first.to(gl.int64) * (blocks * 3328)
    low_at = _places(at, 0, 8, groups, blocks * 3328, own)
    codes_at = _places(at, 8, 4, groups, blocks * 3328, own)
    signs_at = _places(at, 12, 1, groups, blocks * 3328, own)
    for slot in gl.static_range(slots - 1):
        if slot < blocks:
            _copy(low.index(slot), low_at + slot * 3328)
            _copy(codes.index(slot), codes_at + slot * 3328)
            _copy(signs.index(slot), signs_at + slot * 3328)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, lanes))))
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lanes))))
    group = first + gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lanes))))
    line = (lane // 4)[None, None, :, None] + (word // 4 * 8)[None, None, None, :]
    by = gl.load(scale + (group[None, :, None, None] * 16 + line))
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(slots - 1):
        if slot < blocks:
            async_gather(x_ring.index(slot), x_at + slot * 256, mask=there)
        gather_commit()
    low_at += (slots - 1) * 3328
    codes_at += (slots - 1) * 3328
    signs_at += (slots - 1) * 3328
    x_at += (slots - 1) * 256
    slot, free = 0, slots - 1
    for block in range(blocks):
        gather_wait(slots - 2)
        if block + (slots - 1) < blocks:
            _copy(low.index(free), low_at)
            _copy(codes.index(free), codes_at)
            _copy(signs.index(free), signs_at)
            async_gather(x_ring.index(free), x_at, mask=there)
        gather_commit()
        low_at += 3328
        codes_at += 3328
        signs_at += 3328
        x_at += 256
        sign = signs.index(slot).load(lanes)
        for quarter in gl.static_range(4):
            a = low.index(slot).slice(2 * quarter, 1, 0).load(lanes)
            b = low.index(slot).slice(2 * quarter + 1, 1, 0).load(lanes)
            parts = _decoded(a, b, codes.index(slot).slice(quarter, 1, 0).load(lanes), sign, by, quarter)
            for part in gl.static_range(4):
                values = x_ring.index(slot).slice(64 * quarter + 16 * part, 16, 1)
                total = _add(total, parts[part], values, groups, mma, rows_left)
        slot, free = _next(slot, slots), _next(free, slots)
    gather_wait(0)
    return total


@gluon_jit
def _of_whole(
    total: Arg, ring: Arg, x_ring: Arg, x_at: Arg, row: Arg, column: Arg, whole: Arg, first: Arg, rows: Arg, k: Arg,
    groups: constexpr, slots: constexpr, mma: constexpr, own: constexpr, lanes: constexpr, rows_left: constexpr,
) -> Arg:  # fmt: skip
    """As `_of_words` of lines that lie in 16 bits, in blocks of 128 columns."""
    blocks = k // 128
    at = whole.to(gl.pointer_type(gl.int16)) + first.to(gl.int64) * (k * 16)
    at = _places(at, 0, 8, groups, k * 16, own)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(slots - 1):
        if slot < blocks:
            there = (row < rows)[:, None] & (column < k - slot * 128)[None, :]
            _copy(ring.index(slot), at + slot * 2048)
            async_gather(x_ring.index(slot), x_at + slot * 128, mask=there)
        gather_commit()
    slot, free = 0, slots - 1
    for block in range(blocks):
        gather_wait(slots - 2)
        ahead = block + (slots - 1)
        if ahead < blocks:
            there = (row < rows)[:, None] & (column < k - ahead * 128)[None, :]
            _copy(ring.index(free), at + ahead * 2048)
            async_gather(x_ring.index(free), x_at + ahead * 128, mask=there)
        gather_commit()
        for part in gl.static_range(8):
            w = ring.index(slot).slice(part, 1, 0).load(lanes).to(gl.bfloat16, bitcast=True)
            total = _add(total, w, x_ring.index(slot).slice(16 * part, 16, 1), groups, mma, rows_left)
        slot, free = _next(slot, slots), _next(free, slots)
    gather_wait(0)
    return total


@gluon_jit
def _next(slot: Arg, slots: constexpr) -> Arg:
    """The slot of a ring after another."""
    slot += 1
    if slot == slots:
        slot = 0
    return slot


@gluon_jit
def _places(at: Arg, plane: constexpr, planes: constexpr, groups: constexpr, pitch: Arg, own: constexpr) -> Arg:
    """Where planes of the first block lie, [planes, groups, 32, 8]. pitch: words from a group to the next."""
    p = plane + gl.arange(0, planes, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, own))))
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, own))))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, own))))
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, own))))
    inside = p[:, None, None, None] * 256 + lane[None, None, :, None] * 8 + word[None, None, None, :]
    return at + group.to(gl.int64)[None, :, None, None] * pitch + inside


@gluon_jit
def _copy(slot: Arg, at: Arg) -> None:
    """Ask for words that no one will read again soon."""
    async_gather(slot, at, eviction_policy="evict_first")


@gluon_jit
def _decoded(a: Arg, b: Arg, codes: Arg, signs: Arg, by: Arg, quarter: constexpr) -> Arg:
    """The weights of four parts. a, b: planes of bytes of two parts each. by: of each weight the power of two."""
    if quarter == 0:
        parts = _asked(a, b, codes, signs, by, _DECODE_0)
    elif quarter == 1:
        parts = _asked(a, b, codes, signs, by, _DECODE_1)
    elif quarter == 2:
        parts = _asked(a, b, codes, signs, by, _DECODE_2)
    else:
        parts = _asked(a, b, codes, signs, by, _DECODE_3)
    return parts


@gluon_jit
def _asked(a: Arg, b: Arg, codes: Arg, signs: Arg, by: Arg, asm: constexpr) -> Arg:
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r,r,r,r", [a, b, codes, signs, by],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon_jit
def _add(total: Arg, w: Arg, values: Arg, groups: constexpr, mma: constexpr, rows_left: constexpr) -> Arg:
    """Add the product of a part's weights [1, groups, 32, 8], as lanes have them, and of rows [block_m, 16] in shared
    memory. Weights are an operand of the tensor core in the registers where they are."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    w = gl.reshape(w, [groups, 8, 4, 2, 2, 2])  # lines 2, columns 3, lines 1, columns 2 and 1, as digits
    if rows_left:
        w = gl.reshape(gl.permute(w, (4, 2, 5, 0, 3, 1)), [16, 16 * groups])
        total = mma_v2(values.load(left), gl.convert_layout(w, right), total)
    else:
        w = gl.reshape(gl.permute(w, (0, 3, 1, 4, 2, 5)), [16 * groups, 16])
        total = mma_v2(gl.convert_layout(w, left), values.permute((1, 0)).load(right), total)
    return total


_DECODE = """{{
.reg .b32 t, u, s;
and.b32 t, $6, 0x0f0f0f0f;
shl.b32 s, $7, {first};
lop3.b32 t, s, 0x80808080, t, 0xea;
shr.b32 u, $6, 4;
and.b32 u, u, 0x0f0f0f0f;
shl.b32 s, $7, {second};
lop3.b32 u, s, 0x80808080, u, 0xea;
prmt.b32 s, $4, t, 0x6240;
mul.bf16x2 $0, s, $8;
prmt.b32 s, $4, t, 0x7351;
mul.bf16x2 $1, s, $8;
prmt.b32 s, $5, u, 0x6240;
mul.bf16x2 $2, s, $8;
prmt.b32 s, $5, u, 0x7351;
mul.bf16x2 $3, s, $8;
}}"""
"""Of two neighbours at a time. A conjunction and a disjunction are one `lop3`; `prmt` picks four of eight bytes."""
_DECODE_0 = constexpr(_DECODE.format(first=0, second=1))
_DECODE_1 = constexpr(_DECODE.format(first=2, second=3))
_DECODE_2 = constexpr(_DECODE.format(first=4, second=5))
_DECODE_3 = constexpr(_DECODE.format(first=6, second=7))
