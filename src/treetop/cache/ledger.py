"""Leases: the only way a request gets, keeps and gives back pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treetop.cache.allocator import CACHE, Owner, PageAllocator
from treetop.cache.radix import Node, RadixCache
from treetop.types.errors import InvariantError, OwnershipError
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


class PageLedger:
    """The allocators of all groups and the prefix cache, behind reserve / commit / release."""

    def __init__(self, layout: Layout, radix_cache: bool) -> None:
        self._layout = layout
        self._allocators = {g.name: PageAllocator(g.name, layout.num_pages[g.name]) for g in layout.groups}
        self._radix = RadixCache(layout.page_size, int(layout.has_draft)) if radix_cache else None
        self._next_owner = 1

    def open(self, ids: Sequence[int]) -> tuple[Lease, Columns]:
        """A lease for a request whose tokens begin with `ids`, and the cells of the prefix it shares with the cache."""
        lease = Lease(Owner(self._next_owner), {group: [] for group in self._allocators})
        self._next_owner += 1
        if self._radix is not None:
            lease.path = self._radix.match(ids)
        for node in lease.path:
            node.pins += 1
            for group, page in node.pages.items():
                lease.pages[group].append(page)
        cells = [(g, column, page) for g, pages in lease.pages.items() for column, page in enumerate(pages)]
        return lease, cells

    def reserve(self, lease: Lease, num_tokens: int) -> Columns | None:
        """Grow the lease to hold `num_tokens` in every group: the new cells, or None and nothing changed.

        Pages are whole, so what is allocated is always page aligned (sgl-31616). Cached pages are evicted for it.
        """
        if lease.released:
            raise OwnershipError(f"lease {lease.owner} is used after its release")
        columns = self._layout.pages_for(num_tokens)
        self._layout.require("page_columns", columns)
        need = {group: max(columns - len(pages), 0) for group, pages in lease.pages.items()}
        if not self._make_room(need):
            return None
        cells: Columns = []
        for group, count in need.items():
            held = lease.pages[group]
            for page in self._allocators[group].take(count, lease.owner):
                cells.append((group, len(held), page))
                held.append(page)
        return cells

    def release(self, lease: Lease, ids: Sequence[int] = ()) -> None:
        """Give back every page, once. ids: tokens whose K/V the pages hold and that the cache may keep."""
        if lease.released:
            return
        lease.released = True
        kept = self._keep(lease, ids)
        for group, pages in lease.pages.items():
            own = [page for c, page in enumerate(pages) if c >= lease.shared and c not in kept and page != NULL_PAGE]
            self._allocators[group].give_back(own, lease.owner)
        for node in lease.path:
            node.pins -= 1

    def usage(self, group: GroupName) -> float:
        """Fraction of the group's pages in use."""
        allocator = self._allocators[group]
        return 1 - allocator.num_free / allocator.total

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise OwnershipError unless, in every group, leases and cache own exactly the pages that are not free."""
        cached = self._radix.num_pages() if self._radix is not None else 0
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
        if self._radix is None or self._radix.num_evictable() < short:
            return False
        for pages in self._radix.evict(short):
            for group, page in pages.items():
                self._allocators[group].give_back([page], CACHE)
        return True
