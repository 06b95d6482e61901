"""Counts the requests in flight in all API processes, so that the queue bound holds for all of them together."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treetop.distributed.shared_file import SharedFile

_SIZE = 8


class InFlightCounter:
    """A count for each process, which only that process changes, in a file that all of them map."""

    def __init__(self, file: Path | None = None, number: int = 0, num_processes: int = 1) -> None:
        """file: None for a process that is alone. number: of this process."""
        self._shared = SharedFile(file, _SIZE * num_processes)
        self._counts, self._number = self._shared.memory.cast("q"), number

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
        with self._shared.locked():
            yield

    def close(self) -> None:
        self._shared.close()
