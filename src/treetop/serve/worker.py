"""One of several API processes that share a listening socket.

    python -m treetop.serve.worker FD      started by `treetop serve`

stdin: a line of JSON says what to do; later lines, what has become of the engine; the end of it, that the parent died.
stdout: the news of an engine that is up come back, once requests are accepted and it has all that were.
"""

import asyncio
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from treetop.api.keys.api_keys import Keys
from treetop.core.wire import ApiEvent, EngineDead, EngineEvent, EngineLost, EngineUp, KeysChanged
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.remote_engine import RemoteEngine
from treetop.serve.run import ApiOptions, log_server, serve


def main() -> int:
    listening = socket.socket(fileno=int(sys.argv[1]))
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=ApiOptions)
    log_server()
    return asyncio.run(_run(options, listening, stdin))


async def _run(options: ApiOptions, listening: socket.socket, stdin: io.FileIO) -> int:
    changing = None if options.changing_file is None else Path(options.changing_file)
    core = EngineProcessClient(options.client, options.serve.watchdog_timeout, options.serve.dp_size, changing)
    watches = [_EngineWatch(engine) for engine in core.engines]
    serving = asyncio.Event()
    for each in watches:
        each.serving = serving
    keys = options.open_keys()
    arguments = stdin, watches, keys, asyncio.get_running_loop()
    threading.Thread(target=_read_events, args=arguments, daemon=True).start()
    try:
        for each in watches:
            await each.first.wait()
        if core.failure is not None:
            return 1
        return await serve(core, options, listening, keys, serving.set)
    finally:
        _ignore_interrupts()
        core.close()


def _ignore_interrupts() -> None:
    """It ends, whatever else is said: a second signal would be a traceback once the loop's handlers are gone."""
    with suppress(KeyboardInterrupt):
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _EngineWatch:
    """Does what the parent's news of an engine ask for. first: there has been one, or there will be none."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._resuming: asyncio.Task[None] | None = None
        self.first, self.serving = asyncio.Event(), asyncio.Event()

    def take(self, event: EngineEvent) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        match event:
            case EngineUp():
                self._resuming = asyncio.create_task(self._resume(event))
            case EngineLost(_, reason, killed):
                self._engine.lost(reason, killed)
            case EngineDead(_, reason):
                self._engine.fail(reason)
                self.first.set()

    async def _resume(self, up: EngineUp) -> None:
        await self._engine.resume(up.addresses)
        self.first.set()
        await self.serving.wait()
        sys.stdout.buffer.write(msgspec.json.encode(up) + b"\n")
        sys.stdout.flush()


def _read_events(
    stdin: io.FileIO, watches: Sequence[_EngineWatch], keys: Keys, loop: asyncio.AbstractEventLoop
) -> None:
    while line := stdin.readline():
        event = msgspec.json.decode(line, type=ApiEvent)
        if isinstance(event, KeysChanged):
            loop.call_soon_threadsafe(keys.replace, event.text)
            continue
        loop.call_soon_threadsafe(watches[event.replica].take, event)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
