"""A client of the engine process, for an event loop: requests out, updates to whoever asked, and a word when it dies."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import zmq
import zmq.asyncio

from treetop.core.thread import CoreThread
from treetop.core.wire import (
    Abort,
    Add,
    CoreInfo,
    Failed,
    Finish,
    FromCore,
    Hello,
    Load,
    Updates,
    decode_from_core,
    encode,
)
from treetop.types.errors import ConfigError, EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate

Sink = Callable[[RequestUpdate], None]
"""Takes a request's updates, in the event loop; it does not wait."""


class AsyncCore(Protocol):
    """What a front end needs of a core, wherever it runs. load: the last word about it. failure: why it is dead."""

    info: CoreInfo
    load: Load
    failure: EngineError | None

    def next_id(self) -> RequestId: ...

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        """Queue requests together. Raises EngineError if the core is dead."""
        ...

    def abort(self, request_ids: Sequence[RequestId]) -> None: ...

    def finish(self, request_id: RequestId, num_tokens: int) -> None: ...


class Sinks:
    """Whom to tell of which request; all of them once, if the core dies."""

    def __init__(self) -> None:
        self._sinks: dict[RequestId, Sink] = {}

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        self._sinks.update((request.request_id, sink) for request in requests)

    def drop(self, request_id: RequestId) -> None:
        self._sinks.pop(request_id, None)

    def deliver(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            sink = self._sinks.get(update.request_id)
            if update.finish_reason is not None:
                self.drop(update.request_id)
            if sink is not None:
                sink(update)

    def fail(self, error: str) -> None:
        ids = list(self._sinks)
        self.deliver([RequestUpdate(i, (), finish_reason="abort", error=error, engine_failed=True) for i in ids])


class RemoteCore:
    """A core in another process. `connect` before use."""

    info: CoreInfo
    load = Load(0, 0, 0.0, 0)

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.connect(address)
        self._sinks, self._ids = Sinks(), count()
        self._reader: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None

    async def connect(self) -> None:
        """Wait until the engine is up. Raises ConfigError or EngineError, as the engine process does."""
        self._send(Hello())
        while not isinstance(answer := await self._receive(), CoreInfo):
            if isinstance(answer, Failed):
                raise (ConfigError if answer.user_error else EngineError)(answer.reason)
        self.info, self._ids = answer, count(answer.first_id)
        self._reader = asyncio.create_task(self._read())

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure
        self._sinks.add(requests, sink)
        self._send(Add(tuple(requests)))

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._send(Abort(tuple(request_ids)))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._sinks.drop(request_id)
        self._send(Finish(request_id, num_tokens))

    def fail(self, reason: str) -> None:
        """The engine process is gone: every request ends with this error, and what comes later is refused."""
        if self.failure is None:
            self.failure = EngineError(reason)
            self._sinks.fail(reason)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            match await self._receive():
                case Updates(updates):
                    self._sinks.deliver(updates)
                case Load() as load:
                    self.load = load
                case Failed(reason):
                    self.fail(f"the engine failed: {reason}")
                case CoreInfo():
                    pass

    async def _receive(self) -> FromCore:
        return decode_from_core(await self._socket.recv())

    def _send(self, message: Hello | Add | Abort | Finish) -> None:
        self._socket.send(encode(message))  # done at once: a DEALER without a high-water mark never waits


class LocalCore:
    """A core on a thread of this process, for an event loop."""

    def __init__(self, thread: CoreThread, info: CoreInfo) -> None:
        self._thread, self.info, self._sinks = thread, info, Sinks()
        self._loop = asyncio.get_running_loop()

    @property
    def load(self) -> Load:
        scheduler = self._thread.core.scheduler
        return Load(scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage, scheduler.num_retractions)

    @property
    def failure(self) -> EngineError | None:
        return None if self._thread.alive else EngineError("the engine core has been closed")

    def next_id(self) -> RequestId:
        return self._thread.next_id()

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure
        self._sinks.add(requests, sink)
        self._thread.add(requests, self._deliver)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._thread.abort(request_ids)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._sinks.drop(request_id)
        self._thread.finish(request_id, num_tokens)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        self._loop.call_soon_threadsafe(self._sinks.deliver, updates)
