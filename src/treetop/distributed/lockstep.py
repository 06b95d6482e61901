"""Ranks that share experts run in lockstep: the same step at the same time, each with rows of its own, or with none.

    rank 0   proposes a round of 4 rows ----.                       .--> launches it with its 3 rows
    rank 1   proposes a round of 1 row  -----+--> largest of each --+--> launches it with its 1 row
    rank 2   has received one, has none  ---'                       '--> executes a dummy batch

Experts make every step a sequence of exchanges, so all ranks have to run it, of one kind and size: the same captured
graph. Each sends a proposal once a step, and takes the largest of all; no rank decides for others. While nobody
proposes anything nothing is sent: the group is idle, and the first proposal wakes it.

Rounds whose shape a policy chooses have one shape on all ranks, which is agreed on a round before: with its proposal of
a round each says what it would choose, and all take what the one with most rows has said. A round is planned in that
shape. It changes with a round alone, and then nobody has one planned that was not launched.

It is host code between two steps. With two steps in flight a step is agreed on while the one before it runs.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from treetop.core.engine_core import StepEngine
from treetop.types.changes import Change, Commit, UpdateWeights, asked_as
from treetop.types.errors import CheckError, ConfigError, EngineError
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import (
    ExportPlan,
    ImportPlan,
    MixedPlan,
    OffloadPlan,
    PrefillPlan,
    RoundPlan,
    StepPlan,
    StepResult,
    prefill_of,
    round_of,
)
from treetop.types.sampling import SamplingMode

InFlight = TypeVar("InFlight")
ModelPlan = PrefillPlan | RoundPlan | MixedPlan
"""A step that runs the model."""
_CHOICES = [*SamplingMode]
_TICK_S = 0.1


class StepProposal(msgspec.Struct, frozen=True, array_like=True):
    """What a rank proposes for a step: a round, a prefill, both in one forward, or nothing, all of it 0.

    rows: of a round's batch.
    choice: how a round's tokens are chosen, its place in `SamplingMode`.
    tokens: of a prefill's batch. Padding counts.
    shape: of a round, its place in `Layout.shapes`.
    catches_up: a round begins with what rows have deferred.
    wanted: the shape that later rounds should have.
    """

    rows: int = 0
    choice: int = 0
    tokens: int = 0
    shape: int = 0
    catches_up: bool = False
    wanted: int = 0


class ProposalMessage(msgspec.Struct, frozen=True, array_like=True):
    """A rank's proposal for step `step`."""

    rank: int
    step: int
    proposal: StepProposal


def merged(proposals: Iterable[StepProposal], prefilled_last: bool) -> StepProposal:
    """The largest of each number, of a prefill or of a round. Prefill goes first, but takes turns with rounds; if one
    rank wants a mixed step, all have one.

    The shape that is wanted is that of most rows, of several alike the largest.
    """
    listed = [*proposals]
    tokens, rows = max(each.tokens for each in listed), max(each.rows for each in listed)
    mixed = any(each.tokens and each.rows for each in listed)
    if tokens and not mixed and not (rows and prefilled_last):
        return StepProposal(tokens=tokens)
    return StepProposal(
        rows,
        max(each.choice for each in listed),
        tokens if mixed else 0,
        shape=max(each.shape for each in listed),
        catches_up=any(each.catches_up for each in listed),
        wanted=max((each.rows, each.wanted) for each in listed)[1],
    )


class StepSync:
    """Sends and receives the proposals of a group's ranks, each over a socket of its own in the group's folder."""

    def __init__(self, folder: str, rank: int, size: int, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._rank, self._size = rank, size
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(f"ipc://{folder}/wants-{rank}")
        self._others = [context.socket(zmq.PUSH) for other in range(size) if other != rank]
        for socket, other in zip(self._others, (other for other in range(size) if other != rank), strict=True):
            socket.connect(f"ipc://{folder}/wants-{other}")
        self._received: dict[int, dict[int, StepProposal]] = {0: {}}
        self.step = 0
        """The step that is agreed on next."""

    def close(self) -> None:
        for socket in (self.inbox, *self._others):
            socket.close(linger=0)

    def has_proposals(self) -> bool:
        """Whether another rank has proposed the next step, so that this one has to take part."""
        self._receive(0)
        return bool(self._received[self.step])

    def agree(self, proposal: StepProposal, timeout_s: float) -> list[StepProposal]:
        """Exchange proposals for the next step. Raises EngineError if a rank sends none in time."""
        message = msgspec.msgpack.encode(ProposalMessage(self._rank, self.step, proposal))
        for socket in self._others:
            socket.send(message)
        received, deadline = self._received[self.step], time.monotonic() + timeout_s
        while len(received) < self._size - 1:
            if time.monotonic() > deadline:
                silent = sorted({*range(self._size)} - {*received, self._rank})
                raise EngineError(
                    f"rank {', '.join(map(str, silent))} did not propose step {self.step} in"
                    f" {timeout_s:g} s; raise --step-timeout if it needs longer"
                )
            self._receive(_TICK_S)
        del self._received[self.step]
        self.step += 1
        self._received.setdefault(self.step, {})
        return [proposal, *received.values()]

    def _receive(self, patience_s: float) -> None:
        while self.inbox.poll(int(1000 * patience_s)):
            message = msgspec.msgpack.decode(self.inbox.recv(), type=ProposalMessage)
            self._received.setdefault(message.step, {})[message.rank] = message.proposal
            patience_s = 0


class RankEngine(StepEngine[InFlight], Protocol[InFlight]):
    """What a lockstep needs of an engine."""

    @property
    def layout(self) -> Layout: ...

    def bucket_of(self, plan: StepPlan) -> int:
        """Rows of a step's batch."""
        ...

    def tokens_of(self, plan: PrefillPlan) -> int:
        """Tokens of a prefill's batch that ranks exchange."""
        ...


@dataclass(slots=True, eq=False)
class LockstepStep(Generic[InFlight]):
    """A step in flight on all ranks.

    own: this rank's.
    result: once it has ended.
    """

    own: InFlight
    result: StepResult | None = None


class Lockstep(Generic[InFlight]):
    """A rank's engine as a `StepEngine`: a plan is launched when all ranks run a step of its kind.

    Until then, and while the rank has no plan, it takes part in the others' steps without rows. Raises EngineError if
    another rank does not answer in time.

    waiting_since: when the wait began that is going on, in monotonic seconds.
    """

    def __init__(self, engine: RankEngine[InFlight], step_sync: StepSync, timeout_s: float) -> None:
        self._engine, self._step_sync, self._timeout_s = engine, step_sync, timeout_s
        self._out: deque[LockstepStep[InFlight]] = deque()
        self._prefilled_last = False
        self._shape = self._wanted = 0  # places in `Layout.shapes`: of rounds now, and what this rank would choose
        self.waiting_since: float | None = None
        self.num_steps = self.num_idle = 0
        """Steps that were launched, and those among them without rows."""

    def has_proposals(self) -> bool:
        """Whether the others wait for this rank."""
        return self._step_sync.has_proposals()

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Where others' words arrive."""
        return [self._step_sync.inbox]

    def agree_on_shape(self, wanted: SpecShape) -> SpecShape:
        """The shape of a round that is about to be planned. wanted: what this rank would choose, which goes out with
        the proposal of that round.

        Nobody knows how many rows a later round will have: what all rows may not have stands for the next smaller.
        """
        layout = self._engine.layout
        allowed = [layout.shapes.index(shape) for shape in layout.shapes_at(layout.bucket_for(layout.max_requests))]
        self._wanted = max(place for place in allowed if place <= layout.shapes.index(wanted))
        return layout.shapes[self._shape]

    def launch(self, plan: StepPlan) -> LockstepStep[InFlight]:
        """Launch a plan as soon as the ranks agree on a step of its kind; one that needs no expert at once."""
        if isinstance(plan, ExportPlan | ImportPlan | OffloadPlan):
            return self._started(plan)
        proposal = proposal_of(self._engine, plan, self._wanted)
        while not _takes(step := self._agree(proposal), proposal):
            self._start(without_rows(step, self._engine.layout.shapes), step)
        return self._start(grown(plan, step, self._engine.layout.shapes), step)

    def execute_dummy_batch(self) -> None:
        """Take part in a step of the others, without rows."""
        step = self._agree(StepProposal())
        self._start(without_rows(step, self._engine.layout.shapes), step)

    def collect(self, in_flight: LockstepStep[InFlight]) -> StepResult:
        """As `StepEngine.collect`. Steps without rows that were launched before end with it."""
        while in_flight.result is None:
            self._end_oldest()
        return in_flight.result

    def prepare(self, change: Change) -> Commit:
        raise ConfigError(f"{asked_as(change)}: not with ranks that share experts; use --ep-size 1")

    def drop(self, change: Change) -> None:
        """Nothing has been prepared."""

    def lacks_room(self, change: UpdateWeights) -> bool:
        """It is refused anyway."""
        return False

    def _agree(self, proposal: StepProposal) -> StepProposal:
        self.waiting_since = time.monotonic()
        step = merged(self._step_sync.agree(proposal, self._timeout_s), self._prefilled_last)
        self._prefilled_last = step.tokens > 0
        if step.rows:
            self._shape = step.wanted
        return step

    def _start(self, plan: ModelPlan, step: StepProposal) -> LockstepStep[InFlight]:
        """Raises CheckError before it launches what the others do not launch: nobody waits for what never comes."""
        mine = proposal_of(self._engine, plan, step.wanted)
        if mine != step:
            number = self._step_sync.step - 1
            raise CheckError(f"step {number}: this rank would launch {mine}, the ranks have agreed on {step}")
        self.num_steps += 1
        self.num_idle += not plan.rows
        return self._started(plan)

    def _started(self, plan: StepPlan) -> LockstepStep[InFlight]:
        while len(self._out) >= self._engine.layout.max_steps:
            self._end_oldest()
        self.waiting_since = time.monotonic()
        started = LockstepStep(self._engine.launch(plan))
        self.waiting_since = None
        self._out.append(started)
        return started

    def _end_oldest(self) -> None:
        oldest = self._out.popleft()
        self.waiting_since = time.monotonic()
        oldest.result = self._engine.collect(oldest.own)
        self.waiting_since = None


def _takes(step: StepProposal, proposal: StepProposal) -> bool:
    """Whether a plan of this proposal runs in a step: in one of its kind, or in a mixed one."""
    return bool(step.tokens and step.rows) or bool(step.tokens) == bool(proposal.tokens)


def proposal_of(engine: RankEngine[InFlight], plan: ModelPlan, wanted: int) -> StepProposal:
    """The proposal for a plan. The kinds of round and the sizes are all that exchanges depend on."""
    prefill, round = prefill_of(plan), round_of(plan)
    tokens = 0 if prefill is None else engine.tokens_of(prefill)
    if round is None:
        return StepProposal(tokens=tokens)
    return StepProposal(
        engine.bucket_of(round),
        _CHOICES.index(round.choice),
        tokens,
        engine.layout.shapes.index(round.shape),
        round.catches_up,
        wanted,
    )


def grown(plan: ModelPlan, step: StepProposal, shapes: Sequence[SpecShape]) -> ModelPlan:
    """A plan in the size that was agreed on, with a part of nobody's rows where others have one."""
    prefill, round = prefill_of(plan), round_of(plan)
    if prefill is None:
        prefill = PrefillPlan((), (), (), (), SamplingMode.GREEDY)
    if round is None:
        round = RoundPlan((), (), (), shapes[step.shape], 0, SamplingMode.GREEDY)
    prefill = replace(prefill, min_batch_tokens=step.tokens)
    round = replace(round, min_rows=step.rows, choice=_CHOICES[step.choice], catches_up=step.catches_up)
    if step.tokens and step.rows:
        return MixedPlan(prefill, round)
    return prefill if step.tokens else round


def without_rows(step: StepProposal, shapes: Sequence[SpecShape]) -> ModelPlan:
    """A plan of nobody's rows, for a step that others have rows for: all of its batch is padding."""
    return grown(PrefillPlan((), (), (), (), SamplingMode.GREEDY), step, shapes)
