"""The core on a thread of its own: no interrupt lands in its books, and no client runs another's work.

clients --commands--> inbox --> thread: apply all, step once, deliver --updates--> each client's own queue

A command is one `put`, which is atomic: an interrupt falls before it or after it.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from treetop.core.engine_core import EngineCore
from treetop.types.errors import EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate

Deliver = Callable[[list[RequestUpdate]], None]
"""Takes a step's updates of one client, on the core's thread; it must not wait and not raise."""


class _Add(NamedTuple):
    requests: Sequence[EngineRequest]
    deliver: Deliver


class _Abort(NamedTuple):
    request_ids: Sequence[RequestId]


class _Finish(NamedTuple):
    request_id: RequestId
    num_tokens: int


class _Flush(NamedTuple):
    """`done` is set once nothing is in flight that was when this arrived."""

    done: threading.Event


class _Stop(NamedTuple):
    pass


Command = _Add | _Abort | _Finish | _Flush | _Stop


class CoreThread:
    """Runs a core until `close`, or until nobody holds this object. Requests that are alive then end with an error."""

    def __init__(self, core: EngineCore[Any]) -> None:
        self.core = core
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._ids = count()
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
        self._inbox.put(_Add(requests, deliver))

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests, wherever they stand; those that are not alive stay as they are. They get a last update."""
        self._inbox.put(_Abort(request_ids))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """The client stops after `num_tokens` tokens of the output; nothing more is delivered."""
        self._inbox.put(_Finish(request_id, num_tokens))

    def flush(self) -> None:
        """Wait until all that was in flight has been committed, and all commands before this have been applied."""
        done = threading.Event()
        self._inbox.put(_Flush(done))
        while self.alive and not done.wait(timeout=1.0):
            pass


class CoreClient:
    """The requests of one caller, and a queue of their updates. One thread uses it at a time.

    It is a context: on leaving, requests that are still alive are aborted, and nothing of them is in flight any more.
    """

    def __init__(self, thread: CoreThread) -> None:
        self._thread = thread
        self._queue: SimpleQueue[list[RequestUpdate]] = SimpleQueue()
        self._alive: set[RequestId] = set()

    def __enter__(self) -> "CoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        alive = getattr(self, "_alive", None)  # an interrupt may have fallen into `__init__`
        if alive:  # or into `close`
            self._thread.abort(tuple(alive))

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, which are planned together. Raises EngineError if the core has ended."""
        if not self._thread.alive:
            raise EngineError("the engine core has been closed")
        self._alive.update(request.request_id for request in requests)
        self._thread.add(requests, self._queue.put)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """Stop a request after the first `num_tokens` tokens of its output; later updates of it are not returned."""
        self._thread.finish(request_id, num_tokens)
        self._alive.discard(request_id)

    def get(self) -> list[RequestUpdate]:
        """Wait for the next updates. Raises EngineError if the core ends without a word."""
        while True:
            if not self._thread.alive and self._queue.empty():
                raise EngineError("the engine core has ended")
            try:
                updates = self._queue.get(timeout=1.0)
            except Empty:
                continue
            wanted = [update for update in updates if update.request_id in self._alive]
            self._alive.difference_update(u.request_id for u in wanted if u.finish_reason is not None)
            if wanted:
                return wanted

    @property
    def failure(self) -> BaseException:
        """Why the engine failed, for a client that was told so."""
        return self._thread.core.failure or EngineError("the engine failed")

    def close(self) -> None:
        """Abort what is alive, and wait until nothing is in flight that was."""
        if self._alive:
            self._thread.abort(tuple(self._alive))
        self._thread.flush()
        self._alive.clear()


def _close(inbox: "SimpleQueue[Command]", thread: threading.Thread) -> None:
    inbox.put(_Stop())
    if thread is not threading.current_thread():  # else a collection on the core's own thread
        thread.join()


def _run(core: EngineCore[Any], inbox: "SimpleQueue[Command]") -> None:
    loop = _Loop(core)
    while not loop.stopped:
        if not core.busy:
            loop.apply(inbox.get())
        while not inbox.empty():
            loop.apply(inbox.get())
        if core.busy and not loop.stopped:
            loop.step()
    loop.end()


class _Loop:
    """What the thread holds: whom to tell of each request, and who waits for what is in flight."""

    def __init__(self, core: EngineCore[Any]) -> None:
        self._core = core
        self._clients: dict[RequestId, Deliver] = {}
        self._flushes: list[tuple[int, threading.Event]] = []  # set once so many steps have been committed
        self.stopped = False

    def apply(self, command: Command) -> None:
        match command:
            case _Add(requests, deliver):
                for request in requests:
                    self._add(request, deliver)
            case _Abort(request_ids):
                ended = [self._core.abort(request_id) for request_id in request_ids]
                self._tell([update for update in ended if update is not None])
            case _Finish(request_id, num_tokens):
                if self._core.finish(request_id, num_tokens) is not None:
                    del self._clients[request_id]
            case _Flush(done):
                self._flushes.append((self._core.num_launched, done))
                self._wake()
            case _Stop():
                self.stopped = True

    def step(self) -> None:
        self._tell(self._core.step())
        if self._flushes:
            self._wake()

    def end(self) -> None:
        self._tell(self._core.fail(EngineError("the engine core has been closed")))
        self._wake()

    def _add(self, request: EngineRequest, deliver: Deliver) -> None:
        try:
            self._core.add(request)
        except InputError as error:
            deliver([RequestUpdate(request.request_id, (), finish_reason="abort", error=str(error))])
        else:
            self._clients[request.request_id] = deliver

    def _tell(self, updates: Sequence[RequestUpdate]) -> None:
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
        committed = self._core.num_committed
        for _, done in (flush for flush in self._flushes if flush[0] <= committed):
            done.set()
        self._flushes = [flush for flush in self._flushes if flush[0] > committed]
