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
little. It also pays for what plain rounds have left to the draft; if it cannot, rows go on without one and few that
have just come tell of the head. What all rounds of a window may lose is so bounded, whatever is accepted:
`REGRET_BUDGET` and 200 times `INTEREST` are 2 % of 200 rounds. A round stakes half of it at most, so that one of which
nothing was accepted is not the last for long; where none does that pays, the one that stakes least, up to all of it.
Where few rows stake more than that, as of small models on a CPU, what was accepted beyond what rounds cost is saved up
to `_MOST_REGRETS` of it, and 200 rounds may lose more: `expectation` says how much.

What this budget has no room for is saved, and pays for prompts that are computed again: a row without a draft gets one
where it gains twice as much by it. So whatever that loses was gained before, or has not been lost.

A shape whose round takes as long as plain rounds for all tokens that it could give is left out.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import exp, inf, log
from typing import Protocol

from treetop.scheduler.acceptance import LOOKED_AT, AcceptanceEstimate
from treetop.scheduler.acceptance_probs import accept_probs_of, head_of
from treetop.scheduler.budget import CostCurve
from treetop.types.costs import CostTable, HeadAcceptance
from treetop.types.layout import PLAIN, Layout, SpecShape
from treetop.types.messages import MixedPlan, PrefillPlan, ProposalCounts, RoundPlan, StepPlan, StepResult

ChooseShape = Callable[[Sequence[int], Sequence[int], int, int], SpecShape]
"""The shape of a round that is about to be planned, of the tokens that each of its rows is known to have, how many of
the rows may accept drafts, by the class of their requests, the most tokens that one has deferred, and how many have a
draft of those that may accept any."""

REGRET_BUDGET = 3.0
"""Plain rounds that speculation may lose beyond what it gains, at most."""
INTEREST = 0.005
"""Plain rounds that each round adds to the regret budget: without any a policy that was unlucky once would never try
again."""
_MOST_REGRETS = 3.0
"""Stakes of one row that may be saved up, if these are more than `REGRET_BUDGET`, of what was accepted: a round of few
rows that stakes most of the regret budget would otherwise be its last for long, however good the head. Of n rows an nth
of it: what a round gives varies so much less, and so does what chance alone makes of the budget."""
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
"""Of the time, what trials of the best tree beside plain rounds may cost, less what is accepted while watching."""
_MOST_SAVED = 32.0
"""Plain rounds that may be saved up for tokens that are computed again, so that a row has a draft."""
_TIMES_PAID = 2.0
"""What a row must gain by a draft, of what these tokens cost."""
_WATCHED = 64
"""Rows of which one has a draft for a trial while the head is watched, and of fewer one too."""
_WORTH, _LOATH = 0.985, 0.04
"""Times the rate of plain rounds that trees must reach, what the draft reads of prompts counted, for who comes to have
a draft. The second is taken off where all rows that may have one do, and added where none does: trees wait for rows
without a draft to the end, so a batch of both is worse than either. Of simulated crowds of 64, by 0.1 s and 3 % of
noise, 0.945 and 1.025 kept the most (benchmarks/log.md)."""
_MOST_OWED = 3.0
"""Plain rounds that reading prompts may lose, before nobody new has a draft where plain rounds are thought faster."""
_FIRST_KEPT, _KEEPS = 64, 256
"""Rounds with a tree after which what was learned of the head is kept, and kept again."""
_FOLLOWS, _OWN_FOLLOWS, _SETTLED = 0.1, 0.2, 6
"""The part of what is off by which the factor of all shapes moves, and of two where one follows the other after so many
rounds."""
_SAME_LOAD = 0.03
"""Of a plain round's time by the table, what two loads of as many rows may differ by for a change of shapes between
them to tell what these cost beside each other."""
_MOST_OFF, _MOST_OWN_OFF = log(3.0), 0.3
"""Logarithms of what one round may be off by, of all shapes and of two."""


class ShapePolicy(Protocol):
    """Chooses each round's shape for the batch as it stands, and learns from what rounds gave.

    shape: which runs now, but for trials.
    watches: the head is only watched: rows have no draft, but for few while it `looks`.
    looks: a trial of few that have just come is due.
    alone: a tree is to be of rows with a draft alone.
    """

    @property
    def shape(self) -> SpecShape: ...

    @property
    def watches(self) -> bool: ...

    @property
    def looks(self) -> bool: ...

    @property
    def alone(self) -> bool: ...

    def choose(
        self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0, drafting: int | None = None
    ) -> SpecShape:
        """See `ChooseShape`."""
        ...

    def pays_to_catch_up(self, rows: int, drafting: int) -> bool:
        """Whether a plain round of `rows` rows is to begin with what `drafting` of them have deferred, one of which has
        no room for more. If not they go on without a draft.
        """
        ...

    def pays_to_read(self, rows: int, drafting: int, coming: int, others: int) -> bool:
        """Whether trees gain more than the draft takes to read prompts: if not, who comes has none. rows: that may have
        a draft. drafting: that do. coming: requests that may have one and will be in their rounds. others: rows and
        requests beside them that may have none.
        """
        ...

    def cost_of_draft(self, rows: int, computed: int, left: int) -> float | None:
        """Plain rounds that it costs to compute so many tokens of one row of `rows` again, so that it has a draft for
        those that are left; None if that does not pay, or cannot be paid.
        """
        ...

    def pay(self, rounds: float) -> None:
        """A row was put back for that: the head is no longer only watched."""
        ...

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None, tokens: float | None = None) -> None:
        """A step's result is here, and of a mixed one its parts' after it. seconds: what it took, as the host saw it;
        None if that says nothing. tokens: that its rows had, in the mean, as `choose` counts them; None where all have
        as many as the longest.
        """
        ...

    def begin(self) -> None:
        """The head is another from now on: its weights were replaced."""
        ...


class FixedShape:
    """A `ShapePolicy`: always the same."""

    def __init__(self, shape: SpecShape) -> None:
        self.shape, self.watches, self.looks, self.alone = shape, False, False, False

    def choose(
        self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0, drafting: int | None = None
    ) -> SpecShape:
        return self.shape

    def pays_to_catch_up(self, rows: int, drafting: int) -> bool:
        return True

    def pays_to_read(self, rows: int, drafting: int, coming: int, others: int) -> bool:
        return True

    def cost_of_draft(self, rows: int, computed: int, left: int) -> float | None:
        return None

    def pay(self, rounds: float) -> None:
        """Nothing is ever paid for."""

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None, tokens: float | None = None) -> None:
        """It learns nothing."""

    def begin(self) -> None:
        """It knows nothing of a head."""


class RoundCosts:
    """A cost table, corrected by measured rounds.

    A machine that is busy is slow in all shapes, so every round moves a factor of them all. What one shape costs beside
    another shows where rounds change from one to the other, and rows and their tokens do not: only there their own
    factors move, against each other. Where the load changes, too, what is off may be the table's at that load.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._all, self._own = 0.0, dict.fromkeys(table.shapes, 0.0)  # logarithms of factors
        self._known: dict[tuple[int, SpecShape], tuple[float, float]] = {}
        self._catch_up_s = cache(table.catch_up_seconds)
        self._last, self._run = PLAIN, 0  # the shape of the last round, and how many before it had the same at its load
        self._rows, self._least, self._most = 0, 0.0, 0.0  # of these rounds; and tokens of a row at their load

    def seconds(self, rows: int, shape: SpecShape, tokens: float) -> float:
        """A round of `rows` rows with `tokens` tokens each."""
        return self._measured(rows, shape, tokens) * exp(self._all + self._own[shape])

    def catch_up_seconds(self, rows: int, tokens: int) -> float:
        """Of rows that have deferred so many tokens at most."""
        return self._catch_up_s(rows, tokens) * exp(self._all)

    def note(self, rows: int, shape: SpecShape, tokens: float, seconds: float) -> None:
        """A round took so long."""
        off = log(max(seconds, 1e-9) / self.seconds(rows, shape, tokens))
        off = min(max(off, -_MOST_OFF), _MOST_OFF)
        if rows != self._rows or not self._least <= tokens <= self._most:
            plain_s = self._measured(rows, PLAIN, tokens)
            more = self._measured(rows, PLAIN, tokens + 1.0) - plain_s
            apart = _SAME_LOAD * plain_s / more if more > 0.0 else inf
            self._rows, self._least, self._most = rows, tokens - apart, tokens + apart
            self._last, self._run = shape, 0
        elif shape != self._last:
            if self._run >= _SETTLED:
                apart = min(max(off, -_MOST_OWN_OFF), _MOST_OWN_OFF)
                for each, sign in ((shape, 1.0), (self._last, -1.0)):
                    self._own[each] = min(max(self._own[each] + sign * _OWN_FOLLOWS * apart, -_MOST_OFF), _MOST_OFF)
            self._last, self._run = shape, 0
        self._run += 1
        self._all += _FOLLOWS * off

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
    regret_budget: plain rounds that may yet be lost. savings: those beyond it, for tokens that are computed again.
    watches: from when the budget did not pay for a catch-up until trees would pay, and of one something was accepted;
        and while what the draft reads of prompts takes more than trees gain.
    looks: see `ShapePolicy`.
    alone: see `ShapePolicy`; of the round that was chosen last.
    """

    def __init__(
        self,
        table: CostTable,
        layout: Layout,
        head: Callable[[], HeadAcceptance] = HeadAcceptance,
        keep_head: Callable[[HeadAcceptance], object] = lambda learned: None,
        read_per_token: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """head: what is thought of the one that drafts now, before it has. keep_head: told now and then what was
        learned of it. read_per_token: prompt tokens that are computed for one token of output, in the mean; 0 if that
        is not known.
        """
        self._costs, self._layout, self._known_head, self._keep_head = RoundCosts(table), layout, head, keep_head
        self._trees = [shape for shape in table.shapes if shape != PLAIN]
        self._bucket_for, self._shapes_at = cache(layout.bucket_for), cache(layout.shapes_at)
        self._prefills = CostCurve()  # by tokens; a mixed step counts whole, which bounds it
        most = layout.max_requests  # of a prompt's token the draft takes what it does of one that it catches up with
        deferred = layout.max_deferred
        self._read_s = table.catch_up_seconds(most, deferred) / (most * deferred) if deferred else 0.0
        self._read_per_token = read_per_token
        self.begin()

    def begin(self) -> None:
        self._head = self._known_head()
        self.acceptance = AcceptanceEstimate(self._trees, self._head)
        self.shape, self.regret_budget, self._num_told, self.watches = PLAIN, REGRET_BUDGET, 0, False
        self.looks = False
        self._num_rounds, self._curiosity, self._anyhow, self._most_regret_budget = 0, 0.0, 0.0, REGRET_BUDGET
        self._context = 0.0  # tokens of a row
        self._share = 1.0  # of the rows, that accept drafts; while the head is watched, that would
        self._batch = 1, 1  # rows of a round with its padding, and without
        self.alone, self._hoped = False, PLAIN  # what would run if all had a draft
        self.savings, self._next_draft = 0.0, 0  # the round before which no row is put back for a draft
        self._reads_worth = dict[tuple[int, float], float]()  # `_worth` by rows and what share of them may have a draft
        self._owed, self._held_worth = 0.0, 1.0  # plain rounds that reading has lost, and `_worth` of these rows
        self._for_reads = False  # whether the head is watched for what reads take alone
        self._reads_lose = False  # of these rows: trees gain less than the draft takes to read prompts
        self._gain: float | None = None  # of a plain round, that a token takes less if all have one
        self._told_of_few = False  # whether anything was accepted of the last tree, while the head was watched
        self._held: tuple[int, float] | None = None  # rows with padding and the share that the next two are of
        self._round_s, self._held_rates = dict[SpecShape, float](), dict[SpecShape, float]()
        self._counts: ProposalCounts | None = None  # of a calibration, as it was when the last round ended
        self._looked_at: tuple[ProposalCounts, list[float]] | None = None  # counts, and shares of rows by class

    def choose(
        self, lengths: Sequence[int], speculating: Sequence[int], deferred: int = 0, drafting: int | None = None
    ) -> SpecShape:
        """See `ChooseShape`. The shape that runs, or another for a round that is to tell more of it."""
        self.alone = False
        if not any(speculating):
            return PLAIN
        drafting = sum(speculating) if drafting is None else drafting
        self._share = (sum(speculating) if self.watches else drafting) / len(lengths)
        self._wanting = sum(speculating) / len(lengths)
        if self._counts is not None and self._num_rounds % _EVERY == 0:
            self._look_at(self._counts, speculating)
        self._num_rounds += 1
        rows = self._bucket_for(len(lengths))
        others, self._batch = self._batch != (rows, len(lengths)), (rows, len(lengths))
        tokens = sum(lengths) / len(lengths)
        if self._num_rounds % _EVERY == 0 or self._held != (rows, self._share):
            self._think(rows, tokens)
        seconds, rates = self._round_s, self._held_rates
        self._owed = 0.0 if self.watches else max(self._owed + 1.0 - self._held_worth, 0.0)
        self._anyhow = max(self._anyhow, min(self._anyhow + _ANYHOW_COSTS, REGRET_BUDGET))
        self._curiosity = min(self._curiosity + _CURIOSITY, _MOST_CURIOUS)
        if others or self._num_rounds % _EVERY == 0:
            self._most_regret_budget = self._regret_budget_of(self._round_s, len(lengths))
            self._earn(0.0, self._most_regret_budget)  # more rows may lose less of what fewer have saved
        self._earn(INTEREST, max(self.regret_budget, REGRET_BUDGET))
        if not drafting or self._held is None:
            return PLAIN
        late = self._costs.catch_up_seconds(self._bucket_for(drafting), deferred) if deferred else 0.0
        part = drafting / len(lengths) if self.watches else 1.0
        if part < 1.0:
            seconds = self._seconds_of_few(seconds, self._bucket_for(drafting), part, tokens)
        wanted = self._trial(rates, seconds, late, part) or (self._hoped if part == 1.0 else PLAIN)
        wanted = self._affordable(wanted, seconds, late)
        self.regret_budget -= self._regret(wanted, seconds, late)
        self.alone = seconds[wanted] < self._round_s[wanted]
        return wanted

    def _affordable(self, wanted: SpecShape, seconds: dict[SpecShape, float], behind: float) -> SpecShape:
        """This shape, or the best that stakes half of the budget at most; where only plain rounds do, the one that
        stakes least of those that pay, if the budget has that.
        """
        if self._regret(wanted, seconds, behind) <= self.regret_budget / 2:
            return wanted
        pay = self._by_rate[: self._by_rate.index(PLAIN)]
        regrets = {shape: self._regret(shape, seconds, behind) for shape in pay}
        best = next((shape for shape in pay if regrets[shape] <= self.regret_budget / 2), None)
        least = best or min(pay, key=regrets.__getitem__, default=PLAIN)
        return least if regrets.get(least, 0.0) <= self.regret_budget else PLAIN

    def _think(self, rows: int, tokens: float) -> None:
        """What rounds of so many rows cost and give, and which of them runs, or would if all had a draft."""
        self._held, self._context = (rows, self._share), tokens
        self._round_s = self._seconds(rows, tokens)
        rates = self._held_rates = self._rates(self._round_s)
        self._by_rate = sorted(rates, key=rates.__getitem__, reverse=True)
        best = self._by_rate[0]
        runs = rates.get(self.shape, 0.0)  # 0 for more rows than that shape may have
        if rates[best] > _MARGIN * runs or rates[PLAIN] >= runs:
            self.shape = best
        self._hoped = self.shape
        self._gain = None
        self._reads_worth.clear()
        reads, worth = self._reads_s(rows) > 0.0, 1.0
        if reads or self.watches:
            worth = self._worth(rows, self._round_s, self._wanting, lasting=self._for_reads or not self.watches)
        pays = worth >= self._least(self._wanting, 0.0 if self.watches else self._share)
        self._reads_lose, self._held_worth = reads and not pays, worth if reads else 1.0
        if not self.watches:
            self.watches = self._told_of_few = self._for_reads = self._reads_lose
        elif (self._told_of_few or self._for_reads) and self.shape != PLAIN and pays:
            self.watches, self._held = False, None  # it is no mere hope: who comes has a draft
            if not self._for_reads:
                self.acceptance.begin_lasting()
        if self.watches:
            self.shape = PLAIN
            few = num_watched(self._batch[1])
            part = few / self._batch[1]
            seconds = self._seconds_of_few(self._round_s, self._bucket_for(few), part, tokens)
            tried = self._to_try(rates, seconds, 0.0, part)[0] or (self._hoped if part == 1.0 else PLAIN)
            self.looks = self._affordable(tried, seconds, 0.0) != PLAIN

    def _worth(self, rows: int, seconds: dict[SpecShape, float], share: float, lasting: bool = True) -> float:
        """How many times as much as plain rounds trees of so many rows give, of which this share may accept drafts,
        with what the draft reads of prompts for a token of each. lasting: by more than the last few rounds.
        """
        gives = (seconds[each] / self._tokens(each, share=share, lasting=lasting) for each in seconds if each != PLAIN)
        return seconds[PLAIN] / (min(gives, default=inf) + self._reads_s(rows))

    def _reads_s(self, rows: int) -> float:
        """What the draft reads of prompts for a token of each row; 0 while requests are not known."""
        return self._read_per_token() * self._read_s * rows

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
        told = []
        for rows in sorted({1, min(32, self._layout.max_requests), self._layout.max_requests}):
            bucket = self._bucket_for(rows)
            seconds = self._seconds(bucket, 0.0)
            tokens = {PLAIN: 1.0}
            for shape in seconds.keys() - tokens.keys():
                tokens[shape] = self.acceptance.tokens(shape, nodes=_nodes(shape, bucket, rows))
            costs = {shape: seconds[shape] / seconds[PLAIN] for shape in seconds}
            rates = {shape: tokens[shape] / costs[shape] for shape in costs}
            best = max(rates, key=rates.__getitem__)
            name = f"S={best.num_steps} k={best.topk} T={best.num_draft_tokens}"
            name += f", {best.nodes_at(bucket)} nodes" * best.is_ragged_at(bucket)
            pays = f", pays from {costs[best]:.2f} tokens a round on" if best != PLAIN else ""
            told.append(f"{rates[best]:.2f}x at {rows} rows ({name}{pays})")
        each = range(1, self._layout.max_requests + 1)
        most_regret = max(self._regret_budget_of(self._seconds(self._bucket_for(rows), 0.0), rows) for rows in each)
        lost = 100 * (most_regret / 200 + INTEREST)
        return (
            f"--speculative-policy auto expects, {self._head.source}, {', '.join(told)} of plain rounds' speed;"
            f" in 200 rounds it loses {lost:.1f} % of them at most, and of what it has gained or not lost before what"
            f" {_MOST_SAVED:g} plain rounds take, for rows that get their draft back"
        )

    def _rates(self, seconds: dict[SpecShape, float]) -> dict[SpecShape, float]:
        """Tokens a row and second of each shape. What a plain round leaves to the draft is paid for when it is due."""
        return {shape: self._tokens(shape) / seconds[shape] for shape in seconds}

    def _seconds_of_few(
        self, seconds: dict[SpecShape, float], rows: int, part: float, tokens: float
    ) -> dict[SpecShape, float]:
        """What a tree of `rows` rows, this part of all, costs: with the others in its round, or alone, with a plain
        round's time for those who wait.
        """
        waits = (1.0 - part) * seconds[PLAIN]
        alone = {shape: self._costs.seconds(rows, shape, tokens) + waits for shape in seconds}
        return {shape: seconds[shape] if shape == PLAIN else min(seconds[shape], alone[shape]) for shape in seconds}

    def _trial(
        self, rates: dict[SpecShape, float], seconds: dict[SpecShape, float], late: float, part: float
    ) -> SpecShape | None:
        """The shape that may well be better than what runs, most of all; None if none may, or it is not its time.

        late: seconds that a round with drafts takes more now, to catch up first. part: of the rows, that it is of.
        """
        if self._num_rounds % _EVERY and not self.watches:
            return None
        tried, curious = self._to_try(rates, seconds, late, part)
        if tried is not None:
            if curious is None:
                self._anyhow = max(self._anyhow - self._regret(tried, seconds, late), 0.0)
            else:
                self._curiosity = curious
        return tried

    def _to_try(
        self, rates: dict[SpecShape, float], seconds: dict[SpecShape, float], late: float, part: float
    ) -> tuple[SpecShape | None, float | None]:
        """The shape of a trial, and the curiosity that it leaves; None if it is tried anyhow."""
        if len(rates) == 1:
            return None, None
        if self._num_rounds % _ANYHOW == 0 or (self.watches and self._anyhow >= _ANYHOW * _ANYHOW_COSTS):
            second = max((shape for shape in rates if shape != self.shape), key=rates.__getitem__)
            affordable = self.shape != PLAIN or self._regret(second, seconds, late) <= self._anyhow
            return (second if affordable else None), None
        hopes = {
            shape: rates[shape] * self._tokens(shape, _HOPE) / self._tokens(shape) for shape in rates if shape != PLAIN
        }
        best, rate = max(hopes, key=hopes.__getitem__), rates[self.shape]
        gives = rates[best] * self._round_s[best] / (rate * self._round_s[self.shape])
        costs = seconds[best] / seconds[self.shape] - (1.0 - part) - part * gives
        if best == self.shape or hopes[best] <= _MARGIN * rate or costs > self._curiosity:
            return None, None
        return best, self._curiosity - max(costs, 0.0)

    def _tokens(
        self, shape: SpecShape, deviations: float = 0.0, share: float | None = None, lasting: bool = False
    ) -> float:
        """Expected tokens a row, of those that accept no draft one. share: of the rows, that accept any."""
        if shape == PLAIN:
            return 1.0
        share = self._share if share is None else share
        return 1.0 + share * (self.acceptance.tokens(shape, deviations, _nodes(shape, *self._batch), lasting) - 1.0)

    def _regret(self, shape: SpecShape, seconds: dict[SpecShape, float], behind: float) -> float:
        """Plain rounds that a round loses if nothing is accepted, with what it has to catch up first."""
        return 0.0 if shape == PLAIN else max((seconds[shape] + behind) / seconds[PLAIN] - 1.0, 0.0)

    def _regret_budget_of(self, seconds: dict[SpecShape, float], rows: int) -> float:
        """What may be saved up, by the dearest shape: which one is thought to be the best changes."""
        most = max(self._regret(shape, seconds, 0.0) for shape in seconds)
        return max(REGRET_BUDGET, _MOST_REGRETS * most / rows)

    def pays_to_catch_up(self, rows: int, drafting: int) -> bool:
        """See `ShapePolicy`. It is a loss as a tree's is of which nothing is accepted, and of use to these rows alone:
        while the head is watched others tell of it, who have just come.
        """
        plain_s = self._costs.seconds(self._bucket_for(rows), PLAIN, 0.0)
        regret = self._costs.catch_up_seconds(self._bucket_for(drafting), self._layout.max_deferred) / plain_s
        if self.watches or regret > self.regret_budget:
            self._told_of_few = self._told_of_few and self.watches
            self._for_reads = self._for_reads and self.watches
            self.watches, self.shape, self._held = True, PLAIN, None
            return False
        self.regret_budget -= regret
        return True

    def pays_to_read(self, rows: int, drafting: int, coming: int, others: int) -> bool:
        """See `ShapePolicy`. A crowd is judged by the rows that it will be; one that is to have drafts ends a watch for
        what reading takes. False while the head is watched for more; else True while requests are not known.
        """
        if self.watches and not self._for_reads:
            return False
        crowd = rows + coming + others
        bucket, share = self._bucket_for(min(crowd, self._layout.max_requests)), (rows + coming) / crowd
        if self._reads_s(bucket):
            if (bucket, share) not in self._reads_worth:
                seconds = self._seconds(bucket, self._context)
                self._reads_worth[bucket, share] = self._worth(bucket, seconds, share)
            if self._reads_worth[bucket, share] < self._least(rows, drafting, coming):
                return False
        if self.watches:
            self.watches, self._held = False, None
        return True

    def _least(self, rows: float, drafting: float, coming: float = 0.0) -> float:
        """That `_worth` must be for who comes to have a draft, beside rows of which so many have one."""
        least = _WORTH - _LOATH * (2.0 * drafting - rows) / (rows + coming)
        return max(least, 1.0) if self._owed >= _MOST_OWED else least

    def cost_of_draft(self, rows: int, computed: int, left: int) -> float | None:
        """See `ShapePolicy`. All rows wait for it, and one gains. Not before trees could be paid that tell more; nor
        while who comes has no draft for what that reads, for so would a row that is put back.
        """
        if self._num_rounds % _EVERY or self._num_rounds < self._next_draft:
            return None
        if self.regret_budget < REGRET_BUDGET or not self._round_s or self._reads_lose:
            return None
        if self._gain is None:
            best_s = min(self._round_s[each] / self._tokens(each, share=self._wanting) for each in self._round_s)
            self._gain = 1.0 - best_s / self._round_s[PLAIN]
        cost = self._prefills.seconds(computed) / self._round_s[PLAIN]
        pays = 0.0 < _TIMES_PAID * rows * cost <= left * self._gain
        return cost if pays and cost <= self.savings else None

    def pay(self, rounds: float) -> None:
        self.savings -= rounds
        self._next_draft = self._num_rounds + _EVERY
        self.watches, self._held = False, None

    def _earn(self, rounds: float, most: float) -> None:
        """To the budget, which holds so much; what it has no room for is saved."""
        both = self.regret_budget + rounds
        self.regret_budget = min(both, most)
        self.savings = min(self.savings + both - self.regret_budget, _MOST_SAVED)

    def note(self, plan: StepPlan, result: StepResult, seconds: float | None, tokens: float | None = None) -> None:
        """Learn what a round gave, and what it took."""
        if isinstance(plan, MixedPlan) and seconds is not None:
            self._note_prefill(plan.prefill, seconds)  # alone it takes no longer
        if isinstance(plan, PrefillPlan) and seconds is not None:
            self._note_prefill(plan, seconds)
        if not isinstance(plan, RoundPlan) or not result.rows:
            return
        self._counts = result.proposals or self._counts
        of_few = self.alone and plan.shape != PLAIN
        if plan.shape == PLAIN:
            self.acceptance.note(PLAIN, ())
            self._earn(0.0, self._most_regret_budget)
        else:
            self._note_drafts(plan, result, of_few)
        if seconds is not None and not (plan.catches_up or of_few):
            held = plan.committed_bound if tokens is None else tokens
            self._costs.note(self._bucket_for(len(plan.rows)), plan.shape, held, seconds)

    def _note_prefill(self, plan: PrefillPlan, seconds: float) -> None:
        self._prefills.note(sum(len(chunk.token_ids) for chunk in plan.chunks), seconds)

    def _note_drafts(self, plan: RoundPlan, result: StepResult, of_few: bool) -> None:
        """What was accepted. of_few: of rows with a draft alone, for which others waited."""
        withheld = {*plan.no_draft, *(mask.row for mask in plan.masks)}
        told = [row for row in result.rows if row.tokens and row.row not in withheld]
        lengths = [len(row.tokens) - 1 for row in told]
        ranks = [row.ranks for row in told[:LOOKED_AT] if len(row.ranks) == len(row.tokens) - 1]
        nodes = _nodes(plan.shape, self._bucket_for(len(plan.rows)), len(plan.rows))
        self.acceptance.note(plan.shape, lengths, ranks, nodes)
        self._held, self._told_of_few, self.looks = None, self.watches and any(lengths), False
        if lengths:
            self._num_told += 1
            if self._num_told == _FIRST_KEPT or self._num_told % _KEEPS == 0:
                self._keep_head(self.learned())
        rows = max(len(result.rows), self._batch[1]) if of_few else len(result.rows)
        gained = sum(lengths) / rows
        self._anyhow += gained * self.watches
        self._earn(gained, self._most_regret_budget)


def num_watched(rows: int) -> int:
    """Rows that have a draft for a trial, of so many."""
    return max(rows // _WATCHED, 1)


def _nodes(shape: SpecShape, rows: int, live: int) -> float:
    """Nodes of a row, in the mean, of a round with so many rows, of which these are no padding."""
    return min((shape.nodes_at(rows) - (rows - live)) / live, shape.num_draft_tokens)
