"""Leases: the only way a request gets, keeps and gives back pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treetop.cache.allocator import CACHE, Owner, PageAllocator
from treetop.cache.radix import Node, RadixCache
from treetop.types.errors import CheckError, InvariantError, OwnershipError
from treetop.types.ids import NULL_PAGE, GroupName, PageId
from treetop.types.layout import Layout

Columns = list[tuple[GroupName, int, PageId]]
"""Page-table cells to write: (group, column, page)."""


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one request, by column, in every group.

    The first `shared` columns belong to the cache and are pinned while the lease lives. A column whose page left the
    window holds the null page.
    """

    owner: Owner
    pages: dict[GroupName, list[PageId]]
    path: list[Node] = field(default_factory=list)
    released: bool = False

    @property
    def shared(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """What a fault can replace: pages that a release gives back, and groups whose pages a prefix hit shares."""

    pages_to_free: Callable[[Sequence[PageId], int, int], Sequence[PageId]]
    shared_groups: Callable[[Sequence[GroupName]], Sequence[GroupName]]


class PageLedger:
    """The allocators of all groups and the prefix cache, behind reserve / slide / release."""

    def __init__(self, layout: Layout, radix_cache: bool, rules: LedgerRules, check_level: int) -> None:
        self._layout, self._rules, self._check_level = layout, rules, check_level
        num_pages = layout.num_pages
        self._allocators = {g.name: PageAllocator(g.name, num_pages[g.name]) for g in layout.groups}
        self._windows = {g.name: g.window for g in layout.groups}
        self._radix = RadixCache(layout.page_size, int(layout.has_draft)) if radix_cache else None
        self._next_owner = 1
        self._freed: list[tuple[GroupName, PageId]] = []

    def open(self, ids: Sequence[int]) -> tuple[Lease, Columns]:
        """A lease for a request whose tokens begin with `ids`, and the cells of the prefix it shares with the cache."""
        lease = Lease(Owner(self._next_owner), {group: [] for group in self._allocators})
        self._next_owner += 1
        if self._radix is not None:
            lease.path = self._radix.match(ids)
            self._radix.pin(lease.path)
        for node in lease.path:
            for group in self._rules.shared_groups(list(node.pages)):
                lease.pages[group].append(node.pages[group])
        if self._check_level >= 1:
            self._check_filled(lease)
        cells = [(g, column, page) for g, pages in lease.pages.items() for column, page in enumerate(pages)]
        return lease, cells

    def reserve(self, lease: Lease, num_tokens: int, known: int = 0, end: int | None = None) -> Columns | None:
        """Grow the lease to hold `num_tokens` in every group: the new cells, or None and nothing changed.

        Pages are whole, so what is allocated is always page aligned. Cached pages are evicted for it. A window's
        group gets pages for positions `known - window + 1 .. end` only; known: committed tokens, end: the step's last
        position + 1, `num_tokens` by default.
        """
        if lease.released:
            raise OwnershipError(f"lease {lease.owner} is used after its release")
        layout = self._layout
        layout.require("page_columns", layout.pages_for(num_tokens))
        new: dict[GroupName, list[int]] = {}  # columns that get a page
        for group, held in lease.pages.items():
            last = layout.pages_for(num_tokens if self._windows[group] is None else end or num_tokens)
            new[group] = [c for c in range(len(held), last) if c >= self._first_column(group, known)]
        if not self._make_room({group: len(columns) for group, columns in new.items()}):
            return None
        cells: Columns = []
        for group, columns in new.items():
            held = lease.pages[group]
            pages = self._allocators[group].take(len(columns), lease.owner)
            for column, page in zip(columns, pages, strict=True):
                held.extend([NULL_PAGE] * (column - len(held)))
                held.append(page)
                cells.append((group, column, page))
        return cells

    def slide(self, lease: Lease, known: int) -> Columns:
        """Give back pages behind the windows, by the last known committed length; their cells become the null page."""
        cells: Columns = []
        for group, held in lease.pages.items():
            for column in range(min(self._first_column(group, known), len(held))):
                if held[column] != NULL_PAGE:
                    self._give_back(group, [held[column]], lease.owner)
                    held[column] = NULL_PAGE
                    cells.append((group, column, NULL_PAGE))
        return cells

    def release(self, lease: Lease, ids: Sequence[int] = (), num_tokens: int = 0) -> None:
        """Give back every page, once.

        ids: tokens whose K/V the pages hold and that the cache may keep. num_tokens: that the request has.
        """
        if lease.released:
            return
        lease.released = True
        kept = self._keep(lease, ids)
        for group, pages in lease.pages.items():
            own = [page for c, page in enumerate(pages) if c >= lease.shared and c not in kept and page != NULL_PAGE]
            first = len(pages) - len(own)
            tokens = max(min(num_tokens, len(pages) * self._layout.page_size) - first * self._layout.page_size, 0)
            self._give_back(group, self._rules.pages_to_free(own, tokens, self._layout.page_size), lease.owner)
        if self._radix is not None:
            self._radix.unpin(lease.path)

    def take_freed(self) -> tuple[tuple[GroupName, PageId], ...]:
        """Pages given back since the last call, also those that have a new owner, who has written nothing yet."""
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def arrange(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder each group's free pages; the last one is handed out first."""
        for allocator in self._allocators.values():
            allocator.arrange(order)

    @property
    def usage(self) -> float:
        """Share of the fullest group's pages that are not free."""
        return max(1 - each.num_free / each.total for each in self._allocators.values())

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise OwnershipError unless, in every group, leases and cache own exactly the pages that are not free."""
        cached = self._radix.num_pages if self._radix is not None else 0
        for group, allocator in self._allocators.items():
            allocator.check()
            leased = 0
            for lease in leases:
                own = [page for page in lease.pages[group][lease.shared :] if page != NULL_PAGE]
                if sorted(own) != allocator.owned_by(lease.owner):
                    raise OwnershipError(f"{group}: lease {lease.owner} and the allocator disagree on its pages")
                leased += len(own)
            if len(allocator.owned_by(CACHE)) != cached or allocator.num_free + leased + cached != allocator.total:
                raise OwnershipError(
                    f"{group}: free {allocator.num_free} + leased {leased} + cached {cached} != {allocator.total}"
                )

    def _keep(self, lease: Lease, ids: Sequence[int]) -> set[int]:
        """Columns that the cache takes over from a lease."""
        if self._radix is None:
            return set()
        full = min(len(ids) // self._layout.page_size, *(len(pages) for pages in lease.pages.values()))
        rows = [{group: pages[column] for group, pages in lease.pages.items()} for column in range(full)]
        kept = set(self._radix.insert(ids, rows))
        if any(column < lease.shared for column in kept):
            raise InvariantError("a pinned page of the prefix cache was evicted")
        for column in kept:
            for group, page in rows[column].items():
                self._allocators[group].transfer(page, lease.owner, CACHE)
        return kept

    def _make_room(self, need: dict[GroupName, int]) -> bool:
        """Evict until every group has the pages free; False, with nothing evicted in vain, if that cannot be."""
        short = max((count - self._allocators[group].num_free for group, count in need.items()), default=0)
        if short <= 0:
            return True
        if self._radix is None or self._radix.num_evictable < short:
            return False
        for pages in self._radix.evict(short):
            for group, page in pages.items():
                self._give_back(group, [page], CACHE)
        return True

    def _give_back(self, group: GroupName, pages: Sequence[PageId], owner: Owner) -> None:
        self._allocators[group].give_back(pages, owner)
        self._freed += [(group, page) for page in pages]

    def _first_column(self, group: GroupName, known: int) -> int:
        """First column that a query at `known` or later can see."""
        window = self._windows[group]
        return 0 if window is None else max(known - window + 1, 0) // self._layout.page_size

    def _check_filled(self, lease: Lease) -> None:
        """A shared prefix is as long as every group has filled it (sgl-19796)."""
        for group, pages in lease.pages.items():
            if len(pages) != lease.shared:
                raise CheckError(
                    f"prefix hit: {lease.shared} pages are shared, but group {group} has {len(pages)} of them filled"
                )
