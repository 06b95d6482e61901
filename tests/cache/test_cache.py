"""Pages have one owner at a time, leases end once, and a cached prefix holds what its tokens say."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.engines import accept_lens, accepted, build, finish, greedy, sampled, steps, submit, tokens
from support.grids import few_of
from treetop.cache.allocator import CACHE, FREE, Owner, PageAllocator
from treetop.cache.kv_cache_manager import KVCacheManager
from treetop.cache.prefix_cache import PrefixCache
from treetop.types.errors import OwnershipError
from treetop.types.ids import DRAFT, FULL, NULL_PAGE, WINDOW, PageId
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout
from treetop.types.messages import PrefillPlan

SHAPE = (3, 3, 8)
CHUNK = 6


def make_layout(page_size=2, draft=True, window=None) -> Layout:
    """Groups that run out of pages at different times. A window's pool holds what four requests need, and no more."""
    groups = [KVGroup(FULL, 1, paired(1, 2)), *([KVGroup(DRAFT, 1, paired(1, 2))] if draft else [])]
    if window is not None:
        groups.append(KVGroup(WINDOW, 1, paired(1, 2), window))

    class Uneven(Layout):
        @property
        def num_pages(self):
            pages = super().num_pages
            return {**pages, FULL: 5 + 18 // page_size} | ({DRAFT: 4 + 18 // page_size} if draft else {})

    return Uneven((PLAIN,), page_size, 4, 19, CHUNK, tuple(groups), 1)


# ---------------------------------------------------------------------------------------------- allocator


def test_the_allocator_hands_out_each_page_once_and_never_the_null_page():
    """All pages but 0 can be taken; one more is an error; given back, they can be taken again."""
    allocator = PageAllocator(FULL, 6)
    first = allocator.take(3, Owner(1))
    second = allocator.take(2, Owner(2))
    assert sorted([*first, *second]) == [1, 2, 3, 4, 5]
    with pytest.raises(OwnershipError, match="full"):
        allocator.take(1, Owner(1))
    allocator.give_back(first, Owner(1))
    assert sorted(allocator.take(3, Owner(3))) == sorted(first)
    allocator.check()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a, page: a.give_back([page, page], Owner(1)),
        lambda a, page: a.give_back([page], Owner(2)),
        lambda a, page: a.give_back([PageId(0)], Owner(1)),
        lambda a, page: a.give_back([PageId(99)], Owner(1)),
        lambda a, page: a.transfer(page, Owner(2), CACHE),
        lambda a, page: a.transfer(PageId(3 if page != 3 else 4), Owner(1), CACHE),
        lambda a, page: a.give_back([PageId(-1)], FREE),
    ],
    ids=["twice", "foreign", "null", "outside", "stolen", "free", "negative"],
)
def test_a_page_that_moves_without_its_owner_is_an_error_at_the_call(mistake):
    """A double free, a foreign page, the null page and a page that does not exist are OwnershipErrors."""
    allocator = PageAllocator(FULL, 6)
    (page,) = allocator.take(1, Owner(1))
    with pytest.raises(OwnershipError):
        mistake(allocator, page)


# ---------------------------------------------------------------------------------------------- the ledger


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, grow, fill the cache, slide and go in any order. A model of the memory says what each page holds.

    memory: (group, page) -> the tokens that determine its K/V: all up to the page's end, and one more for the draft.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        draft=st.booleans(),
        radix=st.booleans(),
        window=st.sampled_from([None, 1, 3, 6]),
    )
    def start(self, page_size, draft, radix, window):
        self.page_size, self.lookahead, self.radix = page_size, int(draft), radix
        self.layout = make_layout(page_size, draft, window)
        self.ledger = KVCacheManager(self.layout, radix, check_level=1)
        self.memory = {}
        self.live, self.dead = [], []  # [lease, ids, how many of them are committed]

    def lookahead_of(self, group):
        return self.lookahead if group == DRAFT else 0

    def needed(self, column, group, ids):
        """Tokens that determine a page, or None if `ids` are too few."""
        end = (column + 1) * self.page_size + self.lookahead_of(group)
        return tuple(ids[:end]) if end <= len(ids) else None

    def first_seen(self, group, known):
        window = self.layout.group(group).window
        return 0 if window is None else max(known - window + 1, 0) // self.page_size

    def shares(self, lease, ids, cells):
        """The cells of pages that the cache has, each of which must hold what the request would compute."""
        for group, column, page in cells:
            assert lease.pages[group][column] == page
            if page != NULL_PAGE:
                assert self.memory[group, page] == self.needed(column, group, ids), "a page of other tokens was shared"

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def open(self, ids):
        if len(self.live) == 4:
            return
        lease, cells = self.ledger.open(ids)
        known = lease.shared * self.page_size
        assert lease.shared == 0 or self.radix
        assert known < len(ids), "no token is left to compute"
        expected = [(g, c, pages[c]) for g, pages in lease.pages.items() for c in range(lease.shared)]
        assert sorted(cells) == sorted(expected)
        assert all(page != NULL_PAGE for g, c, page in cells if c >= self.first_seen(g, known)), "too long a hit"
        self.shares(lease, ids, cells)
        self.live.append([lease, ids, known])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(0, CHUNK))
    def reserve(self, data, more):
        lease, ids, known = data.draw(st.sampled_from(self.live))
        num_tokens, end = min(max(len(ids), known + more), 19), min(known + more, 19)
        before = {group: list(pages) for group, pages in lease.pages.items()}
        free = {group: self.count(group, FREE) for group in before}
        last = {g: -(-(num_tokens if g != WINDOW else end) // self.page_size) for g in before}
        columns = {g: range(max(len(before[g]), self.first_seen(g, known)), last[g]) for g in before}
        evictable = {group: self.count(group, CACHE) - len(self.shared(group)) for group in before}
        fits = {group: len(columns[group]) <= free[group] + evictable[group] for group in before}
        cells = self.ledger.reserve(lease, num_tokens, known, end)
        assert (cells is not None) == all(fits.values())
        assert fits.get(WINDOW, True), "a window's pool does not hold the windows of all requests"
        if cells is None:
            assert lease.pages == before
            assert {group: self.count(group, FREE) for group in before} == free, "evicted in vain"
            return
        assert sorted((g, c) for g, c, _ in cells) == sorted((g, c) for g in before for c in columns[g])
        for group, column, page in cells:
            assert lease.pages[group][column] == page
            self.memory[group, page] = ("being written",)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), slide=st.booleans(), insert=st.booleans())
    def compute(self, data, slide, insert):
        """Tokens are committed; their pages may enter the cache, and those behind the window may go."""
        entry = data.draw(st.sampled_from(self.live))
        lease, ids, known = entry
        room = min(len(pages) for pages in lease.pages.values()) * self.page_size
        if room <= known:
            return
        entry[2] = done = data.draw(st.integers(known + 1, room))
        ids += data.draw(
            st.lists(st.integers(0, 1), min_size=max(done - len(ids), 0), max_size=max(done - len(ids), 0))
        )
        self.wrote(lease, ids[:done])
        if insert:
            cells = self.ledger.insert(lease, ids[:done])
            self.shares(lease, ids, cells)
            whole = max((done - self.lookahead) // self.page_size, 0)
            assert lease.shared == (max(whole, lease.shared) if self.radix else 0)
        if slide:
            gone = self.ledger.slide(lease, done)
            assert all(column < self.first_seen(group, done) and page == NULL_PAGE for group, column, page in gone)

    def wrote(self, lease, done):
        for group, pages in lease.pages.items():
            for column, page in enumerate(pages[lease.shared :], start=lease.shared):
                if page != NULL_PAGE:
                    self.memory[group, page] = self.needed(column, group, done)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        lease, ids, known = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        done = ids[:known] if keep else []
        self.ledger.release(lease, done)
        self.dead.append(lease)
        if self.radix and done:
            hit, _ = self.ledger.open([*done, 0])
            whole = (known - self.lookahead) // self.page_size
            windows = [group.window for group in self.layout.groups if group.window is not None]
            assert hit.shared >= whole or windows, "what was just kept is not found"
            self.ledger.release(hit)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def release_again(self, data):
        lease = data.draw(st.sampled_from(self.dead))
        before = {group: self.count(group, FREE) for group in lease.pages}
        self.ledger.release(lease, [0] * 8)
        assert {group: self.count(group, FREE) for group in lease.pages} == before
        with pytest.raises(OwnershipError):
            self.ledger.reserve(lease, 1)

    def count(self, group, owner):
        return len(self.ledger._allocators[group].owned_by(owner))

    def shared(self, group):
        """Pages of the cache that a request reads, or in a group without a window may read."""
        return {p for lease, *_ in self.live for p in lease.pages[group][: lease.shared] if p != NULL_PAGE}

    @invariant()
    def every_page_is_free_or_leased_once_or_cached(self):
        if not hasattr(self, "ledger"):
            return
        leases = [lease for lease, *_ in self.live]
        self.ledger.check(leases)
        self.ledger.check_some(leases, 3)
        for group in self.layout.token_groups:
            own = [page for lease in leases for page in lease.pages[group][lease.shared :] if page != NULL_PAGE]
            assert len(own) == len(set(own)), "a page has two owners"
            shared = self.shared(group)
            assert not shared & set(own)
            assert all(self.ledger._allocators[group].owner_of(page) == CACHE for page in shared), "pinned, but evicted"
            total = self.count(group, FREE) + len(own) + self.count(group, CACHE)
            assert total == self.layout.num_pages[group] - 1

    @invariant()
    def shared_pages_still_hold_their_tokens(self):
        for lease, ids, known in getattr(self, "live", []):
            assert lease.shared * self.page_size <= known, "the cache holds tokens that are not committed"
            for group, pages in lease.pages.items():
                for column, page in enumerate(pages[: lease.shared]):
                    if page != NULL_PAGE:
                        assert self.memory[group, page] == self.needed(column, group, ids)


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


# ---------------------------------------------------------------------------------------------- the radix cache


def keep(cache, ids, pages, groups=(FULL,)) -> list:
    """Insert the pages that hold `ids` and let them go. pages: of each group alike, None where a group has none."""
    nodes = cache.extend([], ids, len(pages))
    for node, row in zip(nodes, pages, strict=False):
        for group, page in zip(groups, row if isinstance(row, tuple) else (row,), strict=True):
            if page is not None and group not in node.pages:
                cache.fill(node, group, PageId(page))
    return cache.unpin(nodes)


@pytest.mark.parametrize(("lookahead", "shared"), [(0, 2), (1, 1)])
def test_a_page_is_reused_only_if_the_token_after_it_agrees_when_there_is_a_draft(lookahead, shared):
    """Eight tokens agree and the ninth differs: two pages of four without a draft, one with it."""
    cache = PrefixCache(4, lookahead, {FULL: None})
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    keep(cache, ids, [1, 2])
    assert len(cache.match([*ids[:8], 99, 100])) == shared
    assert len(cache.match([*ids, 11])) == 2
    assert len(cache.match([1, 2, 3, 4, 5])) == 1
    assert len(cache.match([1, 2, 3, 4])) == 0, "one token must be left to compute"
    assert len(cache.match([9, 2, 3, 4, 5])) == 0


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_pinned_one():
    """Leaves go before their parents, the oldest use first; a pinned path stays."""
    cache = PrefixCache(2, 0, {FULL: None})
    for first, ids in enumerate(([1, 1, 2, 2], [1, 1, 3, 3], [4, 4])):
        keep(cache, ids, [10 * first + 1, 10 * first + 2][: len(ids) // 2])
    assert cache.num_pages(FULL) == 4
    path = cache.match([1, 1, 2, 2, 0])
    cache.pin(path)
    assert cache.num_evictable(FULL) == 2
    assert cache.evict(FULL) == [(FULL, 12)], "not the least recently used leaf"
    assert cache.evict(FULL) == [(FULL, 21)]
    assert cache.num_evictable(FULL) == 0
    assert cache.match([1, 1, 2, 2, 0]) == path
    assert cache.unpin(path) == []
    assert [cache.evict(FULL), cache.evict(FULL)] == [[(FULL, 2)], [(FULL, 1)]], "a parent went before its child"


def test_a_window_needs_its_pages_only_just_before_the_end_of_a_hit():
    """Pages of two, a window of four: the token after n pages sees page n - 1 and the last token of page n - 2."""
    cache, ids = PrefixCache(2, 0, {FULL: None, WINDOW: 4}), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    keep(cache, ids, [(1, None), (2, None), (3, 23), (4, 24), (5, 25)], (FULL, WINDOW))
    assert len(cache.match([*ids, 0])) == 5, "what lies behind the window is not needed"
    assert len(cache.match([*ids[:8], 0])) == 4
    assert len(cache.match([*ids[:6], 0])) == 0, "page 1 is missing, which the token after page 2 sees"
    assert cache.evict(WINDOW) == [(WINDOW, 23)]
    assert len(cache.match([*ids, 0])) == 5
    assert len(cache.match([*ids[:8], 0])) == 0
    assert (cache.num_pages(FULL), cache.num_pages(WINDOW)) == (5, 2)
    assert cache.evict(WINDOW) == [(WINDOW, 24)]
    assert len(cache.match([*ids, 0])) == 0
    gone = [(WINDOW, 25), (FULL, 5), (FULL, 4), (FULL, 3), (FULL, 2), (FULL, 1)]
    assert cache.evict(WINDOW) == gone, "no hit can end at any of these any more"


def test_a_window_page_that_somebody_reads_stays_and_one_that_was_left_may_go():
    """A lease that has slid past a page pins the node, not the window's page; a later request may bring it back."""
    cache, ids = PrefixCache(2, 0, {FULL: None, WINDOW: 4}), [1, 2, 3, 4, 5, 6, 7]
    keep(cache, ids, [(1, 21), (2, 22), (3, 23)], (FULL, WINDOW))
    path = cache.match(ids)
    cache.pin(path)
    assert cache.read(path[1:], WINDOW) == [22, 23]
    assert cache.num_evictable(WINDOW) == 1
    assert cache.evict(WINDOW) == [(WINDOW, 21)]
    cache.leave(path[1], WINDOW)
    assert cache.evict(WINDOW) == [(WINDOW, 22)]
    assert cache.num_evictable(WINDOW) == cache.num_evictable(FULL) == 0
    assert cache.match(ids) == []
    cache.fill(path[1], WINDOW, PageId(32))
    assert cache.match(ids) == path


# ---------------------------------------------------------------------------------------------- end to end


def starts(llm, prompts, params):
    """Run requests one after another; the position at which each one's first prefill chunk began."""
    found = []
    for prompt, each in zip(prompts, params, strict=True):
        request = submit(llm, [prompt], [each])
        plan, _ = next(run := steps(llm))
        assert isinstance(plan, PrefillPlan)
        found.append((plan.chunks[0].start, request[0]))
        for _ in run:
            pass
    return [start for start, _ in found], [request for _, request in found]


@pytest.mark.parametrize(
    ("shape", "page", "chunk"), few_of([(None, 4, 512), (SHAPE, 1, 512), (SHAPE, 4, 5), ((4, 5, 16), 16, 512)], 0, 2)
)
def test_a_cached_prefix_changes_neither_tokens_nor_accept_lengths(strong_pair, shape, page, chunk):
    """A repeated prompt, a continued conversation and a branch hit the cache and give what they give without it."""
    base = strong_pair.prompts([41], seed=4)[0]
    other = [(token + 1) % 12 for token in base[33:]]
    (answer,) = tokens(build(strong_pair, None).generate([base], greedy(12, whole=True)))
    prompts = [base, base, [*base, *answer, 5, 6], [*base[:33], *other], [*base, *answer, 5, 6, 7]]
    params = [
        greedy(12, whole=True),
        sampled(1, 20, whole=True),
        greedy(20, whole=True),
        greedy(20, whole=True),
        sampled(2, 20, whole=True),
    ]
    options = {"page_size": page, "chunked_prefill_size": chunk}
    _, cold = starts(build(strong_pair, shape, disable_radix_cache=True, **options), prompts, params)
    llm = build(strong_pair, shape, **options)
    began, warm = starts(llm, prompts, params)
    assert [r.output_ids for r in warm] == [r.output_ids for r in cold]
    assert [accepted(r) for r in warm] == [accepted(r) for r in cold]
    lookahead = int(shape is not None)
    assert began[0] == 0
    assert began[1] == 40 // page * page
    assert began[2] >= (41 + 11 - lookahead) // page * page
    assert began[3] == (33 - lookahead) // page * page
    assert began[4] >= (41 + 12 + 1 - lookahead) // page * page - page
    llm.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("shape", few_of([None, SHAPE], 1))
def test_a_path_past_the_stop_is_not_cached(strong_pair, shape):
    """After a stop inside an accepted chain the cache holds what the client received: a continuation is exact."""
    prompt = strong_pair.prompts([10])[0]
    (free,) = tokens(build(strong_pair, None).generate([prompt], sampled(4, 30)))
    llm, cold = build(strong_pair, shape, page_size=1), build(strong_pair, shape, page_size=1, disable_radix_cache=True)
    for token in sorted(set(free)):
        (output,) = llm.generate([prompt], sampled(4, 30, stop_token_ids=(token,)))
        follow = [*prompt, *output.token_ids, (token + 1) % 12, 7]
        expected = cold.generate([follow], greedy(15))
        warm = llm.generate([follow], greedy(15))
        assert tokens(warm) == tokens(expected)
        assert accept_lens(warm) == accept_lens(expected)
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("shape", few_of([None, SHAPE], 1))
def test_eviction_under_pressure_does_not_change_the_tokens(strong_pair, shape):
    """Far more prompts than the pool holds, many of which share beginnings, in a batch, twice."""
    stems = strong_pair.prompts([24, 24, 24], seed=6)
    prompts = [[*stems[i % 3], *tail] for i, tail in enumerate(strong_pair.prompts(range(1, 13), seed=7))]
    expected = build(strong_pair, None, context_length=96).generate(prompts, greedy(25))
    llm = build(strong_pair, shape, context_length=96, max_total_tokens=160, page_size=4)
    for _ in range(2):
        requests = submit(llm, prompts, greedy(25))
        finish(llm)
        assert [tuple(request.output_ids) for request in requests] == tokens(expected)


def test_requests_of_one_batch_share_what_a_finished_one_left(strong_pair):
    """Two requests read the same pinned pages at once, and neither frees them under the other."""
    prompt = strong_pair.prompts([40])[0]
    llm = build(strong_pair, SHAPE, page_size=4)
    (first,) = llm.generate([prompt], greedy(30, whole=True))
    requests = submit(llm, [prompt, prompt, prompt], [greedy(4), greedy(30, whole=True), greedy(17, whole=True)])
    plan, _ = next(run := steps(llm))
    assert {chunk.start for chunk in plan.chunks} == {36}
    for _ in run:
        pass
    assert [tuple(r.output_ids) for r in requests] == [first.token_ids[:n] for n in (4, 30, 17)]
