"""The transfer agent: how chunks come from another worker's slots into those of this one's, each rank's own heads.

    rank 0: connector --Pull--> [ Agent ] --orders--> [ RankAgent ] of rank 0 and, as messages, of each other rank
                                    ^                       |  transport: bytes of the ranks that have its heads
                                    '------ states ---------'

A chunk is there once it is there on every rank. A transfer is named by the slot into which it goes: no slot is used
again before its transfer has ended on all of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import msgspec

from treetop.disaggregation.events import Disconnect, Pull, Pulled
from treetop.types.kv_chunk import ALIGNMENT, KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout, Staging, first_head
from treetop.types.kv_transfer.transport import Handle, PeerId, Range, State, Transport
from treetop.types.kv_transfer.wire import Metadata

SOON_MS, LATER_MS = 1, 5
"""How long a loop without other work may wait: for transfers, and for messages that wake nobody."""
_SPIN_S = 0.005
"""So long after a transfer began nothing is waited for."""


def wait_ms(newest_s: float | None) -> int:
    """How long a loop without other work may wait, if its newest transfer under way began then; None if it has none.

    A slot crosses between two GPUs in a fraction of a millisecond, and NIXL goes on when it is asked whether it has, or
    once a millisecond by itself (nixl#347): a loop that sleeps makes a transfer ten times as slow.
    """
    if newest_s is None:
        return LATER_MS
    return 0 if time.monotonic() - newest_s < _SPIN_S else SOON_MS


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Another worker is peer `peer` from now on. transports: metadata of each of its ranks."""

    peer: PeerId
    transports: tuple[bytes, ...]


Order = Connect | Disconnect | Pull


class OtherRanks(Protocol):
    """Ranks 1 .. of this worker. transports: metadata of each."""

    @property
    def transports(self) -> Sequence[bytes]: ...

    def order(self, order: Order) -> None: ...

    def moved(self) -> list[tuple[int, int, State]]:
        """Rank, slot and new state of each transfer whose state has changed."""
        ...


class BlockCopy(NamedTuple):
    """Bytes of a slot of the peer's rank `rank`, and where they go in a slot of this rank."""

    rank: int
    there: Range
    here: Range


def block_copies(layout: ChunkLayout, chunk: KVChunk, rank: int, size: int, their_size: int) -> list[BlockCopy]:
    """What rank `rank` of `size` needs of a chunk that lies with `their_size` ranks; neighbours are moved as one.

    Of several ranks with the same head it asks the one that stands where it stands.
    """
    groups = {group.name: group for group in layout.groups}
    theirs = {(each.group, each.head): each for each in layout.of_rank(their_size).segments(chunk)}
    heads = {group.name: group.kv.heads for group in layout.of_rank(their_size).groups}
    near, found = rank * their_size // size, list[BlockCopy]()
    for own in layout.of_rank(size).segments(chunk):
        at, place = near, 0
        if own.group is not None:
            group = groups[own.group]
            head = first_head(group, rank, size) + own.head
            begins = {r: first_head(group, r, their_size) for r in (near, *range(their_size))}
            at, begin = next((r, b) for r, b in begins.items() if b <= head < b + heads[own.group])
            place = head - begin
        there = theirs[own.group, place]
        if own.num_bytes:
            _add(found, BlockCopy(at, Range(there.offset, there.num_bytes), Range(own.offset, own.num_bytes)))
    return found


def _add(found: list[BlockCopy], new: BlockCopy) -> None:
    """Append, or lengthen the last if only alignment lies between them, on both sides alike."""
    if found and found[-1].rank == new.rank:
        last = found[-1]
        size = new.here.offset + new.here.num_bytes - last.here.offset
        gap = new.here.offset - last.here.offset - last.here.num_bytes
        if new.there.offset - last.there.offset == new.here.offset - last.here.offset and gap < ALIGNMENT:
            there, here = Range(last.there.offset, size), Range(last.here.offset, size)
            found[-1] = BlockCopy(new.rank, there, here)
            return
    found.append(new)


def joined(states: Sequence[State]) -> State:
    """Of transfers that count together: done if all are, over once none can bring a byte any more."""
    if all(state == "done" for state in states):
        return "done"
    if all(state in ("done", "failed") for state in states):
        return "failed"
    return "broken" if any(state in ("failed", "broken") for state in states) else "busy"


@dataclass(slots=True)
class _Pulling:
    """handles: of transfers that have not ended.
    ended: states of the others.
    last: the state that was reported.
    """

    handles: list[Handle]
    ended: list[State] = field(default_factory=list)
    last: State = "busy"


class RankAgent:
    """One rank's transport and slots."""

    def __init__(self, transport: Transport, staging: Staging) -> None:
        self.transport, self.staging = transport, staging
        self._peers: dict[PeerId, tuple[PeerId, ...]] = {}
        self._ids = count(1)
        self._pulls: dict[int, _Pulling] = {}

    def take(self, order: Order) -> bool:
        """Do it. Returns whether it could be begun; of a pull, its states say that."""
        match order:
            case Connect(peer, transports):
                ids = self._peers[peer] = tuple(PeerId(next(self._ids)) for _ in transports)
                reached = [self.transport.connect(each, data) for each, data in zip(ids, transports, strict=True)]
                return bool(ids) and all(reached)
            case Disconnect(peer):
                for each in self._peers.pop(peer, ()):
                    self.transport.disconnect(each)
            case Pull():
                self._pulls[order.slot] = _Pulling([*self._begin(order)])
        return True

    def moved(self) -> list[tuple[int, State]]:
        """Go on, and do what peers ask for. Returns slots of transfers whose state has changed, and their states."""
        self.transport.progress()
        changed: list[tuple[int, State]] = []
        for slot, pull in [*self._pulls.items()]:
            states = {handle: self.transport.poll(handle) for handle in pull.handles}
            pull.ended += [state for state in states.values() if state in ("done", "failed")]
            pull.handles = [handle for handle, state in states.items() if state in ("busy", "broken")]
            state = joined([*pull.ended, *(states[handle] for handle in pull.handles)])
            if state != pull.last:
                pull.last = state
                changed.append((slot, state))
            if not pull.handles:
                del self._pulls[slot]
        return changed

    @property
    def wait_ms(self) -> int:
        """How long a loop without other work may wait."""
        return wait_ms(self.transport.newest_s)

    def close(self) -> None:
        self.transport.close()

    def _begin(self, pull: Pull) -> Sequence[Handle]:
        """A transfer for each rank of the peer that has something."""
        peers, mine = self._peers.get(pull.peer, ()), self.staging
        if not peers:  # it has gone: nobody knows this one, and the transfer fails
            return [self.transport.pull(PeerId(0), [mine.range_of(0)], [mine.range_of(0)])]
        if pull.chunk is None:
            whole = Range(0, mine.slot_bytes)
            parts = [BlockCopy(mine.rank * len(peers) // mine.size, whole, whole)]
        else:
            parts = block_copies(mine.layout, pull.chunk, mine.rank, mine.size, len(peers))
        there, here = mine.range_of(pull.remote_slot).offset, mine.range_of(pull.slot).offset
        handles = []
        for rank in sorted({part.rank for part in parts}):
            moved = [part for part in parts if part.rank == rank]
            remote = [Range(there + part.there.offset, part.there.num_bytes) for part in moved]
            local = [Range(here + part.here.offset, part.here.num_bytes) for part in moved]
            handles.append(self.transport.pull(peers[rank], remote, local, pull.way))
        return handles


class Agent:
    """All ranks' agents, as a connector has them. metadata: what another worker needs to connect."""

    def __init__(self, own: RankAgent, others: OtherRanks | None = None) -> None:
        self.own, self._others = own, others
        transports = (own.transport.metadata, *(() if others is None else others.transports))
        self.metadata = Metadata(own.staging.num_slots, transports)
        self.name = own.transport.name
        self._states: dict[int, dict[int, State]] = {}  # by slot and rank, of transfers that have not ended
        self._pulled_s = 0.0

    @property
    def wait_ms(self) -> int:
        """How long a loop without other work may wait, also for what other ranks pull."""
        newest = self.own.transport.newest_s
        return wait_ms(max(self._pulled_s, newest or 0.0) if self._states else newest)

    def connect(self, peer: PeerId, transports: Sequence[bytes]) -> bool:
        """Whether this peer can be reached from this rank; others' pulls will say so."""
        return self._order(Connect(peer, tuple(transports)))

    def disconnect(self, peer: PeerId) -> None:
        """Begin no more transfers; those that are under way go on."""
        self._order(Disconnect(peer))

    def pull(self, pull: Pull) -> None:
        """Begin a transfer."""
        self._pulled_s = time.monotonic()
        self._states[pull.slot] = dict.fromkeys(range(self.own.staging.size), "busy")
        self._order(pull)

    def poll(self) -> list[Pulled]:
        """Do what peers have asked for. Returns transfers whose state has changed."""
        moved = [(0, *each) for each in self.own.moved()] + ([] if self._others is None else self._others.moved())
        before = {slot: joined([*states.values()]) for slot, states in self._states.items()}
        for rank, slot, state in moved:
            self._states[slot][rank] = state
        changed = []
        for slot, last in before.items():
            state = joined([*self._states[slot].values()])
            if state != last:
                changed.append(Pulled(slot, state))
            if state in ("done", "failed"):
                del self._states[slot]
        return changed

    def close(self) -> None:
        self.own.close()

    def _order(self, order: Order) -> bool:
        if self._others is not None:
            self._others.order(order)
        return self.own.take(order)
