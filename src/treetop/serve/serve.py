"""`treetop serve`: one engine process, one API process or several, and who ends with whom.

client --HTTP--> API (this process; or --api-workers N, which share the socket) --zmq, private path--> engine process

An API process dies: its streams are cut, the others go on, and another takes its place (with none left, everything ends
with exit code 1).
The engine dies: another takes its place, and requests go on (`distributed/supervisor.py`). When it may not be started
again, requests in flight end with an error, new ones get 503, and everything ends with exit code 1. This process dies:
the others see the end of their stdin, and end.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from treetop.api.api_state import check_files
from treetop.api.keys.api_keys import all_keys, read_file
from treetop.core.clients import EngineClient
from treetop.core.wire import ApiEvent, EngineDead, EngineLost, EngineUp, KeysChanged, ProcessOptions
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.in_flight import InFlightCounter
from treetop.distributed.log_lines import FORMAT, say
from treetop.distributed.process import Child, send_line, start_process
from treetop.distributed.supervisor import EngineSupervisor, RestartLimit, Watchdog
from treetop.serve.connections import BACKLOG, most_connections
from treetop.serve.listening import address_of, is_for_others, listening_socket, tls_context
from treetop.serve.own_folder import own_folder
from treetop.serve.run import ApiOptions, log_server, serve
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError

_ENDED_BY_SIGNAL = {0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT}
"""Exit codes of an API process that was told to end."""
_END_S = 10.0
"""How long an API process may take to end once it should."""

log = logging.getLogger("treetop.server")


def run(process: ProcessOptions, options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death. Returns the exit code. Raises UserError and EngineError."""
    os.environ[FORMAT] = options.log_format
    log_server()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options = options.by_cores(cores)
    most_connections(options.max_connections)
    tls_context(options)
    key_text = read_file(options.api_keys_file)
    if is_for_others(options) and all(key.is_admin for key in all_keys(options, key_text)):
        log.warning("--host %s without --api-key: whoever reaches this address may use the server", options.host)
    with listening_socket(options) as listening, own_folder() as folder:
        return asyncio.run(_run(folder, process, options, listening, key_text))


async def _run(
    folder: Path, process: ProcessOptions, options: ServeOptions, listening: socket.socket, key_text: str | None
) -> int:
    """key_text: of the file with keys."""
    api_options = ApiOptions(options, process.config.model, process.config.seed, keys=key_text)
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    apis: list[ApiProcess] = []  # none until they serve
    _on_signals(stopped, apis)
    async with started_engines(process, options, stopped) as (core, engines):
        if stopped.done():
            return stopped.result()
        if options.num_api_workers > 1:
            processes = ApiProcesses(engines, core, api_options, listening, folder, apis)
            _on_hangup(options, processes.change_keys)
            return await processes.serve(stopped)
        keys = api_options.open_keys()
        _on_hangup(options, keys.replace)
        with watched(engines):
            return await serve(core, api_options, listening, keys, lambda: _print_address(listening, core, api_options))


@asynccontextmanager
async def started_engines(
    process: ProcessOptions, options: ServeOptions, stopped: "asyncio.Future[int]"
) -> AsyncIterator[tuple[EngineProcessClient, list[EngineSupervisor]]]:
    """The engines, up, until the end of the block; or killed, if `stopped` is done first.

    Raises UserError and EngineError.
    """
    if options.dp_size > 1 and process.config.kv_offloading_size is not None:  # each engine checks for itself alone
        from treetop.engine.startup.host_layout import check_host_memory  # noqa: PLC0415  # PyTorch takes seconds

        await asyncio.to_thread(check_host_memory, process.config, options.dp_size)
    watchdog = Watchdog(options.watchdog_timeout, options.watchdog_restart)
    async with AsyncExitStack() as stack:
        core, engines = EngineProcessClient(0, watchdog.timeout_s, options.dp_size), list[EngineSupervisor]()
        for replica in range(options.dp_size):
            own = msgspec.structs.replace(process, replica=replica, num_replicas=options.dp_size)
            engines.append(EngineSupervisor(own, options.engine_restarts, watchdog, core, options.spare_engine))
            stack.push_async_callback(engines[-1].close)
        stack.callback(core.close)
        started = asyncio.ensure_future(start(engines, process.config.model, options))
        waited: set[asyncio.Future[Any]] = {started, stopped}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            started.cancel()
            for each in engines:
                each.kill()
        else:
            started.result()
            core.check_alike()
        yield core, engines


async def start(engines: Sequence[EngineSupervisor], model: str, options: ServeOptions) -> None:
    """Start the engines. What the API could not read ends it before one has loaded. Raises UserError, EngineError."""
    for each in engines:
        each.launch()
    await asyncio.gather(*(each.meet() for each in engines), asyncio.to_thread(check_files, model, options))


@contextmanager
def watched(engines: Sequence[EngineSupervisor]) -> Iterator[None]:
    """Engines that die are started again meanwhile."""
    watches = [asyncio.ensure_future(_watch(each)) for each in engines]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()


async def _watch(engines: EngineSupervisor, up: "asyncio.Future[None] | None" = None) -> str:
    reason = await engines.watch(up)
    log.error("the server shuts down: %s", reason)
    return reason


def _on_signals(stopped: "asyncio.Future[int]", apis: "Sequence[ApiProcess]") -> None:
    """A signal ends everything: the first lets workers finish, the second does not. One API has its own handlers.

    Workers get two kinds of signals: of one kind the system keeps one for a process that has not run meanwhile.
    """

    def stop(number: signal.Signals) -> None:
        again = stopped.done()
        if not again:
            stopped.set_result(128 + number if number == signal.SIGINT else 0)
        for api in apis:
            api.send(signal.SIGINT if again else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def _on_hangup(options: ServeOptions, replace: Callable[[str], object]) -> None:
    """SIGHUP reads the file with keys again, if there is one; what is wrong with it is said, and the old one holds."""
    if options.api_keys_file is None:
        return

    def read_again() -> None:
        try:
            text = read_file(options.api_keys_file) or ""
            keys = all_keys(options, text)
            replace(text)
        except ConfigError as error:
            log.error("SIGHUP: %s; the keys from before hold", error)
        else:
            log.info("SIGHUP: %s: %d keys hold from now on", options.api_keys_file, len(keys))

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)


class ApiProcess:
    """An API process.

    place: among those that live, and of whoever takes its place.
    number: of its client among all that the engines have ever had; the server's own is 0.
    ended: its exit code.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", place: int, number: int, num_engines: int) -> None:
        loop = asyncio.get_running_loop()
        self.child = Child(process, lambda line: loop.call_soon_threadsafe(self._on_line, line))
        self.place, self.number = place, number
        self.ended = asyncio.wrap_future(self.child.ended)
        self.fronts = [ApiFront(self, replica) for replica in range(num_engines)]

    def send_line(self, event: ApiEvent) -> None:
        if not self.ended.done():
            send_line(self.child.process, event)

    def send(self, number: signal.Signals) -> None:
        if not self.ended.done():
            self.child.process.send_signal(number)

    def _on_line(self, line: bytes) -> None:
        with suppress(msgspec.MsgspecError, ValueError):  # of a library that prints
            up = msgspec.json.decode(line, type=EngineUp)
            self.fronts[up.replica].has_all(up)


class ApiFront:
    """What an API process has with one engine: a `FrontEnd` of its supervisor, also once the process has ended."""

    def __init__(self, api: ApiProcess, replica: int) -> None:
        self._api, self._replica = api, replica
        self._up: EngineUp | None = None
        self._has_all = asyncio.Event()

    def meet(self, addresses: Sequence[str]) -> None:
        """As `resume`, for one that has nothing yet, so that nobody waits for it."""
        self._up = EngineUp(self._replica, tuple(addresses))
        self._has_all.clear()
        self._api.send_line(self._up)

    def has_all(self, up: EngineUp) -> None:
        if up == self._up:
            self._has_all.set()

    async def resume(self, addresses: Sequence[str]) -> None:
        self.meet(addresses)
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._has_all.wait()), self._api.ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def lost(self, reason: str, killed: bool = False) -> None:
        self._api.send_line(EngineLost(self._replica, reason, killed))

    def fail(self, reason: str) -> None:
        self._api.send_line(EngineDead(self._replica, reason))


class ApiProcesses:
    """The API processes, which share a socket. One that dies is started again, as often as the options allow."""

    def __init__(
        self,
        engines: Sequence[EngineSupervisor],
        core: EngineProcessClient,
        api_options: ApiOptions,
        listening: socket.socket,
        folder: Path,
        apis: list[ApiProcess],
    ) -> None:
        """core: all engines. folder: for what the processes share. apis: where each is noted, for signals."""
        self._engines, self._core, self._api_options, self._listening = engines, core, api_options, listening
        self._folder, self._apis = folder, apis
        self._restarts, self._numbers = RestartLimit(api_options.serve.api_restarts), count(1)

    def change_keys(self, text: str) -> None:
        """All processes go by another text of the file with keys, also those that are started from now on."""
        self._api_options = msgspec.structs.replace(self._api_options, keys=text)
        for api in self._apis:
            api.send_line(KeysChanged(text))

    async def serve(self, stopped: "asyncio.Future[int]") -> int:
        """Until none is left, an engine ends, or a signal comes. Returns the exit code."""
        self._listening.listen(BACKLOG)
        for place in range(self._api_options.serve.num_api_workers):
            self._start(place)
        if stopped.done():
            self._terminate()
        ups = [asyncio.get_running_loop().create_future() for _ in self._engines]
        dead = [asyncio.ensure_future(_watch(each, up)) for each, up in zip(self._engines, ups, strict=True)]
        up = asyncio.gather(*ups)
        try:
            return await self._until_over(up, dead, stopped)
        finally:
            up.cancel()
            for each in dead:
                each.cancel()
            await asyncio.gather(*(asyncio.to_thread(api.child.close, _END_S) for api in self._apis))

    async def _until_over(
        self, up: "asyncio.Future[Any]", dead: "Sequence[asyncio.Future[str]]", stopped: "asyncio.Future[int]"
    ) -> int:
        stops: set[asyncio.Future[Any]] = {*dead, stopped}
        await asyncio.wait({up, *stops, *self._living}, return_when=asyncio.FIRST_COMPLETED)
        served = up.done() and len(self._living) == self._api_options.serve.num_api_workers
        if served:
            _print_address(self._listening, self._core, self._api_options)
        while served and self._living and not any(each.done() for each in stops):
            await asyncio.wait({*stops, *self._living}, return_when=asyncio.FIRST_COMPLETED)
            for gone in [each for each in self._apis if each.ended.done()]:
                if not any(each.done() for each in stops):
                    self._replace(gone)
        self._listening.close()  # the processes have it
        if not any(each.done() for each in stops):
            log.error("no API process is left; the server shuts down" if served else "an API process did not start")
            self._terminate()
        codes = await asyncio.gather(*(api.ended for api in self._apis))
        return stopped.result() if stopped.done() and {*codes} <= _ENDED_BY_SIGNAL else 1

    @property
    def _living(self) -> "list[asyncio.Future[int]]":
        return [api.ended for api in self._apis if not api.ended.done()]

    def _terminate(self) -> None:
        for api in self._apis:
            api.send(signal.SIGTERM)

    def _start(self, place: int, late: bool = False) -> None:
        """place: of its count among all. late: the others serve already."""
        metrics, number, fd = self._folder / "metrics", next(self._numbers), self._listening.fileno()
        metrics.mkdir(exist_ok=True)
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        options = msgspec.structs.replace(
            self._api_options,
            number=place,
            client=number,
            alive_file=str(self._folder / "alive"),
            limits_file=str(self._folder / "limits"),
            changing_file=str(self._folder / "changing"),
        )
        process = start_process("treetop.serve.worker", options, [str(fd)], pass_fds=(fd,), env=environment)
        api = ApiProcess(process, place, number, len(self._engines))
        self._apis.append(api)
        for engine, front in zip(self._engines, api.fronts, strict=True):
            engine.join(front)
            if late:
                front.meet(engine.addresses)

    def _replace(self, api: ApiProcess) -> None:
        """One has ended of its own: its requests end in the engines and count no more. Another takes its place."""
        again = self._restarts.take()
        log.error(
            "API process %d has ended with exit code %s, and its connections with it%s",
            api.child.process.pid,
            api.ended.result(),
            "; restarting it" if again else "; not restarting it (--api-restarts)",
        )
        self._apis.remove(api)
        for engine, front in zip(self._engines, api.fronts, strict=True):
            engine.leave(front)
        self._core.left(api.number)
        alive = InFlightCounter(self._folder / "alive", api.place, self._api_options.serve.num_api_workers)
        alive.add(-alive.own)
        alive.close()
        if again:
            self._start(api.place, late=True)


def _print_address(listening: socket.socket, core: EngineClient, api_options: ApiOptions) -> None:
    address = address_of(listening, api_options.serve)
    names = ", ".join(api_options.serve.served_model_name or (api_options.model,))
    say(
        f"treetop: serving {names} on {address} (context {core.info.max_context},"
        f" {core.info.max_requests} requests at a time)"
    )
