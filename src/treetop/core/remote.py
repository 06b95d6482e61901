"""A client of the engine process, for an event loop: requests out, updates to whoever asked."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count

import zmq
import zmq.asyncio

from treetop.core.clients import Sink, Sinks
from treetop.core.wire import (
    Abort,
    Add,
    Failed,
    Finish,
    FromCore,
    Hello,
    Load,
    Ready,
    Updates,
    decode_from_core,
    encode,
)
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest

log = logging.getLogger("treetop.core")


class RemoteCore:
    """The engine process behind a socket. Whoever sees that process end calls `fail`. See `AsyncCore`."""

    info: CoreInfo

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.connect(address)
        self._sinks, self._ids = Sinks(), count()
        self._reader: asyncio.Task[None] | None = None
        self.load = CoreLoad()
        self.failure: EngineError | None = None
        self.failed = asyncio.Event()

    async def connect(self) -> None:
        """Wait until the engine is up. Raises ConfigError or EngineError for what the engine process says."""
        self._send(Hello())
        while not isinstance(answer := await self._receive(), Ready):
            if isinstance(answer, Failed):
                raise (ConfigError if answer.user_error else EngineError)(answer.reason)
        self.info, self._ids = answer.info, count(answer.first_id)
        self._reader = asyncio.create_task(self._read())

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure
        if any(request.constraint is not None for request in requests):
            raise InputError("constraints: the engine is another process; give a structured_output instead")
        self._sinks.add(requests, sink)
        self._send(Add(tuple(requests)))

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._sinks.drop(request_ids)
        self._send(Abort(tuple(request_ids)))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._sinks.drop((request_id,))
        self._send(Finish(request_id, num_tokens))

    def fail(self, reason: str) -> None:
        """The engine process is gone: every request ends with this error, and what comes later is refused."""
        if self.failure is None:
            self.failure = EngineError(reason)
            self.failed.set()
            self._sinks.fail(reason)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            try:
                self._take(await self._receive())
                await asyncio.sleep(0)  # what waits is received without a pause, and streams must be written, too
            except Exception as error:  # whatever it was, nobody may wait for ever
                log.exception("an update could not be read or delivered")
                self.fail(f"the connection to the engine is broken: {type(error).__name__}: {error}")
                return

    def _take(self, message: FromCore) -> None:
        match message:
            case Updates(updates):
                self._sinks.deliver(updates)
            case Load(load):
                self.load = load
            case Failed(reason):
                self.fail(f"the engine failed: {reason}")
            case Ready():
                pass

    async def _receive(self) -> FromCore:
        return decode_from_core(await self._socket.recv())

    def _send(self, message: Hello | Add | Abort | Finish) -> None:
        if not self._socket.closed:
            self._socket.send(encode(message))  # done at once: a DEALER without a high-water mark never waits
