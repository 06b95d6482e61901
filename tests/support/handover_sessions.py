"""Both ends of a session between workers, and a relay between them that changes and repeats what is sent."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import zmq

from support.waiting import WAIT_S
from treetop.disaggregation.events import Connected
from treetop.disaggregation.sockets import Client, Handshake, Listener
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer import wire
from treetop.types.kv_transfer.layout import Schema, SlotRef
from treetop.types.kv_transfer.options import zmq_address
from treetop.types.kv_transfer.scheduling import FirstToken, Prompt
from treetop.types.kv_transfer.transport import PeerId
from treetop.types.sampling import SamplingParams, TokenLogprobs

SCHEMA = Schema(1, "target", "draft", "float64", ("full: 2 layers",), ("root",), (4, 5, 16), 1000, 4096, "ties")
SECRET = b"of at least sixteen bytes"
OF_PREFILL, OF_DECODE = wire.Metadata(3, (b"p",)), wire.Metadata(4, (b"d", b"e"))
MESSAGES = (
    wire.Prefill(
        1, 2, 3, Prompt((1, 2, 3, 4), SamplingParams(temperature=0.5, logit_bias=((1, 2.0),)), 9, "sql", "0a1b"), 64
    ),
    wire.Renew(((1, 2), (3, 4))),
    wire.Release(1, 2, SlotRef(0, 7)),
    wire.Abort(1, 2),
)
ANSWERS = (
    wire.Offer(
        1, 2, SlotRef(0, 7), KVChunk(0, 4, 4), (2**64 - 1, 5), FirstToken(9, TokenLogprobs(-0.5, ((9, -0.5),), -0.25))
    ),
    wire.Released(1, 2, SlotRef(0, 7), True),
    wire.Refused(1, 2, "why"),
    wire.Renewed(),
)


class Ends:
    """A client and listeners, polled together until something is seen. connect_s: the client's patience."""

    def __init__(self, connect_s: float = WAIT_S) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client = Client(self.context, Handshake(SECRET, SCHEMA, OF_DECODE), connect_s)
        self.listeners: list[Listener] = []
        self.seen: list[object] = []

    def listen(
        self, port: int = 0, secret: bytes = SECRET, schema: Schema = SCHEMA, silent_s: float = WAIT_S
    ) -> Listener:
        """silent_s: after which it forgets who says nothing."""
        address = zmq_address("127.0.0.1", port)
        self.listeners.append(Listener(self.context, Handshake(secret, schema, OF_PREFILL), address, silent_s))
        return self.listeners[-1]

    def look_for(self, *ports: int) -> None:
        self.client.look_for([zmq_address("127.0.0.1", port) for port in ports])

    def poll(self) -> None:
        for each in (self.client, *self.listeners):
            self.seen += each.poll(time.monotonic())

    def until(self, wanted: Callable[[object], bool]) -> object:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.poll()
            for event in self.seen:
                if wanted(event):
                    self.seen.remove(event)
                    return event
            time.sleep(0.005)
        raise AssertionError(f"it did not come: {self.seen}")

    def connected(self, metadata: wire.Metadata) -> PeerId:
        """Until the side that is told of this metadata has a session."""
        event = self.until(lambda each: isinstance(each, Connected) and each.metadata == metadata)
        assert isinstance(event, Connected)
        return event.peer

    def wait(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, self.seen
            self.poll()
            time.sleep(0.005)

    def logged(self, caplog: pytest.LogCaptureFixture, text: str) -> None:
        self.wait(lambda: text in caplog.text)

    def close(self) -> None:
        for each in (self.client, *self.listeners):
            each.close()
        self.context.term()


def kind(of: type) -> Callable[[object], bool]:
    return lambda event: isinstance(event, of)


class Tapped:
    """A relay of TCP between a client and a listener. sent: chunks of bytes of each connection, as they came.

    change: called with the number of a chunk of the client's, and its bytes; what it returns is passed on.
    """

    def __init__(self, port: int) -> None:
        self._to, self._server = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.sent: list[list[bytes]] = []
        self.change: Callable[[int, bytes], bytes] = lambda _, data: data
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._server.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                self.sent.append([])
                threading.Thread(target=self._pass, args=(near, far, self.sent[-1]), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, None), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, noted: list[bytes] | None) -> None:
        with suppress(OSError):
            while data := source.recv(2**20):
                if noted is not None:
                    noted.append(data)
                    data = self.change(len(noted) - 1, data)  # as it is passed on
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._open:
            each.close()
