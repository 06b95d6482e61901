"""A worker's part in handing requests over: desk, sessions and transport beside a core, on the core's thread.

scheduler --events--> desk --actions--> scheduler, sessions, transport      between the core's steps, none of them waits
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from treetop.transfer.transport import Memory, Range
from treetop.types.handover import Payload, Schema
from treetop.types.requests import HandoverLoad

SOON_MS, LATER_MS, IDLE_MS = 1, 5, 250
"""How long a loop without other work may wait: for transfers, for messages that wake nobody, and else."""
_SPIN_S = 0.005
"""So long after a transfer began nothing is waited for."""


def wait_ms(newest_s: float | None) -> int:
    """How long a loop without other work may wait, if its newest transfer under way began then; None if it has none.

    A slot crosses between two GPUs in a fraction of a millisecond, and NIXL goes on when it is asked whether it has, or
    once a millisecond by itself (nixl#347): a loop that sleeps makes a transfer ten times as slow.
    """
    if newest_s is None:
        return LATER_MS
    return 0 if time.monotonic() - newest_s < _SPIN_S else SOON_MS


class Staging(NamedTuple):
    """The slots of rank `rank` of a worker of `size`. memory: all of them, one after the other.

    whole: what a piece is on all ranks together.
    """

    memory: Memory
    num_slots: int
    slot_bytes: int
    whole: Payload
    schema: Schema
    rank: int = 0
    size: int = 1

    @property
    def tokens_per_slot(self) -> int:
        return self.whole.of_rank(self.size).tokens_per_slot(self.slot_bytes)

    def range_of(self, slot: int) -> Range:
        return Range(slot * self.slot_bytes, self.slot_bytes)


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """What one worker tells another of its slots. transports: of each rank, in their order."""

    num_slots: int
    transports: tuple[bytes, ...]


class Role(Protocol):
    """What a core's loop knows of the hand-over.

    asks: whether requests are to be prefilled elsewhere. refuses: why no client's request is taken, if so. stuck: why
    the worker should be started anew, once it has nothing to do. wait_ms: how long the loop may wait, if it does not
    have to do anything else.
    """

    @property
    def asks(self) -> bool: ...

    @property
    def refuses(self) -> str | None: ...

    @property
    def stuck(self) -> str | None: ...

    @property
    def wait_ms(self) -> int: ...

    @property
    def load(self) -> HandoverLoad | None: ...

    def sockets(self) -> Sequence[Any]: ...

    def poll(self, now: float) -> None:
        """Do all that there is to do, without waiting. now: seconds of a clock that never goes back."""
        ...

    def close(self) -> None: ...


def metadata_of(data: bytes) -> Metadata | None:
    """None for what is no metadata."""
    try:
        return msgspec.msgpack.decode(data, type=Metadata)
    except (msgspec.MsgspecError, ValueError):
        return None
