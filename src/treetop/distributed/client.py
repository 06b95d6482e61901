"""A client of an engine, for an event loop: requests out, updates to whoever asked.

An engine is one process, or several that share experts: each takes requests, the client chooses which (`router.py`).
It may die and another take its place (`supervisor.py`): requests wait and go on (`journal.py`). Each process has a
socket of its own, so that nothing of one engine is ever heard as another's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import zmq
import zmq.asyncio

from treetop.core.clients import Sink
from treetop.core.wire import (
    ID_RANGE,
    Abort,
    Add,
    Finish,
    FromCore,
    Hello,
    Leave,
    Load,
    Ready,
    ToCore,
    Updates,
    UpdateWeights,
    WeightsUpdated,
    decode_from_core,
    encode,
)
from treetop.distributed.journal import Journal
from treetop.distributed.router import PrefixRouter, ReplicaLoad
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, KVTransferStats

log = logging.getLogger("treetop.distributed")

_TICK_S = 0.1
"""How often requests that wait for an engine are looked at."""
_AT_ONCE = 16
"""Messages that are taken, if they wait, before anything is written."""
WATCHDOG_S = 300.0
_LOOKS = 8
"""How often the watchdog looks in the time that it allows; at most once a second."""

AsyncSocket = zmq.asyncio.Socket


class _Link(NamedTuple):
    """What one process of an engine is reached by."""

    socket: AsyncSocket
    info: CoreInfo


class EngineProcessClient:
    """An engine behind sockets, and whatever takes its place. See `EngineClient`.

    Whoever watches the processes calls `connect` with an engine that starts, `lost` when it has ended, `fail` when none
    comes after it.

    num_restarts: engines after the first.
    settled: this one has all that is alive.
    stalled: nothing has been heard of one of its processes for as long as the watchdog allows.
    choose: names the process of each request; see `PrefixRouter.choose`.
    """

    info: CoreInfo

    def __init__(self, number: int = 0, watchdog_s: float = WATCHDOG_S) -> None:
        """number: of this client among all that an engine will have. watchdog_s: silence after which it is stalled."""
        self._context = zmq.asyncio.Context()
        self._links: list[_Link] = []
        self._addresses: tuple[str, ...] = ()
        self._readers: list[asyncio.Task[None]] = []
        self._tender: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._watchdog_s, self._silent_s = watchdog_s, list[float]()
        self._number, self._journal, self._ids = number, Journal(), count(number * ID_RANGE)
        self._rank_of: dict[RequestId, int] = {}
        self._loads: list[CoreLoad] = []
        self._updating: dict[int, asyncio.Future[WeightsUpdated]] = {}
        self._router: PrefixRouter[int] = PrefixRouter()
        self.failure: EngineError | None = None
        self.num_restarts = -1
        self.settled, self.stalled, self._failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def load(self) -> CoreLoad:
        """What the processes reported last, added up; what waits here while there is none."""
        return joined_load(self._loads) if self._loads else CoreLoad(num_waiting=len(self._journal))

    @property
    def pause(self) -> str | None:
        """An engine is being started again, or given what it is to go on with; or there is one and it hangs."""
        if self.is_stalled:
            return self.stall_reason
        if self.num_restarts >= 0 and not self.settled.is_set() and self.failure is None:
            return "the engine died and is restarting; requests wait"
        return None

    @property
    def is_stalled(self) -> bool:
        return self.stalled.is_set()

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard of one of its processes, in looks of the watchdog."""
        return max(self._silent_s, default=0.0)

    @property
    def stall_reason(self) -> str:
        return f"the engine has not finished a step or a command in {self._watchdog_s:g} s (--watchdog-timeout)"

    @property
    def num_alive(self) -> int:
        """Requests of this client that have not ended."""
        return len(self._journal)

    async def until_failed(self) -> None:
        """Wait until there is no engine any more."""
        await self._failed.wait()

    @property
    def placed(self) -> Mapping[RequestId, int]:
        """The process of each request that one has."""
        return self._rank_of

    async def connect(self, addresses: Sequence[str]) -> None:
        """Wait until the engine there is up, and give it what has not ended. addresses: of its processes."""
        sockets = [self._context.socket(zmq.DEALER) for _ in addresses]
        try:
            links = await asyncio.gather(*map(self._handshake, sockets, addresses))
        except BaseException:
            for socket in sockets:
                socket.close()
            raise
        self._leave()
        self._links, self._addresses = links, tuple(addresses)
        self._loads, self._silent_s = [CoreLoad()] * len(links), [0.0] * len(links)
        self._router = PrefixRouter()
        self.info = joined_info([link.info for link in links])
        self.num_restarts += 1
        self._journal.opened(self.info.max_requests)
        self._readers = [asyncio.create_task(self._read(rank, link.socket)) for rank, link in enumerate(links)]
        self._watchdog = asyncio.create_task(self._watch())
        self._give()

    async def _handshake(self, socket: AsyncSocket, address: str) -> _Link:
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.connect(address)
        socket.send(encode(Hello(self._number)))
        while not isinstance(answer := decode_from_core(await socket.recv()), Ready):
            pass
        return _Link(socket, answer.info)

    async def resume(self, addresses: Sequence[str]) -> None:
        """As `connect`, and wait until the engine has all that is alive; no trial is on then."""
        if tuple(addresses) != self._addresses:
            await self.connect(addresses)
        await self.settled.wait()

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        if any(request.constraint is not None for request in requests):
            raise InputError("constraints: the engine is another process; give a structured_output instead")
        self._journal.add(requests, sink)
        self._give()

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._journal.drop(request_ids)
        self._send_abort(request_ids)
        self._give()

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._journal.drop((request_id,))
        rank = self._rank_of.pop(request_id, None)
        if rank is not None:
            self._send(rank, Finish(request_id, num_tokens))
        self._give()

    async def update_weights(self, model: str | None, draft: str | None) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if len(self._links) != 1:
            if self._links:
                raise ConfigError(f"update_weights: built for one engine, and these are {len(self._links)} (--ep-size)")
            raise EngineError("update_weights: the engine is being started again; ask again once it is up")
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._updating[number] = answer
        try:
            self._send(0, UpdateWeights(number, model, draft))
            said = await answer
        finally:
            del self._updating[number]
        if said.error is not None:
            raise ConfigError(said.error) if said.user_error else EngineError(said.error)

    def left(self, number: int) -> None:
        """Another client of this engine has ended. One that comes later will not hear of it."""
        for rank in range(len(self._links)):
            self._send(rank, Leave(number))

    def lost(self, reason: str) -> None:
        """The engine has ended: what it had waits for another, if one comes. Any number of times."""
        if not self._journal.open:
            return
        self._leave()
        self.settled.clear()
        self._journal.lost(reason)
        if self._tender is None or self._tender.done():
            self._tender = asyncio.create_task(self._tend())

    def fail(self, reason: str) -> None:
        """There is no engine any more: every request ends with this error, and what comes later is refused."""
        if self.failure is None:
            self.lost(reason)
            self.failure = EngineError(reason)
            self._failed.set()
            self._journal.fail(reason)

    def close(self) -> None:
        self._leave()
        for task in (self._tender, self._watchdog):
            if task is not None:
                task.cancel()
        self._context.destroy(linger=0)

    def choose(self, request: EngineRequest) -> int:
        """The process that gets a request."""
        ids = request.prompt_ids + request.received
        own = Counter(self._rank_of.values())
        alive = {
            rank: ReplicaLoad(max(own[rank], num_requests(load)), link.info.max_requests, link.info.prefix)
            for rank, (link, load) in enumerate(zip(self._links, self._loads, strict=True))
        }
        rank = self._router.choose(request.request_id, ids, alive)[0]
        self._router.routed(request.request_id, ids, rank)
        return rank

    def _give(self) -> None:
        """Give the engine what it may have now."""
        given: dict[int, list[EngineRequest]] = {}
        for request in self._journal.due():
            rank = self._rank_of[request.request_id] = self.choose(request) if len(self._links) > 1 else 0
            given.setdefault(rank, []).append(request)
        for rank, requests in given.items():
            self._send(rank, Add(tuple(requests)))
        if self._journal.settled:
            self.settled.set()

    async def _tend(self) -> None:
        """While requests wait for an engine, or for the end of a trial."""
        while not self.settled.is_set() and self.failure is None:
            self._journal.tend()
            self._give()
            await asyncio.sleep(_TICK_S)

    async def _watch(self) -> None:
        """Count seconds without a word. Time in which this loop itself stood still counts as one look."""
        look_s = min(self._watchdog_s / _LOOKS, 1.0)
        while self._links:
            await asyncio.sleep(look_s)
            self._silent_s = [silent_s + look_s for silent_s in self._silent_s]
            if self.is_stalled != (self.silent_s >= self._watchdog_s):
                if self.is_stalled:
                    self.stalled.clear()
                    log.warning("the engine responds again")
                else:
                    self.stalled.set()
                    log.error("%s", self.stall_reason)

    async def _read(self, rank: int, socket: AsyncSocket) -> None:
        while self._links and self._links[rank].socket is socket:
            try:
                self._take(rank, decode_from_core(await socket.recv()))
                self._silent_s[rank] = 0.0
                with suppress(zmq.Again):  # what waits for a client that is late is joined by who reads it
                    for _ in range(_AT_ONCE):
                        self._take(rank, decode_from_core(await socket.recv(zmq.NOBLOCK)))
                await asyncio.sleep(0)  # what waits is received without a pause, and streams must be written, too
            except Exception as error:  # whatever it was, nobody may wait for ever
                log.exception("an update could not be read or delivered")
                self.fail(f"the connection to the engine is broken: {type(error).__name__}: {error}")

    def _take(self, rank: int, message: FromCore) -> None:
        match message:
            case Updates(updates):
                for update in updates:
                    if update.finish_reason is not None:
                        self._rank_of.pop(update.request_id, None)
                self._send_abort(self._journal.take(updates))
                self._give()
            case Load(load):
                self._loads[rank] = load
            case WeightsUpdated(number):
                if number in self._updating and not self._updating[number].done():
                    self._updating[number].set_result(message)
            case Ready():
                pass

    def _leave(self) -> None:
        """Hear nothing more of the engine that there was."""
        links, self._links, self._loads = self._links, [], []
        self._rank_of.clear()
        self.stalled.clear()
        for number, answer in self._updating.items():
            if not answer.done():
                answer.set_result(WeightsUpdated(number, "update_weights: the engine has ended before it had answered"))
        for task in (*self._readers, self._watchdog):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for link in links:
            link.socket.close()

    def _send_abort(self, request_ids: Sequence[RequestId]) -> None:
        by_rank: dict[int, list[RequestId]] = {}
        for request_id in request_ids:
            rank = self._rank_of.pop(request_id, None)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        for rank, mine in by_rank.items():
            self._send(rank, Abort(tuple(mine)))

    def _send(self, rank: int, message: ToCore) -> None:
        if self._links:
            self._links[rank].socket.send(encode(message))  # at once: a DEALER without a high-water mark never waits


def num_requests(load: CoreLoad) -> int:
    return load.num_running + load.num_waiting


def joined_info(infos: Sequence[CoreInfo]) -> CoreInfo:
    """Of engines that are alike: what runs at a time is added up."""
    return infos[0]._replace(max_requests=sum(info.max_requests for info in infos))


def joined_load(loads: Sequence[CoreLoad]) -> CoreLoad:
    """Of several engines: of the fullest pool, and all else added up."""
    return CoreLoad(
        sum(load.num_running for load in loads),
        sum(load.num_waiting for load in loads),
        max(load.kv_usage for load in loads),
        sum(load.num_retractions for load in loads),
        joined_kv_transfer([load.kv_transfer for load in loads if load.kv_transfer is not None]),
    )


def joined_kv_transfer(loads: Sequence[KVTransferStats]) -> KVTransferStats | None:
    """Of several engines: of the fastest link, and all else added up; None of none."""
    if not loads:
        return None
    added = {name: sum(getattr(load, name) for load in loads) for name in KVTransferStats._fields if name != "mode"}
    fastest = {name: max(getattr(load, name) for load in loads) for name in ("read_gb_s", "write_gb_s")}
    return KVTransferStats(loads[0].mode, **{**added, **fastest})
