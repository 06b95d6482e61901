"""Pages of one group: each is free, leased by one request, or cached, and never two of these at once."""

from collections.abc import Callable, Sequence
from typing import NewType

from treetop.types.errors import OwnershipError
from treetop.types.ids import NULL_PAGE, GroupName, PageId

Owner = NewType("Owner", int)

FREE = Owner(0)
CACHE = Owner(-1)


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1. Page 0 is the null page and never moves.

    Every operation names the owner it expects, so a double free, a lost page or a foreign page is an OwnershipError at
    the call that causes it (sgl-27731).
    """

    def __init__(self, group: GroupName, num_pages: int) -> None:
        self.group = group
        self._free = dict.fromkeys(PageId(page) for page in range(num_pages - 1, 0, -1))  # the last goes first
        self._owner = [FREE] * num_pages
        self._num_cached = 0

    @property
    def total(self) -> int:
        """Pages that can be owned, the null page excluded."""
        return len(self._owner) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    def take(self, count: int, owner: Owner) -> list[PageId]:
        """`count` free pages for `owner`. The caller has checked `num_free`."""
        if count > len(self._free):
            raise OwnershipError(f"{self.group}: {count} pages wanted, {len(self._free)} free")
        pages = [self._free.popitem()[0] for _ in range(count)]
        for page in pages:
            self._move(page, FREE, owner)
        return pages

    def give_back(self, pages: Sequence[PageId], owner: Owner) -> None:
        """Free pages that `owner` holds."""
        for page in pages:
            self._move(page, owner, FREE)
            self._free[page] = None

    def transfer(self, page: PageId, old: Owner, new: Owner) -> None:
        """Hand one page from one owner to another."""
        self._move(page, old, new)

    def arrange(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder the free pages; the last one is handed out first."""
        arranged = order(list(self._free))
        if sorted(arranged) != sorted(self._free):
            raise OwnershipError(f"{self.group}: a new order must hold the free pages, each once")
        self._free = dict.fromkeys(arranged)

    def owned(self) -> list[PageId]:
        """Pages that somebody owns, in their order."""
        return [PageId(page) for page, owner in enumerate(self._owner) if owner != FREE and page != NULL_PAGE]

    def owned_by(self, owner: Owner) -> list[PageId]:
        return [PageId(page) for page in range(1, len(self._owner)) if self._owner[page] == owner]

    def owner_of(self, page: PageId) -> Owner:
        return self._owner[page]

    def check(self) -> None:
        """Raise OwnershipError unless free + leased + cached == total, each page exactly once."""
        if NULL_PAGE in self._free:
            raise OwnershipError(f"{self.group}: the null page is free")
        owned = {*self.owned()}
        if doubtful := {*range(1, len(self._owner))} - (self._free.keys() ^ owned):
            self.check_page(PageId(min(doubtful)))
        if len(self._free) + len(owned) != self.total:
            raise OwnershipError(f"{self.group}: {len(self._free)} free + {len(owned)} owned != {self.total} pages")
        if self._num_cached != len(self.owned_by(CACHE)):
            raise OwnershipError(f"{self.group}: the cache owns {len(self.owned_by(CACHE))}, not {self._num_cached}")

    def check_page(self, page: PageId) -> None:
        """Raise OwnershipError unless a page either has an owner or can be handed out."""
        if (self._owner[page] == FREE) != (page in self._free):
            raise OwnershipError(f"{self.group}: page {page} of owner {self._owner[page]} is free to take, or is not")

    def _move(self, page: PageId, old: Owner, new: Owner) -> None:
        if not 0 < page < len(self._owner) or self._owner[page] != old:
            raise OwnershipError(
                f"{self.group}: page {page} is expected to belong to {old}, belongs to"
                f" {self._owner[page] if 0 <= page < len(self._owner) else 'nobody'}"
            )
        self._owner[page] = new
        self._num_cached += (new == CACHE) - (old == CACHE)
