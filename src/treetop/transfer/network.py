"""Sessions over zmq sockets, polled: a decode worker's calls, and a prefill worker's listening.

Neither waits, and what arrives never makes one raise. A connection that breaks is seen at once. A process that is
stopped, or a host that is gone, is seen by zmq's heartbeats: its threads send and answer them, so an engine that is in
the middle of a long step answers, too. What else is silent is seen by the desks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from treetop.transfer.events import PeerId
from treetop.transfer.session import Established, Greeting, Listener, Met, Refusal, Session
from treetop.transfer.wire import ToDecode, ToPrefill, decode_to_decode, decode_to_prefill, encode
from treetop.types.errors import ConfigError
from treetop.types.handover import Schema

_MOST_BYTES = 64 * 2**20
"""Of a message."""
_PAUSE_S = 1.0
"""Between two calls to a worker that does not answer."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 1500
"""Between two heartbeats to a prefill worker, and how long an answer may take before its session is over."""


class Common(NamedTuple):
    """What all sessions of a worker begin with."""

    secret: bytes
    schema: Schema
    metadata: bytes


class Up(NamedTuple):
    """A session has begun. place: the peer's address, or what the network calls it."""

    peer: PeerId
    place: str
    metadata: bytes


class Down(NamedTuple):
    """A session has ended."""

    peer: PeerId
    place: str


class Refused(NamedTuple):
    """There is no session with who is there, and why."""

    place: str
    reason: str


class FromPrefill(NamedTuple):
    """A message of a prefill worker."""

    peer: PeerId
    message: ToDecode


class FromDecode(NamedTuple):
    """A message of a decode worker."""

    peer: PeerId
    message: ToPrefill


@dataclass(slots=True)
class _Call:
    """One connection to a prefill worker. session: None until it has answered."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    greeting: Greeting
    late_s: float
    peer: PeerId
    session: Session | None = None


class Caller:
    """A decode worker's sessions: one with each prefill worker that answers. addresses: zmq's; may change."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", common: Common, connect_s: float) -> None:
        self._context, self._common, self._connect_s = context, common, connect_s
        self._calls: dict[str, _Call] = {}
        self._paused: dict[str, float] = {}
        self._addresses: tuple[str, ...] = ()
        self._peers: dict[PeerId, str] = {}
        self._numbers = count(1)
        self._events: deque[Up | Down | Refused | FromPrefill] = deque()

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        return [socket for call in self._calls.values() for socket in (call.socket, call.monitor)]

    def look_for(self, addresses: Sequence[str]) -> None:
        """Whom to call from now on. Sessions with others go on for as long as they last."""
        self._addresses = tuple(addresses)

    def poll(self, now: float) -> Iterator[Up | Down | Refused | FromPrefill]:
        """What has happened."""
        for address in self._addresses:
            if address not in self._calls and self._paused.get(address, 0.0) <= now:
                self._call(address, now)
        for address, call in [*self._calls.items()]:
            self._receive(address, call, now)
        while self._events:
            yield self._events.popleft()

    def send(self, peer: PeerId, message: ToPrefill) -> None:
        call = self._calls.get(self._peers.get(peer, ""))
        if call is not None and call.session is not None:
            with suppress(zmq.ZMQError):
                call.socket.send(call.session.seal(encode(message)), zmq.NOBLOCK)

    def hang_up(self, peer: PeerId, now: float) -> None:
        """End a session; another is tried after a while."""
        address = self._peers.get(peer)
        if address is not None:
            self._end(address, now)

    def close(self) -> None:
        for call in self._calls.values():
            call.socket.disable_monitor()
            call.monitor.close(linger=0)
            call.socket.close(linger=0)
        self._calls.clear()

    def _call(self, address: str, now: float) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.sndhwm, socket.maxmsgsize = 0, 0, _MOST_BYTES
        socket.ipv6 = "[" in address
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        greeting = Greeting(*self._common)
        socket.connect(address)
        socket.send(greeting.hello)
        peer = PeerId(next(self._numbers))
        self._calls[address] = _Call(socket, monitor, greeting, now + self._connect_s, peer)

    def _receive(self, address: str, call: _Call, now: float) -> None:
        with suppress(zmq.Again):
            while True:
                frames = call.socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 1 and not self._heard(address, call, frames[0]):
                    self._end(address, now)
                    return
        gone = False
        while call.monitor.poll(0):
            recv_monitor_message(call.monitor)
            gone = True
        if (gone and call.session is not None) or (call.session is None and now >= call.late_s):
            self._end(address, now)

    def _heard(self, address: str, call: _Call, frame: bytes) -> bool:
        """Whether the connection goes on."""
        if call.session is None:
            answer = call.greeting.answer(frame)
            if isinstance(answer, Refusal):
                self._events.append(Refused(address, answer.reason))
                return False
            if isinstance(answer, Established):
                call.session = answer.session
                self._peers[call.peer] = address
                self._events.append(Up(call.peer, address, answer.metadata))
            return True
        body = call.session.open(frame)
        message = None if body is None else decode_to_decode(body)
        if message is not None:
            self._events.append(FromPrefill(call.peer, message))
        return True

    def _end(self, address: str, now: float) -> None:
        call = self._calls.pop(address)
        call.socket.disable_monitor()
        call.monitor.close(linger=0)
        call.socket.close(linger=0)
        self._paused[address] = now + _PAUSE_S
        if self._peers.pop(call.peer, None) is not None:
            self._events.append(Down(call.peer, address))
        elif now >= call.late_s:
            self._events.append(Refused(address, "no answer; it is called again until there is one"))


def check_listening(address: str) -> None:
    """Raise ConfigError if a `Reception` cannot listen at the address now."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        _listening(context, address).close()
    finally:
        context.term()  # which waits until the address is free again


def _listening(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.ROUTER)
    socket.linger, socket.ipv6 = 0, "[" in address
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        where = address.removeprefix("tcp://")
        raise ConfigError(f"--handover-listen {where}: {zmq.strerror(error.errno or 0)}") from None
    return socket


class Reception:
    """A prefill worker's sessions: whoever calls, and knows the secret. silent_s: after which one is over.

    Raises ConfigError if the address cannot be listened at. port: the one it listens at.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", common: Common, address: str, silent_s: float
    ) -> None:
        self._listener, self._silent_s = Listener(*common), silent_s
        self._socket = _listening(context, address)
        self._socket.sndhwm, self._socket.maxmsgsize = 0, _MOST_BYTES
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._heard_s: dict[PeerId, float] = {}

    @property
    def num_dropped(self) -> int:
        """Frames of nobody with a session."""
        return self._listener.num_dropped

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        return [self._socket]

    def poll(self, now: float) -> Iterator[Up | Down | FromDecode]:
        """What has happened."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 2:
                yield from self._heard(frames[0], frames[1], now)
        for peer in [peer for peer, heard_s in self._heard_s.items() if now - heard_s > self._silent_s]:
            yield self._forget(peer)

    def send(self, peer: PeerId, message: ToDecode) -> None:
        sealed = self._listener.seal(peer, encode(message))
        if sealed is not None:
            with suppress(zmq.ZMQError):
                self._socket.send_multipart(sealed, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _heard(self, sender: bytes, frame: bytes, now: float) -> Iterator[Up | Down | FromDecode]:
        answer = self._listener.greet(sender, frame)
        if answer is not None:
            with suppress(zmq.ZMQError):
                self._socket.send_multipart([sender, answer], zmq.NOBLOCK)
            return
        heard = self._listener.hear(sender, frame)
        if heard is None:
            return
        peer, body, met = heard
        if isinstance(met, Met):
            if met.before is not None:
                yield self._forget(met.before)
            yield Up(peer, sender.hex(), met.metadata)
        self._heard_s[peer] = now
        message = decode_to_prefill(body)
        if message is not None:
            yield FromDecode(peer, message)

    def _forget(self, peer: PeerId) -> Down:
        self._listener.forget(peer)
        self._heard_s.pop(peer, None)
        return Down(peer, "")
