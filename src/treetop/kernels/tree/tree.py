"""Draft-tree operations: stable top-k, masks of true ancestors, selection of the verify tree.

Flat candidate indices: level 0 holds 0 .. k-1; level i >= 1 holds `k + (i - 1) k^2 + row * k + column`. The k children
of one frontier node form a group, so `index // k` is the group and group 0 hangs on the root.
"""

import torch
from torch import Tensor

from treetop.types.layout import SpecShape
from treetop.types.tree import DraftTree

_SORT_WIDTH = 256
"""Up to this width a stable sort is the faster way; past it, integer keys."""


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores, ties by the smaller index, so that a child never outranks the parent it ties with.

    scores: [..., n] float32. Returns values [..., k] float32 and indices [..., k] int64, in descending order.
    """
    if scores.shape[-1] <= _SORT_WIDTH:
        values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    if scores.device.type == "cpu" and k < scores.shape[-1]:
        values, indices = torch.topk(scores, k + 1, dim=-1)
        if bool((values[..., :-1] > values[..., 1:]).all()):  # nothing ties, and nothing is NaN
            return values[..., :k], indices[..., :k]
    return keyed_topk(scores, k)


def keyed_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`stable_topk` for wide rows: one unstable top-k over integer keys that are all distinct.

    A float32 orders like its bits once negative numbers have their magnitude bits flipped; the lower half of the key
    is the index counted down. -0.0 and 0.0 are made one.
    """
    n = scores.shape[-1]
    bits = (scores + 0.0).contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    countdown = torch.arange(n - 1, -1, -1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | countdown
    top = torch.topk(keys, k, dim=-1).values
    indices = n - 1 - (top & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


def next_level_mask(previous: Tensor, parent: Tensor) -> Tensor:
    """Ancestor mask of the next draft level: each node's row is its parent's, then the identity.

    previous: [rows, k, t] bool. parent: [rows, k] int64, index into the previous level. Returns [rows, k, t + k] bool.
    Source: EAGLE-2, arXiv:2406.16858, section 4.1.
    """
    rows, k, t = previous.shape
    inherited = previous.gather(1, parent[:, :, None].expand(rows, k, t))
    own = torch.eye(k, dtype=torch.bool, device=previous.device).expand(rows, k, k)
    return torch.cat([inherited, own], dim=2)


def select_tree(
    root: Tensor, tokens: Tensor, logprobs: Tensor, parents: Tensor, shape: SpecShape, chosen: Tensor
) -> DraftTree:
    """Keep the T - 1 best candidates as a tree in breadth-first order, and write their flat indices into `chosen`.

    root: [rows] int64. tokens: [rows, n] int64 and logprobs: [rows, n] float32 of all candidates, by flat index, where
    logprobs are not NaN and never rise from parent to child. parents: [rows, groups] int64, the flat index of each
    group's parent, -1 for group 0. chosen: [rows, T] int64; the root's is -1. Ties go to the smaller flat index, which
    a parent has against its child, so no node is orphaned.
    Source: EAGLE-2, arXiv:2406.16858, section 4.2.
    """
    k, width = shape.topk, shape.num_draft_tokens
    rows, n = tokens.shape
    keep = stable_topk(logprobs, width - 1)[1].sort(dim=1).values  # [rows, T - 1] flat indices
    chosen[:, 0] = -1
    chosen[:, 1:] = keep
    node_of = torch.zeros((rows, n + 1), dtype=torch.int64, device=tokens.device)  # flat index + 1 -> node; 0 -> root
    order = torch.arange(1, width, device=tokens.device).expand(rows, -1)
    node_of.scatter_(1, keep + 1, order)
    group_parent = parents.gather(1, keep // k)  # [rows, T - 1], -1 is the root
    depth = torch.where(keep < k, 1, (keep - k) // k**2 + 2)
    parent = node_of.gather(1, group_parent + 1)
    zero = torch.zeros_like(root)[:, None]
    parent = torch.cat([zero, parent], dim=1)
    return DraftTree(
        tokens=torch.cat([root[:, None], tokens.gather(1, keep)], dim=1),
        parent=parent,
        depth=torch.cat([zero, depth], dim=1),
        mask=ancestor_mask(parent, shape.num_steps),
        logprob=torch.cat([zero.to(logprobs.dtype), logprobs.gather(1, keep)], dim=1),
    )


def ancestor_mask(parent: Tensor, max_depth: int) -> Tensor:
    """Which nodes are a node itself or its ancestors.

    parent: [rows, T] int64, the root's is the root. Returns [rows, T, T] bool, `mask[b, i, j]` iff i descends from j.
    """
    rows, width = parent.shape
    mask = torch.zeros((rows, width, width), dtype=torch.bool, device=parent.device)
    node = torch.arange(width, device=parent.device).expand(rows, -1)
    line = [node]  # each node's 0th, 1st, ... ancestor
    for _ in range(max_depth):
        line.append(parent.gather(1, line[-1]))
    return mask.scatter_(2, torch.stack(line, dim=2), True)


def root_tree(root: Tensor) -> DraftTree:
    """The tree of one node that plain decoding verifies. root: [rows] int64."""
    zero = torch.zeros_like(root)[:, None]
    return DraftTree(
        tokens=root[:, None],
        parent=zero,
        depth=zero,
        mask=torch.ones((root.shape[0], 1, 1), dtype=torch.bool, device=root.device),
        logprob=torch.zeros((root.shape[0], 1), dtype=torch.float32, device=root.device),
    )
