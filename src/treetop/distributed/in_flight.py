"""Counts the requests in flight in all API processes, so that the queue bound holds for all of them together."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SIZE = 8


class InFlightCounter:
    """A count for each process, which only that process changes, in a file that all of them map."""

    def __init__(self, file: Path | None = None, number: int = 0, num_processes: int = 1) -> None:
        """file: None for a process that is alone. number: of this process."""
        self._fd, size = -1, _SIZE * num_processes
        if file is not None:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(self._fd, size)
        self._counts = memoryview(mmap.mmap(self._fd, size)).cast("q")  # -1 maps memory of this process alone
        self._number = number

    @property
    def own(self) -> int:
        return self._counts[self._number]

    @property
    def total(self) -> int:
        return sum(self._counts)

    def add(self, count: int) -> None:
        self._counts[self._number] += count

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process adds what it has looked at under this lock; anyone may subtract."""
        if self._fd < 0:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
