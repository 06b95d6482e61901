"""One engine as a client has it: links to its processes, and what has been asked of it; then those of its successor.

An engine is one process, or several that share experts: each takes requests. It may die and another take its place
(`supervisor.py`): requests wait and go on (`journal.py`). Each process has a socket of its own, so that nothing of one
engine is ever heard as another's.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count

import zmq
import zmq.asyncio

from treetop.core.clients import Sink
from treetop.core.wire import (
    AbortRequests,
    AddRequests,
    AskChange,
    ChangeDone,
    ClientHello,
    Finish,
    FromCore,
    Leave,
    Load,
    Ready,
    Stage,
    ToCore,
    Updates,
    decode_from_core,
    encode,
)
from treetop.distributed.journal import Journal
from treetop.distributed.router import ReplicaLoad
from treetop.types.changes import Change, asked_as
from treetop.types.errors import ConfigError, ConflictError, EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest

log = logging.getLogger("treetop.distributed")

_TICK_S = 0.1
"""How often requests that wait for an engine are looked at."""
_AT_ONCE = 16
"""Messages that are taken, if they wait, before anything is written."""
WATCHDOG_S = 300.0
_LOOKS = 8
"""How often the watchdog looks in the time that it allows; at most once a second."""

AsyncSocket = zmq.asyncio.Socket


@dataclass(eq=False, slots=True)
class RankLink:
    """To one process of an engine.

    load: the last that it reported.
    silent_s: how long nothing has been heard of it, in looks of the watchdog.
    placed: requests that it has.
    """

    engine: int
    rank: int
    socket: AsyncSocket
    info: CoreInfo
    load: CoreLoad = field(default_factory=CoreLoad)
    silent_s: float = 0.0
    placed: set[RequestId] = field(default_factory=set)

    @property
    def standing(self) -> ReplicaLoad:
        """What a router is told of it."""
        count = max(len(self.placed), self.load.num_running + self.load.num_waiting)
        return ReplicaLoad(count, self.info.max_requests, self.info.prefix)

    @property
    def has_room(self) -> bool:
        """Whether it would run one request more at once, as far as is known."""
        return self.load.num_waiting == 0 and self.standing.num_requests < self.info.max_requests

    def send(self, message: ToCore) -> None:
        self.socket.send(encode(message))  # at once: a DEALER without a high-water mark never waits


def check_alike(engines: Sequence[tuple[str, CoreInfo]]) -> None:
    """Raises ConfigError where engines would answer unlike: another `--exactness auto`, or bits of unlike devices.

    engines: each with what a message says of it first, such as `engine 0 is`.
    """
    (first, info), *others = engines
    for each, other in others:
        if other.exactness != info.exactness:
            raise ConfigError(
                f"--exactness auto: {first} {_chosen(info)}, {each} {_chosen(other)}; use --exactness bits or ties,"
                f" which all have then"
            )
        if other.exactness == "bits" and other.device != info.device:
            raise ConfigError(
                f"--exactness bits: {first} on {info.device}, {each} on {other.device}, whose bits may differ; use"
                f" devices that are alike, or --exactness ties"
            )


def _chosen(info: CoreInfo) -> str:
    return f"{info.exactness} by {info.exactness_by}" if info.exactness_by else info.exactness


Place = Callable[[EngineRequest, int], RankLink]
"""The link, of an engine by its number, that gets a request."""
Elsewhere = Callable[[EngineRequest], "RemoteEngine | None"]
"""Another engine that has room for a request whose own has died, and a link chosen for it; None if none has."""


class RemoteEngine:
    """What a client has with one of its engines. One event loop uses it.

    Whoever watches the processes calls `connect` with an engine that starts, `lost` when it has ended, `fail` when none
    comes after it.

    links: of the last engine that there was.
    place: see `Place`; asked where an engine has several processes.
    num_restarts: engines after the first.
    settled: this one has all that is alive.
    stalled: nothing has been heard of one of its processes for as long as the watchdog allows.
    """

    def __init__(
        self,
        index: int,
        client: int,
        watchdog_s: float,
        place: Place,
        failed: asyncio.Event,
        elsewhere: Elsewhere = lambda request: None,
    ) -> None:
        """index: of this engine among the client's. client: its number among all that the engine will have.

        watchdog_s: silence after which it is stalled. failed: set once there is no engine any more.
        """
        self._context = zmq.asyncio.Context()
        self._index, self._client, self.place, self._failed = index, client, place, failed
        self._elsewhere = elsewhere
        self.links: list[RankLink] = []
        self._up = False
        self._addresses: tuple[str, ...] = ()
        self._readers: list[asyncio.Task[None]] = []
        self._tender: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._watchdog_s = watchdog_s
        self._journal = Journal()
        self._link_of: dict[RequestId, RankLink] = {}
        self._updating: dict[int, asyncio.Future[ChangeDone]] = {}
        self._numbers = count()
        self.failure: EngineError | None = None
        self.num_restarts = -1
        self.settled, self.stalled = asyncio.Event(), asyncio.Event()
        self.keeps: tuple[Change, str] | None = None
        """What this engine was asked to prepare, with its token, and none has taken: the one after it is told so."""
        self._takes = self._is_behind = self._closed = False

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def loads(self) -> list[CoreLoad]:
        """What the processes reported last; what waits here while there is none."""
        return [link.load for link in self.links] if self._up else [CoreLoad(num_waiting=len(self._journal))]

    @property
    def standings(self) -> dict[RankLink, ReplicaLoad]:
        """Of the processes, or of those that there were while there is none."""
        if self._up:
            return {link: link.standing for link in self.links}
        return {self.links[0]: replace(self.links[0].standing, num_requests=len(self._journal))}

    @property
    def pause(self) -> str | None:
        """An engine is being started again, or given what it is to go on with; or there is one and it hangs."""
        if self.stalled.is_set():
            return self.stall_reason
        if self.num_restarts >= 0 and (self._is_behind or not self.settled.is_set()) and self.failure is None:
            return "the engine died and is restarting; requests wait"
        return None

    @property
    def silent_s(self) -> float:
        """How long nothing has been heard of one of its processes, in looks of the watchdog."""
        return max((link.silent_s for link in self.links), default=0.0) if self._up else 0.0

    @property
    def stall_reason(self) -> str:
        return f"the engine has not finished a step or a command in {self._watchdog_s:g} s (--watchdog-timeout)"

    async def connect(self, addresses: Sequence[str]) -> None:
        """Wait until the engine there is up, and give it what has not ended. addresses: of its processes.

        Raises ConfigError for one that is unlike the one before it: requests would go on otherwise.
        """
        sockets = [self._context.socket(zmq.DEALER) for _ in addresses]
        try:
            infos = await asyncio.gather(*map(self._handshake, sockets, addresses))
            before = [(f"engine {self._index} was", link.info) for link in self.links[:1]]
            check_alike([*before, *((f"engine {self._index} is", info) for info in infos)])
        except BaseException:
            for socket in sockets:
                socket.close()
            raise
        pairs = zip(sockets, infos, strict=True)
        self._begin([RankLink(self._index, rank, *each) for rank, each in enumerate(pairs)], addresses)

    def _begin(self, links: list[RankLink], addresses: Sequence[str]) -> None:
        """With an engine that is up, instead of the one before it."""
        self._leave()
        self.links = links
        self._up, self._addresses = True, tuple(addresses)
        self.num_restarts += 1
        self._journal.opened(sum(link.info.max_requests for link in links))
        self._readers = [asyncio.create_task(self._read(link)) for link in self.links]
        self._watchdog = asyncio.create_task(self._watch())
        if self.keeps is not None and len(self.links) == 1:
            self.links[0].send(AskChange.of(next(self._numbers), "keep", *self.keeps))
        self._give()

    async def _handshake(self, socket: AsyncSocket, address: str) -> CoreInfo:
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.connect(address)
        socket.send(encode(ClientHello(self._client)))
        while not isinstance(answer := decode_from_core(await socket.recv()), Ready):
            pass
        return answer.info

    async def resume(self, addresses: Sequence[str]) -> None:
        """As `connect`, and wait until the engine has all that is alive; no trial is on then."""
        if tuple(addresses) != self._addresses:
            await self.connect(addresses)
        await self.settled.wait()

    def add(self, requests: Sequence[EngineRequest], sink: Sink, link: RankLink | None = None) -> None:
        """As `EngineClient.add`. link: of this engine, where it has been chosen; it counts while the engine lives."""
        self._journal.add(requests, sink)
        if link is not None and self._up:
            self.put(requests, link)
        self._give()

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """As `EngineClient.abort`; what this engine does not have is another's."""
        self._journal.drop(request_ids)
        self._send_abort(request_ids)
        self._give()

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """As `EngineClient.finish`, likewise."""
        self._journal.drop((request_id,))
        link = self._taken_from(request_id)
        if link is not None:
            link.send(Finish(request_id, num_tokens))
        self._give()

    async def change(self, change: Change, stage: Stage, token: str) -> None:
        """A stage of `EngineClient.change`. token: see `AskChange`."""
        what = asked_as(change)
        self._check_open()
        if not self._up:
            raise EngineError(f"{what}: the engine is being started again; ask again once it is up")
        if len(self.links) != 1:
            raise ConfigError(f"{what}: not with ranks that share experts, which are {len(self.links)} (--ep-size)")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._updating[number] = answer
        try:
            self.links[0].send(AskChange.of(number, stage, change, token))
            said = await answer
        finally:
            del self._updating[number]
        if said.error is not None:
            if said.conflict:
                raise ConflictError(said.error)
            raise ConfigError(said.error) if said.user_error else EngineError(said.error)

    @contextmanager
    def takes(self) -> Iterator[None]:
        """While all take a change: what waits is given to it once they have."""
        self._takes = True
        try:
            yield
        finally:
            self._takes = False
            if self._up:
                self._give()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """While others have taken a change and this one has not: likewise, and others have what comes meanwhile."""
        self._is_behind = True
        try:
            yield
        finally:
            self._is_behind = False
            if self._up:
                self._give()

    async def another(self, restarts: int) -> None:
        """Wait for an engine that comes after so many restarts. Raises EngineError if none does, and once closed."""
        self._check_open()
        while self.num_restarts <= restarts or not self._up:
            await asyncio.sleep(_TICK_S)
            self._check_open()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._closed:
            raise EngineError("whoever asked the engine has closed the connection to it")

    def left(self, number: int) -> None:
        """Another client of this engine has ended. One that comes later will not hear of it."""
        for link in self.links if self._up else ():
            link.send(Leave(number))

    def lost(self, reason: str, killed: bool = False) -> None:
        """The engine has ended: other engines take over what it had, as far as they have room, and the rest waits for
        another in its place, if one comes. Any number of times. killed: from outside.
        """
        if not self._journal.open:
            return
        self._leave()
        self.settled.clear()
        self._journal.lost(reason, killed)
        self._hand_on()
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
        self._closed = True
        self._leave()
        for task in (self._tender, self._watchdog):
            if task is not None:
                task.cancel()
        self._context.destroy(linger=0)

    def _give(self) -> None:
        """Give the engine what it may have now."""
        if self._takes or self._is_behind:
            return
        given: dict[RankLink, list[EngineRequest]] = {}
        for request in self._journal.due():
            link = self._link_of.get(request.request_id)
            if link is None:
                link = self.links[0] if len(self.links) == 1 else self.place(request, self._index)
                self.put((request,), link)
            given.setdefault(link, []).append(request)
        for link, requests in given.items():
            link.send(AddRequests(tuple(requests)))
        if self._journal.settled:
            self.settled.set()

    def put(self, requests: Sequence[EngineRequest], link: RankLink) -> None:
        """These go to that link of this engine, while it lives."""
        for request in requests:
            self._link_of[request.request_id] = link
            link.placed.add(request.request_id)

    def _hand_on(self) -> None:
        """Other engines take over what waits for an engine in the place of this one."""
        others: set[RemoteEngine] = set()

        def place(request: EngineRequest) -> Journal | None:
            other = self._elsewhere(request)
            if other is None:
                return None
            others.add(other)
            return other._journal

        taken_over = self._journal.hand_on(place)
        for other in others:
            other._give()
        if taken_over:
            log.warning("%d requests of the engine that died go on with others", taken_over)

    def _taken_from(self, request_id: RequestId) -> RankLink | None:
        """The link that had a request, which has it no more."""
        link = self._link_of.pop(request_id, None)
        if link is not None:
            link.placed.discard(request_id)
        return link

    async def _tend(self) -> None:
        """While requests wait for an engine, or for the end of a trial."""
        while not self.settled.is_set() and self.failure is None:
            self._journal.tend()
            if not self._up:
                self._hand_on()
            self._give()
            await asyncio.sleep(_TICK_S)

    async def _watch(self) -> None:
        """Count seconds without a word. Time in which this loop itself stood still counts as one look."""
        look_s = min(self._watchdog_s / _LOOKS, 1.0)
        while self._up:
            await asyncio.sleep(look_s)
            for link in self.links:
                link.silent_s += look_s
            if self.stalled.is_set() != (self.silent_s >= self._watchdog_s):
                if self.stalled.is_set():
                    self.stalled.clear()
                    log.warning("the engine responds again")
                else:
                    self.stalled.set()
                    log.error("%s", self.stall_reason)

    async def _read(self, link: RankLink) -> None:
        while self._up and link in self.links:
            try:
                self._take(link, decode_from_core(await link.socket.recv()))
                link.silent_s = 0.0
                with suppress(zmq.Again):  # what waits for a client that is late is joined by who reads it
                    for _ in range(_AT_ONCE):
                        self._take(link, decode_from_core(await link.socket.recv(zmq.NOBLOCK)))
                await asyncio.sleep(0)  # what waits is received without a pause, and streams must be written, too
            except Exception as error:  # whatever it was, nobody may wait for ever
                log.exception("an update could not be read or delivered")
                self.fail(f"the connection to the engine is broken: {type(error).__name__}: {error}")

    def _take(self, link: RankLink, message: FromCore) -> None:
        match message:
            case Updates(updates):
                for update in updates:
                    if update.finish_reason is not None:
                        self._taken_from(update.request_id)
                self._send_abort(self._journal.take(updates))
                self._give()
            case Load(load):
                link.load = load
            case ChangeDone(number):
                if number in self._updating and not self._updating[number].done():
                    self._updating[number].set_result(message)
            case Ready(info):
                link.info = info

    def _leave(self) -> None:
        """Hear nothing more of the engine that there was."""
        self._up = False
        self._link_of.clear()
        self.stalled.clear()
        for number, answer in self._updating.items():
            if not answer.done():
                answer.set_result(ChangeDone(number, "the engine has ended before it had answered"))
        for task in (*self._readers, self._watchdog):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for link in self.links:
            link.socket.close()

    def _send_abort(self, request_ids: Sequence[RequestId]) -> None:
        by_link: dict[RankLink, list[RequestId]] = {}
        for request_id in request_ids:
            link = self._taken_from(request_id)
            if link is not None:
                by_link.setdefault(link, []).append(request_id)
        for link, mine in by_link.items():
            link.send(AbortRequests(tuple(mine)))
