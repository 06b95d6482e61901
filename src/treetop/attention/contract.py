"""What a backend is given and what it gives back.

    plan_round(round)            once a round, before its phases, for backends that need host extents
    begin(view)                  once a phase and KV group: where the committed prefix lies
    plan(prefix, queries)        once a phase: who sees what; shared by the layers of the phase
    prefix(q, kv, plan)          -> out, lse over the committed prefix alone
    prefix_tail(q, kv, plan, tail)  the same and the tail; `tail.merged_prefix_tail` serves any backend
    causal(q, kv, plan)          prefill: K/V are in the pages already

Shapes: q and out [rows, n, heads, head_dim]; lse [rows, n, heads] float32, natural logarithm; an empty prefix gives
out 0 and lse -inf. sinks: [heads] float32 or None, a logit a head that takes part in the normalisation and has no
value; it enters once, in `prefix_tail` and in `causal`, never in `prefix`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from treetop.attention.capabilities import Capabilities
from treetop.kernels.kv import PagedKV, PageTable
from treetop.types.phase import Phase

P = TypeVar("P")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class TableView:
    """One group's page table as a batch sees it in one phase.

    rows: [rows] int64. extent: [rows] int64, how many positions from 0 hold
    K/V to be seen; `committed` in every decode phase, `committed + query_len` in prefill. bound: no extent is larger.
    """

    phase: Phase
    table: PageTable
    rows: Tensor
    extent: Tensor
    bound: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Queries:
    """Where the queries of a phase stand, and their tail.

    positions: [rows, n] int64. tail_positions: [rows, t] int64. mask: [rows, n, t] bool. window: how far a query sees,
    itself counted, by position; None is everything.
    """

    positions: Tensor
    tail_positions: Tensor
    mask: Tensor
    window: int | None = None


@dataclass(frozen=True, slots=True)
class TailKV:
    """K/V of the tail of one layer. data: [rows, t, planes, kv_heads, head_dim]."""

    data: Tensor

    @property
    def k(self) -> Tensor:
        return self.data[:, :, 0]

    @property
    def v(self) -> Tensor:
        return self.data[:, :, -1]


class AttentionBackend(Protocol[P, Q]):
    """A library or kernel that answers the contract's questions. P: its view of a prefix; Q: its plan of a phase."""

    name: str

    @property
    def capabilities(self) -> Capabilities: ...

    def begin(self, view: TableView) -> P: ...

    def plan(self, prefix: P, queries: Queries) -> Q: ...

    def plan_causal(self, prefix: P, positions: Tensor, window: int | None) -> Q: ...

    def prefix(self, q: Tensor, kv: PagedKV, plan: Q, scale: float) -> tuple[Tensor, Tensor]: ...

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Q, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor: ...

    def causal(self, q: Tensor, kv: PagedKV, plan: Q, scale: float, sinks: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RoundExtents:
    """A round about to run, for a backend whose capabilities say `needs_host_extents`.

    rows: [bucket] int64, the row list. committed: [num_rows] int64, of all rows: exact, so nothing may be in flight.
    queries: how many queries a row has in each phase of the round.
    """

    rows: Tensor
    committed: Tensor
    queries: Mapping[Phase, int]


class HostPlanned(Protocol):
    """What such a backend has besides."""

    def plan_round(self, round: RoundExtents) -> None: ...
