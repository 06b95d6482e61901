"""Plans whose results have not been committed."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from treetop.scheduler.request import Request
from treetop.types.errors import InvariantError
from treetop.types.messages import ExportPlan, ImportPlan, OffloadPlan, StepPlan, prefill_of, round_of


@dataclass(frozen=True, slots=True)
class StepOut:
    """A plan, and its requests in the order of its rows."""

    plan: StepPlan
    requests: list[Request]


class StepTimes:
    """What steps take by a clock: each since it was planned, or since the result before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._planned, self._ended_s = clock, deque[float](), float("-inf")

    def planned(self) -> None:
        self._planned.append(self._clock())

    def ended(self) -> float:
        """The oldest step's result is here: the seconds that it took."""
        since_s, self._ended_s = max(self._planned.popleft(), self._ended_s), self._clock()
        return self._ended_s - since_s


class StepsOut:
    """The steps in flight, oldest first. A request counts those with its row."""

    def __init__(self) -> None:
        self._steps: deque[StepOut] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepOut]:
        return iter(self._steps)

    @property
    def num_computing(self) -> int:
        """Without those that move K/V alone."""
        return sum(not isinstance(step.plan, ExportPlan | ImportPlan | OffloadPlan) for step in self._steps)

    @property
    def mean_tokens(self) -> float:
        """That requests of the oldest step are known to have, in the mean; 0 if it has none."""
        requests = self._steps[0].requests if self._steps else ()
        return sum(request.num_computed_tokens for request in requests) / max(len(requests), 1)

    @property
    def has_rows(self) -> bool:
        """Whether a step is out that has anybody's row: copies of pages to the host and back have none."""
        return any(step.requests for step in self._steps)

    @property
    def has_prefill(self) -> bool:
        return any(prefill_of(step.plan) is not None for step in self._steps)

    def send(self, plan: StepPlan, requests: list[Request]) -> None:
        self._count(plan, requests, 1)
        self._steps.append(StepOut(plan, requests))

    def take(self, plan: StepPlan) -> list[Request]:
        """Its result is here. Returns its requests. Raises InvariantError unless it is the oldest that is out."""
        if not self._steps or self._steps[0].plan is not plan:
            raise InvariantError("results are committed in the order of their plans, each once")
        requests = self._steps.popleft().requests
        self._count(plan, requests, -1)
        return requests

    def _count(self, plan: StepPlan, requests: list[Request], sign: int) -> None:
        """A round's rows are a step's last."""
        round = round_of(plan)
        first = len(requests) - (0 if round is None else len(round.rows))
        for place, request in enumerate(requests):
            held = request.held
            held.steps_out += sign
            held.rounds_out += sign * (place >= first)

    def num_known(self, request: Request) -> int:
        """Tokens whose K/V the pages hold for certain, in every group: without chunks that are out, and without what
        rounds have deferred.
        """
        held = request.held
        if held.steps_out > held.rounds_out:
            for step in self._steps:
                prefill = prefill_of(step.plan)
                for chunk in () if prefill is None else prefill.chunks:
                    if chunk.row == held.row and request in step.requests:
                        return chunk.start
        return request.num_complete
