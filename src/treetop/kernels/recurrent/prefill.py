"""A prompt's chunk through the recurrence, from each row's own state: blocks of tokens, each one triangular system.

Within a block the sums of `verify` are over the tokens before each: d solves (I + L) d = R, with L strictly lower
triangular. Padding is the identity: it neither decays a state nor adds to it.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.decay import chain_decays, with_channels
from treetop.kernels.recurrent.head import (
    add_product,
    attend_state,
    by_channel,
    contiguous,
    finite,
    parts,
    summed_decays,
    transposed,
    values_of,
    weigh_tokens,
)
from treetop.kernels.recurrent.states import LayerStates, StateInputs
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

BLOCK = 64
"""Tokens of a block."""


def prefill_states_reference(states: LayerStates, rows: Tensor, inputs: StateInputs, valid: Tensor) -> Tensor:
    """What the recurrence gives at each token of a chunk; states move on to the last valid token of each row.

    rows: [rows] int64, whose pending updates were folded before. valid: [rows, n] bool, tokens before padding, of which
    the dummy row has none. Returns [rows, n, heads, value_dim]; what stands at padding means nothing.
    """
    m = states.state[rows]
    each = m.shape[1] // inputs.k.shape[2]
    there = valid[..., None, None]
    q, k = (torch.where(there, x, 0).repeat_interleave(each, dim=2) for x in (inputs.q, inputs.k))
    v, g = torch.where(there, inputs.v, 0), torch.where(there, with_channels(inputs.g, k), 0)
    beta = None if inputs.beta is None else torch.where(valid[..., None], inputs.beta, 0)
    outs = []
    for first in range(0, valid.shape[1], BLOCK):
        at = slice(first, first + BLOCK)
        out, m = _block(m, q[:, at], k[:, at], v[:, at], g[:, at], None if beta is None else beta[:, at])
        outs.append(out)
    states.state[rows] = m
    return torch.cat(outs, dim=1)


def _block(m: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and the states after it. q, k: [rows, n, heads, key_dim], of every value head."""
    decays = chain_decays(g).exp()  # [rows, n, 1 + n, heads, c]
    start, between = decays[:, :, 0], decays[:, :, 1:]
    d = v
    if beta is not None:
        wanted = beta[..., None] * (v - torch.einsum("bthk,bhkv->bthv", start * k, m))
        lower = beta.transpose(1, 2)[..., None] * _pairs(k, k, between).tril(-1)
        solved = torch.linalg.solve_triangular(lower, wanted.transpose(1, 2), upper=False, unitriangular=True)
        d = solved.transpose(1, 2)
    out = torch.einsum("bthk,bhkv->bthv", start * q, m) + torch.einsum("bhts,bshv->bthv", _pairs(q, k, between), d)
    after = torch.einsum("bthk,bthv->bhkv", decays[:, -1, 1:] * k, d)
    return out, start[:, -1][..., None] * m + after


def _pairs(a: Tensor, b: Tensor, between: Tensor) -> Tensor:
    """[rows, heads, n, n]: sums over channels of a_i b_j e^D_ij."""
    if between.shape[-1] == 1:
        return torch.einsum("bthk,bshk->bhts", a, b) * between[..., 0].permute(0, 3, 1, 2)
    return torch.einsum("bthk,bshk,btshk->bhts", a, b, between)


def prefill_states(states: LayerStates, rows: Tensor, inputs: StateInputs, valid: Tensor, gpu: GpuTraits) -> Tensor:
    """`prefill_states_reference` in two launches, three for decays by channel; what stands at padding is 0."""
    inputs = contiguous(inputs)
    (batch, n, heads, value_dim), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    assert rows.stride(0) == 1
    assert states.state[0].is_contiguous()
    out, counts, block_v = torch.zeros_like(inputs.v), valid.sum(dim=1), values_of(value_dim)
    block_t = 16 if n <= 16 else BLOCK // 2 if by_channel(inputs) else BLOCK
    weights, starts, _ = weigh_tokens(inputs, None, counts, block_t, gpu)
    _prefill_kernel[(-(-value_dim // block_v), heads, batch)](
        out, states.state, rows, inputs.q, inputs.k, inputs.v, inputs.g,
        inputs.g if inputs.beta is None else inputs.beta, weights, starts, counts, n, states.state.stride(0),
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, delta=inputs.beta is not None,
        per_channel=by_channel(inputs), block_t=block_t, block_v=block_v,
        width=min(_WIDTH, max(16, power_of_two(key_dim))), overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


_WIDTH = 32
"""Channels of the key in a piece of the state."""


@jit
def _prefill_kernel(
    out: Arg, state: Arg, rows: Arg, q: Arg, k: Arg, v: Arg, g: Arg, beta: Arg, weights: Arg, starts: Arg,
    counts: Arg, n: Arg, state_row: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, delta: constexpr,
    per_channel: constexpr, block_t: constexpr, block_v: constexpr, width: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state, block after block of tokens. Grid (blocks of values, heads, rows)."""
    pdl_wait(overlap, early=True)
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    count = tl.load(counts + item).to(tl.int32)
    values = tl.program_id(0) * block_v + tl.arange(0, block_v)
    token = tl.arange(0, block_t)
    key_lane = tl.arange(0, width)
    later = token[:, None] < token[None, :]
    above = (token[:, None] >= token[None, :]).to(tl.float32)
    base = state + tl.load(rows + item) * state_row + head * key_dim * value_dim
    base += key_lane[:, None] * value_dim + values[None, :]
    for first in tl.range(0, count, block_t, num_stages=1):
        real = first + token < count
        place = item * n + first + token
        of_values = real[:, None] & (values < value_dim)[None, :]
        value_at = (place * heads + head)[:, None] * value_dim + values[None, :]
        key_at = (place * key_heads + key_head)[:, None] * key_dim + key_lane[None, :]
        decay_at = (place * heads + head)[:, None] * key_dim + key_lane[None, :]
        of_q = tl.zeros([block_t, block_v], tl.float32)
        of_k = tl.zeros([block_t, block_v], tl.float32)
        for piece in tl.range(0, key_dim, width, num_stages=1):
            inside = (piece + key_lane < key_dim)[:, None] & (values < value_dim)[None, :]
            of_keys = real[:, None] & (piece + key_lane < key_dim)[None, :]
            m = parts(tl.load(base + piece * value_dim, mask=inside, other=0.0))
            queries = tl.load(q + key_at + piece, mask=of_keys, other=0.0)
            if per_channel:
                log_decay = tl.load(g + decay_at + piece, mask=of_keys, other=0.0)
                to_here = tl.exp(summed_decays(above, finite(log_decay)))
                queries = queries * to_here
            of_q = add_product(of_q, parts(queries), m)
            if delta:
                key = tl.load(k + key_at + piece, mask=of_keys, other=0.0)
                if per_channel:
                    key = key * to_here
                of_k = add_product(of_k, parts(key), m)
        block = (item * tl.cdiv(n, block_t) + first // block_t) * heads + head
        start = tl.load(starts + block * block_t + token)
        value = tl.load(v + value_at, mask=of_values, other=0.0)
        rate = tl.load(beta + place * heads + head, mask=real, other=0.0)
        own = weights + block * 2 * block_t * block_t
        found, d = attend_state(of_q, of_k, value, rate, start, above, own, token, block_t, delta)
        tl.store(out + value_at, found, mask=of_values)
        if not per_channel:
            log_decay = tl.load(g + place * heads + head, mask=real, other=0.0)
            to_end = tl.exp(tl.sum(tl.where(later, log_decay[None, :], 0.0), 1))[:, None]
            whole = tl.exp(tl.sum(log_decay, 0))
        halves = parts(d)
        for piece in tl.range(0, key_dim, width, num_stages=1):
            inside = (piece + key_lane < key_dim)[:, None] & (values < value_dim)[None, :]
            of_keys = real[:, None] & (piece + key_lane < key_dim)[None, :]
            if per_channel:
                log_decay = tl.load(g + decay_at + piece, mask=of_keys, other=0.0)
                to_end = tl.exp(summed_decays(later, log_decay))
                whole = tl.exp(tl.sum(log_decay, 0))[:, None]
            key = tl.load(k + key_at + piece, mask=of_keys, other=0.0) * to_end
            at = base + piece * value_dim
            m = tl.load(at, mask=inside, other=0.0) * whole
            tl.store(at, add_product(m, transposed(parts(key)), halves), mask=inside)
        tl.debug_barrier()  # threads may read what others have written
