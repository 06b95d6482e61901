"""How many drafts of each shape the target accepts: what a model of the head says, corrected by rounds a round late.

The model is a table of chances by depth and rank: what is thought of the head at first, then what a calibration has
counted (`scheduler.acceptance_probs`). It says of every shape how far its paths get, also of those that have not run.
Rounds move two things, in logits of the chance that a path goes on:

- `ease`, one number for all shapes: drafts hold more often, or less, than the model says. It changes with the text and
  comes back to 0, since the counts follow;
- of each shape what only its own rounds tell: what it accepts beside what the model says of it.

Both are estimated together, each round's surprise divided between them by how uncertain they are.

Beside that, how often paths went on by the best proposal is added up by depth, with what the model said of it:
`learned` is the model's head so corrected, for the next start.

Source: M. West, P. J. Harrison, H. S. Migon, "Dynamic generalized linear models and Bayesian forecasting", 1985.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf, log, sqrt

from treetop.scheduler.acceptance_probs import AcceptanceProbs, left_of, path_probs
from treetop.types.costs import HeadAcceptance
from treetop.types.layout import SpecShape

_LONGEST = 5.0
"""Bound of the logit of a chance, and of what moves it."""
_BACK, _EASE = 0.995, 0.25
"""What is left of `ease` after a round that says nothing, and its variance when nothing was said for long."""
_LASTS = 2048
"""Paths over which `ease` is averaged for what outlasts the rounds that told them: those of few rows say little."""
_OWN, _OWN_CUT, _AGES = 0.01, 0.04, 1e-4
"""Variance of what a shape has of its own, at most, and of one that a budget cuts, of which the model knows less; and
what a round adds to it. More, and chance makes one row go back and forth between shapes that are near."""
_LARGEST_STEP = 1.5
_KNOWN, _REMEMBERED = 64.0, 8192.0
"""Nodes of a depth that what is thought of it counts for, and that are remembered of it."""
_FINE = 8
"""Parts of a node that are told apart of how many a row has."""
_APART = 0.005
"""That chances of two tables differ which say the same of shapes."""
LOOKED_AT = 16
"""Rows of a round by which depths are counted: of so many the ranks are looked at."""


@dataclass(slots=True)
class _OfShape:
    """logits: by depth, that a path that got there goes on, by the model. own: to be added. variance: of `own`, and at
    most.

    by_best: by depth, the chance that it goes on by its node's best proposal.
    """

    logits: list[float]
    by_best: list[float]
    most_variance: float
    variance: float
    own: float = 0.0


@dataclass(slots=True)
class _OfDepth:
    """Paths that got to a depth, those that went on there by the best proposal, and how many the model said would."""

    reached: float = 0.0
    by_best: float = 0.0
    expected: float = 0.0

    def note(self, by_best: bool, accept_prob: float) -> None:
        if self.reached >= _REMEMBERED:
            self.reached, self.by_best, self.expected = self.reached / 2, self.by_best / 2, self.expected / 2
        self.reached += 1
        self.by_best += by_best
        self.expected += accept_prob

    def corrected(self, best: float) -> float:
        """What the chance of the best proposal was, by how much more often than thought paths went on by it."""
        if not self.reached:
            return best
        thought = self.expected / self.reached
        found = (self.by_best + _KNOWN * thought) / (self.reached + _KNOWN)
        return _accept_prob(_bounded(_logit(best) + _logit(found) - _logit(thought)))


class AcceptanceEstimate:
    """Expected tokens a row of each shape."""

    def __init__(self, shapes: Sequence[SpecShape], head: HeadAcceptance) -> None:
        deepest = max((shape.num_steps for shape in shapes), default=1)
        widest = max((shape.topk for shape in shapes), default=1)
        accept_probs = head.table(deepest, widest)
        self._head, self._by_depth = head, [_OfDepth() for _ in range(deepest)]
        self._accept_probs: AcceptanceProbs = accept_probs
        self._cut = dict[tuple[SpecShape, int], list[float]]()
        self._by_shape = {shape: _of_shape(shape, accept_probs) for shape in shapes}
        self._ease, self._variance = 0.0, _EASE
        self._lasting, self._num_told = 0.0, 0  # `ease` averaged over paths, and how many have told of it
        self._told: SpecShape | None = None  # the shape that has said something last
        self._silent = True  # the last round was plain
        self._num_passed = 0  # rounds whose time has not passed for what follows here yet

    def turn_to(self, accept_probs: AcceptanceProbs) -> None:
        """This is the model of the rows that are there now, which are others: what is expected changes with it, unless
        it is hardly another, for trees are searched by it.
        """
        if _alike(accept_probs, self._accept_probs):
            return
        self._accept_probs = accept_probs
        self._cut.clear()
        for shape, known in self._by_shape.items():
            known.logits, known.by_best = _of_model(shape, accept_probs)

    def learn(self, accept_probs: AcceptanceProbs) -> None:
        """The model has changed, but for the shape that runs not what is expected of it: that follows as `ease` goes
        back.
        """
        self._pass()
        before = None if self._told is None else _mean(self._by_shape[self._told].logits)
        self.turn_to(accept_probs)
        if self._told is not None and before is not None:
            moved = before - _mean(self._by_shape[self._told].logits)
            self._ease = _bounded(self._ease + moved)
            if moved:
                self._lasting = _bounded(self._lasting + moved) / 2  # the counts know what lasts

    def note(
        self,
        shape: SpecShape,
        accept_lens: Sequence[int],
        ranks: Sequence[Sequence[int]] = (),
        nodes: float = inf,
    ) -> None:
        """A round of this shape was accepted so far in each of its rows. A plain one tells nothing.

        ranks: of what was accepted, by row, among the proposals of its node, where that is known. nodes: of a row, in
        the mean, where a budget cuts trees; what such rounds tell of depths they do not say.
        """
        self._num_passed += 1
        known = self._by_shape.get(shape)
        self._silent = known is None
        if known is None or not accept_lens:
            return
        self._pass()
        self._told, depths = shape, len(known.logits)
        ended = [0] * (depths + 1)
        for length, count in Counter(accept_lens).items():
            ended[min(length, depths)] += count
        reached, surprise, information = len(accept_lens), 0.0, 0.0
        logits = self._logits(shape, nodes)
        for path in ranks[:LOOKED_AT] if logits is known.logits else ():
            for depth, accept_prob in enumerate(known.by_best[: len(path) + 1]):
                self._by_depth[depth].note(depth < len(path) and path[depth] == 0, accept_prob)
        for logit, ends in zip(logits, ended, strict=False):
            accept_prob = _accept_prob(logit + self._ease + known.own)
            surprise += reached - ends - reached * accept_prob
            information += reached * accept_prob * (1.0 - accept_prob)
            reached -= ends
        certain = 1.0 / (1.0 + (self._variance + known.variance) * information)
        step = min(max(surprise * certain * (self._variance + known.variance), -_LARGEST_STEP), _LARGEST_STEP)
        mine = known.variance / (self._variance + known.variance)
        self._ease, known.own = _bounded(self._ease + step * (1 - mine)), _bounded(known.own + step * mine)
        self._num_told = min(self._num_told + len(accept_lens), _LASTS)
        self._lasting += (self._ease - self._lasting) * min(len(accept_lens) / self._num_told, 1.0)
        self._variance -= self._variance**2 * information * certain
        known.variance -= known.variance**2 * information * certain

    def begin_lasting(self) -> None:
        """What the last rounds told lasts: those before them were of another head, or text."""
        self._lasting, self._num_told = self._ease, 0

    def _pass(self) -> None:
        """Rounds that said nothing make less certain of all."""
        back, self._num_passed, rounds = _BACK**self._num_passed, 0, self._num_passed
        self._ease, self._lasting = self._ease * back, self._lasting * back
        self._variance = _EASE + back**2 * (self._variance - _EASE)
        for each in self._by_shape.values():
            each.variance = min(each.variance + rounds * _AGES, each.most_variance)

    def learned(self) -> HeadAcceptance:
        """What is thought of the head by all rounds since the start."""
        best = (each.corrected(self._head.at(depth)) for depth, each in enumerate(self._by_depth))
        return HeadAcceptance(tuple(best), self._head.share)

    def tokens(self, shape: SpecShape, deviations: float = 0.0, nodes: float = inf, lasting: bool = False) -> float:
        """Expected tokens a row of a round. deviations: how many standard deviations better than that it may be, beside
        the shape that runs. nodes: as in `note`. lasting: of many rounds to come, by more than the last few.
        """
        if self._num_passed:
            self._pass()
        known, expected, path = self._by_shape[shape], 1.0, 1.0
        moved = (self._lasting if lasting else self._ease) + known.own
        if deviations:
            moved += deviations * sqrt(known.variance + (self._variance if self._silent else 0.0))
        for logit in self._logits(shape, nodes):
            path *= _accept_prob(logit + moved)
            expected += path
        return expected

    def _logits(self, shape: SpecShape, nodes: float) -> list[float]:
        """By depth, that a path that got there goes on, by the model, of trees that are cut to so many nodes."""
        known = self._by_shape[shape].logits
        if nodes >= shape.num_draft_tokens:
            return known
        place = shape, round(_FINE * nodes)
        if place not in self._cut:
            found, path, before = list[float](), 1.0, 1.0
            for logit, left in zip(known, left_of(shape, self._accept_probs, place[1] / _FINE), strict=True):
                path *= _accept_prob(logit)
                found.append(_bounded(_logit(path * left / before if before > 0.0 else 0.0)))
                before = path * left
            self._cut[place] = found
        return self._cut[place]


def _of_shape(shape: SpecShape, accept_probs: AcceptanceProbs) -> _OfShape:
    most = _OWN_CUT if shape.node_budget else _OWN
    return _OfShape(*_of_model(shape, accept_probs), most, most)


def _of_model(shape: SpecShape, accept_probs: AcceptanceProbs) -> tuple[list[float], list[float]]:
    """`logits` and `by_best` of a shape."""
    logits, by_best, reached = [], [], 1.0
    for path, of_best in zip(*path_probs(shape, accept_probs), strict=True):
        logits.append(_bounded(_logit(path / reached if reached > 0.0 else 0.0)))
        by_best.append(of_best / reached if reached > 0.0 else 0.0)
        reached = path
    return logits, by_best


def _alike(one: AcceptanceProbs, other: AcceptanceProbs) -> bool:
    """Whether no chance of two tables is apart by more than `_APART`."""
    if [*map(len, one)] != [*map(len, other)]:
        return False
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    return all(abs(here - there) <= _APART for here, there in pairs)


def _logit(accept_prob: float) -> float:
    return log(max(accept_prob, 1e-9) / max(1.0 - accept_prob, 1e-9))


def _mean(logits: Sequence[float]) -> float:
    return sum(logits) / len(logits)


def _bounded(logit: float) -> float:
    return min(max(logit, -_LONGEST), _LONGEST)


def _accept_prob(logit: float) -> float:
    return 1.0 / (1.0 + exp(-logit))
