"""Between the nodes of trees that a budget has cut, one after the other, and each row's own."""

from torch import Tensor

from treetop.types.tree import FlatNodes


def spread_nodes(flat: FlatNodes, of_nodes: Tensor) -> Tensor:
    """What was found for flat nodes [N, 1, ...] by row, [rows, T, ...]; padding has its root's."""
    found: Tensor = of_nodes.flatten(0, 1).index_select(0, flat.spread.reshape(-1)).unflatten(0, flat.spread.shape)
    return found


def packed_nodes(flat: FlatNodes, by_row: Tensor) -> Tensor:
    """Of each row's nodes [rows, T, ...] those that are left, [N, 1, ...]."""
    return by_row.flatten(0, 1).index_select(0, flat.at)[:, None]
