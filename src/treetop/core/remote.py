"""A client of the engine process, for an event loop: requests out, updates to whoever asked.

The process may die and another take its place (`core/supervisor.py`): requests wait and go on (`core/ledger.py`). Each
has a socket of its own, so that nothing of one engine is ever heard as another's.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count

import zmq
import zmq.asyncio

from treetop.core.clients import Sink
from treetop.core.ledger import Ledger
from treetop.core.wire import (
    ID_RANGE,
    Abort,
    Add,
    Failed,
    Finish,
    FromCore,
    Hello,
    Leave,
    Load,
    Ready,
    ToCore,
    Updates,
    decode_from_core,
    encode,
)
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest

log = logging.getLogger("treetop.core")

_TICK_S = 0.1
"""How often requests that wait for an engine are looked at."""
WATCHDOG_S = 300.0
_LOOKS = 8
"""How often the watchdog looks in the time that it allows; at most once a second."""

AsyncSocket = zmq.asyncio.Socket


class RemoteCore:
    """The engine process behind a socket, and whatever takes its place. See `AsyncCore`.

    `connect` to an engine, `lost` when it has ended, `fail` when none comes after it: whoever watches the process calls
    these. num_restarts: engines after the first. settled: this one has all that is alive. gone: it has ended, which it
    may have said itself. stalled: nothing has been heard of it for as long as the watchdog allows. failed: for good.
    why: it has gone, None while there is one, or one is awaited.
    """

    info: CoreInfo

    def __init__(self, number: int = 0, watchdog_s: float = WATCHDOG_S) -> None:
        """number: of this client among all that an engine will have. watchdog_s: silence after which it is stalled."""
        self._context = zmq.asyncio.Context()
        self._socket: AsyncSocket | None = None
        self._address: str | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tender: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._watchdog_s, self._silent_s = watchdog_s, 0.0
        self._number, self._ledger, self._ids = number, Ledger(), count(number * ID_RANGE)
        self.why: str | None = None
        self.load = CoreLoad()
        self.failure: EngineError | None = None
        self.num_restarts = -1
        self.settled, self.gone, self.failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stalled = asyncio.Event()

    @property
    def pause(self) -> str | None:
        """An engine is being started again, or given what it is to go on with; or there is one and it hangs."""
        if self.is_stalled:
            return self.stall_reason
        if self.num_restarts >= 0 and not self.settled.is_set() and self.failure is None:
            return "the engine has died and is started again; requests wait for it"
        return None

    @property
    def is_stalled(self) -> bool:
        return self.stalled.is_set()

    @property
    def stall_reason(self) -> str:
        return f"the engine has not ended a step or a command in {self._watchdog_s:g} s (--watchdog-timeout)"

    async def connect(self, address: str) -> None:
        """Wait until the engine there is up, and give it what has not ended.

        Raises ConfigError or EngineError for what the engine process says.
        """
        self.gone.clear()
        self.why = None  # what ended the last one does not end this one
        socket = self._context.socket(zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.connect(address)
        try:
            socket.send(encode(Hello(self._number)))
            while not isinstance(answer := decode_from_core(await socket.recv()), Ready):
                if isinstance(answer, Failed):
                    raise (ConfigError if answer.user_error else EngineError)(answer.reason)
        except BaseException:
            socket.close()
            raise
        self._leave()
        self.info, self._socket, self._address = answer.info, socket, address
        self.num_restarts += 1
        self._ledger.opened(answer.info.max_requests)
        self._reader = asyncio.create_task(self._read(socket))
        self._watchdog = asyncio.create_task(self._watch())
        self._give()

    async def resume(self, address: str) -> None:
        """As `connect`, and wait until the engine has all that is alive; no trial is on then."""
        if address != self._address:
            await self.connect(address)
        await self.settled.wait()

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        if any(request.constraint is not None for request in requests):
            raise InputError("constraints: the engine is another process; give a structured_output instead")
        self._ledger.add(requests, sink)
        self._give()

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._ledger.drop(request_ids)
        self._send(Abort(tuple(request_ids)))
        self._give()

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._ledger.drop((request_id,))
        self._send(Finish(request_id, num_tokens))
        self._give()

    def left(self, number: int) -> None:
        """Another client of this engine has ended. One that comes later will not hear of it."""
        self._send(Leave(number))

    def lost(self, reason: str) -> None:
        """The engine has ended: what it had waits for another, if one comes. Any number of times."""
        if not self._ledger.open:
            return
        self.why = reason
        self._leave()
        self.settled.clear()
        self.gone.set()
        self._ledger.lost(reason)
        self.load = CoreLoad(num_waiting=len(self._ledger))
        if self._tender is None or self._tender.done():
            self._tender = asyncio.create_task(self._tend())

    def fail(self, reason: str) -> None:
        """There is no engine any more: every request ends with this error, and what comes later is refused."""
        if self.failure is None:
            self.lost(reason)
            self.failure = EngineError(reason)
            self.failed.set()
            self._ledger.fail(reason)

    def close(self) -> None:
        self._leave()
        for task in (self._tender, self._watchdog):
            if task is not None:
                task.cancel()
        self._context.destroy(linger=0)

    def _give(self) -> None:
        """Give the engine what it may have now."""
        due = self._ledger.due()
        if due:
            self._send(Add(tuple(due)))
        if self._ledger.settled:
            self.settled.set()

    async def _tend(self) -> None:
        """While requests wait for an engine, or for the end of a trial."""
        while not self.settled.is_set() and self.failure is None:
            self._ledger.tend()
            self._give()
            await asyncio.sleep(_TICK_S)

    async def _watch(self) -> None:
        """Count seconds without a word. Time in which this loop itself stood still counts as one look."""
        look_s, self._silent_s = min(self._watchdog_s / _LOOKS, 1.0), 0.0
        while self._socket is not None:
            await asyncio.sleep(look_s)
            self._silent_s += look_s
            if self._silent_s >= self._watchdog_s and not self.is_stalled:
                self.stalled.set()
                log.error("%s", self.stall_reason)

    def _heard(self) -> None:
        self._silent_s = 0.0
        if self.is_stalled:
            self.stalled.clear()
            log.warning("the engine goes on")

    async def _read(self, socket: AsyncSocket) -> None:
        while socket is self._socket:
            try:
                message = decode_from_core(await socket.recv())
                self._heard()
                self._take(message)
                await asyncio.sleep(0)  # what waits is received without a pause, and streams must be written, too
            except Exception as error:  # whatever it was, nobody may wait for ever
                log.exception("an update could not be read or delivered")
                self.fail(f"the connection to the engine is broken: {type(error).__name__}: {error}")

    def _take(self, message: FromCore) -> None:
        match message:
            case Updates(updates):
                wrong = self._ledger.take(updates)
                if wrong:
                    self._send(Abort(tuple(wrong)))
                self._give()
            case Load(load):
                self.load = load
            case Failed(reason):
                self.lost(f"the engine failed: {reason}")
            case Ready():
                pass

    def _leave(self) -> None:
        """Hear nothing more of the engine that there was."""
        socket, self._socket = self._socket, None
        self.stalled.clear()
        if socket is None:
            return
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        socket.close()

    def _send(self, message: ToCore) -> None:
        if self._socket is not None:
            self._socket.send(encode(message))  # done at once: a DEALER without a high-water mark never waits
