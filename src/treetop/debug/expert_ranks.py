"""Ranks that share experts as threads of one process, see `debug/ranks.py`: engines, messages and sockets are real.

What they hand over to each other is copied in memory.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from treetop.core.engine_core import EngineCore
from treetop.core.ranks.expert_rank import SAID_WHY, ExpertRank, RankOptions
from treetop.core.ranks.lockstep import Agreement, Lockstep
from treetop.debug.patching import Patch, instead, replaced
from treetop.debug.ranks import MemoryGroup, Nothing, RankDied
from treetop.disaggregation.connector import Connector
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.engine.engine import Engine

_KILLED = -9


class ExpertRankThread(threading.Thread):
    """A rank on a thread, which looks like its process. core: its own, once it is up; role: if the group has one."""

    core: "EngineCore[Any]"
    role: "Connector | None" = None

    def __init__(self, options: RankOptions) -> None:
        super().__init__(name=f"rank-{options.rank}", daemon=True)
        self._rank, self.stdin, self._code = ExpertRank(options, zmq.Context.instance()), Nothing(), SAID_WHY
        self.killed = threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(RankDied):
            self._rank.run()
        if self.killed.is_set():
            self._code = _KILLED

    def poll(self) -> int | None:
        return None if self.is_alive() else self._code

    def wait(self) -> int:
        if self is not threading.current_thread():  # else a collection on its own thread
            self.join()
        return self._code

    def kill(self) -> None:
        """It ends before its next step, and where it waits for what the others want."""
        self.killed.set()
        self._rank.ended.set()


@contextmanager
def expert_ranks_on_threads() -> Iterator[list[ExpertRankThread]]:
    """Groups that are started inside have no other processes. Yields all ranks that are started."""
    started: list[ExpertRankThread] = []

    def start(options: RankOptions) -> ExpertRankThread:
        started.append(ExpertRankThread(options))
        return started[-1]

    with replaced(
        [
            instead("treetop.core.ranks.expert_group:start_process", start),
            instead("treetop.core.ranks.expert_rank:Group", MemoryGroup),
            instead("treetop.core.ranks.expert_rank:NixlTransport", LoopbackTransport),
            Patch("treetop.core.ranks.expert_rank:core_of", _noted),
            Patch("treetop.core.ranks.expert_rank:open_connector", _noted_connector),
            Patch("treetop.core.ranks.lockstep:Agreement._hear", _mortal),
        ]
    ):
        yield started


def _noted(real: Callable[..., EngineCore[Any]]) -> Callable[..., EngineCore[Any]]:
    def core_of(runs: Lockstep[Any], engine: Engine) -> EngineCore[Any]:
        thread = threading.current_thread()
        assert isinstance(thread, ExpertRankThread)
        thread.core = real(runs, engine)
        return thread.core

    return core_of


def _noted_connector(real: Callable[..., Connector]) -> Callable[..., Connector]:
    def open_connector(*arguments: Any) -> Connector:
        thread = threading.current_thread()
        assert isinstance(thread, ExpertRankThread)
        thread.role = real(*arguments)
        return thread.role

    return open_connector


def _mortal(real: Callable[[Agreement, float], None]) -> Callable[[Agreement, float], None]:
    def hear(agreement: Agreement, patience_s: float) -> None:
        thread = threading.current_thread()
        if isinstance(thread, ExpertRankThread) and thread.killed.is_set():
            raise RankDied
        real(agreement, patience_s)

    return hear
