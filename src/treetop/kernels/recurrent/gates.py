"""What the recurrence of a gated delta net reads of a layer's products, and the norm and gate of what it gives."""

from collections.abc import Callable

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.exact import LIBRARY, Functions
from treetop.kernels.recurrent.states import StateInputs
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, whatever a model's norms add."""


def rates_of(logs: Tensor) -> Tensor:
    """-e^logs. Of tensors without memory that is not computed: it would load PyTorch's compiler, in seconds."""
    return torch.empty_like(logs) if logs.device.type == "meta" else -logs.exp()


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1, keepdim=True)


def delta_inputs_reference(
    mixed: Tensor,
    gates: Tensor,
    rate: Tensor,
    bias: Tensor,
    key_heads: int,
    key_dim: int,
    functions: Functions = LIBRARY,
    total: Callable[[Tensor], Tensor] = _sum,
) -> StateInputs:
    """SiLU of what the convolution gives, as queries and keys of length 1, and values; decays and beta of the gates.

    mixed: [rows, n, channels], queries, keys, values. gates: [rows, n, 2 * heads], b, then a. rate: [heads], minus
    e^A_log, and bias: [heads], in float32 at least. Queries are multiplied by key_dim^-1/2. total: sums over the last
    dimension, which stays.
    """
    wide, keys = torch.promote_types(mixed.dtype, torch.float32), key_heads * key_dim
    q, k, v = functions.silu(mixed).to(wide).split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
    b, a = gates.to(wide).chunk(2, dim=-1)
    q, k = (x.unflatten(-1, (key_heads, key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(total(x * x) + LENGTH_EPS) for x in (q, k))
    g = rate.to(wide) * functions.softplus(a + bias.to(wide))
    return StateInputs(q * key_dim**-0.5, k, v.unflatten(-1, (len(rate), -1)).contiguous(), g, functions.sigmoid(b))


def gated_norm_reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    functions: Functions = LIBRARY,
    total: Callable[[Tensor], Tensor] = _sum,
) -> Tensor:
    """The norm of each head, times weight, times SiLU of a gate. total: as in `delta_inputs_reference`.

    x: [rows, n, heads, dim] float32 at least. gate: [rows, n, heads * dim]. weight: [dim]. Returns it as gate is.
    """
    dtype, wide = gate.dtype, x.dtype
    x = x.to(dtype).to(wide)
    normed = (x * torch.rsqrt(total(x * x) / x.shape[-1] + eps)).to(dtype) * weight
    return (normed * functions.silu(gate.to(wide)).view(x.shape)).to(dtype).flatten(-2)


def delta_inputs(
    mixed: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, key_heads: int, key_dim: int, gpu: GpuTraits
) -> StateInputs:
    """`delta_inputs_reference` in one launch."""
    rows, n, channels = mixed.shape
    heads, keys = len(rate), key_heads * key_dim
    value_dim = (channels - 2 * keys) // heads
    assert mixed.is_contiguous()
    assert gates.stride(2) == 1
    q, k, v = (
        torch.empty((rows, n, count, dim), dtype=torch.float32, device=mixed.device)
        for count, dim in ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim))
    )
    g, beta = (torch.empty((rows, n, heads), dtype=torch.float32, device=mixed.device) for _ in "gb")
    of_keys, of_values = -(-2 * key_heads // _HEADS), -(-heads // _HEADS)
    _inputs_kernel[(rows * n, of_keys + of_values)](
        q, k, v, g, beta, mixed, gates, rate, bias, key_dim**-0.5, LENGTH_EPS, n, gates.stride(0), gates.stride(1),
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, block_h=_HEADS, of_keys=of_keys,
        block=lanes(max(key_dim, value_dim)), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return StateInputs(q, k, v, g, beta)


_HEADS = 8
"""Heads of one token that a program has."""


@jit
def _inputs_kernel(
    q: Arg, k: Arg, v: Arg, g: Arg, beta: Arg, mixed: Arg, gates: Arg, rate: Arg, bias: Arg, scale: Arg, eps: Arg,
    n: Arg, gates_row: Arg, gates_token: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, block_h: constexpr,
    of_keys: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some heads of one token: of queries and keys, or of values. Grid (tokens, blocks of both and of values)."""
    pdl_wait(overlap, early=True)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, block)
    at = mixed + token * (2 * key_heads * key_dim + heads * value_dim)
    if part < of_keys:
        head = part * block_h + tl.arange(0, block_h)
        there = (head < 2 * key_heads)[:, None] & (lane < key_dim)[None, :]
        x = tl.load(at + head[:, None] * key_dim + lane[None, :], mask=there, other=0.0).to(tl.float32)
        x = (x * tl.sigmoid(x)).to(mixed.dtype.element_ty).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
        is_key = (head >= key_heads)[:, None]
        own = token * key_heads * key_dim + lane[None, :]
        tl.store(q + own + head[:, None] * key_dim, x * scale, mask=there & (is_key == 0))
        tl.store(k + own + (head - key_heads)[:, None] * key_dim, x, mask=there & is_key)
    else:
        head = (part - of_keys) * block_h + tl.arange(0, block_h)
        real = head < heads
        there = real[:, None] & (lane < value_dim)[None, :]
        inside = head[:, None] * value_dim + lane[None, :]
        x = tl.load(at + 2 * key_heads * key_dim + inside, mask=there, other=0.0).to(tl.float32)
        x = (x * tl.sigmoid(x)).to(mixed.dtype.element_ty).to(tl.float32)
        tl.store(v + token * heads * value_dim + inside, x, mask=there)
        gates_at = gates + token // n * gates_row + token % n * gates_token + head
        b = tl.load(gates_at, mask=real, other=0.0).to(tl.float32)
        a = tl.load(gates_at + heads, mask=real, other=0.0).to(tl.float32) + tl.load(bias + head, mask=real, other=0.0)
        log_decay = tl.load(rate + head, mask=real, other=0.0) * softplus(a)
        tl.store(g + token * heads + head, log_decay, mask=real)
        tl.store(beta + token * heads + head, tl.sigmoid(b), mask=real)


@jit
def softplus(a: Arg) -> Arg:
    """log(1 + e^a)."""
    small = tl.exp(tl.minimum(a, 20.0))
    grown = 1.0 + small
    exact = tl.where(grown == 1.0, 1.0, grown - 1.0)  # what of e^a the sum holds
    return tl.where(a > 20.0, a, tl.where(grown == 1.0, small, tl.log(grown) * (small / exact)))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gpu: GpuTraits) -> Tensor:
    """`gated_norm_reference` in one launch."""
    rows, n, heads, dim = x.shape
    x = x.contiguous()
    assert gate.stride(2) == 1
    out = torch.empty((rows, n, heads * dim), dtype=gate.dtype, device=x.device)
    _gated_norm_kernel[(rows * n, -(-heads // _HEADS))](
        out, x, gate, weight, eps, n, gate.stride(0), gate.stride(1),
        heads=heads, dim=dim, block_h=_HEADS, block=lanes(dim), overlap=gpu.can_overlap, num_warps=4,
        **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _gated_norm_kernel(
    out: Arg, x: Arg, gate: Arg, weight: Arg, eps: Arg, n: Arg, gate_row: Arg, gate_token: Arg,
    heads: constexpr, dim: constexpr, block_h: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some heads of one token. Grid (tokens, blocks of heads)."""
    pdl_wait(overlap, early=True)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    lane = tl.arange(0, block)
    there = (head < heads)[:, None] & (lane < dim)[None, :]
    inside = head[:, None] * dim + lane[None, :]
    numbers = tl.load(x + token * heads * dim + inside, mask=there, other=0.0)
    numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 1) / dim + eps)[:, None]
    normed = numbers.to(out.dtype.element_ty) * tl.load(weight + lane, mask=lane < dim, other=0.0)[None, :]
    at = gate + token // n * gate_row + token % n * gate_token + inside
    z = tl.load(at, mask=there, other=0.0).to(tl.float32)
    result = normed.to(tl.float32) * (z * tl.sigmoid(z))
    tl.store(out + token * heads * dim + inside, result.to(out.dtype.element_ty), mask=there)
