"""All ranks of a worker group in one process, each on a thread: what processes do, in a second instead of ten.

Engines and messages are the real ones; tensors are exchanged in memory. Faults, instruments and `GraphSim` reach every
rank.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import zmq
from torch import Tensor

from treetop.core.ranks.follower import LINGER_MS, Follower
from treetop.core.ranks.group_wire import FollowerOptions
from treetop.debug.patching import instead, replaced
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.parallel.exchange import START_S, ExchangeRank, Meeting
from treetop.types.errors import EngineError


@contextmanager
def ranks_on_threads() -> Iterator[None]:
    """Groups that are started inside have no other processes."""
    places = [f"treetop.core.ranks.{module}:Group" for module in ("worker_group", "follower")]
    start = instead("treetop.core.ranks.worker_group:start_process", RankThread)
    transport = instead("treetop.core.ranks.follower:NixlTransport", LoopbackTransport)
    with replaced([start, transport, *(instead(place, MemoryGroup) for place in places)]):
        yield


@dataclass
class _Table:
    """Where the ranks of a group put what they exchange: it holds between two barriers."""

    barrier: threading.Barrier
    pieces: list[Tensor]


class MemoryGroup:
    """A `Group` of threads."""

    _tables: ClassVar[dict[Path, _Table]] = {}
    _first = threading.Lock()

    def __init__(self, meeting: Meeting, device: torch.device, peer_memory: bool = False) -> None:
        with self._first:
            new = _Table(threading.Barrier(meeting.size), [torch.empty(0)] * meeting.size)
            self._table = self._tables.setdefault(meeting.file, new)
        self._rank, self._seconds = meeting.rank, START_S
        self.parallel = ExchangeRank(meeting.rank, meeting.size, device, self._gather, self._swap)

    def set_deadline(self, seconds: float) -> None:
        self._seconds = seconds

    def close(self, patience_s: float = 0.0) -> None:
        """Whoever waits is told, at once."""
        self._table.barrier.abort()

    def _gather(self, out: Tensor, piece: Tensor) -> None:
        self._exchange(piece, lambda pieces: torch.stack(pieces, out=out))

    def _swap(self, out: Tensor, pieces: Tensor) -> None:
        self._exchange(pieces, lambda all_of_them: torch.stack([each[self._rank] for each in all_of_them], out=out))

    def _exchange(self, mine: Tensor, take: Callable[[list[Tensor]], object]) -> None:
        self._table.pieces[self._rank] = mine
        try:
            self._table.barrier.wait(self._seconds)
            take(self._table.pieces)
            self._table.barrier.wait(self._seconds)
        except threading.BrokenBarrierError as error:
            raise EngineError(f"a rank did not answer in {self._seconds:g} s") from error


class RankDied(BaseException):
    """A rank is gone without a word, as a process that is killed."""


class RankThread:
    """A follower on a thread, which looks like its process."""

    def __init__(self, options: FollowerOptions) -> None:
        self._follower = Follower(options, zmq.Context.instance())
        self.stdin, self._killed = Nothing(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rank-{options.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(RankDied):
            self._follower.run()
            self._killed.wait(LINGER_MS / 1000)  # like `follower.main`: its last words arrive before it ends

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def wait(self) -> int:
        self._thread.join()
        return 1

    def kill(self) -> None:
        """It ends once it waits for nobody."""
        self._follower._failed.set()
        self._killed.set()


class Nothing:
    """The stdin of a rank that is no process."""

    def close(self) -> None:
        """There is no pipe."""
