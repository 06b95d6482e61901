"""The prefix cache: a trie of pages, each with its page in every KV group.

A page's key is its tokens and, with a draft head, the token after it: the draft's K/V at position i depend on token
i + 1 (sgl-10846). So matching P tokens reuses `floor((P - 1) / p)` pages with a draft, `floor(P / p)` without.

No operation walks the trie: each takes constant time a page that it finds, adds or drops.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treetop.types.ids import GroupName, PageId

Key = tuple[int, tuple[int, ...]]
"""The parent's serial number; the tokens of the page, and with a draft head the one after them."""


@dataclass(slots=True, eq=False)
class Node:
    """One cached page of every group.

    pins: leases that read it now. A lease pins its whole path, so below an unpinned node nothing is pinned.
    """

    serial: int
    key: Key
    parent: "Node | None"
    pages: Mapping[GroupName, PageId]
    num_children: int = 0
    pins: int = 0


class RadixCache:
    """Finds, adds and evicts cached pages. It owns no allocator: the ledger moves the pages it names.

    `_unpinned` holds the unpinned nodes, least recently used first. A path is put there from its end to its beginning,
    so a node stands before its parent, and the first of all is a leaf: the one to evict.
    """

    def __init__(self, page_size: int, lookahead: int) -> None:
        self._page_size, self._lookahead = page_size, lookahead
        self._root = Node(0, (0, ()), None, {})
        self._nodes: dict[Key, Node] = {}
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        self._next_serial = 1

    def match(self, ids: Sequence[int]) -> list[Node]:
        """The longest cached path for `ids`, one token at least left to compute. Who reads it pins it."""
        path: list[Node] = []
        serial = self._root.serial
        for tokens in self._tokens(ids, (len(ids) - 1) // self._page_size):
            node = self._nodes.get((serial, tokens))
            if node is None:
                break
            path.append(node)
            serial = node.serial
        return path

    def insert(self, ids: Sequence[int], pages: Sequence[Mapping[GroupName, PageId]]) -> list[int]:
        """Add the pages that hold `ids` from their beginning. Returns the indices of the pages that were taken.

        A page whose key is cached already is not taken. `ids` are what the client received, never more (sgl-35694).
        """
        taken: list[int] = []
        path: list[Node] = []
        node = self._root
        for index, tokens in enumerate(self._tokens(ids, len(pages))):
            key = (node.serial, tokens)
            child = self._nodes.get(key)
            if child is None:
                child = self._nodes[key] = Node(self._next_serial, key, node, pages[index])
                self._unpinned[child] = None
                self._next_serial += 1
                node.num_children += 1
                taken.append(index)
            path.append(child)
            node = child
        for node in reversed(path):
            if node.pins == 0:
                self._unpinned.move_to_end(node)
        return taken

    def pin(self, path: Sequence[Node]) -> None:
        """Keep a path, which begins at the root, from eviction until it is unpinned."""
        for node in path:
            if node.pins == 0:
                del self._unpinned[node]
            node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """End one pin of each node of a path. What nothing else pins has been used just now."""
        for node in reversed(path):
            node.pins -= 1
            if node.pins == 0:
                self._unpinned[node] = None

    def evict(self, count: int) -> list[Mapping[GroupName, PageId]]:
        """Drop up to `count` unpinned pages, the least recently used leaf first, and return them."""
        dropped: list[Mapping[GroupName, PageId]] = []
        while self._unpinned and len(dropped) < count:
            leaf, _ = self._unpinned.popitem(last=False)
            assert leaf.num_children == 0
            assert leaf.parent is not None
            del self._nodes[leaf.key]
            leaf.parent.num_children -= 1
            dropped.append(leaf.pages)
        return dropped

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Pages that evicting everything unpinned would give back."""
        return len(self._unpinned)

    def _tokens(self, ids: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        """What up to `limit` pages of `ids` depend on beside the pages before them."""
        p, width, known = self._page_size, self._page_size + self._lookahead, tuple(ids)
        for start in range(0, min(limit * p, len(known) - width + 1), p):
            yield known[start : start + width]
