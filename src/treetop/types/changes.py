"""What changes an engine that runs, between two of its steps: one value each, which every rank and replica is given.

All read and check first (`prepare`), and nothing has changed if one refuses; then all take it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from treetop.types.errors import InputError, shown

InFlight = Literal["abort", "retract"]
IN_FLIGHT: tuple[str, ...] = get_args(InFlight)
Commit = Callable[[], object]
"""Puts what was prepared in force. It is dropped by not being called, and by telling `drop` of who prepared it."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Go on with the weights of other folders, of None with those in force, read again.

    in_flight: what becomes of requests that are alive: they end, or are put back and go on with the new weights.
    """

    model: str | None = None
    draft: str | None = None
    in_flight: InFlight = "abort"


@dataclass(frozen=True, slots=True)
class LoadLora:
    """An adapter that requests may name from now on. number: by which the core tells it from every other, ever."""

    name: str
    path: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class UnloadLora:
    """No request may name this adapter any more. Those that have named it go on with it to their end.

    number: the core's, where no request has it; else a later plan says when nobody does.
    """

    name: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back. K/V are dropped; weights are kept on the host (level 1) or dropped, too (level 2)."""

    level: int = 1


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Have it again: what these of `TAGS` name, None for all that sleeps."""

    tags: tuple[str, ...] | None = None


TAGS = ("weights", "kv_cache")
"""What sleeps, and wakes by itself."""
Change = UpdateWeights | LoadLora | UnloadLora | Sleep | WakeUp
CHANGES: dict[str, type[Change]] = {
    "update_weights": UpdateWeights,
    "load_lora": LoadLora,
    "unload_lora": UnloadLora,
    "sleep": Sleep,
    "wake_up": WakeUp,
}
"""By what an `LLM` calls them."""


def check_in_flight(given: object) -> None:
    """Raises InputError for what is none of `IN_FLIGHT`."""
    if given not in IN_FLIGHT:
        raise InputError(f"in_flight: must be {' or '.join(IN_FLIGHT)}, got {shown(given)}")


def asked_as(change: Change) -> str:
    """What an `LLM` calls a change."""
    return next(name for name, kind in CHANGES.items() if isinstance(change, kind))
