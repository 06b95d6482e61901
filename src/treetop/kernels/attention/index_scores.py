"""How much an indexer's queries want the keys in the pages and in a tail: scores by position, for
`kernels.attention.index_topk`.

A program takes part of a row's keys and some of its queries, and loads each block of keys once for all of these. One
product is of one block of keys and the heads of one query, whatever the phase: so a key's score has the same bits in a
prefill, in a tree and in plain decoding. How many keys there are is read on the device.
"""

import torch
from torch import Tensor

from treetop.kernels.attention.attention import within_page
from treetop.kernels.attention.indexer import IndexQuery, index_scores
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.kv import moved, slots_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, power_of_two, tl

_KEYS = 128
"""Of a block, in 16 bits; in float32, without tensor cores, fewer."""
_QUERIES = 32
"""Of a program, at most."""


def paged_index_scores_reference(
    query: IndexQuery, keys: Tensor, metadata: AttentionMetadata, tail: Tensor | None
) -> Tensor:
    """How much each query wants each key that it may see; what lies where it may not see any means nothing.

    keys: [slots, index_dim], of the pages. tail: [rows, t, index_dim]; both may be codes, as in `index_scores`. Returns
    [rows, n, max_kv_len + t], no less than float32: by position, then by the tail's column.
    """
    at = torch.arange(metadata.max_kv_len, device=keys.device)
    stored = at < metadata.kv_len[:, None]
    slots = slots_of(metadata.table.data, metadata.rows, at[None], stored, metadata.page_size)
    wide = query.weights.dtype
    found = torch.where(stored[:, :, None], moved(keys)[slots].view(keys.dtype).to(wide), 0)
    return index_scores(query, found if tail is None else torch.cat([found, tail.to(wide)], dim=1))


@jit
def _want(keys: Arg, heads: Arg, weight: Arg) -> Arg:
    """Scores [n] of keys [n, d] by heads [h, d] with weights [h]."""
    each = tl.dot(keys.to(heads.dtype), tl.trans(heads), input_precision="ieee")
    return tl.sum(tl.where(each < 0.0, 0.0, each) * weight[None, :], 1)


@jit_for_any("n", "t", "bound", "splits", "score_line")
def _scores_kernel(
    scores: Arg, query: Arg, weights: Arg, keys: Arg, page_table: Arg, rows: Arg, extents: Arg, tail: Arg,
    n: Arg, t: Arg, bound: Arg, splits: Arg, score_line: Arg, query_row: Arg, query_query: Arg, query_head: Arg,
    weight_row: Arg, weight_query: Arg, slot_stride: Arg, table_row: Arg, extent_row: Arg, extent_query: Arg,
    tail_row: Arg, tail_column: Arg,
    heads: constexpr, dim: constexpr, page_size: constexpr, has_tail: constexpr, single: constexpr, block_n: constexpr,
    block_q: constexpr, block_h: constexpr, block_d: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One split of a row's keys, and `block_q` of its queries.

    scores: [rows * n, score_line] float32, the tail's from column `bound` on. query: [rows, n, heads, dim]; weights:
    [rows, n, heads], dense in the last dimension. extents: [rows, n] int64, positions that a query may see, which rise
    along a row, but for padding of 0. The rest as in the reference; the others are strides in elements. single: one
    query a row. Grid (splits, blocks of queries, rows); the tail is the first split's.
    """
    pdl_wait(overlap)
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    lane_n = tl.arange(0, block_n)
    lane_h = tl.arange(0, block_h)
    lane_d = tl.arange(0, block_d)
    table = page_table + tl.load(rows + row) * table_row
    of = tl.program_id(1) * block_q + tl.arange(0, block_q)
    extent = tl.load(extents + row * extent_row + of * extent_query, mask=of < n, other=0).to(tl.int32)
    end = tl.max(extent, 0)
    head_mask = (lane_h < heads)[:, None] & (lane_d < dim)[None, :]
    head_at = query + row * query_row + lane_h[:, None] * query_head + lane_d[None, :]
    weight_at = weights + row * weight_row + lane_h
    line = scores + row * n * score_line
    stop_of_all = tl.minimum(tl.program_id(1) * block_q + block_q, n)

    if has_tail:
        tail_line = line + bound
        for start in range(0, tl.where(split == 0, t, 0), block_n):
            column = start + lane_n
            there = column < t
            at = tail + row * tail_row + column.to(tl.int64)[:, None] * tail_column + lane_d[None, :]
            block = tl.load(at, mask=there[:, None] & (lane_d < dim)[None, :], other=0.0)
            for each in range(tl.program_id(1) * block_q, stop_of_all):
                asked = tl.load(head_at + each * query_query, mask=head_mask, other=0.0)
                weight = tl.load(weight_at + each * weight_query, mask=lane_h < heads, other=0.0)
                tl.store(tail_line + each * score_line + column, _want(block, asked, weight), mask=there)

    blocks = tl.cdiv(end, block_n)
    share = tl.maximum(tl.cdiv(blocks, splits), 1)
    begin = split * share
    if single:
        asked = tl.load(head_at, mask=head_mask, other=0.0)
        weight = tl.load(weight_at, mask=lane_h < heads, other=0.0)
    for number in range(begin, tl.minimum(begin + share, blocks)):
        key = number * block_n + lane_n
        stored = key < end
        page = tl.load(table + key // page_size, mask=stored, other=0).to(tl.int64)
        at = keys + (page * page_size + within_page(key, page_size))[:, None] * slot_stride + lane_d[None, :]
        block = tl.load(at, mask=stored[:, None] & (lane_d < dim)[None, :], other=0.0)
        if single:
            tl.store(line + key, _want(block, asked, weight), mask=stored)
        else:
            sees = extent > number * block_n
            for each in range(tl.min(tl.where(sees, of, n), 0), tl.max(tl.where(sees, of + 1, 0), 0)):
                heads_of = tl.load(head_at + each * query_query, mask=head_mask, other=0.0)
                weight_of = tl.load(weight_at + each * weight_query, mask=lane_h < heads, other=0.0)
                wanted = _want(block, heads_of, weight_of)
                tl.store(line + each * score_line + key, wanted, mask=stored)


def paged_index_scores(
    query: IndexQuery,
    keys: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    gpu: GpuTraits,
    exact: bool = False,
) -> Tensor:
    """`paged_index_scores_reference` in one launch, in float32; unwritten where a query may not see.

    exact: no product is contracted with the sum over heads, so that all kernels there are of it do the same operations.
    """
    return scores_of(query, keys, metadata, metadata.extents, tail, gpu, exact)


def scores_of(
    query: IndexQuery,
    keys: Tensor,
    metadata: AttentionMetadata,
    extents: Tensor,
    tail: Tensor | None,
    gpu: GpuTraits,
    exact: bool,
) -> Tensor:
    """`paged_index_scores` of some of the metadata's queries, whose extents these are. extents: [rows, n] int64."""
    rows, n, heads, dim = query.heads.shape
    bound, t = metadata.max_kv_len, 0 if tail is None else tail.shape[1]
    data, table = keys if tail is None else tail, metadata.table.data
    scores = torch.empty((rows, n, bound + t), dtype=torch.float32, device=keys.device)
    assert query.weights.dtype == torch.float32
    for each in (query.heads, query.weights, keys, data, table):
        assert each.stride(-1) == 1
    assert metadata.rows.stride(0) == 1
    block_n = _KEYS if query.heads.element_size() == 2 else _KEYS // 4
    block_q = min(power_of_two(n), _QUERIES)
    blocks = -(-n // block_q)
    splits = max(1, min(-(-bound // block_n), -(-4 * gpu.num_sms // (rows * blocks))))
    _scores_kernel[(splits, blocks, rows)](
        scores, query.heads, query.weights, keys, table, metadata.rows, extents, data, n, t, bound, splits, bound + t,
        *query.heads.stride()[:3], *query.weights.stride()[:2], keys.stride(0), table.stride(0), *extents.stride(),
        *(data.stride()[:2] if tail is not None else (0, 0)),
        heads=heads, dim=dim, page_size=metadata.page_size, has_tail=tail is not None, single=n == 1, block_n=block_n,
        block_q=block_q, block_h=max(16, power_of_two(heads)), block_d=max(16, power_of_two(dim)),
        overlap=gpu.can_overlap, num_warps=4, num_stages=3, enable_fp_fusion=not exact, **launch_options(gpu),
    )  # fmt: skip
    return scores
