"""Recurrent layers token by token, from the formulas: what every other way of computing them must agree with.

Independent of `treetop.kernels.recurrent`: a state a node, one head at a time, in the dtype of what is given.
"""

import random

import torch
from torch import Tensor

from treetop.kernels.recurrent.states import LinearStates, StateInputs, StateTails, StateUpdates
from treetop.types.state import StateGroup

GATED = StateGroup("state", 2, 52, 4, 6, 2, 8, 3, delta=True, per_channel=False)
"""Three value heads a key head; widths that are powers of nothing else."""
KINDS = {
    "gated delta": GATED,
    "delta by channel": StateGroup("state", 2, 40, 3, 2, 2, 12, 5, delta=True, per_channel=True),
    "decay alone": StateGroup("state", 2, 0, 1, 4, 2, 8, 6, delta=False, per_channel=False),
}


def one_token(m: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [value_dim] and the new state of a head. m: [key_dim, value_dim]. g: a number or [key_dim]."""
    m = torch.exp(g)[:, None] * m if g.dim() else torch.exp(g) * m
    d = v if beta is None else beta * (v - k @ m)
    m = m + torch.outer(k, d)
    return q @ m, m


def by_node(m: Tensor, inputs: StateInputs, parents: list[int], row: int) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, value_dim] of a row and the state after every node [n, heads, key_dim, value_dim].

    m: [heads, key_dim, value_dim]. parents: before their children; the first node's own means nothing.
    """
    states: list[Tensor] = []
    outs: list[Tensor] = []
    for node, parent in enumerate(parents):
        before = m if node == 0 else states[parent]
        heads = []
        for head in range(len(m)):
            key = head // (len(m) // inputs.k.shape[2])
            beta = None if inputs.beta is None else inputs.beta[row, node, head]
            of_key = (inputs.q[row, node, key], inputs.k[row, node, key])
            heads.append(one_token(before[head], *of_key, inputs.v[row, node, head], inputs.g[row, node, head], beta))
        outs.append(torch.stack([out for out, _ in heads]))
        states.append(torch.stack([state for _, state in heads]))
    return torch.stack(outs), torch.stack(states)


def convolved(columns: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What a convolution gives for the last of `taps` inputs. columns: [taps, channels]. weight: [channels, taps]."""
    out = (columns.T * weight).sum(dim=1)
    return out if bias is None else out + bias


def path_of(parents: list[int], node: int) -> list[int]:
    """From the root down to a node, both counted."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def random_parents(n: int, kind: str, rng: random.Random) -> list[int]:
    """Of a chain, a star, or a random tree, whose root is its own parent."""
    if kind == "chain":
        return [max(node - 1, 0) for node in range(n)]
    return [0] + [0 if kind == "star" else rng.randrange(node) for node in range(1, n)]


def random_inputs(group: StateGroup, rows: int, n: int, dtype: torch.dtype, strong: bool = False) -> StateInputs:
    """As layers make them: unit keys, scaled queries, decays of softplus, weak ones or strong."""

    def unit(x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

    wide = torch.float64
    q, k = (unit(torch.randn((rows, n, group.key_heads, group.key_dim), dtype=wide)) for _ in "qk")
    v = torch.randn((rows, n, group.heads, group.value_dim), dtype=wide)
    rate = torch.exp(3 * torch.rand((), dtype=wide)) if strong else 0.3
    g = -rate * torch.nn.functional.softplus(torch.randn((rows, n, *group.decay_shape), dtype=wide))
    beta = torch.sigmoid(torch.randn((rows, n, group.heads), dtype=wide)) if group.delta else None
    made = (q / group.key_dim**0.5, k, v, g, beta)
    return StateInputs(*(None if each is None else each.to(dtype) for each in made))


def random_updates(group: StateGroup, lead: tuple[int, ...], dtype: torch.dtype) -> StateUpdates:
    """Numbers without a meaning, but for decays, which are at most 0."""
    k = torch.randn((*lead, group.key_heads, group.key_dim), dtype=dtype) / group.key_dim**0.5
    d = torch.randn((*lead, group.heads, group.value_dim), dtype=dtype)
    return StateUpdates(k, d, -torch.rand((*lead, *group.decay_shape), dtype=dtype))


def random_states(group: StateGroup, num_rows: int, width: int, dtype: torch.dtype, conv: torch.dtype) -> LinearStates:
    """Rows with 0 to `width` updates pending, and NaN where none is; the last is the dummy's."""
    layers = group.num_layers
    states = LinearStates(
        conv=torch.randn((layers, num_rows, *group.conv_shape), dtype=conv),
        state=torch.randn((layers, num_rows, *group.state_shape), dtype=dtype),
        pending=random_updates(group, (layers, num_rows, width), dtype),
        count=torch.arange(num_rows) % (width + 1),
    )
    states.count[-1] = 0
    states.conv[:, -1] = states.state[:, -1] = 0
    stale = torch.arange(width) >= states.count[:, None]
    for each in (states.pending.k, states.pending.d, states.pending.g):
        each[:, stale] = float("nan")
    return states


def random_tails(group: StateGroup, rows: int, nodes: int, dtype: torch.dtype, conv: torch.dtype) -> StateTails:
    mixed = torch.randn((group.num_layers, rows, nodes, group.channels), dtype=conv)
    return StateTails(mixed, random_updates(group, (group.num_layers, rows, nodes), dtype))


def after_pending(states: LinearStates, layer: int, row: int) -> Tensor:
    """A row's state with what is pending, update by update."""
    m, pending = states.state[layer, row].clone(), states.pending.layer(layer)
    for at in range(int(states.count[row])):
        for head in range(len(m)):
            decay, k = torch.exp(pending.g[row, at, head]), pending.k[row, at, head // (len(m) // pending.k.shape[2])]
            m[head] = (decay[:, None] if decay.dim() else decay) * m[head] + torch.outer(k, pending.d[row, at, head])
    return m
