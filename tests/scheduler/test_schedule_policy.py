"""Who runs when: nobody starves, priorities, deadlines, and prompts that let others decode between their chunks."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_core import ask, collected, drained, make_core
from treetop.scheduler.request import MAX_RETRACTIONS
from treetop.types.layout import PrefillCosts
from treetop.types.messages import PrefillPlan


def counted(prompt, count) -> list[int]:
    return [prompt[-1] + 1 + i for i in range(count)]


def admitted(core, limit=1000) -> list[int]:
    """Ids in the order in which they get their first token."""
    seen = []
    for update in drained(core, limit):
        if update.num_cached_tokens is not None:
            seen.append(update.request_id)
    return seen


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=10),
    pages=st.integers(26, 60),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 48),
    max_in_flight=st.integers(1, 2),
    radix=st.booleans(),
    priorities=st.lists(st.integers(-1, 1), min_size=10, max_size=10),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_nobody_is_put_back_without_end(lengths, pages, rows, chunk, *, max_in_flight, radix, priorities, policy):
    """In any pool that holds one request, all end, with their tokens, and none is retracted more often than allowed."""
    core = make_core(
        rows=rows,
        max_in_flight=max_in_flight,
        chunk=chunk,
        context=96,
        pages=pages,
        disable_radix_cache=not radix,
        schedule_policy=policy,
    )
    prompts = [[1000 * i + j for j in range(length)] for i, (length, _) in enumerate(lengths, 1)]
    for number, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True)):
        core.add(ask(number, prompt, max_tokens=count, priority=priorities[number]))
    updates, idle = [], 0
    while core.busy:
        before = core.num_launched
        updates += core.step()
        core.scheduler.check_integrity()
        idle = 0 if core.num_launched > before or core.scheduler.steps else idle + 1
        assert idle < 3, "work is left, but nothing is planned"
    ids, last = collected(updates)
    for number, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True)):
        assert ids[number] == counted(prompt, min(count, 96 - len(prompt)))
        assert last[number].stats.num_retractions <= MAX_RETRACTIONS
    assert core.scheduler.load.kv_usage == 0


def test_retraction_happens_and_its_bound_is_reached():
    """The test above says nothing where pages are plenty: here twelve long requests share pages for two."""
    core = make_core(rows=12, context=96, pages=52, chunk=16)
    for number in range(12):
        core.add(ask(number, [100 * number], max_tokens=90))
    _, last = collected(drained(core))
    most = [update.stats.num_retractions for _, update in sorted(last.items())]
    assert max(most) == MAX_RETRACTIONS
    assert most[0] == 0, "the oldest is never put back"


def test_requests_are_served_as_they_come_or_by_priority():
    """Lower first, then by arrival; without the policy priorities do not count in the scheduler."""
    for policy, want in (("fcfs", [0, 1, 2, 3, 4]), ("priority", [3, 1, 4, 0, 2])):
        core = make_core(rows=1, schedule_policy=policy)
        for number, priority in enumerate((5, -1, 7, -2, 0)):
            core.add(ask(number, [10 * number], priority=priority))
        assert admitted(core) == want


def test_the_lowest_priority_gives_way_when_pages_run_short():
    core = make_core(rows=2, context=96, pages=26, chunk=16, schedule_policy="priority")
    core.add(ask(0, [100], max_tokens=90, priority=3))
    core.step()
    core.add(ask(1, [200], max_tokens=90, priority=1))
    _, last = collected(drained(core))
    assert last[0].stats.num_retractions > 0
    assert last[1].stats.num_retractions == 0
    assert last[1].stats.end_s <= last[0].stats.end_s


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_request_ends_when_its_time_is_over_wherever_it_stands(max_in_flight):
    """Decoding, prefilling, waiting: each is told why, keeps what it has, and leaves nothing behind."""
    clock = Clock()
    core = make_core(rows=2, chunk=4, clock=clock, max_in_flight=max_in_flight, prefill_tokens_per_round=4)
    core.add(ask(0, [10], max_tokens=400, timeout_s=5))
    early = [update for _ in range(4) for update in core.step()]
    core.add(ask(1, list(range(100, 300)), timeout_s=5))
    core.add(ask(2, [30], timeout_s=4))
    core.add(ask(3, [40]))
    early += [update for _ in range(4) for update in core.step()]
    assert not any(update.finish_reason for update in early)
    clock.now += 4.5
    early += core.step()
    assert [update.request_id for update in early if update.finish_reason] == [2]
    clock.now += 1
    ids, last = collected([*early, *drained(core)])
    assert [last[number].timed_out for number in range(4)] == [True, True, True, False]
    assert all("request timed out" in last[number].error for number in range(3))
    assert 4 < len(ids[0]) < 400
    assert ids[0] == counted([10], len(ids[0]))
    assert ids[3] == counted([40], 20)
    core.scheduler.check_integrity()
    assert core.scheduler.load.kv_usage == 0


def test_a_clock_that_jumps_ends_no_request_without_a_deadline_and_hangs_none():
    """Forward, those with a deadline end at once; backward, they have longer. Tokens stay as they are."""
    for jump, ends in ((10**9, True), (-(10**9), False)):
        clock = Clock()
        core = make_core(rows=4, clock=clock)
        core.add(ask(0, [10], timeout_s=60))
        core.add(ask(1, [50]))
        updates = core.step()
        clock.now += jump
        ids, last = collected([*updates, *drained(core)])
        assert last[0].timed_out == ends
        assert ids[1] == counted([50], 20)
        assert ids[0] == counted([10], len(ids[0]))


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    core = make_core()
    for number in range(2000):
        core.add(ask(number, [10], max_tokens=1, timeout_s=10**6))
        for _ in drained(core):
            pass
    assert len(core.scheduler._deadlines) < 100


@pytest.mark.parametrize(("budget", "chunk", "most"), [(8, 64, 8), (None, 64, 64), (500, 32, 32)])
def test_a_prompt_lets_others_decode_between_small_chunks(budget, chunk, most):
    """While requests decode, a step takes no more than `prefill_tokens_per_round`, padding counted; alone it takes the
    whole chunk.

    Between two such steps runs a round.
    """
    core = make_core(rows=4, chunk=chunk, prefill_tokens_per_round=budget)
    core.add(ask(0, [10], max_tokens=300))
    core.step()
    for number, length in enumerate((200, 3, 60, 5), 1):
        core.add(ask(number, [1000 * number + i for i in range(length)], max_tokens=2))
    kinds, sizes = [], []
    while any(number in core.scheduler.queues.by_id for number in range(1, 5)):
        plan = core.scheduler.plan()
        kinds.append(isinstance(plan, PrefillPlan))
        if kinds[-1]:
            widest = max(len(each.token_ids) for each in plan.chunks)
            sizes.append(widest * core.scheduler._layout.bucket_for(len(plan.chunks)))
        core.scheduler.commit(plan, core.engine.collect(plan))
    assert most * 3 // 4 <= max(sizes) <= most  # a prompt is cut into about equal parts
    assert not any(first and second for first, second in pairwise(kinds))
    alone = make_core(rows=4, chunk=chunk, prefill_tokens_per_round=budget)
    alone.add(ask(0, list(range(500))))
    assert len(alone.scheduler.plan().chunks[0].token_ids) == chunk


def test_a_step_beside_a_round_takes_less_the_more_it_attends_to():
    """Down to a page; each part of a prompt is about equal to the others that would follow; all tokens come."""
    prefill_costs = PrefillCosts(minimum=20, usual=20, attended=50)
    core = make_core(
        rows=8, chunk=400, context=1000, pages=4000, prefill_costs=prefill_costs, prefill_tokens_per_round=30
    )
    core.add(ask(0, [10], max_tokens=900))
    core.step()
    core.add(ask(9, list(range(400)), max_tokens=2))
    seen = {}
    while 9 in core.scheduler.queues.by_id:
        plan = core.scheduler.plan()
        if isinstance(plan, PrefillPlan):
            seen.update({chunk.start: len(chunk.token_ids) for chunk in plan.chunks})
        core.scheduler.commit(plan, core.engine.collect(plan))
    starts = sorted(seen)
    assert [start + seen[start] for start in starts] == [*starts[1:], 400]
    for start in starts:
        room, rest = max(30 * 50 // (50 + start), 4), 400 - start
        assert seen[start] == math.ceil(rest / math.ceil(rest / room))
    assert 3 <= seen[starts[-2]] <= 4  # a page, which more than a fifth of this prompt would make less


def test_cached_tokens_count_as_attended_to():
    """A prompt whose beginning is cached is admitted with the chunk that its place allows."""
    prefill_costs = PrefillCosts(minimum=1, usual=1, attended=50)
    core = make_core(
        rows=4, chunk=400, context=1000, pages=4000, prefill_costs=prefill_costs, prefill_tokens_per_round=40
    )
    core.add(ask(0, list(range(201)), max_tokens=1))
    while core.busy:
        core.step()
    core.add(ask(1, [7], max_tokens=900))
    core.step()
    core.add(ask(2, [*range(201), *range(500, 600)], max_tokens=2))
    plan = core.scheduler.plan()
    while not isinstance(plan, PrefillPlan):
        core.scheduler.commit(plan, core.engine.collect(plan))
        plan = core.scheduler.plan()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(200, 40 * 50 // 250)]
