"""Pages have one owner at a time, leases end once, and a cached prefix holds what its tokens say."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines import accept_lens, accepted, build, finish, greedy, sampled, steps, submit, tokens
from treetop.cache.allocator import CACHE, FREE, Owner, PageAllocator
from treetop.cache.ledger import LedgerRules, PageLedger
from treetop.cache.radix import RadixCache
from treetop.engine.pure import pages_to_free, shared_groups
from treetop.types.errors import OwnershipError
from treetop.types.ids import DRAFT, FULL, PageId
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout
from treetop.types.messages import PrefillPlan

SHAPE = (3, 3, 8)


def make_layout(page_size=2, draft=True, full_pages=14, draft_pages=12) -> Layout:
    groups = tuple(KVGroup(name, 1, paired(1, 2)) for name in ((FULL, DRAFT) if draft else (FULL,)))

    class Uneven(Layout):
        """Groups run out of pages at different times."""

        @property
        def num_pages(self):
            return {FULL: full_pages, DRAFT: draft_pages} if draft else {FULL: full_pages}

    return Uneven((PLAIN,), page_size, 4, 19, 8, groups, 1)


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
    """Requests come, grow and go in any order. A model of the memory says what each page holds.

    memory: (group, page) -> the tokens that determine its K/V: all up to the page's end, and one more for the draft.
    """

    @initialize(page_size=st.sampled_from([1, 2, 4]), draft=st.booleans(), radix=st.booleans())
    def start(self, page_size, draft, radix):
        self.page_size, self.lookahead, self.radix = page_size, int(draft), radix
        self.layout = make_layout(page_size, draft, 5 + 18 // page_size, 4 + 18 // page_size)
        self.ledger = PageLedger(self.layout, radix, LedgerRules(pages_to_free, shared_groups), check_level=1)
        self.memory, self.cached = {}, {}
        self.live, self.dead = [], []  # (lease, ids)

    def lookahead_of(self, group):
        return self.lookahead if group == DRAFT else 0

    def needed(self, column, group, ids):
        """Tokens that determine a page, or None if `ids` are too few."""
        end = (column + 1) * self.page_size + self.lookahead_of(group)
        return tuple(ids[:end]) if end <= len(ids) else None

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def open(self, ids):
        if len(self.live) == 4:
            return
        lease, cells = self.ledger.open(ids)
        assert lease.shared == 0 or self.radix
        assert lease.shared * self.page_size < len(ids), "no token is left to compute"
        expected = [(g, c, pages[c]) for g, pages in lease.pages.items() for c in range(lease.shared)]
        assert sorted(cells) == sorted(expected)
        for group, column, page in cells:
            assert self.memory[group, page] == self.needed(column, group, ids), "a page of other tokens was shared"
        self.live.append((lease, ids))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(0, 19))
    def reserve(self, data, num_tokens):
        lease, _ = data.draw(st.sampled_from(self.live))
        before = {group: list(pages) for group, pages in lease.pages.items()}
        free = {group: self.count(group, FREE) for group in before}
        evictable = {group: self.count(group, CACHE) - len(self.pinned(group)) for group in before}
        columns = -(-num_tokens // self.page_size)
        need = {group: max(columns - len(pages), 0) for group, pages in before.items()}
        fits = all(need[group] <= free[group] + evictable[group] for group in before)
        cells = self.ledger.reserve(lease, num_tokens)
        assert (cells is not None) == fits
        if cells is None:
            assert lease.pages == before
            assert {group: self.count(group, FREE) for group in before} == free, "evicted in vain"
            return
        assert {group: len(pages) for group, pages in lease.pages.items()} == {
            group: max(columns, len(before[group])) for group in before
        }
        for group, column, page in cells:
            assert column >= len(before[group])
            assert lease.pages[group][column] == page
            self.memory[group, page] = ("being written",)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.live) - 1))
        lease, prompt = self.live.pop(index)
        room = min(len(pages) for pages in lease.pages.values()) * self.page_size
        done = (prompt + data.draw(st.lists(st.integers(0, 1), max_size=6)))[: data.draw(st.integers(0, room))]
        if len(done) < lease.shared * self.page_size:
            done = []
        for group, pages in lease.pages.items():
            for column, page in enumerate(pages[lease.shared :], start=lease.shared):
                self.memory[group, page] = self.needed(column, group, done)
        self.ledger.release(lease, done)
        self.dead.append(lease)
        if self.radix and done:
            hit, _ = self.ledger.open([*done, 0])
            whole = (len(done) - self.lookahead) // self.page_size
            assert hit.shared >= whole, "what was just kept is not found"
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

    def pinned(self, group):
        return {page for lease, _ in self.live for page in lease.pages[group][: lease.shared]}

    @invariant()
    def every_page_is_free_or_leased_once_or_cached(self):
        if not hasattr(self, "ledger"):
            return
        self.ledger.check([lease for lease, _ in self.live])
        for group in self.layout.token_groups:
            own = [page for lease, _ in self.live for page in lease.pages[group][lease.shared :]]
            assert len(own) == len(set(own)), "a page has two owners"
            assert 0 not in own
            shared = self.pinned(group)
            assert not shared & set(own)
            assert all(self.ledger._allocators[group].owner_of(page) == CACHE for page in shared), "pinned, but evicted"
            total = self.count(group, FREE) + len(own) + self.count(group, CACHE)
            assert total == self.layout.num_pages[group] - 1

    @invariant()
    def shared_pages_still_hold_their_tokens(self):
        for lease, ids in getattr(self, "live", []):
            for group, pages in lease.pages.items():
                for column, page in enumerate(pages[: lease.shared]):
                    assert self.memory[group, page] == self.needed(column, group, ids)


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


# ---------------------------------------------------------------------------------------------- the radix cache


@pytest.mark.parametrize(("lookahead", "shared"), [(0, 2), (1, 1)])
def test_a_page_is_reused_only_if_the_token_after_it_agrees_when_there_is_a_draft(lookahead, shared):
    """Eight tokens agree and the ninth differs: two pages of four without a draft, one with it."""
    cache = RadixCache(4, lookahead)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    cache.insert(ids, [{FULL: PageId(1)}, {FULL: PageId(2)}])
    assert len(cache.match([*ids[:8], 99, 100])) == shared
    assert len(cache.match([*ids, 11])) == 2
    assert len(cache.match([1, 2, 3, 4, 5])) == 1
    assert len(cache.match([1, 2, 3, 4])) == 0, "one token must be left to compute"
    assert len(cache.match([9, 2, 3, 4, 5])) == 0


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_pinned_one():
    """Leaves go before their parents, the oldest use first; a pinned path stays."""
    cache = RadixCache(2, 0)
    for first, ids in enumerate(([1, 1, 2, 2], [1, 1, 3, 3], [4, 4])):
        cache.insert(ids, [{FULL: PageId(10 * first + 1)}, {FULL: PageId(10 * first + 2)}][: len(ids) // 2])
    assert cache.num_pages == 4
    path = cache.match([1, 1, 2, 2, 0])
    cache.pin(path)
    assert cache.num_evictable == 2
    assert [pages[FULL] for pages in cache.evict(1)] == [12], "not the least recently used leaf"
    assert [pages[FULL] for pages in cache.evict(5)] == [21]
    assert cache.match([1, 1, 2, 2, 0]) == path
    cache.unpin(path)
    assert [pages[FULL] for pages in cache.evict(5)] == [2, 1], "a parent went before its child"


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
    ("shape", "page", "chunk"), [(None, 4, 512), (SHAPE, 1, 512), (SHAPE, 4, 5), ((4, 5, 16), 16, 512)]
)
def test_a_cached_prefix_changes_neither_tokens_nor_accept_lengths(strong_pair, shape, page, chunk):
    """A repeated prompt, a continued conversation and a branch hit the cache and give what they give without it."""
    base = strong_pair.prompts([41], seed=4)[0]
    other = [(token + 1) % 12 for token in base[33:]]
    (answer,) = tokens(build(strong_pair, None).generate([base], greedy(12)))
    prompts = [base, base, [*base, *answer, 5, 6], [*base[:33], *other], [*base, *answer, 5, 6, 7]]
    params = [greedy(12), sampled(1, 20), greedy(20), greedy(20), sampled(2, 20)]
    options = {"page_size": page, "chunked_prefill_size": chunk}
    _, cold = starts(build(strong_pair, shape, **options), prompts, params)
    llm = build(strong_pair, shape, radix_cache=True, **options)
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


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_a_path_past_the_stop_is_not_cached(strong_pair, shape):
    """After a stop inside an accepted chain the cache holds what the client received: a continuation is exact."""
    prompt = strong_pair.prompts([10])[0]
    (free,) = tokens(build(strong_pair, None).generate([prompt], sampled(4, 30)))
    llm = build(strong_pair, shape, radix_cache=True, page_size=1)
    for token in sorted(set(free)):
        (output,) = llm.generate([prompt], sampled(4, 30, stop_token_ids=(token,)))
        follow = [*prompt, *output.token_ids, (token + 1) % 12, 7]
        expected = build(strong_pair, shape, page_size=1).generate([follow], greedy(15))
        warm = llm.generate([follow], greedy(15))
        assert tokens(warm) == tokens(expected)
        assert accept_lens(warm) == accept_lens(expected)
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_eviction_under_pressure_does_not_change_the_tokens(strong_pair, shape):
    """Far more prompts than the pool holds, many of which share beginnings, in a batch, twice."""
    stems = strong_pair.prompts([24, 24, 24], seed=6)
    prompts = [[*stems[i % 3], *tail] for i, tail in enumerate(strong_pair.prompts(range(1, 13), seed=7))]
    expected = build(strong_pair, None, context_length=96).generate(prompts, greedy(25))
    llm = build(strong_pair, shape, context_length=96, max_total_tokens=160, page_size=4, radix_cache=True)
    for _ in range(2):
        requests = submit(llm, prompts, greedy(25))
        finish(llm)
        assert [tuple(request.output_ids) for request in requests] == tokens(expected)


def test_requests_of_one_batch_share_what_a_finished_one_left(strong_pair):
    """Two requests read the same pinned pages at once, and neither frees them under the other."""
    prompt = strong_pair.prompts([40])[0]
    llm = build(strong_pair, SHAPE, radix_cache=True, page_size=4)
    (first,) = llm.generate([prompt], greedy(30))
    requests = submit(llm, [prompt, prompt, prompt], [greedy(4), greedy(30), greedy(17)])
    plan, _ = next(run := steps(llm))
    assert {chunk.start for chunk in plan.chunks} == {36}
    for _ in run:
        pass
    assert [tuple(r.output_ids) for r in requests] == [first.token_ids[:n] for n in (4, 30, 17)]
