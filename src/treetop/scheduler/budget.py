"""How much of the time prompts may take while others decode: learned from what steps have cost.

    round | prefill step        | round | prefill step        | round
    ------+---------------------+-------+---------------------+-------
          |<---- a gap between two tokens of a stream  ---->|

Nothing here has a clock: seconds come as arguments, so that a simulation decides as a server does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import log
from statistics import median
from typing import NamedTuple

from treetop.types.layout import Layout, PrefillCosts, SpecShape
from treetop.types.messages import PrefillPlan, RoundPlan, StepPlan, prefill_of

_REMEMBERED = 64
"""Steps of a kind that costs are learned from: what they cost changes with what they attend to."""
_MOST_SHARE = 0.8
"""Of the time that prompts may take while others decode. A server of an 8B model whose clients send 1,024 tokens and
get 128 needs as much at 128 clients; less would leave rows empty (`benchmarks/simulated_load.py`)."""
_SHARE_OF_A_ROUND = 0.5
"""What a prefill step may take of the time of a round, where rounds alone come near the target for gaps."""


class _Class(NamedTuple):
    """Medians of the steps whose sizes lie within a factor of two."""

    size: float
    seconds: float


class CostCurve:
    """Seconds of steps of one kind by their size: tokens of work, or rows.

    A smaller step takes no longer, and a larger one no more than in proportion. So each class of sizes that was
    measured bounds the cost of every size, and the least bound counts: a step that was late, as those are for which
    something is compiled, counts for nothing once another was not.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._classes: tuple[_Class, ...] = ()

    def note(self, size: int, seconds: float) -> None:
        """A step of `size` >= 1 took so long."""
        self._measured.append((size, max(seconds, 1e-9)))
        by_class: dict[int, list[tuple[int, float]]] = {}
        for each in self._measured:
            by_class.setdefault((each[0] - 1).bit_length(), []).append(each)
        self._classes = tuple(_medians(steps) for steps in by_class.values())

    def seconds(self, size: float) -> float:
        """What a step of this size takes; 0 if nothing is known."""
        return min((each.seconds * max(size / each.size, 1.0) for each in self._classes), default=0.0)

    def size_within(self, seconds: float) -> float | None:
        """The largest step that takes no longer; None if nothing is known of one that takes no longer."""
        able = [each.size * seconds / each.seconds for each in self._classes if each.seconds <= seconds]
        return max(able) if able else None

    def lost_s(self, size: float) -> float:
        """What a step of this size takes beyond its share of the best that was measured, by the class next to it."""
        if not self._classes:
            return 0.0
        nearest = min(self._classes, key=lambda each: abs(log(size / each.size)))
        best = min(each.seconds / each.size for each in self._classes)
        return size * (nearest.seconds / nearest.size - best)


def _medians(steps: Sequence[tuple[int, float]]) -> _Class:
    sizes, seconds = zip(*steps, strict=True)
    return _Class(median(sizes), median(seconds))


class PrefillBudget:
    """Tokens of a prefill step beside rounds, and whether it is worth its time yet.

    Work is counted in tokens, padding included, that attend to nothing before their chunk: one behind s tokens is
    1 + s / `attended` of these.

    late_s: the end of the last round was seen so late; see `note`.
    """

    def __init__(
        self,
        layout: Layout,
        prefill_costs: PrefillCosts,
        target_gap_s: float | None,
        tokens: int | None = None,
        *,
        shape: Callable[[], SpecShape],
    ) -> None:
        """target_gap_s: between two tokens of a stream, 0 for no bound, None for steps of a size that is not learned.
        tokens: of every step beside rounds, instead of either. shape: of the last round.
        """
        self._layout, self._prefill_costs, self._shape = layout, prefill_costs, shape
        self._target_gap_s, self._tokens = target_gap_s, tokens
        self.prefills, self.rounds = CostCurve(), CostCurve()
        self.late_s = 0.0  # of the last round, whose end was seen that late

    def note(self, plan: StepPlan, seconds: float, before_prefill: bool) -> None:
        """A step took so long, as the host saw it. before_prefill: a prefill step was launched behind it meanwhile.

        A mixed step counts as a prefill, its round included, for that is what a stream waits for.

        Launching one takes the host longer than a round takes the device. So the end of a round before it is seen late,
        and only both together are a measure.
        """
        if isinstance(plan, RoundPlan):
            rows = self._layout.bucket_for(len(plan.rows))
            if before_prefill:
                self.late_s = max(seconds - self.rounds.seconds(rows), 0.0)
            else:
                self.rounds.note(rows, seconds)
        prefill = prefill_of(plan)
        if prefill is not None:
            self.prefills.note(self.work_of(prefill), seconds + self.late_s)
            self.late_s = 0.0

    def work_of(self, plan: PrefillPlan, at_least: bool = False) -> int:
        """Of a prefill step, or of the prefill of a mixed one. at_least: a small one counts as what it takes no less
        time than.
        """
        tokens = plan.packed or self._layout.bucket_for(len(plan.chunks)) * max(len(c.token_ids) for c in plan.chunks)
        behind, attended = sum(len(c.token_ids) * c.start for c in plan.chunks), self._prefill_costs.attended
        work = tokens if attended is None else tokens + behind // attended
        return max(work, self._prefill_costs.minimum) if at_least else work

    def tokens(self, rows: int, start: int, waiting: int = 0, mixed: bool = False) -> int:
        """Most of a step whose deepest chunk has `start` tokens before it, while `rows` rows decode.

        waiting: requests that wait for their prompts and may have a row. mixed: it has these rows' round in it.
        """
        layout, attended = self._layout, self._prefill_costs.attended
        most = self._most_work(rows, waiting, mixed)
        if attended is None or not rows:
            return most
        return max(most * attended // (attended + start), min(most, layout.page_size))

    def _most_work(self, rows: int, waiting: int = 0, mixed: bool = False) -> int:
        """Of a step before a round of `rows` rows; 0 rows: nobody waits for it.

        A step of a fixed size is that however many wait, for those in it have their first tokens at its end: more steps
        may follow (`goes_on`). A mixed one, which has a round each time, is larger by as much as more rows would decode
        if those that wait did: each round until then is one of few.

        Step and round take the target together. But a step may take a share of its round, and as much as costs little
        more than nothing at all, or prompts would never end where rounds are slow.
        """
        chunk = self._layout.chunk
        if self._tokens is not None and rows:
            return min(self._tokens, chunk)
        if not rows or self._target_gap_s == 0:
            return chunk
        if self._target_gap_s is None:
            if mixed and self._prefill_costs.mixed is not None:  # trees empty their rows sooner
                usual = self._prefill_costs.mixed
                return min(usual + usual * waiting * self._shape().num_draft_tokens // rows, chunk)
            return min(self._usual(rows), chunk)
        round_s = self.rounds.seconds(self._layout.bucket_for(rows))
        within = self.prefills.size_within(max(self._target_gap_s - round_s, _SHARE_OF_A_ROUND * round_s))
        return min(max(int(within or 0), self._prefill_costs.minimum), chunk)

    def goes_on(self, rows: int, since_round: int) -> bool:
        """Whether prefill steps go on before a round of `rows` rows while others wait for rows that stand empty.

        Up to `Layout.chunk` tokens: each round until then is one of few, which takes hardly less time, and who waits
        would have first tokens later. Not where gaps or tokens beside rounds are bounded.

        since_round: tokens of the steps since the last round, and what is left of prompts that have begun: beside a
        long one, behind which nobody else comes in, rounds take turns.
        """
        if self._tokens is not None or self._target_gap_s is not None:
            return False
        return since_round + self._usual(rows) <= self._layout.chunk

    def _usual(self, rows: int) -> int:
        """Tokens of a step of a fixed size, or as many as the round has nodes: a prompt beside many streams makes them
        wait no longer than they do.
        """
        return max(self._shape().nodes_at(rows), self._prefill_costs.usual)

    def most_packed(self, rows: int) -> float:
        """Tokens of a batch of fixed size beside a round of `rows` rows, at most: by what was asked for, or by what
        steps of this kind have taken."""
        if self._tokens is not None:
            return self._tokens
        if not self._target_gap_s or not self.prefills.size_within(self._target_gap_s):
            return self._layout.chunk
        return self._most_work(rows)

    def rounds_after(self, plan: PrefillPlan, rows: int) -> float:
        """Rounds of `rows` rows that are due before the next prefill step, a part of one too: at least 1, or what gives
        them their share.
        """
        round_s = self.rounds.seconds(self._layout.bucket_for(rows))
        if self._tokens is not None or not self._target_gap_s or not round_s:
            return 1.0
        return max(self.prefills.seconds(self.work_of(plan)) * (1 / _MOST_SHARE - 1) / round_s, 1.0)

    def may_wait(self, rows: int, work: int, waited_s: float, longest_s: float) -> bool:
        """Whether `work` that waits had better wait for more, while `rows` rows decode.

        waited_s: seconds since the last prefill step, of all requests that wait, added up. longest_s: of the first.
        A small step costs more than its share, and all rows wait for that. Requests wait for each other until they have
        waited as long together: no order of steps known beforehand would take half as long for all of them. It is how
        long to delay an acknowledgement (Dooly, Goldman, Scott, "TCP dynamic acknowledgment delay", STOC 1998).
        """
        if self._tokens is not None or self._target_gap_s is None or work >= self._most_work(rows):
            return False
        if self._target_gap_s and longest_s >= self._target_gap_s:
            return False
        return waited_s < rows * self.prefills.lost_s(work)
