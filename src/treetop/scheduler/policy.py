"""Which shape a round has: always the same, or the one that pays at this load.

    tokens a second of a shape = rows x expected tokens a row / seconds of its round

Expected tokens come from `acceptance`, a model of the head that rounds correct; seconds from the table that the engine
measured at its start, corrected by what rounds take. All of it is known a round late. Nothing here has a clock, and
nothing that it chooses changes a token.

**Prompts that wait** change no choice at the rows that are there. Their time is the same for all shapes, so the shape
that gives most tokens a second of rounds also serves most with prompts counted in. Each prefill step is followed by one
round, so a shape with more tokens a round finds fewer rows, which is not looked at. While rows fill up, to be judged at
rows that are not there yet would be wrong.

A shape that does not pay costs time that nobody gives back. So there is a regret budget, in plain rounds: a round that
speculates pays in advance what it would lose if nothing were accepted, and gets back what was. Each round adds a
little. What all rounds of a window may lose is so bounded, whatever is accepted: `REGRET_BUDGET` and 200 times
`INTEREST` are 2 % of 200 rounds. Where a round of few rows stakes more than that lets it lose twice, as small models on
a CPU do, what was accepted beyond what rounds cost is saved up to `_MOST_REGRETS` of it.

A shape whose round takes as long as plain rounds for all tokens that it could give is left out.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import exp, inf, log, sqrt
from typing import Protocol

from treetop.scheduler.acceptance import LOOKED_AT, AcceptanceEstimate
from treetop.scheduler.acceptance_probs import accept_probs_of, head_of
from treetop.types.costs import CostTable, HeadAcceptance
from treetop.types.layout import PLAIN, Layout, SpecShape
from treetop.types.messages import ProposalCounts, RoundPlan, StepPlan, StepResult

ChooseShape = Callable[[Sequence[int], Sequence[int], int], SpecShape]
"""The shape of a round that is about to be planned, of the tokens that each of its rows is known to have, how many of
the rows may accept drafts, by the class of their requests, and the most tokens that one has deferred."""

REGRET_BUDGET = 3.0
"""Plain rounds that speculation may lose beyond what it gains, at most."""
INTEREST, LEAST_INTEREST = 0.005, 0.003
"""Plain rounds that each round adds to the regret budget, less what plain rounds lose by catching up, and at least:
without any a policy that was unlucky once would never try again."""
_MOST_REGRETS = 3.0
"""Stakes of one row that may be saved up, if these are more than `REGRET_BUDGET`, of what was accepted: a round of few
rows that stakes most of the regret budget would otherwise be its last for long, however good the head. More rows vary
less."""
_MARGIN = 1.01
"""Times the rate of the shape that runs: what another must reach."""
_HOPE = 1.0
"""Standard deviations by which a shape's chances may be better than thought when it is considered for a trial."""
_EVERY, _ANYHOW = 8, 256
"""Rounds between two thoughts of a trial, looks at what a calibration has counted, and thoughts of all shapes where
rounds are plain and teach nothing of drafts; and between two trials of the second best, whose rounds may cost less than
is thought."""
_CURIOSITY, _MOST_CURIOUS = 0.004, 0.5
"""Of the time, what trials may cost by what is thought of their shapes; rounds that are saved up for one."""
_ANYHOW_COSTS = 0.001
"""Of the time, what trials of the best tree beside plain rounds may cost if nothing is accepted."""
_FIRST_KEPT, _KEEPS = 64, 256
"""Rounds with a tree after which what was learned of the head is kept, and kept again."""
_FOLLOWS, _OWN_FOLLOWS, _SETTLED = 0.1, 0.2, 6
"""The part of what is off by which the factor of all shapes moves, and of two where one follows the other after so many
rounds."""
_MOST_OFF, _MOST_OWN_OFF = log(3.0), 0.3
"""Logarithms of what one round may be off by, of all shapes and of two."""


class ShapePolicy(Protocol):
    """Chooses each round's shape for the batch as it stands, and learns from what rounds gave.

    shape: which runs now, but for trials.
    """

    @property
    def shape(self) -> SpecShape: ...

    def choose(self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0) -> SpecShape:
        """See `ChooseShape`."""
        ...

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None) -> None:
        """A step's result is here. seconds: what it took, as the host saw it; None if that says nothing."""
        ...

    def begin(self) -> None:
        """The head is another from now on: its weights were replaced."""
        ...


class FixedShape:
    """A `ShapePolicy`: always the same."""

    def __init__(self, shape: SpecShape) -> None:
        self.shape = shape

    def choose(self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0) -> SpecShape:
        return self.shape

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None) -> None:
        """It learns nothing."""

    def begin(self) -> None:
        """It knows nothing of a head."""


class RoundCosts:
    """A cost table, corrected by measured rounds.

    A machine that is busy is slow in all shapes, so every round moves a factor of them all. What one shape costs beside
    another shows where rounds change from one to the other: only there their own factors move, against each other.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._all, self._own = 0.0, dict.fromkeys(table.shapes, 0.0)  # logarithms of factors
        self._factor = dict.fromkeys(table.shapes, 1.0)
        self._known: dict[tuple[int, SpecShape], tuple[float, float]] = {}
        self._catch_up_s = cache(table.catch_up_seconds)
        self._last, self._run = PLAIN, 0  # the shape of the last round, and how many before it had the same

    def seconds(self, rows: int, shape: SpecShape, tokens: float) -> float:
        """A round of `rows` rows with `tokens` tokens each."""
        return self._measured(rows, shape, tokens) * self._factor[shape]

    def catch_up_seconds(self, rows: int) -> float:
        return self._catch_up_s(rows) * exp(self._all)

    def note(self, rows: int, shape: SpecShape, tokens: float, seconds: float) -> None:
        """A round took so long."""
        off = log(max(seconds, 1e-9) / self.seconds(rows, shape, tokens))
        off = min(max(off, -_MOST_OFF), _MOST_OFF)
        if shape != self._last:
            if self._run >= _SETTLED:
                apart = min(max(off, -_MOST_OWN_OFF), _MOST_OWN_OFF)
                for each, sign in ((shape, 1.0), (self._last, -1.0)):
                    self._own[each] = min(max(self._own[each] + sign * _OWN_FOLLOWS * apart, -_MOST_OFF), _MOST_OFF)
            self._last, self._run = shape, 0
        self._run += 1
        self._all += _FOLLOWS * off
        self._factor = {each: exp(self._all + own) for each, own in self._own.items()}

    def _measured(self, rows: int, shape: SpecShape, tokens: float) -> float:
        """By the table, whose lines are found once."""
        place = rows, shape
        if place not in self._known:
            base = self._table.seconds(rows, shape, 0.0)
            self._known[place] = base, self._table.seconds(rows, shape, 1.0) - base
        base, more = self._known[place]
        return base + more * tokens


class AdaptiveShape:
    """A `ShapePolicy`: the shape with the most tokens a second, plain rounds where none pays.

    shape: which runs now, but for trials.
    regret_budget: plain rounds that may yet be lost.
    """

    def __init__(
        self,
        table: CostTable,
        layout: Layout,
        head: Callable[[], HeadAcceptance] = HeadAcceptance,
        keep_head: Callable[[HeadAcceptance], object] = lambda learned: None,
    ) -> None:
        """head: what is thought of the one that drafts now, before it has. keep_head: told now and then what was
        learned of it.
        """
        self._costs, self._layout, self._known_head, self._keep_head = RoundCosts(table), layout, head, keep_head
        self._trees = [shape for shape in table.shapes if shape != PLAIN]
        self._bucket_for, self._shapes_at = cache(layout.bucket_for), cache(layout.shapes_at)
        self.begin()

    def begin(self) -> None:
        self._head = self._known_head()
        self.acceptance = AcceptanceEstimate(self._trees, self._head)
        self.shape, self.regret_budget, self._num_told = PLAIN, REGRET_BUDGET, 0
        self._num_rounds, self._curiosity, self._anyhow, self._most_regret_budget = 0, 0.0, 0.0, REGRET_BUDGET
        self._share = 1.0  # of the rows, that may accept drafts
        self._batch = 1, 1  # rows of a round with its padding, and without
        self._held: tuple[int, float] | None = None  # rows with padding and the share that the next two are of
        self._round_s, self._held_rates = dict[SpecShape, float](), dict[SpecShape, float]()
        self._counts: ProposalCounts | None = None  # of a calibration, as it was when the last round ended
        self._looked_at: tuple[ProposalCounts, list[float]] | None = None  # counts, and shares of rows by class

    def choose(self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0) -> SpecShape:
        """See `ChooseShape`. The shape that runs, or another for a round that is to tell more of it."""
        if not any(speculating):
            return PLAIN
        self._share = sum(speculating) / len(lengths)
        if self._counts is not None and self._num_rounds % _EVERY == 0:
            self._look_at(self._counts, speculating)
        self._num_rounds += 1
        rows = self._bucket_for(len(lengths))
        self._batch = rows, len(lengths)
        behind = self._costs.catch_up_seconds(rows)
        caught_up = behind / max(self._layout.max_deferred, 1)
        if self._num_rounds % _EVERY == 0 or self._held != (rows, self._share):
            self._think(rows, sum(lengths) / len(lengths), caught_up)
        seconds, rates, late = self._round_s, self._held_rates, behind if deferred else 0.0
        self._anyhow += _ANYHOW_COSTS
        wanted = self._trial(rates, seconds, late) or self.shape
        interest = max(INTEREST - caught_up / seconds[PLAIN], LEAST_INTEREST)
        self.regret_budget = max(self.regret_budget, min(self.regret_budget + interest, REGRET_BUDGET))
        regret = self._regret(wanted, seconds, late)
        if regret > self.regret_budget:  # the best of those that can be paid, which plain rounds are
            regrets = {each: self._regret(each, seconds, late) for each in rates if rates[each] >= rates[PLAIN]}
            wanted = max((each for each in regrets if regrets[each] <= self.regret_budget), key=rates.__getitem__)
            regret = regrets[wanted]
        self.regret_budget -= regret
        self._most_regret_budget = self._regret_budget_of(wanted, seconds, len(lengths))
        return wanted

    def _think(self, rows: int, tokens: float, caught_up: float) -> None:
        """What rounds of so many rows cost and give, and which of them runs."""
        self._held = rows, self._share
        self._round_s = self._seconds(rows, tokens)
        rates = self._held_rates = self._rates(self._round_s, caught_up)
        best = max(rates, key=rates.__getitem__)
        runs = rates.get(self.shape, 0.0)  # 0 for more rows than that shape may have
        if rates[best] > _MARGIN * runs or rates[PLAIN] >= runs:
            self.shape = best

    def _look_at(self, counts: ProposalCounts, speculating: Sequence[int]) -> None:
        """The model of acceptance is that of these counts, for rows of these classes. Where it is the rows that have
        changed, such as to an adapter's that the draft does not fit, it is believed at once.
        """
        shares = [count / sum(speculating) for count in speculating]
        if self._looked_at == (counts, shares):  # as plain rounds leave them
            return
        if self._looked_at is not None and self._looked_at[1] != shares:
            of_rows = accept_probs_of(self._looked_at[0], speculating, self._head)
            if of_rows is not None:
                self.acceptance.turn_to(of_rows)
        accept_probs = accept_probs_of(counts, speculating, self._head)
        if accept_probs is not None:
            self.acceptance.learn(accept_probs)
        self._looked_at = counts, shares

    def _seconds(self, rows: int, tokens: float) -> dict[SpecShape, float]:
        """Of a round of each shape that so many rows may have and that would win if all were accepted; plain first."""
        plain_s = self._costs.seconds(rows, PLAIN, tokens)
        found, allowed = {PLAIN: plain_s}, self._shapes_at(rows)
        for shape in self._trees:
            seconds = self._costs.seconds(rows, shape, tokens) if shape in allowed else inf
            if seconds < plain_s * (1 + shape.depth):
                found[shape] = seconds
        return found

    def learned(self) -> HeadAcceptance:
        """The head as rounds and, where there is one, a calibration have shown it."""
        return self.acceptance.learned() if self._counts is None else head_of(self._counts, self._head)

    def expectation(self) -> str:
        """For a log: what it expects beside plain rounds at next to no context, by rows, how many tokens a round of a
        row must give there to pay, and the most that it can lose.
        """
        told, most_regret, caught_up = [], REGRET_BUDGET, 0.0
        for rows in sorted({1, min(32, self._layout.max_requests), self._layout.max_requests}):
            bucket = self._bucket_for(rows)
            seconds = self._seconds(bucket, 0.0)
            tokens = {PLAIN: 1.0}
            for shape in seconds.keys() - tokens.keys():
                tokens[shape] = self.acceptance.tokens(shape, nodes=_nodes(shape, bucket, rows))
            costs = {shape: seconds[shape] / seconds[PLAIN] for shape in seconds}
            best = max(tokens, key=lambda shape: tokens[shape] / costs[shape])
            name = f"S={best.num_steps} k={best.topk} T={best.num_draft_tokens}"
            name += f", {best.nodes_at(bucket)} nodes" * best.is_ragged_at(bucket)
            pays = f", pays from {costs[best]:.2f} tokens a round on" if best != PLAIN else ""
            told.append(f"{tokens[best] / costs[best]:.2f}x at {rows} rows ({name}{pays})")
            most_regret = max(most_regret, self._regret_budget_of(best, seconds, rows))
            behind = self._costs.catch_up_seconds(self._bucket_for(rows)) / seconds[PLAIN]
            caught_up = max(caught_up, behind / max(self._layout.max_deferred, 1))
        lost = 100 * (most_regret / 200 + INTEREST)
        return (
            f"--speculative-policy auto expects, {self._head.source}, {', '.join(told)} of plain rounds' speed;"
            f" in 200 rounds it loses {lost:.1f} % of them at most, and {100 * caught_up:.1f} % by keeping the draft up"
            " with plain ones"
        )

    def _rates(self, seconds: dict[SpecShape, float], caught_up: float) -> dict[SpecShape, float]:
        """Tokens a row and second of each shape. caught_up: what a plain round leaves to the draft, in seconds."""
        rates = {shape: self._tokens(shape) / seconds[shape] for shape in seconds if shape != PLAIN}
        return {PLAIN: 1.0 / (seconds[PLAIN] + caught_up), **rates}

    def _trial(self, rates: dict[SpecShape, float], seconds: dict[SpecShape, float], late: float) -> SpecShape | None:
        """The shape that may well be better than what runs, most of all; None if none may, or it is not its time.

        late: seconds that a round with drafts takes more now, to catch up first.
        """
        if self._num_rounds % _EVERY or len(rates) == 1:
            return None
        if self._num_rounds % _ANYHOW == 0:
            second = max((shape for shape in rates if shape != self.shape), key=rates.__getitem__)
            if self.shape == PLAIN and self._regret(second, seconds, late) > self._anyhow:
                return None
            self._anyhow = 0.0
            return second
        self._curiosity = min(self._curiosity + _EVERY * _CURIOSITY, _MOST_CURIOUS)
        hopes = {
            shape: rates[shape] * self._tokens(shape, _HOPE) / self._tokens(shape) for shape in rates if shape != PLAIN
        }
        best, rate = max(hopes, key=hopes.__getitem__), rates[self.shape]
        costs = seconds[best] * (1.0 - rates[best] / rate) / seconds[self.shape]
        if best == self.shape or hopes[best] <= _MARGIN * rate or costs > self._curiosity:
            return None
        self._curiosity -= max(costs, 0.0)
        return best

    def _tokens(self, shape: SpecShape, deviations: float = 0.0) -> float:
        """Expected tokens a row, of those that accept no draft one."""
        return 1.0 + self._share * (self.acceptance.tokens(shape, deviations, _nodes(shape, *self._batch)) - 1.0)

    def _regret(self, shape: SpecShape, seconds: dict[SpecShape, float], behind: float) -> float:
        """Plain rounds that a round loses if nothing is accepted, with what it has to catch up first."""
        return 0.0 if shape == PLAIN else max((seconds[shape] + behind) / seconds[PLAIN] - 1.0, 0.0)

    def _regret_budget_of(self, shape: SpecShape, seconds: dict[SpecShape, float], rows: int) -> float:
        """What may be saved up while a shape runs."""
        return max(REGRET_BUDGET, _MOST_REGRETS * self._regret(shape, seconds, 0.0) / sqrt(rows))

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None) -> None:
        """Learn what a round gave, and what it took."""
        if not isinstance(plan, RoundPlan) or not result.rows:
            return
        withheld = {*plan.no_draft, *(mask.row for mask in plan.masks)}
        of_drafts = () if plan.shape == PLAIN else result.rows
        told = [row for row in of_drafts if row.tokens and row.row not in withheld]
        lengths = [len(row.tokens) - 1 for row in told]
        self._counts = result.proposals or self._counts
        ranks = [row.ranks for row in told[:LOOKED_AT] if len(row.ranks) == len(row.tokens) - 1]
        nodes = _nodes(plan.shape, self._bucket_for(len(plan.rows)), len(plan.rows))
        self.acceptance.note(plan.shape, lengths, ranks, nodes)
        if plan.shape != PLAIN:
            self._held = None
        if lengths:
            self._num_told += 1
            if self._num_told == _FIRST_KEPT or self._num_told % _KEEPS == 0:
                self._keep_head(self.learned())
        self.regret_budget = min(self.regret_budget + sum(lengths) / len(result.rows), self._most_regret_budget)
        if seconds is not None and not plan.catches_up:
            self._costs.note(self._bucket_for(len(plan.rows)), plan.shape, plan.committed_bound, seconds)


def _nodes(shape: SpecShape, rows: int, live: int) -> float:
    """Nodes of a row, in the mean, of a round with so many rows, of which these are no padding."""
    return min((shape.nodes_at(rows) - (rows - live)) / live, shape.num_draft_tokens)
