"""A core that is many: each request is a stream from a replica, and from another one if that dies."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from contextvars import Context
from itertools import count
from typing import Any

from ray.exceptions import RayActorError

from treetop.core.clients import Sink
from treetop.distributed.journal import Journal
from treetop.types.changes import Change, asked_as
from treetop.types.errors import ConfigError, EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate

log = logging.getLogger("treetop.server")

_LATE_S = 1.0
"""How long after its deadline a request is ended here: before that its engine does it, if it has one."""
_SAME_STEP_CRASHES = 16
"""Replicas that end at one step of a request before it is ended: why they end is not told, and there is no limit."""


class RayClient:
    """An `EngineClient` over the replicas of a Ray Serve deployment.

    A `Journal` for each request: what it has received, with which it goes on when its replica dies, and whether it has
    killed two. Ray keeps replicas running; a request waits as long as there is none.
    """

    failure: EngineError | None = None
    pause, is_stalled, num_restarts = None, False, 0

    def __init__(self, replicas: Any, info: CoreInfo) -> None:
        """replicas: the handle of a deployment of `Replica`. info: of one of them."""
        self._replicas, self.info = replicas.options(stream=True), info
        self._ids, self._streams = count(), dict[RequestId, asyncio.Task[None]]()

    async def until_failed(self) -> None:
        """Ray keeps replicas running."""
        await asyncio.Event().wait()

    @property
    def load(self) -> CoreLoad:
        """Requests of this process; their replicas know how many of them wait for a row."""
        return CoreLoad(num_running=len(self._streams))

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        for request in requests:
            # without what Ray keeps of the HTTP request: each call of a replica is one of its own
            stream = asyncio.get_running_loop().create_task(self._run(request, sink), context=Context())
            self._streams[request.request_id] = stream

    async def change(self, change: Change) -> None:
        raise ConfigError(f"{asked_as(change)}: replicas behind Ray are started anew")

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.cancel()

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        """As `abort`: the replica keeps the pages of the prompt, but not those of the output."""
        self.abort((request_id,))

    def close(self) -> None:
        self.abort(tuple(self._streams))

    async def _run(self, request: EngineRequest, sink: Sink) -> None:
        journal = Journal(same_step_crashes=_SAME_STEP_CRASHES)
        journal.add([request], sink)
        until_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s + _LATE_S
        try:
            while len(journal):
                journal.opened(1)
                (asked,) = journal.due()
                try:
                    await self._follow(asked, journal, until_s)
                except (RayActorError, EngineError) as error:
                    log.warning("a replica has ended; its stream goes on with another: %s", type(error).__name__)
                    journal.lost("a replica has ended")
                except TimeoutError:
                    if until_s is None or time.monotonic() < until_s:  # of Ray's own
                        journal.lost("a replica did not answer in time")
                    else:
                        journal.unanswered()
                journal.tend()
        except Exception as error:  # whatever it was, nobody may wait for ever
            log.exception("a stream could not be read or delivered")
            journal.fail(f"the replica failed: {type(error).__name__}: {error}")
        finally:
            self._streams.pop(request.request_id, None)

    async def _follow(self, asked: EngineRequest, journal: Journal, until_s: float | None) -> None:
        """Take what a replica gives until the request has ended. Raises what ends the stream before."""
        left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
        async with asyncio.timeout(left_s), aclosing(self._updates(asked)) as updates:
            async for batch in updates:
                journal.take(batch)
                if not len(journal):
                    return
        raise EngineError("the stream of a replica has ended before its request")

    async def _updates(self, asked: EngineRequest) -> AsyncGenerator[list[RequestUpdate]]:
        """The stream of one replica, of which Ray tells it when nobody reads it any more."""
        stream = self._replicas.generate.remote(asked)
        ended = False
        try:
            async for batch in stream:
                ended = batch[-1].finish_reason is not None
                yield batch
        finally:
            if not ended:
                stream.cancel()
