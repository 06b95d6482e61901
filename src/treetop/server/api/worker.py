"""One of several API processes that share a listening socket.

    python -m treetop.server.api.worker FD      started by `treetop serve`

stdin: a line of JSON says what to do; a later line says that the engine died; the end of it, that the parent did.
stdout: a line once requests are accepted.
"""

import asyncio
import io
import os
import socket
import sys
import threading

import msgspec

from treetop.core.remote import RemoteCore
from treetop.server.api.run import ApiOptions, log_to_stderr, serve


def main() -> int:
    listening = socket.socket(fileno=int(sys.argv[1]))
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    options = msgspec.json.decode(stdin.readline(), type=ApiOptions)
    log_to_stderr()
    return asyncio.run(_run(options, listening, stdin))


async def _run(options: ApiOptions, listening: socket.socket, stdin: io.FileIO) -> int:
    core = RemoteCore(options.address)
    threading.Thread(target=_listen, args=(stdin, core, asyncio.get_running_loop()), daemon=True).start()
    await core.connect()
    try:
        return await serve(core, options, listening, lambda: print("up", flush=True))
    finally:
        core.close()


def _listen(stdin: io.FileIO, core: RemoteCore, loop: asyncio.AbstractEventLoop) -> None:
    while line := stdin.readline():
        loop.call_soon_threadsafe(core.fail, line.decode().strip())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
