"""`treetop serve`: one engine process, one API process or several, and who ends with whom.

client --HTTP--> API (this process; or --api-workers N, which share the socket) --zmq, private path--> engine process

The engine dies: requests in flight end with an error, new ones get 503, everything ends with exit code 1. This process
dies: the others see the end of their stdin, and end.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from treetop.core.remote import RemoteCore
from treetop.core.roles import check_handover
from treetop.core.wire import MockOptions, ProcessOptions
from treetop.server.api.run import ApiOptions, log_to_stderr, serve
from treetop.server.options import ServeOptions
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError
from treetop.types.roles import HandoverOptions

_END_S = 10.0
"""How long a process may take to end once it should."""
_LONGEST_PATH = 90
_BACKLOG = 2048

log = logging.getLogger("treetop.server")


def run(config: EngineConfig, options: ServeOptions, mock: MockOptions | None, handover: HandoverOptions) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death. Returns the exit code. Raises UserError and EngineError."""
    log_to_stderr()
    if handover.role != "both":
        check_handover(config, handover, mock)
    listening = _bind(options)
    with tempfile.TemporaryDirectory(prefix="treetop-") as folder:  # mode 0700: nobody else reaches the engine
        if len(folder) > _LONGEST_PATH:
            raise ConfigError(f"the path of temporary files is too long for a socket: {folder}; set TMPDIR")
        process = ProcessOptions(f"ipc://{folder}/engine", config, mock, log_level=20, handover=handover)
        return asyncio.run(_run(process, options, listening))


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


async def _run(process: ProcessOptions, options: ServeOptions, listening: socket.socket) -> int:
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    workers: list[Process] = []
    _on_signals(stopped, workers)
    async with AsyncExitStack() as stack:
        engine = await _spawn(["treetop.core.engine_process"], process)
        stack.push_async_callback(_end, engine)
        core = RemoteCore(process.address)
        stack.callback(core.close)
        code = await _first(core.connect(), engine, stopped)
        if code is not None:
            engine.kill()  # it may be loading for minutes yet
            return code
        told = ApiOptions(options, process.address, process.config.model, process.config.seed)
        if options.api_workers == 1:
            watch = asyncio.ensure_future(_watch(engine, core))
            stack.callback(watch.cancel)
            return await serve(core, told, listening, lambda: _say(listening, core, told))
        return await _serve_with_workers(stack, engine, workers, (core, told), listening, stopped)


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


async def _spawn(arguments: Sequence[str], options: msgspec.Struct, **given: Any) -> Process:
    """A process of ours, which is told its options on stdin and ends with it."""
    command = [sys.executable, "-P", "-m", *arguments]
    given = {"stdout": DEVNULL, **given}
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, start_new_session=True, **given)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(options) + b"\n")
    return child


async def _first(up: Awaitable[None], engine: Process, stopped: "asyncio.Future[int]") -> int | None:
    """Wait until the engine is up. Returns an exit code if a signal came before. Raises what the engine says."""
    connected, ended = asyncio.ensure_future(up), asyncio.ensure_future(engine.wait())
    waited: set[asyncio.Future[Any]] = {connected, ended, stopped}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        connected.cancel()
        return stopped.result()
    if not connected.done():  # it has ended; what it said may still be on its way
        await asyncio.wait({connected}, timeout=1.0)
    if not connected.done():
        connected.cancel()
        raise EngineError(f"the engine process ended with exit code {engine.returncode} before it was up")
    connected.result()
    return None


async def _watch(engine: Process, core: RemoteCore) -> None:
    core.fail(_died(await engine.wait()))


def _died(code: int) -> str:
    return f"the engine process has ended with exit code {code}"


async def _serve_with_workers(
    stack: AsyncExitStack,
    engine: Process,
    workers: list[Process],
    of: tuple[RemoteCore, ApiOptions],
    listening: socket.socket,
    stopped: "asyncio.Future[int]",
) -> int:
    """Run API processes on the socket until one of all the processes ends, or a signal comes."""
    core, told = of
    listening.listen(_BACKLOG)
    folder = Path(told.address.removeprefix("ipc://")).parent
    metrics = folder / "metrics"
    metrics.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    spawned = []
    for number in range(told.serve.api_workers):
        arguments = ["treetop.server.api.worker", str(listening.fileno())]
        options = msgspec.structs.replace(told, number=number, alive_file=str(folder / "alive"))
        worker = await _spawn(arguments, options, stdout=PIPE, pass_fds=(listening.fileno(),), env=environment)
        stack.push_async_callback(_end, worker)
        spawned.append(worker)
    workers += spawned
    if stopped.done():
        _terminate(workers)
    ends: set[asyncio.Future[Any]] = {asyncio.ensure_future(each.wait()) for each in (engine, *workers)}
    ups = asyncio.ensure_future(_all_up(workers))
    await asyncio.wait({*ends, ups, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if ups.done() and ups.result():
        _say(listening, core, told)
    listening.close()  # the workers have it
    await asyncio.wait({*ends, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if engine.returncode is not None:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(_died(engine.returncode).encode() + b"\n")
    elif not stopped.done():
        log.error("an API process has ended; so does the server")
        _terminate(workers)
    codes = await asyncio.gather(*(worker.wait() for worker in workers))
    return stopped.result() if stopped.done() and {*codes} <= {0, -signal.SIGTERM} else 1


async def _all_up(workers: Sequence[Process]) -> bool:
    """Wait for the word of each; False if one ends without it."""
    lines = [await worker.stdout.readline() for worker in workers if worker.stdout is not None]
    return all(lines)


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


async def _end(process: Process) -> None:
    """Close its stdin, which ends it, and wait."""
    if process.stdin is not None:
        process.stdin.close()
        with suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
