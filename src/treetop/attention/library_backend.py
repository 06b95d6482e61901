"""A backend made of a library that attends to pages: the tail, the merge, windows and sinks are shared.

prefix_tail   the library over the pages, then tail and merge in one Triton launch; of compressed attention (MLA), whose
              value is narrower than its key, in plain tensor operations
causal        the library, after which padding is set to 0 and a sink takes its share
a window      the Triton backend: a library's window counts queries, a tree's goes by position
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.capabilities import Capabilities
from treetop.attention.contract import AttentionBackend, RoundExtents, TailKV
from treetop.attention.tail import with_sinks
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.tail import PrefixPart, tail_and_merge_reference
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import Ops

AttendPages = Callable[[Tensor, PagedKV, float], PrefixPart]
"""(q, kv, scale) -> what the pages give; made by a plan, called once a layer."""


class PagesLibrary(Protocol):
    """What a library is asked for. `begin` is called once a phase and group at most, and only if a plan follows."""

    def begin(self, metadata: AttentionMetadata) -> Any: ...

    def plan(self, begun: Any, metadata: AttentionMetadata) -> AttendPages:
        """A query sees its row's whole prefix; a prefill's up to its own position, and padding may give anything."""

    def plan_round(self, round: RoundExtents) -> None: ...


class LibraryPrefix:
    """What library and window backend made of a prefix when the first plan of each asked."""

    def __init__(self) -> None:
        self._begun: dict[object, Any] = {}

    def of(self, backend: PagesLibrary | AttentionBackend[Any, Any], metadata: AttentionMetadata) -> Any:
        if backend not in self._begun:
            self._begun[backend] = backend.begin(metadata)
        return self._begun[backend]


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """padding: [rows, n] bool, which queries of a prefill are none."""

    attend: AttendPages
    metadata: AttentionMetadata
    padding: Tensor | None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The window backend's plan of a phase."""

    inner: Any


class LibraryBackend:
    """See the module. windows: the backend of layers with a window."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        library: PagesLibrary,
        windows: AttentionBackend[Any, Any],
        ops: Ops,
    ) -> None:
        assert not capabilities.own_windows  # shared here, as are sinks
        assert not capabilities.own_sinks
        self.name, self.capabilities = name, capabilities
        self._library, self._windows, self._ops = library, windows, ops

    def plan_round(self, round: RoundExtents) -> None:
        """Where the library needs lengths on the host: exact plans for a round about to run."""
        self._library.plan_round(round)

    def begin(self, metadata: AttentionMetadata) -> LibraryPrefix:
        return LibraryPrefix()

    def plan(self, begun: LibraryPrefix, metadata: AttentionMetadata) -> LibraryPlan | WindowPlan:
        if metadata.window is not None:
            return WindowPlan(self._windows.plan(begun.of(self._windows, metadata), metadata))
        padding = None
        if metadata.causal:
            query_len, n = metadata.kv_len - metadata.positions[:, 0], metadata.positions.shape[1]
            padding = torch.arange(n, device=query_len.device) >= query_len[:, None]
        return LibraryPlan(self._library.plan(begun.of(self._library, metadata), metadata), metadata, padding)

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
        part, seen = plan.attend(q, kv, scale), tail.read(q.dtype)
        if seen.value_dim is not None:  # no kernel has a value that is narrower than the key
            return tail_and_merge_reference(q, part, seen.planes, plan.metadata, scale, sinks, seen.value_dim)
        return self._ops.tail_and_merge(q, part, seen.data, plan.metadata, scale, sinks)

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


def first_line(error: BaseException) -> str:
    """What a library's error says, for the sentence of a refusal."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
