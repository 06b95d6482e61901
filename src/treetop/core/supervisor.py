"""An engine process, and another in its place when it dies: who starts it, watches it, and tells those that use it.

supervisor --starts, watches--> engine process 1, 2, ...      each at an address of its own
    '--lost, resume, fail--> front ends: this process's `RemoteCore`, API processes
"""

import asyncio
import logging
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from treetop.core.remote import WATCHDOG_S, RemoteCore
from treetop.core.wire import ProcessOptions
from treetop.disaggregation.registry import withdraw
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, UserError

END_S = 10.0
"""How long a process may take to end once it should."""
WINDOW_S = 3600.0
"""Restarts are counted that lie no longer back."""
TURN_S = 30.0
"""Seconds after which the next front end is given an engine beside one that has not answered, such as a stopped one."""
_LAST_WORDS_S = 1.0
_LONGEST_PATH = 90

log = logging.getLogger("treetop.core")


class Watchdog(NamedTuple):
    """timeout_s: silence after which an engine counts as stalled. restart: whether another then takes its place."""

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
    """Whoever has requests with the engine. `RemoteCore` says what the words mean."""

    def lost(self, reason: str) -> None: ...

    async def resume(self, address: str) -> None:
        """Wait until the engine at the address is up and has all that is alive here."""
        ...

    def fail(self, reason: str) -> None: ...


class EngineSupervisor:
    """Keeps an engine process running. core: its client in this process, which can be used once `start` is over."""

    def __init__(self, process: ProcessOptions, folder: Path, restarts: int, watchdog: Watchdog = WATCHDOG) -> None:
        """process: what each engine is told, but for its address. folder: of this user alone. restarts: how often
        within an hour an engine that has died is started again.

        Raises ConfigError for a folder whose path is too long.
        """
        if len(str(folder)) > _LONGEST_PATH:
            raise ConfigError(f"the path of temporary files is too long for a socket: {folder}; set TMPDIR")
        self._options, self._folder, self._watchdog = process, folder, watchdog
        self._restarts = RestartLimit(restarts)
        self._others: list[FrontEnd] = []
        self._num_started = 0
        self._process: Process | None = None
        self.core = RemoteCore(watchdog_s=watchdog.timeout_s)

    @property
    def address(self) -> str:
        """Of the last engine that was started."""
        return f"ipc://{self._folder}/engine-{self._num_started}"

    async def start(self) -> None:
        """Start an engine and wait until it is up. Raises UserError and EngineError for what it says."""
        await self.launch()
        await self.meet()

    async def launch(self) -> None:
        """Start an engine process."""
        self._num_started += 1
        options = msgspec.structs.replace(self._options, address=self.address)
        self._process = await spawn(["treetop.core.engine_process"], options)

    async def meet(self) -> None:
        """Wait until the engine is up. Raises UserError and EngineError for what it says."""
        await self._while_it_lives(self.core.connect(self.address), " before it was up")

    def join(self, front: FrontEnd) -> None:
        """Another front end, beside `core`. It is told of each engine from the next one on."""
        self._others.append(front)

    def leave(self, front: FrontEnd) -> None:
        """It has ended, and is told nothing more."""
        self._others.remove(front)

    @property
    def _fronts(self) -> list[FrontEnd]:
        return [self.core, *self._others]

    async def watch(self, up: "asyncio.Future[None] | None" = None) -> str:
        """Until the engine is dead for good, which all are told. Returns why.

        up: is set once all have met the first engine.
        """
        try:
            reason = await self._keep(up)
        except Exception as error:  # a bug: nobody may wait for ever
            log.exception("the engine is not watched any more")
            reason = f"the engine is not watched any more: {type(error).__name__}"
        for front in self._fronts:
            front.fail(reason)
        return reason

    async def _keep(self, up: "asyncio.Future[None] | None") -> str:
        lost_s: float | None = None
        while True:
            try:
                if lost_s is not None:
                    await self.start()
                await self._while_it_lives(_resume(self._fronts, self.address))
                if lost_s is not None:
                    log.warning("the engine is up again, after %.1f s", time.monotonic() - lost_s)
                if up is not None and not up.done():
                    up.set_result(None)
                reason = await self._ended()
            except UserError as error:
                return f"the engine cannot be started again: {error}"
            except EngineError as error:
                reason = str(error)
            lost_s = time.monotonic()
            await self.close()  # nothing of it is left
            for front in self._fronts:
                front.lost(reason)
            if not self._restarts.take():
                return reason
            log.warning("%s; it is started again, and requests go on", reason)

    async def _ended(self) -> str:
        """Wait until the engine has died, has said that it does and had time to, or is stalled. Returns why."""
        process = self._running
        ended, gone = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self.core.gone.wait())
        ends = {ended, gone}
        if self._watchdog.restart:
            ends.add(stalled := asyncio.ensure_future(self.core.stalled.wait()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._watchdog.restart and stalled.done():
                return self.core.stall_reason
            await asyncio.wait({ended}, timeout=END_S)
            await asyncio.wait({gone}, timeout=0 if gone.done() else _LAST_WORDS_S)  # they may still be on their way
        finally:
            for each in ends:
                each.cancel()
        return self.core.why or f"the engine process has ended with exit code {process.returncode}"

    async def _while_it_lives(self, work: Coroutine[Any, Any, None], when: str = "") -> None:
        """Do what needs the engine. Raises EngineError if it ends before."""
        done, ended = asyncio.ensure_future(work), asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise EngineError(ended.result() + when)
            done.result()
        finally:
            done.cancel()
            ended.cancel()

    @property
    def _running(self) -> Process:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """Do not wait for what it is doing: it may be loading for minutes yet."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """End the engine process, any number of times. Without this process it would remove the folder."""
        self.kill()
        if self._process is None:
            return
        await end(self._process)
        handover = self._options.handover
        if handover.mode == "prefill" and handover.registry is not None:
            withdraw(handover.registry, handover.listens(self._options.config.ep_size))


async def _resume(fronts: Sequence[FrontEnd], address: str) -> None:
    """One after the other, so that no more than one request of all is on trial; one that hangs holds up nobody."""
    turns: list[asyncio.Future[None]] = []
    try:
        for front in fronts:
            turns.append(asyncio.ensure_future(front.resume(address)))
            await asyncio.wait(turns[-1:], timeout=TURN_S)
            if turns[-1].done():
                turns[-1].result()
        await asyncio.gather(*turns)
    finally:
        for turn in turns:
            turn.cancel()


@asynccontextmanager
async def supervised_engine(config: EngineConfig, restarts: int = 3) -> AsyncIterator[RemoteCore]:
    """An engine in a process of its own, for `AsyncLLM.of`: if it dies, another takes its place, and requests go on.

    restarts: within an hour. Raises UserError and EngineError if it cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="treetop-") as folder:  # mode 0700: nobody else reaches the engine
        supervisor = EngineSupervisor(ProcessOptions("", config, log_level=20), Path(folder), restarts)
        try:
            await supervisor.start()
            watching = asyncio.ensure_future(supervisor.watch())
            try:
                yield supervisor.core
            finally:
                watching.cancel()
                await asyncio.wait({watching})
        finally:
            supervisor.core.close()
            await supervisor.close()


async def spawn(arguments: Sequence[str], options: msgspec.Struct, **given: Any) -> Process:
    """A process of ours, which is told its options on stdin and ends with it."""
    command = [sys.executable, "-P", "-m", *arguments]
    given = {"stdout": DEVNULL, **given}
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, start_new_session=True, **given)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(options) + b"\n")
    return child


async def end(process: Process) -> None:
    """Close its stdin, which ends it, and wait."""
    if process.stdin is not None:
        process.stdin.close()
        with suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
