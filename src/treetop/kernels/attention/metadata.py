"""Who sees what in one phase and KV group: the one thing that attention is told besides tensors of numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.kv import PageTable
from treetop.kernels.triton_guard import Arg, constexpr, jit, tl
from treetop.types.phase import Phase
from treetop.types.tree import FlatNodes


@dataclass(frozen=True, slots=True)
class SparseKeys:
    """The keys that sparse attention shows each query, of those that it may see at all.

    positions: [rows, n, top_k] int32, of the committed prefix, rising; of a query the first `count` hold.
    count: [rows, n] int32.
    columns: [rows, n, t] bool, of the tail; None without a tail.
    """

    positions: Tensor
    count: Tensor
    columns: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The committed prefix of each row, the queries, and what these see of a tail; shared by the layers of a group.

    rows: [rows] int64, the row list; with `table` it says where K/V of the prefix lie.
    kv_len: [rows] int64, how many positions from 0 hold K/V to be seen: `committed` in every decode phase, `committed +
        query_len` in prefill.
    max_kv_len: no extent is larger.
    positions: [rows, n] int64, of the queries.
    window: how far they see, themselves counted, by position; None is everything.
    chunked: so far they see only if it is in their own chunk of `window` positions, see `first_seen`.
    tail_positions: [rows, t] int64, and mask: [rows, n, t] bool, of a dense tail after the prefix. Without these the
        queries are a prefill's: they see positions up to their own, which rise along a row. A query after the first
        whose position is not above the first's is padding and sees nothing.
    chosen: of what they would see, what they do see; `mask` is then its columns.
    flat: a budget has cut the trees. Queries and columns are [rows, n] here all the same; a backend whose capabilities
        say `flat` may be given those that are left, one after the other.
    """

    phase: Phase
    table: PageTable
    rows: Tensor
    kv_len: Tensor
    max_kv_len: int
    page_size: int
    positions: Tensor
    window: int | None = None
    tail_positions: Tensor | None = None
    mask: Tensor | None = None
    chunked: bool = False
    chosen: SparseKeys | None = None
    flat: FlatNodes | None = None

    @property
    def oldest(self) -> Tensor | None:
        """The first position that each query sees, [rows, n] int64; None where it sees everything."""
        return None if self.window is None else first_seen(self.positions, self.window, self.chunked)

    @property
    def causal(self) -> bool:
        return self.mask is None

    @property
    def extents(self) -> Tensor:
        """How many positions from 0 each query may see, [rows, n] int64."""
        kv_len = self.kv_len[:, None].expand_as(self.positions)
        if not self.causal:
            return kv_len
        real = self.positions > self.positions[:, :1]
        real[:, 0] = True
        return torch.where(real, torch.minimum(kv_len, self.positions + 1), 0)


def first_seen(positions: Tensor, window: int, chunked: bool) -> Tensor:
    """The first position that queries at `positions` see, like these; below 0 where a window begins before the text.

    Of a window it is so many positions back, the query's own counted; of chunks, it begins the query's own chunk.
    """
    return positions // window * window if chunked else positions - window + 1


@jit
def oldest_seen(position: Arg, window: constexpr, chunked: constexpr) -> Arg:
    """`first_seen` of positions [m] int32, and not below 0."""
    if chunked:
        return position // window * window
    return tl.maximum(position - window + 1, 0)
