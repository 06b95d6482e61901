"""What a backend is given and what it gives back.

    plan_round(round)            once a round, before its phases, for backends that need host extents
    begin(metadata)              once a phase and KV group: what all its plans need of the committed prefix
    plan(begun, metadata)        once a phase, or a draft level: who sees what; shared by the group's layers
    prefix_tail(q, kv, plan, tail)  over the committed prefix and the tail
    causal(q, kv, plan)          prefill: K/V are in the pages already

Shapes: q and out [rows, n, heads, head_dim]. sinks: [heads] float32 or None, a logit a head that takes part in the
normalisation and has no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from treetop.attention.capabilities import Capabilities
from treetop.kernels.kv import PagedKV
from treetop.kernels.metadata import AttentionMetadata
from treetop.types.phase import Phase

P = TypeVar("P")
Q = TypeVar("Q")


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
    """A library or kernel that answers the contract's questions. P: what it makes of a prefix; Q: its plan."""

    name: str

    @property
    def capabilities(self) -> Capabilities: ...

    def begin(self, metadata: AttentionMetadata) -> P: ...

    def plan(self, begun: P, metadata: AttentionMetadata) -> Q: ...

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
