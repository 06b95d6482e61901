"""One token after the other, where a row's bits depend on its tokens alone (`--exactness bits`).

A token's arithmetic is one and the same in a prefill, in a round and where pending updates are folded:

    M <- e^g M;  d = beta (v - k M);  M <- M + k^T d;  o = q M

each number rounded once an operation, sums over the key in one order. So a state has the bits of its tokens, whatever
chunks, trees and rounds they came in, and a node has those of its path. A node's state stands in no table: it is made
anew from the row's by (k, d, g) of the path, whose products are the same again.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.exact import BY_ELEMENT, sum_by_halves
from treetop.kernels.recurrent.decay import with_channels
from treetop.kernels.recurrent.gates import delta_inputs_reference, gated_norm_reference
from treetop.kernels.recurrent.head import by_channel, contiguous, values_of
from treetop.kernels.recurrent.states import LayerStates, LinearStates, StateInputs, StateUpdates
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl


def verify_in_turn(
    states: LayerStates, rows: Tensor, inputs: StateInputs, parents: Tensor, stash: StateUpdates, dummy_row: int
) -> Tensor:
    """As `verify_states_reference`. Of the nodes of one layer a state each is there meanwhile."""
    m = _folded(states.state[rows], states.pending, rows, states.count)
    states.state[rows] = torch.where((rows != dummy_row)[:, None, None, None], m, states.state[rows])
    item = torch.arange(len(rows), device=rows.device)
    nodes = parents.shape[1]
    after = m[:, None].repeat(1, nodes, 1, 1, 1)
    outs = []
    for node in range(nodes):
        out, d, after[:, node] = _token(after[item, parents[:, node]] if node else m, inputs, node)
        stash.d[: len(rows), node] = d
        outs.append(out)
    stash.k[: len(rows), :nodes] = inputs.k
    stash.g[: len(rows), :nodes] = inputs.g
    return torch.stack(outs, dim=1)


def prefill_in_turn(states: LayerStates, rows: Tensor, inputs: StateInputs, valid: Tensor) -> Tensor:
    """As `prefill_states_reference`."""
    m, outs = states.state[rows], []
    for token in range(valid.shape[1]):
        out, _, after = _token(m, inputs, token)
        m = torch.where(valid[:, token, None, None, None], after, m)
        outs.append(out)
    states.state[rows] = m
    return torch.stack(outs, dim=1)


def fold_in_turn(states: LinearStates, rows: Tensor) -> None:
    """As `fold_states_reference`."""
    for layer in range(states.state.shape[0]):
        of = states.layer(layer)
        of.state[rows] = _folded(of.state[rows], of.pending, rows, of.count)
    states.count.index_fill_(0, rows, 0)


def _folded(m: Tensor, pending: StateUpdates, rows: Tensor, count: Tensor) -> Tensor:
    """m: [rows, heads, key_dim, value_dim]."""
    if not m.numel():  # a convolution alone
        return m
    each = m.shape[1] // pending.k.shape[2]
    for token in range(pending.d.shape[1]):
        k, d, g = (x[rows, token] for x in (pending.k, pending.d, pending.g))
        after = _added(_decayed(m, g), k.repeat_interleave(each, dim=1), d)
        m = torch.where((token < count[rows])[:, None, None, None], after, m)
    return m


def _token(m: Tensor, inputs: StateInputs, token: int) -> tuple[Tensor, Tensor, Tensor]:
    """(output, d, state after it) of a token a row. m: [rows, heads, key_dim, value_dim]."""
    each = m.shape[1] // inputs.k.shape[2]
    q, k = (x[:, token].repeat_interleave(each, dim=1) for x in (inputs.q, inputs.k))
    m, d = _decayed(m, inputs.g[:, token]), inputs.v[:, token]
    if inputs.beta is not None:
        d = inputs.beta[:, token, :, None] * (d - _times(k, m))
    m = _added(m, k, d)
    return _times(q, m), d, m


def _decayed(m: Tensor, g: Tensor) -> Tensor:
    """g: [rows, heads] or [rows, heads, key_dim]."""
    return with_channels(g[:, None], m[:, None, :, :, 0])[:, 0, ..., None].exp() * m


def _added(m: Tensor, k: Tensor, d: Tensor) -> Tensor:
    return m + k[..., None] * d[..., None, :]


def _times(x: Tensor, m: Tensor) -> Tensor:
    """[rows, heads, key_dim] with each head's state."""
    return sum_by_halves(x[..., None] * m)


def delta_inputs_by_element(
    mixed: Tensor, gates: Tensor, rate: Tensor, bias: Tensor, key_heads: int, key_dim: int
) -> StateInputs:
    """`delta_inputs_reference` by IEEE's operations."""
    return delta_inputs_reference(mixed, gates, rate, bias, key_heads, key_dim, BY_ELEMENT, _sum)


def gated_norm_by_element(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_norm_reference` by IEEE's operations."""
    return gated_norm_reference(x, gate, weight, eps, BY_ELEMENT, _sum)


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, which stays."""
    return sum_by_halves(x[..., None])


# ----------------------------------------------------------------------------------------------------- on a GPU


def verify_in_turn_kernel(
    states: LayerStates, rows: Tensor, inputs: StateInputs, parents: Tensor, stash: StateUpdates, dummy_row: int,
    gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """`verify_in_turn` in one launch."""
    return _walk(states, rows, inputs, parents, None, stash, dummy_row, gpu)


def prefill_in_turn_kernel(
    states: LayerStates, rows: Tensor, inputs: StateInputs, valid: Tensor, gpu: GpuTraits
) -> Tensor:
    """`prefill_in_turn` in one launch; what stands at padding is 0."""
    return _walk(states, rows, inputs, None, valid.sum(dim=1), states.pending, -1, gpu)


def fold_in_turn_kernel(states: LinearStates, rows: Tensor, gpu: GpuTraits) -> None:
    """`fold_in_turn`, a launch a layer."""
    key_heads, heads = states.pending.k.shape[3], states.state.shape[2]
    if not heads:  # a convolution alone
        states.count.index_fill_(0, rows, 0)
        return
    of = states.state.new_zeros(len(rows), 0, 1, 1)
    k, v = of.expand(-1, -1, key_heads, states.state.shape[3]), of.expand(-1, -1, heads, states.state.shape[4])
    g = of.expand(-1, -1, heads, states.state.shape[3]) if states.pending.g.dim() > 4 else v[..., 0]
    nothing = StateInputs(k, k, v, g, v[..., 0])
    for layer in range(states.state.shape[0]):
        of_layer = states.layer(layer)
        _walk(of_layer, rows, nothing, None, torch.zeros_like(rows), of_layer.pending, -1, gpu)
    states.count.index_fill_(0, rows, 0)


def _walk(
    states: LayerStates, rows: Tensor, inputs: StateInputs, parents: Tensor | None, counts: Tensor | None,
    stash: StateUpdates, dummy_row: int, gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """Nodes with `parents`, which leave the state as it was; else `counts` tokens of a chunk [rows], which move it."""
    inputs = contiguous(inputs)
    (batch, n, heads, value_dim), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    pending, block_v = states.pending, values_of(value_dim)
    for each, kept in ((states.state, 3), (pending.k, 2), (pending.d, 2), (stash.k, 2), (stash.d, 2)):
        assert each[(0,) * (each.dim() - kept)].is_contiguous()
    assert pending.g[0, 0].is_contiguous()
    assert stash.g[0, 0].is_contiguous()
    assert rows.stride(0) == states.count.stride(0) == 1
    out = torch.zeros_like(inputs.v)
    _walk_kernel[(-(-value_dim // block_v), heads, batch)](
        out, states.state, pending.k, pending.d, pending.g, states.count, rows, inputs.q, inputs.k, inputs.v,
        inputs.g, inputs.g if inputs.beta is None else inputs.beta, rows if parents is None else parents,
        rows if counts is None else counts, stash.k, stash.d, stash.g, dummy_row, n,
        0 if parents is None else parents.stride(0), states.state.stride(0), *pending.k.stride()[:2],
        *pending.d.stride()[:2], *pending.g.stride()[:2], *stash.k.stride()[:2], *stash.d.stride()[:2],
        *stash.g.stride()[:2],
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, delta=inputs.beta is not None,
        per_channel=by_channel(inputs), climbs=parents is not None, block_k=max(16, power_of_two(key_dim)),
        block_v=block_v, overlap=gpu.can_overlap, num_warps=4, enable_fp_fusion=False, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _decay_of(log_decay: Arg, keys: Arg, key_dim: constexpr, per_channel: constexpr) -> Arg:
    """Of a head: a number, or one by channel [keys, 1]. log_decay: of this head and token."""
    if per_channel:
        log_decay = log_decay + keys
        decay = tl.exp(tl.load(log_decay, mask=keys < key_dim, other=0.0))[:, None]
    else:
        decay = tl.exp(tl.load(log_decay))
    return decay


@jit
def _updated(m: Arg, key: Arg, d: Arg, decay: Arg) -> Arg:
    return m * decay + key[:, None] * d[None, :]


@jit
def _walk_kernel(
    out: Arg, state: Arg, pending_k: Arg, pending_d: Arg, pending_g: Arg, count: Arg, rows: Arg, q: Arg, k: Arg,
    v: Arg, g: Arg, beta: Arg, parents: Arg, counts: Arg, stash_k: Arg, stash_d: Arg, stash_g: Arg, dummy_row: Arg,
    n: Arg, parents_row: Arg, state_row: Arg, pending_k_row: Arg, pending_k_token: Arg, pending_d_row: Arg,
    pending_d_token: Arg, pending_g_row: Arg, pending_g_token: Arg, stash_k_row: Arg, stash_k_token: Arg,
    stash_d_row: Arg, stash_d_token: Arg, stash_g_row: Arg, stash_g_token: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, value_dim: constexpr, delta: constexpr,
    per_channel: constexpr, climbs: constexpr, block_k: constexpr, block_v: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state. Grid (blocks of values, heads, rows). No product is fused with a sum."""
    pdl_wait(overlap, early=True)
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    row = tl.load(rows + item)
    keys = tl.arange(0, block_k)
    values = tl.program_id(0) * block_v + tl.arange(0, block_v)
    of_keys, of_values = keys < key_dim, values < value_dim
    at = state + row * state_row + head * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    inside = of_keys[:, None] & of_values[None, :]
    m = tl.load(at, mask=inside, other=0.0)
    of_head = head * key_dim if per_channel else head  # of decays
    of_heads = heads * key_dim if per_channel else heads
    for token in range(0, tl.load(count + row)):
        key_at = pending_k + row * pending_k_row + token * pending_k_token + key_head * key_dim
        d_at = pending_d + row * pending_d_row + token * pending_d_token + head * value_dim
        g_at = pending_g + row * pending_g_row + token * pending_g_token + of_head
        decay = _decay_of(g_at, keys, key_dim, per_channel)
        key, d = tl.load(key_at + keys, mask=of_keys, other=0.0), tl.load(d_at + values, mask=of_values, other=0.0)
        m = _updated(m, key, d, decay)
    nodes = n
    if climbs:
        if row != dummy_row:
            tl.store(at, m, mask=inside)
    else:
        nodes = tl.load(counts + item).to(tl.int32)
    before = item * n
    stash_at = stash_d + item * stash_d_row + head * value_dim + values
    last = -1  # the node that m is the state after
    for node in range(0, nodes):
        if climbs:
            parent = -1
            if node > 0:
                parent = tl.load(parents + item * parents_row + node).to(tl.int32)
            if parent != last:
                tl.debug_barrier()  # threads may read what others have written
                m = tl.load(at, mask=inside, other=0.0)
                depth = 0
                climbing = parent
                while climbing > 0:
                    climbing = tl.load(parents + item * parents_row + climbing).to(tl.int32)
                    depth += 1
                for level in range(0, depth + 1):
                    above = parent
                    for _ in range(level, depth):
                        above = tl.load(parents + item * parents_row + above).to(tl.int32)
                    key = tl.load(
                        k + ((before + above) * key_heads + key_head) * key_dim + keys, mask=of_keys, other=0.0
                    )
                    d = tl.load(stash_at + above * stash_d_token, mask=of_values, other=0.0)
                    g_at = g + (before + above) * of_heads + of_head
                    m = _updated(m, key, d, _decay_of(g_at, keys, key_dim, per_channel))
            last = node
        key_at = ((before + node) * key_heads + key_head) * key_dim + keys
        key = tl.load(k + key_at, mask=of_keys, other=0.0)
        query = tl.load(q + key_at, mask=of_keys, other=0.0)
        value_at = ((before + node) * heads + head) * value_dim + values
        d = tl.load(v + value_at, mask=of_values, other=0.0)
        g_at = g + (before + node) * of_heads + of_head
        decay = _decay_of(g_at, keys, key_dim, per_channel)
        if delta:
            read = tl.sum(m * decay * key[:, None], 0)
            d = tl.load(beta + (before + node) * heads + head) * (d - read)
        m = _updated(m, key, d, decay)
        tl.store(out + value_at, tl.sum(m * query[:, None], 0), mask=of_values)
        if climbs:
            tl.store(stash_at + node * stash_d_token, d, mask=of_values)
            if tl.program_id(0) == 0:
                kept_g = stash_g + item * stash_g_row + node * stash_g_token + of_head
                if per_channel:
                    tl.store(kept_g + keys, tl.load(g_at + keys, mask=of_keys, other=0.0), mask=of_keys)
                else:
                    tl.store(kept_g, tl.load(g_at))
                if head % (heads // key_heads) == 0:
                    kept = stash_k + item * stash_k_row + node * stash_k_token + key_head * key_dim
                    tl.store(kept + keys, key, mask=of_keys)
    if not climbs:
        tl.store(at, m, mask=inside)
