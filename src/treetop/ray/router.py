"""`PrefixRouter` behind the interface of Ray Serve's request routers."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from treetop.core.clients import EngineClient
from treetop.distributed.router import PrefixRouter, ReplicaLoad
from treetop.types.errors import CheckError
from treetop.types.requests import CoreInfo, EngineRequest, PrefixPages


def told_of(info: CoreInfo) -> dict[str, Any]:
    """What a replica tells routers of itself once, in JSON."""
    return {"max_requests": info.max_requests, "prefix": None if info.prefix is None else list(info.prefix)}


def standing_of(core: EngineClient) -> dict[str, Any]:
    """What a replica tells routers again and again. refuses: why it serves nobody at the moment, "" if it does."""
    return {"refuses": core.info.refuses_now or core.pause or ""}


class PrefixRequestRouter(RequestRouter):
    """Ray says which replicas are alive and how many requests each has, and asks here which of them it should be.

    A request is what `Replica.generate` is called with. It goes to no replica that says its engine refuses all,
    restarts or hangs, while another serves; where none does, the answer is that one's, such as 503. Other calls go to
    whom Ray likes.
    """

    def initialize_state(self, queue_bound: int | None = None) -> None:
        """queue_bound: see `PrefixRouter`."""
        self._prefix: PrefixRouter[ReplicaID] = PrefixRouter(queue_bound)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first."""
        asked = _asked(pending_request)
        if asked is None or pending_request is None:
            return [candidate_replicas]
        serving = [each for each in candidate_replicas if not (each.routing_stats or {}).get("refuses")]
        by_id = {replica.replica_id: replica for replica in serving or candidate_replicas}
        alive = {name: self._standing(replica) for name, replica in by_id.items()}
        try:
            order = self._prefix.choose(pending_request.metadata.internal_request_id, _ids(asked), alive)
        except CheckError as error:  # a bug: whoever waits for the request is told, instead of waiting for ever
            if not pending_request.future.done():
                pending_request.future.set_exception(error)
            return []
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked = _asked(pending_request)
        if asked is not None:
            self._prefix.routed(pending_request.metadata.internal_request_id, _ids(asked), replica_id)

    def _standing(self, replica: RunningReplica) -> ReplicaLoad:
        metadata = replica.replica_metadata
        prefix = metadata.get("prefix")
        num_requests = self.replica_queue_len_cache.get(replica.replica_id) or 0
        maximum = metadata.get("max_requests", replica.max_ongoing_requests)
        return ReplicaLoad(num_requests, maximum, None if prefix is None else PrefixPages(*prefix))


def _asked(pending: PendingRequest | None) -> EngineRequest | None:
    arguments: Sequence[Any] = () if pending is None else pending.args
    return arguments[0] if arguments and isinstance(arguments[0], EngineRequest) else None


def _ids(asked: EngineRequest) -> Sequence[int]:
    return asked.prompt_ids + asked.received
