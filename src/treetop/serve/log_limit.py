"""A log that a client cannot fill."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_MAX_KINDS = 256


@dataclass(slots=True)
class _LogWindow:
    since_s: float
    count: int = 0


class LogLimit(logging.Filter):
    """Lets through the first few warnings of a kind in an interval; the next one after it says how many it left out.

    A kind: logger, level, and the first line of the message before its arguments are put in.
    """

    def __init__(self, maximum: int = 5, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._maximum, self._interval_s, self._clock = maximum, interval_s, clock
        self._kinds: dict[tuple[str, int, str], _LogWindow] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now_s = (record.name, record.levelno, str(record.msg).partition("\n")[0]), self._clock()
        window = self._kinds.get(kind)
        if window is None or now_s - window.since_s >= self._interval_s:
            left_out = 0 if window is None else max(0, window.count - self._maximum)
            self._open(kind, now_s)
            if left_out:
                record.msg, record.args = f"{record.getMessage()} ({left_out} more of these were left out)", None
            return True
        window.count += 1
        return window.count <= self._maximum

    def _open(self, kind: tuple[str, int, str], now_s: float) -> None:
        self._kinds.pop(kind, None)
        if len(self._kinds) >= _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]  # the oldest
        self._kinds[kind] = _LogWindow(now_s, 1)
