"""Requests and tokens a minute by the names of keys, of all API processes together.

What has been used is a debt, which shrinks evenly by the limit in a minute. A request may begin while the debt of
requests leaves room for one more, and that of tokens is below a minute's; what it takes of tokens, nobody knows before,
so that debt may exceed a minute's, and the next request waits the longer.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from treetop.distributed.shared_file import SharedFile
from treetop.types.errors import ConfigError

MAX_NAMES = 4096
"""Names that there may be from a server's start on."""
_WIDTH = 5
"""Numbers of a name: what stands for it, 0 for nobody; a debt of requests and when it was; the same of tokens."""
_REQUESTS, _TOKENS = 1, 3
_MINUTE_S = 60.0
FLUSH_S = 0.1
"""Seconds that tokens may wait to be counted where other processes see them."""


class Limits(NamedTuple):
    """Of a name, a minute; None for as many as there are."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Whether a request may begin.

    headers: OpenAI's, of the limits that there are.
    refused: the kind that it is too much of, None if it may.
    retry_s: seconds until it may, then.
    """

    headers: dict[str, str]
    refused: str | None = None
    retry_s: float = 0.0


class RateLimits:
    """Debts in a file that all API processes map, each changed under its lock."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """file: None for a process that is alone. clock: seconds, the same for all processes."""
        self._shared = SharedFile(file, MAX_NAMES * _WIDTH * 8)
        self._numbers, self._clock = self._shared.memory.cast("d"), clock
        self._slots: dict[str, int] = {}
        self._limits: dict[str, Limits] = {}
        self._pending, self._flushed_s = Counter[str](), clock()

    def replace(self, limits: Mapping[str, Limits]) -> None:
        """What holds from now on, by name. Raises ConfigError for more names than there may be from the start on."""
        slots = dict(self._slots)
        with self._shared.locked():
            for name, each in limits.items():
                if name not in slots and each != Limits():
                    slots[name] = self._slot(name)
        self.flush()
        self._slots, self._limits = slots, dict(limits)

    def take(self, name: str) -> RateAnswer:
        """Count one request, unless it is refused."""
        requests, tokens = self._limits.get(name, Limits())
        if requests is None and tokens is None:
            return RateAnswer({})
        now, slot, headers = self._clock(), self._slots[name], dict[str, str]()
        self.flush()
        refused: tuple[str, float] | None = None
        with self._shared.locked():
            for kind, limit, place in (("requests", requests, _REQUESTS), ("tokens", tokens, _TOKENS)):
                if limit is None:
                    continue
                debt, one = self._debt(slot + place, limit, now), int(kind == "requests")
                over = debt + one - limit if one else debt - limit
                if (over > 0 if one else over >= 0) and refused is None:
                    refused = kind, (over if one else over + 1) * _MINUTE_S / limit
                left = debt if refused is not None else debt + one
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(limit - left + 1e-9), 0))
                headers[f"x-ratelimit-reset-{kind}"] = _span(left * _MINUTE_S / limit)
            if refused is None and requests is not None:
                self._add(slot + _REQUESTS, requests, 1, now)
        if refused is None:
            return RateAnswer(headers)
        kind, retry_s = refused
        return RateAnswer({**headers, "Retry-After": str(max(math.ceil(retry_s), 1))}, kind, retry_s)

    def used(self, name: str, tokens: int) -> None:
        """Tokens of a prompt or an output. They are counted within a moment, and before the next `take`."""
        if self._limits.get(name, Limits()).tokens is None:
            return
        self._pending[name] += tokens
        if self._clock() - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        pending, self._pending = self._pending, Counter[str]()
        self._flushed_s = now = self._clock()
        if not pending:
            return
        with self._shared.locked():
            for name, count in pending.items():
                limit = self._limits[name].tokens
                assert limit is not None
                self._add(self._slots[name] + _TOKENS, limit, count, now)

    def close(self) -> None:
        self._numbers.release()
        self._shared.close()

    # ---------------------------------------------------------------- inside

    def _debt(self, place: int, limit: int, now: float) -> float:
        """What is owed now; it is written down, so that another limit pays off no more than what is left."""
        owed, since = self._numbers[place], self._numbers[place + 1]
        left = max(owed - max(now - since, 0.0) * limit / _MINUTE_S, 0.0)
        self._numbers[place], self._numbers[place + 1] = left, now
        return left

    def _add(self, place: int, limit: int, count: int, now: float) -> None:
        self._numbers[place] = self._debt(place, limit, now) + count

    def _slot(self, name: str) -> int:
        """Where a name's numbers stand, in all processes."""
        sign = int.from_bytes(sha256(name.encode()).digest()[:6]) + 1
        for probe in range(MAX_NAMES):
            slot = (sign + probe) % MAX_NAMES * _WIDTH
            if self._numbers[slot] in (0.0, float(sign)):
                self._numbers[slot] = sign
                return slot
        raise ConfigError(f"keys: more than {MAX_NAMES} names since the server's start; start it again")


def _span(seconds: float) -> str:
    """As OpenAI writes it: 350ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
