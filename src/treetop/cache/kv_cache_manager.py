"""Leases: the only way a request gets, keeps, shares and gives back pages."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from treetop.cache.allocator import CACHE, FREE, Owner, PageAllocator
from treetop.cache.checkpoints import StateCheckpoints
from treetop.cache.prefix_cache import CacheWatcher, Node, Pages, PrefixCache, first_seen
from treetop.types.errors import CheckError, OwnershipError
from treetop.types.ids import NULL_PAGE, GroupName, PageId, is_draft
from treetop.types.layout import Layout

Cells = list[tuple[GroupName, int, PageId]]
"""Page-table cells to write: (group, column, page)."""


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one request, by column, in every group.

    path: nodes of the prefix cache. Their columns come first and hold pages of the cache, pinned while the lease lives;
        in a window's group until they leave the window. A column whose page left the window holds the null page.
    torn: in a window's group, the column whose page lacks its first tokens, which no query of this lease sees.
    junction: tokens after which its prompt parts from others, where no states were kept; 0 if it does nowhere.
    keeps: number of its first tokens -> the slot that their states go to.
    salt: it shares pages only with leases of the same.
    drafts: of a request that has no draft the draft's groups are not among the pages.
    """

    owner: Owner
    pages: dict[GroupName, list[PageId]]
    path: list[Node] = field(default_factory=list)
    released: bool = False
    torn: dict[GroupName, int] = field(default_factory=dict)
    junction: int = 0
    keeps: dict[int, int] = field(default_factory=dict)
    salt: str = ""
    drafts: bool = True

    @property
    def shared(self) -> int:
        return len(self.path)


class KVCacheManager:
    """The allocators of all groups and the prefix cache, behind reserve / slide / release."""

    def __init__(self, layout: Layout, radix_cache: bool, check_level: int) -> None:
        self._layout, self._check_level = layout, check_level
        num_pages = layout.num_pages
        self._allocators = {g.name: PageAllocator(g.name, num_pages[g.name]) for g in layout.groups}
        self._windows = {g.name: g.window for g in layout.groups}
        self._checkpoints = StateCheckpoints(layout.checkpoints) if layout.state_groups and radix_cache else None
        self._radix: PrefixCache | None = None
        if radix_cache:
            self._radix = PrefixCache(layout.page_size, int(layout.has_draft), self._windows, self._checkpoints)
        self._nodes: dict[GroupName, list[Node | None]] = {g: [None] * pages for g, pages in num_pages.items()}
        self._next_owner = 1
        self._next_check = {"lease": 0, "column": 0, "page": 0}  # where `check_some` goes on
        self._freed: list[tuple[GroupName, PageId]] = []

    def watch(self, watcher: CacheWatcher) -> None:
        """Tell what the prefix cache has. It is empty still."""
        if self._radix is not None:
            self._radix.watcher = watcher
            watcher.cleared()

    def open(self, ids: Sequence[int], salt: str = "", drafts: bool = True) -> tuple[Lease, Cells]:
        """A lease for a request whose tokens begin with `ids`, and the cells of the prefix it shares with the cache.

        salt: of what the cache has, only pages of the same. drafts: see `Lease`.
        """
        groups = [group for group in self._allocators if drafts or not is_draft(group)]
        lease = Lease(Owner(self._next_owner), {group: [] for group in groups}, salt=salt, drafts=drafts)
        self._next_owner += 1
        if self._radix is not None:
            lease.path, reach = self._radix.lookup(ids, salt, drafts)
            lease.junction = reach * self._layout.page_size if reach > lease.shared else 0
            self._radix.pin(lease.path)
            for group in lease.pages:
                self._share(lease, group)
        if self._check_level >= 1:
            self._check_filled(lease)
        cells = [(g, column, page) for g, pages in lease.pages.items() for column, page in enumerate(pages)]
        return lease, cells

    def num_known(self, ids: Sequence[int], salt: str = "", drafts: bool = True) -> int:
        """Tokens that `open` would find in the prefix cache."""
        return 0 if self._radix is None else len(self._radix.match(ids, salt, drafts)) * self._layout.page_size

    def _share(self, lease: Lease, group: GroupName) -> None:
        """Take over a group's pages of a prefix hit, those that a query after it can see (sgl-19796)."""
        assert self._radix is not None
        first = self._first_column(group, lease.shared * self._layout.page_size)
        lease.pages[group] = [NULL_PAGE] * first + self._radix.read(lease.path[first:], group)

    def reserve(self, lease: Lease, num_tokens: int, committed: int = 0, step_end: int | None = None) -> Cells | None:
        """Grow the lease to hold `num_tokens` in every group: the new cells, or None and nothing changed.

        Pages are whole, so what is allocated is always page aligned. Cached pages are evicted for it. A window's
        group gets pages for positions `committed - window + 1 .. step_end - 1` only. committed: as many are known to
        be. step_end: the first position that the step does not write, `num_tokens` by default.
        """
        if lease.released:
            raise OwnershipError(f"lease {lease.owner} is used after its release")
        layout = self._layout
        layout.require("page_columns", layout.pages_for(num_tokens))
        window_end = num_tokens if step_end is None else step_end
        new: dict[GroupName, list[int]] = {}  # columns that get a page
        for group, held in lease.pages.items():
            last = layout.pages_for(num_tokens if self._windows[group] is None else window_end)
            new[group] = [c for c in range(len(held), last) if c >= self._first_column(group, committed)]
        if not self._make_room({group: len(columns) for group, columns in new.items()}):
            return None
        cells: Cells = []
        for group, columns in new.items():
            held = lease.pages[group]
            pages = self._allocators[group].take(len(columns), lease.owner)
            for column, page in zip(columns, pages, strict=True):
                while len(held) < column:  # behind the window from the start
                    cells.append((group, len(held), NULL_PAGE))
                    held.append(NULL_PAGE)
                held.append(page)
                cells.append((group, column, page))
        return cells

    def reserve_import(self, lease: Lease, num_tokens: int, total: int) -> Cells | None:
        """Grow a new lease to hold `num_tokens`, of which the first `total` come from elsewhere; else as `reserve`.

        Of a window only tokens come that a query at `total` sees. So pages before them go, and the first may be torn.
        If it returns None, the lease can only be released.
        """
        cells = self.slide(lease, total)
        more = self.reserve(lease, num_tokens, total, total)
        for group, window in self._windows.items() if more is not None else ():
            column, missing = divmod(0 if window is None else max(total - window + 1, 0), self._layout.page_size)
            if missing and column >= lease.shared:
                lease.torn[group] = column
        return None if more is None else cells + more

    def insert(self, lease: Lease, ids: Sequence[int]) -> Cells:
        """Hand the cache the pages that hold `ids`, the lease's first tokens, and pin them. Returns cells to write.

        ids: tokens whose K/V are complete in every group, and which the client has or gave. Where the cache has a page
        of these tokens already, the lease shares it and gives back its own. Nothing while a page is torn.
        """
        if self._radix is None or self._torn(lease):
            return []
        full = min(len(ids) // self._layout.page_size, *(len(pages) for pages in lease.pages.values()))
        cells: Cells = []
        nodes = self._radix.extend(lease.path, ids, full, lease.salt)
        for column, node in enumerate(nodes, start=lease.shared):
            for group, held in lease.pages.items():
                page = held[column]
                if page == NULL_PAGE:
                    continue
                if group in node.pages:
                    self._give_back(group, [page], lease.owner)
                    held[column] = node.pages[group]
                    cells.append((group, column, held[column]))
                else:
                    self._allocators[group].transfer(page, lease.owner, CACHE)
                    self._radix.fill(node, group, page)
                    self._nodes[group][page] = node
                self._radix.read([node], group)
        lease.path += nodes
        return cells

    def checkpoint_of(self, lease: Lease) -> int | None:
        """The slot with the states that a new lease's shared tokens end with; None if it shares none, or there are no
        recurrent layers.
        """
        return self._checkpoints.read(lease.path[-1]) if self._checkpoints is not None and lease.path else None

    def next_checkpoint(self, lease: Lease, start: int, num_ids: int) -> int | None:
        """Where a chunk from `start` on of a request of `num_ids` tokens has to end, for its states to be kept there.

        At every `checkpoint_every` tokens, where its prompt parts from others, and at the last page that a hit of the
        same ids can end at.
        """
        if self._checkpoints is None:
            return None
        every, page = self._layout.checkpoint_every, self._layout.page_size
        last = (num_ids - 1) // page * page
        ends = ((start // every + 1) * every, lease.junction, last)
        return min((end for end in ends if start < end <= last), default=None)

    def lease_checkpoint(self, lease: Lease, num_tokens: int) -> int | None:
        """A slot for the states after a lease's first tokens; None if there is none."""
        slot = None if self._checkpoints is None else self._checkpoints.lease()
        if slot is not None:
            lease.keeps[num_tokens] = slot
        return slot

    def place_checkpoint(self, lease: Lease, num_tokens: int) -> None:
        """A lease's slot has the states after its first tokens, whose pages the cache has, and is the cache's too."""
        if self._checkpoints is not None and num_tokens in lease.keeps:
            slot, pages = lease.keeps.pop(num_tokens), num_tokens // self._layout.page_size
            if 0 < pages <= lease.shared:
                self._checkpoints.put(slot, lease.path[pages - 1])
            else:
                self._checkpoints.give_back(slot)

    def slide(self, lease: Lease, known: int) -> Cells:
        """Let go of pages behind the windows, by a known committed length; their cells become the null page."""
        cells: Cells = []
        for group, held in lease.pages.items():
            for column in reversed(range(min(self._first_column(group, known), len(held)))):
                page = held[column]
                if page == NULL_PAGE:  # and so are all before it
                    break
                if column >= lease.shared:
                    self._give_back(group, [page], lease.owner)
                elif self._radix is not None:
                    self._radix.leave(lease.path[column], group)
                held[column] = NULL_PAGE
                cells.append((group, column, NULL_PAGE))
        return cells

    def release(self, lease: Lease, ids: Sequence[int] = ()) -> None:
        """Give back every page, once. ids: tokens whose K/V the pages hold and that the cache may keep."""
        if lease.released:
            return
        for group, page in self._torn(lease):
            lease.pages[group][lease.torn[group]] = NULL_PAGE
            self._give_back(group, [page], lease.owner)
        self.insert(lease, ids)
        lease.released = True
        if self._checkpoints is not None:
            for slot in lease.keeps.values():
                self._checkpoints.give_back(slot)
            lease.keeps.clear()
        for group in lease.pages:
            self._leave(lease, group)
        if self._radix is not None:
            self._give_back_cached(self._radix.unpin(lease.path))

    def stop_drafting(self, lease: Lease) -> None:
        """Give back what a lease holds in the draft's groups, for good. No step that is planned later reads it."""
        for group in [each for each in lease.pages if is_draft(each)]:
            self._leave(lease, group)
            del lease.pages[group]
            lease.torn.pop(group, None)
        lease.drafts = False

    def _leave(self, lease: Lease, group: GroupName) -> None:
        """Give back a lease's own pages of a group, and read those of the cache no more, the last one first."""
        pages = lease.pages[group]
        self._give_back(group, [page for page in pages[lease.shared :] if page != NULL_PAGE], lease.owner)
        if self._radix is not None:
            for node, page in [*zip(lease.path, pages, strict=False)][::-1]:  # pages of a lease's own may follow
                if page != NULL_PAGE:
                    self._radix.leave(node, group)

    def take_freed(self) -> tuple[tuple[GroupName, PageId], ...]:
        """Pages given back since the last call, also those that have a new owner, who has written nothing yet."""
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def note_all_freed(self) -> None:
        """Pages that nobody owns may hold what others wrote before these books were opened."""
        self._freed = [(g, PageId(page)) for g, each in self._allocators.items() for page in range(1, each.total + 1)]

    def arrange(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder each group's free pages; the last one is handed out first."""
        for allocator in self._allocators.values():
            allocator.arrange(order)

    @property
    def usage(self) -> float:
        """Share of the fullest group's pages that requests hold: neither free nor evictable from the cache."""
        return max(
            1 - (each.num_free + self._evictable(group)) / each.total for group, each in self._allocators.items()
        )

    @property
    def share_cached(self) -> float:
        """Share of the fullest group's pages that the prefix cache has."""
        return max(each.num_cached / each.total for each in self._allocators.values())

    @property
    def num_available(self) -> int:
        """Tokens that may be given pages now, in the group that has fewest, but for windows, which give theirs back."""
        whole = [group.name for group in self._layout.groups if group.window is None]
        pages = (self._allocators[each].num_free + self._evictable(each) for each in whole or self._allocators)
        return self._layout.page_size * min(pages)

    def _evictable(self, group: GroupName) -> int:
        return 0 if self._radix is None else self._radix.num_evictable(group)

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise OwnershipError unless, in every group, leases and cache own exactly the pages that are not free.

        leases: all that live. O(pages), for tests and idle moments.
        """
        live = {lease.owner for lease in leases}
        for group, allocator in self._allocators.items():
            allocator.check()
            self._check_counts(group, leases)
            known = (PageId(page) for page, node in enumerate(self._nodes[group]) if node is not None)
            for page in sorted({*allocator.owned(), *known}):  # of the others there is nothing to say
                self._check_page(group, page, live)
        for lease in leases:
            self._check_columns(lease, 0, max(len(pages) for pages in lease.pages.values()))
        if self._radix is not None:
            self._radix.check([lease.path for lease in leases])
        self._check_checkpoints(leases)

    def check_some(self, leases: Sequence[Lease], count: int) -> None:
        """The same for the next `count` pages of each group and the next `count` columns of the leases, one at a time.

        It goes on where the last call stopped. O(count + leases), so that it can run while requests are served.
        """
        live, at = {lease.owner for lease in leases}, self._next_check
        for group, allocator in self._allocators.items():
            self._check_counts(group, leases)
            for page in range(at["page"] + 1, min(at["page"] + count, allocator.total) + 1):
                allocator.check_page(PageId(page))
                self._check_page(group, PageId(page), live)
        self._check_checkpoints(leases)
        largest = max(allocator.total for allocator in self._allocators.values())
        at["page"] = at["page"] + count if at["page"] + count < largest else 0
        if leases:
            lease = leases[at["lease"] % len(leases)]
            self._check_columns(lease, at["column"], at["column"] + count)
            at["column"] += count
            if at["column"] >= max(len(pages) for pages in lease.pages.values()):
                at["lease"], at["column"] = at["lease"] + 1, 0

    def _check_counts(self, group: GroupName, leases: Sequence[Lease]) -> None:
        """The partition equation. O(leases); in a window's group times the pages of a window."""
        allocator = self._allocators[group]
        cached = self._radix.num_pages(group) if self._radix is not None else 0
        leased = sum(_num_own(lease, group) for lease in leases)
        if allocator.num_cached != cached or allocator.num_free + leased + cached != allocator.total:
            raise OwnershipError(
                f"{group}: free {allocator.num_free} + leased {leased} + cached {cached} != {allocator.total}, or the"
                f" cache does not own {allocator.num_cached} pages"
            )

    def _check_checkpoints(self, leases: Sequence[Lease]) -> None:
        """The partition equation of slots for states. O(slots), of which there are few."""
        if self._checkpoints is not None:
            self._checkpoints.check(slot for lease in leases for slot in lease.keeps.values())

    def _check_page(self, group: GroupName, page: PageId, live: Collection[Owner]) -> None:
        """A page's owner lives and, if it is the cache, knows of it."""
        owner, node = self._allocators[group].owner_of(page), self._nodes[group][page]
        if (owner == CACHE) != (node is not None):
            raise OwnershipError(f"{group}: page {page} belongs to {owner}, and the cache disagrees")
        if node is not None and self._radix is not None:
            if node.pages.get(group) != page:
                raise OwnershipError(f"{group}: page {page} is cached, but its node holds {node.pages}")
            self._radix.check_node(node)
        elif owner != FREE and owner not in live:
            raise OwnershipError(f"{group}: page {page} belongs to lease {owner}, which has ended")

    def _check_columns(self, lease: Lease, begin: int, end: int) -> None:
        """Pages of a lease belong to it, those of its path to the cache; only windows leave any behind."""
        for group, held in lease.pages.items():
            pages = held[begin:end]
            own = [page for page in pages if page != NULL_PAGE]
            if len(set(own)) != len(own) or (self._windows[group] is None and len(own) < len(pages)):
                raise OwnershipError(f"{group}: lease {lease.owner} holds a page twice, or none in some column")
            for column, page in enumerate(pages, start=begin):
                shared = column < lease.shared
                if page != NULL_PAGE and self._allocators[group].owner_of(page) != (CACHE if shared else lease.owner):
                    raise OwnershipError(f"{group}: page {page} in column {column} does not belong to {lease.owner}")
                if page != NULL_PAGE and shared and lease.path[column].pages.get(group) != page:
                    raise OwnershipError(f"{group}: lease {lease.owner} shares page {page}, but the cache has another")

    def _make_room(self, need: dict[GroupName, int]) -> bool:
        """Evict until every group has the pages free; False, with nothing evicted in vain, if that cannot be."""
        short = {group: count - self._allocators[group].num_free for group, count in need.items()}
        if all(count <= 0 for count in short.values()):
            return True
        if self._radix is None or any(count > self._radix.num_evictable(group) for group, count in short.items()):
            return False
        for group, count in need.items():
            while self._allocators[group].num_free < count:
                self._give_back_cached(self._radix.evict(group))
        return True

    def _give_back_cached(self, pages: Pages) -> None:
        for group, page in pages:
            self._nodes[group][page] = None
            self._give_back(group, [page], CACHE)

    def _give_back(self, group: GroupName, pages: Sequence[PageId], owner: Owner) -> None:
        self._allocators[group].give_back(pages, owner)
        self._freed += [(group, page) for page in pages]

    def _torn(self, lease: Lease) -> Pages:
        """The torn pages that a lease still holds."""
        held = [(group, lease.pages[group][column]) for group, column in lease.torn.items()]
        return [(group, page) for group, page in held if page != NULL_PAGE]

    def _first_column(self, group: GroupName, known: int) -> int:
        """First column that a query at `known` or later can see."""
        return first_seen(self._windows[group], known, self._layout.page_size)

    def _check_filled(self, lease: Lease) -> None:
        """A shared prefix is as long as every group has filled it (sgl-19796)."""
        for group, pages in lease.pages.items():
            if len(pages) != lease.shared:
                raise CheckError(
                    f"prefix hit: {lease.shared} pages are shared, but group {group} has {len(pages)} of them filled"
                )


def _num_own(lease: Lease, group: GroupName) -> int:
    """Pages that a lease owns in a group. Null pages come before all others."""
    pages = lease.pages.get(group, [])
    count = len(pages) - lease.shared
    if count <= 0 or pages[lease.shared] != NULL_PAGE:
        return max(count, 0)
    return next((i for i, page in enumerate(reversed(pages)) if page == NULL_PAGE), count)
