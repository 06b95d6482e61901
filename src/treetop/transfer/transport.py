"""How bytes move from a prefill worker's slots into a decode worker's: one protocol, and the choice between two ways.

A decode worker pulls. A transfer is a read by the decode worker, or a write by the prefill worker that was asked for
one; which is faster depends on links and libraries, so both are tried when two workers meet.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, NewType, Protocol

from treetop.transfer.events import PeerId

Handle = NewType("Handle", int)
Way = Literal["read", "write"]
WAYS: tuple[Way, ...] = ("read", "write")
State = Literal["busy", "done", "failed", "broken"]
"""Of a transfer. done: all bytes are there. failed: not all, and no more can come. broken: not all, but more may."""


class Range(NamedTuple):
    """Bytes of a memory."""

    offset: int
    num_bytes: int


class Memory(NamedTuple):
    """One stretch of memory that peers may reach. device: of a GPU; None is the host's."""

    address: int
    num_bytes: int
    device: int | None = None

    def holds(self, ranges: Sequence[Range]) -> bool:
        return all(offset >= 0 and 0 < size <= self.num_bytes - offset for offset, size in ranges)


class Transport(Protocol):
    """One worker's end. Calls return at once, and none raises for what a peer does or fails to do.

    name: in words. metadata: what a peer needs to connect. newest_s: when the newest began, by `time.monotonic`, of the
    transfers that have not ended, here or for a peer; None without any.
    """

    name: str
    metadata: bytes

    @property
    def newest_s(self) -> float | None: ...

    def connect(self, peer: PeerId, metadata: bytes) -> bool:
        """Whether this peer can be reached."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Begin no more transfers; those that are under way go on."""
        ...

    def pull(self, peer: PeerId, remote: Sequence[Range], local: Sequence[Range], way: Way = "read") -> Handle:
        """Begin to move ranges of the peer's memory into ranges of the same sizes here."""
        ...

    def poll(self, handle: Handle) -> State:
        """A handle is forgotten once this has said that it is done, or has failed."""
        ...

    def progress(self) -> None:
        """Do what peers have asked for."""
        ...

    def close(self) -> None: ...


class Probe:
    """Tries both ways from a peer, one after the other, into a landing slot that nobody uses.

    Each goes twice, for the first transfer of a kind connects. begin: begins one of `num_bytes`; poll: of a transport.
    gbps: gigabytes a second of each way that worked, the better of both times. late_s: how long one may take.
    """

    def __init__(
        self, begin: Callable[[Way], Handle], poll: Callable[[Handle], State], num_bytes: int, late_s: float
    ) -> None:
        self.gbps: dict[Way, float] = {}
        self._begin, self._state, self._num_bytes, self._late_s = begin, poll, num_bytes, late_s
        self._ways = [way for way in WAYS for _ in range(2)]
        self._handle: Handle | None = None
        self._begun_s = 0.0

    def step(self, now: float) -> bool:
        """Go on. Returns whether all has been tried, and `best` is known."""
        state = self._poll()
        if self._handle is not None and now - self._begun_s >= self._late_s:
            self._ways.clear()
        elif self._handle is None:
            if state == "done":
                gbps = self._num_bytes / max(now - self._begun_s, 1e-9) / 1e9
                self.gbps[self._ways[0]] = max(gbps, self.gbps.get(self._ways[0], 0.0))
            if state is not None:
                self._ways.pop(0)
            if self._ways:
                self._begun_s = now
                self._handle = self._begin(self._ways[0])
        return not self._ways

    @property
    def best(self) -> Way | None:
        """The faster way so far; None if none has worked."""
        ways = sorted(self.gbps, key=lambda way: self.gbps[way])
        return ways[-1] if ways else None

    def has_ended(self) -> bool:
        """Whether the landing slot may be used again, once the choice is made."""
        self._poll()
        return self._handle is None

    def _poll(self) -> State | None:
        """What has become of the transfer that is under way; None if there is none."""
        if self._handle is None:
            return None
        state = self._state(self._handle)
        if state in ("done", "failed"):
            self._handle = None
        return state
