"""One replica: an engine process and its supervisor in an actor of Ray's."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

from treetop.core.wire import ProcessOptions
from treetop.distributed.supervisor import WATCHDOG, EngineSupervisor, Watchdog
from treetop.ray.router import standing_of, told_of
from treetop.types.errors import EngineError
from treetop.types.requests import CoreInfo, EngineRequest, RequestUpdate

log = logging.getLogger("treetop.server")


class Replica:
    """Runs requests, each a stream of updates. An engine that dies is started again; if it may not be, all of it ends.

    Ray then puts another in its place, and the streams go on with others (`RayClient`).
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, process: ProcessOptions, engine_restarts: int, watchdog: Watchdog = WATCHDOG
    ) -> None:
        self._engines = EngineSupervisor(process, engine_restarts, watchdog)
        await self._engines.start()
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        reason = await self._engines.watch()
        log.error("the replica ends: %s", reason)
        os._exit(1)  # nobody is sent to what cannot work; streams hear of it at once

    async def info(self) -> CoreInfo:
        return self._engines.core.info

    def record_replica_metadata(self) -> dict[str, Any]:
        """Ray calls it once and gives it to routers."""
        return told_of(self._engines.core.info)

    def record_routing_stats(self) -> dict[str, Any]:
        """Ray calls it each second and gives it to routers."""
        return standing_of(self._engines.core)

    async def check_health(self) -> None:
        """Ray calls it now and then. Raises EngineError if the replica is of no use."""
        if self._engines.core.failure is not None:
            raise self._engines.core.failure.with_traceback(None)

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[RequestUpdate]]:
        """Updates until the request has ended, as many at a time as have come. Ending the stream aborts it."""
        core, arrived = self._engines.core, asyncio.Event()
        came: list[RequestUpdate] = []
        own = core.next_id()

        def take(update: RequestUpdate) -> None:
            came.append(update._replace(request_id=request.request_id))
            arrived.set()

        core.add([request._replace(request_id=own)], take)
        ended = False
        try:
            while not ended:
                await arrived.wait()
                arrived.clear()
                updates, came[:] = [*came], ()
                ended = updates[-1].finish_reason is not None
                if updates[-1].engine_failed:
                    raise EngineError(updates[-1].error or "the engine failed")
                yield updates
        finally:
            if not ended:
                core.abort((own,))

    async def __del__(self) -> None:
        """Ray calls it when the replica is to end, once its requests have ended or their time is over."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
            self._engines.core.close()
            await self._engines.close()
