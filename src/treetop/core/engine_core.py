"""The engine core: a scheduler and an engine, the steps in flight between them, and what happens when one fails."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from treetop.core.head_fit import HeadFit
from treetop.scheduler.scheduler import Scheduler
from treetop.types.changes import (
    TAGS,
    Change,
    Commit,
    DestroyWeightsUpdateGroup,
    FlushCache,
    InitWeightsUpdateGroup,
    LoadLora,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
    given,
)
from treetop.types.errors import ConfigError, EngineError, InputError, TreetopError, UserError
from treetop.types.ids import RequestId
from treetop.types.messages import ExportPlan, ImportPlan, OffloadPlan, RoundPlan, StepPlan, StepResult
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate, late_error

Result = TypeVar("Result")
InFlightStep = TypeVar("InFlightStep")
"""A step in flight."""
WEIGHTS_REPLACED = "the weights were replaced by update_weights"
"""The error of a request that was alive then."""
WEIGHTS_LOST = "the engine was started again, and the weights that had been sent to it are gone: send them again"
"""That of one that came before they were."""
WEIGHTS_UNDECIDED = "the engine failed while other weights were put in force: update the weights again"
"""Likewise: they are there in part, or others have them and this one has not."""
PARTS_LOST = "parts of {} that had come went with an engine, which was started again: send all again"
"""The refusal of the last part."""
ASLEEP = "the engine is asleep: wake_up lets requests in again"
"""That of one that was alive when it fell asleep, or came then."""
STALLED_S = 0.005
"""How long a core that is stalled may look away: no longer than a command may wait."""

_COPIES = ExportPlan, ImportPlan, OffloadPlan
"""Plans of steps that run no model."""


class StepEngine(Protocol[InFlightStep]):
    """What runs steps. Up to `Layout.max_steps` are out, and they are collected in launch order."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start a step and return at once."""
        ...

    def collect(self, in_flight: InFlightStep) -> StepResult:
        """Wait for the end of a step, and read its result."""
        ...

    def prepare(self, change: Change) -> Commit:
        """Read and check what a change asks for; what is returned puts it in force.

        What is in flight then is collected unless the change makes it worthless. Raises UserError, and nothing has
        changed, for what does not fit or where this cannot be.
        """
        ...

    def drop(self, change: Change) -> None:
        """What was prepared last, for this change, will not be put in force."""
        ...

    def lacks_room(self, change: UpdateWeights) -> bool:
        """Whether new weights need the memory of K/V: then nothing may be in flight, and no K/V be read again.

        Raises UserError where K/V cannot make room, where that would not be enough, and for folders of other models:
        nothing has been dropped for what could not come.
        """
        ...


class EngineCore(Generic[InFlightStep]):
    """Turns requests into updates, a step at a time. Not thread-safe: one thread calls it (`core/loop.py`).

    An engine that fails ends every request: what was in flight is lost, and with it what the host knows of the rows.
    So does any exception of the scheduler, also between steps. The error is told in each request's last update and
    kept in `failure`. The scheduler's books begin anew, and the core goes on with what is added later.
    """

    def __init__(self, engine: StepEngine[InFlightStep], scheduler: Scheduler) -> None:
        self.engine, self.scheduler = engine, scheduler
        self.failure: BaseException | None = None
        self.weight_version = 0
        """How often weights have been replaced."""
        self.asleep: tuple[str, ...] = ()
        """Of `TAGS`."""
        self.lost: tuple[str, ...] = ()
        """Of "model" and "draft", what an engine before this one was sent, and this one has not been."""
        self.undecided: tuple[str, ...] = ()
        """Of those, what may be other than it should be: see `WEIGHTS_UNDECIDED`."""
        self._sent: set[str] = set()  # of those, what is in force here and in no folder
        self._kept: set[str] = set()  # of those, what has come of new weights that are not whole yet
        self._gone: set[str] = set()  # of those, what had come so to an engine before this one
        self.fit = HeadFit()
        self._has_prepared = False  # a change, which all ranks hold until it is in force or dropped: nothing else, then
        self._paused = False  # K/V have gone for new weights, which are not in force yet
        self._held: list[tuple[EngineRequest, bool, float]] | None = None  # those that came since, while others end
        self.stalled = False
        """Whether the last step had nothing to do, though requests are alive: they wait for another worker, or for what
        their constraints allow."""
        self.copies_alone = False
        """Whether the last step ran no model, and none is out."""
        self.num_launched = self.num_committed = 0
        """Steps; those that a failure lost count as committed."""
        self._in_flight: deque[tuple[StepPlan, InFlightStep]] = deque()
        self._failed: list[RequestUpdate] = []  # of what a command has ended, or has waited for

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: a request is alive, or a step launched for one that has ended is out.

        Or a command has failed, which the next step tells.
        """
        return self.scheduler.has_work or bool(self._in_flight or self._failed)

    @property
    def load(self) -> CoreLoad:
        load, held = self.scheduler.load, len(self._held or ())
        return load._replace(num_waiting=load.num_waiting + held, head_fit=self.fit.said)

    @property
    def num_alive(self) -> int:
        """Requests that have not ended, but for those that are held back."""
        return len(self.scheduler.queues.by_id)

    def hold(self) -> None:
        """Requests that come from now on wait until `release`; the others end."""
        self._held = [] if self._held is None else self._held

    def release(self) -> None:
        """What was held back comes in, and what was paused goes on."""
        held, self._held, self._paused = self._held or [], None, False
        for request, remote, since_s in held:
            left_s = None if request.timeout_s is None else request.timeout_s - (time.monotonic() - since_s)
            if left_s is not None and left_s <= 0:
                late = late_error(len(request.received))
                self._failed.append(RequestUpdate(request.request_id, (), None, "abort", late, timed_out=True))
                continue
            try:
                self.add(request._replace(timeout_s=left_s), remote)
            except TreetopError as error:
                told = RequestUpdate(request.request_id, (), None, "abort", str(error))
                self._failed.append(told._replace(user_error=isinstance(error, InputError)))

    def add(self, request: EngineRequest, remote: bool = False) -> None:
        """Queue a request. Raises InputError, and nothing has changed, for one that can never run.

        remote: another worker may prefill it. Raises EngineError if something breaks; all others have ended then, too.
        """
        if self._held is not None:
            self._held.append((request, remote, time.monotonic()))
            return
        try:
            self.scheduler.add(request, remote=remote)
        except UserError:
            raise
        except BaseException as error:
            self._failed = [each for each in self.fail(error) if each.request_id != request.request_id]
            raise EngineError(failure_text(error)) from error

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """End a request, wherever it stands; None if it is not alive."""
        for each in self._held or ():
            if each[0].request_id == request_id:
                assert self._held is not None
                self._held.remove(each)
                return RequestUpdate(request_id, (), None, "abort")
        return self._between_steps(lambda: self.scheduler.abort(request_id))

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None:
        """The client stops after the first `num_tokens` tokens of the output; None if the request is not alive."""
        return self._between_steps(lambda: self.scheduler.finish(request_id, num_tokens))

    def _between_steps(self, command: Callable[[], Result]) -> Result | None:
        """None if it fails, as a step may, and the next step tells of it."""
        try:
            result = command()
            self._forget_left()
            return result
        except BaseException as error:
            self._failed = self.fail(error)
            return None

    def step(self) -> list[RequestUpdate]:
        """End what is late, keep the engine busy, then commit its oldest step.

        Raises nothing: a failure is told in the updates.
        """
        early, self._failed = self._failed, []
        try:
            early = early + self.scheduler.expire()
            early += self.scheduler.answers()
            if self._paused:
                self.stalled = True
                return early
            while (plan := self.scheduler.plan()) is not None:
                self._in_flight.append((plan, self.engine.launch(plan)))
                self.num_launched += 1
            self.stalled = not self._in_flight
            if self.stalled:
                self.scheduler.await_answer(STALLED_S if not early else 0)
                return early
            copies = all(isinstance(plan, _COPIES) for plan, _ in self._in_flight)
            updates = self._commit_oldest()
            self.copies_alone = copies and not self._in_flight
        except BaseException as error:  # whatever it was, every client must hear of it
            return early + self.fail(error)
        return early + updates

    def _commit_oldest(self) -> list[RequestUpdate]:
        """The updates of the step that was launched first."""
        plan, in_flight = self._in_flight.popleft()
        updates = self.scheduler.commit(plan, self.engine.collect(in_flight))
        self.num_committed += 1
        self._forget_left()
        self.fit.note(updates)
        if not isinstance(plan, RoundPlan):  # the first tokens of a request, or those after it was put back
            return [each._replace(weight_version=self.weight_version) for each in updates]
        return updates

    def prepare(self, change: Change) -> Commit:
        """Between two steps, read and check what a change asks for; what is returned puts it in force, between two
        steps too. What the engine raises, this raises, and nothing has changed.
        """
        try:
            commit = self._prepared(change)
        except BaseException:
            if isinstance(change, UpdateWeights):
                self.drop(change)
            self.release()
            raise
        self._has_prepared = True
        return lambda: self._put_in_force(change, commit)

    def drop(self, change: Change) -> None:
        """What was prepared for a change is let go, on all ranks. Raises nothing of theirs: a step tells of it."""
        self._has_prepared = False
        self._between_steps(lambda: self.engine.drop(change))
        if isinstance(change, UpdateWeights) and not change.more:
            self._kept, self._gone = set(), set()
        self.release()

    def _put_in_force(self, change: Change, commit: Commit) -> None:
        """A half of a change is no engine: if it fails all end, as with a step. Half of weights serves nobody."""
        torn = self.changed_by(change) if isinstance(change, UpdateWeights) and not change.more else ()
        try:
            commit()
            torn, self._has_prepared = (), False
            self._forget_left()
        except BaseException as error:
            self._has_prepared = False
            if torn:  # the engine holds no parts any more
                self._kept, self._gone = set(), set()
            self.undecided = tuple(sorted({*self.undecided, *torn}))
            self._failed = self.fail(error)
            self.release()
            raise

    def _prepared(self, change: Change) -> Commit:
        adapters = self.scheduler.adapters
        match change:
            case UpdateWeights():
                if "weights" in self.asleep:
                    raise ConfigError("update_weights: the weights sleep; wake_up(tags=['weights']) first")
                return self._prepared_weights(change)
            case InitWeightsUpdateGroup() | DestroyWeightsUpdateGroup():
                return self.engine.prepare(change)
            case LoadLora(name):
                numbered = replace(change, number=adapters.next_number(name))
                commit = self.engine.prepare(numbered)
                return lambda: (commit(), adapters.add(name, numbered.number))
            case UnloadLora(name):
                adapters.check_removable(name)
                return lambda: adapters.remove(name)
            case Sleep():
                commit = self.engine.prepare(change)
                return lambda: self._falls_asleep(commit)
            case WakeUp(tags):
                commit = self.engine.prepare(change)
                return lambda: self._wakes(commit, tags)
            case FlushCache():
                return self._put_back_all

    def _prepared_weights(self, change: UpdateWeights) -> Commit:
        if change.in_flight == "wait" and not change.more:
            self.hold()
            while self.num_alive:  # whoever has a loop has waited there
                self._failed = self.step()
        change = replace(change, makes_room=self.engine.lacks_room(change))
        if change.makes_room:
            self._put_back_all()
            self._paused = True
        commit = self.engine.prepare(change)
        if change.more:
            return lambda: self._keep(commit, change)
        gone = self._gone - given(change) - self._kept
        if gone:  # said once all has come, which whoever sends it waits for
            raise ConfigError(f"update_weights: {PARTS_LOST.format(' and '.join(sorted(gone)))}")
        return lambda: self._replaced(commit, change)

    def _keep(self, commit: Commit, change: UpdateWeights) -> None:
        """A part of new weights; what is served is as before."""
        commit()
        self._kept |= given(change)
        self.release()

    def current(self, info: CoreInfo) -> CoreInfo:
        """What a client must know of it, as it is now."""
        return info._replace(
            loras=self.scheduler.adapters.names,
            lora_versions=self.scheduler.adapters.versions,
            asleep=self.asleep,
            weight_version=self.weight_version,
            refuses_now=self.refuses,
            lacks_weights=bool(self.lost or self.undecided),
        )

    @property
    def lora_versions(self) -> dict[str, int]:
        """The last of every name that an adapter has had."""
        return self.scheduler.adapters.known

    def restore(
        self,
        weight_version: int,
        lora_versions: Mapping[str, int],
        lost: Sequence[str],
        parts: Sequence[str] = (),
        undecided: Sequence[str] = (),
    ) -> None:
        """Count on from an engine whose place this one takes, before any request has come. lost, undecided: see there.

        parts: what it had of new weights that were not whole.
        """
        self.weight_version, self.lost, self._gone = weight_version, tuple(lost), set(parts)
        self.undecided = tuple(undecided)
        self.scheduler.adapters.restore(lora_versions)

    def kept_old(self) -> None:
        """No engine has taken what was undecided, and all have dropped parts that had come."""
        self.undecided, self._kept, self._gone = (), set(), set()

    def changed_by(self, change: UpdateWeights) -> tuple[str, ...]:
        """Of "model" and "draft", what it brings, with parts that have come; else both, those in force read again."""
        return tuple(sorted((given(change) | self._kept) or {"model", "draft"}))

    @property
    def in_no_folder(self) -> tuple[str, ...]:
        """Of "model" and "draft", what an engine that takes this one's place will have lost."""
        return tuple(sorted({*self.lost, *self._sent}))

    @property
    def parts(self) -> tuple[str, ...]:
        """Of "model" and "draft", what has come of new weights that are not whole yet, here or before."""
        return tuple(sorted(self._kept | self._gone))

    @property
    def refuses(self) -> str | None:
        """Why no request is taken, if so."""
        if self.asleep:
            return ASLEEP
        return WEIGHTS_LOST if self.lost else WEIGHTS_UNDECIDED if self.undecided else None

    def _forget_left(self) -> None:
        """All ranks forget adapters that were removed and that no request has any more.

        Not while another change is prepared, in whose place this would be: once it is not.
        """
        adapters = self.scheduler.adapters
        if adapters.leaving and not self._has_prepared:
            for each in adapters.take_left(self.scheduler.adapters_in_use):
                self.engine.prepare(UnloadLora(each.name, each.number))()

    def _falls_asleep(self, commit: Commit) -> None:
        """Every request ends, for its K/V go; they are told so in the next step."""
        commit()
        self.asleep = self.asleep or TAGS
        self._forget(ASLEEP)

    def _wakes(self, commit: Commit, tags: tuple[str, ...] | None) -> None:
        commit()
        self.asleep = () if tags is None else tuple(tag for tag in self.asleep if tag not in tags)

    def _replaced(self, commit: Commit, change: UpdateWeights) -> None:
        """Other weights: all K/V of the old ones are forgotten, and requests end or are put back.

        Those that end are told so in the next step, with what they had received.
        """
        if change.in_flight != "abort":
            while self._in_flight:
                self._failed += self._commit_oldest()
        commit()
        self.weight_version += 1
        of_folders = {kind for kind, each in (("model", change.model), ("draft", change.draft)) if each is not None}
        new = {*self.changed_by(change)}
        came = (given(change) | self._kept) - of_folders
        self._sent, self._kept, self._gone = (self._sent - new) | came, set(), set()
        self.lost = tuple(kind for kind in self.lost if kind not in new)
        self.undecided = tuple(kind for kind in self.undecided if kind not in new)
        self.fit.weights_changed(self.weight_version)
        if change.in_flight != "abort":
            self.scheduler.begin_anew()
            self.scheduler.policy.begin()
        else:
            self._forget(WEIGHTS_REPLACED)
        self.release()

    def _put_back_all(self) -> None:
        """Nothing is in flight and no K/V is left; whoever runs goes on by a prefill."""
        while self._in_flight:
            self._failed += self._commit_oldest()
        self.scheduler.begin_anew()

    def _forget(self, why: str) -> None:
        """All K/V, and the steps in flight. Every request ends."""
        self._in_flight.clear()
        self.num_committed = self.num_launched
        self._failed += self.scheduler.fail(why, engine_failed=False)
        self.scheduler.policy.begin()

    def fail(self, error: BaseException) -> list[RequestUpdate]:
        """End every request with this error, and forget the steps in flight."""
        early, self._failed = self._failed, []
        self.failure, self.stalled = error, False
        self._in_flight.clear()
        self.num_committed = self.num_launched
        return early + self.scheduler.fail(failure_text(error))


def failure_text(error: BaseException) -> str:
    """What requests are told that end with it."""
    return f"the engine failed: {type(error).__name__}: {error}"
