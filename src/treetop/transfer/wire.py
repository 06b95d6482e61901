"""What a decode worker and a prefill worker say to each other: typed msgpack messages, never pickles.

decode  --Prefill, Renew, Release, Abort--> prefill
decode <--Offer, Renewed, Released, Refused-- prefill

A request is named by the decode worker's id and by the number of its attempt, which no other attempt has. A session
(`transfer/session.py`) carries them.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from treetop.types.errors import UserError
from treetop.types.handover import FirstToken, Piece, SlotRef
from treetop.types.sampling import SamplingParams

WIRE_VERSION = 2


class Prompt(msgspec.Struct, frozen=True):
    """What is to be prefilled, and how its first token is chosen."""

    ids: tuple[int, ...]
    params: SamplingParams
    seed: int


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute this, and offer its tokens from `start` on. most: tokens of a piece, that slots of the asker hold."""

    request: int
    attempt: int
    start: int
    prompt: Prompt
    most: int


class Renew(msgspec.Struct, frozen=True, tag=True):
    """These attempts are still wanted; the answer is `Renewed`. With none it asks whether the other side lives."""

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


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A slot holds a piece. checksums: of its stretches. first: with the last piece."""

    request: int
    attempt: int
    ref: SlotRef
    piece: Piece
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


ToPrefill = Prefill | Renew | Release | Abort
Message = TypeVar("Message")
ToDecode = Offer | Renewed | Released | Refused

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
