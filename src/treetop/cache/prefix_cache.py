"""The prefix cache: a trie of pages, each with its page in every KV group that still has one.

A page's key is its tokens and, with a draft head, the token after it: the draft's K/V at position i depend on token
i + 1 (sgl-10846). So matching P tokens reuses `floor((P - 1) / p)` pages with a draft, `floor(P / p)` without.

The target's groups that see everything keep their page as long as the node lives. Groups that are `loose` may lack
theirs: a window's group may lose it and leave the node to the others, for a hit needs the window's pages only just
before its end; and a request without a draft leaves nodes without pages of the draft's groups, which only requests that
draft need for a hit. One that does so computes such a node's tokens again, and gives it the pages that it lacked.

No operation walks the trie: each takes constant time a page that it finds, adds or drops.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treetop.cache.checkpoints import StateCheckpoints
from treetop.types.errors import OwnershipError
from treetop.types.ids import GroupName, PageId, is_draft

PageTokens = tuple[int | str, ...]
"""The tokens of a page, and with a draft head the one after them; behind the first page's a salt, if there is one."""
Key = tuple[int, PageTokens]
"""The parent's serial number, and what the page holds."""
Pages = list[tuple[GroupName, PageId]]


class CacheWatcher(Protocol):
    """Is told of pages as they come and go, on the cache's thread. serial: of a node; the root's is 0."""

    def stored(self, parent: int, serial: int, page: PageTokens) -> None: ...

    def removed(self, serial: int) -> None: ...

    def cleared(self) -> None:
        """There is no page any more, and serial numbers begin anew."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """One page of tokens.

    pages: that hold its K/V, by group; a loose group may have none.

    pins: leases that have it on their path. A lease pins its whole path, so below an unpinned node nothing is pinned.
    """

    serial: int
    key: Key
    parent: "Node | None"
    pages: dict[GroupName, PageId]
    num_children: int = 0
    pins: int = 0


@dataclass(frozen=True, slots=True)
class _Loose:
    """The pages of a group of which a node may have none.

    window: None for a draft's that sees everything.
    readers: leases that see a node's page, if any.
    unread: the others, least recently used first.

    A page that is read belongs to a pinned node.
    """

    window: int | None
    readers: dict[Node, int] = field(default_factory=dict)
    unread: OrderedDict[Node, None] = field(default_factory=OrderedDict)


def first_seen(window: int | None, position: int, page_size: int) -> int:
    """The first page that a query at `position` or later can see."""
    return 0 if window is None else max(position - window + 1, 0) // page_size


def page_tokens(
    ids: Sequence[int], page_size: int, lookahead: int, begin: int, end: int, salt: str = ""
) -> Iterator[PageTokens]:
    """What pages `begin .. end` of `ids` depend on beside the pages before them, as far as `ids` know it.

    lookahead: 1 with a draft head, whose last K/V of a page depend on the token after it, 0 without. salt: no page is
    one of another salt.
    """
    width, known = page_size + lookahead, tuple(ids)
    for start in range(begin * page_size, min(end * page_size, len(known) - width + 1), page_size):
        tokens = known[start : start + width]
        yield (*tokens, salt) if salt and not start else tokens


class PrefixCache:
    """Finds, adds and evicts cached pages. It owns no allocator: the KV cache manager moves the pages it names.

    `_unpinned` holds the unpinned nodes, least recently used first. A path is put there from its end to its beginning,
    so a node stands before its parent, and the first of all is a leaf: the one to evict.

    windows: of each group, None for one that sees everything.
    checkpoints: states of recurrent layers, without which no hit ends at a node; None for a model without such layers.
    watcher: hears of every node; None if nobody does.
    """

    def __init__(
        self,
        page_size: int,
        lookahead: int,
        windows: Mapping[GroupName, int | None],
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self._page_size, self._lookahead, self._checkpoints = page_size, lookahead, checkpoints
        loose = {group: window for group, window in windows.items() if window is not None or is_draft(group)}
        self._loose = {group: _Loose(window) for group, window in loose.items()}
        self._windows = [group for group in loose if not is_draft(group)]  # the target's
        self._root = Node(0, (0, ()), None, {})
        self._nodes: dict[Key, Node] = {}
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        self._next_serial = 1
        self.watcher: CacheWatcher | None = None

    # ---------------------------------------------------------------- lookup and insertion

    def match(self, ids: Sequence[int], salt: str = "", drafts: bool = True) -> list[Node]:
        """The longest path for `ids` that every group still holds, one token at least left to compute.

        A window's group holds it if it has all pages that the next token sees. salt: of the requests that left it.
        drafts: whether the draft's groups have to hold it, too.
        """
        return self.lookup(ids, salt, drafts)[0]

    def lookup(self, ids: Sequence[int], salt: str = "", drafts: bool = True) -> tuple[list[Node], int]:
        """`match`, and how many pages it would be of if states were kept at every page."""
        path: list[Node] = []
        usable = reach = 0
        serial, limit = self._root.serial, (len(ids) - 1) // self._page_size
        groups = self._loose if drafts else self._windows
        whole = {group for group in groups if self._loose[group].window is None}
        begins = {group: 0 for group in groups if group not in whole}  # first page of the unbroken run that ends here
        for tokens in self._tokens(ids, 0, limit, salt):
            node = self._nodes.get((serial, tokens))
            if node is None or not whole <= node.pages.keys():  # what sees everything lacks a page: no path goes on
                break
            path.append(node)
            serial, end = node.serial, len(path)
            for group in begins:
                if group not in node.pages:
                    begins[group] = end
            if not begins or all(begin <= self._first_seen(group, end) for group, begin in begins.items()):
                reach = end
                if self._checkpoints is None or self._checkpoints.holds(node):
                    usable = end
        return path[:usable], reach

    def extend(self, path: Sequence[Node], ids: Sequence[int], num_pages: int, salt: str = "") -> list[Node]:
        """The nodes that lead from a pinned path on to page `num_pages` of `ids`, found or made. They are pinned.

        `ids` are what the client received, never more (sgl-35694); a page that they do not determine gets no node.
        """
        nodes: list[Node] = []
        node = path[-1] if path else self._root
        for tokens in self._tokens(ids, len(path), num_pages, salt):
            key = (node.serial, tokens)
            child = self._nodes.get(key)
            if child is None:
                child = self._nodes[key] = Node(self._next_serial, key, node, {}, pins=1)
                self._next_serial += 1
                node.num_children += 1
                if self.watcher is not None:
                    self.watcher.stored(node.serial, child.serial, tokens)
            else:
                self.pin([child])
            nodes.append(child)
            node = child
        return nodes

    def fill(self, node: Node, group: GroupName, page: PageId) -> None:
        """Give a node the page that it lacks in a group."""
        node.pages[group] = page
        if group in self._loose:
            self._loose[group].unread[node] = None

    # ---------------------------------------------------------------- leases

    def pin(self, path: Sequence[Node]) -> None:
        """Keep a path, which begins at the root, until it is unpinned. Pages of loose groups may go if nobody reads
        them.
        """
        for node in path:
            if node.pins == 0:
                del self._unpinned[node]
            node.pins += 1

    def unpin(self, path: Sequence[Node]) -> Pages:
        """End one pin of each node of a path. What nothing else pins has been used just now.

        Returns the pages of nodes that are dropped, because no hit can end there any more.
        """
        dropped: Pages = []
        for node in reversed(path):
            node.pins -= 1
            if node.pins == 0:
                self._unpinned[node] = None
                if self._is_useless(node):
                    dropped += self._drop(node)
        return dropped

    def read(self, path: Sequence[Node], group: GroupName) -> list[PageId]:
        """The pages of pinned nodes in a group, which in a loose group stay until `leave`."""
        if group in self._loose:
            readers, unread = self._loose[group].readers, self._loose[group].unread
            for node in path:
                unread.pop(node, None)
                readers[node] = readers.get(node, 0) + 1
        return [node.pages[group] for node in path]

    def leave(self, node: Node, group: GroupName) -> None:
        """A lease that read a node's page does not see it any more."""
        if group in self._loose:
            pages = self._loose[group]
            pages.readers[node] -= 1
            if pages.readers[node] == 0:
                del pages.readers[node]
                pages.unread[node] = None

    # ---------------------------------------------------------------- eviction

    def evict(self, group: GroupName) -> Pages:
        """Drop the group's least recently used page that nobody reads. Returns what that frees, in all groups."""
        loose = self._loose.get(group)
        if loose is None:
            leaf = next(iter(self._unpinned))
            dropped, node = self._drop(leaf), leaf.parent
        else:
            node, _ = loose.unread.popitem(last=False)
            dropped = [(group, node.pages.pop(group))]
        while node is not None and self._is_useless(node):
            dropped += self._drop(node)
            node = node.parent
        return dropped

    def num_evictable(self, group: GroupName) -> int:
        """Pages of a group that evicting all that nobody reads would give back."""
        return len(self._loose[group].unread if group in self._loose else self._unpinned)

    def num_pages(self, group: GroupName) -> int:
        """Pages of a group in the cache."""
        if group in self._loose:
            return len(self._loose[group].unread) + len(self._loose[group].readers)
        return len(self._nodes)

    # ---------------------------------------------------------------- inspection

    def check_node(self, node: Node) -> None:
        """Raise OwnershipError unless a node can be found, and stands where eviction looks for it."""
        parent = node.parent
        if self._nodes.get(node.key) is not node or parent is None or parent.serial != node.key[0]:
            raise OwnershipError(f"prefix cache: the node of pages {node.pages} is not in it")
        if parent is not self._root and self._nodes.get(parent.key) is not parent:
            raise OwnershipError(f"prefix cache: the parent of the node of pages {node.pages} is gone")
        if parent.pins < node.pins and parent is not self._root:
            raise OwnershipError(f"prefix cache: {node.pins} leases pin a node, {parent.pins} its parent")
        if (node.pins == 0) != (node in self._unpinned):
            raise OwnershipError(f"prefix cache: a node with {node.pins} pins stands in the wrong list")
        for group, pages in self._loose.items():
            if (node in pages.readers) + (node in pages.unread) != (group in node.pages):
                raise OwnershipError(f"prefix cache: a page of group {group} stands in no list or in two")
            if node.pins < pages.readers.get(node, 0):
                raise OwnershipError(f"prefix cache: {node.pins} leases pin a node of which more read group {group}")

    def check(self, paths: Sequence[Sequence[Node]]) -> None:
        """Raise OwnershipError unless all nodes, lists, children and pins agree. paths: of all leases. O(pages)."""
        pins: dict[Node, int] = {}
        children = dict.fromkeys([self._root, *self._nodes.values()], 0)
        for node in (node for path in paths for node in path):
            pins[node] = pins.get(node, 0) + 1
        for node in self._nodes.values():
            self.check_node(node)
            assert node.parent is not None
            children[node.parent] += 1
            if node.pins != pins.get(node, 0) or self._is_useless(node):
                raise OwnershipError(f"prefix cache: {node.pins} pins, {pins.get(node, 0)} leases, {node.pages}")
        if self._checkpoints is not None and any(node not in children for node in self._checkpoints.nodes()):
            raise OwnershipError("prefix cache: states are kept of a node that is gone")
        if any(node.num_children != count for node, count in children.items()):
            raise OwnershipError("prefix cache: a node counts its children wrongly")
        seen: set[Node | None] = set()
        for node in self._unpinned:
            seen.add(node)
            if node.parent in seen:
                raise OwnershipError("prefix cache: a node would be evicted before its child")

    # ---------------------------------------------------------------- inside

    def _is_useless(self, node: Node) -> bool:
        """Whether nothing is read there or below, and no hit can end there, for want of a window's page."""
        if not self._windows or node.num_children or node.pins or node is self._root:
            return False
        return any(group not in node.pages for group in self._windows)

    def _drop(self, leaf: Node) -> Pages:
        """Take an unpinned leaf out of the trie. Returns its pages."""
        assert leaf.num_children == leaf.pins == 0
        assert leaf.parent is not None
        del self._nodes[leaf.key], self._unpinned[leaf]
        leaf.parent.num_children -= 1
        if self.watcher is not None:
            self.watcher.removed(leaf.serial)
        for pages in self._loose.values():
            pages.unread.pop(leaf, None)
        if self._checkpoints is not None:
            self._checkpoints.drop(leaf)
        return list(leaf.pages.items())

    def _first_seen(self, group: GroupName, num_pages: int) -> int:
        """First page of a group that the token after `num_pages` sees."""
        return first_seen(self._loose[group].window, num_pages * self._page_size, self._page_size)

    def _tokens(self, ids: Sequence[int], begin: int, end: int, salt: str) -> Iterator[PageTokens]:
        return page_tokens(ids, self._page_size, self._lookahead, begin, end, salt)
