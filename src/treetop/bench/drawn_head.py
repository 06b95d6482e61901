"""A head without a model: chances by depth and rank, and what its trees get of what is drawn from them."""

import random

from treetop.scheduler.acceptance_probs import nodes_of
from treetop.types.costs import HeadAcceptance
from treetop.types.layout import SpecShape
from treetop.types.messages import ProposalCounts

DEPTHS, RANKS = 5, 4


class DrawnHead:
    """A head whose proposals are the target's choice as often as `chances` says, and what has been counted of it."""

    def __init__(self, chances: HeadAcceptance, seed: int = 0) -> None:
        self._random, self._seen, self._chosen = random.Random(seed), _zeros(), _zeros()
        self.become(chances)

    def become(self, chances: HeadAcceptance) -> None:
        """From now on it is another."""
        self._table, self._trees = chances.table(DEPTHS, RANKS), dict[SpecShape, dict[tuple[int, ...], float]]()

    def tree(self, shape: SpecShape) -> dict[tuple[int, ...], float]:
        if shape not in self._trees:
            self._trees[shape] = nodes_of(shape, self._table)
        return self._trees[shape]

    def tokens(self, shape: SpecShape) -> float:
        """Of a round a row, in the mean."""
        return 1.0 + sum(self.tree(shape).values())

    def accepted(self, shape: SpecShape) -> int:
        """Drafts of one row's tree."""
        return len(self.path(shape))

    def path(self, shape: SpecShape) -> tuple[int, ...]:
        """Their ranks: what is chosen at each node is drawn, until it is not in the tree."""
        path: tuple[int, ...] = ()
        while len(path) < shape.num_steps:
            of_rank, draw = self._table[len(path)], self._random.random()
            rank = next((r for r in range(RANKS) if draw < sum(of_rank[: r + 1])), RANKS)
            for each in range(shape.topk):
                self._seen[len(path)][each] += 1
                self._chosen[len(path)][each] += each == rank
            if (*path, rank) not in self.tree(shape):
                break
            path = (*path, rank)
        return path

    def counts(self) -> ProposalCounts:
        """As a calibration has them now, of greedy requests."""
        seen, chosen = ([[*of_rank] for of_rank in table] for table in (self._seen, self._chosen))
        return ([seen, _zeros(), _zeros()], [chosen, _zeros(), _zeros()])


def _zeros() -> list[list[float]]:
    return [[0.0] * RANKS for _ in range(DEPTHS)]
