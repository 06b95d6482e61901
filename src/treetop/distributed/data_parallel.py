"""Several engines on one machine as one core: each request goes to one of them, and stays there."""

import asyncio
from collections.abc import Sequence

from treetop.core.clients import Sink
from treetop.distributed.client import EngineProcessClient, joined_info, joined_load, num_requests
from treetop.distributed.router import PrefixRouter, ReplicaLoad
from treetop.types.errors import ConfigError, EngineError
from treetop.types.ids import RequestId
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate

_SILENT_S = 4.0
"""An engine says something each second. One that does not hangs, or takes one long step; the other may have time."""


class DataParallelClient:
    """An `EngineClient` over replicas. A request waits for its own replica where that is started again.

    New requests go to the replica that has most of their prefix, unless too many wait there; and to none that is being
    started again, or has been silent for some heartbeats, while another serves. One that is dead for good ends all.
    """

    def __init__(self, replicas: Sequence[EngineProcessClient]) -> None:
        self._replicas = replicas
        self._of: dict[RequestId, int] = {}
        self._router: PrefixRouter[int] = PrefixRouter()

    @property
    def info(self) -> CoreInfo:
        return joined_info([each.info for each in self._replicas])

    @property
    def load(self) -> CoreLoad:
        return joined_load([each.load for each in self._replicas])

    @property
    def failure(self) -> EngineError | None:
        return next((each.failure for each in self._replicas if each.failure is not None), None)

    @property
    def pause(self) -> str | None:
        """Only while no replica serves."""
        pauses = [each.pause for each in self._replicas]
        return None if None in pauses else pauses[0]

    @property
    def is_stalled(self) -> bool:
        return any(each.is_stalled for each in self._replicas)

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self._replicas)

    async def until_failed(self) -> None:
        """Wait until a replica is dead for good."""
        waits = [asyncio.ensure_future(each.until_failed()) for each in self._replicas]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def next_id(self) -> RequestId:
        return self._replicas[0].next_id()

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        def told(update: RequestUpdate) -> None:
            if update.finish_reason is not None:
                self._of.pop(update.request_id, None)
            sink(update)

        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        for request in requests:
            replica = self._of[request.request_id] = self._choose(request)
            self._replicas[replica].add([request], told)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            replica = self._of.pop(request_id, None)
            if replica is not None:
                self._replicas[replica].abort((request_id,))

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        replica = self._of.pop(request_id, None)
        if replica is not None:
            self._replicas[replica].finish(request_id, num_tokens)

    async def update_weights(self, model: str | None, draft: str | None) -> None:
        raise ConfigError(f"update_weights: built for one engine; serve with --dp-size 1, not {len(self._replicas)}")

    def close(self) -> None:
        for each in self._replicas:
            each.close()

    def _choose(self, request: EngineRequest) -> int:
        serving = [index for index, each in enumerate(self._replicas) if each.pause is None]
        serving = [index for index in serving if self._replicas[index].silent_s < _SILENT_S] or serving
        alive: dict[int, ReplicaLoad] = {}
        for index in serving or range(len(self._replicas)):
            each = self._replicas[index]
            waiting = max(each.num_alive, num_requests(each.load))
            alive[index] = ReplicaLoad(waiting, each.info.max_requests, each.info.prefix)
        ids = request.prompt_ids + request.received
        replica = self._router.choose(request.request_id, ids, alive)[0]
        self._router.routed(request.request_id, ids, replica)
        return replica


def one_of(cores: Sequence[EngineProcessClient]) -> EngineProcessClient | DataParallelClient:
    """All of them as one core."""
    return cores[0] if len(cores) == 1 else DataParallelClient(cores)
