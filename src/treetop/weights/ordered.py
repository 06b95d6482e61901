"""Plain weights kept in 13 bits too (`kernels.gemm.ordered_weights`), for products whose k is not cut: which of them,
and for how many rows they serve.

They have no outliers that cost time, and bits are those of 16: so a shape decides, by a committed table of what was
measured or a rule, and next to nothing of the numbers.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.gemm.ordered_weights import (
    GROUP,
    OrderedLaunch,
    OrderedWeight,
    bytes_of,
    encode,
    fits,
    why_not_ordered,
)
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable, read_table

TABLE = Path(__file__).parents[1] / "kernels" / "gemm" / "ordered_weights.json"
ROWS = (8, 16, 32)
"""Rows with which launches are measured; others take those of the next larger."""
_WORTH_NUMBERS = 2**25
"""Of weights that were not measured, those of fewer numbers stay in 16 bits alone."""


@cache
def offers(n: int, k: int, gated: bool, gpu: GpuTraits) -> dict[int, OrderedLaunch]:
    """By `ROWS`, the launches that make uncut products with a weight [n, k] in 13 bits faster.

    Measured ones lie in `ordered_weights.json` (`benchmarks/ordered_weights.py`). Of other large weights those with
    lines enough get four groups a program and two programs a multiprocessor or more; others, for the fewest rows alone,
    programs of one group.
    """
    table = load_table()
    if not table.holds_for(gpu) or not fits(n, k) or why_not_ordered(torch.bfloat16, gpu) is not None:
        return {}
    found = {}
    for rows in ROWS:
        known = table.entries.get((n, k, gated, rows))
        if known is not None:
            if known["launch"] is not None:
                found[rows] = OrderedLaunch(*known["launch"])
        elif n * k >= _WORTH_NUMBERS and n >= 8 * GROUP * gpu.num_sms and n % (4 * GROUP) == 0:
            found[rows] = OrderedLaunch(4, 3 if rows <= 16 else 2, 4)
        elif n * k >= _WORTH_NUMBERS and rows <= 8:
            found[rows] = OrderedLaunch(1, 7, 1)
    return found


class OrderedProducts:
    """A weight in 13 bits, and the launches with which its products are faster than those of the whole weight."""

    def __init__(self, weight: OrderedWeight, launches: Mapping[int, OrderedLaunch]) -> None:
        self.weight, self._launches = weight, launches

    def launch(self, rows: int) -> OrderedLaunch | None:
        """The launch for so many rows; None where the whole weight is faster."""
        return self._launches.get(next((most for most in ROWS if rows <= most), 0))


def ordered_if_faster(weight: Tensor, gated: bool, gpu: GpuTraits) -> OrderedProducts | None:
    """The weight [n, k] in 13 bits if any product is faster with it."""
    offered = offers(*weight.shape, gated, gpu) if weight.dtype == torch.bfloat16 else {}
    if not offered:
        return None
    made = encode(weight, gated)
    return OrderedProducts(made, offered) if made is not None else None


def ordered_bytes(n: int, k: int, gated: bool, gpu: GpuTraits) -> int:
    """Bytes that a weight [n, k] takes in 13 bits; 0 if no number of rows is faster with it."""
    return bytes_of(n, k) if offers(n, k, gated, gpu) else 0


@cache
def load_table() -> TunedTable[dict[str, Any]]:
    """The committed table, by n, k, whether gated, and `ROWS`: `launch`, the fields of an `OrderedLaunch`, or None."""
    return read_table(TABLE, dict, ("n", "k", "gated", "rows"))
