"""What a calibration says of shapes: how far the paths of a tree get, of how often each proposal is chosen.

Of a verified node the head's best proposal is the target's choice with one chance, its second with another, by depth
(`kernels.tree.learn` counts both). A path's chance is the product of those of its steps, and paths of one depth exclude
each other. So what a shape accepts is the sum over its nodes, of the best that its frontiers reach: what growing does,
with mean chances in the place of each node's own. Trees that follow what the head says of each node get a little
further.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from math import exp
from operator import mul

from treetop.types.costs import HeadAcceptance
from treetop.types.layout import SpecShape
from treetop.types.messages import ProposalCounts
from treetop.types.sampling import CLASSES

ENOUGH = 64.0
"""Nodes of a class before it is believed, and of a depth."""
_PRIOR = 8.0
"""Nodes that what is thought of a rank before it was seen counts for."""
_LEAST = 1e-3
"""That a chance is away from 0 and 1."""

_ROWS = (-1.15, -0.32, 0.32, 1.15)
"""Quarters of a normal distribution: of the logit of how often a draft is right, among rows."""

AcceptanceProbs = Sequence[Sequence[float]]
"""By depth and rank: how often a proposal is the target's choice."""

Counted = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
"""By depth and rank: how often a proposal was looked at, and chosen."""


def accept_probs_of(counts: ProposalCounts, rows: Sequence[int], head: HeadAcceptance) -> AcceptanceProbs | None:
    """Of a batch with so many rows of each class. None before enough was seen.

    A class that was hardly seen counts as all of its adapter's together, and these as all that there are; a depth as
    the one before it. head: says of a rank that was hardly seen what it takes.
    """
    every = _together(counts, slice(None))
    if every[0][0][0] < ENOUGH:
        return None
    present = {kind: count / sum(rows) for kind, count in enumerate(rows) if count} or {0: 1.0}
    of_class = [_of_class(*_seen_enough(counts, kind, every), head.share) for kind in present]
    return [
        [sum(map(mul, present.values(), of_rank)) for of_rank in zip(*of_depth, strict=True)]
        for of_depth in zip(*of_class, strict=True)
    ]


def _seen_enough(counts: ProposalCounts, kind: int, every: Counted) -> Counted:
    """By what a class is judged. every: all of them together."""
    seen, chosen = counts
    if seen[kind][0][0] >= ENOUGH:
        return seen[kind], chosen[kind]
    first = kind - kind % CLASSES
    same = _together(counts, slice(first, first + CLASSES))
    return same if same[0][0][0] >= ENOUGH else every


def _together(counts: ProposalCounts, which: slice) -> Counted:
    """Of several classes."""
    seen, chosen = ([_sums(each[depth] for each in table[which]) for depth in range(len(table[0]))] for table in counts)
    return seen, chosen


def head_of(counts: ProposalCounts, known: HeadAcceptance) -> HeadAcceptance:
    """The head that was counted, of all classes without an adapter; `known` counts for `ENOUGH` nodes of each depth."""
    seen, chosen = _together(counts, slice(CLASSES))
    best, second, left = [], ENOUGH * known.share, ENOUGH
    for depth, (of_depth, hits) in enumerate(zip(seen, chosen, strict=True)):
        best.append((hits[0] + ENOUGH * known.at(depth)) / (of_depth[0] + ENOUGH))
        if len(of_depth) > 1:
            second, left = second + hits[1], left + of_depth[1] * (1.0 - best[-1])
    return HeadAcceptance(tuple(map(_inside, best)), _inside(second / left))


def _inside(accept_prob: float) -> float:
    return min(max(accept_prob, _LEAST), 1.0 - _LEAST)


def _of_class(seen: AcceptanceProbs, chosen: AcceptanceProbs, share: float) -> AcceptanceProbs:
    found: list[list[float]] = []
    for of_depth, hits in zip(seen, chosen, strict=True):
        if of_depth[0] < ENOUGH and found:
            found.append(found[-1])
            continue
        best = min(hits[0] / max(of_depth[0], 1.0), 1.0)
        accept_probs, left = [best], 1.0 - best
        for rank in range(1, len(hits)):
            thought = left * share
            accept_prob = (hits[rank] + _PRIOR * thought) / (of_depth[rank] + _PRIOR)
            accept_probs.append(min(accept_prob, left))
            left -= accept_probs[-1]
        found.append(accept_probs)
    return found


def nodes_of(shape: SpecShape, accept_probs: AcceptanceProbs) -> dict[tuple[int, ...], float]:
    """The tree of a shape by mean chances: each node, as the ranks that lead to it, and the chance that it is accepted.

    Depths that nobody knows are as the last.
    """
    root: tuple[int, ...] = ()
    frontier, nodes = [(1.0, root)], list[tuple[float, tuple[int, ...]]]()
    for depth in range(shape.num_steps):
        of_rank = accept_probs[min(depth, len(accept_probs) - 1)][: shape.topk]
        children = [
            (up * accept_prob, (*path, rank)) for up, path in frontier for rank, accept_prob in enumerate(of_rank)
        ]
        nodes += children
        frontier = nlargest(shape.topk, children, key=lambda node: node[0])
    kept = nlargest(shape.num_draft_tokens - 1, nodes, key=lambda node: (node[0], -len(node[1])))
    return {path: accept_prob for accept_prob, path in kept}


def path_probs(shape: SpecShape, accept_probs: AcceptanceProbs) -> tuple[list[float], list[float]]:
    """That a path of a tree of this shape has 1, 2, ... drafts, and that the last of so many is its node's best
    proposal.
    """
    reached, by_best = [0.0] * shape.depth, [0.0] * shape.depth
    for path, accept_prob in nodes_of(shape, accept_probs).items():
        reached[len(path) - 1] += accept_prob
        by_best[len(path) - 1] += accept_prob * (path[-1] == 0)
    return reached, by_best


def left_of(shape: SpecShape, accept_probs: AcceptanceProbs, nodes: float) -> list[float]:
    """What a budget of so many nodes a row, in the mean, leaves of the chance that a path has 1, 2, ... drafts.

    Rows differ in how often the draft is right, and the budget goes to those where it is: so it is shared out among
    rows that differ as `_ROWS` says, which is not known of those at hand.
    """
    trees = [nodes_of(shape, _eased(accept_probs, ease)) for ease in _ROWS]
    whole, left, spare = [0.0] * shape.depth, [0.0] * shape.depth, (nodes - 1.0) * len(trees)
    listed = [(accept_prob, len(path)) for tree in trees for path, accept_prob in tree.items()]
    for accept_prob, depth in sorted(listed, key=lambda node: (-node[0], node[1])):
        whole[depth - 1] += accept_prob
        left[depth - 1] += accept_prob * min(max(spare, 0.0), 1.0)
        spare -= 1.0
    return [part / every if every else 0.0 for part, every in zip(left, whole, strict=True)]


def _eased(accept_probs: AcceptanceProbs, ease: float) -> AcceptanceProbs:
    """Where the best proposal's logit is so much higher, and the others share what is left as before."""
    found = []
    for best, *others in accept_probs:
        inside = _inside(best)
        better = 1.0 / (1.0 + (1.0 - inside) / inside * exp(-ease))
        found.append([better, *(other * (1.0 - better) / (1.0 - inside) for other in others)])
    return found


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]
