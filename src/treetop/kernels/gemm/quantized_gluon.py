"""`quantized_gemm` for Hopper, in Gluon: weights are decoded while tensor cores multiply others.

One warp copies blocks of codes to shared memory and another blocks of rows, in rings of slots with a barrier for what
is full and one for what is free, or in one ring where both have room three times. The other warps take a block's codes
to registers and decode 16 columns while the products of those before are under way: what is decoded is a product's left
operand and goes through no memory. So each weight is decoded once for up to 256 rows. A warp waits in a product until
the one before has read its registers, and for each result of its own decoding, so where decoding takes most 16 warps
have 16 lines each. Columns come in their order, with one sum, so bits are those of the kernel in plain Triton, which
serves where this one does not.
Source of the division of work: "Machete", vLLM; CUTLASS, "Efficient GEMM in CUDA", warp specialization.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options
from treetop.kernels.gate import Gate, activated
from treetop.kernels.gemm.decoding import moved_number, ready_times, times
from treetop.kernels.gemm.quantized_weight import Numbers
from treetop.kernels.gemm.tiles import (
    BLOCK,
    NUMBERS,
    TILE,
    Kind,
    TiledWeight,
    scale_blocks,
    scale_of,
    tile_arguments,
    tile_options,
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
from treetop.kernels.tuning import TunedTable, read_table

TABLE = Path(__file__).with_suffix(".json")
FEWEST_ROWS = 33
"""Fewer go to the kernel in plain Triton, unless this one was measured and is faster."""
_STEP = 64
"""Columns of a slot of rows."""
BESIDE = {(256, 128): 1, (128, 256): 1, (128, 128): 1, (64, 128): 2, (64, 64): 3}
"""Rows and lines of a block, and programs of a multiprocessor. Of the larger ones sums just have room in the registers;
the two of 64 rows are for as many at most, but (64, 64) up to 128 where k is not cut and programs would be few.
"""
_LONG = {
    ("e4m3", False): (1.42, 1.57, 0.85, 1.13, 0.80),
    ("e4m3", True): (1.42, 1.57, 0.85, 1.13, 0.80),
    ("int4", False): (1.55, 1.67, 1.09, 1.28, 0.95),
    ("int4", True): (1.38, 1.46, 1.10, 1.28, 0.95),
    ("e2m1", False): (1.43, 1.76, 1.14, 1.28, 0.95),
    ("e2m1", True): (1.50, 1.68, 1.17, 1.30, 0.95),
}
"""By numbers and whether gated, us that a multiprocessor takes for 128 columns of as many of each of these blocks as it
has room for: medians over the products of Llama-3.1-8B, Qwen3-8B and Qwen3-32B on an H200, before slots were joined,
but for the first two of gates in int4. Joined all of 4 bits take 0.70 to 0.95 of that, and choices stay."""
_JOIN = 2e6
"""Bytes of parts that are written and read again in a us."""
_SPARE = {False: 10 << 10, True: 34 << 10}
"""Bytes of shared memory for barriers and for what changes its layout at the end: more where over 8 warps multiply."""


@dataclass(frozen=True, slots=True)
class GluonLaunch:
    """How a product is cut: rows and lines of a block, splits of k; slots of rows and of codes; warps that multiply.

    stays: a program multiplies one block after another, and copies for the next while it stores.
    beside: programs that a multiprocessor has room for.
    ahead: products of 16 columns that are under way while the next one's weights are decoded, three at most.
    ready: scales are taken as they lie in words (`decoding.ready_times`), not by way of float32.
    joined: a block's codes and both halves of its rows are waited for and set free together, so `row_slots` is twice
        `code_slots`. Words of scales are then asked for as the last product that takes them is given out.
    """

    block_m: int
    block_n: int
    splits: int
    row_slots: int
    code_slots: int
    num_warps: int
    stays: bool = False
    beside: int = 1
    ahead: int = 2
    ready: bool = False
    joined: bool = False

    def max_registers(self) -> int:
        """Of a thread at the start, with which warps that copy are counted as four more."""
        return min(255, 65536 // (32 * (self.num_warps + 4) * self.beside) // 8 * 8)


def why_not(weight: TiledWeight, dtype: torch.dtype, gpu: GpuTraits) -> str | None:
    """Why this kernel does not multiply rows of `dtype` with a weight; None if it does."""
    if not gpu.can_overlap or not gpu.by_warp_groups or gpu.has_tensor_memory:
        return "it was made for compute capability 9.0 alone"
    if (problem := why_no_gluon(weight.words.device)) is not None:
        return problem
    if not tile_options(weight, dtype, gpu)["fast"]:
        return f"weights are not decoded in bfloat16 for products in {dtype}"
    if weight.form not in ("bytes", "levels", "halves") and weight.scheme.group % BLOCK:
        return f"groups of {weight.scheme.group}"
    if weight.zero is not None:
        return "zeros lie apart from scales"
    if weight.scheme.scales == "over":
        return "scales are divided by a factor"
    return f"{weight.shape[-1]} columns are no multiple of 8" if weight.shape[-1] % 8 else None


def launch_of(
    numbers: Numbers, k: int, block: tuple[int, int], splits: int, gpu: GpuTraits, beside: int = 1, num_warps: int = 0
) -> GluonLaunch:
    """Slots fill shared memory: of codes two at least, and about as many columns of rows.

    splits: at most, for each has a block of k. num_warps: 0 is one for 16 lines, up to 8.
    """
    (block_m, block_n), blocks = block, -(-k // BLOCK)
    warps = num_warps or min(8, block_n // 16)
    code_bytes, row_bytes = block_n * BLOCK // (1 if numbers == "e4m3" else 2), 2 * block_m * _STEP
    room = (gpu.shared_bytes + 1024) // beside - 1024 - _SPARE[warps > 8]
    code_slots = max(2, room // (code_bytes + 2 * row_bytes))
    row_slots = (room - code_slots * code_bytes) // row_bytes
    each = -(-blocks // -(-blocks // splits))
    return GluonLaunch(block_m, block_n, each, row_slots, code_slots, warps, beside=beside)


@cache
def choose(
    kind: Kind, shape: tuple[int, int], gated: bool, rows: int, splits: int, most: int, gpu: GpuTraits
) -> GluonLaunch | None:
    """The launch that was measured (`quantized_gluon.json`), or else the one that takes least by `_LONG` and, of parts,
    by `_JOIN`. None of few rows, which are the kernel's in plain Triton, but 17 to 32 of halves whose k is not cut,
    where that one's blocks of half a tile would be more than multiprocessors: `qkv` of Llama-3.1-8B takes 23 us of 64
    rows, which are the same blocks, where that one takes 29 of 32.

    splits: of k, up to `most` rows; more have at most as many.
    """
    numbers, (lines, k), found = NUMBERS[kind], shape, dict[GluonLaunch, float]()
    measured = next((each for each in ROWS if rows <= each), 0)
    known = load_table().find((kind, lines, k, gated, splits > 1, measured), gpu)
    if known is not None and (known.splits == splits or rows > most):
        return known
    tiles, uncut = -(-lines // TILE), kind == "halves" and not gated and splits == 1
    if uncut and 16 < rows < FEWEST_ROWS and gpu.num_sms < 2 * tiles <= 2 * gpu.num_sms:
        return _of_kind(kind, k, (64, 64), 1, gated, gpu)
    if rows < FEWEST_ROWS:
        return None
    if uncut and _FEW < rows <= 128 and 4 * tiles <= 3 * gpu.num_sms:
        return _of_kind(kind, k, (64, 64), 1, gated, gpu)  # else most multiprocessors would have nothing to do
    for block, long in zip(BESIDE, _LONG[numbers, gated], strict=True):
        if block[0] >= 2 * rows or (block[0] == _FEW) != (rows <= _FEW):
            continue
        programs, room = -(-rows // block[0]) * -(-lines // block[1]), gpu.num_sms * BESIDE[block]
        few = (splits,) if rows <= most else (max(1, min(splits, room // programs)),)
        for cuts in range(1, splits + 1) if most < rows <= ROWS[-1] else few:
            launch = _of_kind(kind, k, block, cuts, gated, gpu)
            parts = rows * lines * (4 * launch.splits if launch.splits > 1 else 2)
            launch = replace(launch, stays=programs * launch.splits > room)
            turns = -(-programs * launch.splits // room) * -(-k // (BLOCK * launch.splits))
            found[launch] = turns * long + parts / _JOIN
    return min(found, key=found.__getitem__)


def _of_kind(kind: Kind, k: int, block: tuple[int, int], splits: int, gated: bool, gpu: GpuTraits) -> GluonLaunch:
    """`launch_of` a block, as it decodes best: 16 warps where that takes most, and slots joined where three have room.

    An H200: joined slots take 0.70 to 0.99 of the time, two of them 1.1 to 1.3; levels by way of float32 are as fast
    without. Of int4 and e2m1 they were not timed.
    """
    warps = 16 if kind == "e2m1" and gated and block == (128, 256) else 0
    ahead, ready = _decodes(kind, block, gated)
    launch = launch_of(NUMBERS[kind], k, block, splits, gpu, BESIDE[block], warps)
    launch = replace(launch, ahead=ahead, ready=ready)
    both = joined(launch)
    apart = kind in ("int4", "e2m1") or (kind, ready) == ("levels", False) or both.code_slots < 3
    return launch if apart else both


def joined(launch: GluonLaunch) -> GluonLaunch:
    """The same with as many joined slots as there is room for."""
    slots = min(launch.code_slots, launch.row_slots // 2)
    return replace(launch, row_slots=2 * slots, code_slots=slots, joined=True)


def _decodes(kind: Kind, block: tuple[int, int], gated: bool) -> tuple[int, bool]:
    """`GluonLaunch.ahead` and `ready`: the best of each block for the products of Llama-3.1-8B, an H200."""
    wide, whole = block == (128, 256), block[0] == 256
    if kind == "levels":
        return (1 if wide else 3 if whole and gated else 2), gated or not whole
    if kind == "halves":
        return (1 if wide and gated else 3 if whole else 2), True
    if kind == "folded":
        return (1 if wide and gated else 2), gated or block[0] != 128
    return (3 if whole else 2, True) if kind == "e8m0" else (2, False)


_FEW = 64
"""Rows up to which blocks have as many."""
ROWS = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of rows up to each of which a launch that was measured is the same."""


@cache
def load_table() -> TunedTable[GluonLaunch]:
    """The committed table, by kind, lines, k, whether gated, whether k is cut, and up to which of `ROWS`."""
    return read_table(
        TABLE, lambda entry: GluonLaunch(*entry["launch"]), ("kind", "lines", "k", "gated", "cut", "rows")
    )


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
    assert not launch.ready or weight.kind in ("folded", "e8m0", "levels", "halves")
    assert not launch.joined or (launch.code_slots > 1 and launch.row_slots == 2 * launch.code_slots)
    options = tile_options(weight, x.dtype, gpu)
    del options["fast"], options["has_zero"], options["whole_blocks"]
    if weight.form == "folded" and not launch.ready:
        options["form"] = "bfloat16"
    words, scale, factor, _ = tile_arguments(weight)
    units = -(-rows // launch.block_m) * -(-lines // launch.block_n) * launch.splits
    _product_kernel[(min(units, gpu.num_sms * launch.beside) if launch.stays else units,)](
        out, swizzled_tiles(x, launch.block_m, _STEP), swizzled_tiles(words.view(-1, width), TILE, width), words,
        scale, factor, x if bias is None else bias, rows, lines, k, share, units, **options,
        has_bias=bias is not None, block_m=launch.block_m, block_n=launch.block_n, kind=kind,
        ahead=launch.ahead, ready=launch.ready, joined=launch.joined, row_slots=launch.row_slots,
        code_slots=launch.code_slots, num_warps=launch.num_warps, maxnreg=launch.max_registers(), **launch_options(gpu),
    )  # fmt: skip


@gluon_jit_for_any("rows", "k", "share", "units")
def _product_kernel(
    out: Arg, x: Arg, words: Arg, codes: Arg, scale: Arg, factor: Arg, bias: Arg, rows: Arg, lines: Arg, k: Arg,
    share: Arg, units: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr,
    per: constexpr, has_bias: constexpr, block_m: constexpr, block_n: constexpr, kind: constexpr,
    ahead: constexpr, ready: constexpr, joined: constexpr, row_slots: constexpr, code_slots: constexpr,
) -> None:  # fmt: skip
    """Blocks of lines and rows over one share of k each, `units` in all.

    x: descriptor of [block_m, 64]. words: of a tile's block. The rest as of `quantized_gemm._quantized_kernel`.
    """
    width: gl.constexpr = words.block_shape[1]
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    row_ring = gl.allocate_shared_memory(gl.bfloat16, [row_slots, block_m, 64], x.layout)
    code_ring = gl.allocate_shared_memory(gl.int16, [code_slots, block_n, width], words.layout)
    code_full = gl.allocate_shared_memory(gl.int64, [code_slots, 1], barrier)
    code_free = gl.allocate_shared_memory(gl.int64, [code_slots, 1], barrier)
    row_full, row_free = code_full, code_free
    if not joined:
        row_full = gl.allocate_shared_memory(gl.int64, [row_slots, 1], barrier)
        row_free = gl.allocate_shared_memory(gl.int64, [row_slots, 1], barrier)
        for slot in gl.static_range(row_slots):
            mbarrier.init(row_full.index(slot), count=1)
            mbarrier.init(row_free.index(slot), count=1)
    row_rings = (row_ring, row_full, row_free)
    code_rings = (code_ring, code_full, code_free)
    for slot in gl.static_range(code_slots):
        mbarrier.init(code_full.index(slot), count=2 if joined else 1)
        mbarrier.init(code_free.index(slot), count=1)
    fence_async_shared()
    tl.extra.cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply,
                (out, scale, factor, bias, row_rings, code_rings, rows, lines, k, share, units, numbers, scales,
                 form, group, per, has_bias, block_m, block_n, kind, ahead, ready, joined, row_slots, code_slots,
                 gl.num_warps()),
            ),
            (
                _copy_codes,
                (words, codes, code_rings, rows, lines, k, share, units, block_m, block_n, code_slots),
            ),
            (
                _copy_rows,
                (x, row_rings, rows, lines, k, share, units, block_m, block_n, joined, row_slots),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


@gluon_jit
def _unit(unit: Arg, rows: Arg, lines: Arg, k: Arg, share: Arg, block_m: constexpr, block_n: constexpr) -> Arg:
    """Of a block: its first row, its first tile of lines, its split, and its blocks of columns."""
    row_blocks, line_blocks = (rows + block_m - 1) // block_m, (lines + block_n - 1) // block_n
    row, rest = unit % row_blocks * block_m, unit // row_blocks
    split, tile = rest // line_blocks, rest % line_blocks * (block_n // 64)
    return row, tile, split, split * share, gl.minimum((split + 1) * share, (k + 127) // 128)


@gluon_jit
def _next(slot: Arg, turn: Arg, slots: constexpr) -> Arg:
    """The slot of a ring after another, and the parity of its turn."""
    slot += 1
    if slot == slots:
        slot = 0
        turn ^= 1
    return slot, turn


@gluon_jit
def _copy_codes(
    words: Arg, codes: Arg, rings: Arg, rows: Arg, lines: Arg, k: Arg, share: Arg, units: Arg,
    block_m: constexpr, block_n: constexpr, slots: constexpr,
) -> None:  # fmt: skip
    """Fill slots with blocks' codes as they get free."""
    ring, all_full, all_free = rings
    width: gl.constexpr = words.block_shape[1]
    blocks, tiles = (k + 127) // 128, (lines + 63) // 64
    _row, tile, _split, first, last = _unit(gl.program_id(0), rows, lines, k, share, block_m, block_n)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])) * 64
    for each in gl.static_range(block_n // 64):
        own = gl.minimum(tile + each, tiles - 1).to(gl.int64) * blocks + first
        for part in gl.static_range(min(slots, 2) * width // 32):
            ask_for(codes + own * (64 * width) + part * 2048 + lane)
    tl.extra.cuda.gdc_wait()
    slot, turn = 0, 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _row, tile, _split, first, last = _unit(unit, rows, lines, k, share, block_m, block_n)
        for block in range(first, last):
            mbarrier.wait(all_free.index(slot), turn)
            full = all_full.index(slot)
            mbarrier.expect(full, 2 * block_n * width)
            for each in gl.static_range(block_n // 64):
                at = (gl.minimum(tile + each, tiles - 1) * blocks + block) * 64
                async_load(words, [at, 0], full, ring.index(slot).slice(64 * each, 64, 0))
            slot, turn = _next(slot, turn, slots)


@gluon_jit
def _copy_rows(
    x: Arg, rings: Arg, rows: Arg, lines: Arg, k: Arg, share: Arg, units: Arg, block_m: constexpr,
    block_n: constexpr, joined: constexpr, slots: constexpr,
) -> None:  # fmt: skip
    """Fill slots with halves of blocks of rows as they get free; joined ones with both."""
    halves: gl.constexpr = 2 if joined else 1
    ring, all_full, all_free = rings
    tl.extra.cuda.gdc_wait()
    slot, turn = 0, 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, _tile, _split, first, last = _unit(unit, rows, lines, k, share, block_m, block_n)
        for part in range(2 // halves * first, 2 // halves * last):
            mbarrier.wait(all_free.index(slot), turn)
            full = all_full.index(slot)
            mbarrier.expect(full, 128 * block_m * halves)
            for half in gl.static_range(halves):
                async_load(x, [row, 64 * (halves * part + half)], full, ring.index(halves * slot + half))
            slot, turn = _next(slot, turn, slots // halves)


@gluon_jit
def _multiply(
    out: Arg, scale: Arg, factor: Arg, bias: Arg, row_rings: Arg, code_rings: Arg, rows: Arg, lines: Arg, k: Arg,
    share: Arg, units: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr,
    per: constexpr, has_bias: constexpr, block_m: constexpr, block_n: constexpr, kind: constexpr,
    ahead: constexpr, ready: constexpr, joined: constexpr, row_slots: constexpr, code_slots: constexpr,
    num_warps: constexpr,
) -> None:  # fmt: skip
    """Sum up all blocks and store, one block after another."""
    tl.extra.cuda.gdc_wait()
    row_slot, row_turn, code_slot, code_turn = 0, 0, 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, tile, split, first, last = _unit(unit, rows, lines, k, share, block_m, block_n)
        row_slot, row_turn, code_slot, code_turn = _sum_up(
            out, scale, factor, bias, row_rings, code_rings, row_slot, row_turn, code_slot, code_turn, row, tile,
            split, first, last, rows, lines, k, numbers, scales, form, group, per, has_bias, block_m, block_n, kind,
            ahead, ready, joined, row_slots, code_slots, num_warps,
        )  # fmt: skip


@gluon_jit
def _sum_up(
    out: Arg, scale: Arg, factor: Arg, bias: Arg, row_rings: Arg, code_rings: Arg, row_slot: Arg, row_turn: Arg,
    code_slot: Arg, code_turn: Arg, row: Arg, tile: Arg, split: Arg, first: Arg, last: Arg, rows: Arg, lines: Arg,
    k: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, per: constexpr,
    has_bias: constexpr, block_m: constexpr, block_n: constexpr, kind: constexpr, ahead: constexpr,
    ready: constexpr, joined: constexpr, row_slots: constexpr, code_slots: constexpr, num_warps: constexpr,
) -> Arg:  # fmt: skip
    """One block of lines and rows, 16 columns after another: while some products are under way the next one's
    weights are decoded.

    Returns where the rings are, with all slots free that it took.
    """
    row_ring, row_full, row_free = row_rings
    code_ring, code_full, code_free = code_rings
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_m, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    line = gl.arange(0, block_n, layout=gl.SliceLayout(1, left))
    blocks, tiles = (k + 127) // 128, (lines + 63) // 64
    tile_of, inside = gl.minimum(tile + line // 64, tiles - 1).to(gl.int64), line % 64
    f = inside.to(gl.float32)
    if scales == "times" or scales == "over":
        f = gl.load(factor + tile_of * 64 + inside)
    at = _scales_at(scale, tile_of, inside, first, blocks, k, group, per)
    held = _held(at, per)
    total = gl.zeros([block_n, block_m], gl.float32, layout=mma)
    w = gl.zeros([block_n, 16], gl.bfloat16, layout=left)
    total, before, second, third = warpgroup_mma_wait(ahead, [total, w, w, w])
    for block in range(first, last):
        mbarrier.wait(code_full.index(code_slot), code_turn)
        words, after = _words(code_ring.index(code_slot), left), held
        if group > 0:  # asked for long before they are needed
            if joined and group <= 128:
                at += gl.where(block + 1 < last, 64 * per, 0)
            else:
                at = _scales_at(scale, tile_of, inside, gl.minimum(block + 1, blocks - 1), blocks, k, group, per)
            if per == 1 or not joined:
                after = _held(at, per)
        for part in gl.static_range(8):
            w = _decoded(words, part, held, f, numbers, scales, form, group, ready)
            if per > 1 and joined:
                held = _renewed(held, at, part, per)
            if joined:
                right = row_ring.index(2 * code_slot + part // 4).slice(part % 4 * 16, 16, 1).permute((1, 0))
            else:
                if part % 4 == 0:
                    mbarrier.wait(row_full.index(row_slot), row_turn)
                right = row_ring.index(row_slot).slice(part % 4 * 16, 16, 1).permute((1, 0))
            total = warpgroup_mma(w, right, total, is_async=True)
            total, before, second, third = warpgroup_mma_wait(ahead, [total, before, second, third])
            if ahead == 1:
                before = w
            elif ahead == 2:
                before, second = second, w
            else:
                before, second, third = second, third, w
            if part == ahead - 1 and joined:  # the products of the block before are done
                prior = gl.where(code_slot == 0, code_slots - 1, code_slot - 1)
                mbarrier.arrive(code_free.index(prior), count=1, pred=block > first)
            if part % 4 == ahead - 1 and not joined:
                prior = gl.where(row_slot == 0, row_slots - 1, row_slot - 1)
                mbarrier.arrive(row_free.index(prior), count=1, pred=(block > first) | (part > 3))
            if part == ahead - 1 and not joined:  # words are in registers
                mbarrier.arrive(code_free.index(code_slot), count=1)
            if part % 4 == 3 and not joined:
                row_slot, row_turn = _next(row_slot, row_turn, row_slots)
        if per == 1 or not joined:
            held = after
        code_slot, code_turn = _next(code_slot, code_turn, code_slots)
    total, before, second, third = warpgroup_mma_wait(0, [total, before, second, third])
    if joined:
        mbarrier.arrive(code_free.index(gl.where(code_slot == 0, code_slots - 1, code_slot - 1)), count=1)
    else:
        mbarrier.arrive(row_free.index(gl.where(row_slot == 0, row_slots - 1, row_slot - 1)), count=1)
    _store(
        out, total, factor, bias, row, tile, split, tiles, rows, lines, scales, form, has_bias, block_m, block_n, kind,
        mma, num_warps,
    )  # fmt: skip
    return row_slot, row_turn, code_slot, code_turn


@gluon_jit
def _scales_at(
    scale: Arg, tile: Arg, inside: Arg, block: Arg, blocks: Arg, k: Arg, group: constexpr, per: constexpr
) -> Arg:  # fmt: skip
    """Where the first word of a block's scales of each line lies."""
    if group == 0:
        at = tile * 64 + inside
    elif group % 128 == 0:
        at = (tile * scale_blocks(k, group) + block // (group // 128)) * 64 + inside
    else:
        at = (tile * blocks + block) * (per * 64) + inside
    return scale + at


@gluon_jit
def _held(at: Arg, per: constexpr) -> Arg:
    """Words of a block's scales of each line: four, or fewer more than once."""
    first = gl.load(at)
    second, third, fourth = first, first, first
    if per > 1:
        second = gl.load(at + 64)
    if per > 2:
        third, fourth = gl.load(at + 128), gl.load(at + 192)
    return first, second, third, fourth


@gluon_jit
def _renewed(held: Arg, at: Arg, part: constexpr, per: constexpr) -> Arg:
    """`held` with the next block's word, at `at`, in the place of one that no later part takes."""
    first, second, third, fourth = held
    if part == 8 // per - 1:
        first = gl.load(at)
    if part == 16 // per - 1:
        second = gl.load(at + 64)
    if per > 2 and part == 5:
        third = gl.load(at + 128)
    if per > 2 and part == 7:
        fourth = gl.load(at + 192)
    return first, second, third, fourth


@gluon_jit
def _words(codes: Arg, left: constexpr) -> Arg:
    """A block's words in shared memory, 16 of each line at a time; of four codes a word, the first two twice."""
    first, second = codes.slice(0, 16, 1).load(left), codes.slice(16, 16, 1).load(left)
    third, fourth = first, second
    if codes.shape[1] > 32:
        third, fourth = codes.slice(32, 16, 1).load(left), codes.slice(48, 16, 1).load(left)
    return first, second, third, fourth


@gluon_jit
def _decoded(
    words: Arg, part: constexpr, held: Arg, f: Arg, numbers: constexpr, scales: constexpr, form: constexpr,
    group: constexpr, ready: constexpr,
) -> Arg:  # fmt: skip
    """A part's weights in bfloat16, 16 columns, as `tiles._part` of more has them."""
    parts: gl.constexpr = 4 if numbers == "e4m3" else 2
    step: gl.constexpr = part * 16 // group if group == 16 or group == 32 else 0
    word = words[part % parts]
    if ready:
        w = ready_times(word, held[step // 2 if form == "halves" else step // 4][:, None], part // parts, step, form)
    else:
        word_of_scales = held[step // 2 if form == "halves" else step // 4]
        s, m = scale_of(word_of_scales, word_of_scales, f, step % 4, numbers, scales, form, False, True)
        n = moved_number(word, part // parts, numbers)
        w = times(n, s[:, None], m[:, None], numbers, form, scales, True, gl.bfloat16)
    return w


@gluon_jit
def _store(
    out: Arg, total: Arg, factor: Arg, bias: Arg, row: Arg, tile: Arg, split: Arg, tiles: Arg, rows: Arg, lines: Arg,
    scales: constexpr, form: constexpr, has_bias: constexpr, block_m: constexpr, block_n: constexpr, kind: constexpr,
    mma: constexpr, num_warps: constexpr,
) -> None:  # fmt: skip
    """The end of a product: the factor of sums, the bias or the gate, and rounding."""
    line = gl.arange(0, block_n, layout=gl.SliceLayout(1, mma))
    if scales == "e4m3":
        at = gl.minimum(tile + line // 64, tiles - 1).to(gl.int64) * 64 + line % 64
        total *= (gl.load(factor + at) * 256.0)[:, None]
    if form == "folded":
        total *= 256.0
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
