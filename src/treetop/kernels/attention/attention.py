"""Attention over paged K/V and a dense tail, in one pass: the Triton kernels and their reference.

One program takes the queries of one row that share a K/V head, grouped heads folded into the query block, and one
part of the row's keys:

    row's keys   | page | page | page | page | page | tail |
    splits       |  split 0    |  split 1    |  split 2    |     each gives (out, lse); `_merge_kernel` joins them

How many keys a row has is read on the device, how many splits share them is fixed by the launch: so a captured graph
serves every length. A row of a decode batch that is much longer than the rest has helpers
(`kernels.attention.stream_k`). One split needs no merge, and is one launch. An attention sink, one logit a head that
takes part in the normalisation
and has no value, enters once: at the end of a single split, else in the merge.
Source: split keys and merge by log-sum-exp are Flash-Decoding (Dao et al., 2023); the online softmax is Milakov and
Gimelshein, arXiv:1805.02867.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treetop.kernels.attention.attention_config import CallShape, Launch, choose_launch, for_codes
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys, oldest_seen
from treetop.kernels.attention.stream_k import StreamK, row_shares, seat_of, share_of, stream_k_fixup, stream_k_share
from treetop.kernels.dependent_launch import pdl_wait
from treetop.kernels.flat import packed_nodes, spread_nodes
from treetop.kernels.kv import decoded, slots_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, power_of_two, tl

# ---------------------------------------------------------------------------------------------------- the reference


def paged_attention_reference(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the committed pages and the tail, if there is one, densely and in float32 (float64 if q is).

    q: [rows, n, heads, head_dim], dense in its last dimension. pages: [slots, planes, kv_heads, head_dim], one layer's.
    tail: [rows, t, planes, kv_heads, head_dim]. sinks: [heads] float32, a logit a head that takes part in the
    normalisation. scales: [planes, kv_heads] float32, of pages and a tail in FP8. Returns out like q and lse [rows, n,
    heads] float32, natural logarithm, the sink in it; a query that sees nothing gets out 0 and lse -inf, or its sink.
    Of metadata with flat nodes q and tail are [N, 1, ...], and so are out and lse.
    """
    at = torch.arange(metadata.max_kv_len, device=q.device)
    stored = at < metadata.kv_len[:, None]
    slots = slots_of(metadata.table.data, metadata.rows, at[None], stored, metadata.page_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    if metadata.flat is not None:
        flat, by_row = metadata.flat, [spread_nodes(metadata.flat, each) for each in (q, tail) if each is not None]
        of_rows = paged_attention_reference(
            by_row[0], pages, replace(metadata, flat=None), None if tail is None else by_row[1], scale, sinks, scales
        )
        out, lse = (packed_nodes(flat, each) for each in of_rows)
        return out, lse
    kv = torch.where(stored[:, :, None, None, None], decoded(pages[slots], scales, wide), 0)
    positions = metadata.positions
    visible = stored[:, None].expand(-1, q.shape[1], -1)
    if metadata.oldest is not None:
        visible = visible & (at >= metadata.oldest[:, :, None])
    if metadata.causal:
        columns = torch.arange(q.shape[1], device=q.device)
        real = (columns == 0) | (positions > positions[:, :1])
        visible = visible & (at <= positions[:, :, None]) & real[:, :, None]
    if metadata.chosen is not None:
        visible = visible & _chosen(metadata.chosen, len(at))
    if tail is not None:
        visible = torch.cat([visible, tail_visible(metadata)], dim=2)
        kv = torch.cat([kv, decoded(tail, scales, wide)], dim=1)
    kv_heads = kv.shape[3]
    grouped = q.to(wide).unflatten(2, (kv_heads, -1))
    scores = torch.einsum("bnhgd,bmhd->bnhgm", grouped, kv[:, :, 0].to(wide)) * scale
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide).view(kv_heads, -1))
    weights = torch.exp(scores - torch.where(lse > float("-inf"), lse, 0)[..., None])
    out = torch.einsum("bnhgm,bmhd->bnhgd", weights, kv[:, :, -1].to(wide))
    return out.flatten(2, 3).to(q.dtype), lse.flatten(2).to(torch.float32)


def tail_visible(metadata: AttentionMetadata) -> Tensor:
    """Which tail keys a query sees: its mask, and from where it sees by position. Returns [rows, n, t] bool."""
    assert metadata.mask is not None
    assert metadata.tail_positions is not None
    oldest = metadata.oldest
    return metadata.mask if oldest is None else metadata.mask & (metadata.tail_positions[:, None] >= oldest[:, :, None])


def _chosen(chosen: SparseKeys, bound: int) -> Tensor:
    """Which of positions 0 .. bound - 1 were chosen. Returns [rows, n, bound] bool."""
    there = torch.arange(chosen.positions.shape[2], device=chosen.count.device) < chosen.count[..., None]
    places = torch.where(there, chosen.positions, bound).to(torch.int64)
    found = torch.zeros((*chosen.count.shape, bound + 1), dtype=torch.bool, device=places.device)
    return found.scatter_(2, places, True)[..., :bound]


# ------------------------------------------------------------------------------------------------------ the kernels


@jit
def fold(
    q: Arg, k: Arg, v: Arg, visible: Arg, acc: Arg, peak: Arg, mass: Arg, scale: Arg, masked: constexpr
) -> Arg:  # fmt: skip
    """Fold one block of keys into the running softmax. q: [m, d]. k: [n, d]. scale: with log2 e. The rest as below."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return fold_scores(scores, v, visible, acc, peak, mass, masked)


@jit
def fold_scores(scores: Arg, v: Arg, visible: Arg, acc: Arg, peak: Arg, mass: Arg, masked: constexpr) -> Arg:
    """Fold one block of keys, by their scores [m, n] in base 2, into the running softmax.

    v: [n, d]. visible: [m, n] bool. acc: [m, d], peak (base 2), mass: [m], float32.
    """
    if masked:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))  # never below its start of -1e30: no -inf - -inf
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    mass = mass * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, mass


@jit
def add_sink(sink: Arg, acc: Arg, peak: Arg, mass: Arg) -> Arg:
    """Fold a key without a value into the running softmax. sink: [m] float32, a logit in natural units."""
    sink = sink * 1.4426950408889634
    new_peak = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - new_peak)
    return acc * shrink[:, None], new_peak, mass * shrink + tl.exp2(sink - new_peak)


@jit
def load_kv(
    base: Arg, at: Arg, stored: Arg, v_offset: Arg, dims: Arg, dim: constexpr, block_d: constexpr, dtype: constexpr,
    hopper: constexpr,
) -> Arg:  # fmt: skip
    """K and V of keys at element offsets `at` [n] int64, in `dtype`; 0 where not `stored` and past the head's width."""
    mask = stored[:, None] if dim == block_d else stored[:, None] & (dims < dim)[None, :]
    where = base + at[:, None] + dims[None, :]
    k, v = tl.load(where, mask=mask, other=0.0), tl.load(where + v_offset, mask=mask, other=0.0)
    return widened(k, mask, dtype, hopper), widened(v, mask, dtype, hopper)


@jit
def beside_codes(q: Arg) -> Arg:
    """Queries in the dtype that codes of K/V are widened to: they become float16 in one instruction, bfloat16 in
    several.
    """
    return tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16) if q.dtype == tl.bfloat16 else q


@jit
def widened(x: Arg, mask: Arg, dtype: constexpr, hopper: constexpr) -> Arg:
    """What was loaded where `mask` says, in `dtype`. hopper: compute capability 9.0 and later.

    A conversion has to stay before the way to a product's operand. Triton would have codes of a byte go that way, and a
    value's lie the wrong way round there: each was then loaded by itself (Triton 3.6). Assembly that is not pure stays
    where it is; elsewhere a choice that changes nothing keeps it there, with a select for each number.
    """
    if x.dtype == dtype:
        wide = x
    elif hopper and dtype == tl.float16:
        wide = tl.inline_asm_elementwise(
            _FOUR_CODES, "=r,=r,r", [x.to(tl.uint8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        wide = tl.where(mask, x.to(dtype), 0.0)
    return wide


_FOUR_CODES = constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }")
"""Four codes in e4m3 as four float16s, exactly; a NaN is one. PTX ISA 8.5, `cvt`."""


@jit
def fold_tail(
    q: Arg, tail: Arg, tail_positions: Arg, mask: Arg, query: Arg, real: Arg, oldest: Arg, dims: Arg, stop: Arg,
    t: Arg, tail_column: Arg, tail_v: Arg, position_column: Arg, mask_query: Arg, mask_column: Arg, acc: Arg, peak: Arg,
    mass: Arg, scale: Arg, dim: constexpr, window: constexpr, block_t: constexpr, block_d: constexpr,
    hopper: constexpr,
) -> Arg:  # fmt: skip
    """Fold columns 0 .. stop of a dense tail into the running softmax.

    tail, tail_positions, mask: pointers to one row's, at its K/V head. query, and oldest, the first position that it
    sees: [m] int, of the lanes that are `real`. The rest as in `fold` and `AttentionMetadata`.
    """
    for column_start in tl.range(0, stop, block_t, num_stages=1):
        column = column_start + tl.arange(0, block_t)
        there = column < t
        k, v = load_kv(tail, column.to(tl.int64) * tail_column, there, tail_v, dims, dim, block_d, q.dtype, hopper)
        shown = mask + query[:, None] * mask_query + column[None, :] * mask_column
        visible = tl.load(shown, mask=real[:, None] & there[None, :], other=0) != 0
        if window > 0:
            tail_position = tl.load(tail_positions + column * position_column, mask=there, other=0).to(tl.int32)
            visible = visible & (tail_position[None, :] >= oldest[:, None])
        acc, peak, mass = fold(q, k, v, visible, acc, peak, mass, scale, True)
    return acc, peak, mass


@jit
def page_of(table: Arg, block: Arg, start: Arg, end: Arg, block_n: constexpr, page_size: constexpr) -> Arg:
    """Pages of a block's keys [block_n] int32; the null page outside start .. end, where the table is not read."""
    key = block * block_n + tl.arange(0, block_n)
    return tl.load(table + key // page_size, mask=(key >= start) & (key < end), other=0)


@jit
def within_page(position: Arg, page_size: constexpr) -> Arg:
    """The places of positions in their pages.

    The hint says that they are multiples of nothing: Triton 3.6 takes pages' first slots plus such runs for multiples
    of `page_size`, and where planes have an odd width it would load more at once than is aligned.
    """
    return tl.multiple_of(position % page_size, 1)


@jit_for_any("n", "position_row", "splits", "helpers")
def _attention_kernel(
    out: Arg, lse: Arg, sums: Arg, arrivals: Arg, q: Arg, pages: Arg, page_table: Arg, rows: Arg, kv_len: Arg,
    positions: Arg, tail: Arg, tail_positions: Arg, mask: Arg, sinks: Arg, kv_scales: Arg, row_start: Arg, counts: Arg,
    scale: Arg, n: Arg, t: Arg, split_stride: Arg, q_row: Arg, q_query: Arg, q_head: Arg, slot_stride: Arg,
    v_offset: Arg, table_row: Arg, position_row: Arg, position_query: Arg, splits: Arg, helpers: Arg, tail_row: Arg,
    tail_column: Arg, tail_v: Arg, tail_position_row: Arg, tail_position_column: Arg, mask_row: Arg, mask_query: Arg,
    mask_column: Arg,
    group: constexpr, dim: constexpr, page_size: constexpr, window: constexpr, chunked: constexpr, causal: constexpr,
    has_tail: constexpr, has_sinks: constexpr, has_parts: constexpr, scaled: constexpr, helped: constexpr,
    block_m: constexpr, block_n: constexpr, block_t: constexpr, block_d: constexpr, block_rows: constexpr,
    flat: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of queries of one row and K/V head, over one split of its keys.

    out: [splits, rows, n, heads, dim]; lse: [splits, rows, n, heads] float32, natural; both contiguous. The rest as in
    `paged_attention`; *_row, *_query, ... are strides in elements; window 0 is none. Grid (kv_heads, blocks of queries
    * splits, rows + helpers). All slot arithmetic is int64.

    helped: by `kernels.attention.stream_k`, of which sums, arrivals and helpers are. flat: rows have `counts` queries
        and
    columns, from their `row_start` on, as [N, 1, ...]; q_query and tail_column are then strides of nodes.
    """
    pdl_wait(overlap, early=True)
    kv_head = tl.program_id(0)
    split = tl.program_id(1) % splits
    tile = tl.num_programs(1) // splits - 1 - tl.program_id(1) // splits  # causal: the longest blocks start first
    row = tl.program_id(2)
    if helped:
        count = tl.num_programs(2) - helpers
        shares = row_shares(kv_len, count, splits, window, chunked, block_n, block_rows)
        row, member, members, first_helper = seat_of(shares, row, count, helpers, block_rows)
        if row < 0:
            return
    row = row.to(tl.int64)
    end = tl.load(kv_len + row).to(tl.int32)
    if helped:
        own_share = share_of(end, splits, window, chunked, block_n)
    table = page_table + tl.load(rows + row) * table_row
    first_node, q_from, tail_from = row * n, row * q_row, row * tail_row
    if flat:
        first_node = tl.load(row_start + row)
        n = tl.load(counts + row).to(tl.int32)
        t = n
        q_from, tail_from = first_node * q_query, first_node * tail_column

    lane = tile * block_m + tl.arange(0, block_m)
    query = lane // group
    head = kv_head * group + lane % group
    dims = tl.arange(0, block_d)
    real = query < n
    q_mask = real[:, None] & (dims < dim)[None, :]
    q_at = q_from + query * q_query + head * q_head
    queries = tl.load(q + q_at[:, None] + dims[None, :], mask=q_mask, other=0.0)
    if scaled:
        queries = beside_codes(queries)

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
    if flat:  # past a row's last query there is nothing to do
        stop = tl.where(tile * block_m < n * group, stop, begin)
    if helped:  # a row's own program begins where it would alone, so nothing waits for the other rows' lengths yet
        whole = tl.maximum(stop - begin, 0)
        begin += member * tl.cdiv(whole, members)

    acc = tl.zeros([block_m, block_d], tl.float32)
    peak = tl.full([block_m], -1e30, tl.float32)
    mass = tl.zeros([block_m], tl.float32)
    base = pages + kv_head * dim

    if scaled:  # what all keys share goes to the scores, what all values share to the result
        scale *= tl.load(kv_scales + kv_head)
    page = page_of(table, begin, start, end, block_n, page_size)
    folds_tail = split == 0
    if helped:
        folds_tail = folds_tail & (member == 0)
    if has_tail:  # first, and by the first split: it needs no length, so it hides the latency of those loads
        acc, peak, mass = fold_tail(
            queries, tail + kv_head * dim + tail_from, tail_positions + row * tail_position_row,
            mask + row * mask_row, query, real, oldest, dims, tl.where(folds_tail, t, 0), t, tail_column, tail_v,
            tail_position_column, mask_query, mask_column, acc, peak, mass, scale, dim, window, block_t, block_d,
            overlap,
        )  # fmt: skip

    if helped:
        members, first_helper = stream_k_share(
            shares, own_share, tl.program_id(2), member, members, first_helper, count, helpers, block_rows
        )
        stop = tl.minimum(begin + tl.cdiv(whole, members), stop)

    middle = begin
    if causal and window == 0:  # blocks that every query sees whole need no mask
        seen_by_all = tl.minimum(tl.min(tl.where(real, position, 2147483646), 0) + 1, end)
        middle = tl.maximum(tl.minimum(stop, seen_by_all // block_n), begin)
        for block in range(begin, middle):
            key = block * block_n + tl.arange(0, block_n)
            stored = key < end
            slot = page.to(tl.int64) * page_size + within_page(key, page_size)
            k, v = load_kv(base, slot * slot_stride, stored, v_offset, dims, dim, block_d, queries.dtype, overlap)
            page = page_of(table, block + 1, start, end, block_n, page_size)
            acc, peak, mass = fold(queries, k, v, stored, acc, peak, mass, scale, False)

    for block in range(middle, stop):
        key = block * block_n + tl.arange(0, block_n)
        stored = (key >= start) & (key < end)
        slot = page.to(tl.int64) * page_size + within_page(key, page_size)
        k, v = load_kv(base, slot * slot_stride, stored, v_offset, dims, dim, block_d, queries.dtype, overlap)
        page = page_of(table, block + 1, start, end, block_n, page_size)  # its latency hides behind this block's work
        visible = stored[None, :]
        if causal:
            visible = visible & (key[None, :] <= position[:, None])
        if window > 0:
            visible = visible & (key[None, :] >= oldest[:, None])
        acc, peak, mass = fold(queries, k, v, visible, acc, peak, mass, scale, True)

    kept = query < n
    if helped:
        unit, units = tl.program_id(1) * tl.num_programs(0) + kv_head, tl.num_programs(0) * tl.num_programs(1)
        acc, peak, mass, last = stream_k_fixup(
            sums, arrivals, member, members, first_helper, helpers, unit, units, acc, peak, mass, block_m, block_d
        )
        kept = query < tl.where(last, n, 0)
    if has_sinks and not has_parts:
        acc, peak, mass = add_sink(tl.load(sinks + head, mask=real, other=0.0), acc, peak, mass)
    seen = real & (mass != 0)  # also of NaN, which must show
    result = tl.where(seen[:, None], acc / tl.where(seen, mass, 1.0)[:, None], 0.0)
    if scaled:
        result *= tl.load(kv_scales + tl.num_programs(0) + kv_head)
    log_mass = tl.where(seen, (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453, float("-inf"))
    out_at = (first_node + query) * (tl.num_programs(0) * group) + head
    tl.store(lse + split * split_stride + out_at, log_mass, mask=kept)
    out_at = (split * split_stride + out_at)[:, None] * dim + dims[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=kept[:, None] & (dims < dim)[None, :])


@jit_for_any("count", "splits")
def _merge_kernel(
    out: Arg, lse: Arg, parts: Arg, part_lse: Arg, sinks: Arg, count: Arg, splits: Arg, heads: Arg,
    dim: constexpr, has_sinks: constexpr, block_s: constexpr, block_i: constexpr, block_d: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """Join the splits of `block_i` items, each a query and a head.

    out: [count, dim]; lse: [count] float32. parts: [splits, count, dim] float32; part_lse: [splits, count] float32. A
    part with lse -inf counts for nothing, whatever lies there. sinks: [heads] float32. Grid (count / block_i,).
    """
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64) * block_i + tl.arange(0, block_i)
    split = tl.arange(0, block_s)
    dims = tl.arange(0, block_d)
    at = split.to(tl.int64)[:, None] * count + item[None, :]
    each = tl.load(part_lse + at, mask=(split < splits)[:, None], other=float("-inf"))
    wide = (split < splits)[:, None, None] & (dims < dim)[None, None, :]
    part = tl.load(parts + at[:, :, None] * dim + dims[None, None, :], mask=wide, other=0.0)  # not waiting for `each`
    peak = tl.max(each, 0)
    if has_sinks:
        sink = tl.load(sinks + item % heads)
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    weight = tl.exp(each - peak[None, :])
    mass = tl.sum(weight, 0)
    if has_sinks:
        mass += tl.exp(sink - peak)
    seen = mass != 0
    mass = tl.where(seen, mass, 1.0)
    part = tl.where((weight != 0)[:, :, None], part, 0.0)
    total = tl.sum(part * weight[:, :, None], 0) / mass[:, None]
    out_at = out + item[:, None] * dim + dims[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=(dims < dim)[None, :])
    tl.store(lse + item, tl.where(seen, peak + tl.log(mass), float("-inf")))


# ------------------------------------------------------------------------------------------------------- the launch


@dataclass(frozen=True, slots=True)
class Results:
    """What a call writes, and the parts that its splits leave; of one split they are the same tensors.

    out: [rows, n, heads, dim] like q. lse: [rows, n, heads] float32.
    part: [splits, rows * n * heads, dim] float32. part_lse: [splits, rows * n * heads] float32.
    """

    out: Tensor
    lse: Tensor
    part: Tensor
    part_lse: Tensor

    @classmethod
    def of(cls, q: Tensor, dim: int, splits: int) -> "Results":
        out = torch.empty((*q.shape[:3], dim), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if splits == 1:
            return cls(out, lse, out, lse)
        part = torch.empty((splits, lse.numel(), dim), dtype=torch.float32, device=q.device)
        return cls(out, lse, part, torch.empty(part.shape[:2], dtype=torch.float32, device=q.device))

    def merge(self, launch: Launch, sinks: Tensor | None, block_d: int, max_warps: int) -> None:
        """Join the parts of several splits. sinks: as the kernel had them."""
        if launch.splits == 1:
            return
        count, block_s = self.lse.numel(), power_of_two(launch.splits)
        block_i = _items_to_merge(count, block_s)
        _merge_kernel[(count // block_i,)](
            self.out, self.lse, self.part, self.part_lse, self.lse if sinks is None else sinks, count, launch.splits,
            self.lse.shape[2], dim=self.out.shape[3], has_sinks=sinks is not None, block_s=block_s, block_i=block_i,
            block_d=block_d, overlap=launch.overlap,
            num_warps=max(1, min(max_warps, block_s * block_i * block_d // 2048)),
            **({"launch_pdl": True} if launch.overlap else {}),
        )  # fmt: skip


def tail_arguments(q: Tensor, metadata: AttentionMetadata, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tail's data, positions and mask, and its width; without a tail placeholders that no lane reads."""
    if tail is None:
        return q, metadata.rows, metadata.rows, 0
    assert metadata.tail_positions is not None
    assert metadata.mask is not None
    return tail, metadata.tail_positions, metadata.mask, tail.shape[1]


def paged_attention(
    q: Tensor,
    pages: Tensor,
    metadata: AttentionMetadata,
    tail: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    gpu: GpuTraits,
    launch: Launch | None = None,
    scales: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention_reference`. launch: how the call is cut, or else `choose_launch` says.

    arrivals: of `make_arrivals`; long rows of a decode phase then have helpers. Reads lengths on the device only, and
    allocates only tensors whose shapes the arguments' shapes give.
    """
    (rows, n), (heads, dim), flat = metadata.positions.shape, q.shape[2:], metadata.flat
    kv_heads = pages.shape[2]
    group = heads // kv_heads
    table, positions = metadata.table.data, metadata.positions
    if launch is None:
        call = CallShape(rows, n, kv_heads, group, dim, q.element_size(), most_seen(metadata), metadata.causal)
        launch = choose_launch(call, gpu)
        launch = launch if scales is None else for_codes(launch, call, gpu)
    results = Results.of(q, dim, launch.splits)
    data, tail_positions, mask, width = tail_arguments(q, metadata, tail)
    tail_strides: tuple[int, ...] = (0,) * 8
    if tail is not None:
        tail_strides = (*data.stride()[:3], *tail_positions.stride(), *mask.stride())
        if flat is not None:
            tail_strides = (0, data.stride(0), *tail_strides[2:])
        assert data.stride()[3:] == (dim, 1)
    assert (q.stride(3), table.stride(1), metadata.rows.stride(0), metadata.kv_len.stride(0)) == (1, 1, 1, 1)
    assert pages.stride()[2:] == (dim, 1)
    q_strides, nodes = q.stride()[:3], (metadata.rows, metadata.rows)
    if flat is not None:
        assert tail is not None
        q_strides, nodes, width = (0, q.stride(0), q.stride(2)), (flat.row_start, flat.count), n
    blocks = -(-n * group // launch.block_m)
    block_d = max(16, power_of_two(dim))
    logits = results.lse if sinks is None else sinks  # a placeholder, without any
    overlap = {"launch_pdl": True} if launch.overlap else {}
    units, size = kv_heads * blocks * launch.splits, launch.block_m * (block_d + 2)
    stream_k = StreamK.of(rows, units, size, None if metadata.causal else arrivals, results.lse)
    _attention_kernel[(kv_heads, blocks * launch.splits, rows + stream_k.helpers)](
        results.part, results.part_lse, stream_k.sums, stream_k.arrivals, q, pages, table, metadata.rows,
        metadata.kv_len,
        positions, data, tail_positions, mask, logits, results.lse if scales is None else scales,
        *nodes, scale * math.log2(math.e), n, width, results.lse.numel(), *q_strides, pages.stride(0), pages.stride(1),
        table.stride(0),
        *positions.stride(), launch.splits, stream_k.helpers, *tail_strides,
        group=group, dim=dim, page_size=metadata.page_size, window=metadata.window or 0,
        chunked=metadata.chunked, causal=metadata.causal, has_tail=tail is not None, has_sinks=sinks is not None,
        has_parts=launch.splits > 1, scaled=scales is not None, helped=stream_k.helpers > 0,
        block_m=launch.block_m, block_n=launch.block_n, block_t=min(launch.block_n, max(16, power_of_two(width))),
        block_d=block_d, block_rows=stream_k.block_rows, flat=flat is not None, overlap=launch.overlap,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **overlap,
    )  # fmt: skip
    results.merge(launch, sinks, block_d, max_warps=4)
    return results.out, results.lse


def most_seen(metadata: AttentionMetadata) -> int:
    """Keys in the pages that a query of a row sees at most, for which a launch is chosen: of a prefill all of a row."""
    bound = metadata.max_kv_len
    return bound if metadata.causal or metadata.window is None else min(bound, metadata.window)


def _items_to_merge(count: int, block_s: int) -> int:
    """How many of `count` items, each of `block_s` parts, a program of the merge joins; it divides count.

    One while an H200 holds all programs at once, else what makes eight parts, if it can (measured there).
    """
    many = max(1, 8 // block_s)
    return many if count > 2048 and count % many == 0 else 1
