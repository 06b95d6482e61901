"""The engine core: a scheduler and an engine, the steps in flight between them, and what happens when one fails."""

from collections import deque
from typing import Generic, Protocol, TypeVar

from treetop.scheduler.scheduler import Scheduler
from treetop.types.ids import RequestId
from treetop.types.messages import StepPlan, StepResult
from treetop.types.requests import CoreLoad, EngineRequest, RequestUpdate

InFlightStep = TypeVar("InFlightStep")
"""A step in flight."""
STALLED_S = 0.005
"""How long a core that is stalled may look away: no longer than a command may wait."""


class StepEngine(Protocol[InFlightStep]):
    """What runs steps. Up to `Layout.max_steps` are out, and they are collected in launch order."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start a step and return at once."""
        ...

    def collect(self, in_flight: InFlightStep) -> StepResult:
        """Wait for the end of a step, and read its result."""
        ...


class EngineCore(Generic[InFlightStep]):
    """Turns requests into updates, a step at a time. Not thread-safe: one thread calls it (`core/thread.py`).

    An engine that fails ends every request: what was in flight is lost, and with it what the host knows of the rows.
    The error is told in each request's last update and kept in `failure`. The core goes on with what is added later.
    """

    def __init__(self, engine: StepEngine[InFlightStep], scheduler: Scheduler) -> None:
        self.engine, self.scheduler = engine, scheduler
        self.failure: BaseException | None = None
        self.stalled = False
        """Whether the last step had nothing to do, though requests are alive: they wait for another worker, or for what
        their constraints allow."""
        self.num_launched = self.num_committed = 0
        """Steps; those that a failure lost count as committed."""
        self._in_flight: deque[tuple[StepPlan, InFlightStep]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: a request is alive, or a step launched for one that has ended is out."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def load(self) -> CoreLoad:
        return self.scheduler.load

    def add(self, request: EngineRequest, remote: bool = False) -> None:
        """Queue a request. Raises InputError, and nothing has changed, for one that can never run.

        remote: another worker may prefill it.
        """
        self.scheduler.add(request, remote=remote)

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """End a request, wherever it stands; None if it is not alive."""
        return self.scheduler.abort(request_id)

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None:
        """The client stops after the first `num_tokens` tokens of the output; None if the request is not alive."""
        return self.scheduler.finish(request_id, num_tokens)

    def step(self) -> list[RequestUpdate]:
        """End what is late, keep the engine busy, then commit its oldest step.

        Raises nothing: a failure is told in the updates.
        """
        late: list[RequestUpdate] = []
        try:
            late = self.scheduler.expire()
            late += self.scheduler.answers()
            while (plan := self.scheduler.plan()) is not None:
                self._in_flight.append((plan, self.engine.launch(plan)))
                self.num_launched += 1
            self.stalled = not self._in_flight
            if self.stalled:
                self.scheduler.await_answer(STALLED_S if not late else 0)
                return late
            plan, in_flight = self._in_flight.popleft()
            updates = self.scheduler.commit(plan, self.engine.collect(in_flight))
        except BaseException as error:  # whatever it was, every client must hear of it
            return late + self.fail(error)
        self.num_committed += 1
        return late + updates

    def fail(self, error: BaseException) -> list[RequestUpdate]:
        """End every request with this error, and forget the steps in flight."""
        self.failure = error
        self._in_flight.clear()
        self.num_committed = self.num_launched
        return self.scheduler.fail(f"the engine failed: {type(error).__name__}: {error}")
