"""`auto`: each phase and shape class runs on the backend that was fastest for it when measured.

`choices.json`, written by `python benchmarks/attention.py --write-table` on one kind of GPU, gives for each shape class
the microseconds of every backend that gave right results. A class that was not measured takes the nearest that was, so
the largest one answers for all beyond it. Fewer queries a row than were ever measured, other heads, and any other GPU
run on Triton. Where an indexer chooses keys, their number is a part of the class's name.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from treetop.attention.capabilities import Capabilities, GroupNeed, Need
from treetop.attention.contract import AttentionBackend, FlatBackend, HostPlanned, RoundExtents, SparseBackend, TailKV
from treetop.attention.exact_backend import ExactBackend
from treetop.attention.registry import BACKENDS, fallback, refusal, require
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV
from treetop.kernels.triton_guard import gpu_traits
from treetop.kernels.tuning import TunedTable, nearest, parted, read_table
from treetop.types.config import PAGE_SIZE

TABLE = Path(__file__).with_name("choices.json")
FALLBACK = "triton"
SIZES = ("rows", "n", "keys")
"""In the name of a class."""
LAYERS = 32
"""Over how many layers a plan made on the host is spread, when its cost is weighed."""

WORTH = {"tail": 0.9, "causal": 0.97}
"""A backend replaces Triton only if it takes less than this share of its time, by the kind of call. Classes of rounds
go by the most keys that rows may ever have, and Triton wins the shorter rows; a prefill's go by the keys that there
are, so there only noise is left out."""


@dataclass(frozen=True, slots=True)
class Timing:
    """us: a call, in a replayed graph.
    plan_us: host time before a round, 0 for a backend that plans nothing.
    run: the day and the commit of the measurement; "" of those that the table's date is of.
    """

    us: float
    plan_us: float = 0.0
    run: str = ""

    @property
    def cost_us(self) -> float:
        return self.us + self.plan_us / LAYERS


ChoiceTable = TunedTable[dict[str, Timing]]
"""The timings of backends by name, by the class of a call."""


@cache
def load_table() -> ChoiceTable:
    """The committed table."""
    return read_table(TABLE, lambda row: {name: Timing(**timing) for name, timing in row.items()})


def choose(table: ChoiceTable, shape_class: str, usable: frozenset[str]) -> tuple[str, str]:
    """The backend of a class of calls among `usable`, and the reason, with the class that was measured."""
    measured = nearest_measured(shape_class, table)
    row = {} if measured is None else table.entries[measured]
    timings = {name: timing for name, timing in row.items() if name in usable}
    if FALLBACK not in timings:
        return FALLBACK, f"{shape_class}: not measured on this kind of GPU"
    best = min(timings, key=lambda name: timings[name].cost_us)
    if timings[best].cost_us > WORTH[shape_class.split(maxsplit=1)[0]] * timings[FALLBACK].cost_us:
        best = FALLBACK
    times = ", ".join(f"{name} {timing.cost_us:.1f}" for name, timing in sorted(timings.items()))
    where = "" if measured == shape_class else f" in {measured}"
    runs = ", ".join(sorted(runs_of(table, timings)))
    return best, f"{shape_class}: {times} us{where} ({runs})"


def nearest_measured(shape_class: str, table: ChoiceTable) -> str | None:
    """The measured class of the same kind and heads that is nearest: rows and queries a row count before keys, of
    which a round knows only the most there may be.

    None if there is none, or if all have more queries a row: few queries are another problem than many.
    """
    if shape_class in table.entries:
        return shape_class
    calls, sizes = parted(shape_class, SIZES)
    alike = [theirs["n"] for same, theirs in (parted(name, SIZES) for name in table.entries) if same == calls]
    few = not alike or sizes["n"] < min(alike)
    return None if few else nearest(shape_class, table.entries, ("rows", "n"), ("keys",))


def summary(table: ChoiceTable, need: Need, usable: frozenset[str]) -> str:
    """How many of the classes that were measured with an engine's heads run on which usable backend, in a sentence."""
    names = measured_with(table, need)
    if not names:
        return f"{FALLBACK}: no class of calls was measured with these heads"
    counts = Counter(choose(table, name, usable)[0] for name in names)
    shares = ", ".join(f"{count} on {name}" for name, count in counts.most_common())
    runs = ", ".join(sorted({run for name in names for run in runs_of(table, table.entries[name])}))
    return f"{shares} of {len(names)} classes measured with these heads ({runs}); {FALLBACK} elsewhere"


def runs_of(table: ChoiceTable, timings: Mapping[str, Timing]) -> set[str]:
    """When these were measured."""
    return {timing.run or table.date for timing in timings.values()}


def call_of(
    need: Need, group: GroupNeed, rows: int, n: int, max_kv_len: int, causal: bool, columns: int = 0
) -> CallShape:
    """A call of a group's layers. columns: of the tail. Where there are no more keys than an indexer would choose, none
    are chosen."""
    ratio, size, dim = group.heads // group.kv_heads, need.dtype.itemsize, group.head_dim - group.index_dim
    chosen = group.top_k if max_kv_len + columns > group.top_k else 0
    return CallShape(rows, n, group.kv_heads, ratio, dim, size, max_kv_len, causal, chosen)


def in_force(table: ChoiceTable, need: Need) -> ChoiceTable:
    """The table, or an empty one on a GPU that it was not measured on."""
    return table if table.holds_for(gpu_traits(need.device)) else replace(table, entries={})


def taken(table: ChoiceTable, need: Need) -> set[str]:
    """The backends that serve some class of calls which was measured with an engine's heads, and the fallback."""
    measured = {name for timings in table.entries.values() for name in timings}
    served = [name for name in measured if name in BACKENDS and refusal(name, need) is None]
    usable = frozenset(name for name in served if BACKENDS[name].why_not_chosen(need) is None)
    return {FALLBACK, *(choose(table, name, usable)[0] for name in measured_with(table, need))}


def measured_with(table: ChoiceTable, need: Need) -> list[str]:
    """The classes that were measured with the heads of an engine; where an indexer chooses keys, as many of them."""
    groups = [group for group in need.groups if group.window is None]
    heads = {call_of(need, group, 1, 1, 1 + group.top_k, False).heads for group in groups}
    return [name for name in table.entries if name.split()[1] in heads]


def page_size_for(name: str, need: Need) -> int:
    """The tokens of a page where none are asked for: those of the backend called `name`, if it serves no pages of
    `PAGE_SIZE`; of `auto` those of one that the table takes. need: of no page size."""
    names = {name}
    if name == "auto":
        compressed = any(group.latent is not None for group in need.groups)  # nothing else has such a backend
        serves = compressed and fallback(need) == FALLBACK and refusal(FALLBACK, need) is None
        names = taken(in_force(load_table(), need), need) if serves else set()
    limits = [sizes for each in names if (sizes := BACKENDS[each].capabilities.page_sizes) and PAGE_SIZE not in sizes]
    return max(max(sizes) for sizes in limits) if limits else PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a backend of the composition planned."""

    backend: AttentionBackend[Any, Any]
    inner: Any


class AutoPrefix:
    """What each backend that was chosen for a prefix made of it."""

    def __init__(self) -> None:
        self._begun: dict[str, Any] = {}

    def of(self, backend: AttentionBackend[Any, Any], metadata: AttentionMetadata) -> Any:
        if backend.name not in self._begun:
            self._begun[backend.name] = backend.begin(metadata)
        return self._begun[backend.name]


class AutoBackend:
    """Composes the backends that the table names for this engine's heads and this machine can run.

    The choice depends on shapes and the bound alone, so a captured round keeps it.

    parts: the backends, by name.
    reasons: why each class of calls so far runs where it does.
    """

    name = "auto"

    def __init__(self, table: ChoiceTable, need: Need) -> None:
        self._need, self._groups = need, {group.name: group for group in need.groups}
        self._table = in_force(table, need)
        names = taken(self._table, need)
        self.parts = {name: BACKENDS[name].make(need) for name in sorted(names)}
        self.capabilities: Capabilities = _joint([BACKENDS[name].capabilities for name in names])
        self.reasons: dict[str, str] = {}
        self._chosen: dict[str, str] = {}

    def backend_for(self, metadata: AttentionMetadata) -> AttentionBackend[Any, Any]:
        """The backend of one phase, and why, noted in `reasons`."""
        group = self._groups.get(metadata.table.group)
        if group is None or metadata.window is not None:
            return self.parts[FALLBACK]
        rows, n = metadata.positions.shape
        columns = metadata.mask.shape[2] if group.sparse and metadata.mask is not None else 0
        call = call_of(self._need, group, rows, n, metadata.max_kv_len, metadata.causal, columns)
        shape_class = call.shape_class
        if shape_class not in self._chosen:
            chosen = choose(self._table, shape_class, frozenset(self.parts))
            self._chosen[shape_class], self.reasons[shape_class] = chosen
        return self.parts[self._chosen[shape_class]]

    def plan_round(self, round: RoundExtents) -> None:
        for name, backend in self.parts.items():
            if BACKENDS[name].capabilities.needs_host_extents:
                cast(HostPlanned, backend).plan_round(round)

    def begin(self, metadata: AttentionMetadata) -> AutoPrefix:
        return AutoPrefix()

    def plan(self, begun: AutoPrefix, metadata: AttentionMetadata) -> Chosen:
        backend = self.backend_for(metadata)
        return Chosen(backend, backend.plan(begun.of(backend, metadata), metadata))

    def choose(self, query: IndexQuery, kv: PagedKV, plan: Chosen, tail: TailKV | None) -> Any:
        return cast(SparseBackend[Any], plan.backend).choose(query, kv, plan.inner, tail)

    def hidden(self, plan: Chosen, chosen: Any) -> Tensor:
        return cast(SparseBackend[Any], plan.backend).hidden(plan.inner, chosen)

    def narrowed(self, plan: Chosen, chosen: Any) -> Chosen:
        return replace(plan, inner=cast(SparseBackend[Any], plan.backend).narrowed(plan.inner, chosen))

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Chosen, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return plan.backend.prefix_tail(q, kv, plan.inner, tail, scale, sinks)

    def flat_prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Chosen, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor | None:
        if not plan.backend.capabilities.flat:
            return None
        return cast(FlatBackend, plan.backend).flat_prefix_tail(q, kv, plan.inner, tail, scale, sinks)

    def causal(self, q: Tensor, kv: PagedKV, plan: Chosen, scale: float, sinks: Tensor | None = None) -> Tensor:
        return plan.backend.causal(q, kv, plan.inner, scale, sinks)


def _joint(parts: list[Capabilities]) -> Capabilities:
    """The fallback's limits; a round is captured if all parts can be, and waits for lengths if one needs them."""
    base = BACKENDS[FALLBACK].capabilities
    return Capabilities(
        base.dtypes,
        base.head_dims,
        latents=base.latents,
        sparse=all(part.sparse for part in parts),
        fp8_kv=base.fp8_kv,
        captures=all(part.captures for part in parts),
        captures_first_call=all(part.captures_first_call for part in parts),
        needs_host_extents=any(part.needs_host_extents for part in parts),
        flat=any(part.flat for part in parts),
    )


def make_backend(name: str, need: Need) -> AttentionBackend[Any, Any]:
    """The backend called `name`, or for `auto` the one that the measured table composes; on a CPU that is PyTorch's.

    Where bits are to be exact on a GPU it is the one that can. Raises ConfigError with the reason and the option to
    change.
    """
    if name == "auto" and (name := fallback(need)) == FALLBACK and refusal(FALLBACK, need) is None:
        auto = AutoBackend(load_table(), need)
        return auto if len(auto.parts) > 1 else auto.parts[FALLBACK]
    able = require(name, need)
    return (
        ExactBackend(need.dtype, need.device, need.integers)
        if need.exact and not able.exact
        else BACKENDS[name].make(need)
    )
