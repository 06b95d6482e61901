"""Nodes of a tree from one state: no state a node, but products of pairs on one path.

    d_i = beta_i (v_i - (e^E_i k_i) M - sum of P_ij d_j over i's ancestors j)     P_ij = sum over c of k_ic k_jc e^D_ijc
    o_i = (e^E_i q_i) M + sum of Q_ij d_j over j and i itself                     Q_ij the same with q_i

E_i is the log of the decay from before the root to i, D_ij that from j to i. All that reads M is two products of T
rows. Sums are over ancestors alone and in their order: what is not finite stays with its node and those below it, and
what else stands in the tree changes nothing. Derivation: `docs/recurrent.md`.
"""

import torch
from torch import Tensor

from treetop.kernels.recurrent.decay import NEVER, by_channel, decays_to_end, path_decays
from treetop.kernels.recurrent.states import LayerStates, StateInputs, Updates


def verify_states_reference(
    states: LayerStates,
    rows: Tensor,
    inputs: StateInputs,
    parents: Tensor,
    stash: Updates,
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


def along_paths(m: Tensor, inputs: StateInputs, parents: Tensor) -> tuple[Tensor, Updates]:
    """Outputs [rows, T, heads, value_dim] and updates of the nodes. m: [rows, heads, key_dim, value_dim]."""
    each = m.shape[1] // inputs.k.shape[2]
    q, k = inputs.q.repeat_interleave(each, dim=2), inputs.k.repeat_interleave(each, dim=2)
    logs = path_decays(by_channel(inputs.g, k), parents)  # [rows, T, 1 + T, heads, c]
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
    return out, Updates(inputs.k, torch.stack(found, dim=1), inputs.g)


def folded(m: Tensor, pending: Updates, count: Tensor) -> Tensor:
    """States with the first `count` updates of each row. m: [rows, heads, key_dim, value_dim]. count: [rows] int64."""
    there = (torch.arange(pending.d.shape[1], device=count.device) < count[:, None])[..., None, None]
    each = m.shape[1] // pending.k.shape[2]
    k, d = torch.where(there, pending.k, 0).repeat_interleave(each, dim=2), torch.where(there, pending.d, 0)
    to_end = decays_to_end(torch.where(there, by_channel(pending.g, k), 0)).exp()
    added = torch.einsum("bthk,bthv->bhkv", to_end[:, 1:] * k, d)
    return to_end[:, 0][..., None] * m + added


def _times_state(x: Tensor, m: Tensor) -> Tensor:
    """[rows, n, heads, key_dim] with each head's state: [rows, n, heads, value_dim]."""
    return torch.einsum("bthk,bhkv->bthv", x, m)


def _of_rows(pending: Updates, rows: Tensor) -> Updates:
    return Updates(pending.k[rows], pending.d[rows], pending.g[rows])
