"""What compressed attention writes and asks with: a latent's norm, a key's and queries' rotation, in one launch.

The numbers of a token's plane are its latent, normed, then the rotary part of a key. A head's query has the same
layout: what was absorbed of it, then what has RoPE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.fused import e4m3, joined, rms_norm
from treetop.kernels.kv import PagedKV, encoded, moved, write_pages
from treetop.kernels.rope import Rotation, rotate_
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

_HEADS = 4
"""Heads of one token that a program takes."""


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """RMS norm of the latent. weight: [rank]."""

    weight: Tensor
    eps: float


def write_latent_reference(
    absorbed: Tensor,
    q_rope: Tensor,
    down: Tensor,
    angles: Rotation,
    target: Tensor,
    slots: Tensor | None,
    norm: LatentNorm,
    scales: Tensor | None = None,
) -> Tensor:
    """Norm the latent, rotate the key beside it, write both where they belong, and return rotated queries.

    absorbed: [rows, n, heads, rank]. q_rope: [rows, n, heads, dim], which it may use up. down: [parts, rows, n, rank +
    dim]. angles: what the operation of that name gives. target: a tail's columns [rows, n, 1, 1, rank + dim]; or, with
    slots [rows, n] int64, pages [slots, 1, 1, rank + dim], where what goes to slot 0 is dropped. scales: [1, 1]
    float32, of a target in FP8. Returns [rows, n, heads, rank + dim].
    """
    latent, key = joined(down).split([len(norm.weight), q_rope.shape[-1]], dim=-1)
    key = rotate_(key[:, :, None].clone(), angles)[:, :, 0]
    plane = torch.cat([rms_norm(latent, norm.weight, norm.eps), key], dim=-1)[:, :, None, None]
    plane = encoded(plane, scales).to(target.dtype)
    if slots is None:
        target.copy_(plane)
    else:
        write_pages(PagedKV(target), slots, plane)
    return torch.cat([absorbed, rotate_(q_rope, angles)], dim=-1)


def write_latent(
    absorbed: Tensor,
    q_rope: Tensor,
    down: Tensor,
    angles: tuple[Tensor, Tensor],
    target: Tensor,
    slots: Tensor | None,
    norm: LatentNorm,
    gpu: GpuTraits,
    scales: Tensor | None = None,
) -> Tensor:
    """`write_latent_reference` in one launch, in float32. All are dense in their last dimension."""
    table, positions = angles
    rows, n, heads, rank = absorbed.shape
    dim, target = q_rope.shape[-1], moved(target)
    q = torch.empty((rows, n, heads, rank + dim), dtype=absorbed.dtype, device=absorbed.device)
    for each in (absorbed, q_rope, down, target):
        assert each.stride(-1) == 1
    strides = target.stride()[:2] if slots is None else (0, target.stride(0))
    where = positions if slots is None else slots
    _write_latent_kernel[(rows * n, 1 + -(-heads // _HEADS))](
        q, absorbed, q_rope, down, table, positions, where, target, norm.weight,
        table if scales is None else scales, norm.eps, n,
        *absorbed.stride()[:3], *q_rope.stride()[:3], *down.stride()[:3],
        *positions.stride(), *where.stride(), *strides,
        parts=len(down), heads=heads, rank=rank, half=dim // 2, block_c=power_of_two(rank),
        block_r=power_of_two(dim // 2), block_h=_HEADS, in_pages=slots is not None, scaled=scales is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return q


@jit
def _write_latent_kernel(
    q: Arg, absorbed: Arg, q_rope: Arg, down: Arg, table: Arg, positions: Arg, slots: Arg, target: Arg, weight: Arg,
    scales: Arg, eps: Arg, n: Arg, absorbed_row: Arg, absorbed_column: Arg, absorbed_head: Arg, rope_row: Arg,
    rope_column: Arg, rope_head: Arg, part_stride: Arg, down_row: Arg, down_column: Arg, position_row: Arg,
    position_column: Arg, slot_row: Arg, slot_column: Arg, target_row: Arg, target_column: Arg,
    parts: constexpr, heads: constexpr, rank: constexpr, half: constexpr, block_c: constexpr, block_r: constexpr,
    block_h: constexpr, in_pages: constexpr, scaled: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The plane of one token, or `block_h` of its queries; arguments as in the reference. Grid (rows * n, 1 + heads /
    block_h), of which the first of the second dimension is the plane's."""
    pdl_wait(overlap)
    token = tl.program_id(0).to(tl.int64)
    row, column = token // n, token % n
    lane_c = tl.arange(0, block_c)
    lane = tl.arange(0, block_r)
    wide, narrow = lane_c < rank, lane < half
    position = tl.load(positions + row * position_row + column * position_column)
    angle_at = table + position * (4 * half) + lane
    low_cos = tl.load(angle_at, mask=narrow, other=0.0).to(tl.float32)
    high_cos = tl.load(angle_at + half, mask=narrow, other=0.0).to(tl.float32)
    low_sin = tl.load(angle_at + 2 * half, mask=narrow, other=0.0).to(tl.float32)
    high_sin = tl.load(angle_at + 3 * half, mask=narrow, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        at = down + row * down_row + column * down_column
        latent = tl.load(at + lane_c, mask=wide, other=0.0).to(tl.float32)
        key_low = tl.load(at + rank + lane, mask=narrow, other=0.0).to(tl.float32)
        key_high = tl.load(at + rank + half + lane, mask=narrow, other=0.0).to(tl.float32)
        for part in tl.static_range(1, parts):
            latent += tl.load(at + part * part_stride + lane_c, mask=wide, other=0.0)
            key_low += tl.load(at + part * part_stride + rank + lane, mask=narrow, other=0.0)
            key_high += tl.load(at + part * part_stride + rank + half + lane, mask=narrow, other=0.0)
        scale = tl.load(weight + lane_c, mask=wide, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / rank + eps) * scale
        if in_pages:
            slot = tl.load(slots + row * slot_row + column * slot_column) + tl.zeros([1], tl.int64)
            wide = wide & (slot != 0)
            narrow = narrow & (slot != 0)
            target_at = target + slot * target_column
        else:
            target_at = target + row * target_row + column * target_column + tl.zeros([1], tl.int64)
        new_low = key_low * low_cos + key_high * low_sin
        new_high = key_high * high_cos + key_low * high_sin
        if scaled:  # bytes of e4m3
            own = tl.load(scales) + tl.zeros([1], tl.float32)
            latent, new_low, new_high = e4m3(latent, own), e4m3(new_low, own), e4m3(new_high, own)
        kind = target.dtype.element_ty
        tl.store(target_at + lane_c, latent.to(kind), mask=wide)
        tl.store(target_at + rank + lane, new_low.to(kind), mask=narrow)
        tl.store(target_at + rank + half + lane, new_high.to(kind), mask=narrow)
    else:
        head = (tl.program_id(1) - 1) * block_h + tl.arange(0, block_h)
        is_head = (head < heads)[:, None]
        q_at = q + (token * heads + head)[:, None] * (rank + 2 * half)
        absorbed_at = absorbed + row * absorbed_row + column * absorbed_column
        absorbed_at = absorbed_at + head.to(tl.int64)[:, None] * absorbed_head + lane_c[None, :]
        q_kind = q.dtype.element_ty
        copied = tl.load(absorbed_at, mask=is_head & wide[None, :], other=0.0)
        tl.store(q_at + lane_c[None, :], copied.to(q_kind), mask=is_head & wide[None, :])
        from_at = q_rope + row * rope_row + column * rope_column + head[:, None] * rope_head + lane[None, :]
        mask = is_head & narrow[None, :]
        low = tl.load(from_at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(from_at + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_at + rank + lane[None, :], (low * low_cos[None, :] + high * low_sin[None, :]).to(q_kind), mask=mask)
        tl.store(
            q_at + rank + half + lane[None, :],
            (high * high_cos[None, :] + low * high_sin[None, :]).to(q_kind),
            mask=mask,
        )
