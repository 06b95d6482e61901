"""Whether a draft head fits the weights that it drafts for: what rounds gave before these came, and give now."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from treetop.types.requests import RequestUpdate

log = logging.getLogger("treetop.core")

_ROUNDS = 256
"""Rounds of rows that are looked at before and after."""
_STOPPED = 0.7
"""A share of what drafts gave beyond a round's own token below which a head fits no longer."""


@dataclass(slots=True)
class HeadFit:
    """Mean accept lengths, the tokens of a round, of rounds that verified drafts.

    before: with the last weights; None before any were replaced, or if they gave too few. now: of the last rounds.
    """

    before: float | None = None
    _counts: list[int] = field(default_factory=list)
    _waits: bool = False  # for enough rounds of new weights
    _version: int = 0

    @property
    def now(self) -> float | None:
        return sum(self._counts) / len(self._counts) if self._counts else None

    @property
    def said(self) -> tuple[float, float] | None:
        """Before and now, once both are known; what `CoreLoad` tells."""
        now = self.now
        return None if self.before is None or now is None or self._waits else (self.before, now)

    def weights_changed(self, version: int) -> None:
        """What follows is of other weights."""
        if len(self._counts) >= _ROUNDS // 4:
            self.before = self.now
        self._counts, self._waits, self._version = [], True, version

    def note(self, updates: Iterable[RequestUpdate]) -> None:
        """Of a step that was committed."""
        self._counts += [1 + (each.accept_len or 0) for each in updates if each.num_drafted]
        del self._counts[:-_ROUNDS]
        if self._waits and len(self._counts) >= _ROUNDS // 4:
            self._waits = False
            self._say()

    def _say(self) -> None:
        if self.before is None or self.now is None:
            return
        words = "accept length %.2f with weights %d, %.2f before"
        if self.now - 1 < _STOPPED * (self.before - 1):
            log.warning(
                f"{words}: the draft head fits them no longer; update it with them (draft)",
                *(self.now, self._version, self.before),
            )
        else:
            log.info(words, self.now, self._version, self.before)
