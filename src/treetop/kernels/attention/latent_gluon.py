"""Compressed attention on Hopper, in Gluon: pages of 64 tokens by bulk copies, two warp groups that share values.

A program has 64 queries, each a head's, and a part of a row's pages; in the last part also the tail. What it does is
said in `latent_groups`. A page is copied whole, once for key and value.

Rows of unequal length share the card by their pages: each program finds out from all lengths which row's part it has.

    slot    | 0     | 1     | 2     | 3     | 4     | 5     |    of three rows, of which 4 pages of a slot are fair
    row     | row 0 | row 1 | row 1 | row 1 | row 1 | row 2 |    3, 16 and 2 pages
"""

import math

import torch
from torch import Tensor

from treetop.kernels.attention.attention import tail_arguments
from treetop.kernels.attention.latent_groups import (
    allocate_places,
    begin_left,
    begin_queries,
    begin_right,
    first_group,
    second_group,
)
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.dependent_launch import pdl_wait
from treetop.kernels.gluon_guard import gl, gluon_jit, gluon_jit_for_any, swizzled_tiles
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit_for_any, power_of_two, tl

PAGE, RANK, ROPE_DIM = 64, 512, 64
"""Of a page, in tokens; of a plane's latent and of its part with RoPE, in numbers. These alone have a kernel."""
MOST_COLUMNS = 64
"""Of a tail."""
_QUERIES = 64
"""Of a program, each a head's."""
_PAGES, _MOST_SPLITS, _BESIDE_PAGES = 128, 64, 2.5
"""Of a usual row; slots for each row at most; what a program does beside its pages, in their time."""
_MERGED = 8
"""Parts that a merge reads at once at least: a long row among short ones has many."""
_FEW_WAVES, _SPARE = 2, 8
"""Waves of programs of a slot for each row, up to which each row has a slot more; and spare slots where there are more
waves, for rows that are much longer than others: their parts take memory."""


@gluon_jit
def wait_turn(overlap: gl.constexpr) -> None:
    """`kernels.dependent_launch.pdl_wait`, early."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_jit
def _add(a: Arg, b: Arg) -> Arg:
    return a + b


@gluon_jit
def _quota_of(pages: Arg, count: Arg, splits: Arg, slots: Arg) -> Arg:
    """Pages that a slot has at most: few, but so many that the rows' pages fit into the slots, of which none is shared.

    pages: [block_rows] int32 of the rows, below 0 of no row; count: of rows. splits * count are not more than slots.
    """
    total, most = gl.sum(gl.maximum(pages, 0), 0), gl.max(pages, 0)
    usual = gl.maximum((most + splits - 1) // splits, 1)
    spare = gl.maximum(slots - count, 1)  # each row fills one slot in part at most
    quota = gl.where(slots > count, gl.minimum((total + spare - 1) // spare + 1, usual), usual)
    fair = gl.maximum((total + slots - 1) // slots, 1)
    for step in gl.static_range(6):  # rather a little more than what is fair, if that will do
        fewer = fair + fair * (5 - step) // 16
        needed = gl.sum(gl.maximum((pages + fewer - 1) // fewer, gl.where(pages >= 0, 1, 0)), 0)
        quota = gl.where(needed <= slots, gl.minimum(fewer, quota), quota)
    return gl.where((splits == 1) & (most * count <= 2 * total), usual, quota)


@gluon_jit
def _seat_of(kv_len: Arg, rows: Arg, count: Arg, splits: Arg, slots: Arg, slot: Arg, block_rows: gl.constexpr) -> Arg:
    """(row, part, parts of that row, and of all cut rows before it; cut rows before it, and of all) of a slot; the
    row's length and its row of the page table.

    The row is `count` or more where the rows do not need the slot. A row that is cut has more than one part.
    """
    layout: gl.constexpr = gl.BlockedLayout([block_rows // 32], [32], [4], [0])  # each warp has all rows
    each = gl.arange(0, block_rows, layout)
    lengths = gl.load(kv_len + each, mask=each < count, other=-127).to(gl.int32)
    listed = gl.load(rows + each, mask=each < count, other=0).to(gl.int32)  # beside it, not after it
    pages = (lengths + 63) // 64  # -1 of no row
    quota = _quota_of(pages, count, splits, slots)
    parts = gl.maximum((pages + quota - 1) // quota, gl.where(each < count, 1, 0))
    before = gl.associative_scan(parts, 0, _add) <= slot
    cut = parts > 1
    row, first = gl.sum(gl.where(before, 1, 0), 0), gl.sum(gl.where(before, parts, 0), 0)
    own = gl.sum(gl.where(each == row, parts, 0), 0)
    first_part = gl.sum(gl.where(before & cut, parts, 0), 0)
    cut_before, cut_rows = gl.sum(gl.where(before & cut, 1, 0), 0), gl.sum(gl.where(cut, 1, 0), 0)
    length, table_at = gl.sum(gl.where(each == row, lengths, 0), 0), gl.sum(gl.where(each == row, listed, 0), 0)
    return row, slot - first, own, first_part, cut_before, cut_rows, length, table_at


@gluon_jit_for_any(
    "n", "t", "heads", "count", "table_row", "tail_row", "splits", "slots", "mask_row", "mask_query", "mask_column"
)
def _latent_pages_kernel(
    out: Arg, part: Arg, lse: Arg, queries: Arg, query_ropes: Arg, latents: Arg, ropes: Arg, tails: Arg,
    tail_ropes: Arg, page_table: Arg, rows: Arg, kv_len: Arg, mask: Arg, seats: Arg, scale: Arg, n: Arg, t: Arg,
    heads: Arg, count: Arg, table_row: Arg, tail_row: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg,
    splits: Arg, slots: Arg, divided: gl.constexpr, block_rows: gl.constexpr, overlap: gl.constexpr,
) -> None:  # fmt: skip
    """64 queries of one row, over one part of its pages and, in the last part, the tail; by two groups of four warps.

    out: [rows, n, heads, 512], of rows that are not cut. part: [parts of cut rows, n, heads, 512] and lse: [..., n,
    heads], float32, natural. All are contiguous. seats: int32, of the cut rows' number, and of each its row, its first
    part and how many it has, for the merge; not divided: a slot is a row, and no row is cut. queries, latents, tails:
    descriptors of blocks [64, 256] of matrices of 576 columns or more, whose rows are queries, slots and columns of
    tails; query_ropes, ropes, tail_ropes: of blocks [64, 64]. tail_row: columns from a row's tail to the next. The rest
    as in `latent_pages_attention`; count: of rows; *_row, *_query, ... are strides in elements; scale leads to base 2.
    Grid (tiles of queries, slots).
    """
    places = allocate_places(latents.dtype, False)
    wait_turn(overlap)
    tile, slot = gl.program_id(0), gl.program_id(1)
    row, at_part, parts, part_of_cut = slot, slot * 0, slot * 0 + 1, slot * 0
    if divided:
        row, at_part, parts, part_of_cut, number, cut_rows, length, table_at = _seat_of(
            kv_len, rows, count, splits, slots, slot, block_rows
        )
        if row >= count:
            return
        if (tile == 0) & (slot == 0):
            gl.store(seats, cut_rows)
        if (tile == 0) & (at_part == 0) & (parts > 1):
            gl.store(seats + 1 + number * 3, row)
            gl.store(seats + 2 + number * 3, part_of_cut)
            gl.store(seats + 3 + number * 3, parts)
    else:
        length, table_at = gl.load(kv_len + row).to(gl.int32), gl.load(rows + row).to(gl.int32)
    pages = (length + 63) // 64
    share = (pages + parts - 1) // parts
    begin = gl.minimum(at_part * share, pages)
    last = gl.minimum(begin + share, pages) - 1
    filled = gl.minimum(length - last * 64, 64)
    has_tail = gl.where((t > 0) & (at_part == parts - 1), 1, 0)
    items = last + 1 - begin + has_tail
    first = last + has_tail  # the page of item i is number `first - i` of the row
    wide_row = row.to(gl.int64)
    table = page_table + table_at.to(gl.int64) * table_row
    page_even = gl.load(table + gl.maximum(gl.minimum(first, last), 0)) * 64
    page_odd = gl.load(table + gl.maximum(first - 1, 0)) * 64
    of_queries, keys, _ = places
    begin_queries(queries, query_ropes, row * (n * heads) + tile * 64, of_queries)
    if has_tail > 0:
        begin_left(tails, row * tail_row, keys, 0, True)
        begin_right(tails, tail_ropes, row * tail_row, keys, 0, True)
    else:
        begin_left(latents, page_even, keys, 0, items > 0)
        begin_right(latents, ropes, page_even, keys, 0, items > 0)
    begin_right(latents, ropes, page_odd, keys, 1, items > 1)
    begin_left(latents, page_odd, keys, 1, items > 1)
    alone = parts == 1
    item = gl.where(alone, wide_row, (part_of_cut + at_part).to(gl.int64)) * (n * heads)
    gl.warp_specialize(
        [
            (
                first_group,
                (out, part, lse, latents, places, table, first, items, has_tail, filled, mask + wide_row * mask_row,
                 scale, alone, item, tile, n, t, heads, mask_query, mask_column, False),
            ),
            (
                second_group,
                (out, part, latents, ropes, places, table, first, items, has_tail, filled, scale, alone, item, tile, n,
                 heads, False),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip


def choose_splits(programs: int, pages: int, gpu: GpuTraits) -> int:
    """Slots for each row, which has `pages` pages at most, for `programs` programs of one slot for each.

    A multiprocessor has room for one program, so they run in waves, and a wave takes as long as its programs' pages,
    their beginning and their end. How many pages there will be is not known: as many as `_PAGES`, if so many may be.
    """

    def cost(splits: int) -> float:
        return -(-programs * splits // gpu.num_sms) * (min(pages, _PAGES) / splits + _BESIDE_PAGES)

    return min(range(1, max(min(pages, _MOST_SPLITS), 1) + 1), key=cost)


@jit_for_any("heads_of_row")
def _merge_seats_kernel(
    out: Arg, parts: Arg, part_lse: Arg, seats: Arg, heads_of_row: Arg, block_s: constexpr, block_i: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """Join the parts of `block_i` items of a cut row, each a query and a head, `block_s` parts at a time.

    out: [rows, n * heads, 512]; parts: [parts, n * heads, 512], part_lse: [parts, n * heads] float32; heads_of_row: n *
    heads. seats: as the kernel before wrote them. Grid (n * heads / block_i, cut rows at most).
    """
    pdl_wait(overlap, early=True)
    number = tl.program_id(1)
    if number >= tl.load(seats):
        return
    row = tl.load(seats + 1 + number * 3).to(tl.int64)
    item = tl.program_id(0) * block_i + tl.arange(0, block_i)
    first, count = tl.load(seats + 2 + number * 3).to(tl.int64), tl.load(seats + 3 + number * 3)
    dims, each = tl.arange(0, 512), tl.arange(0, block_s)
    real = item < heads_of_row
    acc = tl.zeros([block_i, 512], tl.float32)
    peak, mass = tl.full([block_i], -1e30, tl.float32), tl.zeros([block_i], tl.float32)
    for start in range(0, count, block_s):
        at = (first + start + each)[:, None] * heads_of_row + item[None, :]
        there = (start + each < count)[:, None] & real[None, :]
        lse = tl.load(part_lse + at, mask=there, other=float("-inf"))
        part = tl.load(parts + at[:, :, None] * 512 + dims[None, None, :], mask=there[:, :, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weight, shrink = tl.exp(lse - new_peak[None, :]), tl.exp(peak - new_peak)
        acc = acc * shrink[:, None] + tl.sum(tl.where((weight != 0)[:, :, None], part * weight[:, :, None], 0.0), 0)
        mass = mass * shrink + tl.sum(weight, 0)
        peak = new_peak
    result = acc / tl.where(mass != 0, mass, 1.0)[:, None]
    out_at = out + (row * heads_of_row + item)[:, None] * 512 + dims[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None])


def latent_pages_attention(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    scale: float,
    gpu: GpuTraits,
    splits: int | None = None,
) -> Tensor:
    """`latent_attention_reference` of decode phases: every query sees all of its row's pages, and of a tail what its
    mask says.

    q: [rows, n, heads, 576], bfloat16 or float16. pages: [slots, 1, 1, 576] of that dtype, of 64 tokens each, which may
    be part of wider planes. tail: [rows, t, 1, 1, 576], of 64 columns at most. splits: parts of each row, if all are of
    a length, or else `choose_splits` says. No window, and nothing chosen. Reads lengths on the device only.
    """
    rows, n, heads, dim = q.shape
    table, items = metadata.table.data, n * heads
    data, _, mask, width = tail_arguments(q, metadata, tail)
    assert (dim, metadata.page_size, metadata.window, metadata.chosen) == (RANK + ROPE_DIM, PAGE, None, None)
    assert not metadata.causal
    assert width <= MOST_COLUMNS
    assert pages.shape[1:] == (1, 1, dim)
    assert pages.dtype == q.dtype == data.dtype
    assert (pages.stride(3), data.stride(-1), table.stride(1)) == (1, 1, 1)
    assert (metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1)
    planes = pages[:, 0, 0]
    tails, tail_row = (planes, 0) if tail is None else tail_matrix(tail)
    tiles = -(-items // _QUERIES)
    if splits is None:
        splits = choose_splits(tiles * rows, -(-metadata.max_kv_len // PAGE), gpu)
    spare = rows * (splits - 1)
    if splits == 1 and rows > 1:
        spare = rows if tiles * rows <= _FEW_WAVES * gpu.num_sms else min(rows, _SPARE)
    cut_rows = min(rows, spare)
    part_slots = min(rows + spare, 2 * spare)  # rows that are cut have a spare slot each
    out = torch.empty((rows, n, heads, RANK), dtype=q.dtype, device=q.device)
    part = torch.empty((part_slots, items, RANK), dtype=torch.float32, device=q.device)
    lse = torch.empty((part_slots, items), dtype=torch.float32, device=q.device)
    seats = torch.empty(1 + 3 * cut_rows, dtype=torch.int32, device=q.device)
    overlap = {"launch_pdl": True} if gpu.can_overlap else {}
    blocks = [
        swizzled_tiles(matrix, PAGE, columns)
        for matrix in (q.reshape(-1, dim), planes, tails)
        for columns in (RANK // 2, ROPE_DIM)
    ]
    mask_strides = (0, 0, 0) if tail is None else mask.stride()
    _latent_pages_kernel[(tiles, rows + spare)](
        out, part, lse, *blocks, table, metadata.rows, metadata.kv_len, mask, seats, scale * math.log2(math.e), n,
        width, heads, rows, table.stride(0), tail_row, *mask_strides, splits, rows + spare, divided=spare > 0,
        block_rows=max(32, power_of_two(rows)), overlap=gpu.can_overlap, num_warps=4, **overlap,
    )  # fmt: skip
    if spare:
        merge_parts(out, part, lse, seats, cut_rows, splits, gpu)
    return out


def merge_parts(
    out: Tensor, part: Tensor, lse: Tensor, seats: Tensor, cut_rows: int, splits: int, gpu: GpuTraits
) -> None:
    """Join the parts of cut rows, `cut_rows` at most, into `out`. splits: parts that a row usually has.

    part: [parts, items, 512]; lse: [parts, items]; seats: as a kernel has written them.
    """
    block_s, items = min(max(_MERGED, power_of_two(splits)), _MOST_SPLITS), lse.shape[1]
    _merge_seats_kernel[(items, cut_rows)](
        out, part, lse, seats, items, block_s=block_s, block_i=1, overlap=gpu.can_overlap, num_warps=block_s // 4,
        **({"launch_pdl": True} if gpu.can_overlap else {}),
    )  # fmt: skip


def tail_matrix(tail: Tensor) -> tuple[Tensor, int]:
    """A tail [rows, t, 1, 1, dim] as a matrix of all columns, and how many lie from a row's first to the next row's."""
    rows, t, _, _, dim = tail.shape
    if t == 1:
        return tail[:, 0, 0, 0], 1
    between = tail.stride(0) // tail.stride(1)
    assert rows == 1 or tail.stride(0) == between * tail.stride(1)
    return tail.as_strided(((rows - 1) * between + t, dim), (tail.stride(1), 1)), between
