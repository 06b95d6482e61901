"""The arithmetic of attention by position: what a query sees has one order of sums, whatever stands beside it.

A key's place in every sum is its absolute position alone:

    positions   | block 0 | block 1 | ... | block 7 | block 8 | ...
    segments    |    segment 0      |     segment 1     | ...

    raw score    q . k, one product over the head
    block        peak = max(peak, max raw * scale), weight = 2 ** (raw * scale - peak) in the values' dtype, sums of the
                 weights and of weight * v go on where the block before left them, shrunk by 2 ** (old peak - peak)
    segment      its blocks from the first to the last, from nothing
    result       segments joined from the first to the last, a sink after them, values' sum over weights' sum

A product of matrices adds the terms of an output one step after another, a step being 16 keys of a tensor core, and
what an output gets depends on its own row and column alone. So a key always stands at its position's place in its
block, and one that is hidden has weight 0. A step, block or segment that is hidden whole leaves everything as it is, so
it may be left out, and the steps of a block may be products of their own: of keys that many queries see, and of those
on one query's path. `weigh`, `fold` and `join` below are all there is of the sums; each kernel calls these, and is
compiled without contraction of products and additions, so that the same operations come out of each.

The sum of the weights is a product, too, with a matrix of ones: a reduction's order would depend on the launch.
Source: the online softmax is Milakov and Gimelshein, arXiv:1805.02867.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.attention.metadata import AttentionMetadata, first_seen, oldest_seen
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, power_of_two, tl

UNIT = 128
"""Keys of the first segments. Part of the arithmetic."""
QUEUES = 512
"""Of a plan: K/V heads times blocks of queries whose items programs take as they come to them."""


def block_of(dim: int, element_bytes: int) -> int:
    """Keys of a block of heads `dim` wide. Part of the arithmetic: what fits in shared memory and registers."""
    if element_bytes > 2:
        return 16
    return 64 if dim <= 128 else 32


def segments_before(end: int, unit: int) -> int:
    """How many segments hold the positions 0 .. end - 1."""
    if end <= 0:
        return 0
    units = (end - 1) // unit
    return (
        1
        + min(units, 16)
        + min(max(units - 16, 0), 48) // 2
        + min(max(units - 64, 0), 192) // 4
        + max(units - 256, 0) // 8
    )


# ----------------------------------------------------------------------------------------------------- the arithmetic


@jit
def segment_of(position: Arg, unit: constexpr) -> Arg:
    """The segment of a position: 16 of one unit, 24 of two, 48 of four, and then of eight."""
    units = position // unit
    of_two, of_four = tl.minimum(tl.maximum(units - 16, 0), 48), tl.minimum(tl.maximum(units - 64, 0), 192)
    return tl.minimum(units, 16) + of_two // 2 + of_four // 4 + tl.maximum(units - 256, 0) // 8


@jit
def segment_start(segment: Arg, unit: constexpr) -> Arg:
    """The first position of a segment."""
    later = tl.maximum(segment - 16, 0) + 2 * tl.maximum(segment - 40, 0) + 4 * tl.maximum(segment - 88, 0)
    return unit * (segment + later)


@jit
def fold(q: Arg, k: Arg, v: Arg, visible: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg, masked: constexpr) -> Arg:
    """Fold one block of keys into the running sums.

    q: [m, d]. k, v: [n, d]. visible: [m, n] or [1, n] bool, not read where not `masked`. acc: [m, d], peak: [m] in base
    2, and mass: [m, 16], of equal columns, float32. scale: above 0, with log2 e.
    """
    raw = tl.dot(q, tl.trans(k), input_precision="ieee")
    if masked:
        raw = tl.where(visible, raw, float("-inf"))
    weights, acc, peak, mass = weigh(raw, acc, peak, mass, scale, v.dtype)
    return tl.dot(weights, v, acc, input_precision="ieee"), peak, mass


@jit
def weigh(raw: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg, dtype: constexpr) -> Arg:
    """All of `fold` but the sum of the values: the weights [m, n] of raw scores, -inf where hidden; acc is shrunk."""
    new_peak = tl.maximum(peak, tl.max(raw, 1) * scale)  # never below its start of -1e30: no -inf - -inf
    weights = tl.exp2(tl.fma(raw, scale, -new_peak[:, None])).to(dtype)
    shrink = tl.exp2(peak - new_peak)[:, None]
    ones = tl.full([raw.shape[1], 16], 1.0, dtype)
    mass = tl.dot(weights, ones, mass * shrink, input_precision="ieee")
    return weights, acc * shrink, new_peak, mass


@jit
def empty_softmax(block_m: constexpr, block_d: constexpr) -> Arg:
    """Running sums before the first block: acc, peak, mass as `fold` has them."""
    acc = tl.zeros([block_m, block_d], tl.float32)
    return acc, tl.full([block_m], -1e30, tl.float32), tl.zeros([block_m, 16], tl.float32)


@jit
def join(acc: Arg, peak: Arg, mass: Arg, part: Arg, part_peak: Arg, part_mass: Arg) -> Arg:
    """Join a segment to those before it. acc, part: [m, d]. peak, mass, part_peak, part_mass: [m]."""
    new_peak = tl.maximum(peak, part_peak)
    shrink, share = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
    acc = tl.fma(part, share[:, None], acc * shrink[:, None])
    return acc, new_peak, tl.fma(part_mass, share, mass * shrink)


@jit
def online_softmax_step(
    block: Arg, acc: Arg, peak: Arg, mass: Arg, each: Arg, each_peak: Arg, each_mass: Arg, segment: Arg, next_one: Arg,
    unit: constexpr, block_n: constexpr,
) -> Arg:  # fmt: skip
    """Before a block is folded: where a segment begins with it, the one before is joined, and sums begin from nothing.

    next_one: the block with which the segment after `segment` begins. each, each_peak, each_mass: of `segment`.
    """
    if block == next_one:
        acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))
        each, each_peak, each_mass = empty_softmax(acc.shape[0], acc.shape[1])
        segment += 1
        next_one = segment_start(segment + 1, unit) // block_n
    return acc, peak, mass, each, each_peak, each_mass, segment, next_one


@jit
def result_of(acc: Arg, peak: Arg, mass: Arg, sink: Arg, has_sinks: constexpr) -> Arg:
    """Values' sum over weights' sum, a sink's among these; 0 where nothing was seen. sink: [m], in natural units."""
    if has_sinks:
        sink = sink * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None]
        mass = tl.fma(mass, shrink, tl.exp2(sink - new_peak))
    result = acc / tl.where(mass != 0, mass, 1.0)[:, None]
    return tl.where(result == 0, 0.0, result)  # of zeros, what is hidden may change the sign


# ----------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """What the layers of a decode phase share: the list of work, and where each query's keys stand.

    The list has an item of each row, a run of its first segments, joined; then the rows' other segments, one each
    (`run_of`). A program takes the item of its own number, and as it ends one that nobody has taken.

    first: [rows] int32, the first segment that a query of the row sees.
    offsets: [rows + 1] int32; items offsets[i] .. offsets[i + 1] - 1 are the row's segments behind its run.
    items: [most] int32, the row of each item.
    queues: [QUEUES] int32, how many items were taken past those of programs' own numbers; 0 between launches, so two
        streams may not use one plan at once.
    path: [rows, n, t] int32, the tail's column that holds position kv_len + i of a query's path; -1 if there is none.
    unit: keys of the first segments. block: keys of a block.
    """

    metadata: AttentionMetadata
    first: Tensor
    offsets: Tensor
    items: Tensor
    queues: Tensor
    path: Tensor
    unit: int
    block: int

    @property
    def alone(self) -> bool:
        """Whether a row has one query and its own key alone: plain decoding."""
        return self.path.shape[1:] == (1, 1)


@jit
def run_of(length: Arg, alone: constexpr, first: Arg, others: Arg, unit: constexpr) -> Arg:
    """Segments of a row's first item, of so many keys. others: items of the row behind it."""
    seen = length + alone
    segments = tl.where(seen > 0, segment_of(tl.maximum(seen - 1, 0), unit) + 1 - first, 0)
    return segments - others


@jit
def take(queue: Arg, place: Arg, total: Arg, programs: Arg, queued: constexpr, threads: constexpr) -> Arg:
    """The item that a program takes after that at `place`, whose parts are stored before `taken` reads the answer.

    queue: pointer at a count. programs: that share the queue. Returns [threads] int32, of which the first counts.
    """
    thread = tl.arange(0, threads)
    asks = thread < tl.where(programs < total, 1, 0)
    if queued:
        other = programs + tl.atomic_add(queue + thread, 1, mask=asks, sem="relaxed")
    else:
        other = place + programs + thread
    return tl.where(asks, other, 0)


@jit
def taken(asked: Arg, total: Arg, programs: Arg) -> Arg:
    """What `take` asked for; `total` if there was nothing to ask for."""
    return tl.where(programs < total, tl.sum(asked, 0), total)


def plan_reference(metadata: AttentionMetadata, shares: int, block: int, unit: int = UNIT) -> SegmentPlan:
    """The plan by plain operations on the host; entries of `items` past the last are 0.

    A row's run has as many keys as a share of all rows' has and a sixteenth more, so that rows of a like length are an
    item each, of those that end before the blocks that the row's end and its paths lie in. shares: programs among which
    items are divided.
    """
    assert metadata.mask is not None
    assert metadata.tail_positions is not None
    rows, n, t = metadata.mask.shape
    alone = int(n == t == 1)
    first, others, begins = [], [], [0] * rows
    if metadata.window is not None:
        begins = [max(each, 0) for each in first_seen(metadata.kv_len, metadata.window, metadata.chunked).tolist()]
    lengths = metadata.kv_len.tolist()
    units = [max(-(-(length + alone - begin) // unit), 0) for length, begin in zip(lengths, begins, strict=True)]
    share = -(-sum(units) // shares)
    share += share // 16
    for row, length in enumerate(lengths):
        first.append(segments_before(begins[row] + 1, unit) - 1)
        count = max(segments_before(length + alone, unit) - first[row], 0)
        ended = segments_before(length // block * block + 1, unit) - 1 - first[row]
        run = closed = count if alone else min(ended, count)
        if units[row] > share:
            run = min(segments_before(begins[row] + share * unit + 1, unit) - 1 - first[row], closed)
        others.append(max(count - max(run, 1), 0))
    offsets = [rows + sum(others[:row]) for row in range(rows + 1)]
    items = [*range(rows), *(row for row in range(rows) for _ in range(others[row]))]
    depth = metadata.tail_positions - metadata.kv_len[:, None]
    at = torch.arange(t, device=depth.device)
    stands = metadata.mask[:, :, None] & (depth[:, None, None] == at[:, None])  # [rows, n, position, column]
    path = torch.where(stands, at, -1).amax(dim=3)
    items += [0] * (rows * max(segments_before(metadata.max_kv_len + alone, unit), 1) - len(items))
    device = depth.device
    firsts, ends, of_items = (torch.tensor(each, dtype=torch.int32, device=device) for each in (first, offsets, items))
    queues = torch.zeros(QUEUES, dtype=torch.int32, device=device)
    return SegmentPlan(metadata, firsts, ends, of_items, queues, path.to(torch.int32), unit, block)


@jit_for_any("rows", "n", "shares")
def _plan_kernel(
    first: Arg, offsets: Arg, items: Arg, queues: Arg, path: Arg, kv_len: Arg, tail_positions: Arg, mask: Arg,
    rows: Arg, n: Arg, t: Arg, shares: Arg, position_row: Arg, position_column: Arg, mask_row: Arg, mask_query: Arg,
    mask_column: Arg,
    unit: constexpr, block: constexpr, window: constexpr, chunked: constexpr, alone: constexpr, block_rows: constexpr,
    block_t: constexpr, num_queues: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The path of one query, and of a row's first one the row's share of the list. Grid (n, rows)."""
    pdl_wait(overlap, early=True)
    query, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_len + row).to(tl.int32)
    at = tl.arange(0, block_t)
    wide = tl.program_id(1).to(tl.int64)
    column_position = tl.load(tail_positions + wide * position_row + at * position_column, mask=at < t, other=-1).to(
        tl.int32
    )
    shown = tl.load(mask + wide * mask_row + query * mask_query + at * mask_column, mask=at < t, other=0) != 0
    stands = shown[None, :] & ((column_position - length)[None, :] == at[:, None])
    column = tl.max(tl.where(stands, at[None, :], -1), 1)
    tl.store(path + (wide * n + query) * t + at, column, mask=at < t)

    if query == 0:
        each = tl.arange(0, block_rows)
        lengths = tl.load(kv_len + each, mask=each < rows, other=0).to(tl.int32)
        oldest = tl.zeros([block_rows], tl.int32)
        if window > 0:
            oldest = oldest_seen(lengths, window, chunked)
        begins = segment_of(oldest, unit)
        seen = lengths + alone
        counts = tl.where(seen > 0, segment_of(tl.maximum(seen - 1, 0), unit) + 1 - begins, 0)
        counts = tl.where(each < rows, tl.maximum(counts, 0), 0)
        closed = counts
        if not alone:
            closed = tl.minimum(segment_of(lengths // block * block, unit) - begins, counts)
        units = tl.where(each < rows, tl.cdiv(tl.maximum(seen - oldest, 0), unit), 0)
        share = tl.cdiv(tl.sum(units, 0), shares)
        share += share // 16
        run = tl.where(units > share, segment_of(oldest + share * unit, unit) - begins, closed)
        run = tl.maximum(tl.minimum(run, closed), 1)
        others = tl.maximum(counts - run, 0)
        offset = rows + tl.sum(tl.where(each < row, others, 0), 0)
        count = tl.sum(tl.where(each == row, others, 0), 0)
        tl.store(first + row, tl.sum(tl.where(each == row, begins, 0), 0))
        tl.store(offsets + row, offset)
        tl.store(offsets + rows, offset + count, mask=row == rows - 1)
        tl.store(items + row, row)
        for start in range(0, count, block_rows):
            tl.store(items + offset + start + each, row, mask=start + each < count)
        if row == 0:
            tl.store(queues + tl.arange(0, num_queues), 0)


def plan_segments(
    metadata: AttentionMetadata, shares: int, block: int, gpu: GpuTraits, unit: int = UNIT
) -> SegmentPlan:
    """`plan_reference` in one launch, which reads lengths on the device only; what it leaves of `items` is any."""
    mask, tail_positions = metadata.mask, metadata.tail_positions
    assert mask is not None
    assert tail_positions is not None
    rows, n, t = mask.shape
    alone = n == t == 1
    most = rows * max(segments_before(metadata.max_kv_len + alone, unit), 1)
    sizes = [rows, rows + 1, most, QUEUES, rows * n * t]
    first, offsets, items, queues, path = torch.empty(sum(sizes), dtype=torch.int32, device=mask.device).split(sizes)
    assert metadata.kv_len.stride(0) == 1
    _plan_kernel[(n, rows)](
        first, offsets, items, queues, path, metadata.kv_len, tail_positions, mask, rows, n, t, shares,
        *tail_positions.stride(), *mask.stride(), unit=unit, block=block, window=metadata.window or 0,
        chunked=metadata.chunked, alone=int(alone), block_rows=max(128, power_of_two(rows)),
        block_t=max(2, power_of_two(t)), num_queues=QUEUES, overlap=gpu.can_overlap, num_warps=4,
        **launch_options(gpu),
    )  # fmt: skip
    return SegmentPlan(metadata, first, offsets, items, queues, path.view(rows, n, t), unit, block)
