"""What rounds of a model cost on a GPU, modelled: for policies that are tried without either."""

from collections.abc import Sequence

from treetop.types.costs import CatchUpCost, CostTable, RoundCost
from treetop.types.layout import PLAIN, SpecShape

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def costs_of_a_gpu(shapes: Sequence[SpecShape]) -> CostTable:
    """About those of an 8B model: a tree of 16 nodes is 1.27 plain rounds at one row, 3.2 at 32."""
    rounds = [RoundCost(rows, shape, _seconds(rows, shape), 2e-9 * rows) for rows in ROWS for shape in shapes]
    return CostTable("a model", tuple(rounds), tuple(CatchUpCost(rows, (0.2 + 0.013 * rows) / 1e3) for rows in ROWS))


def _seconds(rows: int, shape: SpecShape) -> float:
    nodes, plain = rows * shape.num_draft_tokens, 4.5 * (1 + 0.004 * rows)
    draft = 0.12 * shape.num_steps * (1.0 if shape.topk == 1 else 1.3) + 0.25 * (shape != PLAIN)
    return (plain + draft + 0.012 * (nodes - 1) + 0.012 * max(nodes - 64, 0)) / 1e3
