"""Memory that processes share through a file, and its lock; a lock alone."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treetop.types.errors import EngineError


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


@contextmanager
def only_one(file: Path | None) -> Iterator[bool]:
    """Whether no other process is in this block, by a lock on a file, which ends with the process; it never waits.

    file: None for a process that is alone. Within a process nobody else may have it open meanwhile. Raises EngineError
    if it cannot be opened.
    """
    if file is None:
        yield True
        return
    try:
        held = file.open("ab")
    except OSError as error:
        raise EngineError(
            f"nothing has changed, for {file}, which processes of this server lock while engines change, cannot be"
            f" opened ({error.strerror}); its folder, for temporary files (TMPDIR), must stay while the server runs"
        ) from error
    with held:
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except (BlockingIOError, PermissionError):
            alone = False
        yield alone
