"""Sessions over zmq sockets, polled: a decode worker's client, and a prefill worker's listener.

CURVE (rfc.zeromq.org/spec/26) encrypts and authenticates every message, and takes none that is changed or sent again.
The key pair of listeners is derived from the shared secret, and its public half is never sent: only who knows the
secret can begin a handshake, and only such a listener can answer one. Keys of a session are of that session alone, so
what was recorded stays unreadable if the secret is lost later.

Neither side waits, and what arrives never makes one raise. A connection that breaks is seen at once. A process that is
stopped, or a host that is gone, is seen by zmq's heartbeats: its threads send and answer them, so an engine that is in
the middle of a long step answers, too. What else is silent is seen by the state machines.
"""

import hmac
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from treetop.disaggregation.events import Connected, Disconnected, Received
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.layout import Schema
from treetop.types.kv_transfer.transport import PeerId
from treetop.types.kv_transfer.wire import (
    Hello,
    Metadata,
    Reject,
    ToDecode,
    ToPrefill,
    Welcome,
    decode_to_decode,
    decode_to_prefill,
    encode,
)

log = logging.getLogger("treetop.core")

Context = zmq.Context["zmq.Socket[bytes]"]
Socket = zmq.Socket[bytes]
SessionEvent = Connected | Disconnected | Received
_MAX_BYTES = 64 * 2**20
"""Of a message."""
_PAUSE_S = 1.0
"""Between two connections to a worker that does not answer."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 1500
"""Between two heartbeats to a prefill worker, and how long an answer may take before its session is over."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Handshake(NamedTuple):
    """What all sessions of a worker begin with. secret: b"" keeps nobody of this machine out."""

    secret: bytes
    schema: Schema
    metadata: Metadata


def check_curve() -> None:
    """Raise ConfigError if zmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError("KV transfer needs zmq with CURVE (libsodium), which pyzmq's wheels have: pip install pyzmq")


def listener_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Public and secret key of listeners with this secret, in Z85: HKDF-SHA256 (RFC 5869), one block of output."""
    extracted = hmac.digest(b"treetop disaggregation", secret, "sha256")
    key = z85.encode(hmac.digest(extracted, b"CURVE listener\x01", "sha256"))
    return zmq.curve_public(key), key


@dataclass(slots=True)
class _Connection:
    """To a prefill worker.

    late_s: when an answer is late.
    up: once the handshake is done.
    """

    socket: Socket
    monitor: Socket
    late_s: float
    peer: PeerId
    up: bool = False


class Client:
    """A decode worker's sessions: one with each prefill worker that answers. addresses: zmq's; may change."""

    num_dropped_messages = 0

    def __init__(self, context: Context, handshake: Handshake, connect_s: float) -> None:
        self._context, self._connect_s = context, connect_s
        self._listener_key, _ = listener_keys(handshake.secret)
        self._hello = encode(Hello(handshake.schema, handshake.metadata))
        self._connections: dict[str, _Connection] = {}
        self._paused: dict[str, float] = {}
        self._addresses: tuple[str, ...] = ()
        self._peers: dict[PeerId, str] = {}
        self._numbers = count(1)
        self._logged: dict[str, str] = {}
        self._events: deque[SessionEvent] = deque()

    def sockets(self) -> list[Socket]:
        return [socket for each in self._connections.values() for socket in (each.socket, each.monitor)]

    def look_for(self, addresses: Sequence[str]) -> None:
        """Whom to connect to from now on. Sessions with others go on for as long as they last."""
        self._addresses = tuple(addresses)

    def poll(self, now: float) -> Iterator[SessionEvent]:
        """What has happened."""
        for address in self._addresses:
            if address not in self._connections and self._paused.get(address, 0.0) <= now:
                self._connect(address, now)
        for address, connection in [*self._connections.items()]:
            self._receive(address, connection, now)
        while self._events:
            yield self._events.popleft()

    def send(self, peer: PeerId, message: ToPrefill) -> None:
        connection = self._connections.get(self._peers.get(peer, ""))
        if connection is not None:
            with suppress(zmq.ZMQError):
                connection.socket.send(encode(message), zmq.NOBLOCK)

    def disconnect(self, peer: PeerId, reason: str, now: float) -> None:
        """End a session; another is tried after a while."""
        address = self._peers.get(peer)
        if address is not None:
            self._end(address, reason, now)

    def close(self) -> None:
        for connection in self._connections.values():
            _close(connection.socket, connection.monitor)
        self._connections.clear()

    def _connect(self, address: str, now: float) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.sndhwm, socket.maxmsgsize = 0, 0, _MAX_BYTES
        socket.ipv6 = "[" in address
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.curve_serverkey = self._listener_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        socket.connect(address)
        socket.send(self._hello)
        peer = PeerId(next(self._numbers))
        self._connections[address] = _Connection(socket, monitor, now + self._connect_s, peer)

    def _receive(self, address: str, connection: _Connection, now: float) -> None:
        with suppress(zmq.Again):
            while True:
                message = decode_to_decode(connection.socket.recv(zmq.NOBLOCK))
                if isinstance(message, Reject):
                    self._end(address, message.reason, now)
                    return
                if isinstance(message, Welcome) and not connection.up:
                    connection.up = True
                    self._peers[connection.peer] = address
                    self._log(address, "connected")
                    self._events.append(Connected(connection.peer, message.metadata))
                elif message is not None and connection.up:
                    self._events.append(Received(connection.peer, message))
        happened = 0
        while event := _next_event(connection.monitor):
            happened |= event
        if happened & _HANDSHAKE_FAILED:
            self._end(address, "the handshake failed: the secrets differ, or it is another version of treetop", now)
        elif happened and connection.up:
            self._end(address, "the session has ended", now)
        elif not connection.up and now >= connection.late_s:
            self._end(address, "no answer; it is tried again until there is one", now)

    def _end(self, address: str, reason: str, now: float) -> None:
        connection = self._connections.pop(address)
        _close(connection.socket, connection.monitor)
        self._paused[address] = now + _PAUSE_S
        self._log(address, reason)
        if self._peers.pop(connection.peer, None) is not None:
            self._events.append(Disconnected(connection.peer))

    def _log(self, address: str, text: str) -> None:
        """Once until it is something else."""
        if self._logged.get(address) != text:
            self._logged[address] = text
            log.warning("prefill worker %s: %s", address.removeprefix("tcp://"), text)


def check_listening(address: str) -> None:
    """Raise ConfigError if a `Listener` cannot listen at the address now."""
    context: Context = zmq.Context()
    try:
        _bound(context.socket(zmq.ROUTER), address).close()
    finally:
        context.term()  # which waits until the address is free again


def _bound(socket: Socket, address: str) -> Socket:
    socket.linger, socket.ipv6 = 0, "[" in address
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        where = address.removeprefix("tcp://")
        raise ConfigError(f"--disaggregation-listen {where}: {zmq.strerror(error.errno or 0)}") from None
    return socket


class Listener:
    """A prefill worker's sessions: with whoever connects, and knows the secret.

    silent_s: after which one is over.

    Raises ConfigError if the address cannot be listened at.

    port: the one it listens at.
    num_dropped_messages: handshakes that failed, and messages of nobody with a session.
    """

    def __init__(self, context: Context, handshake: Handshake, address: str, silent_s: float) -> None:
        self._schema, self._silent_s = handshake.schema, silent_s
        self._welcome = Welcome(handshake.metadata)
        socket = context.socket(zmq.ROUTER)
        socket.sndhwm, socket.maxmsgsize = 0, _MAX_BYTES
        socket.curve_server = True
        _, socket.curve_secretkey = listener_keys(handshake.secret)
        self._socket = _bound(socket, address)
        self._monitor = socket.get_monitor_socket(_HANDSHAKE_FAILED)
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._peers: dict[bytes, PeerId] = {}  # by what zmq calls their connections
        self._senders: dict[PeerId, bytes] = {}
        self._last_received_s: dict[PeerId, float] = {}
        self._numbers = count(1)
        self.num_dropped_messages = 0

    def sockets(self) -> list[Socket]:
        return [self._socket, self._monitor]

    def poll(self, now: float) -> Iterator[SessionEvent]:
        """What has happened."""
        while _next_event(self._monitor):
            self.num_dropped_messages += 1
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = decode_to_prefill(frames[1]) if len(frames) == 2 else None
            yield from self._received(frames[0], message, now)
        for peer in [
            peer for peer, last_received_s in self._last_received_s.items() if now - last_received_s > self._silent_s
        ]:
            yield self._forget(peer)

    def send(self, peer: PeerId, message: ToDecode) -> None:
        sender = self._senders.get(peer)
        if sender is not None:
            self._answer(sender, message)

    def disconnect(self, peer: PeerId, reason: str, now: float) -> None:
        """End a session, whose other side is told why."""
        if peer in self._senders:
            self.send(peer, Reject(reason))
            self._last_received_s[peer] = float("-inf")

    def close(self) -> None:
        _close(self._socket, self._monitor)

    def _received(self, sender: bytes, message: ToPrefill | None, now: float) -> Iterator[SessionEvent]:
        peer = self._peers.get(sender)
        if isinstance(message, Hello) and peer is None:
            difference = message.schema.difference(self._schema)  # in the words of the decode worker, which logs it
            if difference is not None:
                self._answer(sender, Reject(f"both sides need the same {difference}"))
                return
            peer = self._peers[sender] = PeerId(next(self._numbers))
            self._senders[peer], self._last_received_s[peer] = sender, now
            self._answer(sender, self._welcome)
            log.info("decode worker connected: %d now", len(self._peers))
            yield Connected(peer, message.metadata)
        elif peer is None:
            self.num_dropped_messages += 1
            self._answer(sender, Reject("there is no session, or it is another version of treetop"))
        elif message is not None:
            self._last_received_s[peer] = now
            yield Received(peer, message)

    def _forget(self, peer: PeerId) -> Disconnected:
        del self._peers[self._senders.pop(peer)], self._last_received_s[peer]
        log.info("decode worker disconnected: %d now", len(self._peers))
        return Disconnected(peer)

    def _answer(self, sender: bytes, message: ToDecode) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([sender, encode(message)], zmq.NOBLOCK)


def _next_event(monitor: Socket) -> int:
    """The kind of what has happened to a socket; 0 if nothing has."""
    return int(recv_monitor_message(monitor)["event"]) if monitor.poll(0) else 0


def _close(socket: Socket, monitor: Socket) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
