"""Attention over paged K/V and a dense tail with the arithmetic of `segments`, and its launches.

A decode phase is two launches. In the first, programs go over a list of items, made on the device: each folds the
blocks of a segment that lie whole before the row's end, for all queries of the row, or a run of a row's first segments,
which it joins. So one long row is many items, and does not hold up the others, and a row of a large batch is one item.
In the second, a program takes a block of a row's queries: it joins the segments in order, and folds the blocks from the
row's end on. There each query has a path of its own. Scores are those of all pages and all of the tail, each query's
put to the positions of its path. Values come in steps of 16 keys: those before the row's end are one product for all
queries, the others one for each.

    row of 700 keys, path of 3   | segments 0 .. 4: 2 blocks   | segment 5: 640 .. 687 | 688 .. 699, path |
                                 | a run of 3, then items of 1 |  for all queries      |  by each query   |

Plain decoding folds its one path in the first launch.

K/V in FP8 are widened to float16, exactly, beside queries in it: what all keys of a head are scaled by goes to the
scores, what all values are to the result. On Hopper the steps of these products are those of 16 bits. Before it Triton
has them take of each 32 keys the first two of every four, then the others, wherever codes come from; so it is 32 keys
whose values are one product for all queries or for none.

How many items there are is read on the device; parts are kept of the first `capacity` ones, and the segments of those
past it are folded where they are joined. None of what `SegmentLaunch` says changes a bit.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from treetop.kernels.attention.attention import (
    beside_codes,
    load_kv,
    page_of,
    paged_attention_reference,
    widened,
    within_page,
)
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.metadata import oldest_seen
from treetop.kernels.attention.segments import (
    QUEUES,
    UNIT,
    SegmentPlan,
    empty_softmax,
    fold,
    join,
    online_softmax_step,
    result_of,
    run_of,
    segment_of,
    segment_start,
    take,
    taken,
    weigh,
)
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, power_of_two, tl

PART_BYTES = 512 << 20
"""Of the parts of a call, at most."""
JOINED = 16
"""Queries, times grouped heads, whose segments a program joins. Fewer are no product of matrices, more were slower."""


@jit
def load_queries(q: Arg, at: Arg, real: Arg, dims: Arg, dim: constexpr, scaled: constexpr) -> Arg:
    """[m, d], 0 where not `real` and past the head's width. at: [m], element offsets. scaled: K/V are codes."""
    own = tl.load(q + at[:, None] + dims[None, :], mask=real[:, None] & (dims < dim)[None, :], other=0.0)
    return beside_codes(own) if scaled else own


@jit
def fold_alone(
    q: Arg, pages: Arg, table: Arg, tail: Arg, path: Arg, first_block: Arg, stop: Arg, start: Arg, end: Arg,
    slot_stride: Arg, v_offset: Arg, tail_v: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg,
    dim: constexpr, page_size: constexpr, aligned: constexpr, block_n: constexpr, block_d: constexpr, hopper: constexpr,
) -> Arg:  # fmt: skip
    """Fold blocks first_block .. stop - 1 of the keys of a row that has one query, whose grouped heads are the lanes.

    Positions start .. end - 1 come from pages, `end` from the tail's one column if it is on the path. pages, tail:
    pointers at the K/V head. table, path: of the row. aligned: every key begins at a multiple of 16 bytes.
    """
    dims = tl.arange(0, block_d)
    own = tl.where(tl.load(path) >= 0, end, -1)
    for block in range(first_block, stop):
        key = block * block_n + tl.arange(0, block_n)
        stored = (key >= start) & (key < end)
        slot = page_of(table, block, start, end, block_n, page_size).to(tl.int64) * page_size + within_page(
            key, page_size
        )
        there = (key == own) & (key >= start)
        at = tl.where(there, tail, pages + slot * slot_stride)
        at_v = tl.where(there, tail + tail_v, pages + slot * slot_stride + v_offset)
        if aligned:
            at, at_v = tl.multiple_of(at, 16), tl.multiple_of(at_v, 16)
        mask = (stored | there)[:, None]
        mask = mask if dim == block_d else mask & (dims < dim)[None, :]
        k = widened(tl.load(at[:, None] + dims[None, :], mask=mask, other=0.0), mask, q.dtype, hopper)
        v = widened(tl.load(at_v[:, None] + dims[None, :], mask=mask, other=0.0), mask, q.dtype, hopper)
        acc, peak, mass = fold(q, k, v, (stored | there)[None, :], acc, peak, mass, scale, True)
    return acc, peak, mass


@jit
def fold_paths(
    q: Arg, query: Arg, real: Arg, oldest: Arg, pages: Arg, table: Arg, tail: Arg, path: Arg, block: Arg, start: Arg,
    end: Arg, first_query: Arg, last_query: Arg, t: Arg, slot_stride: Arg, v_offset: Arg, tail_column: Arg, tail_v: Arg,
    acc: Arg, peak: Arg, mass: Arg, scale: Arg, values: Arg, dim: constexpr, page_size: constexpr, window: constexpr,
    aligned: constexpr, block_n: constexpr, block_d: constexpr, block_t: constexpr, hopper: constexpr,
) -> Arg:  # fmt: skip
    """Fold the one block of keys that the row's end or paths lie in, of the lanes' queries.

    query, real, oldest: [m], of each lane, the last the first position that it sees. first_query .. last_query - 1: the
    queries among them. path: of the row. values: of the values' columns those that are summed, as many as acc has. The
    rest as in `fold_alone`.
    """
    dims = tl.arange(0, block_d)
    key = block * block_n + tl.arange(0, block_n)
    stored = (key >= start) & (key < end)
    slot = page_of(table, block, start, end, block_n, page_size).to(tl.int64) * page_size + within_page(key, page_size)
    at = pages + slot * slot_stride
    of_k, of_v = stored[:, None] & (dims < dim)[None, :], stored[:, None] & (values < dim)[None, :]
    k = widened(tl.load(at[:, None] + dims[None, :], mask=of_k, other=0.0), of_k, q.dtype, hopper)
    v = widened(tl.load((at + v_offset)[:, None] + values[None, :], mask=of_v, other=0.0), of_v, q.dtype, hopper)
    raw = tl.dot(q, tl.trans(k), input_precision="ieee")

    columns = tl.arange(0, block_t)
    of_tail = (columns < t)[:, None] & (dims < dim)[None, :]
    k_tail = tl.load(tail + columns.to(tl.int64)[:, None] * tail_column + dims[None, :], mask=of_tail, other=0.0)
    k_tail = widened(k_tail, of_tail, q.dtype, hopper)
    raw_tail = tl.dot(q, tl.trans(k_tail), input_precision="ieee")
    on_paths = (key >= end) & (key - end < t)
    own = tl.load(
        path + query[:, None] * t + (key - end)[None, :], mask=real[:, None] & on_paths[None, :], other=-1
    )  # fmt: skip
    there = own >= 0
    raw = tl.where(there, tl.gather(raw_tail, tl.maximum(own, 0), 1), raw)
    visible = stored[None, :] | there
    if window > 0:
        visible = visible & (key[None, :] >= oldest[:, None])
    weights, acc, peak, mass = weigh(tl.where(visible, raw, float("-inf")), acc, peak, mass, scale, v.dtype)

    edge = end // 16 * 16  # steps before it have the same keys for all
    if pages.dtype.element_ty != q.dtype:  # of codes some cards' products take two steps by pairs
        edge = end // 32 * 32
    acc = tl.dot(tl.where((key < edge)[None, :], weights, 0.0).to(v.dtype), v, acc, input_precision="ieee")
    late = key >= edge
    late_weights = tl.where(late[None, :], weights, 0.0).to(v.dtype)
    for each in range(first_query, last_query):
        column = tl.load(path + each * t + key - end, mask=on_paths, other=-1)
        theirs = column >= 0
        at_v = tl.where(
            theirs, tail + column.to(tl.int64) * tail_column + tail_v, pages + slot * slot_stride + v_offset
        )
        if aligned:
            at_v = tl.multiple_of(at_v, 16)
        mask = (late & (stored | theirs))[:, None]
        mask = mask if dim == block_d else mask & (values < dim)[None, :]
        v_own = widened(tl.load(at_v[:, None] + values[None, :], mask=mask, other=0.0), mask, q.dtype, hopper)
        summed = tl.dot(late_weights, v_own, acc, input_precision="ieee")
        acc = tl.where((query == each)[:, None], summed, acc)  # of the others not even what is infinite shows
    return acc, peak, mass


@jit_for_any("n", "heads", "count", "capacity", "q_row")
def _segments_kernel(
    part: Arg, part_peak: Arg, part_mass: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    positions: Arg, tail: Arg, kv_scales: Arg, first: Arg, offsets: Arg, queues: Arg, items: Arg, path: Arg,
    scale: Arg, n: Arg, count: Arg, capacity: Arg, heads: Arg, q_row: Arg, q_query: Arg, q_head: Arg,
    slot_stride: Arg, v_offset: Arg, table_row: Arg, position_row: Arg, position_query: Arg, tail_row: Arg,
    tail_column: Arg, tail_v: Arg,
    group: constexpr, dim: constexpr, page_size: constexpr, window: constexpr, chunked: constexpr,
    alone: constexpr, scaled: constexpr, unit: constexpr, aligned: constexpr, block_m: constexpr, block_n: constexpr,
    block_d: constexpr, queued: constexpr, threads: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The parts of the items that a program takes, for one block of queries of one K/V head.

    part: [capacity, n, heads, dim], part_peak, part_mass: [capacity, n, heads], float32, contiguous. count: of rows.
    kv_scales: [2, kv_heads], read where `scaled`. The rest as in `segment_attention`; *_row, *_query, ... are strides
    in elements; window 0 is none. queued, threads: as in `take`. Grid (programs, kv_heads, blocks of queries). All slot
    arithmetic is int64.
    """
    pdl_wait(overlap, early=True)
    kv_head = tl.program_id(1)
    lane = tl.program_id(2) * block_m + tl.arange(0, block_m)
    query, head = lane // group, kv_head * group + lane % group
    real = query < n
    dims = tl.arange(0, block_d)
    base = pages + kv_head * dim
    if scaled:  # what all keys share goes to the scores, what all values share to the result
        scale *= tl.load(kv_scales + kv_head)
    total = tl.minimum(tl.load(offsets + count), capacity)
    item = tl.program_id(0)
    while item < total:
        row = tl.load(items + item).to(tl.int64)
        end = tl.load(kv_len + row).to(tl.int32)
        offset, seen_from = tl.load(offsets + row), tl.load(first + row)
        run = run_of(end, alone, seen_from, tl.load(offsets + row + 1) - offset, unit)
        last_segment = seen_from + run + tl.maximum(item - offset + 1, 0)
        table = page_table + tl.load(rows + row) * table_row
        queries = load_queries(q, row * q_row + query * q_query + head * q_head, real, dims, dim, scaled)
        start = 0
        oldest = tl.zeros([block_m], tl.int32)
        if window > 0:
            position_at = positions + row * position_row + query * position_query
            oldest = oldest_seen(tl.load(position_at, mask=real, other=0).to(tl.int32), window, chunked)
            start = tl.min(tl.where(real, oldest, 2147483647), 0)
        whole = end // block_n
        acc = tl.zeros([block_m, block_d], tl.float32)
        peak, mass = tl.full([block_m], -1e30, tl.float32), tl.zeros([block_m], tl.float32)
        each, each_peak, each_mass = empty_softmax(block_m, block_d)
        segment = tl.where(item < offset, seen_from, last_segment - 1)
        if window > 0:  # nodes that lie deep may see nothing of the first segments that the root sees
            segment = tl.where(item < offset, tl.maximum(segment, segment_of(start, unit)), segment)
        begin = tl.maximum(segment_start(segment, unit), start) // block_n
        after = segment_start(last_segment, unit) // block_n
        next_one = segment_start(segment + 1, unit) // block_n
        page = page_of(table, begin, start, end, block_n, page_size)
        narrow: constexpr = scaled and (dim > 128 or not overlap)  # as in a prefill
        for block in tl.range(begin, tl.minimum(after, whole), disable_licm=narrow):
            acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
                block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
            )
            key = block * block_n + tl.arange(0, block_n)
            stored = key >= start
            slot = page.to(tl.int64) * page_size + within_page(key, page_size)
            k, v = load_kv(base, slot * slot_stride, stored, v_offset, dims, dim, block_d, queries.dtype, overlap)
            page = page_of(table, block + 1, start, end, block_n, page_size)  # its latency hides behind this block's
            visible = stored[None, :]
            if window > 0:
                visible = visible & (key[None, :] >= oldest[:, None])
            each, each_peak, each_mass = fold(queries, k, v, visible, each, each_peak, each_mass, scale, window > 0)
        if alone:
            acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
                whole, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
            )
            each, each_peak, each_mass = fold_alone(
                queries, base, table, tail + row * tail_row + kv_head * dim, path + row, tl.maximum(begin, whole),
                tl.minimum(after, whole + 1), start, end, slot_stride, v_offset, tail_v, each, each_peak, each_mass,
                scale, dim, page_size, aligned, block_n, block_d, overlap,
            )  # fmt: skip
        queue = queues + kv_head * tl.num_programs(2) + tl.program_id(2)
        asked = take(queue, item, total, tl.num_programs(0), queued, threads)
        acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))
        at = ((tl.zeros([block_m], tl.int64) + item) * n + query) * heads + head
        tl.store(part_peak + at, peak, mask=real)
        tl.store(part_mass + at, mass, mask=real)
        tl.store(part + at[:, None] * dim + dims[None, :], acc, mask=real[:, None] & (dims < dim)[None, :])
        item = taken(asked, total, tl.num_programs(0))


@jit
def load_part(
    part: Arg, part_peak: Arg, part_mass: Arg, at: Arg, real: Arg, dims: Arg, dim: constexpr
) -> Arg:  # fmt: skip
    """A segment's sums, nothing where not `real`. at: [m] int64, of query and head."""
    peak = tl.load(part_peak + at, mask=real, other=-1e30)
    mass = tl.load(part_mass + at, mask=real, other=0.0)
    wide = real[:, None] & (dims < dim)[None, :]
    return tl.load(part + at[:, None] * dim + dims[None, :], mask=wide, other=0.0), peak, mass


@jit
def parts_kept(row: Arg, offset: Arg, others: Arg, run: Arg, capacity: Arg) -> Arg:
    """How many of a row's items have a part, the first ones. others, run: of the row, as in `run_of`."""
    behind = tl.minimum(tl.maximum(capacity - offset, 0), others)
    return tl.where((run > 0) & (row < capacity), behind + 1, 0)


@jit
def empty_queues(queues: Arg, num_queues: constexpr) -> None:
    """Nobody has taken an item: for the next launch, by one program."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(queues + tl.arange(0, num_queues), 0)


@jit_for_any("n", "heads", "capacity", "t", "q_row")
def _join_kernel(
    out: Arg, part: Arg, part_peak: Arg, part_mass: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    positions: Arg, tail: Arg, kv_scales: Arg, first: Arg, offsets: Arg, queues: Arg, path: Arg, sinks: Arg,
    scale: Arg, n: Arg, t: Arg, capacity: Arg, heads: Arg, q_row: Arg, q_query: Arg, q_head: Arg,
    slot_stride: Arg, v_offset: Arg, table_row: Arg, position_row: Arg, position_query: Arg, tail_row: Arg,
    tail_column: Arg, tail_v: Arg,
    group: constexpr, dim: constexpr, page_size: constexpr, window: constexpr, chunked: constexpr,
    alone: constexpr, has_sinks: constexpr, scaled: constexpr, unit: constexpr, aligned: constexpr,
    column_shares: constexpr, block_m: constexpr, block_n: constexpr, block_d: constexpr, block_t: constexpr,
    num_queues: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """A share of the columns of the results of one block of queries of one row and K/V head.

    The first program empties the queues. out: [rows, n, heads, dim], contiguous. The rest as in `_segments_kernel`.
    Grid (kv_heads * column_shares, blocks of queries, rows).
    """
    pdl_wait(overlap, early=True)
    kv_head, row = tl.program_id(0) // column_shares, tl.program_id(2).to(tl.int64)
    empty_queues(queues, num_queues)
    if scaled:
        scale *= tl.load(kv_scales + kv_head)
    lane = tl.program_id(1) * block_m + tl.arange(0, block_m)
    query, head = lane // group, kv_head * group + lane % group
    real = query < n
    dims = tl.arange(0, block_d)
    block_v: constexpr = block_d // column_shares
    values = tl.program_id(0) % column_shares * block_v + tl.arange(0, block_v)
    end = tl.load(kv_len + row).to(tl.int32)
    table = page_table + tl.load(rows + row) * table_row
    offset, seen_from = tl.load(offsets + row), tl.load(first + row)
    listed = tl.load(offsets + row + 1) - offset
    run = run_of(end, alone, seen_from, listed, unit)
    there = parts_kept(row, offset, listed, run, capacity)
    whole = end // block_n
    closed = there
    if not alone:
        ended = segment_of(whole * block_n, unit) - seen_from
        closed = tl.minimum(there, tl.maximum(ended - run + 1, 0))
    sink = tl.zeros([block_m], tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head, mask=real, other=0.0)
    position_at = positions + row * position_row + query * position_query
    position = tl.load(position_at, mask=real, other=-1).to(tl.int32)
    start = 0
    oldest = position
    if window > 0:
        oldest = oldest_seen(position, window, chunked)
        start = tl.maximum(tl.min(tl.where(real, oldest, 2147483647), 0), 0)
    own = load_queries(q, row * q_row + query * q_query + head * q_head, real, dims, dim, scaled)
    again: constexpr = scaled and not overlap and dim > 256  # beside codes that are widened they would be spilled
    step = n.to(tl.int64) * heads
    at = query * heads + head + (offset - 1) * step  # and so many steps further each item behind the first
    at_run = query * heads + head + row * step

    # joined to nothing the first part stays as it is, but for the sign of zeros
    begun = query < tl.where(closed > 0, n, 0)
    acc, peak, mass = load_part(part, part_peak, part_mass, at_run, begun, values, dim)
    for i in range(1, closed, 4):  # four are asked for at once
        one, one_peak, one_mass = load_part(part, part_peak, part_mass, at + i * step, real, values, dim)
        kept = query < tl.where(i + 1 < closed, n, 0)
        two, two_peak, two_mass = load_part(part, part_peak, part_mass, at + (i + 1) * step, kept, values, dim)
        kept = query < tl.where(i + 2 < closed, n, 0)
        three, three_peak, three_mass = load_part(part, part_peak, part_mass, at + (i + 2) * step, kept, values, dim)
        kept = query < tl.where(i + 3 < closed, n, 0)
        four, four_peak, four_mass = load_part(part, part_peak, part_mass, at + (i + 3) * step, kept, values, dim)
        acc, peak, mass = join(acc, peak, mass, one, one_peak, one_mass)
        acc, peak, mass = join(acc, peak, mass, two, two_peak, two_mass)
        acc, peak, mass = join(acc, peak, mass, three, three_peak, three_mass)
        acc, peak, mass = join(acc, peak, mass, four, four_peak, four_mass)

    first_query = tl.program_id(1) * block_m // group
    last_query = tl.minimum(tl.cdiv((tl.program_id(1) + 1) * block_m, group), n)
    stop = tl.cdiv(tl.maximum(tl.max(position, 0) + 1, end), block_n)
    next_segment = seen_from + tl.where(closed > 0, run + closed - 1, 0)
    for segment in range(next_segment, segment_of(stop * block_n - 1, unit) + 1):
        i = segment - seen_from - run + 1  # of the segment's part, if it has one
        kept = tl.where((i >= 0) & (i < there), n, 0)  # of its queries
        begin = tl.maximum(segment_start(segment, unit), start) // block_n
        after = tl.minimum(segment_start(segment + 1, unit) // block_n, stop)
        at_part = (tl.where(i > 0, offset + i - 1, row) * n + query) * heads + head
        each, each_peak, each_mass = load_part(part, part_peak, part_mass, at_part, query < kept, values, dim)
        each_mass = tl.broadcast_to(each_mass[:, None], (block_m, 16))
        for block in tl.range(tl.where(kept > 0, tl.maximum(begin, whole), begin), after, disable_licm=again):
            asked = own
            if again:
                asked = load_queries(q, row * q_row + query * q_query + head * q_head, real, dims, dim, scaled)
            each, each_peak, each_mass = fold_paths(
                asked, query, real, oldest, pages + kv_head * dim, table, tail + row * tail_row + kv_head * dim,
                path + row * n * t, block, start, end, first_query, last_query, t, slot_stride, v_offset, tail_column,
                tail_v, each, each_peak, each_mass, scale, values, dim, page_size, window, aligned, block_n, block_d,
                block_t, overlap,
            )  # fmt: skip
        acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))

    result = result_of(acc, peak, mass, sink, has_sinks)
    if scaled:
        result *= tl.load(kv_scales + tl.num_programs(0) // column_shares + kv_head)
    out_at = (row * n + query) * heads + head
    out_at = out_at[:, None] * dim + values[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real[:, None] & (values < dim)[None, :])


# ------------------------------------------------------------------------------------------------------- the launch


@dataclass(frozen=True, slots=True)
class SegmentLaunch:
    """How a call is cut, none of which shows in a bit.

    block_m: queries, times grouped heads, that a program takes at once.
    programs: that share the list of items, a K/V head and block of queries.
    capacity: items whose parts are kept.
    warps, stages: of the programs that fold segments.
    join_warps, column_shares: of the programs that join them, and of the values' columns, of which each has a share.
    """

    block_m: int
    programs: int = 1
    capacity: int = 1
    warps: int = 4
    stages: int = 3
    join_warps: int = 4
    column_shares: int = 1

    def of_queues(self, count: int) -> dict[str, int | bool]:
        """Constants of `take`. count: of lists of items that are shared, one a K/V head and block of queries."""
        return {"queued": self.programs > 1 and count <= QUEUES, "threads": 32 * self.warps}


@lru_cache(maxsize=4096)
def choose_segment_launch(call: CallShape, most: int, slots: int, gpu: GpuTraits) -> SegmentLaunch:
    """The launch of a call from its shape. most: items that there can be. slots: of the pages.

    Rows that share no page have at most `slots` keys in all, so a part is kept of all their segments.
    """
    width = call.n * call.group
    programs = num_splits_of(call, gpu)
    part_bytes = 4 * width * call.kv_heads * (call.head_dim + 2)
    kept, block_m = min(most, slots // UNIT + 2 * call.rows, PART_BYTES // part_bytes), _folded_m(call, gpu)
    many = not gpu.by_warp_groups and block_m * power_of_two(call.head_dim) > 32 * 128  # 4 warps of an A100 spill
    return SegmentLaunch(
        block_m,
        max(1, min(programs, most)),
        max(1, kept),
        warps=8 if many or is_small(call) or not is_roomy(gpu) else 4,
        stages=2,
        join_warps=4 if is_roomy(gpu) and gpu.by_warp_groups and call.element_bytes <= 2 else 8,
        column_shares=2 if call.head_dim > 128 else 1,
    )


def launch_for_codes(launch: SegmentLaunch, call: CallShape, gpu: GpuTraits) -> SegmentLaunch:
    """The launch of a call whose K/V are codes of a byte, of the one for 16 bits. What codes widen to takes registers,
    so where these lack a program has half the queries; and no product is tensor memory's, with which Triton 3.6 cannot
    load ahead what is widened by assembly. Elsewhere one block more is on its way: on an H200 0.86 to 1.01 of the time.
    """
    lacks, most = is_small(call) or not is_roomy(gpu), 32 if gpu.has_tensor_memory else 128
    narrow, widest = not lacks and call.head_dim <= 128, call.head_dim > 256
    return replace(
        launch,
        block_m=min(max(16, launch.block_m // 2), most) if lacks else launch.block_m,
        warps=launch.warps if narrow else 8,
        stages=3 if narrow else 1 if widest and gpu.shared_bytes < 128 << 10 else launch.stages,
        join_warps=8 if is_small(call) else launch.join_warps,
        column_shares=4 if widest else launch.column_shares,
    )


def is_roomy(gpu: GpuTraits) -> bool:
    """Whether programs that fold segments are cut as on a Hopper, where that was timed, and on an A100. Elsewhere those
    spill registers, as compiled (`make check-kernels`).
    """
    return gpu.shared_bytes >= 128 << 10 and not gpu.has_tensor_memory


def most_lanes(call: CallShape, gpu: GpuTraits, most: int) -> int:
    """Queries, times grouped heads, of which a program of 8 warps has the sums of a segment and of all before it.

    `most`, or where there is less room as many as have 32 numbers of each a thread.
    """
    return most if is_roomy(gpu) else min(most, max(16, 32 * 256 // power_of_two(call.head_dim)))


def is_small(call: CallShape) -> bool:
    """Whether a program takes fewer queries, for its sums are wide."""
    return call.element_bytes > 2 or call.head_dim > 256


def _folded_m(call: CallShape, gpu: GpuTraits) -> int:
    return min(max(16, power_of_two(call.n * call.group)), most_lanes(call, gpu, 32 if is_small(call) else 64))


def num_splits_of(call: CallShape, gpu: GpuTraits) -> int:
    """Programs among which the items of a decode phase are divided, a K/V head and block of queries."""
    blocks, each = -(-call.n * call.group // _folded_m(call, gpu)), 4 if call.n == 1 and call.rows <= 16 else 2
    return max(1, -(-each * gpu.num_sms // (call.kv_heads * blocks)))


def segment_attention_reference(
    q: Tensor,
    pages: Tensor,
    plan: SegmentPlan,
    tail: Tensor,
    scale: float,
    sinks: Tensor | None,
    scales: Tensor | None = None,
) -> Tensor:
    """`segment_attention` by plain operations, whose sums have another order. Returns [rows, n, heads, head_dim]."""
    return paged_attention_reference(q, pages, plan.metadata, tail, scale, sinks, scales)[0]


def segment_attention(
    q: Tensor,
    pages: Tensor,
    plan: SegmentPlan,
    tail: Tensor,
    scale: float,
    sinks: Tensor | None,
    gpu: GpuTraits,
    launch: SegmentLaunch | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention over the committed pages and each query's path in the tail.

    q: [rows, n, heads, head_dim], dense in its last dimension. pages: [slots, 2, kv_heads, head_dim], one layer's.
    tail: [rows, t, 2, kv_heads, head_dim]. sinks: [heads] float32, a logit a head that takes part in the normalisation.
    scale: above 0. scales: [2, kv_heads] float32, contiguous, of pages and a tail in FP8. Returns [rows, n, heads,
    head_dim].

    What a query sees of the tail is a path: at most one column a position, at positions from kv_len on.
    """
    metadata = plan.metadata
    rows, n, heads, dim = q.shape
    kv_heads = pages.shape[2]
    group = heads // kv_heads
    if launch is None:
        call = CallShape(rows, n, kv_heads, group, dim, q.element_size(), metadata.max_kv_len)
        launch = choose_segment_launch(call, plan.items.shape[0], pages.shape[0], gpu)
        launch = launch if scales is None else launch_for_codes(launch, call, gpu)
    out = torch.empty((rows, n, heads, dim), dtype=q.dtype, device=q.device)
    capacity = launch.capacity
    part = torch.empty((capacity * n * heads, dim + 2), dtype=torch.float32, device=q.device).view(-1)
    sums, peaks, masses = part.split([capacity * n * heads * dim, capacity * n * heads, capacity * n * heads])
    positions, table = metadata.positions, metadata.table.data
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.stride()[2:] == tail.stride()[3:] == (dim, 1)
    assert scales is None or scales.is_contiguous()
    strides = (
        *q.stride()[:3], pages.stride(0), pages.stride(1), table.stride(0), *positions.stride(), *tail.stride()[:3]
    )  # fmt: skip
    # every key of pages and tail begins at a multiple of 16 bytes
    steps = (dim, *pages.stride()[:2], *tail.stride()[:3])
    bases = (pages.data_ptr(), tail.data_ptr())
    aligned = not any(each * pages.element_size() % 16 for each in steps) and not any(each % 16 for each in bases)
    shape = {
        "group": group, "dim": dim, "page_size": metadata.page_size, "window": metadata.window or 0,
        "chunked": metadata.chunked, "alone": plan.alone, "scaled": scales is not None, "unit": plan.unit,
        "aligned": aligned,
        "block_n": plan.block, "block_d": max(16, power_of_two(dim)), "overlap": gpu.can_overlap,
        "enable_fp_fusion": False, **launch_options(gpu),
    }  # fmt: skip
    where = (
        q, pages, table, metadata.rows, metadata.kv_len, positions, tail, peaks if scales is None else scales,
        plan.first, plan.offsets, plan.queues,
    )  # fmt: skip
    scale *= math.log2(math.e)
    blocks = -(-n * group // launch.block_m)
    _segments_kernel[(launch.programs, kv_heads, blocks)](
        sums, peaks, masses, *where, plan.items, plan.path, scale, n, rows, capacity, heads, *strides,
        **launch.of_queues(kv_heads * blocks), block_m=launch.block_m, num_warps=launch.warps,
        num_stages=launch.stages, **shape,
    )  # fmt: skip
    t = tail.shape[1]
    _join_kernel[(kv_heads * launch.column_shares, -(-n * group // JOINED), rows)](
        out, sums, peaks, masses, *where, plan.path, peaks if sinks is None else sinks, scale, n, t, capacity, heads,
        *strides, has_sinks=sinks is not None, column_shares=launch.column_shares, block_m=JOINED,
        block_t=max(16, power_of_two(t)), num_queues=QUEUES, num_warps=launch.join_warps, num_stages=2, **shape,
    )  # fmt: skip
    return out
