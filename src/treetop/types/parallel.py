"""What a rank says to the others of its group while a step runs: all that a model sees of several GPUs.

Everything that comes back is the same bytes on every rank, in the order of the ranks. So what ranks compute of it alike
is alike, and trees, paths and tokens agree without anybody sending them.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Share(Protocol):
    """A rank's share of a sum, which is taken by whoever reads it: once, by all ranks alike."""

    def add_rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """`kernels.fused.add_rms_norm` of x and the shares of all ranks; without weight, x plus the shares twice."""
        ...

    def sum(self) -> Tensor:
        """As `Parallel.sum`."""
        ...


Summed = Tensor | Share
"""Parts of a sum, or one that has yet to be taken."""


def taken(summed: Summed) -> Tensor:
    """The parts of a sum, which is taken now if it has yet to be."""
    return summed if isinstance(summed, Tensor) else summed.sum()


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

    def share(self, parts: Tensor) -> Summed:
        """The same, or a sum that is left to the norm which reads it, where one launch can do both."""
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

    def minimum(self, number: int) -> int:
        """The smallest of the ranks' numbers; the host waits for it."""
        ...

    def record(self) -> Tensor | None:
        """[8] int64, as `checks.probes` reads it: where kernels that wait for others write who did not answer."""
        ...


class SingleRank:
    """A group of one."""

    rank, size = 0, 1

    def sum(self, parts: Tensor) -> Tensor:
        return parts

    def share(self, parts: Tensor) -> Summed:
        return parts

    def gather(self, piece: Tensor) -> Tensor:
        return piece[None]

    def join(self, piece: Tensor) -> Tensor:
        return piece

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return pieces

    def minimum(self, number: int) -> int:
        return number

    def record(self) -> Tensor | None:
        return None


SINGLE_RANK = SingleRank()


class ExpertPart(NamedTuple):
    """Which of `size` equal parts of the experts a rank has."""

    rank: int
    size: int


def expert_part(parallel: Parallel, expert_ranks: Parallel) -> ExpertPart:
    """Both kinds of ranks divide the experts: those that share a model, and those that share nothing else."""
    return ExpertPart(expert_ranks.rank * parallel.size + parallel.rank, expert_ranks.size * parallel.size)


class PlaceholderRank:
    """The first rank of a group that is not there yet: enough to plan with, on tensors without memory too."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, parts: Tensor) -> Tensor:
        raise AssertionError("no rank has met another")

    share = join = all_to_all = sum

    def gather(self, piece: Tensor) -> Tensor:
        assert piece.is_meta, "no rank has met another"
        return piece.new_empty((self.size, *piece.shape))

    def minimum(self, number: int) -> int:
        raise AssertionError("no rank has met another")

    def record(self) -> Tensor | None:
        return None
