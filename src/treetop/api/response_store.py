"""Conversations of `/v1/responses` that a later request may go on with: bounded, and not for long."""

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from treetop.text.chat_input import Message

MOST_BYTES = 2**26
KEPT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """written: the messages, as JSON: what takes memory is what can be counted. size: bytes of all that is kept."""

    written: bytes
    size: int
    until_s: float


_ENTRY = 256
"""Bytes of an entry beside its id and its messages."""


class ResponseStore:
    """Messages by the id of the response they end with. The oldest make room; what is too large is not kept.

    most_bytes: of memory, all counted.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes, self._kept_s, self._clock = most_bytes, kept_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._size = 0

    def put(self, response_id: str, messages: list[Message]) -> None:
        written = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        size = sys.getsizeof(written) + sys.getsizeof(response_id) + _ENTRY
        if size <= self._most_bytes:
            self._kept[response_id] = _Kept(written, size, self._clock() + self._kept_s)
            self._size += size
        self._make_room()

    def get(self, response_id: str) -> list[Message] | None:
        """None for one that is not known, or not any more."""
        self._make_room()
        found = self._kept.get(response_id)
        if found is None:
            return None
        messages: list[Message] = json.loads(found.written.decode("utf-8", "surrogatepass"))
        return messages

    def _make_room(self) -> None:
        now_s = self._clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._size <= self._most_bytes and oldest.until_s > now_s:
                break
            self._kept.popitem(last=False)
            self._size -= oldest.size
