"""Attention over paged planes that are key and value, and a dense tail, in one pass: compressed attention's kernel.

All heads see the same plane, [latent, rotated key], of which the latent is the value: one program takes queries of many
heads and loads every plane once for both. The latent and the rotated part are blocks of their own, for their widths,
512 and 64, add up to no power of two. Split keys, merge and what may be seen are those of
`kernels.attention.attention`.
Source: absorbed attention, DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
"""

import math

from torch import Tensor

from treetop.kernels.attention.attention import (
    Results,
    beside_codes,
    fold_scores,
    page_of,
    paged_attention_reference,
    tail_arguments,
    widened,
    within_page,
)
from treetop.kernels.attention.attention_config import CallShape, Launch, choose_launch, for_coded_planes
from treetop.kernels.attention.metadata import AttentionMetadata, oldest_seen
from treetop.kernels.attention.stream_k import StreamK, row_shares, seat_of, share_of, stream_k_fixup, stream_k_share
from treetop.kernels.dependent_launch import pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, power_of_two, tl


def latent_attention_reference(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention over the committed pages and the tail, if there is one, as `paged_attention_reference`.

    q: [rows, n, heads, dim]. pages: [slots, 1, 1, dim], one layer's, which may be part of wider planes. tail: [rows, t,
    1, 1, dim]. rank: a plane's first numbers, which are its value. scales: [1, 1] float32, of pages and a tail in FP8.
    Returns [rows, n, heads, rank]; a query that sees nothing gets 0.
    """
    return paged_attention_reference(q, pages, metadata, tail, scale, scales=scales)[0][..., :rank]


@jit
def load_plane(
    base: Arg, at: Arg, stored: Arg, lane_c: Arg, lane_r: Arg, rank: constexpr, rope_dim: constexpr, dtype: constexpr,
    hopper: constexpr,
) -> Arg:  # fmt: skip
    """The latents and rotated keys of planes at element offsets `at` [n] int64, in `dtype`; 0 where not `stored`."""
    return plane_at(base + at, stored, lane_c, lane_r, rank, rope_dim, dtype, hopper)


@jit
def plane_at(
    at: Arg, stored: Arg, lane_c: Arg, lane_r: Arg, rank: constexpr, rope_dim: constexpr, dtype: constexpr,
    hopper: constexpr,
) -> Arg:  # fmt: skip
    """The same of planes at pointers `at` [n]."""
    mask_c, mask_r = stored[:, None] & (lane_c < rank)[None, :], stored[:, None] & (lane_r < rope_dim)[None, :]
    k = tl.load(at[:, None] + lane_c[None, :], mask=mask_c, other=0.0)
    r = tl.load(at[:, None] + rank + lane_r[None, :], mask=mask_r, other=0.0)
    return widened(k, mask_c, dtype, hopper), widened(r, mask_r, dtype, hopper)


@jit
def chosen_slots(
    table: Arg, chosen: Arg, block: Arg, end: Arg, length: Arg, block_n: constexpr, page_size: constexpr
) -> Arg:  # fmt: skip
    """Slots of a block's chosen keys [block_n] int64; the null page's from `end` on. chosen: their positions.

    length: of the row's prefix. A position beyond it, which a probe reports, reads the null page and nothing else.
    """
    entry = block * block_n + tl.arange(0, block_n)
    position = tl.load(chosen + entry, mask=entry < end, other=0)
    there = (entry < end) & (position >= 0) & (position < length)
    position = tl.where(there, position, 0)
    page = tl.load(table + position // page_size, mask=there, other=0)
    return page.to(tl.int64) * page_size + position % page_size


@jit
def pages_of_block(
    table: Arg, block: Arg, start: Arg, end: Arg, block_n: constexpr, page_size: constexpr
) -> Arg:  # fmt: skip
    """The pages of a block's keys, each looked up once, int32: [block_n / page_size], or one that holds the block.

    Those without keys from `start` to `end` are the null page, for which the table is not read. One of two numbers that
    are no multiples of each other: a page a key, [block_n].
    """
    if block_n % page_size == 0 or page_size % block_n == 0:
        run: constexpr = min(block_n, page_size)
        first = block * block_n + tl.arange(0, block_n // run) * run
        page = tl.load(table + first // page_size, mask=(first + run > start) & (first < end), other=0)
    else:
        page = page_of(table, block, start, end, block_n, page_size)
    return page


@jit
def planes_of_pages(
    page: Arg, block: Arg, slot_stride: Arg, block_n: constexpr, page_size: constexpr, aligned: constexpr
) -> Arg:  # fmt: skip
    """Element offsets of a block's planes [block_n] int64. page: of `pages_of_block`.

    aligned: slot_stride is a multiple of 16, which Triton does not see behind the reshape.
    """
    if block_n % page_size == 0 or page_size % block_n == 0:
        run: constexpr = min(block_n, page_size)
        first = page.to(tl.int64) * page_size + (block * block_n + tl.arange(0, block_n // run) * run) % page_size
        at = (first * slot_stride)[:, None] + (tl.arange(0, run) * slot_stride)[None, :]
        at = tl.reshape(at, [block_n])
    else:
        key = block * block_n + tl.arange(0, block_n)
        at = (page.to(tl.int64) * page_size + within_page(key, page_size)) * slot_stride
    if aligned:
        at = tl.multiple_of(at, 16)
    return at


@jit
def fold_planes(
    q: Arg, q_rope: Arg, k: Arg, k_rope: Arg, visible: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg,
    masked: constexpr,
) -> Arg:  # fmt: skip
    """Fold one block of planes into the running softmax, as `kernels.attention.attention.fold`. acc: [m, rank]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale
    return fold_scores(scores, k, visible, acc, peak, mass, masked)


@jit_for_any("n", "position_row", "splits", "helpers", "chosen_row", "chosen_query")
def _latent_attention_kernel(
    out: Arg, lse: Arg, sums: Arg, arrivals: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    positions: Arg, tail: Arg, tail_positions: Arg, mask: Arg, chosen: Arg, chosen_count: Arg, kv_scales: Arg,
    scale: Arg, n: Arg, t: Arg, split_stride: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg,
    table_row: Arg, position_row: Arg, position_query: Arg, splits: Arg, helpers: Arg, chosen_row: Arg,
    chosen_query: Arg, count_row: Arg, tail_row: Arg, tail_column: Arg, tail_position_row: Arg,
    tail_position_column: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg,
    heads: constexpr, rank: constexpr, rope_dim: constexpr, page_size: constexpr, window: constexpr, chunked: constexpr,
    causal: constexpr, sparse: constexpr, has_tail: constexpr, scaled: constexpr, helped: constexpr,
    block_m: constexpr, block_n: constexpr, block_t: constexpr, block_c: constexpr, block_r: constexpr,
    block_rows: constexpr, aligned: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of queries of one row, over one split of its keys.

    out: [splits, rows, n, heads, rank]; lse: [splits, rows, n, heads] float32, natural; both contiguous. The rest as in
    `latent_attention`; *_row, *_query, ... are strides in elements; window 0 is none. Grid (blocks of queries * splits,
    rows + helpers), or if it is sparse, (rows * n * blocks of a query's heads * splits,). All slot arithmetic is int64.

    helped: by `kernels.attention.stream_k`, of which sums, arrivals and helpers are; not if it is sparse.

    sparse: a query sees the prefix's positions that were chosen for it. As long as these are all, its keys are the same
    in the same blocks, splits and order as those of a row of one query.
    """
    pdl_wait(overlap, early=True)
    split = tl.program_id(0) % splits
    if sparse:
        tiles: constexpr = (heads + block_m - 1) // block_m
        item = tl.program_id(0) // splits // tiles
        row, of = (item // n).to(tl.int64), item % n
        head = tl.program_id(0) // splits % tiles * block_m + tl.arange(0, block_m)
        query = tl.zeros([block_m], tl.int32) + of
        real = head < heads
        chosen += row * chosen_row + of * chosen_query
        length = tl.load(kv_len + row).to(tl.int32)
        end = tl.minimum(tl.load(chosen_count + row * count_row + of), tl.minimum(length, chosen_query))
    else:
        row = tl.program_id(1)
        if helped:
            count = tl.num_programs(1) - helpers
            shares = row_shares(kv_len, count, splits, window, chunked, block_n, block_rows)
            row, member, members, first_helper = seat_of(shares, row, count, helpers, block_rows)
            if row < 0:
                return
        row = row.to(tl.int64)
        tile = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits  # causal: the longest blocks start first
        lane = tile * block_m + tl.arange(0, block_m)
        query = lane // heads
        head = lane % heads
        real = query < n
        end = tl.load(kv_len + row).to(tl.int32)
        if helped:
            own_share = share_of(end, splits, window, chunked, block_n)
    there_is = real
    table = page_table + tl.load(rows + row) * table_row

    lane_c = tl.arange(0, block_c)
    lane_r = tl.arange(0, block_r)
    q_at = q + (row * q_row + query * q_query + head * q_head)[:, None]
    queries = tl.load(q_at + lane_c[None, :], mask=real[:, None] & (lane_c < rank)[None, :], other=0.0)
    q_rope = tl.load(q_at + rank + lane_r[None, :], mask=real[:, None] & (lane_r < rope_dim)[None, :], other=0.0)
    if scaled:
        queries, q_rope = beside_codes(queries), beside_codes(q_rope)

    start = 0
    position = tl.zeros([block_m], tl.int32)
    if causal or window > 0:
        position_at = positions + row * position_row
        position = tl.load(position_at + query * position_query, mask=real, other=0).to(tl.int32)
    if causal:
        first = tl.load(positions + row * position_row).to(tl.int32)
        real = real & ((query == 0) | (position > first))
        end = tl.minimum(end, tl.max(tl.where(real, position, -1), 0) + 1)
    oldest = position
    if window > 0:
        oldest = oldest_seen(position, window, chunked)
        start = tl.minimum(tl.min(tl.where(real, oldest, 2147483647), 0), end)

    first_block = start // block_n
    last_block = tl.cdiv(end, block_n)
    share = tl.maximum(tl.cdiv(last_block - first_block, splits), 1)
    begin = first_block + split * share
    stop = tl.minimum(begin + share, last_block)
    if helped:
        whole = tl.maximum(stop - begin, 0)
        begin += member * tl.cdiv(whole, members)

    acc = tl.zeros([block_m, block_c], tl.float32)
    peak = tl.full([block_m], -1e30, tl.float32)
    mass = tl.zeros([block_m], tl.float32)

    if scaled:  # what all planes share goes to the scores and to the result
        scale *= tl.load(kv_scales)
    if sparse:
        place = chosen_slots(table, chosen, begin, end, length, block_n, page_size)
    else:
        place = pages_of_block(table, begin, start, end, block_n, page_size)
    folds_tail = split == 0
    if helped:
        folds_tail = folds_tail & (member == 0)
    # One turn, of which Triton does not know that it is one: what a loop carries goes to products by shared memory, and
    # queries that were converted would go in 128 registers. The loops inside compute what does not change by
    # themselves: ahead of them, addresses of products take registers from the sums. But 64 keys that are looked up for
    # 64 heads each take longer so.
    ahead: constexpr = sparse and block_m >= 64 and block_n >= 64
    turns = 1 if ahead else tl.minimum(splits, 1)
    for _ in tl.range(0, turns, num_stages=1):
        if has_tail:
            for column_start in tl.range(0, tl.where(folds_tail, t, 0), block_t, num_stages=1, disable_licm=not ahead):
                column = column_start + tl.arange(0, block_t)
                there = column < t
                at = row * tail_row + column.to(tl.int64) * tail_column
                k, k_rope = load_plane(tail, at, there, lane_c, lane_r, rank, rope_dim, queries.dtype, overlap)
                shown = mask + row * mask_row + query[:, None] * mask_query + column[None, :] * mask_column
                visible = tl.load(shown, mask=real[:, None] & there[None, :], other=0) != 0
                if window > 0:
                    at_position = tail_positions + row * tail_position_row + column * tail_position_column
                    tail_position = tl.load(at_position, mask=there, other=0).to(tl.int32)
                    visible = visible & (tail_position[None, :] >= oldest[:, None])
                acc, peak, mass = fold_planes(
                    queries, q_rope, k, k_rope, visible, acc, peak, mass, scale, True
                )  # fmt: skip

        if helped:
            members, first_helper = stream_k_share(
                shares, own_share, tl.program_id(1), member, members, first_helper, count, helpers, block_rows
            )
            stop = tl.minimum(begin + tl.cdiv(whole, members), stop)

        for block in tl.range(begin, stop, disable_licm=not ahead):
            key = block * block_n + tl.arange(0, block_n)
            stored = (key >= start) & (key < end)
            # The latency of the next block's places hides behind this block's work.
            if sparse:
                at = place * slot_stride
                k, k_rope = load_plane(pages, at, stored, lane_c, lane_r, rank, rope_dim, queries.dtype, overlap)
                place = chosen_slots(table, chosen, block + 1, end, length, block_n, page_size)
            else:
                at = planes_of_pages(place, block, slot_stride, block_n, page_size, aligned)
                k, k_rope = load_plane(pages, at, stored, lane_c, lane_r, rank, rope_dim, queries.dtype, overlap)
                place = pages_of_block(table, block + 1, start, end, block_n, page_size)
            visible = stored[None, :]
            if causal:
                visible = visible & (key[None, :] <= position[:, None])
            if window > 0:
                visible = visible & (key[None, :] >= oldest[:, None])
            acc, peak, mass = fold_planes(queries, q_rope, k, k_rope, visible, acc, peak, mass, scale, True)
        queries, q_rope = tl.zeros_like(queries), tl.zeros_like(q_rope)  # else they would not be carried

    if helped:
        acc, peak, mass, last = stream_k_fixup(
            sums, arrivals, member, members, first_helper, helpers, tl.program_id(0), tl.num_programs(0), acc, peak,
            mass, block_m, block_c,
        )  # fmt: skip
        there_is = query < tl.where(last, n, 0)
    seen = real & (mass != 0)  # also of NaN, which must show
    result = tl.where(seen[:, None], acc / tl.where(seen, mass, 1.0)[:, None], 0.0)
    if scaled:
        result *= tl.load(kv_scales)
    log_mass = tl.where(seen, (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453, float("-inf"))
    out_at = (row * n + query) * heads + head
    tl.store(lse + split * split_stride + out_at, log_mass, mask=there_is)
    out_at = (split * split_stride + out_at)[:, None] * rank + lane_c[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=there_is[:, None] & (lane_c < rank)[None, :])


def latent_attention(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    rank: int,
    scale: float,
    gpu: GpuTraits,
    launch: Launch | None = None,
    arrivals: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """`latent_attention_reference`. launch: how the call is cut, or else `choose_launch` says.

    arrivals: of `make_arrivals`; long rows of a decode phase then have helpers. Where keys were chosen, each query is a
    row of its own, which gathers what was chosen for it, and none is helped. Reads lengths on the device only, and
    allocates only tensors whose shapes the arguments' shapes give.
    """
    rows, n, heads, dim = q.shape
    table, positions = metadata.table.data, metadata.positions
    chosen = metadata.chosen
    call = CallShape(rows, n, 1, heads, dim, q.element_size(), metadata.max_kv_len, metadata.causal)
    listed: tuple[Tensor, ...] = (metadata.rows, metadata.rows)
    listed_strides: tuple[int, ...] = (0, 0, 0)
    if chosen is not None:
        most = min(metadata.max_kv_len, chosen.positions.shape[2])
        call = CallShape(rows * n, 1, 1, heads, dim, q.element_size(), most)
        listed = (chosen.positions, chosen.count)
        listed_strides = (*chosen.positions.stride()[:2], chosen.count.stride(0))
        assert (chosen.positions.stride(2), chosen.count.stride(1)) == (1, 1)
    if launch is None:
        launch = choose_launch(call, gpu)
        launch = launch if scales is None else for_coded_planes(launch, gpu)
    results = Results.of(q, rank, launch.splits)
    data, tail_positions, mask, width = tail_arguments(q, metadata, tail)
    tail_strides: tuple[int, ...] = (0,) * 7
    if tail is not None:
        tail_strides = (*data.stride()[:2], *tail_positions.stride(), *mask.stride())
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.shape[1:] == (1, 1, dim)
    assert (pages.stride(3), data.stride(-1)) == (1, 1)
    overlap = {"launch_pdl": True} if launch.overlap else {}
    blocks = -(-call.n * heads // launch.block_m) * launch.splits
    block_c = max(16, power_of_two(rank))
    alone = metadata.causal or chosen is not None
    stream_k = StreamK.of(rows, blocks, launch.block_m * (block_c + 2), None if alone else arrivals, results.lse)
    _latent_attention_kernel[(blocks, rows + stream_k.helpers) if chosen is None else (call.rows * blocks,)](
        results.part, results.part_lse, stream_k.sums, stream_k.arrivals, q, pages, table, metadata.rows,
        metadata.kv_len,
        positions, data, tail_positions, mask, *listed, results.lse if scales is None else scales,
        scale * math.log2(math.e), n, width, rows * n * heads, *q.stride()[:3], pages.stride(0), table.stride(0),
        *positions.stride(), launch.splits, stream_k.helpers, *listed_strides, *tail_strides,
        heads=heads, rank=rank, rope_dim=dim - rank, page_size=metadata.page_size, window=metadata.window or 0,
        chunked=metadata.chunked, causal=metadata.causal and chosen is None, sparse=chosen is not None,
        has_tail=tail is not None, scaled=scales is not None, helped=stream_k.helpers > 0, block_m=launch.block_m,
        block_n=launch.block_n, block_t=min(launch.block_n, max(16, power_of_two(width))), block_c=block_c,
        block_r=max(16, power_of_two(dim - rank)), block_rows=stream_k.block_rows, aligned=pages.stride(0) % 16 == 0,
        overlap=launch.overlap, num_warps=launch.num_warps, num_stages=launch.num_stages, **overlap,
    )  # fmt: skip
    results.merge(launch, None, power_of_two(rank), max_warps=16)
    return results.out
