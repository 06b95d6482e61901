"""One API process: a uvicorn server over a core in another process, and its end."""

import asyncio
import gc
import logging
import random
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvicorn

from treetop.api.api_state import ApiState
from treetop.api.app import make_app
from treetop.api.keys.api_keys import Keys
from treetop.api.keys.rate_limits import RateLimits
from treetop.core.clients import EngineClient
from treetop.distributed.in_flight import InFlightCounter
from treetop.distributed.log_lines import log_to_stderr
from treetop.serve.connections import ApiServer, ClientTimeouts, most_connections
from treetop.serve.listening import renew_certificate, tls_context
from treetop.serve.log_limit import LogLimit
from treetop.serve_options import ServeOptions

GRACE_S = 2.0
"""How long a server whose engine is dead still says so."""
_STUCK_S = 5.0
"""How long connections may then take to end."""
_LOOK_S = 0.05
"""Between two looks at what is left while it drains."""


class ApiOptions(msgspec.Struct, frozen=True):
    """What an API process is told.

    model: of the engine's.
    seed: `--seed`, if it was given.
    number: of this process, None if there is but one.
    client: of this process among all that the engine has ever had.
    alive_file, limits_file: where several count their requests, and what keys have used.
    changing_file: that who changes the engines locks.
    keys: the text of the file with API keys.
    """

    serve: ServeOptions
    model: str
    seed: int | None
    number: int | None = None
    client: int = 0
    alive_file: str | None = None
    limits_file: str | None = None
    changing_file: str | None = None
    keys: str | None = None

    def open_keys(self) -> Keys:
        """Raises ConfigError."""
        limits = RateLimits(None if self.limits_file is None else Path(self.limits_file))
        return Keys(self.serve, self.keys, limits)


def first_seed(seed: int | None, client: int = 0) -> int:
    """What an API process draws the seeds of its requests from: of its own, or it would say what others say.

    seed: `--seed`; None for a number that nobody knows. client: of this process among all that the engine has ever had,
    so that one that takes another's place does not begin anew.
    """
    if seed is None:
        return secrets.randbits(63)
    return random.Random(f"{seed} {client}").getrandbits(63) if client else seed


async def serve(
    core: EngineClient,
    options: ApiOptions,
    listening: socket.socket,
    keys: Keys,
    started: Callable[[], None] | None = None,
) -> int:
    """Serve over a core that is up until SIGTERM, SIGINT or its death. Returns the exit code.

    SIGTERM and SIGINT: it is not ready any more, nothing new is accepted, what was accepted is finished; the second one
    ends at once.
    """
    file, number = options.alive_file, options.number or 0
    alive = InFlightCounter(None if file is None else Path(file), number, options.serve.num_api_workers)
    api = ApiState(core, options.serve, options.model, first_seed(options.seed, options.client), alive, keys)
    asked = options.serve
    timeouts = ClientTimeouts(
        asked.http_read_timeout, asked.timeout_keep_alive, asked.http_min_rate, asked.http_write_timeout
    )
    app = make_app(api)
    config = uvicorn.Config(
        app,
        http="h11",  # as `Connection`
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=timeouts.idle_s,  # type: ignore[arg-type]  # seconds of any kind
    )
    maximum = most_connections(options.serve.max_connections)
    tls = tls_context(options.serve)
    server, code = ApiServer(config, listening, maximum, timeouts, tls), 0

    def stop(number: signal.Signals) -> None:
        nonlocal code
        if api.leaving:
            server.force_exit = True
            server.end_within(0)
        api.asked_to_leave.set()
        code = 128 + number if number == signal.SIGINT else 0

    gc.collect()
    gc.freeze()  # what stays for ever is not looked at again when a large body makes the collector run
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    side: list[Awaitable[None]] = [_end_with(core, server), _leave(api, server), log_load(api, options.number)]
    if tls is not None:
        side.append(renew_certificate(tls, options.serve))
    if options.serve.batch_dir is not None:
        side.append(app.state.batches.resume())
    if started is not None:
        side.append(_when_started(server, started))
    tasks = [asyncio.ensure_future(each) for each in side]
    try:
        await server.serve()
    finally:
        for task in tasks:
            task.cancel()
        api.close()
        alive.close()
    return code if core.failure is None else 1


async def _leave(api: ApiState, server: ApiServer) -> None:
    """From the first signal on: be seen to leave, end what there is, then stop listening.

    Whoever asks for readiness meanwhile, over new connections too, is answered that there is none.
    """
    await api.asked_to_leave.wait()
    await asyncio.sleep(api.options.shutdown_delay)
    api.draining = True
    until_s = None if api.options.drain_timeout is None else time.monotonic() + api.options.drain_timeout
    while api.num_working and (until_s is None or time.monotonic() < until_s):
        await asyncio.sleep(_LOOK_S)
    server.end_within(None if until_s is None else max(until_s - time.monotonic(), 0))


async def _end_with(core: EngineClient, server: ApiServer) -> None:
    """A server without an engine says so for a moment, then ends."""
    await core.until_failed()
    await asyncio.sleep(GRACE_S)
    server.end_within(_STUCK_S)
    await asyncio.sleep(_STUCK_S)
    server.force_exit = True  # where it was ending already


async def _when_started(server: ApiServer, started: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    started()


async def log_load(api: ApiState, number: int | None) -> None:
    """A log line now and then."""
    interval_s = api.options.log_interval
    while interval_s:
        await asyncio.sleep(interval_s)
        api.metrics.interval.log_load(api.core.load, "" if number is None else f"[{number}] ")


def log_server() -> None:
    """The log of a process that serves."""
    log_to_stderr(logging.WARNING, "%(asctime)s %(levelname)s %(message)s", filters=[LogLimit()])
    logging.getLogger("treetop").setLevel(logging.INFO)
