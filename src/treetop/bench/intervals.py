"""How sure a ratio of sums is: resample what was summed, and see how far the ratio moves."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

_DRAWS = 2000
_LEVEL = 0.95

Factor = tuple[Sequence[float], Sequence[float]]
"""Above and below the line; entry i of both belongs to item i."""


class Interval(NamedTuple):
    """A value and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_interval(*factors: Factor) -> Interval | None:
    """The product of `sum(above) / sum(below)`, its interval by drawing items with replacement 2,000 times.

    All factors have the same items, and each draw takes the same ones of all: figures of two runs over the same prompts
    are compared prompt by prompt. The same input gives the same interval; of one item it is a point. None if a sum
    below a line is 0.
    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979; the percentile interval.
    """
    above, below = (torch.tensor([factor[i] for factor in factors], dtype=torch.float64) for i in (0, 1))
    if not bool((below.sum(1) > 0).all()):
        return None
    items = above.shape[1]
    drawn = torch.randint(items, (_DRAWS, items), generator=torch.Generator().manual_seed(0))
    ratios = (above[:, drawn].sum(2) / below[:, drawn].sum(2)).prod(0)  # [factors, draws, items] -> [draws]
    ratios = ratios[ratios.isfinite()]
    value = float((above.sum(1) / below.sum(1)).prod())
    tail = (1 - _LEVEL) / 2
    low, high = torch.quantile(ratios, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value, low, high)
