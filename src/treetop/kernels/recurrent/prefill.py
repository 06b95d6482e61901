"""A prompt's chunk through the recurrence, from each row's own state: blocks of tokens, each one triangular system.

Within a block the sums of `verify` are over the tokens before each: d solves (I + L) d = R, with L strictly lower
triangular. Padding is the identity: it neither decays a state nor adds to it.
"""

import torch
from torch import Tensor

from treetop.kernels.recurrent.decay import by_channel, chain_decays
from treetop.kernels.recurrent.states import LayerStates, StateInputs

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
