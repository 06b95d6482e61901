"""All ranks that share a model in one process, each on a thread: what processes do, in a second instead of ten.

Engines and messages are the real ones; tensors are exchanged in memory. Faults, instruments and `GraphSim` reach every
rank.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
import zmq
from torch import Tensor

from treetop.disaggregation.loopback import LoopbackTransport
from treetop.distributed.process import Failed
from treetop.distributed.tp_wire import WorkerOptions
from treetop.distributed.tp_worker import TpWorker
from treetop.parallel.exchange import START_S, ExchangeRank, Rendezvous
from treetop.types.errors import EngineError
from treetop_debug.patching import instead, replaced


@contextmanager
def ranks_on_threads() -> Iterator[None]:
    """Groups that are started inside have no other processes."""
    start = instead("treetop.distributed.process:start_process", RankThread)
    transport = instead("treetop.distributed.tp_worker:NixlTransport", LoopbackTransport)
    with replaced([start, transport, instead("treetop.distributed.rank_groups:Group", MemoryGroup)]):
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

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        peer_memory: bool = False,
        exact: torch.dtype | None = None,
    ) -> None:
        with self._first:
            new = _Table(threading.Barrier(rendezvous.size), [torch.empty(0)] * rendezvous.size)
            self._table = self._tables.setdefault(rendezvous.file, new)
        self._rank, self._seconds = rendezvous.rank, START_S
        self.parallel = ExchangeRank(rendezvous.rank, rendezvous.size, device, self._gather, self._swap, exact=exact)

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


class ProcessThread(threading.Thread):
    """A rank on a thread, which looks like its process. killed: it is to end once it waits for nobody."""

    def __init__(self, rank: int) -> None:
        super().__init__(name=f"rank-{rank}", daemon=True)
        self.rank, self.stdin, self.killed, self._code = rank, Nothing(), threading.Event(), 1
        read, self._stdout = os.pipe()
        self.stdout = os.fdopen(read, "rb")
        self.start()

    def work(self) -> int:
        """What the process does. Returns its exit code."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self._code = self.work()
        except RankDied:
            pass
        finally:
            os.close(self._stdout)
        if self.killed.is_set():
            self._code = KILLED

    def report(self, why: Failed) -> None:
        """As `report_failure`."""
        with suppress(OSError):  # the rank has ended meanwhile
            os.write(self._stdout, msgspec.json.encode(why) + b"\n")

    def poll(self) -> int | None:
        return None if self.is_alive() else self._code

    def wait(self) -> int:
        if self is not threading.current_thread():  # else a collection on its own thread
            self.join()
        return self._code

    def kill(self) -> None:
        self.killed.set()


class RankThread(ProcessThread):
    """A rank but the first of those that share a model."""

    def __init__(self, _: str, options: WorkerOptions) -> None:
        self._worker = TpWorker(options, zmq.Context.instance(), self.report)
        super().__init__(options.rank)

    def work(self) -> int:
        return self._worker.run()

    def kill(self) -> None:
        super().kill()
        self._worker._failed.set()


KILLED = -9


class Nothing:
    """The stdin of a rank that is no process."""

    def close(self) -> None:
        """There is no pipe."""
