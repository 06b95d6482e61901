"""Conversations of `/v1/responses` that a later request may go on with: bounded, and not for long."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from treetop.server.chat_input import Message

MOST_BYTES = 2**26
KEPT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Kept:
    messages: list[Message]
    size: int
    until_s: float


class ResponseStore:
    """Messages by the id of the response they end with. The oldest make room; what is too large is not kept."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes, self._kept_s, self._clock = most_bytes, kept_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._size = 0

    def put(self, response_id: str, messages: list[Message]) -> None:
        size = len(json.dumps(messages))
        if size <= self._most_bytes:
            self._kept[response_id] = _Kept(messages, size, self._clock() + self._kept_s)
            self._size += size
        self._make_room()

    def get(self, response_id: str) -> list[Message] | None:
        """None for one that is not known, or not any more."""
        self._make_room()
        found = self._kept.get(response_id)
        return None if found is None else found.messages

    def _make_room(self) -> None:
        now_s = self._clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._size <= self._most_bytes and oldest.until_s > now_s:
                break
            self._kept.popitem(last=False)
            self._size -= oldest.size
