"""Memory that processes share through a file, and its lock."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SharedFile:
    """`size` bytes, zeros at first. memory: of them."""

    def __init__(self, file: Path | None, size: int) -> None:
        """file: None for a process that is alone."""
        self._fd = -1
        if file is not None:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(self._fd, size)
        self.memory = memoryview(mmap.mmap(self._fd, size))  # -1 maps memory of this process alone

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process is under this lock meanwhile."""
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
