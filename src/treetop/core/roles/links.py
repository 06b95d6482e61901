"""How pieces come from the slots of another worker's ranks into those of this one's: each rank pulls its own heads.

    rank 0: role --pull a piece--> [ Links ] --orders--> [ RankLinks ] of rank 0 and, as messages, of each other rank
                                       ^                       |  transport: bytes of the ranks that have its heads
                                       '------ states ---------'

A piece is there once it is there on every rank.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import msgspec

from treetop.core.roles.role import Metadata, Staging, wait_ms
from treetop.transfer.events import PeerId
from treetop.transfer.transport import Handle, Range, State, Transport, Way
from treetop.types.handover import ALIGNMENT, Payload, Piece, first_head


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Another worker is peer `peer` from now on. transports: metadata of each of its ranks."""

    peer: int
    transports: tuple[bytes, ...]


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Begin nothing more with this peer."""

    peer: int


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Move this rank's part of what lies in the peer's slots `there` into slot `here`.

    piece: None moves a whole slot of one rank, to try the link.
    """

    number: int
    peer: int
    there: int
    here: int
    piece: Piece | None
    way: Way


Order = Connect | Disconnect | Pull


class OtherRanks(Protocol):
    """Ranks 1 .. of this worker. transports: metadata of each."""

    @property
    def transports(self) -> Sequence[bytes]: ...

    def order(self, order: Order) -> None: ...

    def moved(self) -> list[tuple[int, int, State]]:
        """Rank, number and new state of each pull whose state has changed."""
        ...


class Copy(NamedTuple):
    """Bytes of a slot of the peer's rank `rank`, and where they go in a slot of this rank."""

    rank: int
    there: Range
    here: Range


def copies(whole: Payload, piece: Piece, rank: int, size: int, their_size: int) -> list[Copy]:
    """What rank `rank` of `size` needs of a piece that lies with `their_size` ranks; neighbours are moved as one.

    Of several ranks with the same head it asks the one that stands where it stands.
    """
    groups = {group.name: group for group in whole.groups}
    theirs = {(each.group, each.head): each for each in whole.of_rank(their_size).stretches(piece)}
    heads = {group.name: group.kv.heads for group in whole.of_rank(their_size).groups}
    near, found = rank * their_size // size, list[Copy]()
    for own in whole.of_rank(size).stretches(piece):
        at, place = near, 0
        if own.group is not None:
            group = groups[own.group]
            head = first_head(group, rank, size) + own.head
            begins = {r: first_head(group, r, their_size) for r in (near, *range(their_size))}
            at, begin = next((r, b) for r, b in begins.items() if b <= head < b + heads[own.group])
            place = head - begin
        there = theirs[own.group, place]
        if own.num_bytes:
            _add(found, Copy(at, Range(there.offset, there.num_bytes), Range(own.offset, own.num_bytes)))
    return found


def _add(found: list[Copy], new: Copy) -> None:
    """Append, or lengthen the last if only alignment lies between them, on both sides alike."""
    if found and found[-1].rank == new.rank:
        last = found[-1]
        size = new.here.offset + new.here.num_bytes - last.here.offset
        gap = new.here.offset - last.here.offset - last.here.num_bytes
        if new.there.offset - last.there.offset == new.here.offset - last.here.offset and gap < ALIGNMENT:
            there, here = Range(last.there.offset, size), Range(last.here.offset, size)
            found[-1] = Copy(new.rank, there, here)
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
    """handles: of transfers that have not ended. ended: states of the others. said: what was told of it last."""

    handles: list[Handle]
    ended: list[State] = field(default_factory=list)
    said: State = "busy"


class RankLinks:
    """One rank's transport and slots."""

    def __init__(self, transport: Transport, staging: Staging) -> None:
        self.transport, self.staging = transport, staging
        self._peers: dict[int, tuple[PeerId, ...]] = {}
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
                self._pulls[order.number] = _Pulling([*self._begin(order)])
        return True

    def moved(self) -> list[tuple[int, State]]:
        """Go on, and do what peers ask for. Returns pulls whose state has changed."""
        self.transport.progress()
        changed: list[tuple[int, State]] = []
        for number, pull in [*self._pulls.items()]:
            states = {handle: self.transport.poll(handle) for handle in pull.handles}
            pull.ended += [state for state in states.values() if state in ("done", "failed")]
            pull.handles = [handle for handle, state in states.items() if state in ("busy", "broken")]
            state = joined([*pull.ended, *(states[handle] for handle in pull.handles)])
            if state != pull.said:
                pull.said = state
                changed.append((number, state))
            if not pull.handles:
                del self._pulls[number]
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
        if pull.piece is None:
            whole = Range(0, mine.slot_bytes)
            parts = [Copy(mine.rank * len(peers) // mine.size, whole, whole)]
        else:
            parts = copies(mine.whole, pull.piece, mine.rank, mine.size, len(peers))
        there, here = mine.range_of(pull.there).offset, mine.range_of(pull.here).offset
        handles = []
        for rank in sorted({part.rank for part in parts}):
            moved = [part for part in parts if part.rank == rank]
            remote = [Range(there + part.there.offset, part.there.num_bytes) for part in moved]
            local = [Range(here + part.here.offset, part.here.num_bytes) for part in moved]
            handles.append(self.transport.pull(peers[rank], remote, local, pull.way))
        return handles


class Links:
    """All ranks' links, as a role has them. metadata: what another worker needs to connect. way: by which a peer's
    pieces come, if not by reads.
    """

    def __init__(self, own: RankLinks, others: OtherRanks | None = None) -> None:
        self.own, self._others = own, others
        transports = (own.transport.metadata, *(() if others is None else others.transports))
        self.metadata = msgspec.msgpack.encode(Metadata(own.staging.num_slots, transports))
        self.name = own.transport.name
        self.way: dict[PeerId, Way] = {}
        self._states: dict[Handle, dict[int, State]] = {}
        self._pulled_s = 0.0
        self._numbers = count()

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
        self.way.pop(peer, None)
        self._order(Disconnect(peer))

    def pull(self, peer: PeerId, there: int, here: int, piece: Piece | None, way: Way | None = None) -> Handle:
        """Begin to move a piece from the peer's slots into this worker's; None moves a whole slot of each rank."""
        handle, self._pulled_s = Handle(next(self._numbers)), time.monotonic()
        self._states[handle] = dict.fromkeys(range(self.own.staging.size), "busy")
        self._order(Pull(handle, peer, there, here, piece, way or self.way.get(peer, "read")))
        return handle

    def poll(self, handle: Handle) -> State:
        """A handle is forgotten once this has said that it is done, or has failed."""
        state = joined([*self._states[handle].values()])
        if state in ("done", "failed"):
            del self._states[handle]
        return state

    def progress(self) -> None:
        """Hear of all ranks' pulls, and do what peers have asked for."""
        for number, state in self.own.moved():
            self._heard(0, number, state)
        for rank, number, state in () if self._others is None else self._others.moved():
            self._heard(rank, number, state)

    def close(self) -> None:
        self.own.close()

    def _heard(self, rank: int, number: int, state: State) -> None:
        if (states := self._states.get(Handle(number))) is not None:
            states[rank] = state

    def _order(self, order: Order) -> bool:
        if self._others is not None:
            self._others.order(order)
        return self.own.take(order)
