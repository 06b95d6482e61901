"""One of several API processes that share a listening socket.

    python -m treetop.server.api.worker FD      started by `treetop serve`

stdin: a line of JSON says what to do; later lines, what has become of the engine; the end of it, that the parent died.
stdout: the news of an engine that is up come back, once requests are accepted and it has all that were.
"""

import asyncio
import io
import os
import socket
import sys
import threading
from collections.abc import Sequence

import msgspec

from treetop.core.wire import EngineDead, EngineLost, EngineNews, EngineUp
from treetop.distributed.client import RemoteCore
from treetop.distributed.data_parallel import one_of
from treetop.server.api.run import ApiOptions, log_to_stderr, serve


def main() -> int:
    listening = socket.socket(fileno=int(sys.argv[1]))
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=ApiOptions)
    log_to_stderr()
    return asyncio.run(_run(options, listening, stdin))


async def _run(options: ApiOptions, listening: socket.socket, stdin: io.FileIO) -> int:
    watchdog_s = options.serve.watchdog_timeout
    cores = [RemoteCore(options.client, watchdog_s) for _ in range(options.serve.dp_size)]
    told = [_Told(core) for core in cores]
    core = one_of(cores)
    serving = asyncio.Event()
    for each in told:
        each.serving = serving
    threading.Thread(target=_listen, args=(stdin, told, asyncio.get_running_loop()), daemon=True).start()
    try:
        for each in told:
            await each.first.wait()
        if core.failure is not None:
            return 1
        return await serve(core, options, listening, serving.set)
    finally:
        core.close()


class _Told:
    """Does what the parent's news of an engine ask for. first: there has been one, or there will be none."""

    def __init__(self, core: RemoteCore) -> None:
        self._core = core
        self._resuming: asyncio.Task[None] | None = None
        self.first, self.serving = asyncio.Event(), asyncio.Event()

    def take(self, news: EngineNews) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        match news:
            case EngineUp():
                self._resuming = asyncio.create_task(self._resume(news))
            case EngineLost(_, reason):
                self._core.lost(reason)
            case EngineDead(_, reason):
                self._core.fail(reason)
                self.first.set()

    async def _resume(self, up: EngineUp) -> None:
        await self._core.resume(up.addresses)
        self.first.set()
        await self.serving.wait()
        sys.stdout.buffer.write(msgspec.json.encode(up) + b"\n")
        sys.stdout.flush()


def _listen(stdin: io.FileIO, told: Sequence[_Told], loop: asyncio.AbstractEventLoop) -> None:
    while line := stdin.readline():
        news = msgspec.json.decode(line, type=EngineNews)
        loop.call_soon_threadsafe(told[news.replica].take, news)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
