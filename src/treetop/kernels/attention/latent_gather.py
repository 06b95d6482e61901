"""Compressed attention on Hopper to keys that were chosen for each query, in Gluon: planes are gathered.

A program has up to 64 heads of one query, and a part of its chosen keys, 64 an item; in the last part also the tail.
What its two groups of warps do is said in `latent_groups`. Four more warps look up where an item's planes lie while
those of the one before are on their way, and copy them, 16 bytes a thread: a bulk copy takes a tile, not rows that lie
at 64 places. Each query has keys of its own, so queries of a row share no copy.
"""

import math

import torch
from torch import Tensor

from treetop.kernels.attention.attention import tail_arguments
from treetop.kernels.attention.latent_gluon import (
    MOST_COLUMNS,
    PAGE,
    RANK,
    ROPE_DIM,
    choose_splits,
    merge_parts,
    tail_matrix,
    wait_turn,
)
from treetop.kernels.attention.latent_groups import (
    allocate_places,
    begin_left,
    begin_queries,
    begin_right,
    first_group,
    second_group,
)
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.gluon_guard import (
    async_gather,
    block_barrier,
    fence_async_shared,
    gather_commit,
    gather_wait,
    gl,
    gluon_jit,
    gluon_jit_for_any,
    mbarrier,
    swizzled_tiles,
)
from treetop.kernels.triton_guard import Arg, GpuTraits


@gluon_jit
def _planes_of(
    pages: Arg, slot_stride: Arg, table: Arg, chosen: Arg, block: Arg, end: Arg, length: Arg, page_size: gl.constexpr,
    layout: gl.constexpr,
) -> Arg:  # fmt: skip
    """(pointers to the planes of a block of chosen keys, whether each is there), both [64].

    As `latent_attention.chosen_slots`, but a position that is none has no plane.
    """
    entry = block * 64 + gl.arange(0, 64, layout)
    position = gl.load(chosen + entry, mask=(entry >= 0) & (entry < end), other=-1)
    there = (position >= 0) & (position < length)
    position = gl.where(there, position, 0)
    page = gl.load(table + position // page_size, mask=there, other=0)
    return pages + (page.to(gl.int64) * page_size + position % page_size) * slot_stride, there


@gluon_jit
def _gather(
    pages: Arg, slot_stride: Arg, table: Arg, chosen: Arg, end: Arg, length: Arg, first: Arg, count: Arg, begin: Arg,
    keys: Arg, page_size: gl.constexpr,
) -> None:  # fmt: skip
    """Copy the items from `begin` on, each as soon as its place is free; a plane that is not there becomes 0."""
    left, right, k_rope, full_left, full_right, free_left, free_right = keys
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_key: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    at, there = _planes_of(pages, slot_stride, table, chosen, first - begin, end, length, page_size, by_key)
    for item in range(begin, count):
        place, turn = item & 1, ((item >> 1) & 1) ^ 1
        mbarrier.wait(free_left.index(place), turn)
        mbarrier.wait(free_right.index(place), turn)
        for part in gl.static_range(4):
            some = left.index(place).slice(64 * part, 64, 1)
            async_gather(some, at[:, None] + (64 * part + column), mask=there[:, None])
        for part in gl.static_range(4):
            some = right.index(place).slice(64 * part, 64, 1)
            async_gather(some, at[:, None] + (256 + 64 * part + column), mask=there[:, None])
        async_gather(k_rope.index(place), at[:, None] + (512 + column), mask=there[:, None])
        gather_commit()
        at, there = _planes_of(pages, slot_stride, table, chosen, first - item - 1, end, length, page_size, by_key)
        gather_wait(0)
        fence_async_shared()
        block_barrier()
        mbarrier.arrive(full_left.index(place), count=1)
        mbarrier.arrive(full_right.index(place), count=1)


@gluon_jit_for_any(
    "n", "t", "heads", "table_row", "tail_row", "splits", "chosen_row", "chosen_query", "count_row", "mask_row",
    "mask_query", "mask_column",
)  # fmt: skip
def _chosen_planes_kernel(
    out: Arg, part: Arg, lse: Arg, queries: Arg, query_ropes: Arg, tails: Arg, tail_ropes: Arg, pages: Arg,
    page_table: Arg, rows: Arg, kv_len: Arg, chosen: Arg, chosen_count: Arg, mask: Arg, seats: Arg, scale: Arg, n: Arg,
    t: Arg, heads: Arg, slot_stride: Arg, table_row: Arg, tail_row: Arg, chosen_row: Arg, chosen_query: Arg,
    count_row: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg, splits: Arg, page_size: gl.constexpr,
    overlap: gl.constexpr,
) -> None:  # fmt: skip
    """Up to 64 heads of one query, over one part of the keys that were chosen for it and, in the last part, the tail.

    out, part, lse, seats, tails and what else is not said as in `latent_gluon._latent_pages_kernel`, with a query for a
    row, each cut into `splits` parts. chosen, chosen_count: of `SparseKeys`. Grid (queries * tiles of heads,
    splits): tiles lie beside each other, for they read the same planes.
    """
    places = allocate_places(pages.dtype.element_ty, True)
    wait_turn(overlap)
    tiles = (heads + 63) // 64
    query, tile, at_part = gl.program_id(0) // tiles, gl.program_id(0) % tiles, gl.program_id(1)
    row, of, slot = query // n, query % n, query * splits + at_part
    if (tile == 0) & (at_part == 0):
        gl.store(seats, gl.num_programs(0) // tiles)
        gl.store(seats + 1 + query * 3, query)
        gl.store(seats + 2 + query * 3, slot)
        gl.store(seats + 3 + query * 3, splits)
    wide_row = row.to(gl.int64)
    chosen += wide_row * chosen_row + of * chosen_query
    length = gl.load(kv_len + row).to(gl.int32)
    end = gl.minimum(gl.load(chosen_count + row * count_row + of), gl.minimum(length, chosen_query))
    blocks = (end + 63) // 64
    share = (blocks + splits - 1) // splits
    begin = gl.minimum(at_part * share, blocks)
    last = gl.minimum(begin + share, blocks) - 1
    filled = gl.minimum(end - last * 64, 64)
    has_tail = gl.where((t > 0) & (at_part == splits - 1), 1, 0)
    items = last + 1 - begin + has_tail
    first = last + has_tail
    table = page_table + gl.load(rows + row).to(gl.int64) * table_row
    of_queries, keys, _ = places
    begin_queries(queries, query_ropes, query * heads + tile * 64, of_queries)
    begin_left(tails, row * tail_row, keys, 0, has_tail > 0)
    begin_right(tails, tail_ropes, row * tail_row, keys, 0, has_tail > 0)
    alone = splits == 1
    item = slot.to(gl.int64) * heads
    gl.warp_specialize(
        [
            (_gather, (pages, slot_stride, table, chosen, end, length, first, items, has_tail, keys, page_size)),
            (
                first_group,
                (out, part, lse, tails, places, table, first, items, has_tail, filled,
                 mask + wide_row * mask_row + of * mask_query, scale, alone, item, tile, 1, t, heads, mask_query,
                 mask_column, True),
            ),
            (
                second_group,
                (out, part, tails, tail_ropes, places, table, first, items, has_tail, filled, scale, alone, item, tile,
                 1, heads, True),
            ),
        ],
        [4, 4],
        [216, 216],
    )  # fmt: skip


def chosen_planes_attention(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    scale: float,
    gpu: GpuTraits,
    splits: int | None = None,
) -> Tensor:
    """`latent_attention_reference` of decode phases in which keys were chosen for each query.

    As `latent_pages_attention`, with pages of any size. splits: parts of each query's keys, or else `choose_splits`
    says.
    """
    rows, n, heads, dim = q.shape
    table, chosen = metadata.table.data, metadata.chosen
    data, _, mask, width = tail_arguments(q, metadata, tail)
    assert chosen is not None
    assert tail is not None, "a round has one"
    assert (dim, metadata.window, width <= MOST_COLUMNS) == (RANK + ROPE_DIM, None, True)
    assert not metadata.causal
    assert pages.shape[1:] == (1, 1, dim)
    assert pages.dtype == q.dtype == data.dtype
    assert (pages.stride(3), data.stride(-1), table.stride(1)) == (1, 1, 1)
    assert (metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1)
    assert (chosen.positions.stride(2), chosen.count.stride(1)) == (1, 1)
    tiles, queries = -(-heads // 64), rows * n
    tails, tail_row = tail_matrix(tail)
    if splits is None:
        most = min(metadata.max_kv_len, chosen.positions.shape[2])
        splits = choose_splits(tiles * queries, -(-most // PAGE), gpu)
    out = torch.empty((rows, n, heads, RANK), dtype=q.dtype, device=q.device)
    part_slots = queries * splits if splits > 1 else 0
    part = torch.empty((part_slots, heads, RANK), dtype=torch.float32, device=q.device)
    lse = torch.empty((part_slots, heads), dtype=torch.float32, device=q.device)
    seats = torch.empty(1 + 3 * queries, dtype=torch.int32, device=q.device)
    overlap = {"launch_pdl": True} if gpu.can_overlap else {}
    blocks = [
        swizzled_tiles(matrix, PAGE, columns)
        for matrix in (q.reshape(-1, dim), tails)
        for columns in (RANK // 2, ROPE_DIM)
    ]
    _chosen_planes_kernel[(queries * tiles, splits)](
        out, part, lse, *blocks, pages, table, metadata.rows, metadata.kv_len, chosen.positions, chosen.count, mask,
        seats, scale * math.log2(math.e), n, width, heads, pages.stride(0), table.stride(0), tail_row,
        *chosen.positions.stride()[:2], chosen.count.stride(0), *mask.stride(), splits, page_size=metadata.page_size,
        overlap=gpu.can_overlap, num_warps=4, **overlap,
    )  # fmt: skip
    if splits > 1:
        merge_parts(out, part, lse, seats, queries, splits, gpu)
    return out
