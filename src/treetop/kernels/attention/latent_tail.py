"""The tail after a prefix of compressed attention that another library computed, and the merge, in one launch.

As `kernels.attention.tail`, for planes that are key and value: a plane is loaded once for both, its latent and its
rotated part as blocks of their own.
"""

import math

from torch import Tensor

from treetop.kernels.attention.latent_attention import fold_planes, load_plane
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

_QUERIES = 16
"""Of a program: their sums, [queries, 512] in float32, stay in its registers."""


@jit
def _latent_tail_kernel(
    out: Arg, q: Arg, before: Arg, before_lse: Arg, kv_len: Arg, tail: Arg, mask: Arg, scale: Arg, lse_scale: Arg,
    n: Arg, t: Arg, q_row: Arg, q_query: Arg, q_head: Arg, before_row: Arg, before_query: Arg, before_head: Arg,
    lse_row: Arg, lse_query: Arg, lse_head: Arg, tail_row: Arg, tail_column: Arg, mask_row: Arg, mask_query: Arg,
    mask_column: Arg,
    heads: constexpr, rank: constexpr, rope_dim: constexpr, block_m: constexpr, block_t: constexpr, block_c: constexpr,
    block_r: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of queries, each a head's, of one row.

    out: [rows, n, heads, rank], contiguous. The rest as in `latent_tail_and_merge`; *_row, *_query, ... are strides in
    elements; scale and lse_scale lead to base 2. Grid (blocks of queries, rows).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * block_m + tl.arange(0, block_m)
    query = lane // heads
    head = lane % heads
    real = query < n
    lane_c = tl.arange(0, block_c)
    lane_r = tl.arange(0, block_r)
    wide = real[:, None] & (lane_c < rank)[None, :]
    q_at = q + (row * q_row + query * q_query + head * q_head)[:, None]
    queries = tl.load(q_at + lane_c[None, :], mask=wide, other=0.0)
    q_rope = tl.load(q_at + rank + lane_r[None, :], mask=real[:, None] & (lane_r < rope_dim)[None, :], other=0.0)

    keys = tl.zeros([block_m], tl.int32) + tl.load(kv_len + row).to(tl.int32)
    lse_at = row * lse_row + query * lse_query + head * lse_head
    log_mass = tl.load(before_lse + lse_at, mask=real & (keys > 0), other=float("-inf"))
    seen = log_mass != float("-inf")  # NaN too, which must show
    peak = tl.where(seen, log_mass * lse_scale, -1e30)
    mass = tl.where(seen, 1.0, 0.0)
    at = row * before_row + query * before_query + head * before_head
    acc = tl.load(before + at[:, None] + lane_c[None, :], mask=wide & seen[:, None], other=0.0).to(tl.float32)

    for column_start in tl.range(0, t, block_t, num_stages=1):
        column = column_start + tl.arange(0, block_t)
        there = column < t
        plane_at = row * tail_row + column.to(tl.int64) * tail_column
        k, k_rope = load_plane(tail, plane_at, there, lane_c, lane_r, rank, rope_dim, queries.dtype, overlap)
        shown = mask + row * mask_row + query[:, None] * mask_query + column[None, :] * mask_column
        visible = tl.load(shown, mask=real[:, None] & there[None, :], other=0) != 0
        acc, peak, mass = fold_planes(queries, q_rope, k, k_rope, visible, acc, peak, mass, scale, True)

    result = acc / tl.where(mass != 0, mass, 1.0)[:, None]
    out_at = ((row * n + query) * heads + head)[:, None] * rank + lane_c[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=wide)


def latent_tail_and_merge(
    q: Tensor,
    prefix: PrefixPart,
    tail: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    rank: int,
    gpu: GpuTraits,
) -> Tensor:
    """`tail_and_merge_reference` of planes whose first `rank` numbers are the value. tail: [rows, t, 1, 1, dim].

    No sinks and no window: no model has them and compressed attention.
    """
    rows, n, heads, dim = q.shape
    width, mask = tail.shape[1], metadata.mask
    assert mask is not None
    assert metadata.window is None
    assert tail.shape[2:] == (1, 1, dim)
    assert (q.stride(3), prefix.out.stride(3), prefix.kv_len.stride(0), tail.stride(4)) == (1, 1, 1, 1)
    out = q.new_empty((rows, n, heads, rank))
    _latent_tail_kernel[(-(-n * heads // _QUERIES), rows)](
        out, q, prefix.out, prefix.lse, prefix.kv_len, tail, mask, scale * math.log2(math.e),
        prefix.unit * math.log2(math.e), n, width, *q.stride()[:3], *prefix.out.stride()[:3], *prefix.lse.stride(),
        *tail.stride()[:2], *mask.stride(),
        heads=heads, rank=rank, rope_dim=dim - rank, block_m=_QUERIES, block_t=16, block_c=max(16, power_of_two(rank)),
        block_r=max(16, power_of_two(dim - rank)), overlap=gpu.can_overlap, num_warps=4, num_stages=1,
        **launch_options(gpu),
    )  # fmt: skip
    return out
