"""The prefix cache against a slow model that walks every node, and what its operations cost as it grows."""

import random
import sys
from dataclasses import dataclass, field

import pytest

from treetop.cache import radix
from treetop.cache.radix import RadixCache
from treetop.types.ids import FULL, PageId

# ---------------------------------------------------------------------------------------------- a slow model


@dataclass(eq=False)
class SlowNode:
    key: tuple[int, ...]
    parent: "SlowNode | None"
    page: PageId
    children: dict = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0


class SlowCache:
    """A trie of dicts; every question is answered by walking all of it."""

    def __init__(self, page_size, lookahead):
        self.page_size, self.lookahead, self.clock = page_size, lookahead, 0
        self.root = SlowNode((), None, PageId(0))

    def nodes(self):
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def keys(self, ids, limit):
        for index in range(limit):
            end = (index + 1) * self.page_size + self.lookahead
            if end <= len(ids):
                yield tuple(ids[index * self.page_size : end])

    def use(self, path):
        self.clock += 1
        for node in path:
            node.last_used = self.clock

    def match(self, ids):
        path, node = [], self.root
        for key in self.keys(ids, (len(ids) - 1) // self.page_size):
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return path

    def insert(self, ids, pages):
        taken, path, node = [], [], self.root
        for index, key in enumerate(self.keys(ids, len(pages))):
            if key not in node.children:
                node.children[key] = SlowNode(key, node, pages[index])
                taken.append(index)
            node = node.children[key]
            path.append(node)
        self.use(path)
        return taken

    def pin(self, path):
        for node in path:
            node.pins += 1

    def unpin(self, path):
        self.use(path)
        for node in path:
            node.pins -= 1

    def evict(self, count):
        dropped = []
        while len(dropped) < count:
            leaves = [node for node in self.nodes() if not node.children and not node.pins]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            del leaf.parent.children[leaf.key]
            dropped.append(leaf.page)
        return dropped


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_the_cache_does_what_a_model_that_walks_every_node_does(seed, page_size, lookahead):
    """Prompts of two tokens that often begin alike are looked up, added, pinned, let go and evicted, in any order."""
    rng = random.Random(seed)
    cache, slow = RadixCache(page_size, lookahead), SlowCache(page_size, lookahead)
    held, next_page, evicted = [], 1, 0
    for _ in range(400):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 7 * page_size + 2))]
        act = rng.choice(["match", "insert", "insert", "pin", "unpin", "evict"])
        if act in ("match", "pin"):
            path, expected = cache.match(ids), slow.match(ids)
            assert [node.pages[FULL] for node in path] == [node.page for node in expected]
            if act == "pin":
                cache.pin(path)
                slow.pin(expected)
                held.append((path, expected))
        elif act == "insert":
            pages = [PageId(next_page + i) for i in range(rng.randrange(len(ids) // page_size + 1))]
            next_page += len(pages)
            assert cache.insert(ids, [{FULL: page} for page in pages]) == slow.insert(ids, pages)
        elif act == "unpin" and held:
            path, expected = held.pop(rng.randrange(len(held)))
            cache.unpin(path)
            slow.unpin(expected)
        elif act == "evict":
            count = rng.randrange(6)
            gone = slow.evict(count)
            evicted += len(gone)
            assert [pages[FULL] for pages in cache.evict(count)] == gone
        assert cache.num_pages == len(list(slow.nodes()))
        assert cache.num_evictable == sum(not node.pins for node in slow.nodes())
    assert evicted > 20


# ---------------------------------------------------------------------------------------------- cost


def lines_run(action) -> int:
    """Lines of the cache's source that an action runs through: its work, without a clock."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename == radix.__file__ else None)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def filled(num_pages: int) -> RadixCache:
    """Prompts of 40 pages of 4 tokens: the first 8 pages are one of ten beginnings."""
    cache, page = RadixCache(4, 1), 1
    for prompt in range(num_pages):
        ids = [*[prompt % 10] * 32, *[1000 + prompt] * 129]
        rows = [{FULL: PageId(page + i)} for i in range(40)]
        page += len(cache.insert(ids, rows))
        if page > num_pages:
            break
    return cache


def costs(num_pages: int) -> list[int]:
    """Lines that each operation runs through in a cache of so many pages."""
    cache = filled(num_pages)
    assert num_pages <= cache.num_pages < num_pages + 40
    known, new = [*[3] * 32, *[1003] * 129], [*[3] * 32, *[7] * 129]
    path = cache.match(known)
    assert len(path) == 40
    actions = [
        lambda: cache.match(known),
        lambda: cache.insert(new, [{FULL: PageId(0)}] * 40),
        lambda: cache.pin(path),
        lambda: cache.num_evictable,
        lambda: cache.evict(20),
        lambda: cache.unpin(path),
    ]
    return [lines_run(action) for action in actions]


def test_no_operation_costs_more_in_a_large_cache_than_in_a_small_one():
    """Lookup, insertion, pins and eviction run the same lines with 1,000 and with 100,000 cached pages."""
    small = costs(1_000)
    assert small == costs(100_000)
    assert all(0 < cost < 1000 for cost in small)
