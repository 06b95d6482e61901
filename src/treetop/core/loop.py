"""The engine loop, and the thread that runs it in this process.

clients --commands--> inbox --> loop: apply all, step once, deliver --updates--> each client's own queue

On a thread no interrupt lands in the core's books, and no client runs another's work: a command is one `put`, which is
atomic, and an interrupt falls before it or after it. Behind a socket the same loop runs in an engine process.
"""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from treetop.types.changes import Change, Commit, UpdateWeights
from treetop.types.errors import ConflictError, EngineError, InputError, TreetopError, UserError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate

if TYPE_CHECKING:  # needs an extra
    from treetop.disaggregation.connector import Connector

Deliver = Callable[[list[RequestUpdate]], None]
"""Takes a step's updates of one client, on the core's thread; it must not wait and not raise."""


class Core(Protocol):
    """What turns requests into updates, step by step; see `EngineCore`, which is one."""

    @property
    def busy(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def load(self) -> CoreLoad: ...

    @property
    def num_launched(self) -> int: ...

    @property
    def num_committed(self) -> int: ...

    @property
    def stalled(self) -> bool: ...

    @property
    def copies_alone(self) -> bool: ...

    def add(self, request: EngineRequest, remote: bool = False) -> None: ...

    def abort(self, request_id: RequestId) -> RequestUpdate | None: ...

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None: ...

    def prepare(self, change: Change) -> Commit: ...

    def drop(self, change: Change) -> None: ...

    @property
    def weight_version(self) -> int: ...

    @property
    def lora_versions(self) -> dict[str, int]: ...

    @property
    def asleep(self) -> tuple[str, ...]: ...

    def restore(
        self,
        weight_version: int,
        lora_versions: Mapping[str, int],
        lost: Sequence[str],
        parts: Sequence[str] = (),
        undecided: Sequence[str] = (),
    ) -> None: ...

    @property
    def undecided(self) -> tuple[str, ...]: ...

    def kept_old(self) -> None: ...

    def changed_by(self, change: UpdateWeights) -> tuple[str, ...]: ...

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def in_no_folder(self) -> tuple[str, ...]: ...

    @property
    def num_alive(self) -> int: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def current(self, info: CoreInfo) -> CoreInfo: ...

    @property
    def refuses(self) -> str | None: ...

    def step(self) -> list[RequestUpdate]: ...

    def fail(self, error: BaseException) -> list[RequestUpdate]: ...


class Inbox(Protocol):
    """Where a loop's commands come from: a queue of this process, or a socket."""

    def take(self, loop: "CoreLoop") -> bool:
        """Apply what has come, and wait for something to come if the loop is idle. False ends the loop."""
        ...


class Peers(Protocol):
    """Other ranks, in whose steps this one takes part also without requests of its own; see `Lockstep`."""

    def has_proposals(self) -> bool: ...

    def execute_dummy_batch(self) -> None: ...


class CoreLoop:
    """Applies the commands of clients between steps, and delivers each step's updates.

    connector: the worker's KV connector, if it has one.
    peers: other ranks, if there are any.
    """

    def __init__(self, core: Core, connector: "Connector | None" = None, peers: Peers | None = None) -> None:
        self.core, self.connector, self.peers = core, connector, peers
        self._clients: dict[RequestId, Deliver] = {}
        self._asked: tuple[Change, Callable[[Commit | BaseException], object]] | None = None
        self._flushes: list[tuple[int, threading.Event]] = []  # set once so many steps have been committed

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until something comes."""
        return self.core.stalled or not self.core.busy

    def run(self, inbox: Inbox) -> None:
        """Until the inbox says that it is over. Never raises engine errors: they arrive as final updates."""
        while inbox.take(self):
            if self.connector is not None:  # before the step, which does what the connector tells the scheduler
                self.connector.poll(time.monotonic())
            if self.core.busy:
                self.step()
            if self.peers is not None and (self.idle or self.core.copies_alone) and self.peers.has_proposals():
                self.peers.execute_dummy_batch()

    @property
    def load(self) -> CoreLoad:
        return self.core.load if self.connector is None else self.core.load._replace(kv_transfer=self.connector.load)

    def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """Queue requests together. One that can never run, or not here, is told so in its last update."""
        refused = self.core.refuses or (None if self.connector is None else self.connector.refuses)
        if refused is not None:
            deliver([RequestUpdate(each.request_id, (), None, "abort", refused) for each in requests])
            return
        for request in requests:
            try:
                self.core.add(request, self.connector is not None and self.connector.asks)
            except TreetopError as error:
                refusal = RequestUpdate(request.request_id, (), finish_reason="abort", error=str(error))
                failed, asked = not isinstance(error, UserError), isinstance(error, InputError)
                deliver([refusal._replace(engine_failed=failed, user_error=asked)])
            else:
                self._clients[request.request_id] = deliver

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        ended = [self.core.abort(request_id) for request_id in request_ids]
        self._deliver([update for update in ended if update is not None])
        self._settle()

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        if self.core.finish(request_id, num_tokens) is not None:
            del self._clients[request_id]
        self._settle()

    def leave(self, deliver: Deliver) -> None:
        """A client has gone: its requests end."""
        self.abort([request_id for request_id, each in self._clients.items() if each is deliver])

    def prepare(self, change: Change, then: Callable[[Commit | BaseException], object]) -> None:
        """Prepare a change, once requests that are alive have ended if it waits for them.

        then: is given what puts it in force, or what was raised as by `EngineCore.prepare`; ConflictError where another
        waits, which goes on waiting.
        """
        if self._asked is not None:
            then(ConflictError())
            return
        if _waits(change):
            self.core.hold()
        self._asked = change, then
        self._settle()

    def cancel(self) -> None:
        """Nobody waits for what was asked last any more."""
        if self._asked is not None:
            self._asked = None
            self.core.release()

    def _settle(self) -> None:
        """After whatever may have ended the last request."""
        if self._asked is None or (_waits(self._asked[0]) and self.core.num_alive):
            return
        (change, then), self._asked = self._asked, None
        try:
            prepared: Commit | BaseException = self.core.prepare(change)
        except BaseException as error:
            prepared = error
        then(prepared)

    def commit(self, commit: Commit) -> None:
        """Put in force what was prepared; whom it ended has been told when this returns."""
        commit()
        if self.core.busy:
            self.step()

    def flush(self, done: threading.Event) -> None:
        """Set `done` once nothing is in flight that is now."""
        self._flushes.append((self.core.num_launched, done))
        self._wake()

    def step(self) -> None:
        self._deliver(self.core.step())
        if self._flushes:
            self._wake()
        self._settle()

    def end(self, error: BaseException) -> None:
        """End every request with this error."""
        self._deliver(self.core.fail(error))
        self._wake()

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Each client its own updates, in one call. A request that was given to the scheduler itself has no client."""
        by_client: dict[Deliver, list[RequestUpdate]] = {}
        for update in updates:
            request_id = update.request_id
            known = self._clients.get if update.finish_reason is None else self._clients.pop
            deliver = known(request_id, None)
            if deliver is not None:
                by_client.setdefault(deliver, []).append(update)
        for deliver, mine in by_client.items():
            deliver(mine)

    def _wake(self) -> None:
        committed = self.core.num_committed
        for _, done in (flush for flush in self._flushes if flush[0] <= committed):
            done.set()
        self._flushes = [flush for flush in self._flushes if flush[0] > committed]


def _waits(change: Change) -> bool:
    """Whether requests that are alive end before it is prepared."""
    return isinstance(change, UpdateWeights) and change.in_flight == "wait" and not change.more


Command = Callable[[CoreLoop], object]
"""What the thread does with its loop."""


class CoreThread:
    """Runs a core until `close`, or until nobody holds this object. Requests that are alive then end with an error."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._ids, self._changing = count(), threading.Lock()
        self._thread = threading.Thread(target=_run, args=(core, self._inbox), name="treetop-core", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _close, self._inbox, self._thread)
        """Stop the thread and wait for its end; any number of times."""

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """Queue requests together. One that can never run is told so in its last update."""
        self._inbox.put(lambda loop: loop.add(requests, deliver))

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests, wherever they stand; those that are not alive stay as they are. They get a last update."""
        self._inbox.put(lambda loop: loop.abort(request_ids))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """The client stops after `num_tokens` tokens of the output; nothing more is delivered."""
        self._inbox.put(lambda loop: loop.finish(request_id, num_tokens))

    def flush(self) -> None:
        """Wait until all that was in flight has been committed, and all commands before this have been applied.

        On the core's own thread, where the collector may close a stream that was abandoned, it waits for nothing.
        """
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._inbox.put(lambda loop: loop.flush(done))
        while self.alive and not done.wait(timeout=1.0):
            pass

    def change(self, change: Change) -> None:
        """Prepare a change and put it in force, and wait for that, and for what other threads asked for before.

        Raises as `EngineCore.prepare`, and EngineError if the core has ended. Whoever is interrupted while it waits has
        asked for nothing, unless it has begun.
        """
        with self._changing:
            self._change(change)

    def _change(self, change: Change) -> None:
        done, raised = threading.Event(), list[BaseException]()

        def put(loop: CoreLoop, prepared: Commit | BaseException) -> None:
            try:
                if isinstance(prepared, BaseException):
                    raise prepared
                loop.commit(prepared)
            except BaseException as error:
                raised.append(error)
            done.set()

        self._inbox.put(lambda loop: loop.prepare(change, partial(put, loop)))
        try:
            while self.alive and not done.wait(timeout=1.0):
                pass
        except BaseException:
            self._inbox.put(lambda loop: loop.cancel())
            raise
        if raised:
            raise raised[0]
        if not done.is_set():
            raise EngineError("the engine core has been closed")


def _close(inbox: "SimpleQueue[Command | None]", thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():  # else a collection on the core's own thread
        thread.join()


class _QueueInbox:
    """Commands of this process."""

    def __init__(self, queue: "SimpleQueue[Command | None]") -> None:
        self._queue = queue

    def take(self, loop: CoreLoop) -> bool:
        while not loop.core.busy or not self._queue.empty():
            command = self._queue.get()
            if command is None:
                loop.end(EngineError("the engine core has been closed"))
                return False
            command(loop)
        return True


def _run(core: Core, queue: "SimpleQueue[Command | None]") -> None:
    CoreLoop(core).run(_QueueInbox(queue))
