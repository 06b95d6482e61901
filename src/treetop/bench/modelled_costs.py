"""What rounds of a model cost on a GPU: for policies that are tried without either.

Llama-3.1-8B's shape in bfloat16 with its EAGLE-3 head on an H200, within 6 % of twelve measured rounds (2026-11-24):
the products by the nodes of all rows, attention by rows, a draft step.
"""

from bisect import bisect_right
from collections.abc import Sequence

from treetop.types.costs import CatchUpCost, CostTable, RoundCost
from treetop.types.layout import SpecShape

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PRODUCTS_MS = ((0, 3.43), (16, 3.55), (32, 3.92), (64, 4.18), (128, 4.87), (192, 6.2), (256, 7.4), (512, 12.9))
"""By nodes of all rows; more cost `_NODE_MS` each."""
_NODE_MS, _STEP_MS, _DRAFT_NODE_MS = 0.0247, 0.235, 0.0009
_TOKEN_MS = 0.042 / 1024
"""Of each token that a row attends to."""


def costs_of_a_gpu(shapes: Sequence[SpecShape]) -> CostTable:
    """Of these shapes, and of catching up what 16 plain rounds leave to the draft."""
    rounds = [
        RoundCost(rows, shape, _seconds(rows, shape), _TOKEN_MS * rows / 1e3) for rows in ROWS for shape in shapes
    ]
    return CostTable("a model", tuple(rounds), tuple(CatchUpCost(rows, (0.2 + 0.013 * rows) / 1e3) for rows in ROWS))


def mixed_seconds(rows: int, shape: SpecShape, row_tokens: float, tokens: int) -> float:
    """Of a round with a chunk of `tokens` prompt tokens in its forward, if it is captured. row_tokens: see
    `CostTable.seconds`."""
    products = _products_ms(rows * shape.num_draft_tokens + tokens) - _products_ms(rows * shape.num_draft_tokens)
    return _seconds(rows, shape) + (_TOKEN_MS * rows * row_tokens + products) / 1e3


def nodes_seconds(rows: int, nodes: int, num_steps: int, topk: int, row_tokens: float) -> float:
    """Of a round with so many nodes of all rows, whose trees grow in so many steps."""
    drafted = num_steps * (_STEP_MS + _DRAFT_NODE_MS * rows * topk)
    return (_products_ms(nodes) + drafted + _TOKEN_MS * rows * row_tokens) / 1e3


def _seconds(rows: int, shape: SpecShape) -> float:
    return nodes_seconds(rows, shape.nodes_at(rows), shape.num_steps, shape.topk, 0.0)


def _products_ms(nodes: int) -> float:
    at = bisect_right(_PRODUCTS_MS, (nodes, float("inf")))
    if at == len(_PRODUCTS_MS):
        last, last_ms = _PRODUCTS_MS[-1]
        return last_ms + (nodes - last) * _NODE_MS
    (low, low_ms), (high, high_ms) = _PRODUCTS_MS[at - 1], _PRODUCTS_MS[at]
    return low_ms + (nodes - low) * (high_ms - low_ms) / (high - low)
