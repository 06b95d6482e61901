"""How many drafts of each shape the target accepts: learned on the host from what rounds gave, a round late.

For each shape and depth the logit of the chance that a path that got there goes on. It drifts, so what is known of it
fades: an extended Kalman filter of a random walk, whose steps are large where little is known and small where many
rows have said the same. A step moves the other shapes too, by a part: text that gets easy gets easy for all of them.
Where a calibration is learned, what it has counted by depth and rank foretells shapes that have not run
(`scheduler.tree_chances`).

Source: M. West, P. J. Harrison, H. S. Migon, "Dynamic generalized linear models and Bayesian forecasting", 1985.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

from treetop.scheduler.tree_chances import Chances, path_chances
from treetop.types.layout import SpecShape

_CHAIN, _TREE = 0.6, 1.0
"""Logits before anything is known: a chain's next token holds in two of three rounds, one of a tree's a bit more."""
_LOWEST, _HIGHEST = -2.0, 5.0
"""What a head that is always wrong counts as: one in eight, so that it is tried again; and one that is always right."""
_VARIANCE, _MOST_VARIANCE = 1.0, 4.0
_DRIFT, _STALE = 0.002, 0.01
"""Variance that a round adds, and more for a shape that it did not have: what it is worth now nobody knows."""
_SHARED = 0.7
"""The part of a step that other shapes make too."""
_LARGEST_STEP = 1.5
_TRUST, _TINY = 0.05, 1e-9
"""Variance of what rounds say beside which a calibration's word counts half."""


@dataclass(slots=True)
class _Chances:
    """Of one shape, by depth. foretold: the logits that a calibration says, before it says any those of the start.
    seen: the round that last told something."""

    logits: list[float]
    variances: list[float]
    foretold: list[float]
    seen: int = 0


@dataclass(slots=True)
class AcceptanceEstimate:
    """Expected tokens a row of each shape. num_rounds: so far, plain ones too."""

    shapes: Sequence[SpecShape]
    num_rounds: int = 0
    _by_shape: dict[SpecShape, _Chances] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for shape in self.shapes:
            depth = min(shape.num_steps, shape.num_draft_tokens - 1)
            prior = _CHAIN if shape.topk == 1 else _TREE
            self._by_shape[shape] = _Chances([prior] * depth, [_VARIANCE] * depth, [prior] * depth)

    def note(self, shape: SpecShape, accept_lens: Sequence[int]) -> None:
        """A round of this shape was accepted so far in each of its rows. A plain one tells nothing."""
        self.num_rounds += 1
        chances = self._by_shape.get(shape)
        if chances is None or not accept_lens:
            return
        depth, aged = len(chances.logits), self._aged(chances)
        ended = [0] * (depth + 1)
        for length in accept_lens:
            ended[min(length, depth)] += 1
        chances.seen, reached = self.num_rounds, len(accept_lens)
        others = [each for other, each in self._by_shape.items() if other is not shape]
        for at in range(depth):
            variance = min(chances.variances[at] + aged, _MOST_VARIANCE)
            went_on = reached - ended[at]
            chance = _chance(chances.logits[at])
            gain = variance / (1.0 + variance * reached * chance * (1.0 - chance))
            step = min(max(gain * (went_on - reached * chance), -_LARGEST_STEP), _LARGEST_STEP)
            chances.logits[at] = min(max(chances.logits[at] + step, _LOWEST), _HIGHEST)
            chances.variances[at] = gain
            for other in others:
                if at < len(other.logits):
                    other.logits[at] = min(max(other.logits[at] + _SHARED * step, _LOWEST), _HIGHEST)
            reached = went_on

    def learn(self, chances: Chances | None) -> None:
        """What a calibration says of each shape has changed: so does what is thought of it, the less the more its own
        rounds have said.
        """
        if chances is None:
            return
        for shape, known in self._by_shape.items():
            reached = 1.0
            for at, path in enumerate(path_chances(shape, chances)):
                chance = path / reached if reached > 0.0 else 0.0
                said = min(max(log(max(chance, _TINY) / max(1.0 - chance, _TINY)), _LOWEST), _HIGHEST)
                variance = min(known.variances[at] + self._aged(known), _MOST_VARIANCE)
                moves = (said - known.foretold[at]) * variance / (variance + _TRUST)
                known.logits[at] = min(max(known.logits[at] + moves, _LOWEST), _HIGHEST)
                known.foretold[at], reached = said, path

    def tokens(self, shape: SpecShape, deviations: float = 0.0) -> float:
        """Expected tokens a row of a round. deviations: how many standard deviations better than that each chance may
        be.
        """
        chances, expected, path = self._by_shape[shape], 1.0, 1.0
        aged = self._aged(chances)
        for logit, variance in zip(chances.logits, chances.variances, strict=True):
            better = deviations * sqrt(min(variance + aged, _MOST_VARIANCE)) if deviations else 0.0
            path *= _chance(logit + better)
            expected += path
        return expected

    def _aged(self, chances: _Chances) -> float:
        """Variance that has come since something was told of a shape."""
        passed = self.num_rounds - chances.seen
        return _DRIFT * passed + _STALE * max(passed - 1, 0)


def _chance(logit: float) -> float:
    return 1.0 / (1.0 + exp(-logit))
