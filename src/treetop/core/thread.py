"""The core on a thread of its own: no interrupt lands in its books, and no client runs another's work.

clients --commands--> inbox --> thread: apply all, step once, deliver --updates--> each client's own queue

A command is one `put`, which is atomic: an interrupt falls before it or after it.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from treetop.core.loop import Core, CoreLoop, Deliver
from treetop.types.errors import EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreLoad, EngineRequest, RequestUpdate

Command = Callable[[CoreLoop], object]
"""What the thread does with its loop."""


class HasLoad(Protocol):
    """What an `EngineThread` runs."""

    @property
    def load(self) -> CoreLoad: ...

    @property
    def failure(self) -> BaseException | None: ...


class EngineThread(Protocol):
    """A thread that serves requests: see `CoreThread`."""

    @property
    def core(self) -> HasLoad: ...

    @property
    def alive(self) -> bool: ...

    def next_id(self) -> RequestId: ...

    def add(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None: ...

    def abort(self, request_ids: Sequence[RequestId]) -> None: ...

    def finish(self, request_id: RequestId, num_tokens: int) -> None: ...

    def flush(self) -> None: ...

    @property
    def close(self) -> Callable[[], object]: ...


class CoreThread:
    """Runs a core until `close`, or until nobody holds this object. Requests that are alive then end with an error."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
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
        self._inbox.put(lambda loop: loop.add(requests, deliver))

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests, wherever they stand; those that are not alive stay as they are. They get a last update."""
        self._inbox.put(lambda loop: loop.abort(request_ids))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """The client stops after `num_tokens` tokens of the output; nothing more is delivered."""
        self._inbox.put(lambda loop: loop.finish(request_id, num_tokens))

    def flush(self) -> None:
        """Wait until all that was in flight has been committed, and all commands before this have been applied.

        On the core's own thread, where the collector may close a client that was abandoned, it waits for nothing.
        """
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._inbox.put(lambda loop: loop.flush(done))
        while self.alive and not done.wait(timeout=1.0):
            pass


class CoreClient:
    """The requests of one caller, and a queue of their updates. One thread uses it at a time.

    It is a context: on leaving, requests that are still alive are aborted, and nothing of them is in flight any more.
    """

    def __init__(self, thread: EngineThread) -> None:
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
