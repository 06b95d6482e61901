"""What a front end with an event loop needs of a core, and a core on a thread of its own process that offers it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from treetop.core.loop import Core, CoreThread, Deliver
from treetop.types.changes import Change
from treetop.types.errors import EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate

Sink = Callable[[RequestUpdate], None]
"""Takes a request's updates, in the event loop; it does not wait."""


_LOOK_S = 1.0

log = logging.getLogger("treetop.core")


class RequestClient(Protocol):
    """What has requests run."""

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        """Queue requests together. If the core dies, each gets a last update that says so. Raises EngineError if dead.

        Called in the event loop, where `sink` will be called too.
        """
        ...

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """End requests, of which nothing more will be heard; those that have ended stay as they are."""
        ...

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """The client stops after `num_tokens` tokens of the output; nothing more will be heard."""
        ...


class EngineClient(RequestClient, Protocol):
    """A core, wherever it runs.

    load: the last that it reported.
    failure: why it is dead, None while it lives.
    pause: why requests wait at the moment, None if they do not. They go on then as they were.
    is_stalled: its loop has not gone round for longer than the watchdog allows.
    num_restarts: engines that took the place of one that had died.
    """

    @property
    def info(self) -> CoreInfo: ...

    @property
    def load(self) -> CoreLoad: ...

    @property
    def failure(self) -> EngineError | None: ...

    @property
    def pause(self) -> str | None: ...

    @property
    def is_stalled(self) -> bool: ...

    @property
    def num_restarts(self) -> int: ...

    async def until_failed(self) -> None:
        """Wait until there is a `failure`."""
        ...

    def next_id(self) -> RequestId: ...

    async def change(self, change: Change) -> None:
        """Change the engine, and `info` with it.

        Raises UserError, and nothing has changed; EngineError if the engine is gone before it has answered.
        """
        ...

    def close(self) -> None: ...


class Sinks:
    """The sinks of requests, told in their event loop of what comes on another thread. One loop at a time uses it."""

    def __init__(self) -> None:
        self._sinks: dict[RequestId, Sink] = {}
        self._mail: _Mail | None = None

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> Deliver:
        """Returns what takes updates of these, on any one thread."""
        loop = asyncio.get_running_loop()
        if self._mail is None or self._mail.loop is not loop:
            self._mail = _Mail(loop, self._sinks)
        self._sinks.update((request.request_id, sink) for request in requests)
        return self._mail.deliver

    def drop(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self._sinks.pop(request_id, None)


class _Mail:
    """Updates on their way to an event loop, which is woken once for all that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sinks: dict[RequestId, Sink]) -> None:
        self.loop, self._sinks = loop, sinks
        self._came: deque[list[RequestUpdate]] = deque()

    def deliver(self, updates: list[RequestUpdate]) -> None:
        self._came.append(updates)
        if len(self._came) == 1:  # else it is awake, and looks again
            with suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        try:
            for _ in range(len(self._came)):  # what comes meanwhile has its turn after what else waits
                try:
                    self._tell(self._came[0])
                finally:
                    self._came.popleft()
        finally:
            if self._came:
                self.loop.call_soon(self._take)

    def _tell(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            ended = update.finish_reason is not None
            sink = self._sinks.pop(update.request_id, None) if ended else self._sinks.get(update.request_id)
            try:
                if sink is not None:
                    sink(update)
            except Exception:  # one that breaks costs the others nothing
                log.exception("an update could not be delivered")


class InProcessClient:
    """A core on a thread of this process, for one event loop at a time. close_engine: what to call at the end."""

    pause, is_stalled, num_restarts = None, False, 0

    def __init__(self, thread: CoreThread, info: CoreInfo, close_engine: Callable[[], object] = lambda: None) -> None:
        self._thread, self.info, self._sinks, self._close_engine = thread, info, Sinks(), close_engine

    @property
    def core(self) -> Core:
        return self._thread.core

    @property
    def load(self) -> CoreLoad:
        return self._thread.core.load

    @property
    def failure(self) -> EngineError | None:
        return None if self._thread.alive else EngineError("the engine core has been closed")

    async def until_failed(self) -> None:
        while self.failure is None:
            await asyncio.sleep(_LOOK_S)

    def next_id(self) -> RequestId:
        return self._thread.next_id()

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure
        self.submit(requests, self._sinks.add(requests, sink))

    def submit(self, requests: Sequence[EngineRequest], deliver: Deliver) -> None:
        """As `add`, without an event loop. deliver: is called on the core's thread."""
        self._thread.add(requests, deliver)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._sinks.drop(request_ids)
        self._thread.abort(request_ids)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._sinks.drop((request_id,))
        self._thread.finish(request_id, num_tokens)

    async def change(self, change: Change) -> None:
        await asyncio.to_thread(self.change_now, change)

    def change_now(self, change: Change) -> None:
        """As `change`, for a thread that may wait."""
        self._thread.change(change)
        self.info = self.core.current(self.info)

    def flush(self) -> None:
        """Wait until all that was in flight has been committed, and all that was said before this has been heard."""
        self._thread.flush()

    def close(self) -> None:
        self._thread.close()
        self._close_engine()
