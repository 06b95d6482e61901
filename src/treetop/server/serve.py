"""`treetop serve`: one engine process, one API process or several, and who ends with whom.

client --HTTP--> API (this process; or --api-workers N, which share the socket) --zmq, private path--> engine process

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
        started = asyncio.ensure_future(engines.start())
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
    """An API process, which is told of the engine. A `FrontEnd` of the supervisor."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def lost(self, reason: str) -> None:
        self._tell(EngineLost(reason))

    async def resume(self, address: str) -> None:
        self._tell(EngineUp(address))
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.decode().strip() == address:
                return
        await asyncio.get_running_loop().create_future()  # it has ended, and the server will

    def fail(self, reason: str) -> None:
        self._tell(EngineDead(reason))

    def _tell(self, news: EngineNews) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(news) + b"\n")


async def _serve_with_workers(
    stack: AsyncExitStack,
    engines: EngineSupervisor,
    workers: list[Process],
    told: ApiOptions,
    of: tuple[socket.socket, Path],
    stopped: "asyncio.Future[int]",
) -> int:
    """Run API processes on the socket until one of them or the engine ends, or a signal comes."""
    listening, folder = of
    listening.listen(_BACKLOG)
    metrics = folder / "metrics"
    metrics.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    spawned = []
    for number in range(told.serve.api_workers):
        arguments = ["treetop.server.api.worker", str(listening.fileno())]
        options = msgspec.structs.replace(told, number=number, alive_file=str(folder / "alive"))
        worker = await spawn(arguments, options, stdout=PIPE, pass_fds=(listening.fileno(),), env=environment)
        stack.push_async_callback(end, worker)
        spawned.append(worker)
    workers += spawned
    if stopped.done():
        _terminate(workers)
    up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    dead = asyncio.ensure_future(engines.watch([ApiProcess(each) for each in workers], up))
    stack.callback(dead.cancel)
    ends: set[asyncio.Future[Any]] = {dead, *(asyncio.ensure_future(each.wait()) for each in workers)}
    await asyncio.wait({*ends, up, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if up.done():
        _say(listening, engines.core, told)
    listening.close()  # the workers have it
    await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not dead.done() and not stopped.done():
        log.error("an API process has ended; so does the server")
        _terminate(workers)
    codes = await asyncio.gather(*(worker.wait() for worker in workers))
    return stopped.result() if stopped.done() and {*codes} <= {0, -signal.SIGTERM} else 1


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
