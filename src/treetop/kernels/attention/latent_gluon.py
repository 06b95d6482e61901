"""Compressed attention on Hopper, in Gluon: pages of 64 tokens by bulk copies, two warp groups that share scores.

A program has 64 queries, each a head's, and a part of a row's pages. A page is copied whole, once for key and value:

    shared memory   queries [64, 576] | page [64, 576] | page [64, 576] | weights [64, 64]
    warp group 0    scores of keys  0..31 | columns   0..255 of the sums
    warp group 1    scores of keys 32..63 | columns 256..511 of the sums

    tensor cores    | weights x page i | scores of page i + 1 |
    other units     |                                         | softmax of page i + 1
    copies          |                  | page i + 2 over page i

Pages go from a part's last to its first, so that the one which is not full comes before the loop: there keys past the
end are masked, and their values, whatever lies there, are set to 0, which no later page needs. The tail comes after
all pages, by plain loads.

Rows of unequal length share the card by their pages: each program finds out from all lengths which row's part it has.

    slot    | 0     | 1     | 2     | 3     | 4     | 5     |    of three rows, of which 4 pages of a slot are fair
    row     | row 0 | row 1 | row 1 | row 1 | row 1 | row 2 |    3, 16 and 2 pages

Source: that two groups share a page's scores and divide the columns of the values is FlashMLA's idea
(deepseek-ai/FlashMLA), whose groups take pages in turns, which these do not; the online softmax is
Milakov and Gimelshein, arXiv:1805.02867.
"""

import math

import torch
from torch import Tensor

from treetop.kernels.attention.attention import tail_arguments
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.dependent_launch import pdl_wait
from treetop.kernels.gluon_guard import (
    async_load,
    block_barrier,
    fence_async_shared,
    gl,
    gluon_jit,
    gluon_jit_for_any,
    mbarrier,
    swizzled_tiles,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit_for_any, power_of_two, tl

PAGE, RANK, ROPE_DIM = 64, 512, 64
"""Of a page, in tokens; of a plane's latent and of its part with RoPE, in numbers. These alone have a kernel."""
MOST_COLUMNS = 64
"""Of a tail."""
_QUERIES = 64
"""Of a program, each a head's."""
_PAGES, _MOST_SPLITS, _BESIDE_PAGES = 128, 64, 2.5
"""Of a usual row; slots for each row at most; what a program does beside its pages, in their time."""
_FEW_WAVES = 2
"""Of programs of a slot for each row. Of more waves a long row is the smaller part, and nothing is divided."""


@gluon_jit
def _wait_turn(overlap: gl.constexpr) -> None:
    """`kernels.dependent_launch.pdl_wait`, early."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_jit
def _copy_page(latents: Arg, ropes: Arg, page: Arg, k: Arg, k_rope: Arg, full: Arg, place: Arg, there_is: Arg) -> None:
    """Begin to copy a page to a place of `k` and `k_rope`, if there is one; `full` of that place says when it is there.

    latents, ropes: descriptors of blocks [64, 512] and [64, 64] of the same planes.
    """
    mbarrier.expect(full.index(place), 64 * (512 + 64) * 2, pred=there_is)
    async_load(latents, [page * 64, 0], full.index(place), k.index(place), pred=there_is)
    async_load(ropes, [page * 64, 512], full.index(place), k_rope.index(place), pred=there_is)


@gluon_jit
def _load_block(at: Arg, lane: Arg, there: Arg, width: gl.constexpr, layout: gl.constexpr) -> Arg:
    """`width` numbers from each of `at + lane` on, 0 where not `there`: [64, width]."""
    columns = gl.arange(0, width, gl.SliceLayout(0, layout))
    return gl.load(at + lane[:, None] + columns[None, :], mask=there[:, None], other=0.0)


@gluon_jit
def _query_at(tile: Arg, n: Arg, heads: Arg, q_query: Arg, q_head: Arg, layout: gl.constexpr) -> Arg:
    """(where a tile's queries begin after their row's first, which of them there are), each [64]."""
    lane = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return lane // heads * q_query + lane % heads * q_head, lane < n * heads


@gluon_jit
def _clear_beyond(values: Arg, filled: Arg, layout: gl.constexpr) -> None:
    """Set a page's values [64, 512] to 0 from key `filled` on: a weight of 0 times NaN is NaN."""
    for part in gl.static_range(8):
        some = values.slice(part * 64, 64, dim=1)
        stored = gl.arange(0, 64, gl.SliceLayout(1, layout)) < filled
        some.store(gl.where(stored[:, None], some.load(layout), 0.0))
    fence_async_shared()
    block_barrier()


@gluon_jit
def _begin_scores(queries: Arg, q_rope: Arg, k: Arg, k_rope: Arg, layout: gl.constexpr) -> Arg:
    """The products of queries and a page's keys [64, 64], as two groups of wgmma that are not waited for."""
    scores = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))
    scores = warpgroup_mma(queries, k.permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)


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
def _seat_of(kv_len: Arg, count: Arg, splits: Arg, slots: Arg, slot: Arg, block_rows: gl.constexpr) -> Arg:
    """(row, part, parts of that row) of a slot; row `count` or more where the rows do not need it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    each = gl.arange(0, block_rows, layout)
    pages = (gl.load(kv_len + each, mask=each < count, other=-127).to(gl.int32) + 63) // 64  # -1 of no row
    quota = _quota_of(pages, count, splits, slots)
    parts = gl.maximum((pages + quota - 1) // quota, gl.where(each < count, 1, 0))
    before = gl.associative_scan(parts, 0, _add) <= slot
    row = gl.sum(gl.where(before, 1, 0), 0)
    return row, slot - gl.sum(gl.where(before, parts, 0), 0), gl.sum(gl.where(each == row, parts, 0), 0)


@gluon_jit_for_any("n", "t", "heads", "count", "table_row", "splits", "slots", "mask_row", "mask_query", "mask_column")
def _latent_pages_kernel(
    out: Arg, lse: Arg, q: Arg, latents: Arg, ropes: Arg, page_table: Arg, rows: Arg, kv_len: Arg, tail: Arg, mask: Arg,
    seats: Arg, scale: Arg, n: Arg, t: Arg, heads: Arg, count: Arg, q_row: Arg, q_query: Arg, q_head: Arg,
    table_row: Arg, tail_row: Arg, tail_column: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg, splits: Arg,
    slots: Arg, divided: gl.constexpr, block_rows: gl.constexpr, overlap: gl.constexpr,
) -> None:  # fmt: skip
    """64 queries of one row, over one part of its pages and, in the last part, the tail; by eight warps.

    out: [slots, n, heads, 512]; lse: [slots, n, heads] float32, natural; both contiguous. seats: [count, 2] int32, each
    row's first slot and how many it has, for the merge; not divided: a slot is a row, and seats are not written. The
    rest as in `latent_pages_attention`; count: of rows; *_row, *_query, ... are strides in elements; scale leads to
    base 2. Grid (tiles of queries, slots).
    """
    dtype: gl.constexpr = q.dtype.element_ty
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, of_scores)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])

    k = gl.allocate_shared_memory(dtype, [2, 64, 512], tiles)
    k_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], tiles)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(2):
        mbarrier.init(full.index(each), count=1)
    fence_async_shared()
    block_barrier()
    _wait_turn(overlap)

    tile, slot = gl.program_id(0), gl.program_id(1)
    row, part_of_row, parts = slot, slot * 0, slot * 0 + 1
    if divided:
        row, part_of_row, parts = _seat_of(kv_len, count, splits, slots, slot, block_rows)
        if row >= count:
            return
        if (tile == 0) & (part_of_row == 0):
            gl.store(seats + row * 2, slot)
            gl.store(seats + row * 2 + 1, parts)
    length = gl.load(kv_len + row).to(gl.int32)
    pages = (length + 63) // 64
    share = (pages + parts - 1) // parts
    begin = gl.minimum(part_of_row * share, pages)
    last = gl.minimum(begin + share, pages) - 1
    steps = last + 1 - begin
    row = row.to(gl.int64)
    table = page_table + gl.load(rows + row) * table_row
    page = gl.load(table + gl.maximum(last, 0))
    page_after = gl.load(table + gl.maximum(last - 1, 0))
    _copy_page(latents, ropes, page, k, k_rope, full, 0, steps > 0)
    _copy_page(latents, ropes, page_after, k, k_rope, full, 1, steps > 1)

    queries = gl.allocate_shared_memory(dtype, [64, 512], tiles)
    q_rope = gl.allocate_shared_memory(dtype, [64, 64], tiles)
    weights = gl.allocate_shared_memory(dtype, [64, 64], tiles)
    at, real = _query_at(tile, n, heads, q_query, q_head, wide)
    queries.store(_load_block(q + row * q_row, at, real, 512, wide))
    at, real = _query_at(tile, n, heads, q_query, q_head, narrow)
    q_rope.store(_load_block(q + row * q_row + 512, at, real, 64, narrow))
    fence_async_shared()
    block_barrier()

    sums = gl.zeros([64, 512], gl.float32, of_sums)
    peak = gl.full([64], -1e30, gl.float32, by_query)
    mass = gl.zeros([64, 64], gl.float32, of_scores)  # each key's column for itself, until the end
    if steps > 0:
        mbarrier.wait(full.index(0), 0)
        filled = length - last * 64
        if filled < 64:
            _clear_beyond(k.index(0), filled, narrow)
        scores = warpgroup_mma_wait(0, [_begin_scores(queries, q_rope, k.index(0), k_rope.index(0), of_scores)])
        key = gl.arange(0, 64, gl.SliceLayout(0, of_scores))
        scores = gl.where((key < filled)[None, :], scores, float("-inf"))
        page_after = gl.load(table + gl.maximum(last - 2, 0))  # its latency hides behind a page's work
        for step in range(0, steps):
            place = step & 1
            other = 1 - place
            new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
            shrink = gl.exp2(peak - new_peak)
            weight = gl.exp2(scores * scale - new_peak[:, None])
            weights.store(weight.to(dtype))
            fence_async_shared()
            mass = mass * shrink[:, None] + weight
            peak = new_peak
            sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, of_sums))[:, None]
            block_barrier()  # the weights are all there
            with_page = warpgroup_mma(weights, k.index(place), sums, is_async=True)
            mbarrier.wait(full.index(other), ((step + 1) >> 1) & 1, pred=step + 1 < steps)
            ahead = _begin_scores(queries, q_rope, k.index(other), k_rope.index(other), of_scores)
            sums = warpgroup_mma_wait(2, [with_page])
            block_barrier()  # both groups have read the page
            _copy_page(latents, ropes, page_after, k, k_rope, full, place, step + 2 < steps)
            page_after = gl.load(table + gl.maximum(last - 3 - step, 0))
            scores = warpgroup_mma_wait(0, [ahead])  # after the last step of no page, and nobody reads them

    if (t > 0) & (part_of_row == parts - 1):
        lane = tile * 64 + gl.arange(0, 64, by_query)
        of_row = tail + row * tail_row
        column = gl.arange(0, 64, gl.SliceLayout(1, narrow))
        for part in gl.static_range(8):
            some = k.index(0).slice(part * 64, 64, dim=1)
            some.store(_load_block(of_row + part * 64, column * tail_column, column < t, 64, narrow))
        k_rope.index(0).store(_load_block(of_row + 512, column * tail_column, column < t, 64, narrow))
        fence_async_shared()
        block_barrier()
        scores = warpgroup_mma_wait(0, [_begin_scores(queries, q_rope, k.index(0), k_rope.index(0), of_scores)])
        column = gl.arange(0, 64, gl.SliceLayout(0, of_scores))
        shown = mask + row * mask_row + (lane // heads * mask_query)[:, None] + (column * mask_column)[None, :]
        visible = gl.load(shown, mask=(lane < n * heads)[:, None] & (column < t)[None, :], other=0) != 0
        scores = gl.where(visible, scores, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
        shrink = gl.exp2(peak - new_peak)
        weight = gl.exp2(scores * scale - new_peak[:, None])
        weights.store(weight.to(dtype))
        fence_async_shared()
        mass = mass * shrink[:, None] + weight
        peak = new_peak
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, of_sums))[:, None]
        block_barrier()
        sums = warpgroup_mma(weights, k.index(0), sums)

    total = gl.sum(mass, 1)
    seen = total != 0  # also of NaN, which must show
    log_mass = gl.where(seen, (peak + gl.log2(gl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    first_item = slot.to(gl.int64) * (n * heads)
    lane = tile * 64 + gl.arange(0, 64, by_query)
    gl.store(lse + first_item + lane, log_mass, mask=lane < n * heads)
    factor = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
    by = gl.convert_layout(factor, gl.SliceLayout(1, of_sums))[:, None]
    lane = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, of_sums))
    out_at = out + (first_item + lane)[:, None] * 512 + gl.arange(0, 512, gl.SliceLayout(0, of_sums))[None, :]
    gl.store(out_at, (sums * by).to(out.dtype.element_ty), mask=(lane < n * heads)[:, None])


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
    """Join the parts of `block_i` items of a row, each a query and a head, `block_s` parts at a time.

    out: [rows, n * heads, 512]; parts: [slots, n * heads, 512], part_lse: [slots, n * heads] float32; heads_of_row: n *
    heads. seats: as the kernel before wrote them. Grid (n * heads / block_i, rows).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(1).to(tl.int64)
    item = tl.program_id(0) * block_i + tl.arange(0, block_i)
    first, count = tl.load(seats + row * 2).to(tl.int64), tl.load(seats + row * 2 + 1)
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
    table = metadata.table.data
    data, _, mask, width = tail_arguments(q, metadata, tail)
    strides: tuple[int, ...] = (0,) * 5 if tail is None else (*data.stride()[:2], *mask.stride())
    assert (dim, metadata.page_size, metadata.window, metadata.chosen) == (RANK + ROPE_DIM, PAGE, None, None)
    assert not metadata.causal
    assert width <= MOST_COLUMNS
    assert pages.shape[1:] == (1, 1, dim)
    assert pages.dtype == q.dtype == data.dtype
    assert (q.stride(3), pages.stride(3), data.stride(-1), table.stride(1)) == (1, 1, 1, 1)
    assert (metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1)
    tiles, planes = -(-n * heads // _QUERIES), pages[:, 0, 0]
    if splits is None:
        splits = choose_splits(tiles * rows, -(-metadata.max_kv_len // PAGE), gpu)
    divided = splits > 1 or (rows > 1 and tiles * rows <= _FEW_WAVES * gpu.num_sms)
    slots, items = rows * max(splits, 1 + divided), n * heads
    out = torch.empty((rows, n, heads, RANK), dtype=q.dtype, device=q.device)
    part = torch.empty((slots, items, RANK), dtype=torch.float32, device=q.device) if divided else out
    lse = torch.empty((slots, items), dtype=torch.float32, device=q.device)
    seats = torch.empty((rows, 2), dtype=torch.int32, device=q.device)
    overlap = {"launch_pdl": True} if gpu.can_overlap else {}
    _latent_pages_kernel[(tiles, slots)](
        part, lse, q, swizzled_tiles(planes, PAGE, RANK), swizzled_tiles(planes, PAGE, ROPE_DIM), table, metadata.rows,
        metadata.kv_len, data, mask, seats, scale * math.log2(math.e), n, width, heads, rows, *q.stride()[:3],
        table.stride(0), *strides, splits, slots, divided=divided, block_rows=max(256, power_of_two(rows)),
        overlap=gpu.can_overlap, num_warps=8, **overlap,
    )  # fmt: skip
    if divided:
        block_s = power_of_two(slots // rows)
        block_i = 1 if block_s > 8 or rows * items < 2048 else 2
        _merge_seats_kernel[(-(-items // block_i), rows)](
            out, part, lse, seats, items, block_s=block_s, block_i=block_i, overlap=gpu.can_overlap,
            num_warps=max(1, min(16, block_s * block_i // 4)), **overlap,
        )  # fmt: skip
    return out
