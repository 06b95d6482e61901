"""Who holds which row and which pages, and what the page tables must be told of it."""

from collections.abc import Callable, Iterable, Sequence

from treetop.cache.disk_tier import DiskTier
from treetop.cache.host_tier import HostTier
from treetop.cache.kv_cache_manager import Cells, KVCacheManager, Lease
from treetop.checks.host import check_cached, check_cells
from treetop.scheduler.adapters import Adapter
from treetop.scheduler.lengths import RequestLengths
from treetop.scheduler.request import Request, Running
from treetop.scheduler.shares import Tally
from treetop.types.errors import InvariantError
from treetop.types.ids import GroupName, PageId, Row
from treetop.types.layout import Layout
from treetop.types.messages import PageEdit


class Rows:
    """Rows and leases. Page-table changes wait in `cells` for the next plan, whatever becomes of the one that made
    them.
    """

    def __init__(
        self,
        layout: Layout,
        radix_cache: bool,
        check_level: int,
        lengths: RequestLengths,
        disk: DiskTier | None = None,
    ) -> None:
        """lengths: of requests, also of those before these books were opened. disk: below the tier on the host."""
        self._layout, self._check_level, self.lengths = layout, check_level, lengths
        self.kv_cache = KVCacheManager(layout, radix_cache, check_level)
        self.host = HostTier(layout, self.kv_cache, check_level, disk) if layout.host is not None else None
        self.by_row: dict[Row, Request] = {}
        self.tally = Tally()
        self.cells: dict[tuple[GroupName, Row], dict[int, PageId]] = {}  # by column
        self._free = [Row(row) for row in range(layout.max_requests - 1, -1, -1)]
        self._most_cells = layout.max_edits - len(layout.groups) * layout.page_columns  # before one more admission

    # ---------------------------------------------------------------- rows

    @property
    def may_enter(self) -> bool:
        """Whether a row is free, and the next plan can carry one more admission."""
        return bool(self._free) and sum(map(len, self.cells.values())) <= self._most_cells

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def adapters(self) -> set[Adapter]:
        """Of all rows, that of none too."""
        return {each.adapter for each in self.by_row.values()}

    def enter(self, request: Request, lease: Lease, cells: Cells, reserved: int) -> None:
        """Give a request a free row, with the pages that its lease has."""
        request.running = Running(self._free.pop(), lease, reserved)
        self.by_row[request.running.row] = request
        self.tally.add(request, 1)
        self._write(request.running.row, cells)

    def leave(self, request: Request, ids: Sequence[int]) -> None:
        """Give back row and pages; `ids` are tokens whose K/V are complete."""
        held = request.held
        if self._check_level >= 1:
            check_cached(held.row, len(ids), request.num_complete)
        self.kv_cache.release(held.lease, ids)
        if self.host is not None:
            self.host.left(ids, request.cache_salt, len(request.prompt_ids), held.lease.drafts)
        self._free.append(held.row)
        del self.by_row[held.row]
        self.tally.add(request, -1)
        self._forget(held.row, self._layout.token_groups)
        request.running = None

    # ---------------------------------------------------------------- pages

    def stop_drafting(self, request: Request) -> None:
        """A running request goes on without a draft until it leaves: it holds no page of the draft's, and its row is
        padding to the draft from the next step on.
        """
        held = request.held
        self.kv_cache.stop_drafting(held.lease)
        held.deferred = 0
        self._forget(held.row, [group for group in self._layout.token_groups if group not in held.lease.pages])

    def reserve(self, request: Request, num_tokens: int, end: int | None = None) -> bool:
        """Pages for a running request; False if they are short.

        Pages behind a window stay until the cache has them, which it has once their chunk is committed. If pages are
        short they are given up, everybody's.
        """
        held, known = request.held, request.num_complete
        cells = self.kv_cache.reserve(held.lease, num_tokens, known, end)
        if cells is None:
            for other in self.by_row.values():
                self.slide(other, other.num_complete)
            cells = self.kv_cache.reserve(held.lease, num_tokens, known, end)
        self._write(held.row, cells or [])
        return cells is not None

    def slide(self, request: Request, known: int) -> None:
        """Let go of pages behind the windows, by a known committed length."""
        held = request.held
        self._write(held.row, self.kv_cache.slide(held.lease, known))

    def cache(self, request: Request, ids: Sequence[int], kept: int | None = None) -> None:
        """The pages that hold `ids`, its first tokens, enter the prefix cache, so that the next request finds them.

        kept: after so many of them its states were kept.
        """
        held = request.held
        self._write(held.row, self.kv_cache.insert(held.lease, ids))
        if kept is not None:
            self.kv_cache.place_checkpoint(held.lease, kept)

    # ---------------------------------------------------------------- page tables

    def _write(self, row: Row, cells: Cells) -> None:
        """Page-table cells of a row, for the next plan; of two writes to a cell the later one counts."""
        held, of = dict[int, PageId](), None
        for group, column, page in cells:  # most often one group's behind the other's
            if group != of:
                held, of = self.cells.setdefault((group, row), {}), group
            held[column] = page

    def _forget(self, row: Row, groups: Iterable[GroupName]) -> None:
        """The next plan writes no cell of a row in these groups."""
        for group in groups:
            self.cells.pop((group, row), None)

    def take_edits(self) -> tuple[PageEdit, ...]:
        edits = tuple(
            PageEdit(group, row, tuple(cells), tuple(cells.values())) for (group, row), cells in self.cells.items()
        )
        self.cells.clear()
        if self._check_level >= 1:
            for edit in edits:
                owner = self.by_row.get(edit.row)
                check_cells(edit, None if owner is None else owner.held.lease.pages.get(edit.group))
        return edits

    def put_back(self, edits: Sequence[PageEdit]) -> None:
        """Edits that were taken for a plan are left to the next one, which is launched with it or in its place."""
        taken = {(edit.group, edit.row): dict(zip(edit.columns, edit.pages, strict=True)) for edit in edits}
        for place, cells in self.cells.items():
            taken[place] = taken.get(place, {}) | cells
        self.cells = taken

    # ---------------------------------------------------------------- inspection

    def check(self, num_known: Callable[[Request], int], count: int | None) -> None:
        """As `Scheduler.check_integrity`. num_known: tokens of a request whose K/V the pages hold for certain."""
        if sorted([*self.by_row, *self._free]) != list(range(self._layout.max_requests)):
            raise InvariantError(f"rows {[*self.by_row]} in use and {self._free} free do not make up all rows")
        for row, request in self.by_row.items():
            shared, known = request.held.lease.shared * self._layout.page_size, num_known(request)
            if shared > known:
                raise InvariantError(f"row {row}: {shared} tokens are cached, {known} committed")
        leases = [request.held.lease for request in self.by_row.values()]
        if self.host is not None:
            leases += self.host.leases
        if count is None and self.host is not None:
            self.host.check()
        if count is None:
            self.kv_cache.check(leases)
        else:
            self.kv_cache.check_some(leases, count)
