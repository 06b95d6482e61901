"""The decode worker's desk: attempts by request, and what each landing slot is doing.

    free --Pull--> pulling --all there, Release--> asked --ok--> confirmed --Land--> importing --Imported--> free
                      '--late, failed or given up--> quarantine --no byte can come any more--> free

A transfer cannot be cancelled, so a slot whose transfer was given up stays in quarantine until it has ended. A pull
counts once the prefill worker has confirmed that its slot held what was offered all the while. Pieces are imported in
the order of their tokens. Whatever does not come, or not in time, ends the attempt, and the request goes on locally;
answers to it that come later name an attempt that is no more.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

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
from treetop.transfer.wire import Abort, Offer, Prefill, Refused, Release, Released, Renew, Renewed, ToDecode
from treetop.types.handover import Gone, Imported, Piece
from treetop.types.ids import RequestId


@dataclass(slots=True, eq=False)
class Attempt:
    """A request that a peer prefills. number: no other attempt ever has it.

    landed: its tokens before this one are imported, or on the way there. offers: not pulled yet, by their first token.
    known: all pieces that were offered, by their first token. late_s: when it is given up without a step forward.
    """

    request_id: RequestId
    number: int
    peer: PeerId
    total: int
    landed: int
    late_s: float
    offers: dict[int, Offer] = field(default_factory=dict)
    known: dict[int, Piece] = field(default_factory=dict)


@dataclass(slots=True)
class LandingSlot:
    """attempt, offer: what it is for, from pulling to confirmed. late_s: when a transfer, or a release, is given up."""

    state: Literal["free", "pulling", "asked", "confirmed", "importing", "quarantine"] = "free"
    attempt: Attempt | None = None
    offer: Offer | None = None
    late_s: float = 0.0


@dataclass(slots=True)
class Peer:
    """heard_s: its last word. renew_s: when it gets the next. asked: number of the last attempt that it was given."""

    heard_s: float
    renew_s: float
    asked: int = 0


class DecodeDesk:
    """`handle` takes what happens and the time, and returns what is to be done. It owns nothing but numbers.

    tokens_per_slot: most tokens of a piece. attempts: what a peer still has to bring something for.
    """

    def __init__(self, num_slots: int, tokens_per_slot: int, deadlines: Deadlines) -> None:
        self.slots = [LandingSlot() for _ in range(num_slots)]
        self.attempts: dict[RequestId, Attempt] = {}
        self.peers: dict[PeerId, Peer] = {}
        self._tokens_per_slot, self._deadlines, self._numbers = tokens_per_slot, deadlines, count(1)
        self._actions: list[DecodeAction] = []

    @property
    def stuck(self) -> bool:
        """More than half of the slots wait for transfers that do not end."""
        return 2 * sum(slot.state == "quarantine" for slot in self.slots) > len(self.slots)

    def lend(self) -> int | None:
        """A free slot, to try a link with, which is in quarantine until `Ended`; None if there is none."""
        index = next((i for i, slot in enumerate(self.slots) if slot.state == "free"), None)
        if index is not None:
            self.slots[index] = LandingSlot("quarantine")
        return index

    def handle(self, event: ToDecodeDesk, now: float) -> list[DecodeAction]:
        match event:
            case Ask():
                self._ask(event, now)
            case HeardByDecode(peer, message):
                self._heard(peer, message, now)
            case Pulled(slot, whole, ended):
                self._pulled(slot, whole, ended, now)
            case Ended(slot):
                if self.slots[slot].state == "quarantine":
                    self.slots[slot] = LandingSlot()
            case Imported(_, slot):
                assert self.slots[slot].state == "importing"
                self.slots[slot] = LandingSlot()
            case Gone(request_id):
                if (attempt := self.attempts.get(request_id)) is not None:
                    self._give_up(attempt, None)
            case PeerUp(peer):
                self.peers[peer] = Peer(now, now)
            case PeerDown(peer):
                self._peer_down(peer, "the prefill worker has gone")
            case Tick():
                pass
        self._expire(now)
        self._pull(now)
        actions, self._actions = self._actions, []
        return actions

    def _ask(self, asked: Ask, now: float) -> None:
        if (before := self.attempts.get(asked.request_id)) is not None:
            self._give_up(before, None)
        if self.stuck:
            return self._locally(asked.request_id, "more than half of the landing slots are in quarantine")
        if not self.peers:
            return self._locally(asked.request_id, "no prefill worker is there")
        busy = [each.peer for each in self.attempts.values()]
        peer = min(self.peers, key=lambda each: (busy.count(each), self.peers[each].asked))
        number = self.peers[peer].asked = next(self._numbers)
        attempt = Attempt(asked.request_id, number, peer, len(asked.prompt.ids), asked.start, self._latest(now))
        self.attempts[asked.request_id] = attempt
        most = self._tokens_per_slot
        return self._say(peer, Prefill(asked.request_id, number, asked.start, asked.prompt, most))

    def _heard(self, peer: PeerId, message: ToDecode, now: float) -> None:
        if peer not in self.peers:
            return
        self.peers[peer].heard_s = now
        if isinstance(message, Renewed):
            return
        attempt = self.attempts.get(RequestId(message.request))
        if attempt is None or attempt.number != message.attempt or attempt.peer != peer:
            if isinstance(message, Offer):  # its slots are free at once
                self._say(peer, Abort(message.request, message.attempt))
            return
        match message:
            case Offer():
                self._offered(attempt, message, now)
            case Released():
                self._released(attempt, message, now)
            case Refused(_, _, reason):
                self._give_up(attempt, f"the prefill worker refused: {reason}")

    def _offered(self, attempt: Attempt, offer: Offer, now: float) -> None:
        piece = offer.piece
        if attempt.known.get(piece.start) == piece:  # it came twice
            return
        fits = 0 < piece.count <= self._tokens_per_slot and attempt.landed <= piece.start < piece.end <= attempt.total
        apart = all(piece.end <= each.start or each.end <= piece.start for each in attempt.known.values())
        if not (fits and apart) or piece.total != attempt.total or piece.last != (offer.first is not None):
            self._give_up(attempt, f"it was offered what it cannot be: {piece}")
            return
        attempt.known[piece.start] = piece
        attempt.offers[piece.start] = offer
        attempt.late_s = self._latest(now)

    def _pull(self, now: float) -> None:
        """Give free slots to offers: attempts in their order, tokens in theirs."""
        free = [i for i, slot in enumerate(self.slots) if slot.state == "free"]
        for attempt in self.attempts.values():
            while free and attempt.offers:
                offer, index = attempt.offers.pop(min(attempt.offers)), free.pop(0)
                self.slots[index] = LandingSlot("pulling", attempt, offer, now + self._deadlines.pull_s)
                self._actions.append(Pull(index, attempt.peer, offer.ref.slot, offer.piece))

    def _pulled(self, index: int, whole: bool, ended: bool, now: float) -> None:
        slot = self.slots[index]
        attempt, offer = slot.attempt, slot.offer
        if slot.state != "pulling" or attempt is None or offer is None:  # it was given up
            if slot.state == "quarantine" and ended:
                self.slots[index] = LandingSlot()
            return
        if whole:
            slot.state, slot.late_s = "asked", now + self._deadlines.pull_s
            attempt.late_s = self._latest(now)
            self._say(attempt.peer, Release(attempt.request_id, attempt.number, offer.ref))
            return
        if ended:
            self.slots[index] = LandingSlot()
        self._give_up(attempt, "a transfer failed")

    def _released(self, attempt: Attempt, released: Released, now: float) -> None:
        for slot in self.slots:
            mine = slot.attempt is attempt and slot.offer is not None and slot.offer.ref == released.ref
            if mine and slot.state == "asked":
                if not released.ok:
                    self._give_up(attempt, "a slot had been used again before it was released")
                    return
                slot.state = "confirmed"
                attempt.late_s = self._latest(now)
                self._land(attempt)
                return

    def _land(self, attempt: Attempt) -> None:
        """Hand over what is confirmed, in order; with its last piece the attempt is over."""
        ready = {s.offer.piece.start: i for i, s in enumerate(self.slots) if is_ready(s, attempt) and s.offer}
        while (index := ready.get(attempt.landed)) is not None:
            offer = self.slots[index].offer
            assert offer is not None
            self.slots[index] = LandingSlot("importing")
            attempt.landed = offer.piece.end
            self._actions.append(Land(attempt.request_id, index, offer.piece, offer.checksums, offer.first))
            if offer.piece.last:
                del self.attempts[attempt.request_id]
                return

    def _expire(self, now: float) -> None:
        for peer, each in [*self.peers.items()]:
            if now - each.heard_s > self._deadlines.lease_s:
                self._peer_down(peer, "the prefill worker was silent")
                self._actions.append(DropPeer(peer))
            elif now >= each.renew_s:
                each.renew_s = now + self._deadlines.renew_s
                mine = [(a.request_id, a.number) for a in self.attempts.values() if a.peer == peer]
                self._say(peer, Renew(tuple(mine)))
        for slot in self.slots:
            if slot.state in ("pulling", "asked") and slot.late_s <= now and slot.attempt is not None:
                what = "a transfer" if slot.state == "pulling" else "the answer to a release"
                self._give_up(slot.attempt, f"{what} took longer than {self._deadlines.pull_s:g} s")
        for attempt in [each for each in self.attempts.values() if each.late_s <= now]:
            self._give_up(attempt, f"nothing came for {self._deadlines.progress_s:g} s")

    def _peer_down(self, peer: PeerId, reason: str) -> None:
        self.peers.pop(peer, None)
        for attempt in [each for each in self.attempts.values() if each.peer == peer]:
            self._give_up(attempt, reason)

    def _give_up(self, attempt: Attempt, reason: str | None) -> None:
        """End an attempt. reason: why the request goes on locally; None if it does not."""
        if self.attempts.get(attempt.request_id) is not attempt:
            return
        del self.attempts[attempt.request_id]
        for index, slot in enumerate(self.slots):
            if slot.attempt is attempt:
                self.slots[index] = LandingSlot(after_giving_up(slot))
        self._say(attempt.peer, Abort(attempt.request_id, attempt.number))
        if reason is not None:
            self._locally(attempt.request_id, reason)

    def _locally(self, request_id: RequestId, reason: str) -> None:
        self._actions.append(PrefillLocally(request_id, reason))

    def _say(self, peer: PeerId, message: Prefill | Renew | Release | Abort) -> None:
        if peer in self.peers:
            self._actions.append(SendToPrefill(peer, message))

    def _latest(self, now: float) -> float:
        return now + self._deadlines.progress_s


def is_ready(slot: LandingSlot, attempt: Attempt) -> bool:
    """Whether what it holds may be imported for this attempt."""
    return slot.state == "confirmed" and slot.attempt is attempt


def after_giving_up(slot: LandingSlot) -> Literal["free", "quarantine"]:
    """What becomes of a slot whose attempt is over: a transfer into it goes on, and cannot be stopped (nixl-2067)."""
    return "quarantine" if slot.state == "pulling" else "free"
