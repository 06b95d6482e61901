"""The part of a request's K/V that travels in one slot from a prefill worker to a decode worker."""

from dataclasses import dataclass

ALIGNMENT = 16
"""Bytes: every segment of a chunk begins at a multiple."""


@dataclass(frozen=True, slots=True)
class KVChunk:
    """Tokens `start .. start + count` of a request whose prompt has `total`."""

    start: int
    count: int
    total: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def last(self) -> bool:
        """The row's record comes with it."""
        return self.end == self.total

    def first_seen(self, window: int | None) -> int:
        """The first of its tokens whose K/V travel for a group: a query at `total` or later can still see it.

        All of them without a window. Earlier ones may be gone where they were computed, and are never looked at where
        they would go. So a request that got only some of its chunks can go on by itself only from where its first chunk
        began, if a group has a window; without windows from the end of the last whole chunk.
        """
        if window is None:
            return self.start
        return max(self.start, min(self.end, self.total - window + 1))
