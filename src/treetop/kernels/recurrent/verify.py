"""Nodes of a tree from one state: no state a node, but products of pairs on one path.

    d_i = beta_i (v_i - (e^E_i k_i) M - sum of P_ij d_j over i's ancestors j)     P_ij = sum over c of k_ic k_jc e^D_ijc
    o_i = (e^E_i q_i) M + sum of Q_ij d_j over j and i itself                     Q_ij the same with q_i

E_i is the log of the decay from before the root to i, D_ij that from j to i. All that reads M is two products of T
rows. Sums are over ancestors alone and in their order: what is not finite stays with its node and those below it, and
what else stands in the tree changes nothing. Derivation: `docs/recurrent.md`.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.decay import NEVER, decays_to_end, path_decays, with_channels
from treetop.kernels.recurrent.head import (
    add_product,
    attend_state,
    by_channel,
    contiguous,
    finite,
    fold_updates,
    parts,
    summed_decays,
    values_of,
    weigh_tokens,
)
from treetop.kernels.recurrent.states import LayerStates, StateInputs, StateUpdates
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl


def verify_states_reference(
    states: LayerStates,
    rows: Tensor,
    inputs: StateInputs,
    parents: Tensor,
    stash: StateUpdates,
    dummy_row: int,
) -> Tensor:
    """Fold what is pending into each row's state, and what the recurrence gives at each node, whose updates it keeps.

    rows: [rows] int64. inputs: of the nodes. parents: [rows, T] int64, each before its children; node 0 is the root.
    stash: written, [rows, T, ...] or wider. The dummy row's state is not stored, and `count` is as it was.
    Returns [rows, T, heads, value_dim].
    """
    m = folded(states.state[rows], _of_rows(states.pending, rows), states.count[rows])
    live = (rows != dummy_row)[:, None, None, None]
    states.state[rows] = torch.where(live, m, states.state[rows])
    out, updates = along_paths(m, inputs, parents)
    n = parents.shape[1]
    for kept, new in ((stash.k, updates.k), (stash.d, updates.d), (stash.g, updates.g)):
        kept[: len(rows), :n].copy_(new)
    return out


def along_paths(m: Tensor, inputs: StateInputs, parents: Tensor) -> tuple[Tensor, StateUpdates]:
    """Outputs [rows, T, heads, value_dim] and updates of the nodes. m: [rows, heads, key_dim, value_dim]."""
    each = m.shape[1] // inputs.k.shape[2]
    q, k = inputs.q.repeat_interleave(each, dim=2), inputs.k.repeat_interleave(each, dim=2)
    logs = path_decays(with_channels(inputs.g, k), parents)  # [rows, T, 1 + T, heads, c]
    above, decays = logs[:, :, 1:, :, :1] != NEVER, logs.exp()
    start = decays[:, :, 0]
    out = _times_state(start * q, m)
    d = inputs.v if inputs.beta is None else inputs.beta[..., None] * (inputs.v - _times_state(start * k, m))
    found = []
    for node in range(parents.shape[1]):
        own, below = d[:, node], above[:, :, node]
        found.append(own)
        to_here = decays[:, :, 1 + node] * k[:, node, None]
        out = out + torch.where(below, (q * to_here).sum(dim=-1, keepdim=True) * own[:, None], 0)
        if inputs.beta is not None:
            taken = inputs.beta[..., None] * (k * to_here).sum(dim=-1, keepdim=True) * own[:, None]
            d = d - torch.where(below, taken, 0)
    return out, StateUpdates(inputs.k, torch.stack(found, dim=1), inputs.g)


def folded(m: Tensor, pending: StateUpdates, count: Tensor) -> Tensor:
    """States with the first `count` updates of each row. m: [rows, heads, key_dim, value_dim]. count: [rows] int64."""
    if not m.numel():  # a convolution alone
        return m
    there = (torch.arange(pending.d.shape[1], device=count.device) < count[:, None])[..., None, None]
    each = m.shape[1] // pending.k.shape[2]
    k, d = torch.where(there, pending.k, 0).repeat_interleave(each, dim=2), torch.where(there, pending.d, 0)
    to_end = decays_to_end(torch.where(there, with_channels(pending.g, k), 0)).exp()
    added = torch.einsum("bthk,bthv->bhkv", to_end[:, 1:] * k, d)
    return to_end[:, 0][..., None] * m + added


def _times_state(x: Tensor, m: Tensor) -> Tensor:
    """[rows, n, heads, key_dim] with each head's state: [rows, n, heads, value_dim]."""
    return torch.einsum("bthk,bhkv->bthv", x, m)


def _of_rows(pending: StateUpdates, rows: Tensor) -> StateUpdates:
    return StateUpdates(pending.k[rows], pending.d[rows], pending.g[rows])


def verify_states(
    states: LayerStates, rows: Tensor, inputs: StateInputs, parents: Tensor, stash: StateUpdates, dummy_row: int,
    gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """`verify_states_reference` in two launches, three for decays by channel: a state is loaded and stored once."""
    inputs = contiguous(inputs)
    (batch, n, heads, value_dim), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    out, pending = torch.empty_like(inputs.v), states.pending
    for each, kept in ((states.state, 3), (pending.k, 2), (pending.d, 2), (stash.k, 2), (stash.d, 2)):
        assert each[(0,) * (each.dim() - kept)].is_contiguous()
    assert pending.g[0, 0].is_contiguous()
    assert stash.g[0, 0].is_contiguous()
    assert rows.stride(0) == states.count.stride(0) == 1
    block_t = max(16, power_of_two(n))
    wide = block_t > 32 and (by_channel(inputs) or key_dim > 128)  # registers hold half as many values
    block_v = 16 if wide else values_of(value_dim)
    weights, starts, above = weigh_tokens(inputs, parents, None, block_t, gpu)
    _verify_kernel[(-(-value_dim // block_v), heads, batch)](
        out, states.state, pending.k, pending.d, pending.g, states.count, rows, inputs.q, inputs.k, inputs.v,
        inputs.g, inputs.g if inputs.beta is None else inputs.beta, weights, starts, above, stash.k, stash.d, stash.g,
        dummy_row, n,
        states.state.stride(0), *pending.k.stride()[:2], *pending.d.stride()[:2], *pending.g.stride()[:2],
        *stash.k.stride()[:2], *stash.d.stride()[:2], *stash.g.stride()[:2],
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, delta=inputs.beta is not None,
        per_channel=by_channel(inputs), block_t=block_t, block_v=block_v,
        width=min(_WIDTH, max(16, power_of_two(key_dim))), overlap=gpu.can_overlap, num_warps=_WARPS,
        **launch_options(gpu),
    )  # fmt: skip
    return out


_WIDTH = 64
"""Channels of the key in a piece of the state."""
_WARPS = 4


@jit
def _verify_kernel(
    out: Arg, state: Arg, pending_k: Arg, pending_d: Arg, pending_g: Arg, count: Arg, rows: Arg, q: Arg, k: Arg,
    v: Arg, g: Arg, beta: Arg, weights: Arg, starts: Arg, above_of: Arg, stash_k: Arg, stash_d: Arg, stash_g: Arg,
    dummy_row: Arg, n: Arg, state_row: Arg, pending_k_row: Arg, pending_k_token: Arg, pending_d_row: Arg,
    pending_d_token: Arg, pending_g_row: Arg, pending_g_token: Arg, stash_k_row: Arg, stash_k_token: Arg,
    stash_d_row: Arg, stash_d_token: Arg, stash_g_row: Arg, stash_g_token: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, delta: constexpr,
    per_channel: constexpr, block_t: constexpr, block_v: constexpr, width: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state. Grid (blocks of values, heads, rows). What is contiguous has no strides.

    The next piece of the state is on its way while one is folded and multiplied.
    """
    pdl_wait(overlap, early=True)
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    row = tl.load(rows + item)
    pending = tl.load(count + row)
    values = tl.program_id(0) * block_v + tl.arange(0, block_v)
    node = tl.arange(0, block_t)
    real = node < n
    token = item * n + node
    of_values = real[:, None] & (values < value_dim)[None, :]
    value_at = (token * heads + head)[:, None] * value_dim + values[None, :]
    base = state + row * state_row + head * key_dim * value_dim
    square = above_of + (item * block_t + node)[:, None] * block_t + node[None, :]
    of_head = head * key_dim if per_channel else head  # of decays
    of_q = tl.zeros([block_t, block_v], tl.float32)
    of_k = tl.zeros([block_t, block_v], tl.float32)
    key_lane = tl.arange(0, width)
    at = key_lane[:, None] * value_dim + values[None, :]
    coming = tl.load(base + at, mask=(key_lane < key_dim)[:, None] & (values < value_dim)[None, :], other=0.0)
    for piece in tl.static_range(0, key_dim, width):
        m = coming
        keys = piece + key_lane
        of_keys = real[:, None] & (keys < key_dim)[None, :]
        key_at = (token * key_heads + key_head)[:, None] * key_dim + keys[None, :]
        queries = tl.load(q + key_at, mask=of_keys, other=0.0)
        key = tl.load(k + key_at, mask=of_keys, other=0.0)
        if piece + width < key_dim:
            after = (keys + width < key_dim)[:, None] & (values < value_dim)[None, :]
            coming = tl.load(base + (piece + width) * value_dim + at, mask=after, other=0.0)
        m = fold_updates(
            m, pending_k + row * pending_k_row + key_head * key_dim,
            pending_d + row * pending_d_row + head * value_dim, pending_g + row * pending_g_row + of_head, pending,
            pending_k_token, pending_d_token, pending_g_token, keys, values, key_dim, value_dim,
            per_channel,
        )  # fmt: skip
        if row != dummy_row:
            inside = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
            tl.store(base + piece * value_dim + at, m, mask=inside)
        if (tl.program_id(0) == 0) & (head % (heads // key_heads) == 0):
            kept = stash_k + item * stash_k_row + node[:, None] * stash_k_token + key_head * key_dim + keys[None, :]
            tl.store(kept, key, mask=of_keys)
        if per_channel:
            decay_at = (token * heads + head)[:, None] * key_dim + keys[None, :]
            log_decay = tl.load(g + decay_at, mask=of_keys, other=0.0)
            if tl.program_id(0) == 0:
                kept = stash_g + item * stash_g_row + node[:, None] * stash_g_token + of_head + keys[None, :]
                tl.store(kept, log_decay, mask=of_keys)
            to_here = tl.exp(summed_decays(tl.load(square), finite(log_decay)))
            queries = queries * to_here
            key = key * to_here
        halves = parts(m)
        of_q = add_product(of_q, parts(queries), halves)
        of_k = add_product(of_k, parts(key), halves)
    value = tl.load(v + value_at, mask=of_values, other=0.0)
    rate = tl.load(beta + token * heads + head, mask=real, other=0.0)
    start = tl.load(starts + (item * heads + head) * block_t + node)
    above = tl.load(square)
    own = weights + (item * heads + head) * 2 * block_t * block_t
    found, d = attend_state(of_q, of_k, value, rate, start, above, own, node, block_t, delta)
    tl.store(out + value_at, found, mask=of_values)
    stash_at = stash_d + item * stash_d_row + node[:, None] * stash_d_token + head * value_dim + values[None, :]
    tl.store(stash_at, d, mask=of_values)
    if not per_channel:  # noqa: SIM102 - one for the compiler, one of programs
        if tl.program_id(0) == 0:
            log_decay = tl.load(g + token * heads + head, mask=real, other=0.0)
            tl.store(stash_g + item * stash_g_row + node * stash_g_token + head, log_decay, mask=real)
