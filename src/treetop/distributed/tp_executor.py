"""Rank 0 of ranks that share a model, each a process: an engine whose steps run on all of them.

          this process: core, scheduler, rank 0's engine
              |  plans, each sent before rank 0 launches it          ^ how each step ended
              v  (zmq, ipc in a folder of the owner's alone)         |
          rank 1 .. size - 1: `tp_worker.py`, which launch and collect what they are sent
          all ranks exchange tensors while a step runs (`parallel/`)

Whatever goes wrong anywhere, a rank that dies, that does not end a step in time, that diverges, ends the group: every
process, every file. The error says which rank, and why.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
import zmq
from torch import Tensor

from treetop.checkpoints.loader import compute_device
from treetop.core.wire import AskChange
from treetop.disaggregation.agent import Order
from treetop.distributed.process import FAILURE_REPORT_S, Failed, ProcessGroup, as_error
from treetop.distributed.rank_groups import ExpertEngines, RankGroups
from treetop.distributed.tp_wire import (
    Changed,
    Ended,
    FromWorker,
    LaunchStep,
    Moved,
    NextLogits,
    TreeMasksMade,
    WorkerOptions,
    WorkerReady,
    WorkerStarted,
    decode_from_worker,
    encode,
)
from treetop.distributed.tp_worker import digest_of
from treetop.engine.changes.update_weights import ELSEWHERE
from treetop.engine.engine import Engine, InFlightStep
from treetop.engine.startup.plan import plan_engine
from treetop.parallel.exchange import RENDEZVOUS_S, START_S
from treetop.types.changes import Change, Commit, UpdateWeights, asked_as
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckError, ConfigError, EngineError, TreetopError, UserError
from treetop.types.kv_transfer.transport import State
from treetop.types.layout import Layout
from treetop.types.messages import NodeMasks, PrefillPlan, StepPlan, StepResult

_HINT = "; raise --step-timeout if it needs longer"
_TICK_MS = 100
"""How often a wait looks whether a rank has died."""


class GroupStep(NamedTuple):
    """A step in flight on all ranks. own: rank 0's."""

    number: int
    own: InFlightStep


class TpExecutor:
    """Rank 0 as an engine: steps are launched and collected on all ranks.

    engine: rank 0's own. Raises UserError for what cannot work, before anything is started where it can, and
    EngineError if a rank fails; after that every call raises it again. `close` ends all processes, any number of times;
    so does the end of whoever holds this object.
    """

    def __init__(self, config: EngineConfig, reached: bool = False, engines: ExpertEngines | None = None) -> None:
        """reached: other workers reach the staging slots of all ranks. engines: that share experts."""
        device = compute_device(config.device)
        _check_devices(config, device)
        planned = plan_engine(config)  # what is left to device and memory is the same for all ranks
        self.config = config = replace(planned.config, chunked_prefill_size=planned.layout.chunk)
        self._ranks = _Workers(config, reached, engines)
        self.close = weakref.finalize(self, _Workers.close, self._ranks)
        self._failure: EngineError | None = None
        self._launched = 0
        try:
            self._ranks.await_all(WorkerStarted, time.monotonic() + START_S)
            with self._ranks.no_longer_than(RENDEZVOUS_S, hint=""):
                groups = self._ranks.rendezvous(device)
            with self._ranks.no_longer_than(START_S, hint=""):
                self.engine = self._ranks.engine = Engine(config, groups.parallel, groups.expert_ranks)
                self.engine.tell_tree_masks(self._ranks.tell_tree_masks)
            ready = self._ranks.await_all(WorkerReady, time.monotonic() + START_S)
        except BaseException as error:
            raise self._ended(error, "while the group started") from error
        self.transports = [message.transport for message in ready if isinstance(message, WorkerReady)]
        self._ranks.start_deadlines(config.step_timeout)

    @property
    def failure(self) -> TreetopError | None:
        """Why the group has ended, None while it lives; also where nobody has asked it for anything."""
        failure = None if self._failure is not None else self._ranks.group.failure
        if failure is not None:
            self._ended(failure, "between steps")
        return self._failure

    @property
    def layout(self) -> Layout:
        """As `Engine.layout`."""
        return self.engine.layout

    def bucket_of(self, plan: StepPlan) -> int:
        """As `Engine.bucket_of`."""
        return self.engine.bucket_of(plan)

    def tokens_of(self, plan: PrefillPlan) -> int:
        """As `Engine.tokens_of`."""
        return self.engine.tokens_of(plan)

    def launch(self, plan: StepPlan) -> GroupStep:
        """As `Engine.launch`, on all ranks."""
        self._check_alive()
        number = self._launched
        self._launched += 1
        try:
            self._ranks.broadcast(encode(LaunchStep.of(number, self.engine.bucket_of(plan), plan)))
            with self._ranks.no_longer_than(self.config.step_timeout):
                return GroupStep(number, self.engine.launch(plan))
        except BaseException as error:
            raise self._ended(error, f"in step {number}") from error

    def collect(self, in_flight: GroupStep) -> StepResult:
        """As `Engine.collect`. Nothing is handed out that a rank does not agree to."""
        self._check_alive()
        number, deadline = in_flight.number, time.monotonic() + self.config.step_timeout
        try:
            with self._ranks.no_longer_than(self.config.step_timeout):  # the others end it meanwhile
                result = self.engine.collect(in_flight.own)
            digests = self._ranks.await_step(number, deadline)
            if self.config.check_level >= 1:
                _compare(number, digest_of(result), digests)
        except BaseException as error:
            raise self._ended(error, f"in step {number}") from error
        return result

    def next_logits(self, ids: list[int]) -> Tensor:
        """As `Engine.next_logits`, while no step is in flight."""
        self._check_alive()
        try:
            self._ranks.broadcast(encode(NextLogits(ids)))
            with self._ranks.no_longer_than(self.config.step_timeout):
                return self.engine.next_logits(ids)
        except BaseException as error:
            raise self._ended(error, "in a forward for logits") from error

    def prepare(self, change: Change) -> Commit:
        """As `Engine.prepare`, on all ranks: where one refuses, none takes it. A rank that dies ends the group."""
        self._check_alive()
        commit: Commit | None = None
        refusal: Exception | None = None
        try:
            self._ranks.broadcast(encode(AskChange.of(0, "prepare", change)))
            with self._ranks.no_longer_than(START_S, hint=""):
                try:
                    commit = self.engine.prepare(change)
                except Exception as error:  # the others have to be heard all the same
                    refusal = error
            others = self._ranks.await_changed(time.monotonic() + START_S)
        except BaseException as error:
            raise self._ended(error, f"in {asked_as(change)}") from error
        said = [refusal, *map(_refusal, others)]
        refusals = [each for each in said if each is not None]
        refusal = min(refusals, key=lambda each: ELSEWHERE in str(each), default=None)
        if commit is None or refusal is not None:
            self.drop(change)
            assert refusal is not None
            raise refusal
        return partial(self._commit, change, commit)

    def drop(self, change: Change) -> None:
        """As `Engine.drop`, on all ranks."""
        if self._failure is None:
            self._ranks.broadcast(encode(AskChange.of(0, "drop", change)))
            self.engine.drop(change)

    def lacks_room(self, change: UpdateWeights) -> bool:
        """As rank 0 has it, which others do as it does; also what it refuses."""
        return self.engine.lacks_room(change)

    def _commit(self, change: Change, own: Commit) -> None:
        """A rank that fails now has neither what was nor what is to be: the group ends."""
        try:
            self._ranks.broadcast(encode(AskChange.of(0, "commit", change)))
            with self._ranks.no_longer_than(START_S, hint=""):
                own()
            failure = next(filter(None, map(_refusal, self._ranks.await_changed(time.monotonic() + START_S))), None)
            if failure is not None:
                raise EngineError(str(failure))
        except BaseException as error:
            raise self._ended(error, f"in {asked_as(change)}") from error

    def order(self, order: Order) -> None:
        """As `OtherRanks.order`. Of a rank that has died the next step says so."""
        if self._failure is None:
            with suppress(EngineError):
                self._ranks.broadcast(encode(order))

    def moved(self) -> list[tuple[int, int, State]]:
        """As `OtherRanks.moved`."""
        return [] if self._failure is not None else self._ranks.take_moved()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in

    def _ended(self, error: BaseException, when: str) -> BaseException:
        """End the group. Returns what to raise: this error, or the reason for it if a rank failed or died before."""
        why = self._ranks.group.end(Failed.of(error), 2 * FAILURE_REPORT_S if isinstance(error, EngineError) else 0.0)
        self.close()
        self._failure = EngineError(f"{why.reason}; {when}")
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return error
        return as_error(why) if why.user_error else self._failure


class _Workers:
    """The other ranks' processes, and what lies between them and rank 0."""

    def __init__(self, config: EngineConfig, reached: bool, engines: ExpertEngines | None) -> None:
        self._config, self._engines, self._timeout_s = config, engines, config.step_timeout
        self.group = ProcessGroup(partial(_free, weakref.ref(self)))
        self._exchange: RankGroups | None = None
        self.engine: Engine | None = None
        self._closing, self._closed = threading.Lock(), threading.Event()
        self._latest_s: float | None = None
        self._late = ""
        self._received: list[FromWorker] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._plans: dict[int, zmq.Socket[bytes]] = {}
        try:
            self._inbox.bind(f"ipc://{self.group.folder}/words")
            for rank in range(1, config.tp_size):
                self._plans[rank] = self._context.socket(zmq.PUSH)
                self._plans[rank].bind(f"ipc://{self.group.folder}/{rank}")
                options = WorkerOptions(self.group.folder, config, rank, torch.get_num_threads(), reached, engines)
                name = f"rank {rank}" if engines is None else f"TP rank {rank}"
                self.group.start(name, "treetop.distributed.tp_worker", options, f"{name}: ")
        except BaseException:
            self.close()
            raise

    def rendezvous(self, device: torch.device) -> RankGroups:
        """Rank 0's side of the group. A rank that dies from now on ends kernels of rank 0 that wait for it.

        Raises EngineError if one fails or dies before all have met: nothing in the library hears of that.
        """
        threading.Thread(target=self._guard, name="treetop-guard", daemon=True).start()
        self._exchange = self._rendezvous(device)
        if self.group.failure is not None:  # while there was nothing yet to free
            self.free()
        return self._exchange

    def _rendezvous(self, device: torch.device) -> RankGroups:
        """The groups, once all have come. Meeting is the library's, so it is done on a thread that can be left."""
        found: SimpleQueue[RankGroups | BaseException] = SimpleQueue()

        def rendezvous() -> None:
            try:
                found.put(RankGroups(self._config, 0, device, self.group.folder, self._engines))
            except BaseException as error:
                found.put(error)

        threading.Thread(target=rendezvous, name="treetop-meeting", daemon=True).start()
        while True:
            with suppress(Empty):
                groups = found.get(timeout=_TICK_MS / 1000)
                break
            if self.group.failure is not None:
                raise self.group.failure
        if isinstance(groups, BaseException):
            raise groups
        return groups

    @contextmanager
    def no_longer_than(self, seconds: float, hint: str = _HINT) -> Iterator[None]:
        """If what is done inside has not ended by then, the other ranks are killed, and nobody waits for them."""
        self._latest_s, self._late = time.monotonic() + seconds, f"a rank did not answer in {seconds:g} s{hint}"
        try:
            yield
        finally:
            self._latest_s = None

    def _guard(self) -> None:
        """On a thread of its own: rank 0 may wait where nothing reaches it, such as for its device."""
        while not self._closed.wait(_TICK_MS / 1000):
            latest_s = self._latest_s
            if latest_s is not None and time.monotonic() > latest_s + _TICK_MS / 1000:
                self.group.end(Failed(self._late))
                return

    def start_deadlines(self, seconds: float) -> None:
        assert self._exchange is not None
        self._exchange.set_deadline(seconds)

    def broadcast(self, message: bytes) -> None:
        """Send to all, and wait for nobody. Raises EngineError if one is not there to take it."""
        for rank, plans in self._plans.items():
            try:
                plans.send(message, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError(f"rank {rank} has left the group") from None

    def await_all(self, kind: "type[WorkerStarted | WorkerReady]", deadline: float) -> list[FromWorker]:
        """Wait for a word of this kind from each rank. Returns them in the ranks' order."""
        return [
            self._await(partial(_from, rank, kind), deadline, f"start in {START_S:g} s", {rank}) for rank in self._plans
        ]

    def tell_tree_masks(self, masks: Sequence[NodeMasks]) -> None:
        """The others wait for them in the step that is being launched."""
        self.broadcast(encode(TreeMasksMade([*masks])))

    def take_moved(self) -> list[tuple[int, int, State]]:
        """What ranks have said of their pulls since the last call."""
        self._receive(0)
        moved = [
            (message.rank, message.number, message.state) for message in self._received if isinstance(message, Moved)
        ]
        self._received = [message for message in self._received if not isinstance(message, Moved)]
        return moved

    def await_step(self, number: int, deadline: float) -> dict[int, int]:
        """Wait until all have ended a step. Returns the digest of each. Steps before it have been dropped."""
        self._received = [
            message for message in self._received if not isinstance(message, Ended) or message.number >= number
        ]
        digests: dict[int, int] = {}
        what = f"end step {number} in {self._timeout_s:g} s{_HINT}"
        while len(digests) < len(self._plans):
            missing = self._plans.keys() - digests.keys()
            message = self._await(
                lambda message: isinstance(message, Ended) and message.number == number, deadline, what, missing
            )
            assert isinstance(message, Ended)
            digests[message.rank] = message.digest
        return digests

    def await_changed(self, deadline: float) -> list[Changed]:
        """What each has come to in a stage of a change."""
        found = list[Changed]()
        for rank in self._plans:
            word = self._await(partial(_from, rank, Changed), deadline, "take part in a change", {rank})
            assert isinstance(word, Changed)
            found.append(word)
        return found

    def free(self) -> None:
        """Whoever waits for others in an exchange gives up."""
        if self._exchange is not None:
            self._exchange.close(0.0)

    def close(self) -> None:
        """End all processes, remove all files. Any number of times, from any thread."""
        self._closed.set()
        with self._closing:
            self.group.end(Failed("shut down"))
            if self._exchange is not None:
                if self.engine is not None:
                    self.engine.release()
                self._exchange.close()
            self._context.destroy(linger=0)
            self.group.close()

    def _await(self, wanted: Callable[[FromWorker], bool], deadline: float, what: str, who: "set[int]") -> FromWorker:
        """The first word that is wanted. Raises EngineError if a rank fails or dies, or if the deadline passes.

        what: that was to be done until then, and when that was.
        """
        while True:
            for index, message in enumerate(self._received):
                if wanted(message):
                    return self._received.pop(index)
            if self._receive(_TICK_MS / 1000):
                continue
            if self.group.failure is not None:
                raise self.group.failure
            if time.monotonic() > deadline:
                names = ", ".join(map(str, sorted(who)))
                raise EngineError(f"rank {names} did not {what}")

    def _receive(self, patience_s: float) -> bool:
        """Take what has come, and wait a while for something to come. Returns whether anything did."""
        got = False
        while self._inbox.poll(0 if got else int(patience_s * 1000)):
            self._received.append(decode_from_worker(self._inbox.recv()))
            got = True
        return got


def _refusal(word: Changed) -> Exception | None:
    """Why a rank refuses; None if it does not."""
    if word.error is None:
        return None
    return ConfigError(word.error) if word.user_error else EngineError(f"rank {word.rank}: {word.error}")


def _from(rank: int, kind: "type[WorkerStarted | WorkerReady | Changed]", message: FromWorker) -> bool:
    return isinstance(message, kind) and message.rank == rank


def _free(workers: "weakref.ref[_Workers]") -> None:
    alive = workers()
    if alive is not None:
        alive.free()


def _check_devices(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < config.tp_size:
        raise ConfigError(f"--tp-size {config.tp_size}: this machine shows {torch.cuda.device_count()} GPUs")


def _compare(number: int, own: int, digests: dict[int, int]) -> None:
    """Raise CheckError if a rank came to something else."""
    other = sorted(rank for rank, digest in digests.items() if digest != own)
    if other:
        ranks = ", ".join(map(str, other))
        raise CheckError(f"step {number}: rank {ranks} diverged from rank 0 (trees, paths or tokens differ)")
