"""A transport inside one process, for tests: memory is copied between two engines a stretch at a time."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from treetop.types.kv_transfer.transport import Handle, Memory, PeerId, Range, State, Way


@dataclass(slots=True)
class _Copy:
    """left: (from, to, bytes), the next one last."""

    left: list[tuple[int, int, int]] = field(default_factory=list)
    failed: bool = False


class LoopbackTransport:
    """Copies one range at each poll.

    stalled: as if the peer had been stopped.
    broken: as if links had broken.
    """

    name = "loopback"
    _all: ClassVar[dict[bytes, "LoopbackTransport"]] = {}
    _names: ClassVar["count[int]"] = count()

    def __init__(self, memory: Memory) -> None:
        self.memory, self.metadata = memory, f"loopback-{next(self._names)}".encode()
        self.stalled = self.broken = False
        self._peers: dict[PeerId, LoopbackTransport] = {}
        self._copies: dict[Handle, _Copy] = {}
        self._handles = count()
        self._newest_s = 0.0
        self._all[self.metadata] = self

    @property
    def newest_s(self) -> float | None:
        return self._newest_s if self._copies else None

    def connect(self, peer: PeerId, metadata: bytes) -> bool:
        found = self._all.get(metadata)
        if found is not None:
            self._peers[peer] = found
        return found is not None

    def disconnect(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)

    def pull(self, peer: PeerId, remote: Sequence[Range], local: Sequence[Range], way: Way = "read") -> Handle:
        handle = Handle(next(self._handles))
        copy = self._copies[handle] = _Copy()
        self._newest_s = time.monotonic()
        source = self._peers.get(peer)
        if source is None or not source.memory.holds(remote):
            copy.failed = True
        else:
            assert self.memory.holds(local)
            pairs = zip(remote, local, strict=True)
            copy.left = [
                (source.memory.address + r.offset, self.memory.address + t.offset, t.num_bytes) for r, t in pairs
            ]
        return handle

    def poll(self, handle: Handle) -> State:
        copy = self._copies[handle]
        if self.stalled:
            return "busy"
        if copy.failed or self.broken:
            del self._copies[handle]
            return "failed"
        if copy.left:
            source, target, num_bytes = copy.left.pop()
            ctypes.memmove(target, source, num_bytes)
            return "busy"
        del self._copies[handle]
        return "done"

    def progress(self) -> None:
        """Nobody asks for anything."""

    def close(self) -> None:
        self._all.pop(self.metadata, None)
