"""A decode worker: has requests prefilled by others, and prefills them itself where that fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from treetop.core.roles.links import Links
from treetop.core.roles.role import IDLE_MS, LATER_MS, Staging, metadata_of
from treetop.scheduler.scheduler import Scheduler
from treetop.transfer.desk_decode import DecodeDesk
from treetop.transfer.events import (
    Ask,
    Deadlines,
    DecodeAction,
    DropPeer,
    Ended,
    HeardByDecode,
    Land,
    PeerDown,
    PeerId,
    PeerUp,
    PrefillLocally,
    Pull,
    Pulled,
    SendToPrefill,
    Tick,
    ToDecodeDesk,
)
from treetop.transfer.network import Caller, Down, FromPrefill, Refused, Up
from treetop.transfer.transport import Handle, Probe
from treetop.transfer.wire import Offer, Prompt, Renew
from treetop.transfer.wire import Refused as AttemptRefused
from treetop.types.handover import Admitted, Gone, Piece
from treetop.types.ids import RequestId
from treetop.types.requests import HandoverLoad

log = logging.getLogger("treetop.core")


@dataclass(slots=True)
class _Moving:
    """A transfer into a landing slot. broken: the desk knows that it will not be whole."""

    handle: Handle
    request_id: RequestId
    num_bytes: int
    begun_s: float
    broken: bool = False


@dataclass(slots=True)
class _Meeting:
    """A prefill worker whose link is being tried. slot: the landing slot that this takes."""

    probe: Probe
    slot: int
    chosen: bool = False


class DecodeRole:
    """Has requests prefilled by others, and by itself where that fails. find: addresses of prefill workers, now."""

    refuses = None

    def __init__(
        self,
        scheduler: Scheduler,
        staging: Staging,
        links: Links,
        caller: Caller,
        deadlines: Deadlines,
        find: Callable[[], Sequence[str]],
    ) -> None:
        self._scheduler, self._staging, self._links, self._caller = scheduler, staging, links, caller
        self._deadlines, self._find, self._found_s = deadlines, find, float("-inf")
        self._desk = DecodeDesk(staging.num_slots, staging.tokens_per_slot, deadlines)
        self._moving: dict[int, _Moving] = {}
        self._meetings: dict[PeerId, _Meeting] = {}
        self._num_slots: dict[PeerId, int] = {}
        self._said: dict[str, str] = {}
        self._load = HandoverLoad(role="decode")
        self._times: dict[RequestId, list[tuple[float, float]]] = {}
        self._now = 0.0
        self._stuck_s: float | None = None

    @property
    def asks(self) -> bool:
        return bool(self._desk.peers) and not self._desk.stuck

    @property
    def stuck(self) -> str | None:
        """For longer than a request waits, so not while a link is tried."""
        if self._stuck_s is None or self._now - self._stuck_s < self._deadlines.progress_s:
            return None
        return "more than half of the landing slots wait for transfers that do not end"

    @property
    def wait_ms(self) -> int:
        if self._scheduler.handover.has_events:
            return 0
        if self._moving or self._meetings:
            return self._links.wait_ms
        return LATER_MS if self._desk.attempts else IDLE_MS

    @property
    def load(self) -> HandoverLoad:
        return self._load._replace(
            num_peers=len(self._desk.peers),
            num_open=len(self._desk.attempts),
            num_slots_busy=sum(slot.state != "free" for slot in self._desk.slots),
            num_quarantined=sum(slot.state == "quarantine" for slot in self._desk.slots),
        )

    def sockets(self) -> Sequence[Any]:
        return self._caller.sockets()

    def poll(self, now: float) -> None:
        if now - self._found_s >= 1.0:
            self._found_s = now
            self._caller.look_for(self._find())
        for event in self._caller.poll(now):
            self._network(event, now)
        self._links.progress()
        self._probe(now)
        self._follow(now)
        for happened in self._scheduler.handover.take_events():
            self._scheduled(happened, now)
        self._tell(Tick(), now)
        self._now = now
        if not self._desk.stuck:
            self._stuck_s = None
        elif self._stuck_s is None:
            self._stuck_s = now

    def close(self) -> None:
        self._caller.close()
        self._links.close()

    # ---------------------------------------------------------------- what happens

    def _network(self, event: Up | Down | Refused | FromPrefill, now: float) -> None:
        match event:
            case Up(peer, place, metadata):
                told = metadata_of(metadata)
                if told is None or not self._links.connect(peer, told.transports):
                    self._say(place, "its memory cannot be reached")
                    self._caller.hang_up(peer, now)
                    return
                self._num_slots[peer] = told.num_slots
                self._caller.send(peer, Renew(()))  # with its first message the session begins over there, too
                self._meet(peer, now)
                self._say(place, "connected")
            case Down(peer, place):
                self._say(place, "the session has ended")
                self._links.disconnect(peer)
                self._num_slots.pop(peer, None)
                if (meeting := self._meetings.get(peer)) is not None:
                    meeting.chosen = True  # by nobody: only its slot is waited for
                self._tell(PeerDown(peer), now)
            case Refused(place, reason):
                self._say(place, reason)
            case FromPrefill(peer, message):
                if isinstance(message, Offer):
                    self._count_offer(message, now)
                    if not self._possible(peer, message):
                        message = AttemptRefused(message.request, message.attempt, "what it offers cannot be")
                self._tell(HeardByDecode(peer, message), now)

    def _possible(self, peer: PeerId, offer: Offer) -> bool:
        piece = offer.piece
        if not 0 <= offer.ref.slot < self._num_slots.get(peer, 0) or not 0 <= piece.start < piece.end <= piece.total:
            return False
        return len(offer.checksums) == len(self._staging.whole.stretches(piece))

    def _scheduled(self, event: Any, now: float) -> None:
        if isinstance(event, Admitted):
            request = self._scheduler.queues.by_id.get(event.request_id)
            if request is not None:
                prompt = Prompt(request.ids, request.params, request.seed)
                self._times[event.request_id] = []
                self._tell(Ask(event.request_id, event.start, prompt), now)
            return
        if isinstance(event, Gone):
            self._times.pop(event.request_id, None)
        self._tell(event, now)

    def _tell(self, event: ToDecodeDesk, now: float) -> None:
        for action in self._desk.handle(event, now):
            self._do(action, now)

    def _do(self, action: DecodeAction, now: float) -> None:
        match action:
            case SendToPrefill(peer, message):
                self._caller.send(peer, message)
            case Pull(slot, peer, remote_slot, piece):
                self._pull(slot, peer, remote_slot, piece, now)
            case Land(request_id, slot, piece, checksums, first):
                self._load = self._load._replace(num_whole=self._load.num_whole + piece.last)
                self._scheduler.handover.landed(request_id, slot, piece, checksums, first)
            case PrefillLocally(request_id, reason):
                log.warning("request %d is prefilled here: %s", request_id, reason)
                self._load = self._load._replace(num_local=self._load.num_local + 1)
                self._times.pop(request_id, None)
                self._scheduler.handover.prefill_locally(request_id)
            case DropPeer(peer):
                self._caller.hang_up(peer, now)

    # ---------------------------------------------------------------- transfers

    def _pull(self, slot: int, peer: PeerId, remote_slot: int, piece: Piece, now: float) -> None:
        num_bytes = self._staging.whole.num_bytes(piece)
        attempt = self._desk.slots[slot].attempt
        assert attempt is not None
        handle = self._links.pull(peer, remote_slot, slot, piece)
        self._moving[slot] = _Moving(handle, attempt.request_id, num_bytes, now)

    def _follow(self, now: float) -> None:
        """See what has become of transfers."""
        for slot, moving in [*self._moving.items()]:
            state = self._links.poll(moving.handle)
            if state == "busy" or (state == "broken" and moving.broken):
                continue
            if state == "broken":
                moving.broken = True
                self._tell(Pulled(slot, whole=False, ended=False), now)
                continue
            del self._moving[slot]
            whole = state == "done" and not moving.broken
            if whole:
                self._count_pull(moving, now)
            self._tell(Pulled(slot, whole, ended=True), now)

    def _meet(self, peer: PeerId, now: float) -> None:
        """Try the link, if a landing slot is free for that; only then requests go there."""
        late = any(meeting.chosen for meeting in self._meetings.values())  # a try has not ended: no more of them
        slot = None if late else self._desk.lend()
        if slot is None:
            self._tell(PeerUp(peer), now)
            return
        begin = partial(self._links.pull, peer, 0, slot, None)
        probe = Probe(begin, self._links.poll, self._staging.slot_bytes, self._deadlines.pull_s)
        self._meetings[peer] = _Meeting(probe, slot)

    def _probe(self, now: float) -> None:
        for peer, meeting in [*self._meetings.items()]:
            if not meeting.chosen and meeting.probe.step(now):
                meeting.chosen = True
                speeds = ", ".join(f"{way} {gbps:.2f} GB/s" for way, gbps in meeting.probe.gbps.items())
                log.info("transfers over %s: %s", self._links.name, speeds or "none works")
                if meeting.probe.best is not None:
                    self._links.way[peer] = meeting.probe.best
                    self._load = self._load._replace(
                        read_gbps=meeting.probe.gbps.get("read", 0.0), write_gbps=meeting.probe.gbps.get("write", 0.0)
                    )
                    self._tell(PeerUp(peer), now)
                else:
                    self._caller.hang_up(peer, now)
            if meeting.chosen and meeting.probe.has_ended():
                del self._meetings[peer]
                self._tell(Ended(meeting.slot), now)

    # ---------------------------------------------------------------- words and numbers

    def _count_pull(self, moving: _Moving, now: float) -> None:
        load, spans = self._load, self._times.get(moving.request_id)
        self._load = load._replace(
            num_pieces=load.num_pieces + 1,
            num_bytes=load.num_bytes + moving.num_bytes,
            transfer_s=load.transfer_s + now - moving.begun_s,
        )
        if spans is not None:
            spans.append((moving.begun_s, now))

    def _count_offer(self, offer: Offer, now: float) -> None:
        """With the last offer prefill is over: what has been transferred by then, it has hidden."""
        if offer.first is not None:
            request_id = RequestId(offer.request)
            hidden_s = sum(end - begun for begun, end in self._times.pop(request_id, []))
            under_way = [m.begun_s for m in self._moving.values() if m.request_id == request_id]
            hidden_s += sum(now - begun_s for begun_s in under_way)
            self._load = self._load._replace(hidden_s=self._load.hidden_s + hidden_s)

    def _say(self, place: str, words: str) -> None:
        """In the log, once until it is something else."""
        if self._said.get(place) != words:
            self._said[place] = words
            log.warning("prefill worker %s: %s", place.removeprefix("tcp://"), words)
