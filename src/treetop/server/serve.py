"""`treetop serve`: one engine process, one API process or several, and who ends with whom.

client --HTTP--> API (this process; or --api-workers N, which share the socket) --zmq, private path--> engine process

An API process dies: its streams are cut, the others go on, and another takes its place (with none left, everything ends
with exit code 1).
The engine dies: another takes its place, and requests go on (`core/supervisor.py`). When it may not be started again,
requests in flight end with an error, new ones get 503, and everything ends with exit code 1. This process dies: the
others see the end of their stdin, and end.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from treetop.core.remote import RemoteCore
from treetop.core.supervisor import EngineSupervisor, RestartLimit, Watchdog, end, spawn
from treetop.core.wire import EngineDead, EngineLost, EngineNews, EngineUp, ProcessOptions
from treetop.server.alive import Alive
from treetop.server.api.connections import BACKLOG, most_connections
from treetop.server.api.front import check_files
from treetop.server.api.run import ApiOptions, log_to_stderr, serve
from treetop.server.options import ServeOptions
from treetop.types.errors import ConfigError

log = logging.getLogger("treetop.server")


def run(process: ProcessOptions, options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death. Returns the exit code. Raises UserError and EngineError."""
    log_to_stderr()
    most_connections(options.max_connections)
    listening = _bind(options)
    with tempfile.TemporaryDirectory(prefix="treetop-") as folder:  # mode 0700: nobody else reaches the engine
        return asyncio.run(_run(Path(folder), process, options, listening))


def _bind(options: ServeOptions) -> socket.socket:
    """The socket, before anything takes time; it listens once the engine is up."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"--host {options.host} --port {options.port}: {error.strerror or error}") from None
    return listening


async def _run(folder: Path, process: ProcessOptions, options: ServeOptions, listening: socket.socket) -> int:
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    workers: list[Process] = []  # none until they serve
    _on_signals(stopped, workers)
    async with AsyncExitStack() as stack:
        watchdog = Watchdog(options.watchdog_timeout, options.watchdog_restart)
        engines = EngineSupervisor(process, folder, options.engine_restarts, watchdog)
        stack.push_async_callback(engines.close)
        stack.callback(engines.core.close)
        started = asyncio.ensure_future(start(engines, process.config.model, options))
        waited: set[asyncio.Future[Any]] = {started, stopped}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            started.cancel()
            engines.kill()
            return stopped.result()
        started.result()
        told = ApiOptions(options, process.config.model, process.config.seed)
        if options.api_workers == 1:
            watch = asyncio.ensure_future(engines.watch())
            stack.callback(watch.cancel)
            return await serve(engines.core, told, listening, lambda: _say(listening, engines.core, told))
        return await ApiProcesses(engines, told, listening, folder, stack, workers).serve(stopped)


async def start(engines: EngineSupervisor, model: str, options: ServeOptions) -> None:
    """Start the engine. What the API could not read ends it before it has loaded. Raises UserError and EngineError."""
    await engines.launch()
    await asyncio.gather(engines.meet(), asyncio.to_thread(check_files, model, options))


def _on_signals(stopped: "asyncio.Future[int]", workers: Sequence[Process]) -> None:
    """A signal ends everything: the first lets workers finish, the second does not. One API has its own handlers."""

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            stopped.set_result(128 + number if number == signal.SIGINT else 0)
        terminate(workers)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def terminate(workers: Sequence[Process]) -> None:
    for worker in workers:
        if worker.returncode is None:
            worker.terminate()


class ApiProcess:
    """An API process, which is told of the engine. A `FrontEnd` of the supervisor, also once it has ended.

    place: among those that live, and of whoever takes its place. number: of its client among all that the engine has
    ever had; the server's own is 0.
    """

    def __init__(self, process: Process, place: int, number: int) -> None:
        self.process, self.place, self.number = process, place, number

    def lost(self, reason: str) -> None:
        self._tell(EngineLost(reason))

    def meet(self, address: str) -> None:
        """As `resume`, for one that has nothing yet, so that nobody waits for it."""
        self._tell(EngineUp(address))

    async def resume(self, address: str) -> None:
        self.meet(address)
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.decode().strip() == address:
                return

    def fail(self, reason: str) -> None:
        self._tell(EngineDead(reason))

    def _tell(self, news: EngineNews) -> None:
        assert self.process.stdin is not None
        if self.process.returncode is None:
            self.process.stdin.write(msgspec.json.encode(news) + b"\n")


class ApiProcesses:
    """The API processes, which share a socket. One that dies is started again, as often as the options allow."""

    def __init__(
        self,
        engines: EngineSupervisor,
        told: ApiOptions,
        listening: socket.socket,
        folder: Path,
        stack: AsyncExitStack,
        processes: list[Process],
    ) -> None:
        """stack: ends each process. processes: where each is noted, for signals."""
        self._engines, self._told, self._listening, self._folder = engines, told, listening, folder
        self._stack, self._restarts = stack, RestartLimit(told.serve.api_restarts)
        self._numbers = count(1)
        self._ends: dict[asyncio.Future[int], ApiProcess] = {}
        self._processes = processes

    async def serve(self, stopped: "asyncio.Future[int]") -> int:
        """Until none is left, the engine ends, or a signal comes. Returns the exit code."""
        self._listening.listen(BACKLOG)
        for place in range(self._told.serve.api_workers):
            await self._start(place)
        if stopped.done():
            terminate(self._processes)
        up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        dead = asyncio.ensure_future(self._engines.watch(up))
        self._stack.callback(dead.cancel)
        stops: set[asyncio.Future[Any]] = {dead, stopped}
        await asyncio.wait({up, *stops, *self._ends}, return_when=asyncio.FIRST_COMPLETED)
        served = up.done() and not any(each.done() for each in self._ends)
        if served:
            _say(self._listening, self._engines.core, self._told)
        while served and self._ends and not any(each.done() for each in stops):
            await asyncio.wait({*stops, *self._ends}, return_when=asyncio.FIRST_COMPLETED)
            for gone in [each for each in self._ends if each.done()]:
                if not any(each.done() for each in stops):
                    await self._replace(self._ends.pop(gone), stopped)
        self._listening.close()  # the processes have it
        if not any(each.done() for each in stops):
            log.error("no API process is left; the server ends" if served else "an API process did not start")
            terminate(self._processes)
        codes = await asyncio.gather(*self._ends)
        return stopped.result() if stopped.done() and {*codes} <= {0, -signal.SIGTERM} else 1

    async def _start(self, place: int, late: bool = False) -> None:
        """place: of its count among all. late: the others serve already."""
        metrics, number = self._folder / "metrics", next(self._numbers)
        metrics.mkdir(exist_ok=True)
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        arguments = ["treetop.server.api.worker", str(self._listening.fileno())]
        options = msgspec.structs.replace(
            self._told, number=place, client=number, alive_file=str(self._folder / "alive")
        )
        process = await spawn(arguments, options, stdout=PIPE, pass_fds=(self._listening.fileno(),), env=environment)
        self._stack.push_async_callback(end, process)
        self._processes.append(process)
        api = ApiProcess(process, place, number)
        self._engines.join(api)
        if late:
            api.meet(self._engines.address)
        self._ends[asyncio.ensure_future(process.wait())] = api

    async def _replace(self, api: ApiProcess, stopped: "asyncio.Future[int]") -> None:
        """One has ended of its own: its requests end in the engine and count no more. Another takes its place."""
        again = self._restarts.take()
        log.error(
            "API process %d has ended with exit code %s, and its connections with it%s",
            api.process.pid,
            api.process.returncode,
            "; it is started again" if again else "; it is not started again (--api-restarts)",
        )
        self._engines.leave(api)
        self._engines.core.left(api.number)
        alive = Alive(self._folder / "alive", api.place, self._told.serve.api_workers)
        alive.add(-alive.own)
        alive.close()
        if again:
            await self._start(api.place, late=True)
            if stopped.done():
                terminate(self._processes[-1:])  # it came after the signal


def _say(listening: socket.socket, core: RemoteCore, told: ApiOptions) -> None:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(told.serve.served_model_name or (told.model,))
    print(
        f"treetop: serving {names} on http://{shown}:{port} (context {core.info.max_context},"
        f" {core.info.max_requests} requests at a time)",
        file=sys.stderr,
        flush=True,
    )
