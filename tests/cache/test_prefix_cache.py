"""The prefix cache against a slow model that walks every node, and what its operations cost as it grows."""

import random
import sys
from dataclasses import dataclass, field, replace

import pytest

from treetop.cache import prefix_cache
from treetop.cache.prefix_cache import PrefixCache
from treetop.types.errors import OwnershipError
from treetop.types.ids import FULL, WINDOW, PageId

# ---------------------------------------------------------------------------------------------- a slow model


@dataclass(eq=False)
class SlowNode:
    key: tuple[int, ...]
    parent: "SlowNode | None"
    pages: dict = field(default_factory=dict)
    children: dict = field(default_factory=dict)
    pins: int = 0
    readers: int = 0  # of the window's page
    used: int = 0  # when its last pin ended
    seen: int = 0  # when its last reader left, or when the window's page came


class SlowCache:
    """A trie of dicts; every question is answered by walking all of it. window: of the second group, None for none."""

    def __init__(self, page_size, lookahead, window):
        self.page_size, self.lookahead, self.window, self.clock = page_size, lookahead, window, 0
        self.root = SlowNode((), None, pins=1)

    def nodes(self):
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def now(self):
        self.clock += 1
        return self.clock

    def key(self, ids, index):
        end = (index + 1) * self.page_size + self.lookahead
        return tuple(ids[index * self.page_size : end]) if end <= len(ids) else None

    def match(self, ids):
        path, node = [], self.root
        for index in range((len(ids) - 1) // self.page_size):
            node = node.children.get(self.key(ids, index))
            if node is None:
                break
            path.append(node)
        while path and not self.holds(path):
            path.pop()
        return path

    def holds(self, path):
        """Whether the token after a path finds all that it sees."""
        if self.window is None:
            return True
        end = len(path) * self.page_size  # this token sees positions end - window + 1 .. end
        seen = {position // self.page_size for position in range(max(end - self.window + 1, 0), end)}
        return all(WINDOW in path[column].pages for column in seen)

    def extend(self, path, ids, num_pages):
        nodes, node = [], path[-1] if path else self.root
        for index in range(len(path), num_pages):
            key = self.key(ids, index)
            if key is None:
                break
            node = node.children.setdefault(key, SlowNode(key, node))
            node.pins += 1
            nodes.append(node)
        return nodes

    def fill(self, node, group, page):
        node.pages[group] = page
        node.seen = self.now()

    def pin(self, path):
        for node in path:
            node.pins += 1

    def unpin(self, path):
        dropped = []
        for node in reversed(path):
            node.pins -= 1
            node.used = self.now()
        for node in reversed(path):
            dropped += self.prune(node)
        return dropped

    def read(self, path, group):
        for node in path:
            node.readers += group == WINDOW
        return [node.pages[group] for node in path]

    def leave(self, node, group):
        if group == WINDOW:
            node.readers -= 1
            node.seen = self.now()

    def unread(self):
        return [node for node in self.nodes() if WINDOW in node.pages and not node.readers]

    def evict(self, group):
        if group == WINDOW:
            node = min(self.unread(), key=lambda node: node.seen)
            return [(WINDOW, node.pages.pop(WINDOW)), *self.prune(node)]
        leaves = [node for node in self.nodes() if not node.children and not node.pins]
        leaf = min(leaves, key=lambda node: node.used)
        return [*self.drop(leaf), *self.prune(leaf.parent)]

    def prune(self, node):
        dropped = []
        while self.window is not None and not node.pins and not node.children and WINDOW not in node.pages:
            if node.key in node.parent.children:
                dropped += self.drop(node)
            node = node.parent
        return dropped

    def drop(self, leaf):
        del leaf.parent.children[leaf.key]
        return list(leaf.pages.items())

    def num_evictable(self, group):
        return len(self.unread()) if group == WINDOW else sum(not node.pins for node in self.nodes())

    def num_pages(self, group):
        return sum(group in node.pages for node in self.nodes())


class Lease:
    """What one request does to a cache and to the model, in step; both must answer alike."""

    def __init__(self, caches, ids, groups):
        self.caches, self.ids, self.groups = caches, ids, groups
        self.paths = [cache.match(ids) for cache in caches]
        self.read = []  # columns of the window that it sees
        cache, slow = self.paths
        assert [node.pages for node in cache] == [node.pages for node in slow]
        for each, path in zip(caches, self.paths, strict=True):
            each.pin(path)
        self.see(range(self.first_seen(), len(cache)))

    def first_seen(self):
        slow, path = self.caches[1], self.paths[1]
        return max(len(path) * slow.page_size - slow.window + 1, 0) // slow.page_size if slow.window else 0

    def see(self, columns):
        if WINDOW not in self.groups:
            return
        for column in columns:
            pages = [
                each.read(path[column : column + 1], WINDOW) for each, path in zip(self.caches, self.paths, strict=True)
            ]
            assert pages[0] == pages[1]
            self.read.append(column)

    def insert(self, num_pages, first_page, held):
        """held: pages of the window's group that the request still has, the last ones."""
        before = len(self.paths[0])
        for each, path in zip(self.caches, self.paths, strict=True):
            path.extend(each.extend(path, self.ids, num_pages))
        assert len(self.paths[0]) == len(self.paths[1])
        for column in range(before, len(self.paths[0])):
            for group in self.groups:
                if group == WINDOW and column < len(self.paths[0]) - held:
                    continue
                for each, path in zip(self.caches, self.paths, strict=True):
                    if group not in path[column].pages:
                        each.fill(path[column], group, PageId(first_page + column))
                if group == WINDOW:
                    self.see([column])

    def slide(self, count):
        for column in self.read[:count]:
            for each, path in zip(self.caches, self.paths, strict=True):
                each.leave(path[column], WINDOW)
        del self.read[:count]

    def close(self):
        self.slide(len(self.read))
        dropped = [each.unpin(path) for each, path in zip(self.caches, self.paths, strict=True)]
        assert dropped[0] == dropped[1]


@pytest.mark.pairwise
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("groups", "window"), [((FULL,), None), ((FULL, WINDOW), 5), ((FULL, WINDOW), 2), ((WINDOW,), 5)]
)
def test_the_cache_does_what_a_model_that_walks_every_node_does(groups, window, page_size, lookahead):
    """Requests of two tokens that often begin alike come, add pages, slide and go, and pages are evicted between."""
    evicted, hits = 0, 0
    for seed in range(4):
        rng, next_page, leases = random.Random(seed), 1, []
        windows = {group: window if group == WINDOW else None for group in groups}
        caches = PrefixCache(page_size, lookahead, windows), SlowCache(page_size, lookahead, window)
        for _ in range(400):
            act = rng.choice(["open", "insert", "insert", "slide", "close", "evict"])
            if act == "open" and len(leases) < 5:
                ids = [rng.randrange(2) for _ in range(rng.randrange(1, 9 * page_size))]
                leases.append(Lease(caches, ids, groups))
                hits += bool(leases[-1].paths[0])
            elif act == "insert" and leases:
                lease = rng.choice(leases)
                lease.insert(rng.randrange(10), next_page, rng.randrange(1, 10))
                next_page += 10
            elif act == "slide" and leases:
                rng.choice(leases).slide(rng.randrange(4))
            elif act == "close" and leases:
                leases.pop(rng.randrange(len(leases))).close()
            elif act == "evict":
                group = rng.choice(groups)
                if caches[0].num_evictable(group):
                    gone = caches[1].evict(group)
                    evicted += len(gone)
                    assert caches[0].evict(group) == gone
            for group in groups:
                assert caches[0].num_pages(group) == caches[1].num_pages(group)
                assert caches[0].num_evictable(group) == caches[1].num_evictable(group)
            caches[0].check([lease.paths[0] for lease in leases])
    assert evicted > 30
    assert hits > 9


# ---------------------------------------------------------------------------------------------- cost


def lines_run(action) -> int:
    """Lines of the cache's source that an action runs through: its work, without a clock."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename == prefix_cache.__file__ else None)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def insert(cache, ids) -> list:
    """Add all pages of a prompt, as a lease does, and let them go."""
    nodes = cache.extend([], ids, len(ids) // 4)
    for node in nodes:
        for group in (FULL, WINDOW):
            if group not in node.pages:
                cache.fill(node, group, PageId(1))
    cache.unpin(nodes)
    return nodes


def costs(num_pages: int) -> list[int]:
    """Lines that each operation runs through in a cache of so many pages."""
    cache = PrefixCache(4, 1, {FULL: None, WINDOW: 9})
    prompt = 0
    while cache.num_pages(FULL) < num_pages:  # prompts of 40 pages, of which the first 8 are one of ten beginnings
        insert(cache, [*[prompt % 10] * 32, *[1000 + prompt] * 129])
        prompt += 1
    known, new = [*[3] * 32, *[1003] * 129], [*[3] * 32, *[7] * 129]
    path = cache.match(known)
    assert len(path) == 40
    actions = [
        lambda: cache.match(known),
        lambda: insert(cache, new),
        lambda: cache.pin(path),
        lambda: cache.read(path, WINDOW),
        lambda: [cache.leave(node, WINDOW) for node in path],
        lambda: [cache.num_evictable(group) for group in (FULL, WINDOW)],
        lambda: [cache.evict(group) for group in (FULL, WINDOW) for _ in range(20)],
        lambda: cache.unpin(path),
    ]
    return [lines_run(action) for action in actions]


def test_no_operation_costs_more_in_a_large_cache_than_in_a_small_one():
    """Lookup, insertion, pins and eviction run the same lines with 1,000 and with 100,000 cached pages."""
    small = costs(1_000)
    assert small == costs(100_000)
    assert all(0 < cost < 2500 for cost in small)


# ---------------------------------------------------------------------------------------------- the guard


def counts_a_child_too_many(cache, path):
    path[1].num_children += 1


def forgets_a_node(cache, path):
    del cache._nodes[path[1].key]


def lists_what_is_pinned(cache, path):
    cache._unpinned[path[0]] = None


def pins_a_child_above_its_parent(cache, path):
    path[1].pins += 1


def reads_more_than_are_pinned(cache, path):
    cache._loose[WINDOW].readers[path[2]] = 2


def keeps_a_page_in_no_list(cache, path):
    del cache._loose[WINDOW].readers[path[2]]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (counts_a_child_too_many, "counts its children wrongly"),
        (forgets_a_node, "is gone|is not in it|counts"),
        (lists_what_is_pinned, "stands in the wrong list"),
        (pins_a_child_above_its_parent, "1 its parent"),
        (reads_more_than_are_pinned, "of which more read group"),
        (keeps_a_page_in_no_list, "stands in no list or in two"),
    ],
)
def test_the_check_finds_books_that_are_wrong(spoil, says):
    """One thing at a time, in a cache that was sound."""
    cache = PrefixCache(2, 0, {FULL: None, WINDOW: 4})
    path = cache.extend([], (1, 2, 3, 4, 5, 6), 3)
    for page, node in enumerate(path):
        for group in (FULL, WINDOW):
            cache.fill(node, group, PageId(page + 1))
            cache.read([node], group)
    cache.check([path])
    with pytest.raises(OwnershipError, match="1 pins, 0 leases"):
        cache.check([])
    spoil(cache, path)
    with pytest.raises(OwnershipError, match=says):
        cache.check([path])


def test_a_node_with_another_in_its_place_is_found():
    cache = PrefixCache(2, 0, {FULL: None})
    path = cache.extend([], (1, 2, 3, 4), 2)
    cache._nodes[path[1].key] = replace(path[1])
    with pytest.raises(OwnershipError, match="is not in it"):
        cache.check_node(path[1])


def test_a_node_that_is_evicted_before_its_child_is_found():
    cache = PrefixCache(2, 0, {FULL: None})
    path = cache.extend([], (1, 2, 3, 4), 2)
    cache.unpin(path)
    cache.check([])
    cache._unpinned.move_to_end(path[1])
    with pytest.raises(OwnershipError, match="evicted before its child"):
        cache.check([])


# ---------------------------------------------------------------------------------------------- salts


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_salt_finds_its_own_prefix_and_no_other(lookahead):
    """The same tokens under two salts, and under none, are three paths; a salt is no token that could follow a page."""
    cache = PrefixCache(2, lookahead, {FULL: None})
    ids, pages = list(range(9)), iter(range(1, 100))
    paths = {}
    for salt in ("", "a", "b"):
        paths[salt] = cache.extend([], ids, 3, salt)
        for node in paths[salt]:
            cache.fill(node, FULL, PageId(next(pages)))
        cache.unpin(paths[salt])
    for salt, path in paths.items():
        assert cache.match(ids, salt) == path
        assert cache.match([*ids[:5], 77, 78, 79], salt) == path[:2]
    assert cache.match(ids, "c") == []
    assert cache.num_pages(FULL) == 9
    cache.check([])
    while cache.num_evictable(FULL):
        cache.evict(FULL)
    assert cache.match(ids, "a") == []


# ---------------------------------------------------------------------------------------------- who is told


class Told:
    """What a watcher knows of the trie: each node's parent and tokens, by serial number."""

    def __init__(self):
        self.nodes = {}

    def stored(self, parent, serial, page):
        assert serial not in self.nodes
        assert parent == 0 or parent in self.nodes
        self.nodes[serial] = parent, page

    def removed(self, serial):
        del self.nodes[serial]

    def cleared(self):
        self.nodes.clear()


def test_a_watcher_knows_each_node_below_its_parent_until_it_is_dropped():
    cache, told = PrefixCache(2, 0, {FULL: None}), Told()
    cache.watcher = told
    long = cache.extend([], (1, 2, 3, 4, 5, 6), 3)
    fork = cache.extend([], (1, 2, 7, 8), 2)
    serials = [node.serial for node in (*long, fork[1])]
    pages = [told.nodes[serial] for serial in serials]
    assert [parent for parent, _ in pages] == [0, serials[0], serials[1], serials[0]]
    assert [tuple(page) for _, page in pages] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    cache.unpin(fork)
    cache.evict(FULL)
    assert list(told.nodes) == serials[:3]
    cache.unpin(long)
    while cache.num_evictable(FULL):
        cache.evict(FULL)
    assert told.nodes == {}
