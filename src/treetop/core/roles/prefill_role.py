"""A prefill worker: computes what decode workers ask for, and offers it to them."""

import logging
from collections.abc import Sequence
from typing import Any

from treetop.core.roles.links import Links
from treetop.core.roles.role import IDLE_MS, Staging, metadata_of
from treetop.scheduler.scheduler import Scheduler
from treetop.transfer.desk_prefill import PrefillDesk
from treetop.transfer.events import (
    Cancel,
    Deadlines,
    Finish,
    HeardByPrefill,
    Pack,
    PeerDown,
    PeerId,
    PrefillAction,
    SendToDecode,
    Start,
    Tick,
    ToPrefillDesk,
)
from treetop.transfer.network import Down, FromDecode, Reception, Up
from treetop.transfer.registry import Registry
from treetop.transfer.wire import Offer
from treetop.types.errors import InputError, UserError
from treetop.types.handover import Gone
from treetop.types.requests import EngineRequest, HandoverLoad

log = logging.getLogger("treetop.core")


class PrefillRole:
    """Computes what decode workers ask for, and offers it to them. registry: where it says that, under `address`."""

    asks, stuck = False, None
    refuses = "this worker prefills for others (--role prefill) and serves no requests: ask a decode worker"

    def __init__(
        self,
        scheduler: Scheduler,
        staging: Staging,
        links: Links,
        reception: Reception,
        deadlines: Deadlines,
        registry: Registry | None = None,
        address: str = "",
    ) -> None:
        self._scheduler, self._links, self._reception = scheduler, links, reception
        self._desk = PrefillDesk(staging.num_slots, staging.tokens_per_slot, deadlines)
        self._payload, self._renew_s = staging.whole, deadlines.renew_s
        self._vocab_size = staging.schema.vocab_size
        self._registry, self._address, self._announced_s = registry, address, float("-inf")
        self._peers: set[PeerId] = set()
        self._pieces = self._bytes = self._requests = 0

    @property
    def wait_ms(self) -> int:
        if self._scheduler.handover.has_events:
            return 0
        return self._links.wait_ms if self._peers else IDLE_MS

    @property
    def load(self) -> HandoverLoad:
        return HandoverLoad(
            role="prefill",
            num_peers=len(self._peers),
            num_open=len(self._desk.exports),
            num_slots_busy=sum(slot.state != "free" for slot in self._desk.slots),
            num_pieces=self._pieces,
            num_bytes=self._bytes,
            num_whole=self._requests,
            num_dropped=self._reception.num_dropped,
        )

    def sockets(self) -> Sequence[Any]:
        return self._reception.sockets()

    def poll(self, now: float) -> None:
        if self._registry is not None and now - self._announced_s >= self._renew_s:
            self._announced_s = now
            self._registry.announce(self._address)
        for event in self._reception.poll(now):
            match event:
                case Up(peer, _, metadata):
                    self._peers.add(peer)
                    log.info("a decode worker has come: %d are here", len(self._peers))
                    told = metadata_of(metadata)
                    if told is not None:
                        self._links.connect(peer, told.transports)
                case Down(peer):
                    self._peers.discard(peer)
                    log.info("a decode worker has gone: %d are here", len(self._peers))
                    self._links.disconnect(peer)
                    self._tell(PeerDown(peer), now)
                case FromDecode(peer, message):
                    self._tell(HeardByPrefill(peer, message), now)
        for happened in self._scheduler.handover.take_events():
            assert isinstance(happened, ToPrefillDesk)
            self._tell(happened, now)
        self._tell(Tick(), now)
        self._links.progress()

    def close(self) -> None:
        self._reception.close()
        self._links.close()

    def _tell(self, event: ToPrefillDesk, now: float) -> None:
        for action in self._desk.handle(event, now):
            self._do(action, now)

    def _do(self, action: PrefillAction, now: float) -> None:
        match action:
            case SendToDecode(peer, message):
                if isinstance(message, Offer):
                    self._pieces += 1
                    self._bytes += self._payload.num_bytes(message.piece)
                self._reception.send(peer, message)
            case Start(request_id, start, prompt):
                asked = EngineRequest(request_id, prompt.ids, prompt.params, prompt.seed)
                try:
                    if not all(0 <= token < self._vocab_size for token in prompt.ids):
                        raise InputError(f"a prompt has tokens outside the vocabulary of {self._vocab_size}")
                    self._scheduler.add(asked, export_from=start)
                except UserError as error:
                    log.warning("a decode worker asked for what cannot be prefilled here: %s", error)
                    self._tell(Gone(request_id), now)
            case Pack(request_id, slot, piece):
                self._scheduler.handover.export(request_id, slot, piece)
            case Finish(request_id):
                self._requests += 1
                self._scheduler.finish_export(request_id)
            case Cancel(request_id):
                self._scheduler.abort(request_id)
