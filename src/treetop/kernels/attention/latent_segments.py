"""Compressed attention with the arithmetic of `segments`: planes that are key and value, and what is chosen of them.

As `segment_attention`, with two differences. All heads see the same plane, [latent, rotated key], of which the latent
is the value, so a raw score is one product over the latent that goes on over what has RoPE. And in the second launch a
program takes heads of one query alone, so a block of keys on its path is one product, wherever they come from.

Where an indexer has chosen (DSA), each query is a row of its own, and a key's place in every sum is its rank among the
chosen ones, in the order of positions: of the prefix, then of the query's path. As long as all are chosen, that is its
position, and every sum is that of attention to all.

    row of 3,000 keys, 2,048 chosen | rank 0 .. 2,040: of the pages | 2,041 .. 2,047: of the path |

Source: absorbed attention, DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treetop.kernels.attention.attention import beside_codes, page_of, within_page
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.latent_attention import chosen_slots, latent_attention_reference, load_plane, plane_at
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.attention.segment_attention import (
    JOINED,
    SegmentLaunch,
    choose_segment_launch,
    empty_queues,
    load_part,
    most_lanes,
    parts_kept,
)
from treetop.kernels.attention.segments import (
    QUEUES,
    UNIT,
    SegmentPlan,
    block_of,
    empty_softmax,
    join,
    online_softmax_step,
    plan_segments,
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

# ---------------------------------------------------------------------------------------------------- what was chosen


@dataclass(frozen=True, slots=True)
class ChosenSegments:
    """What an indexer chose in a phase, and of a decode phase the plan of its queries, each of which is a row.

    metadata: of the phase. keys: as they were chosen. plan: of the queries; None in a prefill.
    """

    metadata: AttentionMetadata
    keys: SparseKeys
    plan: SegmentPlan | None

    def of(self, metadata: AttentionMetadata) -> "ChosenSegments | AttentionMetadata":
        """The same choice in the layers of a group, whose metadata of the phase this is."""
        if self.plan is None:
            return replace(metadata, chosen=self.keys)
        queries = replace(self.plan.metadata, table=metadata.table)
        return ChosenSegments(metadata, self.keys, replace(self.plan, metadata=queries))


def query_rows(metadata: AttentionMetadata, keys: SparseKeys) -> AttentionMetadata:
    """A phase in which each query is a row, of the keys that were chosen for it, by their ranks.

    Returns metadata of [rows * n] rows with one query each, and of a decode phase [rows * n, t] columns.
    """
    _, n, top_k = keys.positions.shape
    count = keys.count.flatten()
    own = replace(
        metadata, rows=metadata.rows.repeat_interleave(n), kv_len=count, max_kv_len=min(metadata.max_kv_len, top_k),
        positions=count[:, None].to(torch.int64) - 1,
    )  # fmt: skip
    if keys.columns is None:
        return own
    columns = keys.columns.flatten(0, 1)
    past = columns.cumsum(dim=1) + count[:, None]
    return replace(own, positions=past[:, -1:] - 1, tail_positions=past - 1, mask=columns[:, None])


def choose_segments(
    metadata: AttentionMetadata, keys: SparseKeys, shares: int, block: int, gpu: GpuTraits, unit: int = UNIT
) -> ChosenSegments:
    """What was chosen, with its plan. shares, block, unit: as of `plan_segments`."""
    if metadata.causal:
        return ChosenSegments(metadata, keys, None)
    return ChosenSegments(metadata, keys, plan_segments(query_rows(metadata, keys), shares, block, gpu, unit))


# ------------------------------------------------------------------------------------------------------ the kernels


@jit
def fold_latents(
    q: Arg, q_rope: Arg, k: Arg, k_rope: Arg, visible: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg,
    masked: constexpr,
) -> Arg:  # fmt: skip
    """`segments.fold` of a block of planes. q, k: [m or n, rank], q_rope, k_rope: [m or n, rope_dim]."""
    raw = tl.dot(q, tl.trans(k), input_precision="ieee")
    raw = tl.dot(q_rope, tl.trans(k_rope), raw, input_precision="ieee")
    if masked:
        raw = tl.where(visible, raw, float("-inf"))
    weights, acc, peak, mass = weigh(raw, acc, peak, mass, scale, k.dtype)
    return tl.dot(weights, k, acc, input_precision="ieee"), peak, mass


@jit
def load_latent_queries(
    q: Arg, at: Arg, real: Arg, lane_c: Arg, lane_r: Arg, rank: constexpr, rope_dim: constexpr, scaled: constexpr
) -> Arg:  # fmt: skip
    """Queries [m, rank] and [m, rope_dim], 0 where not `real`. at: [m], element offsets. scaled: planes are codes."""
    where = q + at[:, None]
    own = tl.load(where + lane_c[None, :], mask=real[:, None] & (lane_c < rank)[None, :], other=0.0)
    own_rope = tl.load(where + rank + lane_r[None, :], mask=real[:, None] & (lane_r < rope_dim)[None, :], other=0.0)
    if scaled:
        own, own_rope = beside_codes(own), beside_codes(own_rope)
    return own, own_rope


@jit
def slots_of_block(
    table: Arg, chosen: Arg, block: Arg, end: Arg, length: Arg, sparse: constexpr, block_n: constexpr,
    page_size: constexpr,
) -> Arg:  # fmt: skip
    """Slots of a block's keys [block_n] int64; the null page's from `end` on. As in `_latent_segments_kernel`."""
    if sparse:
        slots = chosen_slots(table, chosen, block, end, length, block_n, page_size)
    else:
        key = block * block_n + tl.arange(0, block_n)
        slots = page_of(table, block, 0, end, block_n, page_size).to(tl.int64) * page_size + within_page(key, page_size)
    return slots


@jit
def fold_latent_path(
    q: Arg, q_rope: Arg, pages: Arg, table: Arg, chosen: Arg, tail: Arg, path: Arg, block: Arg, end: Arg,
    length: Arg, t: Arg, slot_stride: Arg, tail_column: Arg, lane_c: Arg, lane_r: Arg, acc: Arg, peak: Arg, mass: Arg,
    scale: Arg, rank: constexpr, rope_dim: constexpr, page_size: constexpr, sparse: constexpr, aligned: constexpr,
    block_n: constexpr, hopper: constexpr,
) -> Arg:  # fmt: skip
    """Fold one block of the keys of one query, whose heads are the lanes: of pages before `end`, then of its path.

    tail: of the row. path: of the query. aligned: every plane begins at a multiple of 16 bytes.
    """
    key = block * block_n + tl.arange(0, block_n)
    stored = key < end
    slot = slots_of_block(table, chosen, block, end, length, sparse, block_n, page_size)
    column = tl.load(path + key - end, mask=(key >= end) & (key - end < t), other=-1)
    theirs = column >= 0
    at = tl.where(theirs, tail + column.to(tl.int64) * tail_column, pages + slot * slot_stride)
    if aligned:
        at = tl.multiple_of(at, 16)
    k, k_rope = plane_at(at, stored | theirs, lane_c, lane_r, rank, rope_dim, q.dtype, hopper)
    return fold_latents(q, q_rope, k, k_rope, (stored | theirs)[None, :], acc, peak, mass, scale, True)


@jit_for_any("n", "count", "capacity", "t", "per", "q_row", "chosen_row")
def _latent_segments_kernel(
    part: Arg, part_peak: Arg, part_mass: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    lengths: Arg, chosen: Arg, tail: Arg, kv_scales: Arg, offsets: Arg, queues: Arg, path: Arg, items: Arg, scale: Arg,
    n: Arg, t: Arg, per: Arg, count: Arg, capacity: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg,
    table_row: Arg, chosen_row: Arg, tail_row: Arg, tail_column: Arg,
    heads: constexpr, rank: constexpr, rope_dim: constexpr, page_size: constexpr, alone: constexpr, sparse: constexpr,
    scaled: constexpr, unit: constexpr, aligned: constexpr, block_m: constexpr, block_n: constexpr,
    block_c: constexpr, block_r: constexpr, queued: constexpr, threads: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The parts of the items that a program takes, for one block of queries, times heads.

    part: [capacity, n, heads, rank], part_peak, part_mass: [capacity, n, heads], float32, contiguous. count: of rows.
    per: rows that share a tail and a length, of `lengths` [count / per], 1 where they are not queries. chosen: [count,
    top_k] int32, positions of a row's keys, read where `sparse`. kv_scales: [1, 1], read where `scaled`. queued,
    threads: as in `take`. The rest as in `segment_latents`; *_row, *_query, ... are strides in elements. Grid
    (programs, blocks of queries). All slot arithmetic is int64.
    """
    pdl_wait(overlap, early=True)
    lane = tl.program_id(1) * block_m + tl.arange(0, block_m)
    query, head = lane // heads, lane % heads
    real = query < n
    lane_c, lane_r = tl.arange(0, block_c), tl.arange(0, block_r)
    if scaled:
        scale *= tl.load(kv_scales)
    total = tl.minimum(tl.load(offsets + count), capacity)
    item = tl.program_id(0)
    while item < total:
        row = tl.load(items + item).to(tl.int64)
        end, length = tl.load(kv_len + row).to(tl.int32), tl.load(lengths + row // per).to(tl.int32)
        offset = tl.load(offsets + row)
        run = run_of(end, alone, 0, tl.load(offsets + row + 1) - offset, unit)
        last_segment = run + tl.maximum(item - offset + 1, 0)
        table, those = page_table + tl.load(rows + row) * table_row, chosen + row * chosen_row
        own, own_rope = load_latent_queries(
            q, row * q_row + query * q_query + head * q_head, real, lane_c, lane_r, rank, rope_dim, scaled
        )
        whole = end // block_n
        acc = tl.zeros([block_m, block_c], tl.float32)
        peak, mass = tl.full([block_m], -1e30, tl.float32), tl.zeros([block_m], tl.float32)
        each, each_peak, each_mass = empty_softmax(block_m, block_c)
        segment = tl.where(item < offset, 0, last_segment - 1)
        begin = segment_start(segment, unit) // block_n
        after = segment_start(last_segment, unit) // block_n
        next_one = segment_start(segment + 1, unit) // block_n
        slot = slots_of_block(table, those, begin, end, length, sparse, block_n, page_size)
        for block in range(begin, tl.minimum(after, whole)):
            acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
                block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
            )
            stored = block * block_n + tl.arange(0, block_n) < end
            k, k_rope = load_plane(
                pages, slot * slot_stride, stored, lane_c, lane_r, rank, rope_dim, own.dtype, overlap
            )  # fmt: skip
            slot = slots_of_block(table, those, block + 1, end, length, sparse, block_n, page_size)
            each, each_peak, each_mass = fold_latents(
                own, own_rope, k, k_rope, stored[None, :], each, each_peak, each_mass, scale, False
            )
        if alone:
            acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
                whole, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
            )
            for block in range(tl.maximum(begin, whole), tl.minimum(after, whole + 1)):
                each, each_peak, each_mass = fold_latent_path(
                    own, own_rope, pages, table, those, tail + row // per * tail_row, path + row, block, end, length,
                    t, slot_stride, tail_column, lane_c, lane_r, each, each_peak, each_mass, scale, rank, rope_dim,
                    page_size, sparse, aligned, block_n, overlap,
                )  # fmt: skip
        asked = take(queues + tl.program_id(1), item, total, tl.num_programs(0), queued, threads)
        acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))
        at = ((tl.zeros([block_m], tl.int64) + item) * n + query) * heads + head
        tl.store(part_peak + at, peak, mask=real)
        tl.store(part_mass + at, mass, mask=real)
        tl.store(part + at[:, None] * rank + lane_c[None, :], acc, mask=real[:, None] & (lane_c < rank)[None, :])
        item = taken(asked, total, tl.num_programs(0))


@jit_for_any("n", "capacity", "t", "per", "q_row", "chosen_row")
def _join_latents_kernel(
    out: Arg, part: Arg, part_peak: Arg, part_mass: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    lengths: Arg, chosen: Arg, tail: Arg, kv_scales: Arg, offsets: Arg, queues: Arg, path: Arg, positions: Arg,
    scale: Arg, n: Arg, t: Arg, per: Arg, capacity: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg,
    table_row: Arg, chosen_row: Arg, tail_row: Arg, tail_column: Arg, position_row: Arg, position_query: Arg,
    heads: constexpr, rank: constexpr, rope_dim: constexpr, page_size: constexpr, alone: constexpr, sparse: constexpr,
    scaled: constexpr, unit: constexpr, aligned: constexpr, block_m: constexpr, block_n: constexpr,
    block_c: constexpr, block_r: constexpr, num_queues: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The results of some heads of one query of one row.

    The first program empties the queues. out: [rows, n, heads, rank], contiguous. The rest as in
    `_latent_segments_kernel`. Grid (rows * n, blocks of heads).
    """
    pdl_wait(overlap, early=True)
    empty_queues(queues, num_queues)
    row, query = (tl.program_id(0) // n).to(tl.int64), tl.program_id(0) % n
    head = tl.program_id(1) * block_m + tl.arange(0, block_m)
    real = head < heads
    lane_c, lane_r = tl.arange(0, block_c), tl.arange(0, block_r)
    if scaled:
        scale *= tl.load(kv_scales)
    end, length = tl.load(kv_len + row).to(tl.int32), tl.load(lengths + row // per).to(tl.int32)
    table, those = page_table + tl.load(rows + row) * table_row, chosen + row * chosen_row
    offset = tl.load(offsets + row)
    listed = tl.load(offsets + row + 1) - offset
    run = run_of(end, alone, 0, listed, unit)
    there = parts_kept(row, offset, listed, run, capacity)
    whole = end // block_n
    closed = there
    if not alone:
        closed = tl.minimum(there, tl.maximum(segment_of(whole * block_n, unit) - run + 1, 0))
    own, own_rope = load_latent_queries(
        q, row * q_row + query * q_query + head * q_head, real, lane_c, lane_r, rank, rope_dim, scaled
    )
    step = n.to(tl.int64) * heads
    at = query * heads + head + (offset - 1) * step  # and so many steps further each item behind the first
    at_run = query * heads + head + row * step

    # joined to nothing the first part stays as it is, but for the sign of zeros
    begun = head < tl.where(closed > 0, heads, 0)
    acc, peak, mass = load_part(part, part_peak, part_mass, at_run, begun, lane_c, rank)
    for i in range(1, closed):
        one, one_peak, one_mass = load_part(part, part_peak, part_mass, at + i * step, real, lane_c, rank)
        acc, peak, mass = join(acc, peak, mass, one, one_peak, one_mass)

    position = tl.load(positions + row * position_row + query * position_query).to(tl.int32)
    stop = tl.cdiv(tl.maximum(position + 1, end), block_n)
    next_segment = tl.where(closed > 0, run + closed - 1, 0)
    for segment in range(next_segment, segment_of(stop * block_n - 1, unit) + 1):
        i = segment - run + 1  # of the segment's part, if it has one
        kept = (i >= 0) & (i < there)
        begin = segment_start(segment, unit) // block_n
        after = tl.minimum(segment_start(segment + 1, unit) // block_n, stop)
        at_part = (tl.where(i > 0, offset + i - 1, row) * n + query) * heads + head
        each, each_peak, each_mass = load_part(
            part, part_peak, part_mass, at_part, head < tl.where(kept, heads, 0), lane_c, rank
        )
        each_mass = tl.broadcast_to(each_mass[:, None], (block_m, 16))
        for block in range(tl.where(kept, tl.maximum(begin, whole), begin), after):
            each, each_peak, each_mass = fold_latent_path(
                own, own_rope, pages, table, those, tail + row // per * tail_row, path + (row * n + query) * t,
                block, end, length, t, slot_stride, tail_column, lane_c, lane_r, each, each_peak, each_mass, scale,
                rank, rope_dim, page_size, sparse, aligned, block_n, overlap,
            )  # fmt: skip
        acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))

    result = result_of(acc, peak, mass, peak, False)
    if scaled:
        result *= tl.load(kv_scales)
    out_at = ((row * n + query) * heads + head)[:, None] * rank + lane_c[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real[:, None] & (lane_c < rank)[None, :])


@jit_for_any("n", "count", "per", "q_row", "position_row", "chosen_row")
def _latent_prefill_kernel(
    out: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg, lengths: Arg, chosen: Arg, kv_scales: Arg,
    positions: Arg, scale: Arg, n: Arg, per: Arg, count: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg,
    table_row: Arg, chosen_row: Arg, position_row: Arg, position_query: Arg,
    heads: constexpr, rank: constexpr, rope_dim: constexpr, page_size: constexpr, sparse: constexpr, scaled: constexpr,
    unit: constexpr, block_m: constexpr, block_n: constexpr, block_c: constexpr, block_r: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """One block of a prefill's queries, times heads, of one row, whose keys are all in pages.

    The arguments are as in `_join_latents_kernel`. Where `sparse` a row is one query, which sees all of its keys. Grid
    (rows * blocks of queries,).
    """
    pdl_wait(overlap, early=True)
    row = (tl.program_id(0) % count).to(tl.int64)
    tile = tl.num_programs(0) // count - 1 - tl.program_id(0) // count  # the longest blocks start first
    lane = tile * block_m + tl.arange(0, block_m)
    query, head = lane // heads, lane % heads
    within = query < n
    lane_c, lane_r = tl.arange(0, block_c), tl.arange(0, block_r)
    if scaled:
        scale *= tl.load(kv_scales)
    end, length = tl.load(kv_len + row).to(tl.int32), tl.load(lengths + row // per).to(tl.int32)
    table, those = page_table + tl.load(rows + row) * table_row, chosen + row * chosen_row
    own, own_rope = load_latent_queries(
        q, row * q_row + query * q_query + head * q_head, within, lane_c, lane_r, rank, rope_dim, scaled
    )
    real, position = within, tl.zeros([block_m], tl.int32) + end
    middle = end // block_n  # blocks that need no mask
    if not sparse:
        position_at = positions + row * position_row
        position = tl.load(position_at + query * position_query, mask=within, other=0).to(tl.int32)
        real = within & ((query == 0) | (position > tl.load(position_at).to(tl.int32)))
        end = tl.minimum(end, tl.max(tl.where(real, position, -1), 0) + 1)
        middle = tl.minimum(tl.min(tl.where(real, position, 2147483646), 0) + 1, end) // block_n
    stop = tl.cdiv(end, block_n)

    acc = tl.zeros([block_m, block_c], tl.float32)
    peak, mass = tl.full([block_m], -1e30, tl.float32), tl.zeros([block_m], tl.float32)
    each, each_peak, each_mass = empty_softmax(block_m, block_c)
    segment, next_one = 0, segment_start(1, unit) // block_n
    slot = slots_of_block(table, those, 0, end, length, sparse, block_n, page_size)
    # What codes widen to fills the registers of cards whose products take operands there: nothing is computed ahead.
    narrow: constexpr = scaled and not overlap
    for block in tl.range(0, middle, disable_licm=narrow):
        acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
            block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
        )
        stored = block * block_n + tl.arange(0, block_n) < end
        k, k_rope = load_plane(pages, slot * slot_stride, stored, lane_c, lane_r, rank, rope_dim, own.dtype, overlap)
        slot = slots_of_block(table, those, block + 1, end, length, sparse, block_n, page_size)
        each, each_peak, each_mass = fold_latents(
            own, own_rope, k, k_rope, stored[None, :], each, each_peak, each_mass, scale, False
        )
    for block in tl.range(middle, stop, disable_licm=narrow):
        acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
            block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
        )
        key = block * block_n + tl.arange(0, block_n)
        k, k_rope = load_plane(pages, slot * slot_stride, key < end, lane_c, lane_r, rank, rope_dim, own.dtype, overlap)
        slot = slots_of_block(table, those, block + 1, end, length, sparse, block_n, page_size)
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None]) & real[:, None]
        each, each_peak, each_mass = fold_latents(
            own, own_rope, k, k_rope, visible, each, each_peak, each_mass, scale, True
        )
    acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))

    result = tl.where(real[:, None], result_of(acc, peak, mass, peak, False), 0.0)
    if scaled:
        result *= tl.load(kv_scales)
    out_at = ((row * n + query) * heads + head)[:, None] * rank + lane_c[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=within[:, None] & (lane_c < rank)[None, :])


# -------------------------------------------------------------------------------------------------------- the launch


def choose_latent_launch(call: CallShape, most: int, slots: int, coded: bool, gpu: GpuTraits) -> SegmentLaunch:
    """`choose_segment_launch`, in the registers and the shared memory that there are. coded: planes are codes."""
    return _that_fits(choose_segment_launch(call, most, slots, gpu), coded, gpu)


def choose_latent_prefill(call: CallShape, coded: bool, gpu: GpuTraits) -> SegmentLaunch:
    """The launch of a prefill: the sums of a segment and of all before it fill the registers of 32 queries."""
    block_m = min(max(16, power_of_two(call.n * call.group)), most_lanes(call, gpu, 32))
    return _that_fits(SegmentLaunch(block_m, warps=8, stages=2), coded, gpu)


def _that_fits(launch: SegmentLaunch, coded: bool, gpu: GpuTraits) -> SegmentLaunch:
    """Queries and two blocks of planes take 108 KiB; 16 queries and one take 54. Codes are widened in registers."""
    roomy = gpu.shared_bytes >= 128 << 10
    return launch if roomy and not coded else replace(launch, block_m=16, stages=2 if roomy else 1)


def segment_latents_reference(
    q: Tensor,
    pages: Tensor,
    plan: SegmentPlan | ChosenSegments,
    tail: Tensor,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """`segment_latents` by plain operations, whose sums have another order."""
    metadata = plan.metadata
    if isinstance(plan, ChosenSegments):
        metadata = replace(metadata, chosen=plan.keys, mask=plan.keys.columns)
    return latent_attention_reference(q, pages, metadata, tail, rank, scale, scales)


def segment_latents(
    q: Tensor,
    pages: Tensor,
    plan: SegmentPlan | ChosenSegments,
    tail: Tensor,
    rank: int,
    scale: float,
    gpu: GpuTraits,
    launch: SegmentLaunch | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention over the committed planes and each query's path in the tail.

    q: [rows, n, heads, dim]. pages: [slots, 1, 1, dim], one layer's, which may be part of wider planes. tail: [rows, t,
    1, 1, dim]. rank: a plane's first numbers, which are its value. scale: above 0. scales: [1, 1] float32, of pages and
    a tail in FP8. Returns [rows, n, heads, rank]; a query that sees nothing gets 0.

    What a query sees of the tail is a path: at most one column a position.
    """
    shape, lengths, chosen = q.shape, plan.metadata.kv_len, None
    if isinstance(plan, ChosenSegments):
        assert plan.plan is not None
        q, chosen, plan = q.flatten(0, 1)[:, None], plan.keys, plan.plan
    metadata = plan.metadata
    rows, n, heads, dim = q.shape
    call = CallShape(rows, n, 1, heads, dim, q.element_size(), metadata.max_kv_len)
    if launch is None:
        slots = pages.shape[0] if chosen is None else rows * metadata.max_kv_len
        launch = choose_latent_launch(call, plan.items.shape[0], slots, scales is not None, gpu)
    out = torch.empty((*shape[:3], rank), dtype=q.dtype, device=q.device)
    capacity = launch.capacity
    part = torch.empty((capacity * n * heads, rank + 2), dtype=torch.float32, device=q.device).view(-1)
    sums = part.split([capacity * n * heads * rank, capacity * n * heads, capacity * n * heads])
    positions, table, per = metadata.positions, metadata.table.data, rows // tail.shape[0]
    those, that_row = _rows_of_chosen(chosen, metadata.kv_len)
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.shape[1:] == (1, 1, dim)
    assert (pages.stride(3), tail.stride(4)) == (1, 1)
    steps = (pages.stride(0), *tail.stride()[:2])
    bases = (pages.data_ptr(), tail.data_ptr())
    aligned = not any(each * pages.element_size() % 16 for each in steps) and not any(each % 16 for each in bases)
    shared = {
        **_of_planes(heads, rank, dim, metadata, chosen, scales, gpu), "alone": plan.alone, "unit": plan.unit,
        "aligned": aligned, "block_n": plan.block,
    }  # fmt: skip
    t, strides = tail.shape[1], (*q.stride()[:3], pages.stride(0), table.stride(0), that_row, *tail.stride()[:2])
    where = (
        q, pages, table, metadata.rows, metadata.kv_len, lengths, those, tail, lengths if scales is None else scales,
        plan.offsets, plan.queues, plan.path,
    )  # fmt: skip
    scale *= math.log2(math.e)
    blocks = -(-n * heads // launch.block_m)
    _latent_segments_kernel[(launch.programs, blocks)](
        *sums, *where, plan.items, scale, n, t, per, rows, capacity, *strides,
        **launch.of_queues(blocks), block_m=launch.block_m, num_warps=launch.warps, num_stages=launch.stages, **shared,
    )  # fmt: skip
    _join_latents_kernel[(rows * n, -(-heads // JOINED))](
        out, *sums, *where, positions, scale, n, t, per, capacity, *strides, *positions.stride(),
        block_m=JOINED, num_queues=QUEUES, num_warps=8, num_stages=1, **shared,
    )  # fmt: skip
    return out


def prefill_latents_reference(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """`prefill_latents` by plain operations, whose sums have another order."""
    return latent_attention_reference(q, pages, metadata, None, rank, scale, scales)


def prefill_latents(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    rank: int,
    scale: float,
    gpu: GpuTraits,
    launch: SegmentLaunch | None = None,
    scales: Tensor | None = None,
    block_n: int | None = None,
    unit: int = UNIT,
) -> Tensor:
    """Attention of a chunk, whose planes are in the pages, up to each query's own position, or to what was chosen.

    As `segment_latents`. block_n: keys of a block, else `block_of`.
    """
    shape, lengths, chosen = q.shape, metadata.kv_len, metadata.chosen
    if chosen is not None:
        q, metadata = q.flatten(0, 1)[:, None], query_rows(metadata, chosen)
    rows, n, heads, dim = q.shape
    if launch is None:
        call = CallShape(rows, n, 1, heads, dim, q.element_size(), metadata.max_kv_len)
        launch = choose_latent_prefill(call, scales is not None, gpu)
    out = torch.empty((*shape[:3], rank), dtype=q.dtype, device=q.device)
    positions, table = metadata.positions, metadata.table.data
    those, that_row = _rows_of_chosen(chosen, metadata.kv_len)
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.shape[1:] == (1, 1, dim)
    assert pages.stride(3) == 1
    _latent_prefill_kernel[(rows * -(-n * heads // launch.block_m),)](
        out, q, pages, table, metadata.rows, metadata.kv_len, lengths, those, lengths if scales is None else scales,
        positions, scale * math.log2(math.e), n, rows // len(lengths), rows, *q.stride()[:3], pages.stride(0),
        table.stride(0), that_row, *positions.stride(),
        **_of_planes(heads, rank, dim, metadata, chosen, scales, gpu), unit=unit, block_m=launch.block_m,
        block_n=block_n or block_of(dim, q.element_size()), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out


def _rows_of_chosen(chosen: SparseKeys | None, instead: Tensor) -> tuple[Tensor, int]:
    """Positions of what was chosen, [rows * n, top_k] int32, and how far their rows are apart."""
    if chosen is None:
        return instead, 0
    assert chosen.positions.is_contiguous()
    assert chosen.count.is_contiguous()
    return chosen.positions, chosen.positions.shape[2]


def _of_planes(
    heads: int,
    rank: int,
    dim: int,
    metadata: AttentionMetadata,
    chosen: SparseKeys | None,
    scales: Tensor | None,
    gpu: GpuTraits,
) -> dict[str, object]:
    """What each of the kernels is compiled for. No model has compressed attention and a window."""
    assert metadata.window is None
    return {
        "heads": heads, "rank": rank, "rope_dim": dim - rank, "page_size": metadata.page_size,
        "sparse": chosen is not None, "scaled": scales is not None, "block_c": max(16, power_of_two(rank)),
        "block_r": max(16, power_of_two(dim - rank)), "overlap": gpu.can_overlap, "enable_fp_fusion": False,
        **launch_options(gpu),
    }  # fmt: skip
