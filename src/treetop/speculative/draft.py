"""Growing: the drafter expands k branches a level, level by level, then the best T - 1 nodes become the tree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.protocol import Grower, Nodes
from treetop.kernels.table import Ops
from treetop.kernels.tree.grow import Children, Frontier, TreeBuilder


@dataclass(frozen=True, slots=True)
class Level:
    """One draft level's queries and their tail, behind columns of the drafter's block that they see.

    all_positions: [rows, S * k] int64, of the nodes of every level.
    mask: [rows, k, (index + 1) * k] bool, true ancestors.
    """

    index: int
    all_positions: Tensor
    mask: Tensor

    @property
    def positions(self) -> Tensor:
        """Of the queries, [rows, k] int64."""
        k = self.mask.shape[1]
        return self.all_positions[:, self.index * k : (self.index + 1) * k]


def grow_tree(
    drafter: Grower,
    growth: TreeBuilder,
    frontier: Frontier,
    ops: Ops,
    attend: Callable[[Level], Attend],
    lines: Any = None,
    lead: int = 0,
) -> None:
    """Grow each row's candidates: the drafter runs S - 1 times on k nodes a row; level 0 needs no run.

    growth, frontier: as `Ops.start` leaves and gives them. attend: the attention of a level. lines: of the drafter's
    block. lead: queries of the block that nodes see, and stand behind.
    Source: EAGLE-2, arXiv:2406.16858, section 4.1.
    """
    k, positions = growth.shape.topk, growth.positions + lead if lead else growth.positions
    for index in range(growth.shape.num_steps - 1):
        level = Level(index, positions, frontier.mask)
        nodes = Nodes(frontier.tokens, frontier.hidden, index + 1)
        out = drafter.step(nodes, level.positions, attend(level), lines)
        proposal = drafter.propose(replace(nodes, state=out), k, growth.row_inv_temp(nodes.depth), lines)
        frontier = ops.grow(growth, index, frontier, Children(proposal.tokens, proposal.logprob, out))
