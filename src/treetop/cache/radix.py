"""The prefix cache: a trie of pages, each with its page in every KV group.

A page's key is its tokens and, with a draft head, the token after it: the draft's K/V at position i depend on token
i + 1 (sgl-10846). So matching P tokens reuses `floor((P - 1) / p)` pages with a draft, `floor(P / p)` without.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treetop.types.ids import GroupName, PageId

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page of every group, reached by the keys from the root.

    pins: leases that read it now. A lease pins its whole path, so below an unpinned node nothing is pinned.
    """

    key: Key
    parent: "Node | None"
    pages: Mapping[GroupName, PageId]
    children: dict[Key, "Node"] = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0


class RadixCache:
    """Finds, adds and evicts cached pages. It owns no allocator: the ledger moves the pages it names."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self._page_size, self._lookahead = page_size, lookahead
        self._root = Node((), None, {})
        self._clock = 0

    def match(self, ids: Sequence[int]) -> list[Node]:
        """The longest cached path for `ids`, one token at least left to compute."""
        path: list[Node] = []
        node = self._root
        self._clock += 1
        for key in self._keys(ids, (len(ids) - 1) // self._page_size):
            child = node.children.get(key)
            if child is None:
                break
            child.last_used = self._clock
            path.append(child)
            node = child
        return path

    def insert(self, ids: Sequence[int], pages: Sequence[Mapping[GroupName, PageId]]) -> list[int]:
        """Add the pages that hold `ids` from their beginning. Returns the indices of the pages that were taken.

        A page whose key is cached already is not taken. `ids` are what the client received, never more (sgl-35694).
        """
        taken = []
        node = self._root
        self._clock += 1
        for index, key in enumerate(self._keys(ids, len(pages))):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node, pages[index])
                taken.append(index)
            child.last_used = self._clock
            node = child
        return taken

    def evict(self, count: int) -> list[Mapping[GroupName, PageId]]:
        """Drop up to `count` unpinned pages, the least recently used leaves first, and return them."""
        dropped: list[Mapping[GroupName, PageId]] = []
        while len(dropped) < count:
            leaves = [node for node in self._nodes() if not node.children and not node.pins]
            if not leaves:
                break
            for leaf in sorted(leaves, key=lambda node: node.last_used)[: count - len(dropped)]:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.key]
                dropped.append(leaf.pages)
        return dropped

    def num_pages(self) -> int:
        return sum(1 for _ in self._nodes())

    def num_evictable(self) -> int:
        """Pages that evicting everything unpinned would give back."""
        return sum(1 for node in self._nodes() if not node.pins)

    def _keys(self, ids: Sequence[int], limit: int) -> Iterator[Key]:
        p = self._page_size
        for index in range(limit):
            end = (index + 1) * p + self._lookahead
            if end > len(ids):
                return
            yield tuple(ids[index * p : end])

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
