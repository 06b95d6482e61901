"""How bytes move from a prefill worker's slots into a decode worker's: one protocol, and the choice between two ways.

A decode worker pulls. A transfer is a read by the decode worker, or a write by the prefill worker that was asked for
one; which is faster depends on links and libraries, so both are tried when two workers meet.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, NewType, Protocol

PeerId = NewType("PeerId", int)
"""A session with another worker. One that comes again has another id."""
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

    name: in words.
    metadata: what a peer needs to connect.
    newest_s: when the newest began, by `time.monotonic`, of the transfers that have not ended, here or for a peer; None
        without any.
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


_LEAST_S = 1e-5
"""What is over sooner has not been timed: both looks at the clock were the same."""


class Probe:
    """Which way is faster from a peer: each is timed twice, for the first transfer of a kind connects.

    best_s: seconds of each way that worked, the better of both times.
    """

    def __init__(self, num_bytes: int) -> None:
        self.best_s: dict[Way, float] = {}
        self._num_bytes, self._begun_s = num_bytes, 0.0
        self._ways = [way for way in WAYS for _ in range(2)]

    def begin(self, now: float) -> Way | None:
        """The way of the next transfer, which begins now; None once all have been tried."""
        self._begun_s = now
        return self._ways[0] if self._ways else None

    def ended(self, whole: bool, now: float) -> None:
        """The transfer is over. whole: all bytes have come."""
        way = self._ways.pop(0)
        if whole:
            self.best_s[way] = min(now - self._begun_s, self.best_s.get(way, math.inf))

    @property
    def best(self) -> Way | None:
        """The faster way so far; None if none has worked."""
        return min(self.best_s, key=lambda way: self.best_s[way], default=None)

    @property
    def gbps(self) -> dict[Way, float]:
        """Gigabytes a second of each way that took a time that can be measured."""
        return {way: self._num_bytes / s / 1e9 for way, s in self.best_s.items() if s >= _LEAST_S}
