"""Rounds without an engine: a policy chooses their shapes, a model says what they cost, and an adversary what holds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treetop.bench.drawn_head import DrawnHead
from treetop.bench.modelled_costs import ROWS, costs_of_a_gpu
from treetop.scheduler.policy import AdaptiveShape
from treetop.types.costs import CostTable, HeadAcceptance
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, SpecShape, shapes_beside
from treetop.types.messages import RoundPlan, RowResult, StepResult
from treetop.types.sampling import SamplingMode

SHAPES = shapes_beside(SpecShape(4, 5, 16))
CONTEXT = 500


def layout(max_deferred=16) -> Layout:
    group = KVGroup(FULL, 1, paired(1, 8))
    return Layout(SHAPES, 16, ROWS[-1], 1000, 512, (group,), 256 * 1024, max_deferred=max_deferred)


@dataclass
class Load:
    """`rows` rows under a policy. rounds: seconds and tokens a row of each; shapes: of each.

    known: what is thought of the head at first. busy: how many times longer rounds take than the table says.
    life: rounds of a row, after which another comes in its place; None for ever. drafting: rows that have a draft.
    parts: of the rows, that took part in each round, and that had a draft of all.
    """

    rows: int
    table: CostTable = field(default_factory=lambda: costs_of_a_gpu(SHAPES))
    layout: Layout = field(default_factory=layout)
    known: Callable[[], HeadAcceptance] = HeadAcceptance
    seed: int = 0
    busy: float = 1.0
    rounds: list[tuple[float, float]] = field(default_factory=list)
    shapes: list[SpecShape] = field(default_factory=list)
    deferred: int = 0
    life: float | None = None
    parts: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.policy = AdaptiveShape(self.table, self.layout, self.known)
        self.drafting, self._gone = self.rows, 0.0

    def cost(self, shape, rows=None) -> float:
        return self.busy * self.table.seconds(self.layout.bucket_for(rows or self.rows), shape, CONTEXT)

    def round(self, chance) -> None:
        """One round. chance(shape, depth): that a path that got there goes on."""
        self._leave()
        deferred = self.deferred if self.drafting else 0
        shape = self.policy.choose([CONTEXT] * self.rows, [self.rows, 0, 0], deferred, self.drafting)
        due = shape == PLAIN and deferred == self.layout.max_deferred
        if due:
            self.drafting *= self.policy.pays_to_catch_up(self.rows, self.drafting)
        elif shape == PLAIN and self.policy.watches:
            self.drafting *= self.policy.looks and self.drafting <= self._few
        behind = self.drafting > 0 and (due or (shape != PLAIN and deferred > 0))
        self.deferred = 0 if shape != PLAIN else 1 + (0 if behind else deferred)
        size = self.drafting if shape != PLAIN and self.policy.alone else self.rows
        seconds = self.cost(shape, size) + (self.table.catch_up_seconds(self.drafting, deferred) if behind else 0.0)
        accepted = [self._accepted(shape, chance) if row < self.drafting else 0 for row in range(size)]
        rows = tuple(Row(row) for row in range(size))
        plan = RoundPlan(
            (), (), rows, shape, CONTEXT, SamplingMode.GREEDY, catches_up=behind, no_draft=rows[self.drafting :]
        )
        results = (RowResult(row, (0,) * (length + 1), True) for row, length in zip(rows, accepted, strict=True))
        self.policy.note(plan, StepResult(tuple(results)), seconds)
        self.rounds.append((seconds, (size + sum(accepted)) / self.rows))
        self.shapes.append(shape)
        self.parts.append((size / self.rows, self.drafting / self.rows))

    @property
    def _few(self) -> int:
        return max(self.rows // 64, 1)

    def _leave(self) -> None:
        """Others come in the place of rows, with a draft if the policy wants more than watch."""
        self._gone += 0.0 if self.life is None else self.rows / self.life
        while self._gone >= 1.0:
            self._gone -= 1.0
            self.drafting -= self._random.random() < self.drafting / self.rows
            begins = not self.policy.watches or (self.policy.looks and self.drafting < self._few)
            self.deferred = 0 if begins and not self.drafting else self.deferred
            self.drafting += begins

    def _accepted(self, shape, chance) -> int:
        depth = min(shape.num_steps, shape.num_draft_tokens - 1)
        return next((d for d in range(depth) if self._random.random() >= chance(shape, d)), depth)

    def speed(self, start=0, end=None) -> float:
        """Times as fast as plain rounds of an engine without a draft, from one round to another."""
        part = self.rounds[start:end]
        return self.cost(PLAIN) * sum(tokens for _, tokens in part) / sum(seconds for seconds, _ in part)

    def worst(self, window=200, after=50) -> float:
        return min(self.speed(at, at + window) for at in range(after, len(self.rounds) - window))

    def fixed_speed(self, shape, chance) -> float:
        """The same of rounds that all have a shape."""
        expected = path = 1.0
        for depth in range(min(shape.num_steps, shape.num_draft_tokens - 1)):
            path *= chance(shape, depth)
            expected += path
        return expected * self.cost(PLAIN) / self.cost(shape)


class DrawnLoad(Load):
    """Rounds that accept what a head gives, and whose results bring what was counted."""

    def __init__(self, rows: int, head: DrawnHead, *given: Any) -> None:
        """given: more of `Load`."""
        super().__init__(rows, *given)
        self.head, note = head, self.policy.note
        self.policy.note = lambda plan, result, *took: note(
            plan, StepResult(result.rows, proposals=head.counts()), *took
        )

    def _accepted(self, shape, chance) -> int:
        return self.head.accepted(shape)

    def mean_speed(self, start: int) -> float:
        """As `speed`, with the mean tokens of each round's shape in the place of what it gave."""
        part = [*zip(self.shapes, self.rounds, self.parts, strict=True)][start:]
        given = sum(took + drafted * (self.head.tokens(shape) - 1.0) for shape, _, (took, drafted) in part)
        return self.cost(PLAIN) * given / sum(seconds for _, (seconds, _), _ in part)

    def best_speed(self) -> float:
        """Of rounds that all have one shape."""
        return max(self.head.tokens(shape) * self.cost(PLAIN) / self.cost(shape) for shape in self.table.shapes)
