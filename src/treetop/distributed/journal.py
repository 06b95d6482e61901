"""What a client's requests have received, from however many engines: one that dies costs a pause and nothing else.

    add --> waiting --due--> with the engine --take--> ended
               ^                  |
               '------ lost ------'

A request that is resumed is its prompt and what it has received, with the seed that it had. A uniform depends on seed
and position alone, so it goes on as it would have. Every update says where in the output its tokens begin, and one that
does not begin where the client stands is an error, not a token.

An engine that was killed from outside says nothing of its requests: all go on together, however often that happens.

Any other death is a crash. A request that crashes the engine would crash the next one too. So after a crash those that
were with the engine are under suspicion: they go to the next one first, one after the other, each once the one before
is past whatever it did. Three rules say whom a crash ends:

1. It comes within the first `TRIAL_STEPS` steps of the one on trial: that one, as for what it does in its prefill, or
   wherever its output comes to some place.
2. It comes at the same step of a request (`_SPREAD` apart at most) as the `same_step_crashes - 1` before it: that one,
   whoever is on trial, as for what it does some steps after it came to an engine. Trials begin in one order and in the
   other by turns, so that of requests that came together only one is at the same step three times.
3. Where rule 1 holds and another is at the step where it was at the crash before: nobody yet, but for one that was on
   trial at a crash before.

So of one request that crashes every engine three die at most, and no other request ends (shown in simulated lives).
Crashes that have nothing to do with requests, of chance p a step, end one on trial with 4 p, and one past it with
(2 p)^(same_step_crashes - 1): 4e-6 for 3 crashes and p = 0.001, 1e-6 for 16 and p = 0.2. A request that crashes
engines at another step each time is handed on until restarts are used up; so is one where fewer are left than it takes.

Where another engine has room, it takes over at once what was with the one that died, all together. A request that was
under suspicion may be taken over once: if the engine that took it over dies too, before it is past whatever it did, it
waits for a trial; and so does one that was on trial at a crash, or at the same step at two.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treetop.checks.host import check_continues
from treetop.core.clients import Sink
from treetop.types.errors import CheckError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate, late_error

TRIAL_STEPS = 4
"""Steps that end a trial: a prefill, and the rounds that may have been in flight when the engine died."""
_SPREAD = 1
"""Steps by which a request's counts differ when it crashes engines at one: the last update may be lost."""
SAME_STEP_CRASHES = 3
"""Of rule 2, for an engine whose deaths have a cause that is known."""
TRIAL_S = 10.0
"""Seconds after which the next trial begins beside one that has not ended, such as of a long prompt."""


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request that has not ended.

    num_steps: that gave it tokens, of the engine that it is with.
    lived: such steps of each engine that crashed with it.
    suspect: it was with an engine that crashed.
    tried: engines have crashed while it was on trial, and it was not ended.
    taken_over: another engine has it from one that crashed, and has not given it as many steps as a trial.
    """

    request: EngineRequest
    sink: Sink
    deadline_s: float | None
    received: list[int] = field(default_factory=list)
    with_engine: bool = False
    num_steps: int = 0
    lived: list[int] = field(default_factory=list)
    suspect: bool = False
    tried: bool = False
    taken_over: bool = False

    def crashed_alike(self, count: int) -> bool:
        """Whether the last so many engines that crashed with it did so at the same step of it."""
        last = self.lived[-count:]
        return len(last) == count and min(last) > 0 and max(last) - min(last) <= _SPREAD


class Journal:
    """A client's requests that have not ended, in the order of their coming. No sockets and no tasks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, same_step_crashes: int = SAME_STEP_CRASHES) -> None:
        """clock: seconds, for deadlines. same_step_crashes: in a row that end a request, see rule 2."""
        self._clock, self._alive = clock, dict[RequestId, _LiveRequest]()
        self._same_step_crashes = same_step_crashes
        self._waiting: dict[RequestId, _LiveRequest] = {}
        self._on_trial: _LiveRequest | None = None
        self._trial_began_s = 0.0
        self._max_suspects = 0
        self.open = False
        """Whether there is an engine."""

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def settled(self) -> bool:
        """Whether the engine has all that there is, and nothing is on trial."""
        return self.open and not self._waiting and self._on_trial is None

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        now = self._clock()
        for request in requests:
            deadline_s = None if request.timeout_s is None else now + request.timeout_s
            entry = _LiveRequest(request, sink, deadline_s, [*request.received])
            self._alive[request.request_id] = self._waiting[request.request_id] = entry

    def drop(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing more is to be heard of these."""
        for request_id in request_ids:
            entry = self._alive.pop(request_id, None)
            self._waiting.pop(request_id, None)
            if entry is not None and entry is self._on_trial:
                self._on_trial = None

    # ---------------------------------------------------------------- an engine is there

    def opened(self, max_requests: int) -> None:
        """An engine is up, and has nothing yet. max_requests: that it runs at a time."""
        self.open, self._max_suspects = True, max_requests

    def due(self) -> list[EngineRequest]:
        """What the engine is to be given now, and is with it from then on."""
        if not self.open or not self._waiting or self._on_trial is not None:
            return []
        suspects = [entry for entry in self._waiting.values() if entry.suspect]
        forwards = max((len(entry.lived) for entry in suspects), default=0) % 2
        self._on_trial = suspects[0 if forwards else -1] if suspects else None
        given = [*self._waiting.values()] if self._on_trial is None else [self._on_trial]
        for entry in given:
            entry.with_engine, entry.num_steps = True, 0
            del self._waiting[entry.request.request_id]
        now = self._trial_began_s = self._clock()
        return [resumed(entry.request, entry.received, _left_s(entry, now)) for entry in given]

    def take(self, updates: Sequence[RequestUpdate]) -> list[RequestId]:
        """Deliver what the engine gives. Returns requests that the engine is to end: what it gave them is wrong.

        That an engine has failed is no update of a request: `lost` or `fail` follows.
        """
        wrong = []
        for update in updates:
            entry = self._alive.get(update.request_id)
            if entry is None or update.engine_failed:
                continue
            if update.new_ids:
                try:
                    check_continues(update.request_id, update.start, len(entry.received))
                except CheckError as error:
                    wrong.append(update.request_id)
                    self._end(entry, str(error))
                    continue
                entry.received += update.new_ids
                entry.num_steps += 1
                if entry.num_steps >= TRIAL_STEPS:
                    entry.suspect = entry.tried = entry.taken_over = False
                    self._on_trial = None if self._on_trial is entry else self._on_trial
            if update.finish_reason is not None:
                self.drop((update.request_id,))
            entry.sink(update)
        return wrong

    # ---------------------------------------------------------------- it has gone

    def lost(self, reason: str, killed: bool = False) -> None:
        """The engine has ended. All that it had waits for the next one, but for what has crashed others, too.

        killed: from outside, for no cause that a request may be.
        """
        if not self.open:
            return
        self.open, on_trial, self._on_trial = False, self._on_trial, None
        if not killed:
            self._crashed(on_trial, reason)
        self._all_wait()

    def _crashed(self, on_trial: _LiveRequest | None, reason: str) -> None:
        """End whoever did it, as the three rules say; where nobody is known to have, all are tried."""
        with_engine = self._with_engine()
        for entry in with_engine:
            entry.lived.append(entry.num_steps)
        again = "the engine ended {} with this request, which is not tried again: " + reason
        late = [entry for entry in with_engine if entry.crashed_alike(self._same_step_crashes)]
        for entry in late:
            self._end(entry, again.format(f"at the same step {self._same_step_crashes} times"))
        if late:
            return
        others = [entry for entry in with_engine if entry is not on_trial and entry.crashed_alike(2)]
        if on_trial is not None and (on_trial.tried or not others):
            self._end(on_trial, again.format("twice"))
            return
        for entry in with_engine:
            entry.suspect = True
        if on_trial is not None:
            on_trial.tried = True

    def hand_on(self, place: Callable[[EngineRequest], "Journal | None"]) -> int:
        """While there is no engine: others take over what waits. Returns how many requests they have taken over.

        place: the journal of an engine that has room for a request; None where none has.
        """
        num_waiting = len(self._waiting)
        for request_id, entry in [*self._waiting.items()]:
            if entry.taken_over or entry.tried or entry.crashed_alike(2):
                continue
            other = place(resumed(entry.request, entry.received, None))
            if other is None:
                break
            del self._alive[request_id], self._waiting[request_id]
            entry.suspect, entry.taken_over = False, entry.suspect
            other._alive[request_id] = other._waiting[request_id] = entry
        return num_waiting - len(self._waiting)

    def unanswered(self) -> None:
        """The engine was not to be reached. All that it was given waits for another, and is suspected of nothing."""
        self.open, self._on_trial = False, None
        self._all_wait()

    def _all_wait(self) -> None:
        for entry in self._alive.values():
            entry.with_engine, entry.suspect = False, entry.suspect or entry.crashed_alike(2)
        self._waiting = {**self._alive}

    def _with_engine(self) -> list[_LiveRequest]:
        """As many as can have run, first those that are known to have."""
        with_engine = [entry for entry in self._alive.values() if entry.with_engine]
        likely = sorted(with_engine, key=lambda entry: (entry.num_steps == 0, entry.request.priority))
        return likely[: self._max_suspects]

    def fail(self, reason: str) -> None:
        """End all with an error: no engine comes any more."""
        self.open = False
        for entry in [*self._alive.values()]:
            self._end(entry, reason, engine_failed=True)

    def tend(self) -> None:
        """End those that wait and whose time is over, which an engine does of its own; do not wait for a long trial."""
        now = self._clock()
        for entry in [*self._waiting.values()]:
            left_s = _left_s(entry, now)
            if left_s is not None and left_s <= 0:
                self._end(entry, late_error(len(entry.received)), timed_out=True)
        if now - self._trial_began_s > TRIAL_S:
            self._on_trial = None

    def _end(self, entry: _LiveRequest, error: str, engine_failed: bool = False, timed_out: bool = False) -> None:
        request_id = entry.request.request_id
        if self._alive.get(request_id) is not entry:
            return  # whoever was told of another one's end has dropped it
        self.drop((request_id,))
        last = RequestUpdate(request_id, (), None, "abort", error, engine_failed, start=len(entry.received))
        entry.sink(last._replace(timed_out=timed_out))


def resumed(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """What an engine is asked for a request of which the client has received some. timeout_s: what is left of it."""
    return request._replace(received=tuple(received), timeout_s=timeout_s)


def _left_s(entry: _LiveRequest, now: float) -> float | None:
    return None if entry.deadline_s is None else entry.deadline_s - now
