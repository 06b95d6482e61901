"""Calibration: what a head's log-probabilities say of acceptance, learned from the target's choices.

The score of a node is its estimated probability to be accepted. A head's logits are multiplied by a learned inverse
temperature before the softmax, by the depth of the proposal: heads that draft all depths in one pass are surer
of deep ones than they should be. Then each log-probability gets a learned bias, by that depth and by its rank among
the k of its parent. So the same trees grow whatever the scale of a head's logits; no chain and no token depends on it.
Rows are of a class by the temperature that they sample with, for a draw agrees with a head less often than an argmax,
and by their adapter, which the head may fit less (`types.sampling.class_of`). Learning is in `kernels.tree.learn`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treetop.kernels.triton_guard import Arg, constexpr, jit, tl
from treetop.types.sampling import CLASSES


class InverseTemperature(NamedTuple):
    """What logits of a depth are multiplied by. table: [classes] float32. classes: [rows] int64, of a batch's rows."""

    table: Tensor
    classes: Tensor

    def of_lines(self, lines: int) -> Tensor:
        """[lines, 1], where each row has as many of them."""
        return self.table[self.classes].repeat_interleave(lines // len(self.classes))[:, None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The state of an engine, on the device: written in place, never rebound.

    inv_temp: [depths, classes] float32, so that a depth's are side by side.
    logprob_bias: [classes, depths, ranks] float32.
    nodes: [classes, depths] float32, learned from, of those remembered.
    seen, chosen, predicted: [classes, depths, ranks] float32, of those nodes how many had a proposal of a rank, how
        often it was the target's choice there, and how often the head's probabilities said that it would be.
    sums: [classes, depths, 1 + 2 * ranks] int64: a round's nodes, then chosen and predicted; zero between rounds.

    depths: S, of proposals at depth 1 first; ranks: k.
    """

    inv_temp: Tensor
    logprob_bias: Tensor
    nodes: Tensor
    seen: Tensor
    chosen: Tensor
    predicted: Tensor
    sums: Tensor

    @property
    def acceptance(self) -> Tensor:
        """How often each proposal was looked at and chosen: [2, classes, depths, ranks] float32."""
        return torch.stack([self.seen, self.chosen])

    def of_classes(self, which: slice) -> "Calibration":
        """These classes' part of every table: views."""
        parts = {name: getattr(self, name)[which] for name in self.__dataclass_fields__ if name != "inv_temp"}
        return Calibration(inv_temp=self.inv_temp[:, which], **parts)

    def copy(self) -> "Calibration":
        """In memory of its own."""
        return Calibration(*(getattr(self, name).clone() for name in self.__dataclass_fields__))

    def copy_from(self, other: "Calibration") -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(other, name))

    def reset(self) -> None:
        """What is known before anything was learned: heads are believed."""
        for name in self.__dataclass_fields__:
            getattr(self, name).zero_()
        self.inv_temp.fill_(1.0)


def make_calibration(
    depths: int, ranks: int, make: Callable[[tuple[int, ...], torch.dtype], Tensor], classes: int = CLASSES
) -> Calibration:
    """The state of an engine that has learned nothing, in memory that `make` gives."""
    real, by_depth, by_rank = torch.float32, (classes, depths), (classes, depths, ranks)
    made = Calibration(
        make((depths, classes), real),
        make(by_rank, real),
        make(by_depth, real),
        make(by_rank, real),
        make(by_rank, real),
        make(by_rank, real),
        make((*by_depth, 1 + 2 * ranks), torch.int64),
    )
    made.reset()
    return made


def corrected(logprob: Tensor, logprob_bias: Tensor) -> Tensor:
    """Log-probabilities [..., k], best first, with the biases of their ranks: none above 0 or above one before it.

    So no child outranks its parent, and none a sibling that the head prefers. NaN is -inf, and so is what follows it.
    """
    known = logprob.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    return (known + logprob_bias).clamp(max=0).cummin(dim=-1).values


@jit
def corrected_in_registers(logprob: Arg, logprob_bias: Arg, first: Arg, rank: Arg, there: Arg, k: constexpr) -> Arg:
    """`corrected` of the proposals `first + rank`: they lie side by side from `first` on, as do the biases."""
    lowest = tl.zeros_like(first).to(tl.float32)
    for other in tl.static_range(k):
        own = tl.load(logprob + first + other, mask=there, other=0.0)
        own = tl.where(own == own, own, float("-inf")) + tl.load(logprob_bias + other)  # noqa: PLR0124 - NaN is not itself
        lowest = tl.where(rank >= other, tl.minimum(lowest, own), lowest)
    return lowest
