"""What sparse attention (DSA) chooses keys by: an indexer's keys, its queries' scores, and the best of them.

A query's score of a key is the sum over the indexer's heads of weight * relu(q . k). It attends to the `top_k` best of
the keys that it may see; of equal ones the earlier come first. Constants that scale all scores alike are left out.
Source: DeepSeek-V3.2-Exp's report, section 2.1; `transformers`' deepseek_v32, whose choice among equals is not defined.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.fused import e4m3
from treetop.kernels.kv import PagedKV, encoded, moved, write_pages
from treetop.kernels.rope import Rotation, rotate_
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What chooses the keys of one layer.

    heads: [rows, n, index_heads, index_dim].
    weights: [rows, n, index_heads], no less than float32.
    top_k: keys that a query attends to at most.
    """

    heads: Tensor
    weights: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """Layer norm of an index key. weight, bias: [index_dim], no less than float32."""

    weight: Tensor
    bias: Tensor
    eps: float


def write_index_keys_reference(
    key: Tensor,
    norm: IndexNorm,
    angles: Rotation,
    target: Tensor,
    slots: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    """Norm index keys, rotate their first numbers, as many as the angles are of, and write them where they belong.

    key: [rows, n, index_dim]. angles: what the operation of that name gives. target: a tail's columns [rows, n, 1, 1,
    index_dim]; or, with slots [rows, n] int64, pages [slots, 1, 1, index_dim], where what goes to slot 0 is dropped.
    scales: [1, 1] float32, of a target in FP8.
    """
    normed = F.layer_norm(key.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.bias, norm.eps)
    plane = rotate_index_heads_reference(normed[:, :, None], angles)[:, :, None]
    plane = encoded(plane, scales).to(target.dtype)
    if slots is None:
        target.copy_(plane)
    else:
        write_pages(PagedKV(target), slots, plane)


def rotate_index_heads_reference(heads: Tensor, angles: Rotation) -> Tensor:
    """Heads whose first numbers are rotated, as many as the angles are of.

    heads: [rows, n, heads, dim]. angles: what the operation of that name gives.
    """
    rope_dim = angles.cos.shape[-1]
    return torch.cat([rotate_(heads[..., :rope_dim].clone(), angles), heads[..., rope_dim:]], dim=-1)


def index_scores(query: IndexQuery, keys: Tensor) -> Tensor:
    """How much each query wants each key, in no less than float32. Returns [rows, n, m].

    keys: [rows, m, index_dim]; in FP8, codes without the scale that all share.
    """
    wide = query.weights.dtype
    by_head = torch.einsum("bnhd,bmd->bnhm", query.heads.to(wide), keys.to(wide)).relu_()
    return torch.einsum("bnhm,bnh->bnm", by_head, query.weights)


def choose_keys(query: IndexQuery, keys: Tensor, visible: Tensor) -> Tensor:
    """The keys that each query attends to.

    keys: [rows, m, index_dim], each query's in the order of their positions, whatever lies between them. visible:
    [rows, n, m] bool. Returns [rows, n, m] bool: `query.top_k` of the visible ones, or all if they are no more.
    """
    return best_keys(index_scores(query, keys), visible, query.top_k)


def best_keys(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The `top_k` visible keys with the best scores, of equal ones the earlier. scores, visible: [rows, n, m]."""
    scores = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill(~visible, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(visible, memory_format=torch.contiguous_format).scatter_(2, best, True) & visible


# ------------------------------------------------------------------------------------------------------ the kernels


def write_index_keys(
    key: Tensor,
    norm: IndexNorm,
    angles: tuple[Tensor, Tensor],
    target: Tensor,
    slots: Tensor | None,
    gpu: GpuTraits,
    scales: Tensor | None = None,
) -> None:
    """`write_index_keys_reference` in one launch, in float32."""
    (table, positions), target = angles, moved(target)
    rows, n, dim = key.shape
    rope_dim = table.shape[-1]
    for each in (key, target):
        assert each.stride(-1) == 1
    strides = target.stride()[:2] if slots is None else (0, target.stride(0))
    where = positions if slots is None else slots
    _write_index_keys_kernel[(rows * n,)](
        key, norm.weight, norm.bias, table, positions, where, target,
        table if scales is None else scales, norm.eps, n, *key.stride()[:2],
        *positions.stride(), *where.stride(), *strides,
        dim=dim, half=rope_dim // 2, block_r=lanes(rope_dim // 2), block_d=lanes(dim - rope_dim),
        in_pages=slots is not None, scaled=scales is not None, overlap=gpu.can_overlap, num_warps=1,
        **launch_options(gpu),
    )  # fmt: skip


def rotate_index_heads(heads: Tensor, angles: tuple[Tensor, Tensor], gpu: GpuTraits) -> Tensor:
    """`rotate_index_heads_reference` in one launch, in float32."""
    table, positions = angles
    rows, n, count, dim = heads.shape
    rope_dim = table.shape[-1]
    out = torch.empty((rows, n, count, dim), dtype=heads.dtype, device=heads.device)
    assert heads.stride(3) == 1
    _rotate_index_heads_kernel[(rows * n,)](
        out, heads, table, positions, n, *heads.stride()[:3], *positions.stride(),
        count=count, dim=dim, half=rope_dim // 2, block_h=lanes(count), block_r=lanes(rope_dim // 2),
        block_d=lanes(dim - rope_dim), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _write_index_keys_kernel(
    key: Arg, weight: Arg, bias: Arg, table: Arg, positions: Arg, slots: Arg, target: Arg, scales: Arg, eps: Arg,
    n: Arg, key_row: Arg, key_column: Arg, position_row: Arg, position_column: Arg, slot_row: Arg, slot_column: Arg,
    target_row: Arg, target_column: Arg,
    dim: constexpr, half: constexpr, block_r: constexpr, block_d: constexpr, in_pages: constexpr, scaled: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """The key of one token: the halves of what has RoPE, and the rest. Grid (rows * n,)."""
    pdl_wait(overlap)
    token = tl.program_id(0).to(tl.int64)
    row, column = token // n, token % n
    lane, rest = tl.arange(0, block_r), 2 * half + tl.arange(0, block_d)
    narrow, wide = lane < half, rest < dim
    at = key + row * key_row + column * key_column
    low = tl.load(at + lane, mask=narrow, other=0.0).to(tl.float32)
    high = tl.load(at + half + lane, mask=narrow, other=0.0).to(tl.float32)
    still = tl.load(at + rest, mask=wide, other=0.0).to(tl.float32)
    mean = (tl.sum(low, 0) + tl.sum(high, 0) + tl.sum(still, 0)) / dim
    low, high = tl.where(narrow, low - mean, 0.0), tl.where(narrow, high - mean, 0.0)
    still = tl.where(wide, still - mean, 0.0)
    variance = (tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(still * still, 0)) / dim
    share = tl.rsqrt(variance + eps)
    low = low * share * tl.load(weight + lane, mask=narrow, other=0.0) + tl.load(bias + lane, mask=narrow, other=0.0)
    high = high * share * tl.load(weight + half + lane, mask=narrow, other=0.0)
    high += tl.load(bias + half + lane, mask=narrow, other=0.0)
    still = still * share * tl.load(weight + rest, mask=wide, other=0.0) + tl.load(bias + rest, mask=wide, other=0.0)

    angle_at = table + tl.load(positions + row * position_row + column * position_column) * (4 * half) + lane
    low_cos = tl.load(angle_at, mask=narrow, other=0.0).to(tl.float32)
    high_cos = tl.load(angle_at + half, mask=narrow, other=0.0).to(tl.float32)
    low_sin = tl.load(angle_at + 2 * half, mask=narrow, other=0.0).to(tl.float32)
    high_sin = tl.load(angle_at + 3 * half, mask=narrow, other=0.0).to(tl.float32)
    if in_pages:
        slot = tl.load(slots + row * slot_row + column * slot_column) + tl.zeros([1], tl.int64)
        narrow, wide = narrow & (slot != 0), wide & (slot != 0)
        target_at = target + slot * target_column
    else:
        target_at = target + row * target_row + column * target_column + tl.zeros([1], tl.int64)
    new_low, new_high = low * low_cos + high * low_sin, high * high_cos + low * high_sin
    if scaled:  # bytes of e4m3
        own = tl.load(scales) + tl.zeros([1], tl.float32)
        still, new_low, new_high = e4m3(still, own), e4m3(new_low, own), e4m3(new_high, own)
    kind = target.dtype.element_ty
    tl.store(target_at + lane, new_low.to(kind), mask=narrow)
    tl.store(target_at + half + lane, new_high.to(kind), mask=narrow)
    tl.store(target_at + rest, still.to(kind), mask=wide)


@jit
def _rotate_index_heads_kernel(
    out: Arg, heads: Arg, table: Arg, positions: Arg, n: Arg, head_row: Arg, head_column: Arg, head_stride: Arg,
    position_row: Arg, position_column: Arg,
    count: constexpr, dim: constexpr, half: constexpr, block_h: constexpr, block_r: constexpr, block_d: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """The heads of one token. out: [rows * n, count, dim], contiguous. Grid (rows * n,)."""
    pdl_wait(overlap)
    token = tl.program_id(0).to(tl.int64)
    row, column = token // n, token % n
    head, lane, rest = tl.arange(0, block_h), tl.arange(0, block_r), 2 * half + tl.arange(0, block_d)
    narrow, wide = lane < half, rest < dim
    angle_at = table + tl.load(positions + row * position_row + column * position_column) * (4 * half) + lane
    low_cos = tl.load(angle_at, mask=narrow, other=0.0).to(tl.float32)
    high_cos = tl.load(angle_at + half, mask=narrow, other=0.0).to(tl.float32)
    low_sin = tl.load(angle_at + 2 * half, mask=narrow, other=0.0).to(tl.float32)
    high_sin = tl.load(angle_at + 3 * half, mask=narrow, other=0.0).to(tl.float32)
    is_head = (head < count)[:, None]
    at = heads + row * head_row + column * head_column + head[:, None] * head_stride
    to = out + (token * count + head)[:, None] * dim
    mask = is_head & narrow[None, :]
    low = tl.load(at + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + half + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    turned_low = low * low_cos[None, :] + high * low_sin[None, :]
    turned_high = high * high_cos[None, :] + low * high_sin[None, :]
    tl.store(to + lane[None, :], turned_low.to(kind), mask=mask)
    tl.store(to + half + lane[None, :], turned_high.to(kind), mask=mask)
    copied = tl.load(at + rest[None, :], mask=is_head & wide[None, :], other=0.0)
    tl.store(to + rest[None, :], copied, mask=is_head & wide[None, :])
