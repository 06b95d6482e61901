"""One token a row of a gated delta net, from the product before it to the product behind it, in one launch.

What a plain round needs of a layer is little arithmetic between one load and one store of each state, so launches and
trips through memory are what it would spend: convolution, gates, recurrence, norm and gate are one program a head,
which holds the head's whole state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.convolution import path_conv_reference
from treetop.kernels.recurrent.gates import LENGTH_EPS, delta_inputs_reference, gated_norm_reference, softplus
from treetop.kernels.recurrent.states import LayerStates, StateUpdates
from treetop.kernels.recurrent.verify import verify_states_reference
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

_MOST_VALUES = 256
"""Values of a head, all of which are one program's."""
_WIDTH = 32
"""Channels of the key in a piece of the state."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """What a layer has besides its products.

    conv: [channels, taps]. norm: [value_dim]. eps: of the norm. rate, bias: [heads], of decays. of_beta: times beta.
    """

    conv: Tensor
    norm: Tensor
    eps: float
    rate: Tensor
    bias: Tensor
    key_heads: int
    key_dim: int
    of_beta: float = 1.0

    @property
    def heads(self) -> int:
        return len(self.rate)

    @property
    def value_dim(self) -> int:
        return len(self.norm)


def steps_whole(value_dim: int) -> bool:
    """Whether a program has all values of a head."""
    return value_dim <= _MOST_VALUES


def step_delta_reference(
    states: LayerStates,
    rows: Tensor,
    mixed: Tensor,
    z: Tensor,
    gates: Tensor,
    net: DeltaNet,
    kept: Tensor,
    stash: StateUpdates,
    dummy_row: int,
) -> Tensor:
    """The convolution, `gates.delta_inputs`, `verify_states` and `gates.gated_norm` of one node a row.

    rows: [rows] int64. mixed: [rows, 1, channels], queries, keys and values. z: [rows, 1, heads * value_dim].
    gates: [rows, 1, 2 * heads], b, then a. kept, stash: of the nodes, written as by `path_conv` and `verify_states`.
    Returns [rows, 1, heads * value_dim].
    """
    parents = torch.zeros((len(rows), 1), dtype=torch.int64, device=rows.device)
    windows = torch.arange(net.conv.shape[1] - 1, device=rows.device).expand(len(rows), 1, -1)
    along = path_conv_reference(states.conv, rows, mixed, windows, net.conv, kept=kept)
    inputs = delta_inputs_reference(along, gates, net.rate, net.bias, net.key_heads, net.key_dim).with_beta(net.of_beta)
    out = verify_states_reference(states, rows, inputs, parents, stash, dummy_row)
    return gated_norm_reference(out, z, net.norm, net.eps)


def step_delta(
    states: LayerStates, rows: Tensor, mixed: Tensor, z: Tensor, gates: Tensor, net: DeltaNet, kept: Tensor,
    stash: StateUpdates, dummy_row: int, gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """`step_delta_reference` in one launch."""
    (batch, n, channels), taps, pending = mixed.shape, net.conv.shape[1], states.pending
    heads, key_heads, key_dim, value_dim = net.heads, net.key_heads, net.key_dim, net.value_dim
    assert n == 1
    assert channels == 2 * key_heads * key_dim + heads * value_dim
    for each, inner in ((states.state, 3), (pending.k, 2), (pending.d, 2), (stash.k, 2), (stash.d, 2)):
        assert each[(0,) * (each.dim() - inner)].is_contiguous()
    assert pending.g.dim() == 3
    assert states.conv[0].is_contiguous()
    assert net.conv.is_contiguous()
    for last in (mixed, z, gates, kept, pending.g, stash.g, rows, states.count):
        assert last.stride(-1) == 1
    out = torch.empty((batch, 1, heads * value_dim), dtype=z.dtype, device=z.device)
    _step_kernel[(heads, batch)](
        out, states.state, states.conv, pending.k, pending.d, pending.g, states.count, rows, mixed, z, gates, net.conv,
        net.norm, net.rate, net.bias, kept, stash.k, stash.d, stash.g, dummy_row, key_dim**-0.5, LENGTH_EPS, net.eps,
        net.of_beta, mixed.stride(0), z.stride(0), gates.stride(0), states.state.stride(0), states.conv.stride(0),
        *pending.k.stride()[:2], *pending.d.stride()[:2], *pending.g.stride()[:2], kept.stride(0), stash.k.stride(0),
        stash.d.stride(0), stash.g.stride(0), taps=taps, heads=heads, key_heads=key_heads, key_dim=key_dim,
        value_dim=value_dim, block_k=power_of_two(key_dim), block_v=power_of_two(value_dim), overlap=gpu.can_overlap,
        width=min(_WIDTH, power_of_two(key_dim)), num_warps=8, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _step_kernel(
    out: Arg, state: Arg, conv: Arg, pending_k: Arg, pending_d: Arg, pending_g: Arg, count: Arg, rows: Arg, mixed: Arg,
    z: Arg, gates: Arg, taps_of: Arg, norm: Arg, rate: Arg, bias: Arg, kept: Arg, stash_k: Arg, stash_d: Arg,
    stash_g: Arg, dummy_row: Arg, scale: Arg, length_eps: Arg, eps: Arg, of_beta: Arg, mixed_row: Arg, z_row: Arg,
    gates_row: Arg, state_row: Arg, conv_row: Arg, pending_k_row: Arg, pending_k_token: Arg, pending_d_row: Arg,
    pending_d_token: Arg, pending_g_row: Arg, pending_g_token: Arg, kept_row: Arg, stash_k_row: Arg, stash_d_row: Arg,
    stash_g_row: Arg,
    taps: constexpr, heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr,
    block_k: constexpr, block_v: constexpr, width: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One head of one row. Grid (heads, rows). A piece of the state is on its way while one is folded and read."""
    head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    each: constexpr = heads // key_heads
    key_head = head // each
    keys, values = tl.arange(0, block_k), tl.arange(0, block_v)
    of_keys, of_values = keys < key_dim, values < value_dim
    pdl_wait(overlap, early=True)
    row = tl.load(rows + item)
    lane = tl.arange(0, width)
    state_at = state + row * state_row + head * (key_dim * value_dim) + lane[:, None] * value_dim + values[None, :]
    coming = tl.load(state_at, mask=(lane < key_dim)[:, None] & of_values[None, :], other=0.0)
    pending = tl.load(count + row)
    x, past = mixed + item * mixed_row, conv + row * conv_row
    first: constexpr = key_heads * key_dim
    own_keys, own_values = key_head * key_dim + keys, 2 * first + head * value_dim + values
    query, new_q = _along(x, past, taps_of, own_keys, of_keys, taps)
    key, new_k = _along(x, past, taps_of, first + own_keys, of_keys, taps)
    value, new_v = _along(x, past, taps_of, own_values, of_values, taps)
    of_query = tl.rsqrt(tl.sum(query * query, 0) + length_eps)
    of_key = tl.rsqrt(tl.sum(key * key, 0) + length_eps)
    both = tl.sum(query * of_query * scale * (key * of_key), 0)
    gates_at = gates + item * gates_row + head
    beta = tl.sigmoid(tl.load(gates_at).to(tl.float32)) * of_beta
    log_decay = tl.load(rate + head) * softplus(tl.load(gates_at + heads).to(tl.float32) + tl.load(bias + head))
    kept_at = kept + item * kept_row
    tl.store(kept_at + own_values, new_v, mask=of_values)
    if head % each == 0:
        tl.store(kept_at + own_keys, new_q, mask=of_keys)
        tl.store(kept_at + first + own_keys, new_k, mask=of_keys)
        tl.store(stash_k + item * stash_k_row + own_keys, key * of_key, mask=of_keys)
    tl.store(stash_g + item * stash_g_row + head, log_decay)
    decay = tl.exp(log_decay)
    by_query = tl.zeros([width, block_v], tl.float32)
    by_key = tl.zeros([width, block_v], tl.float32)
    added_at = pending_d + row * pending_d_row + head * value_dim + values
    before_at = pending_k + row * pending_k_row + key_head * key_dim
    decayed_at = pending_g + row * pending_g_row + head
    for piece in tl.static_range(0, block_k, width):
        m = coming
        own = piece + lane
        there = own < key_dim
        inside = there[:, None] & of_values[None, :]
        if piece + width < block_k:
            after = (own + width < key_dim)[:, None] & of_values[None, :]
            coming = tl.load(state_at + (piece + width) * value_dim, mask=after, other=0.0)
        for token in range(0, pending):
            before = tl.load(before_at + token * pending_k_token + own, mask=there, other=0.0)
            added = tl.load(added_at + token * pending_d_token, mask=of_values, other=0.0)
            decayed = tl.exp(tl.load(decayed_at + token * pending_g_token))
            m = m * decayed + before[:, None] * added[None, :]
        if row != dummy_row:
            tl.store(state_at + piece * value_dim, m, mask=inside)
        m = m * decay
        some_q, _ = _along(x, past, taps_of, key_head * key_dim + own, there, taps)
        some_k, _ = _along(x, past, taps_of, first + key_head * key_dim + own, there, taps)
        by_query += m * (some_q * of_query * scale)[:, None]
        by_key += m * (some_k * of_key)[:, None]
    d = beta * (value - tl.sum(by_key, 0))
    found = tl.sum(by_query, 0) + d * both
    tl.store(stash_d + item * stash_d_row + head * value_dim + values, d, mask=of_values)
    dtype: constexpr = out.dtype.element_ty
    found = tl.where(of_values, found, 0.0).to(dtype).to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found, 0) / value_dim + eps)
    normed = (found.to(dtype) * tl.load(norm + values, mask=of_values, other=0.0)).to(tl.float32)
    gate = tl.load(z + item * z_row + head * value_dim + values, mask=of_values, other=0.0).to(tl.float32)
    result = (normed * (gate * tl.sigmoid(gate))).to(dtype)
    tl.store(out + (item * heads + head) * value_dim + values, result, mask=of_values)


@jit
def _along(x: Arg, past: Arg, weight: Arg, channel: Arg, there: Arg, taps: constexpr) -> Arg:
    """SiLU of the convolution in float32, rounded before and behind it as by launches of their own; and its newest
    input."""
    new = tl.load(x + channel, mask=there, other=0.0)
    total = new.to(tl.float32) * tl.load(weight + channel * taps + (taps - 1), mask=there, other=0.0).to(tl.float32)
    for back in tl.static_range(1, taps):
        tap = taps - 1 - back
        read = tl.load(past + channel * (taps - 1) + tap, mask=there, other=0.0).to(tl.float32)
        total += read * tl.load(weight + channel * taps + tap, mask=there, other=0.0).to(tl.float32)
    total = total.to(x.dtype.element_ty).to(tl.float32)
    return (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32), new
