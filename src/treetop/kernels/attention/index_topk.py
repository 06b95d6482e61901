"""The keys that sparse attention shows: the best of each query's scores, whole and in order, without a sort.

A program holds a chunk of a query's scores, as integers that order like them. It narrows an interval down, by counting
how many lie above its middle, until exactly `top_k` do; if there are equal ones at the end, the earlier count. What is
chosen keeps its order: where it goes is a sum over what lies before it.

    scores of a query    | chunk 0 | chunk 1 | chunk 2 | ... |        the best of each, in order
    lists                | list 0 | list 1 | ... |                    the best of several lists, until there is one
    the last launch      | list 0 | list 1 | ... | tail |             positions of the prefix, a mask of the tail

All shapes come of the bound; how many keys there are is read on the device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from treetop.kernels.attention.index_scores import scores_of
from treetop.kernels.attention.indexer import IndexQuery, best_keys
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sort_key import ordered_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, lanes, tl

_CHUNK, _SMALL_CHUNK = 16384, 4096
"""Scores of a program: what fits in registers; and where there are no more at all."""
_SCORES = 2**26
"""Scores that are kept at a time, so that a prefill's need little memory: 256 MiB."""


def choose_by_scores_reference(scores: Tensor, metadata: AttentionMetadata, top_k: int) -> SparseKeys:
    """The `top_k` best of the keys that each query may see; of equal ones the earlier, the prefix before the tail.

    scores: [rows, n, max_kv_len + t], what `paged_index_scores` gives.
    """
    bound = metadata.max_kv_len
    visible = torch.arange(bound, device=scores.device) < metadata.extents[:, :, None]
    if metadata.mask is not None:
        visible = torch.cat([visible, metadata.mask], dim=2)
    best = best_keys(scores, visible, top_k)
    prefix, columns = best[..., :bound], None if metadata.mask is None else best[..., bound:]
    count = prefix.sum(dim=2, dtype=torch.int32)
    places = torch.where(prefix, torch.arange(bound, device=scores.device), bound).sort(dim=2).values[..., :top_k]
    positions = torch.zeros((*count.shape, top_k), dtype=torch.int32, device=scores.device)
    positions[..., : places.shape[2]] = places
    there = torch.arange(top_k, device=scores.device) < count[..., None]
    return SparseKeys(torch.where(there, positions, 0), count, columns)


@jit
def _counted(keys: Arg, bar: Arg) -> Arg:
    return tl.sum((keys >= bar).to(tl.int32), 0)


@jit_for_any("n", "t", "bound", "lists", "score_line")
def _select_kernel(
    positions: Arg, kept: Arg, count: Arg, columns: Arg, scores: Arg, from_positions: Arg, from_kept: Arg,
    from_count: Arg, extents: Arg, mask: Arg, n: Arg, t: Arg, bound: Arg, lists: Arg, score_line: Arg, extent_row: Arg,
    extent_query: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg, position_row: Arg, position_query: Arg,
    count_row: Arg, column_row: Arg,
    top_k: constexpr, block_k: constexpr, block: constexpr, block_t: constexpr, first: constexpr, last: constexpr,
    has_tail: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The best of one chunk of a query's scores (first), or of several lists; the last one makes the tail's mask too.

    positions: [rows, n, top_k] int32, count: [rows, n] int32 and columns: [rows, n, t] int8, if it is the last; else
    lists with their keys `kept`: [rows * n, chunks, block_k] int32, and their counts [rows * n, chunks]. from_*: such
    lists. scores: [rows * n, score_line], of which the tail's begin at `bound`. extents: [rows, n] int64. mask: [rows,
    n, t] bool. The rest are strides in elements. Grid (rows * n, chunks).
    """
    pdl_wait(overlap)
    item = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    row, query = item // n, item % n
    lane = tl.arange(0, block)
    if first:
        index = part * block + lane
        there = index < tl.load(extents + row * extent_row + query * extent_query).to(tl.int32)
        value = tl.load(scores + item * score_line + index, mask=there, other=0.0)
        key = tl.where(there, tl.maximum(ordered_of(value), -2139095040), -2147483648)
    else:
        entry = part * block + lane
        of_list = entry // block_k
        known = tl.load(from_count + item * lists + of_list, mask=of_list < lists, other=0)
        there = entry % block_k < known
        at = item * lists * block_k + entry
        index = tl.load(from_positions + at, mask=there, other=0)
        key = tl.load(from_kept + at, mask=there, other=-2147483648)

    tail_column = tl.arange(0, block_t)
    tail_key = tl.full([block_t], -2147483648, tl.int32)
    if has_tail:
        shown = mask + row * mask_row + query * mask_query + tail_column * mask_column
        seen = tl.load(shown, mask=tail_column < t, other=0) != 0
        value = tl.load(scores + item * score_line + bound + tail_column, mask=seen, other=0.0)
        tail_key = tl.where(seen, tl.maximum(ordered_of(value), -2139095040), -2147483648)

    # Invariant: `above` keys are at or above `low`, and fewer than top_k at or above `high`.
    low = tl.min(tl.where(there, key, 2147483647), 0)
    high = tl.max(key, 0)
    if has_tail:
        low = tl.minimum(low, tl.min(tl.where(tail_key > -2147483648, tail_key, 2147483647), 0))
        high = tl.maximum(high, tl.max(tail_key, 0))
    low = tl.maximum(low, -2147483647)
    high += 1
    above = _counted(key, low) + _counted(tail_key, low)
    while (above > top_k) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        found = _counted(key, middle) + _counted(tail_key, middle)
        enough = found >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        above = tl.where(enough, found, above)

    better = key > low
    equal = key == low
    room = top_k - tl.sum(better.to(tl.int32), 0) - tl.sum((tail_key > low).to(tl.int32), 0)
    both = better.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = before >> 16
    chosen = better | (equal & (equal_before < room))
    place = (before & 0xFFFF) + tl.minimum(equal_before, room)
    total = tl.sum(chosen.to(tl.int32), 0)
    if last:
        tl.store(positions + row * position_row + query * position_query + place, index, mask=chosen)
        tl.store(count + row * count_row + query, total)
        if has_tail:
            tail_equal = tail_key == low
            equal_of_tail = tl.cumsum(tail_equal.to(tl.int32), 0) - tail_equal.to(tl.int32)
            left = room - tl.sum(equal.to(tl.int32), 0)
            tail_chosen = (tail_key > low) | (tail_equal & (equal_of_tail < left))
            at_column = columns + row * column_row + query * t + tail_column
            tl.store(at_column, tail_chosen.to(tl.int8), mask=tail_column < t)
    else:
        to = (item * parts + part) * block_k + place
        tl.store(positions + to, index, mask=chosen)
        tl.store(kept + to, key, mask=chosen)
        tl.store(count + item * parts + part, total)


def choose_by_scores(
    scores: Tensor, metadata: AttentionMetadata, top_k: int, gpu: GpuTraits, chunk: int | None = None
) -> SparseKeys:
    """`choose_by_scores_reference` in as many launches as it takes to make one list of all chunks.

    chunk: scores of a program, a power of two, at least twice `top_k` rounded up to one.
    """
    chosen = _unwritten(scores, metadata.mask, top_k)
    _choose(scores, metadata.max_kv_len, metadata.extents, metadata.mask, chosen, gpu, chunk)
    return chosen


def _unwritten(like: Tensor, mask: Tensor | None, top_k: int) -> SparseKeys:
    """Of queries [rows, n, ...]."""
    rows, n = like.shape[:2]
    positions = torch.empty((rows, n, top_k), dtype=torch.int32, device=like.device)
    columns = None if mask is None else torch.empty(mask.shape, dtype=torch.bool, device=like.device)
    return SparseKeys(positions, torch.empty((rows, n), dtype=torch.int32, device=like.device), columns)


def _choose(
    scores: Tensor,
    bound: int,
    extents: Tensor,
    mask: Tensor | None,
    out: SparseKeys,
    gpu: GpuTraits,
    chunk: int | None = None,
) -> None:
    """Choose for some queries, and write that into `out`, their part of it. bound: of positions."""
    rows, n, width = scores.shape
    top_k, device = out.positions.shape[2], scores.device
    block_k = lanes(top_k)
    block = chunk or max(_CHUNK if bound > _SMALL_CHUNK else _SMALL_CHUNK, 2 * block_k)
    assert block >= 2 * block_k
    assert scores.is_contiguous()
    assert (out.positions.stride(2), out.count.stride(1)) == (1, 1)
    t = 0 if mask is None else mask.shape[2]
    mask_strides = (0, 0, 0) if mask is None else mask.stride()
    columns, shown = (out.count, extents) if mask is None or out.columns is None else (out.columns, mask)
    empty = out.count, out.count, out.count
    before, lists, first = empty, 0, True
    while True:
        parts = -(-bound // block) if first else -(-lists * block_k // block)
        last = parts <= 1
        into = out.positions, out.count, out.count
        if not last:
            made = torch.empty((2, rows * n, parts, block_k), dtype=torch.int32, device=device)
            into = made[0], made[1], torch.empty((rows * n, parts), dtype=torch.int32, device=device)
        has_tail = last and mask is not None
        _select_kernel[(rows * n, max(parts, 1))](
            *into, columns.view(torch.int8) if has_tail else columns, scores, *before, extents, shown, n, t, bound,
            lists, width, *extents.stride(), *mask_strides, *out.positions.stride()[:2], out.count.stride(0),
            columns.stride(0),
            top_k=top_k, block_k=block_k, block=block, block_t=lanes(t), first=first, last=last, has_tail=has_tail,
            overlap=gpu.can_overlap, num_warps=16 if block > _SMALL_CHUNK else 8, **launch_options(gpu),
        )  # fmt: skip
        if last:
            return
        before, lists, first = into, parts, False


def choose_paged_keys(
    query: IndexQuery,
    keys: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    gpu: GpuTraits,
    exact: bool = False,
) -> SparseKeys:
    """The keys that each query attends to, by its indexer, some queries at a time.

    keys: [slots, index_dim], of the pages. tail: [rows, t, index_dim]. exact: see `paged_index_scores`.
    """
    extents, mask = metadata.extents, metadata.mask
    chosen = _unwritten(query.heads, mask, query.top_k)
    rows, n = extents.shape
    width = metadata.max_kv_len + (0 if tail is None else tail.shape[1])
    for of_rows, of_queries in _parts(rows, n, max(1, _SCORES // width)):
        here = of_rows, of_queries
        asked = IndexQuery(query.heads[here], query.weights[here], query.top_k)
        those = replace(metadata, rows=metadata.rows[of_rows])
        scores = scores_of(asked, keys, those, extents[here], None if tail is None else tail[of_rows], gpu, exact)
        columns = None if chosen.columns is None else chosen.columns[here]
        out = SparseKeys(chosen.positions[here], chosen.count[here], columns)
        _choose(scores, metadata.max_kv_len, extents[here], None if mask is None else mask[here], out, gpu)
    return chosen


def _parts(rows: int, n: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Rows and queries of parts of at most so many queries: whole rows if they fit."""
    if n <= most:
        step = most // n
        yield from ((slice(i, i + step), slice(None)) for i in range(0, rows, step))
        return
    for row in range(rows):
        yield from ((slice(row, row + 1), slice(i, i + most)) for i in range(0, n, most))
