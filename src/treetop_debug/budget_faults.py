"""Faults of a budget of nodes by name (`tests/engine/test_node_budget.py`): how trees may be cut, and read, wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treetop.types.tree import FlatNodes
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead


def _worst_first(real: Callable[..., Any]) -> Callable[..., Any]:
    """The nodes of the unlikeliest paths are kept, and their parents are not."""

    def best(score: Tensor, count: int) -> Any:
        return real(-score, count)

    return best


def _single_rows_stay(real: Callable[..., None]) -> Callable[..., None]:
    """Rows of a root alone, as padding is, keep where they stood in the round before (sgl-23037)."""

    def place(kept: Tensor, out: FlatNodes) -> None:
        before = out.row_start.clone(), out.spread.clone()
        real(kept, out)
        alone = out.count == 1
        for mine, old in zip((out.row_start, out.spread), before, strict=True):
            mine[alone] = old[alone]

    return place


def _of_the_row_before(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What is by row is gathered for the nodes of the row behind it, which then draw by another's uniforms."""

    def packed(flat: FlatNodes, by_row: Tensor) -> Tensor:
        whose = by_row.stride(1) == 0
        return real(flat, torch.roll(by_row, 1, 0) if whose else by_row)

    return packed


BUDGET_FAULTS = by_name(
    Fault(
        "budget-flat-without-rows",
        "buffers of flat nodes are sized without the rows (sgl-27338)",
        (instead("treetop.types.layout:Layout.most_flat_nodes", property(lambda layout: layout.verify_tail)),),
        "round buffers: need",
        1,
    ),
    Fault(
        "budget-orphans",
        "a child is kept without its parent",
        (Patch("treetop.kernels.tree.trim:stable_topk", _worst_first),),
        "oracle",
        None,
    ),
    Fault(
        "budget-stale-starts",
        "rows of one node keep the start that they had in the round before (sgl-23037)",
        (Patch("treetop.kernels.tree.trim:place_nodes", _single_rows_stay),),
        "oracle",
        None,
    ),
    Fault(
        "budget-commit-by-columns",
        "the path's K/V are taken where a whole tree's stand",
        (instead("treetop.kernels.tree.commit:Paths.of_flat", lambda paths, flat, capacity: replace(paths)),),
        "oracle",
        None,
    ),
    Fault(
        "budget-features-by-columns",
        "the path's features are taken where a whole tree's stand (sgl-27545)",
        (instead("treetop.engine.rounds:flat_entries", lambda flat, path, capacity: path),),
        "feature_node",
        2,
    ),
    Fault(
        "budget-uniforms-of-another",
        "nodes draw by the sampler of the row before theirs",
        (Patch("treetop.engine.rounds:packed_nodes", _of_the_row_before),),
        "oracle",
        None,
    ),
)
