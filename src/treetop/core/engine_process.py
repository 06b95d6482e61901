"""The engine process: a core behind a zmq socket on a private path. It ends when its parent does.

    python -m treetop.core.engine_process      started by `treetop serve`; a line of JSON on stdin says what to run

stdin stays open as long as the parent lives; its end is the end of this process, whatever it is doing. Ctrl-C and
SIGTERM are the parent's to act on: it drains first. A failure of the engine is told to every client, and ends the
process with exit code 1.
"""

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from treetop.core.loop import Core, CoreLoop
from treetop.core.wire import (
    Abort,
    Add,
    Failed,
    Finish,
    Hello,
    Load,
    ProcessOptions,
    Ready,
    ToCore,
    Updates,
    decode_to_core,
    encode,
)
from treetop.types.errors import TreetopError, UserError
from treetop.types.requests import CoreInfo, CoreLoad, RequestUpdate

ID_RANGE = 2**40
"""Request ids that each client has for itself."""
_LOAD_S = 0.25
"""Seconds between two words about the load, at least."""
_LINGER_MS = 2000
"""For the last words."""


class CoreServer:
    """Applies what clients send and sends them what the core gives, a step at a time."""

    def __init__(self, core: Core, info: CoreInfo, socket: "zmq.Socket[bytes]") -> None:
        self._core, self._loop, self._info, self._socket = core, CoreLoop(core), info, socket
        self._clients: dict[bytes, Callable[[list[RequestUpdate]], None]] = {}
        self._told, self._told_s = CoreLoad(), 0.0

    def run(self) -> str:
        """Serve until the engine fails. Returns why it did."""
        while self._core.failure is None:
            if self._socket.poll(0 if self._core.busy else int(_LOAD_S * 1000)):
                self._receive()
            if self._core.busy:
                self._loop.step()
            self._tell_load()
        reason = f"{type(self._core.failure).__name__}: {self._core.failure}"
        self._broadcast(Failed(reason, False))
        return reason

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                identity, message = self._socket.recv_multipart(zmq.NOBLOCK)
                self._apply(identity, decode_to_core(message))

    def _apply(self, identity: bytes, command: ToCore) -> None:
        match command:
            case Hello():
                self._clients.setdefault(identity, partial(self._send_updates, identity))
                number = list(self._clients).index(identity)
                self._send(identity, Ready(self._info, number * ID_RANGE))
            case Add(requests):
                self._loop.add(requests, self._clients[identity])
            case Abort(request_ids):
                self._loop.abort(request_ids)
            case Finish(request_id, num_tokens):
                self._loop.finish(request_id, num_tokens)

    def _send_updates(self, identity: bytes, updates: list[RequestUpdate]) -> None:
        self._send(identity, Updates(tuple(updates)))

    def _tell_load(self) -> None:
        now = time.monotonic()
        if now - self._told_s < _LOAD_S:
            return
        self._told_s, load = now, self._core.load
        if load != self._told:
            self._told = load
            self._broadcast(Load(load))

    def _broadcast(self, message: Load | Failed) -> None:
        for identity in self._clients:
            self._send(identity, message)

    def _send(self, identity: bytes, message: Ready | Updates | Load | Failed) -> None:
        self._socket.send_multipart([identity, encode(message)])


def make(options: ProcessOptions) -> tuple[Core, CoreInfo]:
    """The core that was asked for. Raises TreetopError."""
    if options.mock is not None:
        from treetop.core.mock import make_mock  # noqa: PLC0415  # needs no PyTorch

        return make_mock(options.config, options.mock)
    from treetop.core.make import open_core  # noqa: PLC0415  # loads PyTorch, which takes seconds

    opened = open_core(options.config)
    return opened.core, opened.info


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stdin = io.FileIO(0, closefd=False)  # without a buffer, whose lock the thread would hold at the end
    line = stdin.readline()
    threading.Thread(target=_end_with_parent, args=(stdin,), name="treetop-parent", daemon=True).start()
    options = msgspec.json.decode(line, type=ProcessOptions)
    logging.basicConfig(level=options.log_level, format="%(message)s", stream=sys.stderr)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0  # what waits is bounded by the requests that were accepted
    socket.bind(options.address)
    try:
        core, info = make(options)
        reason = CoreServer(core, info, socket).run()
    except TreetopError as error:
        refuse(socket, Failed(str(error), isinstance(error, UserError)))
        return 2 if isinstance(error, UserError) else 1
    finally:
        context.destroy(linger=_LINGER_MS)
    logging.getLogger("treetop").error("the engine failed: %s", reason)
    return 1


def refuse(socket: "zmq.Socket[bytes]", why: Failed) -> None:
    """Answer each client that asks within a moment; the parent is one of them."""
    deadline = time.monotonic() + _LINGER_MS / 1000
    told = False
    while not told and (left_s := deadline - time.monotonic()) > 0:
        if socket.poll(int(left_s * 1000) + 1):
            identity, _ = socket.recv_multipart()
            socket.send_multipart([identity, encode(why)])
            told = True


def _end_with_parent(stdin: io.FileIO) -> None:
    """The parent holds the other end of stdin and never writes again."""
    while stdin.read(1):
        pass
    os._exit(0)  # also out of a call that never returns


if __name__ == "__main__":
    sys.exit(main())
