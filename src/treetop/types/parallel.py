"""What a rank says to the others of its group while a step runs: all that a model sees of several GPUs.

Everything that comes back is the same bytes on every rank, in the order of the ranks. So what ranks compute of it alike
is alike, and trees, paths and tokens agree without anybody sending them.
"""

from typing import Protocol

from torch import Tensor


class Parallel(Protocol):
    """One rank of a group. Every call is collective: all ranks make the same calls, in one order, of the same shapes.

    rank: 0 .. size - 1. Raises RuntimeError where the others do not answer in time.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, parts: Tensor) -> Tensor:
        """parts: [parts, ..., width], whose sum is this rank's share, and which it may use up.

        Returns parts whose sum is that of all shares.
        """
        ...

    def gather(self, piece: Tensor) -> Tensor:
        """piece: [...]. Returns [size, ...]."""
        ...

    def join(self, piece: Tensor) -> Tensor:
        """piece: [..., width]. Returns [..., size * width], the ranks' pieces side by side, contiguous."""
        ...

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """pieces: [size, ...], one for each rank. Returns [size, ...], what each rank has for this one."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; the host waits for it."""
        ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def sum(self, parts: Tensor) -> Tensor:
        return parts

    def gather(self, piece: Tensor) -> Tensor:
        return piece[None]

    def join(self, piece: Tensor) -> Tensor:
        return piece

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return pieces

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


class Unmet:
    """The first rank of a group that is not there yet: enough to plan with, and nothing can be exchanged."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, parts: Tensor) -> Tensor:
        raise AssertionError("no rank has met another")

    gather = join = all_to_all = sum

    def least(self, number: int) -> int:
        raise AssertionError("no rank has met another")
