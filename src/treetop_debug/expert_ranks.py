"""Ranks that share experts as threads of one process, see `debug/ranks.py`: engines, messages and sockets are real.

What they transfer to each other is copied in memory.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from treetop.core.engine_core import EngineCore, StepEngine
from treetop.core.wire import ProcessOptions
from treetop.disaggregation.connector import Connector
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.distributed.engine_process import EngineProcess
from treetop.distributed.lockstep import StepSync
from treetop.distributed.tp_wire import WorkerOptions
from treetop.engine.engine import Engine
from treetop_debug.patching import Patch, instead, replaced
from treetop_debug.ranks import MemoryGroup, ProcessThread, RankDied, RankThread


class ExpertRankThread(ProcessThread):
    """A rank on a thread, which looks like its process.

    core: its own, once it is up.
    connector: its, if any.
    """

    core: "EngineCore[Any]"
    connector: "Connector | None" = None

    def __init__(self, _: str, options: ProcessOptions) -> None:
        self.process = EngineProcess(options, zmq.Context.instance(), self.report)
        super().__init__(options.rank)

    def work(self) -> int:
        return self.process.run()

    def kill(self) -> None:
        """It ends before its next step, and where it waits for what the others want."""
        super().kill()
        self.process.over.set()


@contextmanager
def expert_ranks_on_threads() -> Iterator[list[ExpertRankThread]]:
    """Groups that are started inside have no other processes. Yields all ranks that are started."""
    started: list[ExpertRankThread] = []

    def start(module: str, options: ProcessOptions | WorkerOptions) -> ProcessThread:
        if isinstance(options, WorkerOptions):
            return RankThread(module, options)
        started.append(ExpertRankThread(module, options))
        return started[-1]

    with replaced(
        [
            instead("treetop.distributed.process:start_process", start),
            instead("treetop.distributed.rank_groups:Group", MemoryGroup),
            instead("treetop.distributed.tp_worker:NixlTransport", LoopbackTransport),
            instead("treetop.distributed.engine_process:NixlTransport", LoopbackTransport),
            instead("treetop.distributed.engine_process:take_share", lambda options: None),
            Patch("treetop.distributed.open:core_of", _noted),
            Patch("treetop.distributed.engine_process:open_connector", _noted_connector),
            Patch("treetop.distributed.lockstep:StepSync._receive", _mortal),
        ]
    ):
        yield started


def _noted(real: Callable[..., EngineCore[Any]]) -> Callable[..., EngineCore[Any]]:
    def core_of(runs: StepEngine[Any], engine: Engine, *given: Any) -> EngineCore[Any]:
        """Other engines of the process have cores, too."""
        core, thread = real(runs, engine, *given), threading.current_thread()
        if isinstance(thread, ExpertRankThread):
            thread.core = core
        return core

    return core_of


def _noted_connector(real: Callable[..., Connector]) -> Callable[..., Connector]:
    def open_connector(*arguments: Any) -> Connector:
        thread = threading.current_thread()
        assert isinstance(thread, ExpertRankThread)
        thread.connector = real(*arguments)
        return thread.connector

    return open_connector


def _mortal(real: Callable[[StepSync, float], None]) -> Callable[[StepSync, float], None]:
    def receive(step_sync: StepSync, patience_s: float) -> None:
        thread = threading.current_thread()
        if isinstance(thread, ExpertRankThread) and thread.killed.is_set():
            raise RankDied
        real(step_sync, patience_s)

    return receive
