"""The engine process: a core behind a zmq socket on a private path. It ends when its parent does.

    python -m treetop.core.engine_process      started by `treetop serve`; a line of JSON on stdin says what to run

stdin stays open as long as the parent lives; its end is the end of this process. Ctrl-C and SIGTERM are the parent's to
act on: it drains first. A failure of the engine is told to every client, and ends the process with exit code 1.
"""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import zmq

from treetop.core.engine_core import EngineCore
from treetop.core.loop import CoreLoop
from treetop.core.wire import (
    Abort,
    Add,
    CoreInfo,
    Failed,
    Finish,
    Hello,
    Load,
    ProcessOptions,
    ToCore,
    Updates,
    decode_to_core,
    encode,
)
from treetop.types.errors import TreetopError, UserError
from treetop.types.requests import RequestUpdate

ID_RANGE = 2**40
"""Request ids that each client has for itself."""
_LOAD_S = 0.25
"""Seconds between two words about the load."""
_IDLE_MS = 1000


class CoreServer:
    """Applies what clients send and sends them what the core gives, a step at a time."""

    def __init__(self, core: EngineCore[Any], info: CoreInfo, socket: "zmq.Socket[bytes]") -> None:
        self._core, self._loop, self._info, self._socket = core, CoreLoop(core), info, socket
        self._clients: dict[bytes, Callable[[list[RequestUpdate]], None]] = {}
        self._told_s = 0.0

    def run(self, parent: int) -> int:
        """Serve until the file descriptor `parent` ends. Returns the exit code."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(parent, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._core.busy else _IDLE_MS))
            if parent in ready:
                return 0
            if self._socket in ready:
                self._receive()
            if self._core.busy:
                self._loop.step()
            if self._core.failure is not None:
                self._broadcast(Failed(f"{type(self._core.failure).__name__}: {self._core.failure}", False))
                return 1
            self._tell_load()

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
                self._send(identity, msgspec.structs.replace(self._info, first_id=number * ID_RANGE))
            case Add(requests):
                self._loop.add(requests, self._clients[identity])
            case Abort(request_ids):
                self._loop.abort(request_ids)
            case Finish(request_id, num_tokens):
                self._loop.finish(request_id, num_tokens)

    def _send_updates(self, identity: bytes, updates: list[RequestUpdate]) -> None:
        self._send(identity, Updates(tuple(updates)))

    def _tell_load(self) -> None:
        if time.monotonic() - self._told_s >= _LOAD_S:
            self._told_s = time.monotonic()
            self._broadcast(load_of(self._core))

    def _broadcast(self, message: Load | Failed) -> None:
        for identity in self._clients:
            self._send(identity, message)

    def _send(self, identity: bytes, message: CoreInfo | Updates | Load | Failed) -> None:
        self._socket.send_multipart([identity, encode(message)])


def load_of(core: EngineCore[Any]) -> Load:
    scheduler = core.scheduler
    return Load(scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage, scheduler.num_retractions)


def make(options: ProcessOptions) -> tuple[EngineCore[Any], CoreInfo]:
    """The core that was asked for. Raises TreetopError."""
    from treetop.core.make import make_core, make_mock  # what loads PyTorch comes after the socket is there

    return make_core(options.config) if options.mock is None else make_mock(options.config, options.mock)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessOptions)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0  # what waits is bounded by the requests that were accepted
    socket.linger = 2000
    socket.bind(options.address)
    try:
        core, info = make(options)
    except TreetopError as error:
        refuse(socket, Failed(str(error), isinstance(error, UserError)))
        return 2 if isinstance(error, UserError) else 1
    try:
        return CoreServer(core, info, socket).run(sys.stdin.fileno())
    finally:
        context.destroy(linger=2000)


def refuse(socket: "zmq.Socket[bytes]", why: Failed) -> None:
    """Answer each client that asks within a second; the parent is one of them."""
    deadline = time.monotonic() + 1.0
    while (left := deadline - time.monotonic()) > 0 and socket.poll(int(left * 1000)):
        identity, _ = socket.recv_multipart()
        socket.send_multipart([identity, encode(why)])


if __name__ == "__main__":
    sys.exit(main())
