"""How text-level stops reach the scheduler, which knows only tokens."""

from collections.abc import Sequence
from typing import Protocol


class StopChecker(Protocol):
    """Finds stop strings in a request's growing output. It is fed each emitted token exactly once, in order."""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Index in `token_ids` of the first token that completes a stop, or None."""
        ...


class NoStop:
    """A request without stop strings."""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        return None
