"""What kernels do with one head's state: fold updates into it, and take a block of tokens from it.

A program holds some of the values of a head: columns of a state have nothing to do with each other. What tokens of a
block have to do with each other, the same for all values of a head, is a launch before (`weigh_tokens`). Everything is
float32, products too, whatever the number of tokens.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.recurrent.states import StateInputs
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

AT_ONCE: constexpr = constexpr(16)
"""Updates that are folded together."""
MOST_VALUES = 32
_WARPS = 1
"""Of a program that weighs 16 tokens."""
_COLUMNS = 8
"""Tokens that a program has pairs of, where decays are by channel and a block is of more than 16."""


def values_of(value_dim: int) -> int:
    """Columns of a state that a program holds."""
    return min(MOST_VALUES, max(16, power_of_two(value_dim)))


def contiguous(inputs: StateInputs) -> StateInputs:
    """As kernels read them."""
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    q, k, v, g = (x.contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.g))
    return StateInputs(q, k, v, g, beta)


def weigh_tokens(
    inputs: StateInputs, parents: Tensor | None, counts: Tensor | None, block_t: int, gpu: GpuTraits
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the tokens of each block have to do with each other, in one launch; in two where decays are by channel.

    inputs: contiguous. parents: [rows, n] int64, of one block of nodes; None: tokens one after another.
    counts: [rows] int64, tokens before padding; None: all.
    Returns weights [rows, blocks, heads, 2, block_t, block_t] float32, the inverse of I + L and Q, of no meaning past
    the last token; starts [rows, blocks, heads, block_t], e^E, or 1 where it is by channel, NaN where a token's own
    numbers are not finite; and above [rows, block_t, block_t] int8, who is above whom, unwritten without parents.
    """
    (batch, n, heads, _), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    blocks, device = -(-n // block_t), inputs.v.device
    weights = torch.empty((batch, blocks, heads, 2, block_t, block_t), dtype=torch.float32, device=device)
    starts = torch.empty((batch, blocks, heads, block_t), dtype=torch.float32, device=device)
    above = torch.empty((batch, block_t, block_t), dtype=torch.int8, device=device)
    beta = inputs.g if inputs.beta is None else inputs.beta
    places = (starts if parents is None else parents, starts if counts is None else counts, n)
    parents_row, per_channel = 0 if parents is None else parents.stride(0), by_channel(inputs)
    options = {
        "heads": heads, "key_heads": key_heads, "key_dim": key_dim, "delta": inputs.beta is not None,
        "climbs": parents is not None, "counted": counts is not None, "block_t": block_t,
        "width": min(32, max(16, power_of_two(key_dim))), "overlap": gpu.can_overlap,
        "num_warps": _WARPS if block_t == 16 else 8,
    }  # fmt: skip
    if per_channel:
        columns = 1 if block_t == 16 else _COLUMNS
        _pair_kernel[(blocks * (block_t // columns), heads, batch)](
            weights, inputs.q, inputs.k, inputs.g, *places, parents_row, columns=columns, **options,
            **launch_options(gpu),
        )  # fmt: skip
    _weigh_kernel[(blocks, heads, batch)](
        weights, starts, above, inputs.q, inputs.k, inputs.g, beta, *places, parents_row, per_channel=per_channel,
        **options, **launch_options(gpu),
    )  # fmt: skip
    return weights, starts, above


def by_channel(inputs: StateInputs) -> bool:
    """Whether decays are numbers of a head's channels of the key, and not of a head."""
    return inputs.g.dim() == inputs.v.dim()


@jit
def parts(x: Arg) -> Arg:
    """(most, rest): x as TF32 holds it, cut off, and what is left."""
    most = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return most, x - most


@jit
def add_product(total: Arg, a: Arg, b: Arg) -> Arg:
    """total + a b in three products of TF32: float32 but for the last two bits or so. a, b: of `parts`."""
    total = tl.dot(a[1], b[0], total, input_precision="tf32")
    total = tl.dot(a[0], b[1], total, input_precision="tf32")
    return tl.dot(a[0], b[0], total, input_precision="tf32")


@jit
def transposed(x: Arg) -> Arg:
    """Of both parts."""
    return tl.trans(x[0]), tl.trans(x[1])


@jit
def above_of_nodes(parents: Arg, node: Arg, real: Arg) -> Arg:
    """[nodes, nodes], j is i or above i. parents: of a row. node: [nodes], their numbers. real: before padding."""
    above = node[:, None] == node[None, :]
    climbing = real & (node > 0)
    line = tl.load(parents + node, mask=climbing, other=0)
    while tl.max(climbing.to(tl.int32), 0) > 0:
        above = above | (climbing[:, None] & (line[:, None] == node[None, :]))
        climbing = climbing & (line > 0)
        line = tl.load(parents + line, mask=climbing, other=0)
    return above


@jit
def summed_decays(which: Arg, log_decay: Arg) -> Arg:
    """[tokens, keys]: of each token the sum of the decays of those that it has in `which` [tokens, tokens].

    log_decay: [tokens, keys]. Ones and zeros are TF32 already, and a sum of both parts has float32's bits but one.
    """
    halves, chosen = parts(log_decay), which.to(tl.float32)
    total = tl.dot(chosen, halves[1], input_precision="tf32")
    return tl.dot(chosen, halves[0], total, input_precision="tf32")


@jit
def finite(x: Arg) -> Arg:
    """What is not finite is 0: beside it, not times it."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@jit
def _pair_kernel(
    weights: Arg, q: Arg, k: Arg, g: Arg, parents: Arg, counts: Arg, n: Arg, parents_row: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, delta: constexpr, climbs: constexpr,
    counted: constexpr, block_t: constexpr, columns: constexpr, width: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Sums over channels of k_i k_j e^D_ij, and of q_i, for some j of a block of one head.

    Grid (blocks * parts of columns, heads, rows). D is summed over who stands between, for each pair by itself.
    """
    pdl_wait(overlap, early=True)
    block = tl.program_id(0) // (block_t // columns)
    column = tl.program_id(0) % (block_t // columns) * columns
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    count = n
    if counted:
        count = tl.load(counts + item).to(tl.int32)
    node = tl.arange(0, block_t)
    first = block * block_t
    real = node < tl.minimum(count - first, block_t)
    token = item * n + first + node
    after = node[:, None] >= node[None, :]
    above = above_of_nodes(parents + item * parents_row, node, real) if climbs else after
    lane = tl.arange(0, columns)
    seen = tl.zeros([block_t, columns], tl.float32)
    pairs = tl.zeros([block_t, columns], tl.float32)
    for piece in tl.range(0, key_dim, width, num_stages=1):
        keys = piece + tl.arange(0, width)
        there = real[:, None] & (keys < key_dim)[None, :]
        key_at = (token * key_heads + key_head)[:, None] * key_dim + keys[None, :]
        queries = tl.load(q + key_at, mask=there, other=0.0)
        key = tl.load(k + key_at, mask=there, other=0.0)
        decay_at = (token * heads + head)[:, None] * key_dim + keys[None, :]
        log_decay = finite(tl.load(g + decay_at, mask=there, other=0.0))
        for each in tl.range(0, columns, num_stages=1):
            own = node == column + each
            below = (tl.sum((above & own[None, :]).to(tl.int32), 1) > 0) & (own == 0)
            between = tl.exp(summed_decays(above & below[None, :], log_decay))
            scaled = between * tl.sum(tl.where(own[:, None], key, 0.0), 0)[None, :]
            seen += tl.where((lane == each)[None, :], tl.sum(queries * scaled, 1)[:, None], 0.0)
            if delta:
                pairs += tl.where((lane == each)[None, :], tl.sum(key * scaled, 1)[:, None], 0.0)
    blocks = tl.num_programs(0) // (block_t // columns)
    at = node[:, None] * block_t + column + lane[None, :]
    base = weights + ((item * blocks + block) * heads + head) * 2 * block_t * block_t
    tl.store(base + block_t * block_t + at, seen)
    if delta:
        tl.store(base + at, pairs)


@jit
def _weigh_kernel(
    weights: Arg, starts: Arg, above_of: Arg, q: Arg, k: Arg, g: Arg, beta: Arg, parents: Arg, counts: Arg,
    n: Arg, parents_row: Arg,
    heads: constexpr, key_heads: constexpr, key_dim: constexpr, delta: constexpr, climbs: constexpr,
    counted: constexpr, block_t: constexpr, width: constexpr, per_channel: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of one head. Grid (blocks, heads, rows). per_channel: `_pair_kernel` has left its sums in weights."""
    pdl_wait(overlap, early=True)
    block, head = tl.program_id(0), tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    key_head = head // (heads // key_heads)
    count = n
    if counted:
        count = tl.load(counts + item).to(tl.int32)
    node = tl.arange(0, block_t)
    first = block * block_t
    nodes = tl.minimum(count - first, block_t)
    real = node < nodes
    token = item * n + first + node
    if climbs:
        above = above_of_nodes(parents + item * parents_row, node, real)
        if head == 0:
            square = (item * block_t + node)[:, None] * block_t + node[None, :]
            tl.store(above_of + square, above.to(tl.int8))
    else:
        above = node[:, None] >= node[None, :]
    strict = above & (node[:, None] != node[None, :])
    base = ((item * tl.num_programs(0) + block) * heads + head) * 2
    at = node[:, None] * block_t + node[None, :]
    if per_channel:
        both = real[:, None] & real[None, :]
        start = tl.full([block_t], 1.0, tl.float32)
        wild = tl.zeros([block_t], tl.int32)
        for piece in tl.range(0, key_dim, width, num_stages=1):
            keys = piece + tl.arange(0, width)
            decay_at = (token * heads + head)[:, None] * key_dim + keys[None, :]
            log_decay = tl.load(g + decay_at, mask=real[:, None] & (keys < key_dim)[None, :], other=0.0)
            wild += tl.sum(((tl.abs(log_decay) < float("inf")) == 0).to(tl.int32), 1)
        bad = wild > 0
        seen = tl.load(weights + (base + 1) * block_t * block_t + at, mask=both, other=0.0)
        if delta:
            pairs = tl.load(weights + base * block_t * block_t + at, mask=both, other=0.0)
            tl.debug_barrier()  # others write where a thread has read
    else:
        seen = tl.zeros([block_t, block_t], tl.float32)
        pairs = tl.zeros([block_t, block_t], tl.float32)
        for piece in tl.static_range(0, key_dim, width):
            keys = piece + tl.arange(0, width)
            of_keys = real[:, None] & (keys < key_dim)[None, :]
            key_at = (token * key_heads + key_head)[:, None] * key_dim + keys[None, :]
            queries = tl.load(q + key_at, mask=of_keys, other=0.0)
            key = tl.load(k + key_at, mask=of_keys, other=0.0)
            halves = parts(key)
            seen = add_product(seen, parts(queries), transposed(halves))
            if delta:
                pairs = add_product(pairs, halves, transposed(halves))
        log_decay = tl.load(g + token * heads + head, mask=real, other=0.0)
        bad = (tl.abs(log_decay) < float("inf")) == 0
        log_decay = tl.where(bad, 0.0, log_decay)
        start = tl.exp(tl.sum(tl.where(above, log_decay[None, :], 0.0), 1))
        between = tl.exp(summed_decays(above, tl.where(strict, log_decay[:, None], 0.0)))
        seen = seen * between
        pairs = pairs * between
    tl.store(weights + (base + 1) * block_t * block_t + at, tl.where(above, seen, 0.0))
    if delta:
        rate = tl.load(beta + token * heads + head, mask=real, other=0.0)
        lower = tl.where(strict, pairs * rate[:, None], 0.0)
        wild = (tl.abs(lower) < float("inf")) == 0
        bad = bad | (tl.sum(wild.to(tl.int32), 1) > 0)
        lower = tl.where(wild, 0.0, lower)
        inverse = tl.where(node[:, None] == node[None, :], 1.0, 0.0)
        for j in range(0, nodes - 1):  # row j is done: those below it take it off
            row = tl.sum(tl.where(node[:, None] == j, inverse, 0.0), 0)
            column = tl.sum(tl.where(node[None, :] == j, lower, 0.0), 1)
            inverse -= column[:, None] * row[None, :]
        tl.store(weights + base * block_t * block_t + at, inverse)
    tl.store(starts + base // 2 * block_t + node, tl.where(bad, float("nan"), start))


@jit
def fold_updates(
    m: Arg, k: Arg, d: Arg, g: Arg, count: Arg, k_token: Arg, d_token: Arg, g_token: Arg,
    keys: Arg, values: Arg, key_dim: constexpr, value_dim: constexpr, per_channel: constexpr,
) -> Arg:  # fmt: skip
    """m [keys, values] after `count` updates, as many at once as a product takes. k, d, g: of this head's first one."""
    lane = tl.arange(0, AT_ONCE)
    for first in tl.range(0, count, AT_ONCE, num_stages=1):
        token = first + lane
        there = token < count
        later = lane[None, :] > lane[:, None]
        if per_channel:
            decay_at = (token * g_token)[:, None] + keys[None, :]
            log_decay = tl.load(g + decay_at, mask=there[:, None] & (keys < key_dim)[None, :], other=0.0)
        else:
            log_decay = tl.load(g + token * g_token, mask=there, other=0.0)
        key_at = (token * k_token)[:, None] + keys[None, :]
        key = tl.load(k + key_at, mask=there[:, None] & (keys < key_dim)[None, :], other=0.0)
        value_at = (token * d_token)[:, None] + values[None, :]
        value = tl.load(d + value_at, mask=there[:, None] & (values < value_dim)[None, :], other=0.0)
        if per_channel:
            to_end = tl.exp(summed_decays(later, log_decay))
            left = parts(tl.trans(key * to_end))
            m = add_product(m * tl.exp(tl.sum(log_decay, 0))[:, None], left, parts(value))
        else:
            to_end = tl.exp(tl.sum(tl.where(later, log_decay[None, :], 0.0), 1))
            left = parts(tl.trans(key * to_end[:, None]))
            m = add_product(m * tl.exp(tl.sum(log_decay, 0)), left, parts(value))
    return m


@jit
def attend_state(
    of_q: Arg, of_k: Arg, v: Arg, beta: Arg, start: Arg, above: Arg, weights: Arg, node: Arg,
    block_t: constexpr, delta: constexpr,
) -> Arg:  # fmt: skip
    """(outputs, d) of a block of nodes, [nodes, values].

    of_q, of_k: [nodes, values], products of queries and keys with the state before the first. v: [nodes, values].
    beta, start: [nodes]. above: [nodes, nodes], j is i or above i. weights: of this head, see `weigh_tokens`. node:
    [nodes], their numbers. What is not finite stays with a node and those below it, by value: else it is chosen away,
    never multiplied by 0.
    """
    at = node[:, None] * block_t + node[None, :]
    look = tl.load(weights + block_t * block_t + at)
    d = tl.where((tl.abs(start) < float("inf"))[:, None], v, float("nan"))
    if delta:
        wanted = beta[:, None] * (v - of_k * start[:, None])
        finite = tl.abs(wanted) < float("inf")
        solve = tl.load(weights + at)
        d = add_product(tl.zeros_like(v), parts(solve), parts(tl.where(finite, wanted, 0.0)))
        d = tl.where(finite, d, float("nan"))
    wild = tl.where(tl.abs(d) < float("inf"), 0.0, 1.0)
    spoilt = tl.dot(above.to(tl.float32), wild, input_precision="tf32") > 0
    out = add_product(of_q * start[:, None], parts(look), parts(tl.where(spoilt, 0.0, d)))
    if delta:
        d = tl.where(spoilt, float("nan"), d)
    return tl.where(spoilt, float("nan"), out), d
