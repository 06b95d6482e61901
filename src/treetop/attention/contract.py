"""What a backend is given and what it gives back.

    plan_round(round)            once a round, before its phases, for backends that need host extents
    begin(metadata)              once a phase and KV group: what all its plans need of the committed prefix
    plan(begun, metadata)        once a phase, or a draft level: who sees what; shared by the group's layers
    prefix_tail(q, kv, plan, tail)  over the committed prefix and the tail
    causal(q, kv, plan)          prefill: K/V are in the pages already

Shapes: q [rows, n, heads, head_dim], out [rows, n, heads, value_dim], which is head_dim but where one plane is key and
value (`types.kv.KVFormat`). sinks: [heads] float32 or None, a logit a head that takes part in the
normalisation and has no value. Results: natural logarithm; an empty prefix is output 0, log-sum-exp -inf.

A new backend is one file of this folder, called after it, and its name in `types.config.Backend`:

- The file ends in `BACKEND`, a `BackendSpec`: its limits as `Capabilities`, what makes it, and probes, each of which
  says in one sentence why it cannot run on a device.
- A kernel of prefix and tail implements `AttentionBackend` (`triton_backend.py`). A library that attends to pages only
  is a `PagesLibrary` in a `LibraryBackend` (`fa3_backend.py`; of compressed attention `flashmla_backend.py`): tail,
  merge by log-sum-exp, windows and sinks are shared, so it is never told of a tree. Host work belongs in its `plan`;
  `plan_round` plans a whole round ahead. Pages in a format of its own are the `KVFormat` that `stores` gives.
- It is tested on a stand-in with the vendor's layout (tests/support/fake_libraries.py) and has a row in
  docs/backends.md; tests/attention/test_backend_file.py has a small one, whole. `benchmarks/attention.py --write-table`
  measures it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from treetop.attention.capabilities import Capabilities, Need
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import KVParts, PagedKV, decoded
from treetop.types.kv import KVFormat
from treetop.types.phase import Phase

P = TypeVar("P")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class TailKV:
    """K/V of the tail of one layer. data: [rows, t, planes, kv_heads, head_dim]. The rest as in `PagedKV`, which a
    `read` tail needs no more."""

    data: Tensor
    value_dim: int | None = None
    index_dim: int = 0
    scales: Tensor | None = None
    parts: KVParts | None = None

    def read(self, dtype: torch.dtype) -> "TailKV":
        """What is stored there as plain numbers; itself, and nothing computed, where they are."""
        if self.scales is None and self.parts is None:
            return self
        return TailKV(decoded(self.data, self.scales, dtype, self.parts), self.value_dim, self.index_dim)

    @property
    def planes(self) -> Tensor:
        """Without what is an indexer's."""
        return self.data[..., : self.data.shape[-1] - self.index_dim] if self.index_dim else self.data

    @property
    def k(self) -> Tensor:
        return self.planes[:, :, 0]

    @property
    def v(self) -> Tensor:
        return self.data[:, :, -1, :, : self.value_dim]

    @property
    def index_keys(self) -> Tensor:
        """Of the indexer, [rows, t, index_dim]."""
        return self.data[:, :, 0, 0, self.data.shape[-1] - self.index_dim :]


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


class SparseBackend(Protocol[Q]):
    """What a backend has besides whose capabilities say `sparse`: attention to the keys that an indexer chooses.

    A choice is of positions and columns of the tail, so that layers of other groups may share it.
    """

    def choose(self, query: IndexQuery, kv: PagedKV, plan: Q, tail: TailKV | None) -> Any:
        """The keys that each query sees, of those that the plan shows it. The layer's index keys are written."""
        ...

    def hidden(self, plan: Q, chosen: Any) -> Tensor:
        """A key that was chosen though the plan does not show it, of each row, [rows] int64; -1 where there is none.
        Nothing waits for the device."""
        ...

    def narrowed(self, plan: Q, chosen: Any) -> Q:
        """The plan, with what was chosen in place of all that it shows."""
        ...


class FlatBackend(Protocol):
    """What a backend has besides whose capabilities say `flat`."""

    def flat_prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Any, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor | None:
        """`prefix_tail` of the nodes that the plan's `flat` says, one after the other: q [N, 1, heads, head_dim] and a
        tail [N, 1, ...]. Returns [N, 1, heads, value_dim]; None where this call is to be made by row."""
        ...


@dataclass(frozen=True, slots=True)
class RoundExtents:
    """A round about to run, for a backend whose capabilities say `needs_host_extents`.

    rows: [bucket] int64, the row list.
    committed: [num_rows] int64, of all rows: exact, so nothing may be in flight.
    queries: how many queries a row has in each phase of the round.
    """

    rows: Tensor
    committed: Tensor
    queries: Mapping[Phase, int]


class HostPlanned(Protocol):
    """What such a backend has besides."""

    def plan_round(self, round: RoundExtents) -> None: ...


def as_it_is(form: KVFormat) -> KVFormat:
    return form


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """All that is known of a backend: the value `BACKEND` of its file.

    make: a backend for an engine that it can serve.
    stores: how pages are to hold a format that the backend reads in another way, such as in parts; by default as it is.
    probes: in their order, each says in one sentence why the backend cannot run on a device, or None; `why_not` of
        `kernels.triton_guard` is the first of all that need a GPU.
    why_not_chosen: why `auto` leaves it to others though it would serve, for what is faster in it does not run here.
    """

    capabilities: Capabilities
    make: Callable[[Need], AttentionBackend[Any, Any]]
    probes: tuple[Callable[[torch.device], str | None], ...] = ()
    stores: Callable[[KVFormat], KVFormat] = as_it_is
    why_not_chosen: Callable[[Need], str | None] = lambda need: None
