"""A backend made of a library that attends to pages: the tail, the merge, windows and sinks are shared.

prefix_tail   the library over the pages, then tail and merge in one Triton launch
causal        the library, after which padding is set to 0 and a sink takes its share
a window      the Triton backend: a library's window counts queries, a tree's goes by position
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.capabilities import CAPABILITIES, Capabilities
from treetop.attention.contract import AttentionBackend, Queries, RoundExtents, TableView, TailKV
from treetop.attention.tail import with_sinks
from treetop.kernels.attention import TailKeys
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import Ops
from treetop.kernels.tail import PrefixPart, TailSight

AttendPages = Callable[[Tensor, PagedKV, float], PrefixPart]
"""(q, kv, scale) -> what the pages give; made by a plan, called once a layer."""


class PagesLibrary(Protocol):
    """What a library is asked for. `begin` is called once a phase and group at most, and only if a plan follows."""

    def begin(self, view: TableView) -> Any: ...

    def plan(self, begun: Any, n: int) -> AttendPages:
        """Every one of n queries a row sees the row's whole prefix."""

    def plan_causal(self, begun: Any, positions: Tensor) -> AttendPages:
        """A query sees up to its own position. Padding queries may give anything."""

    def plan_round(self, round: RoundExtents) -> None: ...


class LibraryPrefix:
    """A view, and what the library made of it when the first plan asked."""

    def __init__(self, view: TableView, library: PagesLibrary) -> None:
        self.view = view
        self._library, self._begun = library, None

    @property
    def begun(self) -> Any:
        if self._begun is None:
            self._begun = self._library.begin(self.view)
        return self._begun


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """queries: None in prefill, where `padding` [rows, n] bool says which queries are none."""

    attend: AttendPages
    queries: Queries | None
    padding: Tensor | None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The window backend's plan of a phase."""

    inner: Any


class LibraryBackend:
    """See the module. windows: the backend of layers with a window."""

    def __init__(self, name: str, library: PagesLibrary, windows: AttentionBackend[Any, Any], ops: Ops) -> None:
        self.name = name
        self.capabilities: Capabilities = CAPABILITIES[name]
        assert not self.capabilities.own_windows  # shared here, as are sinks
        assert not self.capabilities.own_sinks
        self._library, self._windows, self._ops = library, windows, ops

    def plan_round(self, round: RoundExtents) -> None:
        """Where the library needs lengths on the host: exact plans for a round about to run."""
        self._library.plan_round(round)

    def begin(self, view: TableView) -> LibraryPrefix:
        return LibraryPrefix(view, self._library)

    def plan(self, prefix: LibraryPrefix, queries: Queries) -> LibraryPlan | WindowPlan:
        if queries.window is not None:
            return WindowPlan(self._windows.plan(self._windows.begin(prefix.view), queries))
        return LibraryPlan(self._library.plan(prefix.begun, queries.positions.shape[1]), queries, None)

    def plan_causal(self, prefix: LibraryPrefix, positions: Tensor, window: int | None) -> LibraryPlan | WindowPlan:
        if window is not None:
            return WindowPlan(self._windows.plan_causal(self._windows.begin(prefix.view), positions, window))
        query_len = prefix.view.extent - positions[:, 0]
        padding = torch.arange(positions.shape[1], device=positions.device) >= query_len[:, None]
        return LibraryPlan(self._library.plan_causal(prefix.begun, positions), None, padding)

    def prefix(self, q: Tensor, kv: PagedKV, plan: LibraryPlan | WindowPlan, scale: float) -> tuple[Tensor, Tensor]:
        if isinstance(plan, WindowPlan):
            return self._windows.prefix(q, kv, plan.inner, scale)
        return plan.attend(q, kv, scale).normalised()

    def prefix_tail(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: LibraryPlan | WindowPlan,
        tail: TailKV,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, WindowPlan):
            return self._windows.prefix_tail(q, kv, plan.inner, tail, scale, sinks)
        assert plan.queries is not None
        part = plan.attend(q, kv, scale)
        keys = TailKeys(tail.data, plan.queries.tail_positions, plan.queries.mask)
        sight = TailSight(plan.queries.positions)
        return self._ops.tail_and_merge(q, part, keys, sight, scale, sinks)

    def causal(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: LibraryPlan | WindowPlan,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, WindowPlan):
            return self._windows.causal(q, kv, plan.inner, scale, sinks)
        assert plan.padding is not None
        part = plan.attend(q, kv, scale)
        out = part.out if sinks is None else with_sinks(part.out, part.lse * part.unit, sinks)
        return out.masked_fill(plan.padding[:, :, None, None], 0)
