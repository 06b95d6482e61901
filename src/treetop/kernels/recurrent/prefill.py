"""A prompt's chunk through the recurrence, from each row's own state: blocks of tokens, each one triangular system.

Within a block the sums of `verify` are over the tokens before each: d solves (I + L) d = R, with L strictly lower
triangular. Padding is the identity: it neither decays a state nor adds to it.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.decay import by_channel, chain_decays
from treetop.kernels.recurrent.head import MOST_VALUES, PRODUCTS, attend_state
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
    v, g = torch.where(there, inputs.v, 0), torch.where(there, by_channel(inputs.g, k), 0)
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
    """`prefill_states_reference` in one launch, in blocks of 16 tokens; what stands at padding is 0."""
    if inputs.g.dim() > inputs.v.dim() - 1:  # decays by channel
        return prefill_states_reference(states, rows, inputs, valid)
    (batch, n, heads, value_dim), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    q, k, v, g = (each.contiguous() for each in (inputs.q, inputs.k, inputs.v, inputs.g))
    beta = g if inputs.beta is None else inputs.beta.contiguous()
    assert rows.stride(0) == 1
    assert states.state[0].is_contiguous()
    out = torch.zeros_like(v)
    block_v = min(MOST_VALUES, max(16, power_of_two(value_dim)))
    _prefill_kernel[(-(-value_dim // block_v), heads, batch)](
        out, states.state, rows, q, k, v, g, beta, valid.sum(dim=1), n, states.state.stride(0),
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, delta=inputs.beta is not None,
        block_t=16, block_v=block_v, width=16, overlap=gpu.can_overlap, num_warps=4,
        **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _prefill_kernel(
    out: Arg, state: Arg, rows: Arg, q: Arg, k: Arg, v: Arg, g: Arg, beta: Arg, counts: Arg, n: Arg, state_row: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, delta: constexpr,
    block_t: constexpr, block_v: constexpr, width: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state, block after block of tokens. Grid (blocks of values, heads, rows)."""
    pdl_wait(overlap, early=True)
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    count = tl.load(counts + item).to(tl.int32)
    values = tl.program_id(0) * block_v + tl.arange(0, block_v)
    token = tl.arange(0, block_t)
    above = token[:, None] >= token[None, :]
    base = state + tl.load(rows + item) * state_row + head * key_dim * value_dim
    for first in range(0, count, block_t):
        real = first + token < count
        place = item * n + first + token
        of_values = real[:, None] & (values < value_dim)[None, :]
        value_at = (place * heads + head)[:, None] * value_dim + values[None, :]
        value = tl.load(v + value_at, mask=of_values, other=0.0)
        log_decay = tl.load(g + place * heads + head, mask=real, other=0.0)
        rate = tl.load(beta + place * heads + head, mask=real, other=0.0)
        of_q = tl.zeros([block_t, block_v], tl.float32)
        of_k = tl.zeros([block_t, block_v], tl.float32)
        seen = tl.zeros([block_t, block_t], tl.float32)
        pairs = tl.zeros([block_t, block_t], tl.float32)
        for piece in range(0, key_dim, width):
            keys = piece + tl.arange(0, width)
            inside = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
            of_keys = real[:, None] & (keys < key_dim)[None, :]
            key_at = (place * key_heads + key_head)[:, None] * key_dim + keys[None, :]
            m = tl.load(base + keys[:, None] * value_dim + values[None, :], mask=inside, other=0.0)
            queries = tl.load(q + key_at, mask=of_keys, other=0.0)
            key = tl.load(k + key_at, mask=of_keys, other=0.0)
            of_q = tl.dot(queries, m, of_q, input_precision=PRODUCTS)
            of_k = tl.dot(key, m, of_k, input_precision=PRODUCTS)
            seen = tl.dot(queries, tl.trans(key), seen, input_precision=PRODUCTS)
            pairs = tl.dot(key, tl.trans(key), pairs, input_precision=PRODUCTS)
        found, d = attend_state(of_q, of_k, seen, pairs, value, log_decay, rate, above, token, block_t, delta)
        tl.store(out + value_at, found, mask=of_values)
        to_end = tl.exp(tl.sum(tl.where(token[:, None] < token[None, :], log_decay[None, :], 0.0), 1))
        whole = tl.exp(tl.sum(log_decay, 0))
        for piece in range(0, key_dim, width):
            keys = piece + tl.arange(0, width)
            inside = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
            of_keys = real[:, None] & (keys < key_dim)[None, :]
            key_at = (place * key_heads + key_head)[:, None] * key_dim + keys[None, :]
            at = base + keys[:, None] * value_dim + values[None, :]
            key = tl.load(k + key_at, mask=of_keys, other=0.0) * to_end[:, None]
            m = tl.load(at, mask=inside, other=0.0) * whole
            tl.store(at, tl.dot(tl.trans(key), d, m, input_precision=PRODUCTS), mask=inside)
        tl.debug_barrier()  # threads may read what others have written
