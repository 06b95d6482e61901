"""Small operations between the matrix products, each one launch: add and norm, gate and product, rotation and write.

Each is memory-bound and short, so what counts is the number of launches and of trips through memory. All compute in
float32 and round once. The references are the plain operations.

A product may come in parts, [parts, ..., width], whose sum it is (`kernels.gemm.skinny_gemm`); its reader adds them up.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, least_rows
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.kv import PagedKV, encoded, moved, write_pages
from treetop.kernels.rope import RopeTable, Rotation, rotate_
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

_HEADS = 8
"""Heads of one token that a program rotates."""


# ------------------------------------------------------------------------------------------------- add and RMS norm


def joined(parts: Tensor) -> Tensor:
    """The sum of a product's parts [parts, ..., width]."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(dim=0)


def joined_in_order(parts: Tensor) -> Tensor:
    """The same, one part after another: a library may add them up by the number of rows. Several parts in 16 bits are
    added in float32, which is returned."""
    total = parts[0]
    if parts.shape[0] == 1:
        return total
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def join_reference(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a product's parts [parts, ..., width], rounded to a dtype."""
    return joined(parts).to(dtype)


def join(parts: Tensor, dtype: torch.dtype, gpu: GpuTraits) -> Tensor:
    """`join_reference`, one part after another, in one launch; of one part as it is. parts: contiguous."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    assert parts.is_contiguous()
    _join_kernel[(-(-out.numel() // _JOINED),)](
        out, parts, out.numel(), parts=len(parts), block=_JOINED, overlap=gpu.can_overlap, num_warps=4,
        **launch_options(gpu),
    )  # fmt: skip
    return out


_JOINED = 1024
"""Numbers that a program adds up."""


@jit
def _join_kernel(out: Arg, given: Arg, size: Arg, parts: constexpr, block: constexpr, overlap: constexpr) -> None:
    """A block of numbers. given: [parts, size]. Grid (size / block,)."""
    pdl_wait(overlap, early=True)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    total = tl.load(given + at, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(given + part * size + at, mask=there, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def add_reference(x: Tensor, delta: Tensor) -> Tensor:
    """x [..., hidden] plus the parts of delta [parts, ..., hidden]."""
    total = x + joined(delta)
    return total if total.dtype == x.dtype else total.to(x.dtype)


def add_rms_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x plus the parts of delta (x alone if None), and that over its root mean square, times weight.

    x: [..., hidden]. delta: [parts, ..., hidden].
    """
    total = x if delta is None else add_reference(x, delta)
    return total, rms_norm(total, weight, eps)


def add_in_order(x: Tensor, delta: Tensor) -> Tensor:
    """`add_reference`, one part of delta after another, in float32 at least, rounded once: as the kernels do."""
    total = x + joined_in_order(delta)
    return total if total.dtype == x.dtype else total.to(x.dtype)


def add_rms_norm_in_order(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_reference` of `add_in_order`."""
    total = x if delta is None else add_in_order(x, delta)
    return total, rms_norm(total, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., hidden] over its root mean square, times weight [hidden], in the wider dtype of both, rounded to x's.

    PyTorch has no kernel for it on a CPU and takes eight operations; these are five, in half the time.
    """
    if weight.dtype != x.dtype:
        wide = torch.promote_types(weight.dtype, x.dtype)
        return rms_norm(x.to(wide), weight.to(wide), eps).to(x.dtype)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(eps, x.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(weight)


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A constant on the CPU, without dimensions."""
    return torch.tensor(value, dtype=dtype)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gpu: GpuTraits) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_reference` in one pass; the norm is of the sum as rounded. delta: contiguous."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    _launch_add(total, normed, x, delta, weight, eps, gpu)
    return total, normed


def add(x: Tensor, delta: Tensor, gpu: GpuTraits) -> Tensor:
    """`add_reference` in one launch. delta: contiguous."""
    x = x.contiguous()
    total = torch.empty_like(x)
    _launch_add(total, None, x, delta, None, 0.0, gpu)
    return total


def _launch_add(
    total: Tensor, normed: Tensor | None, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float,
    gpu: GpuTraits,
) -> None:  # fmt: skip
    hidden = x.shape[-1]
    _add_rms_norm_kernel[(x.numel() // hidden,)](
        total, total if normed is None else normed, x, x if delta is None else delta, x if weight is None else weight,
        eps, x.numel(), hidden=hidden, block=power_of_two(hidden), parts=0 if delta is None else delta.shape[0],
        norms=normed is not None, overlap=gpu.can_overlap, num_warps=8 if hidden > 2048 else 4, **launch_options(gpu),
    )  # fmt: skip


@jit
def _add_rms_norm_kernel(
    total: Arg, normed: Arg, x: Arg, delta: Arg, weight: Arg, eps: Arg, size: Arg,
    hidden: constexpr, block: constexpr, parts: constexpr, norms: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program. total, normed, x: [rows, hidden]; delta: [parts, rows, hidden]; weight: [hidden]."""
    column = tl.arange(0, block)
    there = column < hidden
    if norms:
        scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)  # a constant: needs no waiting
    pdl_wait(overlap)
    at = tl.program_id(0).to(tl.int64) * hidden + column
    value = tl.load(x + at, mask=there, other=0.0)
    if parts > 0:
        added = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
        for part in tl.static_range(1, parts):
            added += tl.load(delta + part * size + at, mask=there, other=0.0)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + at, value, mask=there)
    if norms:
        value = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
        tl.store(normed + at, (value * inverse * scale).to(normed.dtype.element_ty), mask=there)


# ------------------------------------------------------------------------------------------------- a draft's input


def embed_and_norm_reference(table: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A draft head's input: the embedding of each token beside the RMS norm of its hidden state.

    table: [vocab, width]. tokens: [rows, n] int64. hidden: [rows, n, hidden]. Returns [rows, n, width + hidden].
    """
    return torch.cat([F.embedding(tokens, table), rms_norm(hidden, weight, eps)], dim=-1)


def embed_and_norm(table: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, eps: float, gpu: GpuTraits) -> Tensor:
    """`embed_and_norm_reference` in one launch."""
    rows, n, size = hidden.shape
    assert table.is_contiguous()
    assert hidden.stride(2) == 1
    out = torch.empty((rows, n, table.shape[1] + size), dtype=hidden.dtype, device=hidden.device)
    _embed_and_norm_kernel[(rows * n,)](
        out, table, tokens, hidden, weight, eps, n, *tokens.stride(), *hidden.stride()[:2],
        width=table.shape[1], hidden_size=size, block=power_of_two(max(table.shape[1], size)),
        overlap=gpu.can_overlap, num_warps=8 if size > 2048 else 4, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _embed_and_norm_kernel(
    out: Arg, table: Arg, tokens: Arg, hidden: Arg, weight: Arg, eps: Arg, n: Arg,
    token_row: Arg, token_column: Arg, hidden_row: Arg, hidden_column: Arg,
    width: constexpr, hidden_size: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One token a program; arguments as in the reference. Grid (rows * n,)."""
    lane = tl.arange(0, block)
    inside = lane < hidden_size
    scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    row, column = item // n, item % n
    token = tl.load(tokens + row * token_row + column * token_column)
    embedding = tl.load(table + token * width + lane, mask=lane < width, other=0.0)
    state = tl.load(hidden + row * hidden_row + column * hidden_column + lane, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(state * state, 0) / hidden_size + eps)
    at = out + item * (width + hidden_size) + lane
    tl.store(at, embedding, mask=lane < width)
    tl.store(at + width, (state * inverse * scale).to(out.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- gate and product


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2 * inner], gate first. Returns [..., inner]."""
    return gate_mul_reference(gate_up, "silu")


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """`gelu_tanh(gate) * up` of [..., 2 * inner], gate first. Returns [..., inner]."""
    return gate_mul_reference(gate_up, "gelu_tanh")


def gate_mul_reference(gate_up: Tensor, kind: Gate, functions: Functions = LIBRARY) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activated_reference(gate, kind, functions).mul_(up)


@cache
def batch_invariant_functions(kind: Gate, width: int, threads: int) -> Functions:
    """The library's activations, if a row's bits of `gate_mul_reference` depend on it alone, else those by element.

    width: of gates and ups. threads: of PyTorch.
    """
    library = least_rows(lambda gate_up: gate_mul_reference(gate_up, kind), width) == 1
    return LIBRARY if library else BY_ELEMENT


def silu_mul(gate_up: Tensor, gpu: GpuTraits) -> Tensor:
    """`silu_mul_reference` in one pass. gate_up: [..., 2 * inner], contiguous."""
    return gate_mul(gate_up, "silu", gpu)


def gelu_tanh_mul(gate_up: Tensor, gpu: GpuTraits) -> Tensor:
    """`gelu_tanh_mul_reference` in one pass. gate_up: [..., 2 * inner], contiguous."""
    return gate_mul(gate_up, "gelu_tanh", gpu)


def gate_mul(gate_up: Tensor, kind: Gate, gpu: GpuTraits, out: Tensor | None = None) -> Tensor:
    """out: [..., inner], or None for new memory; its rows may stand apart."""
    inner = gate_up.shape[-1] // 2
    if out is None:
        out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype, device=gate_up.device)
    assert out.stride(-1) == 1
    assert out.ndim == 2 or out.is_contiguous()
    block = min(1024, power_of_two(inner))
    _gate_mul_kernel[(out.numel() // inner, -(-inner // block))](
        out, gate_up, out.stride(-2) if out.ndim > 1 else inner, inner=inner, block=block, kind=kind,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu)
    )  # fmt: skip
    return out


@jit
def _gate_mul_kernel(
    out: Arg, gate_up: Arg, apart: Arg, inner: constexpr, block: constexpr, kind: constexpr, overlap: constexpr
) -> None:
    """One block of a row a program. out: [rows, inner], rows `apart` from each other; gate_up: [rows, 2 * inner]. Grid
    (rows, inner / block).
    """
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=there, other=0.0).to(tl.float32)
    value = activated(gate, kind) * up
    tl.store(out + row * apart + column, value.to(out.dtype.element_ty), mask=there)


# ----------------------------------------------------------------------------------------------- rotation and write


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of heads before their rotation (Qwen3). weight: [1 to 3, dim], of queries, keys and values."""

    weight: Tensor
    eps: float


def norm_heads_(qkv: Tensor, kv_heads: int, norms: HeadNorms) -> None:
    """Norm the heads of qkv [rows, n, heads + 2 * kv_heads, dim] in place, q first, as far as there are norms."""
    heads = qkv.shape[2] - 2 * kv_heads
    for part, weight in zip(qkv.split([heads, kv_heads, kv_heads], dim=2), norms.weight, strict=False):
        part.copy_(rms_norm(part, weight, norms.eps))


def angles_reference(table: RopeTable, positions: Tensor) -> Rotation:
    """What `rotate_and_write` takes of a RoPE table at positions [rows, n], made once a forward."""
    return table.at(positions)


def angles(table: RopeTable, positions: Tensor, gpu: GpuTraits) -> tuple[Tensor, Tensor]:
    """The table and the positions as they are: the kernel reads one through the other."""
    return table.data, positions


def rotate_and_write_reference(
    qkv: Tensor,
    angles: Rotation,
    target: Tensor,
    slots: Tensor | None,
    norms: HeadNorms | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v where they belong, a tail or pages, and return q [rows, n, heads, dim].

    qkv: [parts, rows, n, heads + 2 * kv_heads, dim], which it may use up. angles: what the operation of that name
    gives. target: a tail's columns [rows, n, 2, kv_heads, dim]; or, with slots [rows, n] int64, pages
    [slots, 2, kv_heads, dim], where what goes to slot 0 is dropped. scales: [2, kv_heads] float32, of a target in FP8.
    q has target's dtype, or beside FP8 that of the RoPE table. Without KV heads nothing is written.
    """
    kv_heads, whole = target.shape[-2], joined(qkv)
    heads = whole.shape[2] - 2 * kv_heads
    if norms is not None:
        norm_heads_(whole, kv_heads, norms)
    rotate_(whole[:, :, : heads + kv_heads], angles)
    if kv_heads == 0:
        return whole
    kv = encoded(whole[:, :, heads:].view(*whole.shape[:2], 2, kv_heads, whole.shape[3]), scales)
    if slots is None:
        target.copy_(kv)
    else:
        write_pages(PagedKV(target), slots, kv)
    return whole[:, :, :heads]


def rotate_and_write(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    target: Tensor,
    slots: Tensor | None,
    norms: HeadNorms | None,
    gpu: GpuTraits,
    scales: Tensor | None = None,
) -> Tensor:
    """`rotate_and_write_reference` in one launch, in float32. qkv: contiguous."""
    table, positions = angles
    dtype, target = target.dtype if scales is None else table.dtype, moved(target)
    parts, rows, n, all_heads, dim = qkv.shape
    heads = all_heads - 2 * target.shape[-2]
    q = torch.empty((rows, n, heads, dim), dtype=dtype, device=qkv.device)
    assert qkv.is_contiguous()
    assert target.stride()[-2:] == (dim, 1)
    assert heads == all_heads or (target.shape[-3], target.stride(-3)) == (2, target.shape[-2] * dim)  # v follows k
    strides = target.stride()[:2] if slots is None else (0, target.stride(0))
    where = positions if slots is None else slots
    _rotate_and_write_kernel[(rows * n, -(-all_heads // _HEADS))](
        q, qkv, table, positions, where, target, table if norms is None else norms.weight,
        table if scales is None else scales, 0.0 if norms is None else norms.eps, n, qkv.stride(0),
        *positions.stride(), *where.stride(), *strides,
        parts=parts, heads=heads, kv_heads=target.shape[-2], half=dim // 2, block=power_of_two(dim // 2),
        block_h=_HEADS, normed=0 if norms is None else len(norms.weight), in_pages=slots is not None,
        scaled=scales is not None, overlap=gpu.can_overlap, num_warps=2,
        **launch_options(gpu),
    )  # fmt: skip
    return q


@jit
def _rotate_and_write_kernel(
    q: Arg, qkv: Arg, table: Arg, positions: Arg, slots: Arg, target: Arg, norms: Arg, scales: Arg, eps: Arg,
    n: Arg,
    part_stride: Arg, position_row: Arg, position_column: Arg, slot_row: Arg, slot_column: Arg, target_row: Arg,
    target_column: Arg,
    parts: constexpr, heads: constexpr, kv_heads: constexpr, half: constexpr, block: constexpr, block_h: constexpr,
    normed: constexpr, in_pages: constexpr, scaled: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """`block_h` heads of one token a program; arguments as in the reference. Grid (rows * n, heads / block_h).

    normed: how many of q, k and v have norms. scaled: the target holds codes of e4m3, as bytes.
    """
    pdl_wait(overlap)
    row = (tl.program_id(0) // n).to(tl.int64)
    column = (tl.program_id(0) % n).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    lane = tl.arange(0, block)
    narrow = lane < half
    there = (head < heads + 2 * kv_heads)[:, None] & narrow[None, :]
    token = tl.program_id(0).to(tl.int64)
    low_at = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * (2 * half) + lane[None, :]
    low = tl.load(low_at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(low_at + half, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        low += tl.load(low_at + part * part_stride, mask=there, other=0.0)
        high += tl.load(low_at + part * part_stride + half, mask=there, other=0.0)

    position = tl.load(positions + row * position_row + column * position_column)
    angle_at = table + position * (4 * half) + lane
    turns = (head < heads + kv_heads)[:, None]  # v stays
    if normed:
        part = (head >= heads).to(tl.int32) + (head >= heads + kv_heads).to(tl.int32)
        has_norm = (part < normed)[:, None]
        norm_at = norms + part[:, None] * (2 * half) + lane[None, :]
        low_weight = tl.load(norm_at, mask=there & has_norm, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_at + half, mask=there & has_norm, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half) + eps)[:, None]
        low = tl.where(has_norm, low * scale * low_weight, low)
        high = tl.where(has_norm, high * scale * high_weight, high)
    low_cos = tl.where(turns, tl.load(angle_at, mask=narrow, other=0.0).to(tl.float32)[None, :], 1.0)
    high_cos = tl.where(turns, tl.load(angle_at + half, mask=narrow, other=0.0).to(tl.float32)[None, :], 1.0)
    low_sin = tl.where(turns, tl.load(angle_at + 2 * half, mask=narrow, other=0.0).to(tl.float32)[None, :], 0.0)
    high_sin = tl.where(turns, tl.load(angle_at + 3 * half, mask=narrow, other=0.0).to(tl.float32)[None, :], 0.0)
    new_low = low * low_cos + high * low_sin
    new_high = high * high_cos + low * high_sin

    is_q = there & (head < heads)[:, None]
    q_at = q + (token * heads + head)[:, None] * (2 * half) + lane[None, :]
    tl.store(q_at, new_low.to(q.dtype.element_ty), mask=is_q)
    tl.store(q_at + half, new_high.to(q.dtype.element_ty), mask=is_q)
    is_kv = there & (head >= heads)[:, None]
    if in_pages:
        slot = tl.load(slots + row * slot_row + column * slot_column) + tl.zeros([block_h], tl.int64)
        is_kv = is_kv & (slot != 0)[:, None]
        target_at = target + slot[:, None] * target_column
    else:
        target_at = target + row * target_row + column * target_column + tl.zeros([block_h, 1], tl.int64)
    target_at = target_at + (head - heads)[:, None] * (2 * half) + lane[None, :]
    if scaled:
        own = tl.load(scales + head - heads, mask=(head >= heads) & (head < heads + 2 * kv_heads), other=1.0)
        new_low, new_high = e4m3(new_low, own[:, None]), e4m3(new_high, own[:, None])
    tl.store(target_at, new_low.to(target.dtype.element_ty), mask=is_kv)
    tl.store(target_at + half, new_high.to(target.dtype.element_ty), mask=is_kv)


@jit
def e4m3(x: Arg, scale: Arg) -> Arg:
    """The codes of float32 numbers over their scale, as `kv.encoded` has them, as bytes.

    By the bits of a float32: of what e4m3 has an exponent for, those of its mantissa that go decide the rounding; what
    is smaller is a number of steps of 2 ** -9, to which adding 2 ** 14 rounds.
    """
    bits = tl.div_rn(x, tl.broadcast_to(scale, x.shape)).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.minimum(size, 0x43E00000)  # 448
    normal = (kept - 0x3C000000 + 0x7FFFF + ((kept >> 20) & 1)) >> 20
    small = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(kept < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
