"""What a calibration says of shapes: how far the paths of a tree get, of how often each proposal is chosen.

Of a verified node the head's best proposal is the target's choice with one chance, its second with another, by depth
(`kernels.tree.learn` counts both). A path's chance is the product of those of its steps, and paths of one depth exclude
each other. So what a shape accepts is the sum over its nodes, of the best that its frontiers reach: what growing does,
with mean chances in the place of each node's own. Trees that follow what the head says of each node get a little
further.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from operator import mul

from treetop.types.layout import SpecShape
from treetop.types.messages import ProposalCounts

ENOUGH = 64.0
"""Nodes of a class before it is believed, and of a depth."""
_PRIOR = 8.0
"""Nodes that what is thought of a rank before it was seen counts for."""
_SECOND, _FURTHER = 0.35, 0.6
"""What the second proposal takes of the chance that the first leaves, and each further one of that before it."""

Chances = Sequence[Sequence[float]]
"""By depth and rank: how often a proposal is the target's choice."""


def chances_of(counts: ProposalCounts, rows: Sequence[int]) -> Chances | None:
    """Of a batch with so many rows of each class. None before enough was seen.

    A class that was hardly seen counts as all of them together, a depth as the one before it.
    """
    seen, chosen = counts
    together = [[_sums(each[depth] for each in table) for depth in range(len(table[0]))] for table in (seen, chosen)]
    if together[0][0][0] < ENOUGH:
        return None
    total = max(sum(rows), 1)
    shares = [count / total for count in rows]
    of_class = [
        _of_class(seen[kind], chosen[kind]) if seen[kind][0][0] >= ENOUGH else _of_class(*together)
        for kind in range(len(seen))
    ]
    if not any(rows):
        return of_class[0]
    return [
        [sum(map(mul, shares, of_rank)) for of_rank in zip(*of_depth, strict=True)]
        for of_depth in zip(*of_class, strict=True)
    ]


def _of_class(seen: Chances, chosen: Chances) -> Chances:
    found: list[list[float]] = []
    for of_depth, hits in zip(seen, chosen, strict=True):
        if of_depth[0] < ENOUGH and found:
            found.append(found[-1])
            continue
        best = min(hits[0] / max(of_depth[0], 1.0), 1.0)
        chances, left = [best], 1.0 - best
        for rank in range(1, len(hits)):
            thought = (1.0 - best) * _SECOND * _FURTHER ** (rank - 1)
            chance = (hits[rank] + _PRIOR * thought) / (of_depth[rank] + _PRIOR)
            chances.append(min(chance, left))
            left -= chances[-1]
        found.append(chances)
    return found


def path_chances(shape: SpecShape, chances: Chances) -> list[float]:
    """That a path of a tree of this shape has 1, 2, ... drafts. Depths that nobody knows are as the last."""
    frontier, nodes = [1.0], list[tuple[float, int]]()
    for depth in range(shape.num_steps):
        of_rank = chances[min(depth, len(chances) - 1)][: shape.topk]
        children = [up * chance for up in frontier for chance in of_rank]
        nodes += [(chance, depth) for chance in children]
        frontier = nlargest(shape.topk, children)
    reached = [0.0] * min(shape.num_steps, shape.num_draft_tokens - 1)
    for chance, depth in nlargest(shape.num_draft_tokens - 1, nodes, key=lambda node: (node[0], -node[1])):
        reached[depth] += chance
    return reached


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]
