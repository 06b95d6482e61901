"""The visibility relation: who may see whom, from first principles, against what a phase was really given.

The decoder sits between the engine and its backend. From the row state and the tree's parents alone it derives, for
every live query, its position and the set of keys it may see: committed positions of its own request and nodes of its
own branch, within the window. It derives the same from the page tables, extents, positions and masks that the phase
hands to the backend, and raises at the first difference. It needs no attention kernel, and is slow on purpose.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from treetop.attention.contract import AttentionBackend, Queries, TableView, TailKV
from treetop.engine.device import Device
from treetop.kernels.grow import Frontier, Growth
from treetop.kernels.kv import PagedKV
from treetop.spec.round_ops import RoundOps
from treetop.types.errors import CheckError
from treetop.types.ids import NULL_PAGE
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class WatchedPrefix:
    """The inner backend's prefix, and the view it was made from."""

    inner: Any
    view: TableView


@dataclass(slots=True)
class VisibilityWatch:
    """Make engines inside `wrapped_device(watch.wrap)`. growth: of this round. checked: phases so far, by name.

    What a level's nodes hang on is read where growing records it for the choice of the tree, never from a mask.
    """

    growth: Growth | None = None
    checked: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))

    def wrap(self, device: Device) -> Device:
        ops = cast(RoundOps, _NotedGrowth(device.round_ops, self))
        return replace(device, backend=WatchedBackend(device.backend, device, self), round_ops=ops)

    def parents(self, row: int, level: int) -> list[list[int]]:
        """For each level 1 .. `level`, which node of the level before each of its k nodes hangs on."""
        assert self.growth is not None
        k, flat = self.growth.shape.topk, self.growth.parents[row].tolist()
        firsts = [k + (each - 1) * k * k for each in range(1, level + 1)]  # flat index of a level's first candidate
        return [[(flat[1 + each * k + j] - first) // k for j in range(k)] for each, first in enumerate(firsts, 1)]


class _NotedGrowth:
    """The operations of a round, which tell the watch what grows."""

    def __init__(self, inner: RoundOps, watch: VisibilityWatch) -> None:
        self._inner, self._watch = inner, watch

    def start(self, *args: Any) -> tuple[Growth, Frontier]:
        growth, frontier = self._inner.start(*args)
        self._watch.growth = growth
        return growth, frontier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedBackend:
    """Checks what each phase is given, then lets the inner backend do it."""

    def __init__(self, inner: AttentionBackend[Any, Any], device: Device, watch: VisibilityWatch) -> None:
        self.name = f"watched {inner.name}"
        self.capabilities = replace(inner.capabilities, captures=False)  # it looks at the host on every call
        self._inner, self._device, self._watch = inner, device, watch

    def begin(self, view: TableView) -> WatchedPrefix:
        return WatchedPrefix(self._inner.begin(view), view)

    def plan(self, prefix: WatchedPrefix, queries: Queries) -> Any:
        view = prefix.view
        self._watch.checked[view.phase] += 1
        committed = self._device.state.committed[view.rows].tolist()
        for index, row in self._live(view):
            _same(view, row, "extent of the prefix", int(view.extent[index]), committed[index])
            self._check_pages(view, index, queries.window)
            depth, ancestors = self._truth(view.phase, index, queries)
            _check_row(view, row, _row_of(queries, index), committed[index], depth, ancestors)
        return self._inner.plan(prefix.inner, queries)

    def plan_causal(self, prefix: WatchedPrefix, positions: Tensor, window: int | None) -> Any:
        view = prefix.view
        self._watch.checked[view.phase] += 1
        committed = self._device.state.committed[view.rows].tolist()
        for index, row in self._live(view):
            length = int(view.extent[index]) - committed[index]
            want = [committed[index] + j for j in range(length)]
            _same(view, row, "positions", positions[index, : max(length, 0)].tolist(), want)
            self._check_pages(view, index, window)
        return self._inner.plan_causal(prefix.inner, positions, window)

    def prefix(self, q: Tensor, kv: PagedKV, plan: Any, scale: float) -> tuple[Tensor, Tensor]:
        return self._inner.prefix(q, kv, plan, scale)

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Any, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._inner.prefix_tail(q, kv, plan, tail, scale, sinks)

    def causal(self, q: Tensor, kv: PagedKV, plan: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        return self._inner.causal(q, kv, plan, scale, sinks)

    def _live(self, view: TableView) -> list[tuple[int, int]]:
        dummy = self._device.layout.dummy_row
        return [(index, row) for index, row in enumerate(view.rows.tolist()) if row != dummy]

    def _check_pages(self, view: TableView, index: int, window: int | None) -> None:
        """Every position that some query can see has a page of the group, and no two columns have the same one."""
        row, extent = int(view.rows[index]), int(view.extent[index])
        committed = int(self._device.state.committed[row])
        first = 0 if window is None else max(committed - window + 1, 0)
        columns = range(first // view.page_size, -(-extent // view.page_size))
        cells = view.table.data[row].tolist()
        pages = [cells[column] if column < len(cells) else -1 for column in columns]
        total = self._device.layout.num_pages[view.table.group]
        wrong = [page for page in pages if not NULL_PAGE < page < total]
        if wrong and committed < self._device.layout.max_context:  # the start-up proof runs on the null page
            raise CheckError(f"visibility: phase {view.phase}, row {row}: a visible position has page {wrong[0]}")
        if not wrong and len(set(pages)) != len(pages):
            raise CheckError(f"visibility: phase {view.phase}, row {row}: two columns have one page")

    def _truth(self, phase: Phase, index: int, queries: Queries) -> tuple[list[int], list[set[int]]]:
        """Steps of each tail column from the committed length, and the columns each query may see."""
        n, width = queries.mask.shape[1:]
        if phase is Phase.EXTEND:
            return list(range(width)), [set(range(j + 1)) for j in range(n)]
        if phase is Phase.VERIFY:
            parent = self._device.buffers.tree.parent[index, :n].tolist()
            line = [_line(node, parent) for node in range(n)]
            return [len(nodes) - 1 for nodes in line], [set(nodes) for nodes in line]
        level = width // n - 1
        depth = [column // n for column in range(width)]
        return depth, [_branch(j, level, n, self._watch.parents(index, level)) for j in range(n)]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a phase's queries, on the host."""

    positions: list[int]
    tail_positions: list[int]
    mask: list[list[bool]]
    window: int | None


def _row_of(queries: Queries, index: int) -> _Row:
    return _Row(
        queries.positions[index].tolist(),
        queries.tail_positions[index].tolist(),
        queries.mask[index].tolist(),
        queries.window,
    )


def _check_row(
    view: TableView, row: int, given: _Row, committed: int, depth: list[int], ancestors: list[set[int]]
) -> None:
    """Positions of tail and queries, then what each query sees of the tail."""
    n = len(given.positions)
    tail = [committed + steps for steps in depth]
    _same(view, row, "positions of the tail", given.tail_positions, tail)
    _same(view, row, "positions of the queries", given.positions, tail[len(tail) - n :])
    for query in range(n):
        seen = {column for column, shown in enumerate(given.mask[query]) if shown}
        if seen != ancestors[query]:
            raise CheckError(
                f"visibility: phase {view.phase}, row {row}, query {query}: sees tail columns {sorted(seen)}, may see"
                f" {sorted(ancestors[query])}"
            )


def _line(node: int, parent: list[int]) -> list[int]:
    """A node and its ancestors up to the root, which is node 0."""
    line = [node]
    while line[-1] != 0:
        line.append(parent[line[-1]])
    return line


def _branch(j: int, level: int, k: int, parents: list[list[int]]) -> set[int]:
    """Tail columns of node j of a draft level and of its ancestors in the levels before."""
    columns = {level * k + j}
    for earlier in range(level - 1, -1, -1):
        j = parents[earlier][j]
        columns.add(earlier * k + j)
    return columns


def _same(view: TableView, row: int, what: str, have: object, want: object) -> None:
    if have != want:
        raise CheckError(f"visibility: phase {view.phase}, row {row}: {what} {have}, expected {want}")
