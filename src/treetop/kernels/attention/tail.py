"""The tail after a prefix that another library computed: masked attention over it, and the merge, in one launch.

The running softmax starts from the prefix's (out, lse) instead of from nothing, folds the tail's columns into it, and
takes the sink last: so the merge by log-sum-exp costs no pass of its own.
"""

import math

import torch
from torch import Tensor

from treetop.kernels.attention.attention import add_sink, fold_tail, tail_visible
from treetop.kernels.attention.latent_tail import latent_tail_and_merge
from treetop.kernels.attention.metadata import AttentionMetadata, oldest_seen
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl


def tail_and_merge_reference(
    q: Tensor,
    prefix: PrefixPart,
    tail: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Attention over prefix and tail, from the prefix's (out, lse), densely and in float32 (float64 if q is).

    q: [rows, n, heads, head_dim], dense in its last dimension. tail: [rows, t, planes, kv_heads, head_dim], of which K
    is the first plane and V the last. sinks: [heads] float32. value_dim: how many of V's first numbers are the value,
    which may be K's as well; None is all. Returns [rows, n, heads, value_dim]. A query that sees nothing at all gets 0.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = prefix.normalised()
    visible = tail_visible(metadata)
    kv_heads, values = tail.shape[3], tail[:, :, -1, :, :value_dim]
    grouped = q.to(wide).unflatten(2, (kv_heads, -1))
    scores = torch.einsum("bnhgd,bmhd->bnhgm", grouped, tail[:, :, 0].to(wide)) * scale
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    before = lse.to(wide).unflatten(2, (kv_heads, -1))
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), before)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide).view(kv_heads, -1))
    base = torch.where(total > float("-inf"), total, 0)
    new = torch.einsum("bnhgm,bmhd->bnhgd", torch.exp(scores - base[..., None]), values.to(wide))
    old = out.to(wide).unflatten(2, (kv_heads, -1)) * torch.exp(before - base)[..., None]
    merged: Tensor = new + old
    return merged.flatten(2, 3).to(q.dtype)


@jit
def _tail_kernel(
    out: Arg, q: Arg, before: Arg, before_lse: Arg, kv_len: Arg, positions: Arg, tail: Arg, tail_positions: Arg,
    mask: Arg, sinks: Arg, scale: Arg, lse_scale: Arg, n: Arg, t: Arg, q_row: Arg, q_query: Arg, q_head: Arg,
    before_row: Arg, before_query: Arg, before_head: Arg, lse_row: Arg, lse_query: Arg, lse_head: Arg,
    position_row: Arg, position_query: Arg, tail_row: Arg, tail_column: Arg, tail_v: Arg,
    tail_position_row: Arg, tail_position_column: Arg, mask_row: Arg, mask_query: Arg, mask_column: Arg,
    group: constexpr, dim: constexpr, window: constexpr, chunked: constexpr, has_sinks: constexpr, block_m: constexpr,
    block_t: constexpr, block_d: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of queries of one row and K/V head.

    out: [rows, n, heads, dim], contiguous. The rest as in `tail_and_merge`; *_row, *_query, ... are strides in
    elements; scale and lse_scale lead to base 2; window 0 is none. Grid (kv_heads, blocks of queries, rows).
    """
    pdl_wait(overlap, early=True)
    kv_head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    lane = tl.program_id(1) * block_m + tl.arange(0, block_m)
    query = lane // group
    head = kv_head * group + lane % group
    dims = tl.arange(0, block_d)
    real = query < n
    wide = real[:, None] & (dims < dim)[None, :]
    q_at = row * q_row + query * q_query + head * q_head
    queries = tl.load(q + q_at[:, None] + dims[None, :], mask=wide, other=0.0)

    keys = tl.zeros([block_m], tl.int32) + tl.load(kv_len + row).to(tl.int32)
    lse_at = row * lse_row + query * lse_query + head * lse_head
    log_mass = tl.load(before_lse + lse_at, mask=real & (keys > 0), other=float("-inf"))
    seen = log_mass != float("-inf")  # NaN too, which must show
    peak = tl.where(seen, log_mass * lse_scale, -1e30)
    mass = tl.where(seen, 1.0, 0.0)
    at = row * before_row + query * before_query + head * before_head
    acc = tl.load(before + at[:, None] + dims[None, :], mask=wide & seen[:, None], other=0.0).to(tl.float32)

    oldest = tl.zeros([block_m], tl.int32)
    if window > 0:
        position_at = positions + row * position_row + query * position_query
        oldest = oldest_seen(tl.load(position_at, mask=real, other=0).to(tl.int32), window, chunked)
    acc, peak, mass = fold_tail(
        queries, tail + kv_head * dim + row * tail_row, tail_positions + row * tail_position_row, mask + row * mask_row,
        query, real, oldest, dims, t, t, tail_column, tail_v, tail_position_column, mask_query, mask_column, acc,
        peak, mass, scale, dim, window, block_t, block_d, overlap,
    )  # fmt: skip
    if has_sinks:
        acc, peak, mass = add_sink(tl.load(sinks + head, mask=real, other=0.0), acc, peak, mass)

    result = acc / tl.where(mass != 0, mass, 1.0)[:, None]
    out_at = (row * n + query) * (tl.num_programs(0) * group) + head
    tl.store(out + out_at[:, None] * dim + dims[None, :], result.to(out.dtype.element_ty), mask=wide)


def tail_and_merge(
    q: Tensor,
    prefix: PrefixPart,
    tail: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sinks: Tensor | None,
    gpu: GpuTraits,
    value_dim: int | None = None,
) -> Tensor:
    """`tail_and_merge_reference` in one launch."""
    if value_dim is not None:
        assert sinks is None, "no model has compressed attention and sinks"
        return latent_tail_and_merge(q, prefix, tail, metadata, scale, value_dim, gpu)
    rows, n, heads, dim = q.shape
    kv_heads, width = tail.shape[3], tail.shape[1]
    positions, tail_positions, mask = metadata.positions, metadata.tail_positions, metadata.mask
    assert tail_positions is not None
    assert mask is not None
    group = heads // kv_heads
    out = torch.empty((rows, n, heads, dim), dtype=q.dtype, device=q.device)
    assert (q.stride(3), prefix.out.stride(3), prefix.kv_len.stride(0)) == (1, 1, 1)
    assert tail.stride()[3:] == (dim, 1)
    small = q.element_size() > 2 or dim > 128  # float32 without tensor cores, or wide heads: what fits in registers
    block_m = min(max(16, power_of_two(n * group)), 32 if small else 64)
    overlap = launch_options(gpu)
    _tail_kernel[(kv_heads, -(-n * group // block_m), rows)](
        out, q, prefix.out, prefix.lse, prefix.kv_len, positions, tail, tail_positions, mask,
        prefix.lse if sinks is None else sinks, scale * math.log2(math.e), prefix.unit * math.log2(math.e), n,
        width, *q.stride()[:3], *prefix.out.stride()[:3], *prefix.lse.stride(), *positions.stride(),
        *tail.stride()[:3], *tail_positions.stride(), *mask.stride(),
        group=group, dim=dim, window=metadata.window or 0, chunked=metadata.chunked,
        has_sinks=sinks is not None, block_m=block_m,
        block_t=min(16 if small else 64, max(16, power_of_two(width))), block_d=max(16, power_of_two(dim)),
        overlap=gpu.can_overlap, num_warps=8 if q.element_size() > 2 else 4, num_stages=2, **overlap,
    )  # fmt: skip
    return out
