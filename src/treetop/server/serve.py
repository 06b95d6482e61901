"""`treetop serve`: one engine process, one API process or several, and who ends with whom.

client --HTTP--> API (this process; or --api-workers N, which share the socket) --zmq, private path--> engine process

An API process dies: its streams are cut, the others go on (with none left, everything ends with exit code 1).
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
from pathlib import Path
from typing import Any

import msgspec

from treetop.core.remote import RemoteCore
from treetop.core.supervisor import EngineSupervisor, end, spawn
from treetop.core.wire import EngineDead, EngineLost, EngineNews, EngineUp, ProcessOptions
from treetop.server.alive import Alive
from treetop.server.api.front import check_files
from treetop.server.api.run import ApiOptions, log_to_stderr, serve
from treetop.server.options import ServeOptions
from treetop.types.errors import ConfigError

_BACKLOG = 2048

log = logging.getLogger("treetop.server")


def run(process: ProcessOptions, options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death. Returns the exit code. Raises UserError and EngineError."""
    log_to_stderr()
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
    workers: list[Process] = []
    _on_signals(stopped, workers)
    async with AsyncExitStack() as stack:
        engines = EngineSupervisor(process, folder, options.engine_restarts)
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
        return await _serve_with_workers(stack, engines, workers, told, (listening, folder), stopped)


async def start(engines: EngineSupervisor, model: str, options: ServeOptions) -> None:
    """Start the engine. What the API could not read ends it before it has loaded. Raises UserError and EngineError."""
    await engines.launch()
    await asyncio.gather(engines.meet(), asyncio.to_thread(check_files, model, options))


def _on_signals(stopped: "asyncio.Future[int]", workers: Sequence[Process]) -> None:
    """A signal ends everything: the first lets workers finish, the second does not. One API has its own handlers."""

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            stopped.set_result(128 + number if number == signal.SIGINT else 0)
        _terminate(workers)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def _terminate(workers: Sequence[Process]) -> None:
    for worker in workers:
        if worker.returncode is None:
            worker.terminate()


class ApiProcess:
    """An API process, which is told of the engine. A `FrontEnd` of the supervisor, also once it has ended.

    number: of its client among all of the engine; the server's own is 0.
    """

    def __init__(self, process: Process, number: int) -> None:
        self.process, self.number = process, number

    def lost(self, reason: str) -> None:
        self._tell(EngineLost(reason))

    async def resume(self, address: str) -> None:
        self._tell(EngineUp(address))
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


async def _serve_with_workers(
    stack: AsyncExitStack,
    engines: EngineSupervisor,
    workers: list[Process],
    told: ApiOptions,
    of: tuple[socket.socket, Path],
    stopped: "asyncio.Future[int]",
) -> int:
    """Run API processes on the socket until none is left, the engine ends, or a signal comes."""
    listening, folder = of
    listening.listen(_BACKLOG)
    apis = [await _start_api(stack, number, told, listening, folder) for number in range(told.serve.api_workers)]
    workers += [each.process for each in apis]
    if stopped.done():
        _terminate(workers)
    up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    dead = asyncio.ensure_future(engines.watch(apis, up))
    stack.callback(dead.cancel)
    ends: dict[asyncio.Future[Any], ApiProcess] = {asyncio.ensure_future(each.process.wait()): each for each in apis}
    stops: set[asyncio.Future[Any]] = {dead, stopped}
    await asyncio.wait({up, *stops, *ends}, return_when=asyncio.FIRST_COMPLETED)
    served = up.done() and all(each.process.returncode is None for each in apis)
    if served:
        _say(listening, engines.core, told)
    listening.close()  # the workers have it
    while served and ends and not any(each.done() for each in stops):
        await asyncio.wait({*stops, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not any(each.done() for each in stops):
            for gone in [each for each in ends if each.done()]:
                _left(engines.core, ends.pop(gone), told, folder)
    if not any(each.done() for each in stops):
        log.error("no API process is left; the server ends" if served else "an API process did not start")
        _terminate(workers)
    codes = await asyncio.gather(*ends)
    return stopped.result() if stopped.done() and {*codes} <= {0, -signal.SIGTERM} else 1


async def _start_api(
    stack: AsyncExitStack, place: int, told: ApiOptions, listening: socket.socket, folder: Path
) -> ApiProcess:
    metrics = folder / "metrics"
    metrics.mkdir(exist_ok=True)
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    arguments = ["treetop.server.api.worker", str(listening.fileno())]
    options = msgspec.structs.replace(told, number=place, alive_file=str(folder / "alive"))
    process = await spawn(arguments, options, stdout=PIPE, pass_fds=(listening.fileno(),), env=environment)
    stack.push_async_callback(end, process)
    return ApiProcess(process, 1 + place)


def _left(core: RemoteCore, api: ApiProcess, told: ApiOptions, folder: Path) -> None:
    """An API process has ended of its own: its requests end in the engine, and count no more."""
    log.error(
        "API process %d has ended with exit code %s, and its connections with it",
        api.process.pid,
        api.process.returncode,
    )
    core.left(api.number)
    alive = Alive(folder / "alive", api.number - 1, told.serve.api_workers)
    alive.add(-alive.own)
    alive.close()


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
