"""Sessions: who the other side is, what both must have in common, and that nothing is forged, changed or said twice.

decode --Hello: nonce, schema--> prefill
decode <--Welcome: its nonce--  prefill        or Sorry, with the reason
both: a key of the secret and both nonces, for each direction; every message has a number and an HMAC-SHA256 under it

A hello that is sent again opens nothing: its sender knows no key, and a session counts from its first message on. State
only, without sockets; nothing that arrives makes it raise.
"""

import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from secrets import token_bytes
from typing import NamedTuple, TypeVar

import msgspec

from treetop.transfer.events import PeerId
from treetop.types.errors import ConfigError, shown
from treetop.types.handover import Schema
from treetop.types.roles import SECRET_VARIABLE

LEAST_SECRET = 16
"""Bytes."""
_NONCE, _MAC, _COUNTER = 16, 32, 8
_MOST_STRANGERS = 256
"""Hellos that are remembered without a message after them."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """metadata: of the transport."""

    nonce: bytes
    schema: Schema
    metadata: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """asked: the hello's nonce."""

    asked: bytes
    nonce: bytes
    metadata: bytes


class Sorry(msgspec.Struct, frozen=True, array_like=True):
    """Why there is no session."""

    asked: bytes
    reason: str


def read_secret(environment: Mapping[str, str], file: str | None) -> bytes:
    """What both sides know, of a file or of the environment; b"" if neither is given. Raises ConfigError."""
    if file is None:
        secret, source = environment.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
        if not secret:
            return b""
    else:
        source = f"--handover-secret-file {file}"
        try:
            if os.name == "posix" and stat.S_IMODE(Path(file).stat().st_mode) & 0o077:
                raise ConfigError(f"{source}: others may read it; chmod 600 it")
            secret = Path(file).read_bytes().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise ConfigError(f"{source}: {reason}") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"{source}: a secret has at least {LEAST_SECRET} bytes, got {len(secret)}")
    return secret


def parse_address(text: str, option: str) -> tuple[str, int]:
    """`host:port` or `[host]:port`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not int(port) < 2**16:
        raise ConfigError(f"{option} must be host:port, got {shown(text)}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can be there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Session:
    """One side's end of a session. What is sealed here opens at the other end, once and in order."""

    def __init__(self, sends: bytes, receives: bytes) -> None:
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    def seal(self, body: bytes) -> bytes:
        self._sent += 1
        number = self._sent.to_bytes(_COUNTER, "big")
        return b"M" + number + _mac(self._sends, number + body) + body

    def open(self, frame: bytes) -> bytes | None:
        """The body; None for what the other side did not say, or has said before."""
        number, mac, body = frame[1 : 1 + _COUNTER], frame[1 + _COUNTER :][:_MAC], frame[1 + _COUNTER + _MAC :]
        right = frame[:1] == b"M" and hmac.compare_digest(mac, _mac(self._receives, number + body))
        if not right or int.from_bytes(number, "big") <= self._received:
            return None
        self._received = int.from_bytes(number, "big")
        return body


class Refusal(NamedTuple):
    """The other side will have no session. reason: its words, or why they are not to be believed."""

    reason: str


class Established(NamedTuple):
    """A session, and the other side's transport."""

    session: Session
    metadata: bytes


class Greeting:
    """A decode worker's way into a session."""

    def __init__(self, secret: bytes, schema: Schema, metadata: bytes) -> None:
        self._secret, self._nonce = secret, token_bytes(_NONCE)
        self.hello = _signed(b"H", secret, msgspec.msgpack.encode(Hello(self._nonce, schema, metadata)))

    def answer(self, frame: bytes) -> Established | Refusal | None:
        """What a frame makes of it; None for one that is no answer to this greeting."""
        if frame[:1] == b"S" and _opened(b"S", self._secret, frame) is None:
            return Refusal("it refuses, and not with this secret: the secrets differ")
        sorry = _decoded(Sorry, _opened(b"S", self._secret, frame))
        if sorry is not None and sorry.asked == self._nonce:
            return Refusal(sorry.reason)
        welcome = _decoded(Welcome, _opened(b"W", self._secret, frame))
        if welcome is None or welcome.asked != self._nonce:
            return None
        to_prefill, to_decode = _keys(self._secret, self._nonce, welcome.nonce)
        return Established(Session(to_prefill, to_decode), welcome.metadata)


class _Stranger(NamedTuple):
    session: Session
    metadata: bytes


class Met(NamedTuple):
    """A session has begun. before: the same sender's, which is over."""

    peer: PeerId
    metadata: bytes
    before: PeerId | None


class Listener:
    """A prefill worker's sessions, by what the network calls their sender."""

    def __init__(self, secret: bytes, schema: Schema, metadata: bytes) -> None:
        self._secret, self._schema, self._metadata = secret, schema, metadata
        self._strangers: dict[bytes, _Stranger] = {}
        self._sessions: dict[bytes, tuple[PeerId, Session]] = {}
        self._senders: dict[PeerId, bytes] = {}
        self._next = 0
        self.num_dropped = 0
        """Frames that nobody with a session said, or that came twice."""

    def greet(self, sender: bytes, frame: bytes) -> bytes | None:
        """The answer to a frame that may be a hello; None for another one."""
        if frame[:1] != b"H":
            return None
        hello = _decoded(Hello, _opened(b"H", self._secret, frame))
        if hello is None or len(hello.nonce) != _NONCE:
            self.num_dropped += 1
            reason = Sorry(b"", "the secrets differ, or it is another version of treetop")
            return _signed(b"S", self._secret, msgspec.msgpack.encode(reason))
        difference = hello.schema.difference(self._schema)  # in the words of the decode worker, which logs it
        if difference is not None:
            reason = Sorry(hello.nonce, f"both sides need the same {difference}")
            return _signed(b"S", self._secret, msgspec.msgpack.encode(reason))
        nonce = token_bytes(_NONCE)
        to_prefill, to_decode = _keys(self._secret, hello.nonce, nonce)
        self._strangers.pop(sender, None)
        self._strangers[sender] = _Stranger(Session(to_decode, to_prefill), hello.metadata)
        if len(self._strangers) > _MOST_STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        answer = Welcome(hello.nonce, nonce, self._metadata)
        return _signed(b"W", self._secret, msgspec.msgpack.encode(answer))

    def hear(self, sender: bytes, frame: bytes) -> tuple[PeerId, bytes, Met | None] | None:
        """Who said what, and whether that began a session; None for what nobody with a session said."""
        stranger = self._strangers.get(sender)
        if stranger is not None and (body := stranger.session.open(frame)) is not None:
            del self._strangers[sender]
            before = self._sessions.get(sender)
            if before is not None:
                self.forget(before[0])
            self._next += 1
            peer = PeerId(self._next)
            self._sessions[sender], self._senders[peer] = (peer, stranger.session), sender
            return peer, body, Met(peer, stranger.metadata, None if before is None else before[0])
        known = self._sessions.get(sender)
        if known is None or (body := known[1].open(frame)) is None:
            self.num_dropped += 1
            return None
        return known[0], body, None

    def seal(self, peer: PeerId, body: bytes) -> tuple[bytes, bytes] | None:
        """Sender and frame; None for a session that is over."""
        sender = self._senders.get(peer)
        return None if sender is None else (sender, self._sessions[sender][1].seal(body))

    def forget(self, peer: PeerId) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            del self._sessions[sender]


def _keys(secret: bytes, asked: bytes, answered: bytes) -> tuple[bytes, bytes]:
    """For messages to the prefill worker, and to the decode worker."""
    return (_mac(secret, b"to prefill" + asked + answered), _mac(secret, b"to decode" + asked + answered))


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _signed(kind: bytes, secret: bytes, body: bytes) -> bytes:
    return kind + _mac(secret, kind + body) + body


def _opened(kind: bytes, secret: bytes, frame: bytes) -> bytes | None:
    body = frame[1 + _MAC :]
    same = frame[:1] == kind and hmac.compare_digest(frame[1 : 1 + _MAC], _mac(secret, kind + body))
    return body if same else None


Word = TypeVar("Word", Hello, Welcome, Sorry)


def _decoded(kind: type[Word], body: bytes | None) -> Word | None:
    if body is None:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
