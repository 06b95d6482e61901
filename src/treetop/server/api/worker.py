"""One of several API processes that share a listening socket.

    python -m treetop.server.api.worker FD      started by `treetop serve`

stdin: a line of JSON says what to do; later lines, what has become of the engine; the end of it, that the parent died.
stdout: the address of each engine, once requests are accepted and it has all that were.
"""

import asyncio
import io
import os
import socket
import sys
import threading
from contextlib import suppress

import msgspec

from treetop.core.remote import RemoteCore
from treetop.core.wire import EngineDead, EngineLost, EngineNews, EngineUp
from treetop.server.api.run import ApiOptions, log_to_stderr, serve
from treetop.types.errors import TreetopError


def main() -> int:
    listening = socket.socket(fileno=int(sys.argv[1]))
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=ApiOptions)
    log_to_stderr()
    return asyncio.run(_run(options, listening, stdin))


async def _run(options: ApiOptions, listening: socket.socket, stdin: io.FileIO) -> int:
    core = RemoteCore(options.client, options.serve.watchdog_timeout)
    told = _Told(core)
    threading.Thread(target=_listen, args=(stdin, told, asyncio.get_running_loop()), daemon=True).start()
    try:
        await told.first.wait()
        if core.failure is not None:
            return 1
        return await serve(core, options, listening, told.serving.set)
    finally:
        core.close()


class _Told:
    """Does what the parent's news ask for. first: there has been an engine, or there will be none."""

    def __init__(self, core: RemoteCore) -> None:
        self._core = core
        self._resuming: asyncio.Task[None] | None = None
        self.first, self.serving = asyncio.Event(), asyncio.Event()

    def take(self, news: EngineNews) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        match news:
            case EngineUp(address):
                self._resuming = asyncio.create_task(self._resume(address))
            case EngineLost(reason):
                self._core.lost(reason)
            case EngineDead(reason):
                self._core.fail(reason)
                self.first.set()

    async def _resume(self, address: str) -> None:
        with suppress(TreetopError):  # of an engine that dies at once: the parent says so
            await self._core.resume(address)
            self.first.set()
            await self.serving.wait()
            print(address, flush=True)


def _listen(stdin: io.FileIO, told: _Told, loop: asyncio.AbstractEventLoop) -> None:
    while line := stdin.readline():
        loop.call_soon_threadsafe(told.take, msgspec.json.decode(line, type=EngineNews))
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
