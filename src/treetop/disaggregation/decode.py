"""The decode worker's side: attempts by request, prefill workers, and what each slot is doing. Pure.

    free --Pull--> pulling --done, Release--> releasing --ok--> confirmed --Recv--> importing --Imported--> free
                      '--late, failed or given up--> quarantine --no byte can come any more--> free
    free --Pull--> probing --the link has been timed--> free

A transfer cannot be cancelled, so a slot whose transfer was given up stays in quarantine until it has ended. A pull
counts once the prefill worker has confirmed that its slot held what was offered all the while. Chunks are imported in
the order of their tokens. Whatever does not come, or not in time, ends the attempt, and the request goes on locally;
answers to it that come later name an attempt that is no more.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from treetop.disaggregation.events import (
    Connected,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    Log,
    PrefillLocally,
    Pull,
    Pulled,
    Received,
    Send,
)
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout
from treetop.types.kv_transfer.options import Deadlines
from treetop.types.kv_transfer.scheduling import Admitted, Dropped, Imported, Recv
from treetop.types.kv_transfer.transport import PeerId, Probe, State, Way
from treetop.types.kv_transfer.wire import Abort, Offer, Prefill, Refused, Release, Released, Renew, ToDecode, ToPrefill
from treetop.types.requests import KVTransferStats


@dataclass(slots=True, eq=False)
class Attempt:
    """A request that a peer prefills.

    number: no other attempt ever has it.
    received: its tokens before this one are imported, or on the way there.
    offers: not pulled yet, by their first token.
    known: all chunks that were offered, by theirs.
    pulls_s: how long each transfer took.
    late_s: when it is given up without a step forward.
    """

    request_id: RequestId
    number: int
    peer: PeerId
    total: int
    received: int
    late_s: float
    offers: dict[int, Offer] = field(default_factory=dict)
    known: dict[int, KVChunk] = field(default_factory=dict)
    pulls_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RecvSlot:
    """attempt, offer: what it is for, from pulling to confirmed.
    begun_s: of the transfer.
    late_s: when a transfer, or a release, is given up.
    link: that is timed with it.
    """

    state: Literal["free", "probing", "pulling", "releasing", "confirmed", "importing", "quarantine"] = "free"
    attempt: Attempt | None = None
    offer: Offer | None = None
    begun_s: float = 0.0
    late_s: float = 0.0
    link: "Link | None" = None


class Link(NamedTuple):
    """To a prefill worker with so many slots, which is not asked before its link has been timed."""

    peer: PeerId
    num_slots: int
    probe: Probe


@dataclass(slots=True)
class Peer:
    """A prefill worker. last_received_s: its last message.

    renew_s: when it gets the next.
    asked: number of its last attempt.

    way: by which its chunks come.
    """

    num_slots: int
    last_received_s: float
    renew_s: float
    way: Way = "read"
    asked: int = 0


class DecodeMachine:
    """`handle` takes what happens and the time, and returns what is to be done. It owns nothing but numbers.

    peers: prefill workers that are asked.
    attempts: what they still have to bring something for.
    layout: of a chunk on all ranks.
    tokens_per_slot: most tokens of a chunk.
    """

    refuses = None

    def __init__(
        self, num_slots: int, slot_bytes: int, tokens_per_slot: int, layout: ChunkLayout, deadlines: Deadlines
    ) -> None:
        self.slots = [RecvSlot() for _ in range(num_slots)]
        self.attempts: dict[RequestId, Attempt] = {}
        self.peers: dict[PeerId, Peer] = {}
        self._slot_bytes, self._tokens_per_slot, self._layout = slot_bytes, tokens_per_slot, layout
        self._deadlines, self._numbers = deadlines, count(1)
        self._effects: list[Effect] = []
        self._load = KVTransferStats(mode="decode")
        self._now = 0.0
        self._clogged_s: float | None = None

    @property
    def asks(self) -> bool:
        """Whether requests are to be prefilled elsewhere."""
        return bool(self.peers) and not self._clogged

    @property
    def stuck(self) -> str | None:
        """Why the worker should be started anew: slots have been in quarantine for longer than a request waits."""
        if self._clogged_s is None or self._now - self._clogged_s < self._deadlines.progress_s:
            return None
        return "more than half of the landing slots wait for transfers that do not end"

    @property
    def active(self) -> bool:
        """Whether something is waited for."""
        return bool(self.attempts) or any(s.state in ("probing", "pulling", "quarantine") for s in self.slots)

    @property
    def load(self) -> KVTransferStats:
        return self._load._replace(
            num_peers=len(self.peers),
            num_requests_in_flight=len(self.attempts),
            num_slots_busy=sum(slot.state != "free" for slot in self.slots),
            num_slots_quarantined=sum(slot.state == "quarantine" for slot in self.slots),
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Admitted():
                self._ask(event, now)
            case Received(peer, message):
                self._received(peer, message, now)
            case Pulled(slot, state):
                self._pulled(slot, state, now)
            case Imported(_, slot):
                assert self.slots[slot].state == "importing"
                self.slots[slot] = RecvSlot()
            case Dropped(request_id):
                if (attempt := self.attempts.get(request_id)) is not None:
                    self._give_up(attempt, None)
            case Connected(peer, metadata):
                self._connected(peer, metadata.num_slots, now)
            case Disconnected(peer):
                self._peer_down(peer, "the prefill worker has gone")
            case _:
                pass  # time has passed
        self._expire(now)
        self._pull(now)
        effects, self._effects = self._effects, []
        return effects

    # ---------------------------------------------------------------- attempts

    def _ask(self, asked: Admitted, now: float) -> None:
        if (before := self.attempts.get(asked.request_id)) is not None:
            self._give_up(before, None)
        if self._clogged:
            return self._locally(asked.request_id, "more than half of the landing slots are in quarantine")
        if not self.peers:
            return self._locally(asked.request_id, "no prefill worker is there")
        busy = [each.peer for each in self.attempts.values()]
        peer = min(self.peers, key=lambda each: (busy.count(each), self.peers[each].asked))
        number = self.peers[peer].asked = next(self._numbers)
        attempt = Attempt(asked.request_id, number, peer, len(asked.prompt.ids), asked.start, self._latest(now))
        self.attempts[asked.request_id] = attempt
        return self._send(peer, Prefill(asked.request_id, number, asked.start, asked.prompt, self._tokens_per_slot))

    def _received(self, peer: PeerId, message: ToPrefill | ToDecode, now: float) -> None:
        if peer not in self.peers:
            return
        self.peers[peer].last_received_s = now
        if not isinstance(message, Offer | Released | Refused):
            return
        attempt = self.attempts.get(RequestId(message.request))
        if attempt is None or attempt.number != message.attempt or attempt.peer != peer:
            if isinstance(message, Offer):  # its slots are free at once
                self._send(peer, Abort(message.request, message.attempt))
            return
        if isinstance(message, Offer):
            self._offered(attempt, message, now)
        elif isinstance(message, Released):
            self._released(attempt, message, now)
        else:
            self._give_up(attempt, f"the prefill worker refused: {message.reason}")

    def _offered(self, attempt: Attempt, offer: Offer, now: float) -> None:
        chunk = offer.chunk
        if attempt.known.get(chunk.start) == chunk:  # it came twice
            return
        if not self._possible(attempt, offer):
            self._give_up(attempt, f"it was offered what cannot be: {chunk}")
            return
        attempt.known[chunk.start] = chunk
        attempt.offers[chunk.start] = offer
        attempt.late_s = self._latest(now)
        if chunk.last:  # prefill is over: what has been transferred by now, it has hidden
            under_way = [slot for slot in self.slots if slot.state == "pulling" and slot.attempt is attempt]
            overlapped_time_seconds = sum(attempt.pulls_s) + sum(now - slot.begun_s for slot in under_way)
            self._load = self._load._replace(
                overlapped_time_seconds=self._load.overlapped_time_seconds + overlapped_time_seconds
            )

    def _possible(self, attempt: Attempt, offer: Offer) -> bool:
        """Whether an offer is of this attempt's tokens, in a slot of its peer, and of none that were offered before."""
        chunk = offer.chunk
        fits = 0 < chunk.count <= self._tokens_per_slot and attempt.received <= chunk.start < chunk.end <= attempt.total
        return (
            fits
            and chunk.total == attempt.total
            and all(chunk.end <= each.start or each.end <= chunk.start for each in attempt.known.values())
            and chunk.last == (offer.first is not None)
            and 0 <= offer.ref.slot < self.peers[attempt.peer].num_slots
            and len(offer.checksums) == len(self._layout.segments(chunk))
        )

    def _released(self, attempt: Attempt, released: Released, now: float) -> None:
        for slot in self.slots:
            mine = slot.attempt is attempt and slot.offer is not None and slot.offer.ref == released.ref
            if mine and slot.state == "releasing":
                if not released.ok:
                    self._give_up(attempt, "a slot had been used again before it was released")
                    return
                slot.state = "confirmed"
                attempt.late_s = self._latest(now)
                self._recv(attempt)
                return

    def _recv(self, attempt: Attempt) -> None:
        """Hand over what is confirmed, in order; with its last chunk the attempt is over."""
        ready = {s.offer.chunk.start: i for i, s in enumerate(self.slots) if is_ready(s, attempt) and s.offer}
        while (index := ready.get(attempt.received)) is not None:
            offer = self.slots[index].offer
            assert offer is not None
            self.slots[index] = RecvSlot("importing")
            attempt.received = offer.chunk.end
            self._effects.append(Recv(attempt.request_id, index, offer.chunk, offer.checksums, offer.first))
            if offer.chunk.last:
                del self.attempts[attempt.request_id]
                self._load = self._load._replace(num_requests_done=self._load.num_requests_done + 1)
                return

    def _give_up(self, attempt: Attempt, reason: str | None) -> None:
        """End an attempt. reason: why the request goes on locally; None if it does not."""
        if self.attempts.get(attempt.request_id) is not attempt:
            return
        del self.attempts[attempt.request_id]
        for index, slot in enumerate(self.slots):
            if slot.attempt is attempt:
                self.slots[index] = RecvSlot(after_giving_up(slot))
        self._send(attempt.peer, Abort(attempt.request_id, attempt.number))
        if reason is not None:
            self._locally(attempt.request_id, reason)

    def _locally(self, request_id: RequestId, reason: str) -> None:
        self._load = self._load._replace(num_local_prefills=self._load.num_local_prefills + 1)
        self._effects.append(PrefillLocally(request_id, reason))

    # ---------------------------------------------------------------- transfers

    def _pull(self, now: float) -> None:
        """Give free slots to offers: attempts in their order, tokens in theirs."""
        free = [i for i, slot in enumerate(self.slots) if slot.state == "free"]
        for attempt in self.attempts.values():
            while free and attempt.offers:
                offer, index = attempt.offers.pop(min(attempt.offers)), free.pop(0)
                self.slots[index] = RecvSlot("pulling", attempt, offer, now, now + self._deadlines.pull_s)
                way = self.peers[attempt.peer].way
                self._effects.append(Pull(index, attempt.peer, offer.ref.slot, offer.chunk, way))

    def _pulled(self, index: int, state: State, now: float) -> None:
        slot = self.slots[index]
        attempt, offer = slot.attempt, slot.offer
        ended = state in ("done", "failed")
        if slot.link is not None:
            if ended:
                slot.link.probe.ended(state == "done", now)
                self._probe(index, slot.link, now)
        elif attempt is None or offer is None:  # it was given up
            if slot.state == "quarantine" and ended:
                self.slots[index] = RecvSlot()
        elif state == "done":
            slot.state, slot.late_s = "releasing", now + self._deadlines.pull_s
            attempt.late_s = self._latest(now)
            self._count(attempt, offer.chunk, now - slot.begun_s)
            self._send(attempt.peer, Release(attempt.request_id, attempt.number, offer.ref))
        elif state != "busy":
            if ended:
                self.slots[index] = RecvSlot()
            self._give_up(attempt, "a transfer failed")

    def _count(self, attempt: Attempt, chunk: KVChunk, took_s: float) -> None:
        load = self._load
        attempt.pulls_s.append(took_s)
        self._load = load._replace(
            num_chunks=load.num_chunks + 1,
            num_bytes=load.num_bytes + self._layout.num_bytes(chunk),
            time_seconds=load.time_seconds + took_s,
        )

    # ---------------------------------------------------------------- prefill workers

    def _connected(self, peer: PeerId, num_slots: int, now: float) -> None:
        """Time the link, if a slot is free and no transfer hangs; only then requests go there."""
        states = [slot.state for slot in self.slots]
        if "quarantine" in states or "free" not in states:
            self.peers[peer] = Peer(num_slots, now, now)
            return
        index = states.index("free")
        self._probe(index, Link(peer, num_slots, Probe(self._slot_bytes)), now)

    def _probe(self, index: int, link: Link, now: float) -> None:
        """Begin the next transfer, or take the faster way."""
        way = link.probe.begin(now)
        if way is not None:
            self.slots[index] = RecvSlot("probing", late_s=now + self._deadlines.pull_s, link=link)
            self._effects.append(Pull(index, link.peer, 0, None, way))
            return
        self.slots[index] = RecvSlot()
        self._probed(link, now)

    def _probed(self, link: Link, now: float) -> None:
        gbps, best = link.probe.gbps, link.probe.best
        speeds = ", ".join(f"{way} {speed:.2f} GB/s" for way, speed in gbps.items())
        self._effects.append(
            Log(f"KV transfers from a prefill worker: {speeds or ('too fast to time' if best else 'none works')}")
        )
        if best is None:
            self._effects.append(Disconnect(link.peer))
            return
        self.peers[link.peer] = Peer(link.num_slots, now, now, best)
        read_gb_s, write_gb_s = gbps.get("read", 0.0), gbps.get("write", 0.0)
        self._load = self._load._replace(read_gb_s=read_gb_s, write_gb_s=write_gb_s)

    def _peer_down(self, peer: PeerId, reason: str) -> None:
        self.peers.pop(peer, None)
        for index, slot in enumerate(self.slots):
            if slot.link is not None and slot.link.peer == peer:
                self.slots[index] = RecvSlot("quarantine")
        for attempt in [each for each in self.attempts.values() if each.peer == peer]:
            self._give_up(attempt, reason)

    def _expire(self, now: float) -> None:
        """What is late is given up, who is silent dropped, and who is to hear from here does."""
        for peer, each in [*self.peers.items()]:
            if now - each.last_received_s > self._deadlines.lease_s:
                self._peer_down(peer, "the prefill worker was silent")
                self._effects.append(Disconnect(peer))
            elif now >= each.renew_s:
                each.renew_s = now + self._deadlines.renew_s
                mine = [(a.request_id, a.number) for a in self.attempts.values() if a.peer == peer]
                self._send(peer, Renew(tuple(mine)))
        for index, slot in enumerate(self.slots):
            if slot.late_s > now:
                continue
            if slot.link is not None:
                self.slots[index] = RecvSlot("quarantine")
                self._probed(slot.link, now)
            elif slot.state in ("pulling", "releasing") and slot.attempt is not None:
                what = "a transfer" if slot.state == "pulling" else "the answer to a release"
                self._give_up(slot.attempt, f"{what} took longer than {self._deadlines.pull_s:g} s")
        for attempt in [each for each in self.attempts.values() if each.late_s <= now]:
            self._give_up(attempt, f"nothing came for {self._deadlines.progress_s:g} s")
        self._now = now
        if not self._clogged:
            self._clogged_s = None
        elif self._clogged_s is None:
            self._clogged_s = now

    @property
    def _clogged(self) -> bool:
        """More than half of the slots wait for transfers that do not end."""
        return 2 * sum(slot.state == "quarantine" for slot in self.slots) > len(self.slots)

    def _send(self, peer: PeerId, message: ToPrefill) -> None:
        if peer in self.peers:
            self._effects.append(Send(peer, message))

    def _latest(self, now: float) -> float:
        return now + self._deadlines.progress_s


def is_ready(slot: RecvSlot, attempt: Attempt) -> bool:
    """Whether what it holds may be imported for this attempt."""
    return slot.state == "confirmed" and slot.attempt is attempt


def after_giving_up(slot: RecvSlot) -> Literal["free", "quarantine"]:
    """What becomes of a slot whose attempt is over: a transfer into it goes on, and cannot be stopped (nixl-2067)."""
    return "quarantine" if slot.state == "pulling" else "free"
