"""A client of engines, for an event loop: requests out, updates to whoever asked.

Each request goes to one process of one engine. Which, the router says (`router.py`): `--dp-size` makes more engines,
`--ep-size` more processes of each, and to it both are links. What a client has with one engine is `remote_engine.py`.
"""

import logging
from asyncio import CancelledError, Event, Lock, ensure_future, gather, wait
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from treetop.core.clients import Sink
from treetop.core.wire import ID_RANGE
from treetop.distributed.remote_engine import WATCHDOG_S, RankLink, RemoteEngine, check_alike
from treetop.distributed.router import PrefixRouter, ReplicaLoad
from treetop.distributed.shared_file import only_one
from treetop.types.changes import (
    Change,
    DestroyWeightsUpdateGroup,
    FlushCache,
    InitWeightsUpdateGroup,
    LoadLora,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
    asked_as,
)
from treetop.types.errors import ConflictError, EngineError, InputError, TreetopError, UserError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, HostTierStats, KVTransferStats

log = logging.getLogger("treetop")

_SILENT_S = 4.0
"""An engine says something each second. One that does not hangs, or takes one long step; another may have time."""


def has_taken(change: Change, info: CoreInfo, before: CoreInfo) -> bool:
    """Whether an engine is already as a change would have it. before: as it was."""
    match change:
        case LoadLora(name=name):
            return name in info.loras
        case UnloadLora(name=name):
            return name not in info.loras
        case Sleep():
            return bool(info.asleep)
        case WakeUp(tags=tags):
            return not {*(info.asleep if tags is None else tags)} & {*info.asleep}
        case InitWeightsUpdateGroup() | DestroyWeightsUpdateGroup():
            return False
        case FlushCache():
            return True  # it is another, which has begun without any prefix
        case UpdateWeights():
            return info.weight_version > before.weight_version and not info.lacks_weights


class EngineProcessClient:
    """An `EngineClient` over engines in other processes. Where one dies, others take over what it had, as far as they
    have room; the rest waits for the one in its place.

    New requests go to the process that has most of their prefix, unless too many wait there; and to none of an engine
    that is being started again, has been silent for some heartbeats, or refuses all, while another serves. An engine
    that is dead for good ends all.
    """

    def __init__(
        self,
        number: int = 0,
        watchdog_s: float = WATCHDOG_S,
        num_engines: int = 1,
        changing_file: Path | None = None,
    ) -> None:
        """number: of this client among all that the engines will have. watchdog_s: silence after which one is stalled.
        changing_file: which clients of the same engines lock while they change these; None for one that is alone.

        Whoever starts the engines tells it to `engines`.
        """
        self._failed, self._ids, self._router = Event(), count(number * ID_RANGE), PrefixRouter[RankLink]()
        self._changing, self._changing_file = Lock(), changing_file
        self.engines = [
            RemoteEngine(index, number, watchdog_s, self.choose, self._failed, self._elsewhere)
            for index in range(num_engines)
        ]

    @property
    def info(self) -> CoreInfo:
        """Of engines that are alike: what runs at a time is added up."""
        infos = [link.info for each in self.engines for link in each.links]
        return infos[0]._replace(max_requests=sum(info.max_requests for info in infos))

    def check_alike(self) -> None:
        """Raises ConfigError where engines would answer unlike; see `remote_engine.check_alike`."""
        check_alike([(f"engine {link.engine} is", link.info) for each in self.engines for link in each.links])

    @property
    def load(self) -> CoreLoad:
        return _joined([load for each in self.engines for load in each.loads])

    @property
    def failure(self) -> EngineError | None:
        return next((each.failure for each in self.engines if each.failure is not None), None)

    @property
    def pause(self) -> str | None:
        """Only while no engine serves."""
        pauses = [each.pause for each in self.engines]
        return None if None in pauses else pauses[0]

    @property
    def is_stalled(self) -> bool:
        return any(each.stalled.is_set() for each in self.engines)

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self.engines)

    async def until_failed(self) -> None:
        """Wait until an engine is dead for good."""
        await self._failed.wait()

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        if any(request.constraint is not None for request in requests):
            raise InputError("constraints: the engine is another process; give a structured_output instead")
        if len(self.engines) == 1:
            self.engines[0].add(requests, sink)
            return
        for request in requests:
            link = self.choose(request)
            self.engines[link.engine].add([request], sink, link)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        for each in self.engines:
            each.abort(request_ids)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        for each in self.engines:
            each.finish(request_id, num_tokens)

    async def change(self, change: Change) -> None:
        """All engines prepare it, then all take it; where one refuses or ends, none does. If one ends after that, the
        one that takes its place takes it, too; it has no requests until then, and where it cannot, such as weights that
        were broadcast, none at all.

        One after another. Whoever asks may be cancelled while engines prepare: none takes it then; later all do.
        Raises ConflictError while another client makes one: of two that cross one is made. Raises EngineError if the
        file that clients lock cannot be opened.
        """
        async with self._changing:
            with only_one(self._changing_file) as alone:
                if not alone:
                    raise ConflictError
                await self._change(change)

    async def _change(self, change: Change) -> None:
        before = [(each.num_restarts, each.links[0].info if each.links else None) for each in self.engines]
        asked = {
            each: replace(change, engine=index) if isinstance(change, InitWeightsUpdateGroup) else change
            for index, each in enumerate(self.engines)
        }
        token = uuid4().hex
        for each, own in asked.items():
            if each.is_up:  # else nothing is asked of it, and what the one before it may keep is not forgotten
                each.keeps = own, token
        try:  # side by side: what is broadcast comes to all at once
            answers = await gather(
                *(each.change(own, "prepare", token) for each, own in asked.items()), return_exceptions=True
            )
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            for each, (restarts, _) in zip(self.engines, before, strict=True):
                if not each.is_up or each.num_restarts != restarts:
                    raise EngineError(f"{asked_as(change)}: an engine has ended meanwhile; nothing has changed")
        except BaseException:
            await _to_the_end(self._drop(asked, token))
            raise
        for each in self.engines:  # from here on all take it
            each.keeps = None
        await _to_the_end(self._commit(change, asked, before, token))

    async def _drop(self, asked: dict[RemoteEngine, Change], token: str) -> None:
        """Side by side: one that hangs is waited for, and the others have dropped it."""

        async def drop(each: RemoteEngine, own: Change) -> None:
            with suppress(EngineError, UserError):
                await each.change(own, "drop", token)
                each.keeps = None

        await gather(*(drop(each, own) for each, own in asked.items()))

    async def _commit(
        self, change: Change, asked: dict[RemoteEngine, Change], before: list[tuple[int, CoreInfo | None]], token: str
    ) -> None:
        """Side by side: one that hangs, or is started again, holds back itself alone.

        before: of each engine, the number of its restarts and what it was.
        """
        taking = [self._take(change, *both, *was, token) for both, was in zip(asked.items(), before, strict=True)]
        for answer in await gather(*taking, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def _take(
        self, change: Change, each: RemoteEngine, own: Change, restarts: int, info: CoreInfo | None, token: str
    ) -> None:
        """One engine takes it, or the one in its place."""
        with ExitStack() as behind:  # the others serve
            with each.takes():
                try:
                    await each.change(own, "commit", token)
                    return
                except TreetopError as error:  # whatever it was, a half of a change is no engine
                    again = "the one after it is asked again"
                    log.warning("%s: an engine did not take it: %s; %s", asked_as(own), error, again)
                    behind.enter_context(each.behind())
            await each.another(restarts)
            if info is None or not has_taken(change, each.links[0].info, info):
                try:
                    await each.change(own, "prepare", token)
                    await each.change(own, "commit", token)
                except TreetopError as error:
                    what = f"{asked_as(change)}: an engine was started again and cannot take what the others have"
                    raise EngineError(f"{what}: {error}") from error

    def left(self, number: int) -> None:
        """Another client of these engines has ended. An engine that starts later will not hear of it."""
        for each in self.engines:
            each.left(number)

    def close(self) -> None:
        for each in self.engines:
            each.close()

    def choose(self, request: EngineRequest, engine: int | None = None) -> RankLink:
        """The link that gets a request. engine: that has the request already, as one that was started again."""
        serving = [index for index, each in enumerate(self.engines) if each.pause is None]
        serving = [index for index in serving if not self._refuses(index)] or serving
        serving = [index for index in serving if self.engines[index].silent_s < _SILENT_S] or serving
        alive: dict[RankLink, ReplicaLoad] = {}
        for index in {*(serving or range(len(self.engines))), *(() if engine is None else (engine,))}:
            alive |= self.engines[index].standings
        ids = request.prompt_ids + request.received
        order = self._router.choose(request.request_id, ids, alive, request.cache_salt)
        link = next(each for each in order if engine in (None, each.engine))
        self._router.routed(request.request_id, ids, link, request.cache_salt)
        return link

    def _elsewhere(self, request: EngineRequest) -> RemoteEngine | None:
        """The engine that takes over a request of one that has died, and is to have it."""
        alive: dict[RankLink, ReplicaLoad] = {}
        for index, each in enumerate(self.engines):
            if each.pause is None and not self._refuses(index) and each.silent_s < _SILENT_S:
                alive |= each.standings
        ids = request.prompt_ids + request.received
        if not any(link.has_room for link in alive):
            return None
        order = self._router.choose(request.request_id, ids, alive, request.cache_salt)
        link = next(each for each in order if each.has_room)
        self._router.routed(request.request_id, ids, link, request.cache_salt)
        self.engines[link.engine].put((request,), link)
        return self.engines[link.engine]

    def _refuses(self, index: int) -> bool:
        """Whether an engine ends every request at once: its queue is the shortest then."""
        return any(link.info.refuses_now is not None for link in self.engines[index].links)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Whoever waits for it is cancelled once it has ended."""
    task, cancelled = ensure_future(work), False
    while not task.done():
        try:
            await wait([task])
        except CancelledError:
            cancelled = True
    if cancelled and not task.cancelled():
        task.exception()  # has been looked at
        raise CancelledError
    task.result()


def _joined(loads: Sequence[CoreLoad]) -> CoreLoad:
    """Of several engines: of the fullest pool and of the head that lost the most, and all else added up."""
    fits = [load.head_fit for load in loads if load.head_fit is not None]
    return CoreLoad(
        sum(load.num_running for load in loads),
        sum(load.num_waiting for load in loads),
        max(load.kv_usage for load in loads),
        sum(load.num_retractions for load in loads),
        joined_kv_transfer([load.kv_transfer for load in loads if load.kv_transfer is not None]),
        sum(load.num_gave_way for load in loads),
        joined_host_tier([load.host_tier for load in loads if load.host_tier is not None]),
        min(fits, key=lambda fit: fit[1] / fit[0], default=None),
    )


def joined_host_tier(loads: Sequence[HostTierStats]) -> HostTierStats | None:
    """Of several engines: of the fullest tier, and all else added up; None of none."""
    if not loads:
        return None
    added = HostTierStats(*(sum(values) for values in zip(*loads, strict=True)))
    return added._replace(usage_perc=max(load.usage_perc for load in loads))


def joined_kv_transfer(loads: Sequence[KVTransferStats]) -> KVTransferStats | None:
    """Of several engines: of the fastest link, and all else added up; None of none."""
    if not loads:
        return None
    added = {name: sum(getattr(load, name) for load in loads) for name in KVTransferStats._fields if name != "mode"}
    fastest = {name: max(getattr(load, name) for load in loads) for name in ("read_gb_s", "write_gb_s")}
    return KVTransferStats(loads[0].mode, **{**added, **fastest})
