"""Decays between tokens, summed along paths: never a difference of sums, which float32 has not got.

Shapes: g of one decay a head is [rows, n, heads], and has a last dimension of 1 here; of one a channel of the key it is
[rows, n, heads, key_dim].
"""

import torch
from torch import Tensor

NEVER = float("-inf")
"""The log of the decay from a token that is not on the path."""


def with_channels(g: Tensor, k: Tensor) -> Tensor:
    """g with its last dimension, of the key's width or of 1. k: [rows, n, key_heads, key_dim]."""
    return g if g.dim() == k.dim() else g[..., None]


def path_decays(g: Tensor, parents: Tensor) -> Tensor:
    """How much of what a node left is there at a node below it, as a log.

    g: [rows, n, heads, c]. parents: [rows, n] int64, each before its children; node 0 is the root.
    Returns [rows, n, 1 + n, heads, c]: of the state before the root, and of each node: 0 at itself, `NEVER` for who is
    not above it.
    """
    rows, n = parents.shape
    decays = torch.full((rows, n, 1 + n, *g.shape[2:]), NEVER, dtype=g.dtype, device=g.device)
    decays[:, 0, 0], decays[:, 0, 1] = g[:, 0], 0
    row = torch.arange(rows, device=g.device)
    for node in range(1, n):
        above = decays[row, parents[:, node]]
        decays[:, node] = torch.where(above > NEVER, above + g[:, node, None], above)
        decays[:, node, 1 + node] = 0
    return decays


def chain_decays(g: Tensor) -> Tensor:
    """`path_decays` where each token is the child of the one before it."""
    n = g.shape[1]
    later = torch.ones((n, 1 + n), dtype=torch.bool, device=g.device).tril()[..., None, None]  # token i after column j
    sums = torch.where(later, g[:, :, None], 0).cumsum(dim=1)
    seen = torch.ones((n, 1 + n), dtype=torch.bool, device=g.device).tril(1)[..., None, None]
    return torch.where(seen, sums, NEVER)


def decays_to_end(g: Tensor) -> Tensor:
    """[rows, 1 + n, heads, c]: of the state before the first token, and of each, what is there after the last."""
    backwards = g.flip(1).cumsum(dim=1).flip(1)
    return torch.cat([backwards, torch.zeros_like(g[:, :1])], dim=1)
