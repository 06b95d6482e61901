"""The visibility relation: who may see whom, from first principles, against what a phase was really given.

The decoder sits between the engine and its backend. From the row state and the tree's parents alone it derives, for
every live query, its position and the set of keys it may see: committed positions of its own request and nodes of its
own branch, within the window. It derives the same from the page tables, extents, positions and masks that the phase
hands to the backend, and raises at the first difference. It needs no attention kernel, and is slow on purpose.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from treetop.attention.contract import AttentionBackend, TailKV
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import Ops
from treetop.kernels.tree.grow import Frontier, TreeBuilder
from treetop.kernels.tree.rows import RowTables
from treetop.types.errors import CheckError
from treetop.types.ids import NULL_PAGE
from treetop.types.phase import Phase


@dataclass(slots=True)
class VisibilityWatch:
    """Make engines inside `wrapped_runner(watch.wrap)`.

    growth: of this round.
    checked: phases so far, by name.

    What a level's nodes hang on is read where growing records it for the choice of the tree, never from a mask.
    """

    growth: TreeBuilder | None = None
    checked: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))

    def wrap(self, runner: ModelRunner) -> ModelRunner:
        ops = cast(Ops, _NotedGrowth(runner.ops, self))
        return replace(runner, backend=WatchedBackend(runner.backend, runner, self), ops=ops)

    def parents(self, row: int, level: int) -> list[list[int]]:
        """For each level 1 .. `level`, which node of the level before each of its k nodes hangs on."""
        assert self.growth is not None
        k, flat = self.growth.shape.topk, self.growth.parents[row].tolist()
        firsts = [k + (each - 1) * k * k for each in range(1, level + 1)]  # flat index of a level's first candidate
        return [[(flat[1 + each * k + j] - first) // k for j in range(k)] for each, first in enumerate(firsts, 1)]


class _NotedGrowth:
    """The operations of a round, which tell the watch what grows."""

    def __init__(self, inner: Ops, watch: VisibilityWatch) -> None:
        self._inner, self._watch = inner, watch

    def start(self, tables: RowTables, rows: Tensor, growth: TreeBuilder, *more: Any) -> Frontier:
        self._watch.growth = growth
        return self._inner.start(tables, rows, growth, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedBackend:
    """Checks what each phase is given, then lets the inner backend do it."""

    def __init__(self, inner: AttentionBackend[Any, Any], runner: ModelRunner, watch: VisibilityWatch) -> None:
        self.name = f"watched {inner.name}"
        # it looks at the host on every call, and at rows of whole trees alone
        self.capabilities = replace(inner.capabilities, captures=False, flat=False)
        self._inner, self._device, self._watch = inner, runner, watch

    def begin(self, metadata: AttentionMetadata) -> Any:
        return self._inner.begin(metadata)

    def plan(self, begun: Any, metadata: AttentionMetadata) -> Any:
        self._watch.checked[metadata.phase] += 1
        committed = self._device.state.committed[metadata.rows].tolist()
        deferred = self._deferred(metadata)
        for index, row in self._live(metadata):
            if any(deferred):
                self._check_catch_up(metadata, index, committed[index], deferred[index])
                continue
            if metadata.causal:
                length = int(metadata.kv_len[index]) - committed[index]
                want = [committed[index] + j for j in range(length)]
                _same(metadata, row, "positions", metadata.positions[index, : max(length, 0)].tolist(), want)
            else:
                _same(metadata, row, "extent of the prefix", int(metadata.kv_len[index]), committed[index])
            self._check_pages(metadata, index)
            if not metadata.causal:
                depth, ancestors = self._truth(metadata, index)
                _check_row(metadata, row, _row_of(metadata, index), committed[index], depth, ancestors)
        return self._inner.plan(begun, metadata)

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: Any, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        return self._inner.prefix_tail(q, kv, plan, tail, scale, sinks)

    def causal(self, q: Tensor, kv: PagedKV, plan: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        return self._inner.causal(q, kv, plan, scale, sinks)

    def _deferred(self, metadata: AttentionMetadata) -> list[int]:
        """What each row of a draft extend has deferred: one that catches up runs if any has, and no other does."""
        deferred = self._device.state.deferred
        if metadata.phase is not Phase.EXTEND or deferred is None:
            return []
        return deferred.count[metadata.rows].tolist()

    def _check_catch_up(self, metadata: AttentionMetadata, index: int, committed: int, count: int) -> None:
        """The tokens that the draft lacks, each after all that it has, and then after each other."""
        if not count:
            return
        row, given = int(metadata.rows[index]), _row_of(metadata, index)
        want = list(range(committed - count, committed))
        _same(metadata, row, "extent of the prefix", int(metadata.kv_len[index]), committed - count)
        _same(metadata, row, "positions of the tail", given.tail_positions[:count], want)
        _same(metadata, row, "positions of the queries", given.positions[:count], want)
        for query in range(count):
            seen = [column for column, shown in enumerate(given.mask[query]) if shown]
            _same(metadata, row, f"tail columns that query {query} sees", seen, list(range(query + 1)))
        self._check_pages(metadata, index)

    def _live(self, metadata: AttentionMetadata) -> list[tuple[int, int]]:
        dummy = self._device.layout.dummy_row
        return [(index, row) for index, row in enumerate(metadata.rows.tolist()) if row != dummy]

    def _check_pages(self, metadata: AttentionMetadata, index: int) -> None:
        """Every position that some query can see has a page of the group, and no two columns have the same one."""
        row, kv_len = int(metadata.rows[index]), int(metadata.kv_len[index])
        committed = int(self._device.state.committed[row])
        first = 0 if metadata.window is None else max(committed - metadata.window + 1, 0)
        columns = range(first // metadata.page_size, -(-kv_len // metadata.page_size))
        cells = metadata.table.data[row].tolist()
        pages = [cells[column] if column < len(cells) else -1 for column in columns]
        total = self._device.layout.num_pages[metadata.table.group]
        wrong = [page for page in pages if not NULL_PAGE < page < total]
        if wrong and any(cells):  # rounds at start run on the null page alone
            raise CheckError(f"visibility: phase {metadata.phase}, row {row}: a visible position has page {wrong[0]}")
        if not wrong and len(set(pages)) != len(pages):
            raise CheckError(f"visibility: phase {metadata.phase}, row {row}: two columns have one page")

    def _truth(self, metadata: AttentionMetadata, index: int) -> tuple[list[int], list[set[int]]]:
        """Steps of each tail column from the committed length, and the columns each query may see."""
        assert metadata.mask is not None
        phase, (n, width) = metadata.phase, metadata.mask.shape[1:]
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


def _row_of(metadata: AttentionMetadata, index: int) -> _Row:
    assert metadata.tail_positions is not None
    assert metadata.mask is not None
    return _Row(
        metadata.positions[index].tolist(), metadata.tail_positions[index].tolist(), metadata.mask[index].tolist()
    )


def _check_row(
    metadata: AttentionMetadata, row: int, given: _Row, committed: int, depth: list[int], ancestors: list[set[int]]
) -> None:
    """Positions of tail and queries, then what each query sees of the tail."""
    n = len(given.positions)
    tail = [committed + steps for steps in depth]
    _same(metadata, row, "positions of the tail", given.tail_positions, tail)
    _same(metadata, row, "positions of the queries", given.positions, tail[len(tail) - n :])
    for query in range(n):
        seen = {column for column, shown in enumerate(given.mask[query]) if shown}
        if seen != ancestors[query]:
            raise CheckError(
                f"visibility: phase {metadata.phase}, row {row}, query {query}: sees tail columns {sorted(seen)},"
                f" may see {sorted(ancestors[query])}"
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


def _same(metadata: AttentionMetadata, row: int, what: str, have: object, want: object) -> None:
    if have != want:
        raise CheckError(f"visibility: phase {metadata.phase}, row {row}: {what} {have}, expected {want}")
