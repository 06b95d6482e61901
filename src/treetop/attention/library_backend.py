"""A backend made of a library that attends to pages: the tail, the merge, windows and sinks are shared.

prefix_tail   the library over the pages, then tail and merge in one Triton launch
causal        the library, after which padding is set to 0 and a sink takes its share
a window      the Triton backend: a library's window counts queries, a tree's goes by position
what it has no kernel for, as its capabilities say: prompts, or layers without compression: the Triton backend
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.capabilities import Capabilities, GroupNeed
from treetop.attention.contract import AttentionBackend, RoundExtents, TailKV
from treetop.attention.tail import with_sinks
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
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
    """What library and other backend made of a prefix when the first plan of each asked."""

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
class OtherPlan:
    """The other backend's plan of a phase."""

    inner: Any


class LibraryBackend:
    """See the module. others: the backend of layers with a window, and of what the library has no kernel for. groups:
    whose layers are asked for, where that may be some of them."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        library: PagesLibrary,
        others: AttentionBackend[Any, Any],
        ops: Ops,
        groups: tuple[GroupNeed, ...] = (),
    ) -> None:
        assert not capabilities.own_windows  # shared here, as are sinks
        assert not capabilities.own_sinks
        self.name, self.capabilities = name, capabilities
        self._library, self._others, self._ops = library, others, ops
        self._uncompressed = {g.name for g in groups if capabilities.compressed_only and g.latent is None}

    def plan_round(self, round: RoundExtents) -> None:
        """Where the library needs lengths on the host: exact plans for a round about to run."""
        self._library.plan_round(round)

    def begin(self, metadata: AttentionMetadata) -> LibraryPrefix:
        return LibraryPrefix()

    def _elsewhere(self, metadata: AttentionMetadata) -> bool:
        """Whether the other backend serves a phase of a group's layers."""
        if metadata.window is not None or metadata.table.group in self._uncompressed:
            return True
        return metadata.causal and not self.capabilities.own_prefill

    def plan(self, begun: LibraryPrefix, metadata: AttentionMetadata) -> LibraryPlan | OtherPlan:
        if self._elsewhere(metadata):
            return OtherPlan(self._others.plan(begun.of(self._others, metadata), metadata))
        padding = None
        if metadata.causal:
            query_len, n = metadata.kv_len - metadata.positions[:, 0], metadata.positions.shape[1]
            padding = torch.arange(n, device=query_len.device) >= query_len[:, None]
        return LibraryPlan(self._library.plan(begun.of(self._library, metadata), metadata), metadata, padding)

    def prefix_tail(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: LibraryPlan | OtherPlan,
        tail: TailKV,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, OtherPlan):
            return self._others.prefix_tail(q, kv, plan.inner, tail, scale, sinks)
        part, seen = plan.attend(q, kv, scale), tail.read(q.dtype)
        return self._ops.tail_and_merge(q, part, seen.planes, plan.metadata, scale, sinks, value_dim=seen.value_dim)

    def causal(
        self,
        q: Tensor,
        kv: PagedKV,
        plan: LibraryPlan | OtherPlan,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, OtherPlan):
            return self._others.causal(q, kv, plan.inner, scale, sinks)
        assert plan.padding is not None
        part = plan.attend(q, kv, scale)
        out = part.out if sinks is None else with_sinks(part.out, part.lse * part.unit, sinks)
        return out.masked_fill(plan.padding[:, :, None, None], 0)


def first_line(error: BaseException) -> str:
    """What a library's error says, for the sentence of a refusal."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def on_hopper(device: torch.device) -> str | None:
    """Compute capability 9, which some libraries' kernels are compiled for alone."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return None if major == 9 else f"its kernels are for GPUs of compute capability 9.x, this one has {major}.{minor}"
