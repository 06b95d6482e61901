"""Attention of a prefill over paged K/V with the arithmetic of `segments`.

A block of queries walks all segments up to its last position. How many queries share a program changes no bit.
"""

import math
from functools import cache

import torch
from torch import Tensor

from treetop.kernels.attention.attention import load_kv, page_of, paged_attention_reference, within_page
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.metadata import AttentionMetadata, oldest_seen
from treetop.kernels.attention.segment_attention import (
    SegmentLaunch,
    is_roomy,
    is_small,
    launch_for_codes,
    load_queries,
    most_lanes,
)
from treetop.kernels.attention.segments import (
    UNIT,
    block_of,
    empty_softmax,
    fold,
    join,
    online_softmax_step,
    result_of,
    segment_of,
    segment_start,
)
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit_for_any, power_of_two, tl


@jit_for_any("n", "heads", "q_row", "position_row")
def _prefill_kernel(
    out: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg, positions: Arg, sinks: Arg, kv_scales: Arg,
    scale: Arg, n: Arg, heads: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg, v_offset: Arg,
    table_row: Arg, position_row: Arg, position_query: Arg,
    group: constexpr, dim: constexpr, page_size: constexpr, window: constexpr, chunked: constexpr,
    has_sinks: constexpr, scaled: constexpr, unit: constexpr,
    block_m: constexpr, block_n: constexpr, block_d: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of a prefill's queries of one row and K/V head, whose keys are all in pages.

    The arguments are as in `segment_attention._join_kernel`. Grid (kv_heads, blocks of queries, rows).
    """
    pdl_wait(overlap, early=True)
    kv_head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest blocks start first
    lane = tile * block_m + tl.arange(0, block_m)
    query, head = lane // group, kv_head * group + lane % group
    dims = tl.arange(0, block_d)
    within = query < n
    base = pages + kv_head * dim
    table = page_table + tl.load(rows + row) * table_row
    if scaled:
        scale *= tl.load(kv_scales + kv_head)
    queries = load_queries(q, row * q_row + query * q_query + head * q_head, within, dims, dim, scaled)
    position_at = positions + row * position_row
    position = tl.load(position_at + query * position_query, mask=within, other=0).to(tl.int32)
    real = within & ((query == 0) | (position > tl.load(position_at).to(tl.int32)))
    nearest = tl.min(tl.where(real, position, 2147483646), 0)
    end = tl.load(kv_len + row).to(tl.int32)
    end = tl.minimum(end, tl.max(tl.where(real, position, -1), 0) + 1)
    start, oldest = 0, position
    if window > 0:
        oldest = oldest_seen(position, window, chunked)
        start = tl.minimum(tl.min(tl.where(real, oldest, 2147483647), 0), end)
    seen_by_all = tl.minimum(nearest + 1, end) // block_n if window == 0 else 0  # blocks that need no mask
    stop = tl.cdiv(end, block_n)

    acc = tl.zeros([block_m, block_d], tl.float32)
    peak, mass = tl.full([block_m], -1e30, tl.float32), tl.zeros([block_m], tl.float32)
    each, each_peak, each_mass = empty_softmax(block_m, block_d)
    segment = segment_of(start, unit)
    begin = start // block_n
    next_one = segment_start(segment + 1, unit) // block_n
    middle = tl.maximum(tl.minimum(stop, seen_by_all), begin)
    page = page_of(table, begin, start, end, block_n, page_size)
    narrow: constexpr = scaled and (dim > 128 or not overlap)  # what codes widen to fills registers: nothing is ahead
    if window == 0:
        for block in tl.range(begin, middle, disable_licm=narrow):
            acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
                block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
            )
            key = block * block_n + tl.arange(0, block_n)
            stored = key < end
            slot = page.to(tl.int64) * page_size + within_page(key, page_size)
            k, v = load_kv(base, slot * slot_stride, stored, v_offset, dims, dim, block_d, queries.dtype, overlap)
            page = page_of(table, block + 1, start, end, block_n, page_size)
            each, each_peak, each_mass = fold(queries, k, v, stored, each, each_peak, each_mass, scale, False)
    for block in tl.range(middle, stop, disable_licm=narrow):
        acc, peak, mass, each, each_peak, each_mass, segment, next_one = online_softmax_step(
            block, acc, peak, mass, each, each_peak, each_mass, segment, next_one, unit, block_n
        )
        key = block * block_n + tl.arange(0, block_n)
        stored = (key >= start) & (key < end)
        slot = page.to(tl.int64) * page_size + within_page(key, page_size)
        k, v = load_kv(base, slot * slot_stride, stored, v_offset, dims, dim, block_d, queries.dtype, overlap)
        page = page_of(table, block + 1, start, end, block_n, page_size)
        visible = stored[None, :] & (key[None, :] <= position[:, None]) & real[:, None]
        if window > 0:
            visible = visible & (key[None, :] >= oldest[:, None])
        each, each_peak, each_mass = fold(queries, k, v, visible, each, each_peak, each_mass, scale, True)
    acc, peak, mass = join(acc, peak, mass, each, each_peak, tl.max(each_mass, 1))

    sink = tl.zeros([block_m], tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head, mask=real, other=0.0)
    result = tl.where(real[:, None], result_of(acc, peak, mass, sink, has_sinks), 0.0)
    if scaled:
        result *= tl.load(kv_scales + tl.num_programs(0) + kv_head)
    out_at = ((row * n + query) * heads + head)[:, None] * dim + dims[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=within[:, None] & (dims < dim)[None, :])


@cache
def choose_prefill_launch(call: CallShape, gpu: GpuTraits) -> SegmentLaunch:
    """The launch of a call from its shape."""
    lanes = max(16, power_of_two(call.n * call.group))
    block_m = min(lanes, most_lanes(call, gpu, 32 if is_small(call) else 64 if call.head_dim > 128 else 128))
    stages = 2 if call.element_bytes > 2 or call.head_dim > 128 or not is_roomy(gpu) else 3
    many = block_m * call.head_dim > 64 * 64 or call.element_bytes > 2 or not is_roomy(gpu)
    return SegmentLaunch(block_m, warps=8 if many else 4, stages=stages)


def segment_prefill_reference(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
    scales: Tensor | None = None,
) -> Tensor:
    """`segment_prefill` by plain operations, whose sums have another order."""
    return paged_attention_reference(q, pages, metadata, None, scale, sinks, scales)[0]


def segment_prefill(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
    gpu: GpuTraits,
    launch: SegmentLaunch | None = None,
    scales: Tensor | None = None,
    block_n: int | None = None,
    unit: int = UNIT,
) -> Tensor:
    """Attention of a chunk, whose K/V are in the pages, up to each query's own position. As `segment_attention`.

    block_n: keys of a block, else `block_of`.
    """
    rows, n, heads, dim = q.shape
    kv_heads = pages.shape[2]
    group = heads // kv_heads
    if launch is None:
        call = CallShape(rows, n, kv_heads, group, dim, q.element_size(), metadata.max_kv_len, True)
        launch = choose_prefill_launch(call, gpu)
        launch = launch if scales is None else launch_for_codes(launch, call, gpu)
    out = torch.empty((rows, n, heads, dim), dtype=q.dtype, device=q.device)
    positions, table = metadata.positions, metadata.table.data
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.stride()[2:] == (dim, 1)
    assert scales is None or scales.is_contiguous()
    _prefill_kernel[(kv_heads, -(-n * group // launch.block_m), rows)](
        out, q, pages, table, metadata.rows, metadata.kv_len, positions, out if sinks is None else sinks,
        out if scales is None else scales, scale * math.log2(math.e), n, heads, *q.stride()[:3], pages.stride(0),
        pages.stride(1), table.stride(0), *positions.stride(), group=group, dim=dim, page_size=metadata.page_size,
        window=metadata.window or 0, chunked=metadata.chunked, has_sinks=sinks is not None, scaled=scales is not None,
        unit=unit, block_m=launch.block_m, block_n=block_n or block_of(dim, q.element_size()),
        block_d=max(16, power_of_two(dim)), overlap=gpu.can_overlap, num_warps=launch.warps, num_stages=launch.stages,
        enable_fp_fusion=False, **launch_options(gpu),
    )  # fmt: skip
    return out
