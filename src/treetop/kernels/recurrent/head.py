"""What kernels do with one head's state: fold updates into it, and take a block of tokens from it.

A program holds all of the key's width and some of the value's: columns of a state have nothing to do with each other.
Everything is float32, products too, whatever the number of tokens.
"""

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl

MOST_VALUES = 32
"""Columns of a state that a program holds."""


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
    m: Arg, q: Arg, k: Arg, v: Arg, g: Arg, beta: Arg, above: Arg, node: Arg, nodes: Arg, delta: constexpr
) -> Arg:
    """(outputs [nodes, values], d, decay from before the first node to each, of which what is not finite is 0).

    q, k: [nodes, keys]. v: [nodes, values]. g, beta: [nodes]. above: [nodes, nodes] bool, j is i or above it.
    node: [nodes], their numbers, of which the first `nodes` are real. What is not finite stays with a node and those
    below it: everything else is chosen, never multiplied by 0.
    """
    bad = (tl.abs(g) < float("inf")) == 0
    g = tl.where(bad, 0.0, g)
    on_path, strict = above.to(tl.float32), above & (node[:, None] != node[None, :])
    decay = tl.exp(tl.sum(tl.where(above, g[None, :], 0.0), 1))
    between = tl.exp(tl.dot(on_path, tl.where(strict, g[:, None], 0.0), input_precision="ieee"))
    out = tl.dot(q, m, input_precision="ieee") * decay[:, None]
    d = v
    if delta:
        d = beta[:, None] * (v - tl.dot(k, m, input_precision="ieee") * decay[:, None])
        pairs = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
        d = tl.where(bad[:, None], float("nan"), d)
        for j in range(0, nodes):
            row = tl.sum(tl.where(node[:, None] == j, d, 0.0), 0)
            column = tl.sum(tl.where(strict & (node[None, :] == j), pairs, 0.0), 1)
            below = tl.sum((strict & (node[None, :] == j)).to(tl.int32), 1) > 0
            d = tl.where(below[:, None], d - column[:, None] * row[None, :], d)
    else:
        d = tl.where(bad[:, None], float("nan"), d)
    finite = tl.abs(d) < float("inf")
    seen = tl.where(above, tl.dot(q, tl.trans(k), input_precision="ieee") * between, 0.0)
    out += tl.dot(seen, tl.where(finite, d, 0.0), input_precision="ieee")
    spoilt = tl.dot(on_path, tl.where(finite, 0.0, 1.0), input_precision="ieee") > 0
    return tl.where(spoilt, float("nan"), out), d, decay
