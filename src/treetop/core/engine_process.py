"""The engine process: a core behind a zmq socket on a private path. It ends when its parent does.

    python -m treetop.core.engine_process      started by `treetop serve`; a line of JSON on stdin says what to run

stdin stays open as long as the parent lives; its end is the end of this process, whatever it is doing. Ctrl-C and
SIGTERM are the parent's to act on: it drains first. A failure of the engine is told to every client, and ends the
process with exit code 1.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from treetop.core.child import begin
from treetop.core.engine_core import STALLED_S
from treetop.core.loop import Core, CoreLoop
from treetop.core.wire import (
    Abort,
    Add,
    Failed,
    Finish,
    Hello,
    Leave,
    Load,
    ProcessOptions,
    Ready,
    ToCore,
    Updates,
    decode_to_core,
    encode,
)
from treetop.disaggregation.connector import Connector, open_connector
from treetop.disaggregation.nixl import NixlTransport
from treetop.types.errors import TreetopError, UserError
from treetop.types.requests import CoreInfo, CoreLoad, RequestUpdate

if TYPE_CHECKING:  # loads PyTorch, which takes seconds
    from treetop.core.ranks.worker_group import WorkerGroup

_LOAD_S = 0.25
"""Seconds between two words about the load, at least."""
HEARTBEAT_S = 1.0
"""Seconds after which the load is told though it is what it was: so clients hear that the loop goes round."""
_LINGER_MS = 2000
"""For the last words."""


class CoreServer:
    """Applies what clients send and sends them what the core gives, a step at a time."""

    def __init__(
        self,
        core: Core,
        info: CoreInfo,
        socket: "zmq.Socket[bytes]",
        role: Connector | None = None,
        group: "WorkerGroup | None" = None,
    ) -> None:
        """role: the worker's KV connector, if it has one. group: the ranks that share the model."""
        self._core, self._loop, self._info, self._socket = core, CoreLoop(core, role), info, socket
        self._role, self._group = role, group
        self._clients: dict[bytes, Callable[[list[RequestUpdate]], None]] = {}
        self._identities: dict[int, bytes] = {}  # of clients, by number
        self._left: set[int] = set()
        self._told, self._told_s, self._sent_s = CoreLoad(), 0.0, 0.0

    def run(self) -> str:
        """Serve until the engine fails. Returns why it did."""
        reason = None
        while reason is None:
            self._wait()
            self._receive()
            if self._role is not None:  # before the step, which does what the role tells the scheduler
                self._role.poll(time.monotonic())
            if self._core.busy:
                self._loop.step()
            self._tell_load()
            reason = self._end()
        self._broadcast(Failed(reason, False))
        return reason

    def _end(self) -> str | None:
        """Why nothing more can be served, if so. A rank may die while there is no step that would say so."""
        failure = self._core.failure
        if failure is None and self._group is not None and (self._core.stalled or not self._core.busy):
            failure = self._group.failure
        if failure is not None:
            return f"{type(failure).__name__}: {failure}"
        return None if self._role is None or self._core.busy else self._role.stuck

    def _wait(self) -> None:
        """Until there is something to do, which nothing may be known of for a while."""
        if self._core.busy and not self._core.stalled:
            return
        poller, wait_ms = zmq.Poller(), int(1000 * (STALLED_S if self._core.busy else _LOAD_S))
        poller.register(self._socket, zmq.POLLIN)
        if self._role is not None:
            wait_ms = min(wait_ms, self._role.wait_ms)
            for socket in self._role.sockets():
                poller.register(socket, zmq.POLLIN)
        poller.poll(wait_ms)

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                identity, message = self._socket.recv_multipart(zmq.NOBLOCK)
                self._apply(identity, decode_to_core(message))

    def _apply(self, identity: bytes, command: ToCore) -> None:
        match command:
            case Hello(number):
                if number not in self._left:
                    self._identities[number] = identity
                    self._clients.setdefault(identity, partial(self._send_updates, identity))
                    self._send(identity, Ready(self._info))
            case Add(requests):
                if identity in self._clients:
                    self._loop.add(requests, self._clients[identity])
            case Leave(number):
                self._leave(number)
            case Abort(request_ids):
                self._loop.abort(request_ids)
            case Finish(request_id, num_tokens):
                self._loop.finish(request_id, num_tokens)

    def _leave(self, number: int) -> None:
        """A client has ended. What it said last may be on its way still."""
        self._left.add(number)
        identity = self._identities.pop(number, None)
        if identity is not None:
            self._loop.leave(self._clients.pop(identity))

    def _send_updates(self, identity: bytes, updates: list[RequestUpdate]) -> None:
        self._send(identity, Updates(tuple(updates)))

    def _tell_load(self) -> None:
        now = time.monotonic()
        if now - self._told_s < _LOAD_S:
            return
        self._told_s, load = now, self._loop.load
        if load != self._told or now - self._sent_s >= HEARTBEAT_S:
            self._told, self._sent_s = load, now
            self._broadcast(Load(load))

    def _broadcast(self, message: Load | Failed) -> None:
        for identity in self._clients:
            self._send(identity, message)

    def _send(self, identity: bytes, message: Ready | Updates | Load | Failed) -> None:
        self._socket.send_multipart([identity, encode(message)])


def make(options: ProcessOptions) -> "tuple[Core, CoreInfo, Connector | None, WorkerGroup | None]":
    """The core that was asked for, its KV connector, and its ranks. Raises TreetopError."""
    if options.mock is not None:
        from treetop.core.mock import make_mock  # noqa: PLC0415  # needs no PyTorch

        return *make_mock(options.config, options.mock), None, None
    from treetop.core.make import open_core  # noqa: PLC0415  # loads PyTorch, which takes seconds

    opened = open_core(options.config, options.handover)
    group = None if opened.local is None else opened.local.others
    if options.handover.mode == "null":
        return opened.core, opened.info, None, group
    logging.getLogger("treetop.core").info(options.handover.words(options.config.ep_size))
    if opened.local is None:  # each rank has a part of its own
        from treetop.core.ranks.expert_group import DispatchCore, RolesOfRanks  # noqa: PLC0415  # too

        assert isinstance(opened.core, DispatchCore)
        return opened.core, opened.info, RolesOfRanks(opened.core), None
    from treetop.engine.kv_staging import staging_of  # noqa: PLC0415  # too

    staging = staging_of(opened.local.engine)
    role = open_connector(opened.local.scheduler, staging, options.handover, NixlTransport, group)
    return opened.core, opened.info._replace(refuses=role.refuses), role, group


def main() -> int:
    options, _ = begin(ProcessOptions, lambda said: str(Path(said.address.removeprefix("ipc://")).parent))
    logging.basicConfig(level=options.log_level, format="%(message)s", stream=sys.stderr)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0  # what waits is bounded by the requests that were accepted
    socket.bind(options.address)
    role = None
    try:
        core, info, role, group = make(options)
        reason = CoreServer(core, info, socket, role, group).run()
    except TreetopError as error:
        refuse(socket, Failed(str(error), isinstance(error, UserError)))
        return 2 if isinstance(error, UserError) else 1
    finally:
        if role is not None:
            role.close()
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


if __name__ == "__main__":
    sys.exit(main())
