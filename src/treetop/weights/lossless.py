"""Plain weights kept in 12 bits too (`kernels.gemm.lossless_weights`): which of them, and for how many rows they serve.

Outliers cost time, more the more rows there are. So the committed table says with how many of them in a block of lines
a product is still faster than with 16 bits, measured with that many in every block (`benchmarks/lossless_weights.py`);
they are counted when a weight is loaded, and where one block has more the 16 bits serve. Counting, unlike timing at
load, gives the same products at every start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from treetop.kernels.gemm.lossless_weights import (
    BLOCK,
    TILE,
    LosslessLaunch,
    LosslessWeight,
    compress,
    has_steps,
    is_whole,
)
from treetop.kernels.gemm.skinny_gemm import load_table, most_splits, row_class
from treetop.kernels.triton_guard import GpuTraits, gpu_traits, why_not

_WORTH_PARAMETERS = 4096 * 4096
"""The largest weight that was measured and gained nothing: of others only larger ones are compressed."""
_MAX_UNMEASURED = 2.5e-4
"""Outliers of weights that were not measured, as a share of a block's numbers; of normal weights it is 1e-4."""
ROWS = (1, 4, 8, 16, 32)
"""Rows with which limits are measured; others take those of the next larger."""


@dataclass(frozen=True, slots=True)
class LaunchLimit:
    """A launch, and the most outliers of a block of lines with which it is faster than the whole weight's."""

    launch: LosslessLaunch
    most_outliers: int


def why_not_compressed(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights are not compressed here; None if they can be."""
    if dtype != torch.bfloat16:
        return "only bfloat16 weights can be compressed"
    table = load_table()
    if why_not(device) is not None or not table.holds_for(gpu_traits(device)):
        return f"its products are only measured on GPUs of compute capability 9.0 with {table.num_sms} multiprocessors"
    return None


@cache
def offers(n: int, k: int, gated: bool, gpu: GpuTraits) -> dict[int, LaunchLimit]:
    """By `ROWS`, the launches that make products with a compressed weight [n, k] faster, if its outliers are few.

    Measured ones lie in `skinny_gemm.json`. Other weights, if larger than the largest that gained nothing, get about
    three programs a multiprocessor for up to 16 rows.
    """
    table = load_table()
    if not table.holds_for(gpu) or not is_whole(n, k, gated):
        return {}
    found = {}
    for rows in ROWS:
        entry = table.entries.get((n, k, gated, row_class(rows)), {})
        if "launch" in entry:
            measured = entry.get("compressed", {"most_outliers": {}})
            if str(rows) in measured["most_outliers"]:
                found[rows] = LaunchLimit(LosslessLaunch(*measured["launch"]), measured["most_outliers"][str(rows)])
        elif rows <= 16 and n * k > _WORTH_PARAMETERS:
            block_n = 2 * TILE if n % (2 * TILE) == 0 else TILE
            splits = 1 if gated else most_splits(n // block_n, k // BLOCK, gpu)
            launch = LosslessLaunch(
                block_n, splits, num_stages=4, num_warps=block_n // 16, picks=64 if splits == 1 else 32
            )
            found[rows] = LaunchLimit(launch, int(_MAX_UNMEASURED * block_n * k))
    return found


class LosslessProducts:
    """A weight in 12 bits, and the launches with which its products are faster than those of the whole weight."""

    def __init__(self, weight: LosslessWeight, offered: Mapping[int, LaunchLimit]) -> None:
        self.weight = weight
        self.launches = {
            rows: offer.launch
            for rows, offer in offered.items()
            if weight.crowd[offer.launch.block_n] <= offer.most_outliers
        }

    def launch(self, rows: int) -> LosslessLaunch | None:
        """The launch for so many rows; None where the whole weight is faster."""
        return self.launches.get(next((limit for limit in ROWS if rows <= limit), 0))

    def fitting(self, whole: Tensor, made: "LosslessProducts | None") -> LosslessWeight | None:
        """Other numbers of this weight [n, k] in 12 bits, for launches that captured rounds have; made: what a start
        would keep of them. None if a launch has not the steps for their outliers.

        With a few more outliers than at a start a launch is right and hardly slower, and rounds are not captured anew.
        """
        weight = compress(whole, self.weight.gated) if made is None else made.weight
        able = weight is not None and all(has_steps(weight, launch) for launch in self.launches.values())
        return weight if able else None


def compress_if_faster(weight: Tensor, gated: bool, gpu: GpuTraits) -> LosslessProducts | None:
    """The weight [n, k] in 12 bits if any product is faster with it."""
    offered = offers(*weight.shape, gated, gpu)
    if not offered:
        return None
    small = compress(weight, gated, max(offer.most_outliers for offer in offered.values()))
    made = LosslessProducts(small, offered) if small is not None else None
    return made if made is not None and made.launches else None


def compressed_bytes(n: int, k: int, gated: bool, gpu: GpuTraits) -> int:
    """Bytes of the words of a weight [n, k]; 0 if no number of rows is faster with it compressed."""
    return 3 * n * k // 2 if offers(n, k, gated, gpu) else 0
