"""Prefix hits end to end: requests that arrive at any time give what they give without a cache, windows included."""

import random
from collections import deque
from functools import partial
from unittest.mock import patch

import pytest

from support.engines import accepted, build, greedy, note, pump, sampled, steps, submit
from support.grids import few_of
from support.tiny_models import Pair
from treetop.cache.allocator import Owner
from treetop.debug import two_group
from treetop.types.errors import InvariantError
from treetop.types.ids import FULL, WINDOW
from treetop.types.messages import PrefillPlan, RoundPlan, RowResult, StepResult

SHAPE = (3, 3, 8)
VOCAB = 7


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Pair:
    """A pair of seven tokens, whose head is often right, and half of whose layers see nine positions."""
    small = {"vocab_size": VOCAB}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        return Pair(*two_group.write_two_group_pair(tmp_path_factory.mktemp("windowed"), 9))


@pytest.fixture(params=["whole", "windowed"])
def pair(request, strong_pair, windowed) -> Pair:
    return strong_pair if request.param == "whole" else windowed


def texts(rng, vocab=VOCAB):
    """Fourteen prompts with one of three beginnings, or the whole of one before them and more."""
    stems = [[rng.randrange(vocab) for _ in range(n)] for n in (37, 24, 12)]
    found = []
    for _ in range(14):
        stem = rng.choice([*stems, *found[-3:]])
        found.append([*stem[: rng.choice((60, 60, 20))], *(rng.randrange(vocab) for _ in range(rng.randrange(1, 8)))])
    return found


def arrivals(llm, prompts, params, rng):
    """Submit prompts at random times while others run; integrity is checked after each step. Returns requests, hits."""
    tickets, requests, hits = deque(), [], 0
    waiting = list(zip(prompts, params, strict=True))
    while waiting or tickets or llm.scheduler.has_work:
        while waiting and (rng.random() < 0.15 or not llm.scheduler.has_work):
            prompt, each = waiting.pop(0)
            requests += submit(llm, [prompt], [each])
        while (plan := llm.scheduler.plan()) is not None:
            hits += sum(setup.committed for setup in plan.setups) if isinstance(plan, PrefillPlan) else 0
            tickets.append(llm.engine.launch(plan))
            llm.scheduler.check_integrity()
        in_flight = tickets.popleft()
        updates = llm.scheduler.commit(in_flight.plan, llm.engine.collect(in_flight))
        note(updates)
        assert all(update.error is None for update in updates)
        llm.scheduler.check_integrity()
        llm.scheduler.check_integrity(3)
    return requests, hits


CONTEXT = 128


COLD = {}
"""What `computed` gave, by pair, shape and requests. Cases differ in pages, chunks and overlap too."""


def cold(pair, shape, prompts, params):
    """The same requests in one batch, without a cache and with room for all."""
    key = str((pair, shape, prompts, params))
    if key not in COLD:
        COLD[key] = computed(pair, shape, prompts, params)
    return COLD[key]


def computed(pair, shape, prompts, params):
    rows = {"max_running_requests": len(prompts), "check_level": 0}
    llm = build(pair, shape, context_length=CONTEXT, disable_radix_cache=True, **rows)
    requests = submit(llm, prompts, list(params))
    for _ in pump(llm):
        pass
    return requests


@pytest.mark.parametrize(
    ("shape", "page", "chunk", "overlap"),
    few_of([(SHAPE, 1, 9, True), (SHAPE, 4, 64, False), (SHAPE, 4, 16, True), (None, 2, 7, True)], 2),
)
def test_random_arrivals_give_what_a_cold_engine_gives(pair, shape, page, chunk, overlap):
    """Tokens, finish reasons and every round's accept length; at check level 3 nothing that is not written is read."""
    rng = random.Random(page)
    prompts = texts(rng)
    params = [greedy(16) if i % 3 else sampled(i, 9) for i in range(len(prompts))]
    expected = cold(pair, shape, prompts, params)
    options = {"page_size": page, "chunked_prefill_size": chunk, "max_running_requests": 4, "check_level": 3}
    llm = build(pair, shape, context_length=CONTEXT, overlap=overlap, **options)
    requests, hits = arrivals(llm, prompts, params, rng)
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert [accepted(r) for r in requests] == [accepted(r) for r in expected]
    assert [r.finish_reason for r in requests] == [r.finish_reason for r in expected]
    assert llm.scheduler.num_retractions == 0
    assert hits > 50


@pytest.mark.parametrize(
    ("shape", "page", "chunk", "overlap"), few_of([(SHAPE, 1, 32, False), (SHAPE, 4, 16, True), (None, 1, 32, True)], 1)
)
def test_random_arrivals_in_a_tiny_pool_give_what_a_cold_engine_gives(pair, shape, page, chunk, overlap):
    """Pages are evicted and requests retracted all the time; what is read again from the cache is right."""
    rng = random.Random(5)
    prompts = texts(rng)[:9]
    params = [greedy(40, whole=True) if i % 3 else sampled(i, 30, whole=True) for i in range(len(prompts))]
    expected = cold(pair, shape, prompts, params)
    options = {"page_size": page, "chunked_prefill_size": chunk, "max_running_requests": 4, "check_level": 3}
    llm = build(pair, shape, context_length=CONTEXT, max_total_tokens=144, overlap=overlap, **options)
    requests, hits = arrivals(llm, prompts, params, rng)
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert llm.scheduler.num_retractions > 0
    assert hits > 0


@pytest.mark.parametrize("overlap", few_of([False, True], 1))
@pytest.mark.parametrize("shape", [None, SHAPE])
def test_the_next_request_of_a_burst_hits_while_the_first_one_decodes(pair, shape, overlap):
    """The same long prompt with another end: only what differs is computed, also where a window would be gone."""
    stem = [(5 * i + i * i) % VOCAB for i in range(61)]
    prompts = [[*stem, 3, 4, 5, 6, 1], [*stem, 6, 5, 4, 3, 2, 1, 0]]
    expected = cold(pair, shape, prompts, [greedy(60)] * 2)
    llm = build(pair, shape, page_size=4, chunked_prefill_size=16, context_length=CONTEXT, overlap=overlap)
    first, *_ = requests = submit(llm, prompts[:1], greedy(60))
    start = None
    for plan, _ in pump(llm):
        if len(requests) == 1 and len(first.output_ids) > 20:
            requests += submit(llm, prompts[1:], greedy(60))
        if len(requests) == 2 and isinstance(plan, PrefillPlan) and start is None:
            start = plan.chunks[0].start
            assert first.finish_reason is None
    assert start == 60
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert [accepted(r) for r in requests] == [accepted(r) for r in expected]


def test_requests_with_one_prompt_end_up_with_one_copy_of_its_pages(pair):
    """Two that were prefilled side by side hold the same pages afterwards, and the second copy is free."""
    prompt = [(3 * i + i * i) % VOCAB for i in range(45)]
    llm = build(pair, SHAPE, page_size=4, chunked_prefill_size=128, context_length=CONTEXT)
    requests = submit(llm, [prompt, prompt], greedy(30))
    for plan, _ in steps(llm):
        if isinstance(plan, RoundPlan):
            break
    one, two = (request.running.lease for request in requests)
    assert one.shared == two.shared == 11
    for group in one.pages:
        assert one.pages[group][:11] == two.pages[group][:11]
    for _ in steps(llm):
        pass
    (expected,) = cold(pair, SHAPE, [prompt], [greedy(30)])
    assert [r.output_ids for r in requests] == [expected.output_ids] * 2


def test_what_is_not_finite_or_was_aborted_before_its_result_is_not_cached(pair):
    """A chunk's pages enter the cache with its result, if that is sound and still wanted."""
    llm = build(pair, SHAPE, page_size=4, chunked_prefill_size=64, context_length=CONTEXT)
    for spoil in ("finite", "abort"):
        (request,) = submit(llm, [[1, 2, 3] * 10], greedy(9))
        plan = llm.scheduler.plan()
        assert plan.chunks[0].start == 0
        result = llm.engine.step(plan)
        if spoil == "finite":
            result = StepResult(tuple(RowResult(each.row, (), False) for each in result.rows))
        else:
            llm.scheduler.abort(request.request_id)
        llm.scheduler.commit(plan, result)
        llm.scheduler.check_integrity()
        assert request.finish_reason == "abort"
        assert all(each.num_free == each.total for each in llm.scheduler.rows.kv_cache._allocators.values())


def test_disabling_the_cache_disables_it(pair):
    llm = build(pair, SHAPE, page_size=4, disable_radix_cache=True, context_length=CONTEXT)
    for _ in range(2):
        submit(llm, [[1] * 40], greedy(9))
        starts = [c.start for plan, _ in steps(llm) if isinstance(plan, PrefillPlan) for c in plan.chunks]
        assert starts == [0]
    assert all(each.num_free == each.total for each in llm.scheduler.rows.kv_cache._allocators.values())


# ---------------------------------------------------------------------------------------------- integrity


def lost(llm, lease):
    """A page that belongs to a lease nobody has."""
    llm.scheduler.rows.kv_cache._allocators[FULL].take(1, Owner(99))


def leased_and_free(llm, lease):
    free = llm.scheduler.rows.kv_cache._allocators[FULL]._free
    free.popitem()
    free[lease.pages[FULL][-1]] = None


def evicted_while_read(llm, lease):
    llm.scheduler.rows.kv_cache._radix._nodes.pop(lease.path[-1].key)


def wrong_page(llm, lease):
    lease.pages[WINDOW][-1] = lease.path[-1].pages[WINDOW]


def forgotten(llm, lease):
    node = llm.scheduler.rows.kv_cache._radix.match([1] * 30)[-1]
    del llm.scheduler.rows.kv_cache._radix._unpinned[node]


def uncommitted(llm, lease):
    """More is cached than is committed."""
    next(iter(llm.scheduler.rows.by_row.values())).num_computed_tokens = len(lease.path) * 4 - 1


def unread(llm, lease):
    window = llm.scheduler.rows.kv_cache._radix._loose[WINDOW]
    window.unread[next(iter(window.readers))] = None


DAMAGE = [lost, leased_and_free, evicted_while_read, wrong_page, forgotten, uncommitted, unread]


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_integrity_is_checked_a_few_pages_at_a_time_and_nothing_escapes(windowed, damage, bounded):
    """Calls that look at five pages each find the damage once they have been round; on sound books they are silent."""
    llm = build(windowed, SHAPE, page_size=4, context_length=CONTEXT, max_running_requests=2)
    submit(llm, [[1] * 30], greedy(5))
    for _ in steps(llm):
        pass
    (request,) = submit(llm, [[2, 3] * 9], greedy(40))
    run = steps(llm)
    for _ in range(3):
        next(run)
    check = partial(llm.scheduler.check_integrity, *([5] if bounded else []))
    rounds = range(max(llm.engine.layout.num_pages.values()) // 5 + 2)
    for _ in rounds:
        check()
    damage(llm, request.running.lease)
    with pytest.raises(InvariantError):
        [check() for _ in rounds]
    llm.scheduler.queues.by_id.clear()  # nothing can be given back any more
    llm.scheduler.rows.by_row.clear()


def test_a_bounded_check_looks_at_no_more_pages_than_it_was_asked_to(windowed):
    """The pages whose owner it asks for, in a pool of thousands."""
    llm = build(windowed, SHAPE, page_size=1, context_length=CONTEXT, max_running_requests=16)
    submit(llm, [[1] * 100, [2] * 90], greedy(5))
    for _ in steps(llm):
        pass
    asked = []
    for allocator in llm.scheduler.rows.kv_cache._allocators.values():
        real = allocator.owner_of
        allocator.owner_of = lambda page, real=real: (asked.append(page), real(page))[1]
    llm.scheduler.check_integrity(10)
    assert 10 <= len(asked) <= 10 * len(llm.engine.layout.groups)
