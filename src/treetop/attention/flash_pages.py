"""Pages by FlashAttention: the batch's table and lengths once a phase, strided views of K and V, no copy."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from treetop.attention.contract import RoundExtents
from treetop.attention.library_backend import AttendPages
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import Ops


@dataclass(frozen=True, slots=True)
class PagedCall:
    """One batch of queries over pages.

    q: [rows, n, heads, d].
    k, v: [pages, page_size, kv_heads, d], strided.
    table: [rows, columns] int32.
    lengths: [rows] int32, keys a row.
    query_len: [rows] int32, queries a row that are not padding, which stand last in its keys and see up to themselves;
        None: all are real and see every key.
    max_kv_len: no length is larger.
    schedule: how the work is shared out, from `schedule` of the library, for all layers of a phase; None: each call
        finds out for itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    query_len: Tensor | None
    max_kv_len: int
    scale: float
    schedule: Tensor | None = None


class FlashAttention(Protocol):
    """A FlashAttention over pages."""

    def schedule(self, call: PagedCall) -> Tensor | None:
        """What calls of this shape and these lengths may share; None if the library has no such thing."""

    def __call__(self, call: PagedCall) -> tuple[Tensor, Tensor]:
        """Returns out [rows, n, heads, d] and lse [rows, heads, n] float32, natural; anything where padding is."""


@dataclass(frozen=True, slots=True)
class FlashTable:
    """A prefix as FlashAttention reads it.

    table: [rows, columns] int32.
    lengths: [rows] int32.
    """

    metadata: AttentionMetadata
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, metadata: AttentionMetadata, ops: Ops) -> "FlashTable":
        """Gathered in one launch, with the null page where a row has no keys."""
        columns = min(max(-(-metadata.max_kv_len // metadata.page_size), 1), metadata.table.data.shape[1])
        table, lengths = ops.gather_table(
            metadata.table.data, metadata.rows, metadata.kv_len, columns, metadata.page_size
        )
        return cls(metadata, table, lengths)


class FlashPages:
    """`attention` over pages."""

    def __init__(self, attention: FlashAttention, ops: Ops) -> None:
        self._attention, self._ops = attention, ops

    def begin(self, metadata: AttentionMetadata) -> FlashTable:
        return FlashTable.of(metadata, self._ops)

    def plan(self, begun: FlashTable, metadata: AttentionMetadata) -> AttendPages:
        if not metadata.causal:
            return self._attend(begun, None)
        # A chunk's first position is where its row's committed tokens end; the dummy row has length 0 and position 0.
        return self._attend(begun, (metadata.kv_len - metadata.positions[:, 0]).to(torch.int32))

    def plan_round(self, round: RoundExtents) -> None:
        """Lengths are read on the device: nothing to do."""

    def _attend(self, begun: FlashTable, query_len: Tensor | None) -> AttendPages:
        metadata = begun.metadata
        shared: list[Tensor | None] = []  # the schedule, from the first layer on

        def attend(q: Tensor, kv: PagedKV, scale: float) -> PrefixPart:
            pages = kv.data.unflatten(0, (-1, metadata.page_size))
            k, v = pages[:, :, 0], pages[:, :, 1]
            call = PagedCall(q, k, v, begun.table, begun.lengths, query_len, metadata.max_kv_len, scale)
            if not shared:
                shared.append(self._attention.schedule(call))
            out, lse = self._attention(replace(call, schedule=shared[0]))
            return PrefixPart(out, lse.transpose(1, 2), metadata.kv_len)

        return attend
