"""What kernels do with one head's state: fold updates into it, and take a block of tokens from it.

A program holds some of the values of a head: columns of a state have nothing to do with each other. It reads the key
in pieces of `width`, for products keep whole operands in registers. Everything is float32, products too, whatever the
number of tokens.
"""

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

MOST_VALUES = 32
"""Columns of a state that a program holds."""
PRODUCTS: constexpr = constexpr("tf32x3")
"""Float32 on tensor cores in three parts of TF32: float32 but for the last two bits or so."""


@jit
def fold_updates(
    m: Arg, k: Arg, d: Arg, g: Arg, count: Arg, k_token: Arg, d_token: Arg, g_token: Arg,
    keys: Arg, values: Arg, key_dim: constexpr, value_dim: constexpr,
) -> Arg:  # fmt: skip
    """m [keys, values] after `count` updates, one after the other. k, d, g: of the first one, of this head."""
    for token in range(0, count):
        decay = tl.exp(tl.load(g + token * g_token))
        key = tl.load(k + token * k_token + keys, mask=keys < key_dim, other=0.0)
        value = tl.load(d + token * d_token + values, mask=values < value_dim, other=0.0)
        m = m * decay + key[:, None] * value[None, :]
    return m


@jit
def attend_state(
    of_q: Arg, of_k: Arg, seen: Arg, pairs: Arg, v: Arg, g: Arg, beta: Arg, above: Arg, node: Arg, nodes: Arg,
    delta: constexpr,
) -> Arg:  # fmt: skip
    """(outputs, d) of a block of nodes, [nodes, values].

    of_q, of_k: [nodes, values], products of queries and keys with the state before the first. seen, pairs: [nodes,
    nodes], of queries with keys and of keys. v: [nodes, values]. g, beta: [nodes]. above: [nodes, nodes] bool, j is i
    or above it. node: [nodes], their numbers, of which the first `nodes` are real. What is not finite stays with a node
    and those below it: everything else is chosen, never multiplied by 0.
    """
    bad = (tl.abs(g) < float("inf")) == 0
    g = tl.where(bad, 0.0, g)
    strict = above & (node[:, None] != node[None, :])
    on_path = above.to(tl.float32)
    decay = tl.exp(tl.sum(tl.where(above, g[None, :], 0.0), 1))
    between = tl.exp(tl.dot(on_path, tl.where(strict, g[:, None], 0.0), input_precision=PRODUCTS))
    d = v
    if delta:
        d = beta[:, None] * (v - of_k * decay[:, None])
        d = tl.where(bad[:, None], float("nan"), d)
        pairs = pairs * between * beta[:, None]
        for j in range(0, nodes):
            row = tl.sum(tl.where(node[:, None] == j, d, 0.0), 0)
            own = strict & (node[None, :] == j)
            column = tl.sum(tl.where(own, pairs, 0.0), 1)
            d = tl.where((tl.sum(own.to(tl.int32), 1) > 0)[:, None], d - column[:, None] * row[None, :], d)
    else:
        d = tl.where(bad[:, None], float("nan"), d)
    finite = tl.abs(d) < float("inf")
    spoilt = tl.dot(on_path, tl.where(finite, 0.0, 1.0), input_precision=PRODUCTS) > 0
    out = of_q * decay[:, None]
    out += tl.dot(tl.where(above, seen * between, 0.0), tl.where(finite, d, 0.0), input_precision=PRODUCTS)
    return tl.where(spoilt, float("nan"), out), d
