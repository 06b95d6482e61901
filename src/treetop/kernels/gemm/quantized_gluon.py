"""`quantized_gemm` of many rows for Hopper, in Gluon: weights are decoded while tensor cores multiply others.

One warp copies blocks of rows and of codes to shared memory, in rings of slots with a barrier for what is full and one
for what is free. Eight warps take a block's codes to registers and decode one part of its columns, half or a quarter,
while the product of the part before is under way: a decoded part is that product's left operand and goes through no
memory. So each weight is decoded once for up to 256 rows. Columns come in their order, with one sum, so bits are those
of the kernel in plain Triton, which serves where this one does not.
Source of the division of work: "Machete", vLLM; CUTLASS, "Efficient GEMM in CUDA", warp specialization.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options
from treetop.kernels.gate import Gate, activated
from treetop.kernels.gemm.quantized_weight import Numbers
from treetop.kernels.gemm.tiles import (
    BLOCK,
    TILE,
    TiledWeight,
    moved_number,
    scale_blocks,
    scale_of,
    tile_arguments,
    tile_options,
    times,
)
from treetop.kernels.gluon_guard import (
    async_load,
    fence_async_shared,
    gl,
    gluon_jit,
    gluon_jit_for_any,
    mbarrier,
    swizzled_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
    why_no_gluon,
)
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, tl

FEWEST_ROWS = 65
"""Fewer go to the kernel in plain Triton."""
_WARPS, _STEP = 8, 64
"""Warps that multiply; columns of a slot of rows."""
BLOCKS = ((128, 256), (256, 128))
"""Rows and lines of a program, whose sums just have room in the registers."""
_SPARE = 18 << 10
"""Bytes of shared memory for barriers and for what changes its layout at the end."""


@dataclass(frozen=True, slots=True)
class GluonLaunch:
    """How a product is cut: rows and lines of a program, splits of k; slots of rows and of codes."""

    block_m: int
    block_n: int
    splits: int
    row_slots: int
    code_slots: int


def why_not(weight: TiledWeight, dtype: torch.dtype, gpu: GpuTraits) -> str | None:
    """Why this kernel does not multiply rows of `dtype` with a weight; None if it does."""
    if not gpu.can_overlap or not gpu.by_warp_groups or gpu.has_tensor_memory:
        return "it was made for compute capability 9.0 alone"
    if (problem := why_no_gluon(weight.words.device)) is not None:
        return problem
    if not tile_options(weight, dtype, gpu)["fast"]:
        return f"weights are not decoded in bfloat16 for products in {dtype}"
    if weight.form != "bytes" and weight.scheme.group % BLOCK:
        return f"groups of {weight.scheme.group}"
    if weight.zero is not None:
        return "zeros lie apart from scales"
    return f"{weight.shape[-1]} columns are no multiple of 8" if weight.shape[-1] % 8 else None


def launch_of(numbers: Numbers, k: int, block: tuple[int, int], splits: int, gpu: GpuTraits) -> GluonLaunch:
    """Of one of `BLOCKS`. Slots fill shared memory: of codes two at least, and about as many columns of rows.

    splits: at most, for each has a block of k.
    """
    block_m, block_n = block
    blocks = -(-k // BLOCK)
    code_bytes, row_bytes = block_n * BLOCK // (1 if numbers == "e4m3" else 2), 2 * block_m * _STEP
    room = gpu.shared_bytes - _SPARE
    code_slots = max(2, room // (code_bytes + 2 * row_bytes))
    row_slots = (room - code_slots * code_bytes) // row_bytes
    return GluonLaunch(block_m, block_n, -(-blocks // -(-blocks // splits)), row_slots, code_slots)


@cache
def choose(numbers: Numbers, shape: tuple[int, int], rows: int, splits: int, most: int, gpu: GpuTraits) -> GluonLaunch:
    """The block by which a multiprocessor has the least to multiply.

    splits: of k, up to `most` rows; more have at most as many, where programs are too few without.
    """
    (lines, k), found = shape, dict[GluonLaunch, int]()
    for block in BLOCKS:
        programs = -(-rows // block[0]) * -(-lines // block[1])
        cuts = splits if rows <= most else max(1, min(splits, gpu.num_sms // programs))
        launch = launch_of(numbers, k, block, cuts, gpu)
        found[launch] = -(-programs * launch.splits // gpu.num_sms) * -(-k // (BLOCK * launch.splits))
    return min(found, key=found.__getitem__)


def multiply(
    out: Tensor, x: Tensor, weight: TiledWeight, bias: Tensor | None, kind: Gate | None, launch: GluonLaunch,
    gpu: GpuTraits,
) -> None:  # fmt: skip
    """The product of x [rows, k] in bfloat16 into `out`, [splits, rows, lines], or with `kind` [rows, lines / 2].

    Each split must have a block of k.
    """
    (rows, k), lines = x.shape, weight.shape[0]
    width = weight.words.shape[-1]
    blocks = -(-k // BLOCK)
    share = -(-blocks // launch.splits)
    assert (launch.splits - 1) * share < blocks
    options = tile_options(weight, x.dtype, gpu)
    del options["fast"], options["has_zero"]
    words, scale, factor, _ = tile_arguments(weight)
    _product_kernel[(-(-rows // launch.block_m), -(-lines // launch.block_n), launch.splits)](
        out, swizzled_tiles(x, launch.block_m, _STEP), swizzled_tiles(words.view(-1, width), TILE, width), scale,
        factor, x if bias is None else bias, rows, lines, k, share, **options, has_bias=bias is not None,
        block_m=launch.block_m, block_n=launch.block_n, piece=min(width, 64 * 128 // launch.block_n), kind=kind,
        row_slots=launch.row_slots, code_slots=launch.code_slots, num_warps=_WARPS, **launch_options(gpu),
    )  # fmt: skip


@gluon_jit_for_any("rows", "k", "share")
def _product_kernel(
    out: Arg, x: Arg, words: Arg, scale: Arg, factor: Arg, bias: Arg, rows: Arg, lines: Arg, k: Arg, share: Arg,
    numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, per: constexpr, has_bias: constexpr,
    block_m: constexpr, block_n: constexpr, piece: constexpr, kind: constexpr, row_slots: constexpr,
    code_slots: constexpr,
) -> None:  # fmt: skip
    """One block of lines and rows over one share of k. Grid (rows / block_m, lines / block_n, splits).

    x: descriptor of [block_m, 64]. words: of a tile's block. piece: columns that are decoded together. The rest as of
    `quantized_gemm._quantized_kernel`.
    """
    width: gl.constexpr = words.block_shape[1]
    split, blocks = gl.program_id(2), (k + 127) // 128
    first, last = split * share, gl.minimum((split + 1) * share, blocks)
    row, tile = gl.program_id(0) * block_m, gl.program_id(1) * (block_n // 64)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    row_ring = gl.allocate_shared_memory(gl.bfloat16, [row_slots, block_m, 64], x.layout)
    row_full = gl.allocate_shared_memory(gl.int64, [row_slots, 1], barrier)
    row_free = gl.allocate_shared_memory(gl.int64, [row_slots, 1], barrier)
    code_ring = gl.allocate_shared_memory(gl.int16, [code_slots, block_n, width], words.layout)
    code_full = gl.allocate_shared_memory(gl.int64, [code_slots, 1], barrier)
    code_free = gl.allocate_shared_memory(gl.int64, [code_slots, 1], barrier)
    rings = (row_ring, row_full, row_free, code_ring, code_full, code_free)
    for slot in gl.static_range(row_slots):
        mbarrier.init(row_full.index(slot), count=1)
        mbarrier.init(row_free.index(slot), count=1)
    for slot in gl.static_range(code_slots):
        mbarrier.init(code_full.index(slot), count=1)
        mbarrier.init(code_free.index(slot), count=1)
    fence_async_shared()
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    gl.warp_specialize(
        [
            (
                _multiply,
                (out, scale, factor, bias, rings, row, tile, first, last, rows, lines, k, numbers, scales, form, group,
                 per, has_bias, block_m, block_n, piece, kind, row_slots, code_slots, gl.num_warps()),
            ),
            (_copy, (x, words, rings, row, tile, first, last, lines, k, block_m, block_n, row_slots, code_slots)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon_jit
def _next(slot: Arg, turn: Arg, slots: constexpr) -> Arg:
    """The slot of a ring after another, and the parity of its turn."""
    slot += 1
    if slot == slots:
        slot = 0
        turn ^= 1
    return slot, turn


@gluon_jit
def _copy(
    x: Arg, words: Arg, rings: Arg, row: Arg, tile: Arg, first: Arg, last: Arg, lines: Arg, k: Arg,
    block_m: constexpr, block_n: constexpr, row_slots: constexpr, code_slots: constexpr,
) -> None:  # fmt: skip
    """Fill slots as they get free: of each block the codes, then both halves of the rows."""
    row_ring, row_full, row_free, code_ring, code_full, code_free = rings
    width: gl.constexpr = words.block_shape[1]
    blocks, tiles = (k + 127) // 128, (lines + 63) // 64
    row_slot, row_turn, code_slot, code_turn = 0, 1, 0, 1
    for block in range(first, last):
        mbarrier.wait(code_free.index(code_slot), code_turn)
        full = code_full.index(code_slot)
        mbarrier.expect(full, 2 * block_n * width)
        for each in gl.static_range(block_n // 64):
            at = (gl.minimum(tile + each, tiles - 1) * blocks + block) * 64
            async_load(words, [at, 0], full, code_ring.index(code_slot).slice(64 * each, 64, 0))
        code_slot, code_turn = _next(code_slot, code_turn, code_slots)
        for half in gl.static_range(2):
            mbarrier.wait(row_free.index(row_slot), row_turn)
            full = row_full.index(row_slot)
            mbarrier.expect(full, 128 * block_m)
            async_load(x, [row, 128 * block + 64 * half], full, row_ring.index(row_slot))
            row_slot, row_turn = _next(row_slot, row_turn, row_slots)


@gluon_jit
def _multiply(
    out: Arg, scale: Arg, factor: Arg, bias: Arg, rings: Arg, row: Arg, tile: Arg, first: Arg, last: Arg, rows: Arg,
    lines: Arg, k: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, per: constexpr,
    has_bias: constexpr, block_m: constexpr, block_n: constexpr, piece: constexpr, kind: constexpr,
    row_slots: constexpr, code_slots: constexpr, num_warps: constexpr,
) -> None:  # fmt: skip
    """Sum up all blocks and store. A product is given out before the one before it is waited for."""
    row_ring, row_full, row_free, code_ring, code_full, code_free = rings
    parts: gl.constexpr = 128 // piece
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_m, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    line = gl.arange(0, block_n, layout=gl.SliceLayout(1, left))
    blocks, tiles = (k + 127) // 128, (lines + 63) // 64
    tile_of, inside = gl.minimum(tile + line // 64, tiles - 1).to(gl.int64), line % 64
    f = inside.to(gl.float32)
    if scales == "times" or scales == "over":
        f = gl.load(factor + tile_of * 64 + inside)
    held = _held(scale, tile_of, inside, first, blocks, k, group, per)
    mbarrier.wait(code_full.index(0), 0)
    words = _words(code_ring.index(0), left, piece)
    before = _decoded(words, 0, held, f, left, numbers, scales, form, group, piece)
    mbarrier.wait(row_full.index(0), 0)
    right = row_ring.index(0).slice(0, piece, 1).permute((1, 0))
    total = gl.zeros([block_n, block_m], gl.float32, layout=mma)
    total = warpgroup_mma(before, right, total, use_acc=False, is_async=True)
    total, before = warpgroup_mma_wait(1, [total, before])
    row_slot, row_turn, code_slot, code_turn = 0, 0, 0, 0
    for block in range(first, last - 1):
        after = held
        if group > 0:  # asked for long before they are needed
            after = _held(scale, tile_of, inside, block + 1, blocks, k, group, per)
        for part in gl.static_range(1, parts):
            prior = row_slot
            total, before, row_slot, row_turn = _add(
                total, before, words, part, held, f, row_ring, row_full, row_slot, row_turn, left, numbers, scales,
                form, group, piece, row_slots,
            )  # fmt: skip
            if part * piece % 64 == 0:
                mbarrier.arrive(row_free.index(prior), count=1)
        mbarrier.arrive(code_free.index(code_slot), count=1)
        code_slot, code_turn = _next(code_slot, code_turn, code_slots)
        mbarrier.wait(code_full.index(code_slot), code_turn)
        words, held, prior = _words(code_ring.index(code_slot), left, piece), after, row_slot
        total, before, row_slot, row_turn = _add(
            total, before, words, 0, held, f, row_ring, row_full, row_slot, row_turn, left, numbers, scales, form,
            group, piece, row_slots,
        )  # fmt: skip
        mbarrier.arrive(row_free.index(prior), count=1)
    for part in gl.static_range(1, parts):
        total, before, row_slot, row_turn = _add(
            total, before, words, part, held, f, row_ring, row_full, row_slot, row_turn, left, numbers, scales, form,
            group, piece, row_slots,
        )  # fmt: skip
    total, before = warpgroup_mma_wait(0, [total, before])
    _store(
        out, total, factor, bias, row, tile, tiles, rows, lines, scales, has_bias, block_m, block_n, kind, mma,
        num_warps,
    )  # fmt: skip


@gluon_jit
def _add(
    total: Arg, before: Arg, words: Arg, part: constexpr, held: Arg, f: Arg, ring: Arg, full: Arg, slot: Arg,
    turn: Arg, left: constexpr, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr,
    piece: constexpr, slots: constexpr,
) -> Arg:  # fmt: skip
    """Decode a part, give its product out and wait for the one before it, whose slot may then be free.

    before: the left operand of that one, whose registers are its own until then. Returns the sums, this one's operand,
    and where the ring is.
    """
    column: gl.constexpr = part * piece % 64
    w = _decoded(words, part, held, f, left, numbers, scales, form, group, piece)
    if column == 0:
        slot, turn = _next(slot, turn, slots)
        mbarrier.wait(full.index(slot), turn)
    right = ring.index(slot).slice(column, piece, 1).permute((1, 0))
    total = warpgroup_mma(w, right, total, is_async=True)
    total, before = warpgroup_mma_wait(1, [total, before])
    return total, w, slot, turn


@gluon_jit
def _held(scale: Arg, tile: Arg, inside: Arg, block: Arg, blocks: Arg, k: Arg, group: constexpr, per: constexpr) -> Arg:
    """Words of a block's scales of each line: two, or one twice."""
    if group == 0:
        at = tile * 64 + inside
    elif group % 128 == 0:
        at = (tile * scale_blocks(k, group) + block // (group // 128)) * 64 + inside
    else:
        at = (tile * blocks + block) * (per * 64) + inside
    first = gl.load(scale + at)
    second = first
    if per == 2:
        second = gl.load(scale + at + 64)
    return first, second


@gluon_jit
def _words(codes: Arg, left: constexpr, piece: constexpr) -> Arg:
    """A block's words, in pieces, two or one twice. codes: in shared memory."""
    first = codes.slice(0, piece, 1).load(left)
    second = first
    if piece < codes.shape[1]:
        second = codes.slice(piece, piece, 1).load(left)
    return first, second


@gluon_jit
def _decoded(
    words: Arg, part: constexpr, held: Arg, f: Arg, left: constexpr, numbers: constexpr, scales: constexpr,
    form: constexpr, group: constexpr, piece: constexpr,
) -> Arg:  # fmt: skip
    """A part's weights in bfloat16, as `tiles._part` of a piece has them."""
    width: gl.constexpr = 64 if numbers == "e4m3" else 32
    of: gl.constexpr = part * piece // width
    word = words[part * piece % width // piece]
    if group == 16:  # of two groups
        step: gl.constexpr = 2 * part
        four = held[0] if step < 4 else held[1]
        s, m = scale_of(four, four, f, step % 4, numbers, scales, form, False, True)
        late, m = scale_of(four, four, f, step % 4 + 1, numbers, scales, form, False, True)
        if scales == "e4m3":
            s, late = s.to(gl.bfloat16), late.to(gl.bfloat16)
        column = gl.arange(0, piece, layout=gl.SliceLayout(0, left))
        s = gl.where(column[None, :] < 16, s[:, None], late[:, None])
    else:
        s, m = scale_of(held[0], held[0], f, part if group == 32 else 0, numbers, scales, form, False, True)
        s = s[:, None]
    return times(moved_number(word, of, numbers), s, m[:, None], numbers, form, scales, True, gl.bfloat16)


@gluon_jit
def _store(
    out: Arg, total: Arg, factor: Arg, bias: Arg, row: Arg, tile: Arg, tiles: Arg, rows: Arg, lines: Arg,
    scales: constexpr, has_bias: constexpr, block_m: constexpr, block_n: constexpr, kind: constexpr, mma: constexpr,
    num_warps: constexpr,
) -> None:  # fmt: skip
    """The end of a product: the factor of sums, the bias or the gate, and rounding."""
    split = gl.program_id(2)
    line = gl.arange(0, block_n, layout=gl.SliceLayout(1, mma))
    if scales == "e4m3":
        at = gl.minimum(tile + line // 64, tiles - 1).to(gl.int64) * 64 + line % 64
        total *= (gl.load(factor + at) * 256.0)[:, None]
    if kind is None:
        line += 64 * tile
        if has_bias and split == 0:
            total += gl.load(bias + line, mask=line < lines, other=0.0).to(gl.float32)[:, None]
        column = row + gl.arange(0, block_m, layout=gl.SliceLayout(0, mma))
        out += (split.to(gl.int64) * rows + row) * lines
        at = (column - row)[None, :] * lines + line[:, None]
        there = (line < lines)[:, None] & (column < rows)[None, :]
        gl.store(out + at, total.to(out.dtype.element_ty), mask=there)
    else:
        pairs: gl.constexpr = gl.BlockedLayout([1, 8, 2], [16, 2, 1], [num_warps // 2, 2, 1], [2, 0, 1])
        by_line: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
        both = gl.convert_layout(gl.permute(gl.reshape(total, [block_n // 2, 2, block_m]), (0, 2, 1)), pairs)
        gate, up = gl.split(both)
        n = lines // 2
        if has_bias:
            output = 32 * tile + gl.arange(0, block_n // 2, layout=gl.SliceLayout(1, gate.type.layout))
            gate += gl.load(bias + output, mask=output < n, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + n + output, mask=output < n, other=0.0).to(gl.float32)[:, None]
        value = gl.convert_layout((activated(gate, kind) * up).to(out.dtype.element_ty), by_line)
        output = 32 * tile + gl.arange(0, block_n // 2, layout=gl.SliceLayout(1, by_line))
        column = row + gl.arange(0, block_m, layout=gl.SliceLayout(0, by_line))
        there = (output < n)[:, None] & (column < rows)[None, :]
        gl.store(out + column.to(gl.int64)[None, :] * n + output[:, None], value, mask=there)
