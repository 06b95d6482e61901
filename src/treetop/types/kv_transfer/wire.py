"""What a decode worker and a prefill worker send each other: typed msgpack messages, never pickles.

decode  --Hello, Prefill, Renew, Release, Abort-------------> prefill
decode <--Welcome or Reject, Offer, Renewed, Released, Refused--  prefill

A session begins with the handshake, Hello and Welcome. A request is named by the decode worker's id and by the number
of its attempt, which no other attempt has. zmq's CURVE encrypts all of it (`sockets.py`).
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from treetop.types.errors import UserError
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import Schema, SlotRef
from treetop.types.kv_transfer.scheduling import FirstToken, Prompt

WIRE_VERSION = 9


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """How a worker's slots are reached. transports: of each rank, in their order."""

    num_slots: int
    transports: tuple[bytes, ...]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a session."""

    schema: Schema
    metadata: Metadata


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute this, and offer its tokens from `start` on. max_tokens: of a chunk, that slots of the asker hold."""

    request: int
    attempt: int
    start: int
    prompt: Prompt
    max_tokens: int


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Renew the leases of these attempts; the answer is `Renewed`. With none it asks whether the other side lives."""

    attempts: tuple[tuple[int, int], ...]


class Release(msgspec.Struct, frozen=True, tag=True):
    """The slot has been pulled; may that count? The answer is `Released`."""

    request: int
    attempt: int
    ref: SlotRef


class Abort(msgspec.Struct, frozen=True, tag=True):
    """This attempt is not wanted any more, and nothing that was pulled of it will count."""

    request: int
    attempt: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The session has begun."""

    metadata: Metadata


class Reject(msgspec.Struct, frozen=True, tag=True):
    """There is no session, or no more."""

    reason: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A slot holds a chunk.

    checksums: of its segments.
    first: with the last chunk.
    """

    request: int
    attempt: int
    ref: SlotRef
    chunk: KVChunk
    checksums: tuple[int, ...]
    first: FirstToken | None = None


class Released(msgspec.Struct, frozen=True, tag=True):
    """ok: the slot held what was offered until now, and is the prefill worker's again. Else nothing of it counts."""

    request: int
    attempt: int
    ref: SlotRef
    ok: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This attempt will get nothing more."""

    request: int
    attempt: int
    reason: str


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """The prefill worker lives."""


ToPrefill = Hello | Prefill | Renew | Release | Abort
ToDecode = Welcome | Reject | Offer | Renewed | Released | Refused
Message = TypeVar("Message")

encode = msgspec.msgpack.Encoder().encode
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)


def decode_to_prefill(body: bytes) -> ToPrefill | None:
    """None for what is no message."""
    return _decoded(_to_prefill.decode, body)


def decode_to_decode(body: bytes) -> ToDecode | None:
    """None for what is no message."""
    return _decoded(_to_decode.decode, body)


def _decoded(decode: Callable[[bytes], Message], body: bytes) -> Message | None:
    try:
        return decode(body)
    except (msgspec.MsgspecError, UserError, ValueError, OverflowError, RecursionError):
        return None  # UserError: of sampling parameters that cannot be
