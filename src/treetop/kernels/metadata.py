"""Who sees what in one phase and KV group: the one thing that attention is told besides tensors of numbers."""

from dataclasses import dataclass

from torch import Tensor

from treetop.kernels.kv import PageTable
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The committed prefix of each row, the queries, and what these see of a tail; shared by the layers of a group.

    rows: [rows] int64, the row list; with `table` it says where K/V of the prefix lie.
    kv_len: [rows] int64, how many positions from 0 hold K/V to be seen: `committed` in every decode phase, `committed +
        query_len` in prefill.
    max_kv_len: no extent is larger.
    positions: [rows, n] int64, of the queries.
    window: how far they see, themselves counted, by position; None is everything.
    tail_positions: [rows, t] int64, and mask: [rows, n, t] bool, of a dense tail after the prefix. Without these the
        queries are a prefill's: they see positions up to their own, which rise along a row. A query after the first
        whose position is not above the first's is padding and sees nothing.
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

    @property
    def causal(self) -> bool:
        return self.mask is None
