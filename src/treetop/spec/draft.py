"""Growing: the draft head expands k branches a level, level by level, then the best T - 1 nodes become the tree."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.phase import Attend
from treetop.kernels.tree import next_level_mask, root_tree, select_tree, stable_topk
from treetop.models.eagle3 import Eagle3Head, Proposal
from treetop.types.layout import SpecShape
from treetop.types.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Level:
    """One draft level's queries. positions: [rows, k] int64. mask: [rows, k, (level + 1) * k] bool, true ancestors."""

    index: int
    positions: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Seed:
    """What a tree grows from.

    root, committed: [rows] int64. proposal: [rows, k] tokens after the root. hidden: [rows, hidden].
    """

    root: Tensor
    committed: Tensor
    proposal: Proposal
    hidden: Tensor


def draft_positions(committed: Tensor, level: int, k: int) -> Tensor:
    """Nodes of depth `level + 1` stand at `committed + level`: the draft runs one position behind its token.

    Returns [rows, k] int64. Source: sgl-25015, where they were one too far.
    """
    return (committed + level)[:, None].expand(-1, k)


@dataclass(frozen=True, slots=True)
class Growth:
    """How levels are laid out. attend: the attention of a level. positions, next_mask: see `draft_positions` and
    `kernels.tree.next_level_mask`.
    """

    attend: Callable[[Level], Attend]
    positions: Callable[[Tensor, int, int], Tensor] = draft_positions
    next_mask: Callable[[Tensor, Tensor], Tensor] = next_level_mask


def grow_tree(head: Eagle3Head, seed: Seed, shape: SpecShape, growth: Growth) -> DraftTree:
    """Grow and select each row's tree.

    The head runs S - 1 times on k nodes a row; level 0 needs no run, its nodes are the seed's proposal. With
    `num_steps` 0 the tree is its root.
    Source: EAGLE-2, arXiv:2406.16858, sections 4.1 and 4.2.
    """
    if shape.num_steps == 0:
        return root_tree(seed.root)
    k, rows = shape.topk, seed.root.shape[0]
    tokens, score = seed.proposal.tokens, seed.proposal.logprob  # [rows, k]
    hidden = seed.hidden[:, None].expand(-1, k, -1)
    mask = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(rows, k, k)
    all_tokens, all_scores = [tokens], [score]
    groups = [torch.full_like(tokens[:, :1], -1), _flat(k, tokens)]
    for index in range(shape.num_steps - 1):
        level = Level(index, growth.positions(seed.committed, index, k), mask)
        out = head.forward(tokens, hidden, level.positions, growth.attend(level))
        proposal = head.propose(out, k)  # [rows, k, k]
        scores = (score[:, :, None] + proposal.logprob).flatten(1)
        children = proposal.tokens.flatten(1)
        all_tokens.append(children)
        all_scores.append(scores)
        score, chosen = stable_topk(scores, k)
        parent = chosen // k
        tokens = children.gather(1, chosen)
        hidden = out.gather(1, parent[:, :, None].expand(-1, -1, out.shape[2]))
        mask = growth.next_mask(mask, parent)
        groups.append(chosen + k + index * k**2)
    flat_tokens, flat_scores = torch.cat(all_tokens, dim=1), torch.cat(all_scores, dim=1)
    return select_tree(seed.root, flat_tokens, flat_scores, torch.cat(groups, dim=1), shape)


def _flat(k: int, like: Tensor) -> Tensor:
    return torch.arange(k, device=like.device).expand(like.shape[0], -1)
