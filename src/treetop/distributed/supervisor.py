"""An engine, and another in its place when it dies: who starts it, watches it, and tells those that use it.

supervisor --starts, watches--> engine 1, 2, ...      each one process, or several, at addresses of its own
    '--lost, resume, fail--> front ends: `RemoteEngine` of this process's client, API processes
"""

import asyncio
import logging
import tempfile
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from treetop.core.wire import ProcessOptions
from treetop.disaggregation.registry import withdraw
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.process import Failed, ProcessGroup, SpareProcesses, as_error
from treetop.distributed.remote_engine import WATCHDOG_S
from treetop.types.config import EngineConfig
from treetop.types.errors import EngineError, UserError

WINDOW_S = 3600.0
"""Restarts are counted that lie no longer back."""
TURN_S = 30.0
"""Seconds after which the next front end is given an engine beside one that has not answered, such as a stopped one."""

_MODULE = "treetop.distributed.engine_process"

log = logging.getLogger("treetop.distributed")


class Watchdog(NamedTuple):
    """timeout_s: silence after which an engine counts as stalled.
    restart: whether another then takes its place.
    """

    timeout_s: float = WATCHDOG_S
    restart: bool = False


WATCHDOG = Watchdog()


class RestartLimit:
    """How often something that died may be started again: so many times within `WINDOW_S`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._taken_s = limit, deque[float](maxlen=limit)

    def take(self) -> bool:
        """Whether it may be once more; if so, that counts."""
        now = time.monotonic()
        if self._limit == 0 or (len(self._taken_s) == self._limit and now - self._taken_s[0] < WINDOW_S):
            return False
        self._taken_s.append(now)
        return True


class FrontEnd(Protocol):
    """Whoever has requests with the engine. `RemoteEngine` says what the words mean."""

    def lost(self, reason: str, killed: bool = False) -> None: ...

    async def resume(self, addresses: Sequence[str]) -> None:
        """Wait until the engine at the addresses is up and has all that is alive here."""
        ...

    def fail(self, reason: str) -> None: ...


class EngineSupervisor:
    """Keeps an engine running: one process, or the ranks that share experts, which die and start again as one.

    core: its client in this process, which can be used once `start` is over.
    """

    def __init__(
        self,
        process: ProcessOptions,
        restarts: int,
        watchdog: Watchdog = WATCHDOG,
        core: EngineProcessClient | None = None,
        spare: bool = False,
    ) -> None:
        """process: what each engine process is told, but for address and rank. restarts: how often within an hour an
        engine that has died is started again. core: of all replicas, whoever starts them; None for one of this alone.
        spare: whether processes wait to be the next engine.
        """
        weights = Path(tempfile.gettempdir()) / f"treetop-weights-{uuid4().hex}.json"
        for each in (weights, weights.with_suffix(".new")):
            weakref.finalize(self, Path.unlink, each, missing_ok=True)
        self._options, self._watchdog = msgspec.structs.replace(process, noted=str(weights)), watchdog
        self._restarts = RestartLimit(restarts)
        self._spares = SpareProcesses(_MODULE) if spare and restarts else None
        self._others: list[FrontEnd] = []
        self._group: ProcessGroup | None = None
        self.core = core or EngineProcessClient(watchdog_s=watchdog.timeout_s)
        self._engine = self.core.engines[process.replica]
        self.addresses: tuple[str, ...] = ()
        """Of the processes of the last engine that was started."""

    async def start(self) -> None:
        """Start an engine and wait until it is up. Raises UserError and EngineError for what it says."""
        self.launch()
        await self.meet()

    def launch(self) -> None:
        """Start the engine's processes. Raises ConfigError for a folder whose path is too long for a socket's."""
        self._group, size, level = ProcessGroup(), self._options.config.ep_size, self._options.log_level
        self.addresses = tuple(f"ipc://{self._group.folder}/engine-{rank}" for rank in range(size))
        for rank, address in enumerate(self.addresses):
            level = max(level, logging.WARNING) if rank else level
            options = msgspec.structs.replace(self._options, address=address, rank=rank, log_level=level)
            name, prefix = (f"rank {rank}", f"rank {rank}: ") if size > 1 else ("the engine process", "")
            self._group.start(name, _MODULE, options, prefix, None if self._spares is None else self._spares.take())

    async def meet(self) -> None:
        """Wait until the engine is up. Raises UserError and EngineError for what it says."""
        await self._while_it_lives(self._engine.connect(self.addresses), " before it was up")

    def join(self, front: FrontEnd) -> None:
        """Another front end, beside `core`'s. It is told of each engine from the next one on."""
        self._others.append(front)

    def leave(self, front: FrontEnd) -> None:
        """It has ended, and is told nothing more."""
        self._others.remove(front)

    @property
    def _fronts(self) -> list[FrontEnd]:
        return [self._engine, *self._others]

    async def watch(self, up: "asyncio.Future[None] | None" = None) -> str:
        """Until the engine is dead for good, which all are told. Returns why.

        up: is set once all have met the first engine.
        """
        try:
            reason = await self._keep(up)
        except Exception as error:  # a bug: nobody may wait for ever
            log.exception("the engine is not watched any more")
            reason = f"the engine is not watched any more: {type(error).__name__}"
        if self._spares is not None:
            self._spares.close()
        for front in self._fronts:
            front.fail(reason)
        return reason

    async def _keep(self, up: "asyncio.Future[None] | None") -> str:
        lost_s: float | None = None
        num_crashes = 0
        while True:
            try:
                if lost_s is not None:
                    await self.start()
                await self._while_it_lives(_resume(self._fronts[:: 1 if num_crashes % 2 else -1], self.addresses))
                if lost_s is not None:
                    log.warning("the engine is up again, after %.1f s", time.monotonic() - lost_s)
                if self._spares is not None:
                    self._spares.keep(self._options.config.ep_size)
                if up is not None and not up.done():
                    up.set_result(None)
                why = await self._ended()
                reason = why.reason if why.died else f"the engine failed: {why.reason}"
            except UserError as error:
                return f"the engine cannot be started again: {error}"
            except EngineError as error:
                reason = str(error)
            lost_s = time.monotonic()
            killed = self._was_killed
            num_crashes += not killed
            for front in self._fronts:
                front.lost(reason, killed)
            await self.close()  # nothing of it is left
            if not self._restarts.take():
                return reason
            log.warning("%s; restarting it, requests resume then", reason)

    @property
    def _was_killed(self) -> bool:
        """Whether the last engine has ended because somebody killed it."""
        assert self._group is not None
        return self._group.ended.done() and self._group.ended.result().killed

    async def _ended(self) -> Failed:
        """Wait until the engine has ended, or is stalled. Returns why."""
        assert self._group is not None
        ended, stalled = asyncio.wrap_future(self._group.ended), asyncio.ensure_future(self._engine.stalled.wait())
        ends: set[asyncio.Future[Any]] = {ended, stalled} if self._watchdog.restart else {ended}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else self._group.end(Failed(self._engine.stall_reason, died=True))
        finally:
            stalled.cancel()

    async def _while_it_lives(self, work: Coroutine[Any, Any, None], when: str = "") -> None:
        """Do what needs the engine. Raises what ends it, if it ends before."""
        done, ended = asyncio.ensure_future(work), asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                why = ended.result()
                raise as_error(msgspec.structs.replace(why, reason=why.reason + when) if why.died else why)
            done.result()
        finally:
            done.cancel()
            ended.cancel()

    def kill(self) -> None:
        """Do not wait for what it is doing: it may be loading for minutes yet."""
        if self._spares is not None:
            self._spares.close()
        if self._group is not None:
            self._group.end(Failed("shut down"))

    async def close(self) -> None:
        """End the engine's processes, any number of times. Without this process they would remove the folder."""
        if self._group is None:
            return
        await asyncio.to_thread(self._group.close)
        disaggregation = self._options.disaggregation
        if disaggregation.mode == "prefill" and disaggregation.registry is not None:
            withdraw(disaggregation.registry, disaggregation.listens(self._options.config.ep_size))


async def _resume(fronts: Sequence[FrontEnd], addresses: Sequence[str]) -> None:
    """One after the other, so that no more than one request of all is on trial; one that hangs holds up nobody.

    After each crash in the other order, as a journal's trials.
    """
    turns: list[asyncio.Future[None]] = []
    try:
        for front in fronts:
            turns.append(asyncio.ensure_future(front.resume(addresses)))
            await asyncio.wait(turns[-1:], timeout=TURN_S)
            if turns[-1].done():
                turns[-1].result()
        await asyncio.gather(*turns)
    finally:
        for turn in turns:
            turn.cancel()


@asynccontextmanager
async def supervised_engine(config: EngineConfig, restarts: int = 3) -> AsyncIterator[EngineProcessClient]:
    """An engine in processes of its own, for `AsyncLLM.of`: if it dies, another takes its place, and requests go on.

    restarts: within an hour. Raises UserError and EngineError if it cannot start.
    """
    engines = EngineSupervisor(ProcessOptions("", config, log_level=20), restarts)
    try:
        await engines.start()
        watching = asyncio.ensure_future(engines.watch())
        try:
            yield engines.core
        finally:
            watching.cancel()
            await asyncio.wait({watching})
    finally:
        engines.core.close()
        await engines.close()
