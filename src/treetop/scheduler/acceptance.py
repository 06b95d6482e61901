"""How many drafts of each shape the target accepts: what a model of the head says, corrected by rounds a round late.

The model is a table of chances by depth and rank: what is thought of the head at first, then what a calibration has
counted (`scheduler.tree_chances`). It says of every shape how far its paths get, also of those that have not run.
Rounds move two things, in logits of the chance that a path goes on:

- `ease`, one number for all shapes: drafts hold more often, or less, than the model says. It changes with the text and
  comes back to 0, since the counts follow;
- of each shape what only its own rounds tell: what it accepts beside what the model says of it.

Both are estimated together, each round's surprise divided between them by how uncertain they are.

Source: M. West, P. J. Harrison, H. S. Migon, "Dynamic generalized linear models and Bayesian forecasting", 1985.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from treetop.scheduler.tree_chances import Chances, path_chances
from treetop.types.costs import HeadChances
from treetop.types.layout import SpecShape

_LONGEST = 5.0
"""Bound of the logit of a chance, and of what moves it."""
_BACK, _EASE = 0.995, 0.25
"""What is left of `ease` after a round that says nothing, and its variance when nothing was said for long."""
_OWN, _AGES = 0.04, 1e-4
"""Variance of what a shape has of its own, at most, and what a round adds to it."""
_LARGEST_STEP = 1.5


@dataclass(slots=True)
class _OfShape:
    """logits: by depth, that a path that got there goes on, by the model. own: to be added. variance: of `own`."""

    logits: list[float]
    own: float = 0.0
    variance: float = _OWN


class AcceptanceEstimate:
    """Expected tokens a row of each shape."""

    def __init__(self, shapes: Sequence[SpecShape], head: HeadChances) -> None:
        deepest = max((shape.num_steps for shape in shapes), default=1)
        widest = max((shape.topk for shape in shapes), default=1)
        chances = head.table(deepest, widest)
        self._by_shape = {shape: _OfShape(_logits(shape, chances)) for shape in shapes}
        self._ease, self._variance = 0.0, _EASE
        self._told: SpecShape | None = None  # the shape that has said something last
        self._silent = True  # the last round was plain

    def learn(self, chances: Chances) -> None:
        """The model has changed, but for the shape that runs not what is expected of it: that follows as `ease` goes
        back.
        """
        before = None if self._told is None else _mean(self._by_shape[self._told].logits)
        for shape, known in self._by_shape.items():
            known.logits = _logits(shape, chances)
        if self._told is not None and before is not None:
            self._ease = _bounded(self._ease + before - _mean(self._by_shape[self._told].logits))

    def note(self, shape: SpecShape, accept_lens: Sequence[int]) -> None:
        """A round of this shape was accepted so far in each of its rows. A plain one tells nothing."""
        self._ease *= _BACK
        self._variance = _BACK**2 * self._variance + (1 - _BACK**2) * _EASE
        for each in self._by_shape.values():
            each.variance = min(each.variance + _AGES, _OWN)
        known = self._by_shape.get(shape)
        self._silent = known is None
        if known is None or not accept_lens:
            return
        self._told, depths = shape, len(known.logits)
        ended = [0] * (depths + 1)
        for length in accept_lens:
            ended[min(length, depths)] += 1
        reached, surprise, information = len(accept_lens), 0.0, 0.0
        for logit, ends in zip(known.logits, ended, strict=False):
            chance = _chance(logit + self._ease + known.own)
            surprise += reached - ends - reached * chance
            information += reached * chance * (1.0 - chance)
            reached -= ends
        certain = 1.0 / (1.0 + (self._variance + known.variance) * information)
        step = min(max(surprise * certain * (self._variance + known.variance), -_LARGEST_STEP), _LARGEST_STEP)
        mine = known.variance / (self._variance + known.variance)
        self._ease, known.own = _bounded(self._ease + step * (1 - mine)), _bounded(known.own + step * mine)
        self._variance -= self._variance**2 * information * certain
        known.variance -= known.variance**2 * information * certain

    def tokens(self, shape: SpecShape, deviations: float = 0.0) -> float:
        """Expected tokens a row of a round. deviations: how many standard deviations better than that it may be, beside
        the shape that runs.
        """
        known, expected, path = self._by_shape[shape], 1.0, 1.0
        moved = self._ease + known.own
        if deviations:
            moved += deviations * sqrt(known.variance + (self._variance if self._silent else 0.0))
        for logit in known.logits:
            path *= _chance(logit + moved)
            expected += path
        return expected


def _logits(shape: SpecShape, chances: Chances) -> list[float]:
    found, reached = [], 1.0
    for path in path_chances(shape, chances):
        chance = path / reached if reached > 0.0 else 0.0
        found.append(_bounded(log(max(chance, 1e-9) / max(1.0 - chance, 1e-9))))
        reached = path
    return found


def _mean(logits: Sequence[float]) -> float:
    return sum(logits) / len(logits)


def _bounded(logit: float) -> float:
    return min(max(logit, -_LONGEST), _LONGEST)


def _chance(logit: float) -> float:
    return 1.0 / (1.0 + exp(-logit))
