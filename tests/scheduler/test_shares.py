"""Fair shares: one request's choices, or one key's requests, never keep rows that others wait for."""

import random
from collections import Counter

import pytest

from support.fake_core import CountingEngine, PagedEngine, ask, collected, drained, make_core
from treetop.core.engine_core import EngineCore
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.messages import MixedPlan, StepResult, parts_of_plan
from treetop.types.requests import EngineRequest, Tenant


def choices(first: int, count: int, tenant: str = "", max_rows: int | None = None, **options) -> list[EngineRequest]:
    """The choices of one request, whose ids begin with `first`."""
    group, whose = RequestId(first), Tenant(tenant, max_rows)
    return [ask(first + i, [first], **options)._replace(group=group, tenant=whose) for i in range(count)]


def give(core, requests) -> None:
    for each in requests:
        core.add(each)


def rows_of(core, key) -> Counter:
    """Rows by what `key` says of the requests that hold them."""
    return Counter(key(request) for request in core.scheduler.rows.by_row.values())


def until(core, what, limit=200) -> int:
    """Steps until something holds; the books are checked after each."""
    for count in range(limit):
        if what():
            return count
        core.step()
        core.scheduler.check_integrity()
    raise AssertionError("it never came to be")


def first_tokens(core, ids, limit=200) -> int:
    """Steps until each of these requests has a first token."""
    seen, count = set(), 0
    while not set(ids) <= seen:
        seen |= {update.request_id for update in core.step() if update.new_ids}
        count += 1
        assert count < limit
    return count


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_request_of_many_choices_makes_no_stream_wait(max_in_flight):
    """128 choices have all rows while they are alone; new streams have theirs within some steps, and everybody gets
    what it gets alone."""
    core = make_core(PagedEngine, rows=8, max_in_flight=max_in_flight)
    give(core, choices(1000, 128, max_tokens=60))
    until(core, lambda: rows_of(core, lambda each: each.group) == {1000: 8})
    give(core, [ask(number, [5], max_tokens=9) for number in range(4)])
    assert first_tokens(core, range(4)) < 16
    assert core.load.num_gave_way == 4
    ids, last = collected(drained(core))
    assert len(last) == 132
    assert all(each.finish_reason == "length" for each in last.values())
    for number in range(1030, 1128):  # those that had no token yet
        assert ids[number] == [*range(1001, 1061)]
    core.scheduler.check_integrity()


def test_streams_before_many_choices_keep_their_rows():
    """Who holds one row gives none way, and choices come in where a row is free."""
    core = make_core(rows=4)
    give(core, [ask(number, [5], max_tokens=40) for number in range(3)])
    until(core, lambda: len(core.scheduler.rows.by_row) == 3)
    give(core, choices(100, 9))
    updates = list(drained(core))
    assert core.load.num_gave_way == 0
    assert len(collected(updates)[1]) == 12


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_keys_share_rows_whatever_each_of_them_asks(max_in_flight):
    """One key's 40 requests leave half of the rows to another's, and a third to each of three; a key that waits alone
    has them all again."""
    core = make_core(PagedEngine, rows=6, max_in_flight=max_in_flight)
    name = lambda each: each.tenant.name  # noqa: E731
    give(core, [each for i in range(40) for each in choices(1000 + i, 1, "a", max_tokens=200)])
    until(core, lambda: rows_of(core, name) == {"a": 6})
    give(core, choices(2000, 20, "b", max_tokens=150))
    until(core, lambda: rows_of(core, name) == {"a": 3, "b": 3})
    give(core, [each for i in range(2) for each in choices(3000 + i, 1, "c", max_tokens=100)])
    until(core, lambda: rows_of(core, name) == {"a": 2, "b": 2, "c": 2})
    ids, last = collected(drained(core, 100_000))
    assert len(last) == 62
    assert all(each.finish_reason == "length" and each.error is None for each in last.values())
    assert ids[1039] == [*range(1040, 1240)]


def test_a_key_never_has_more_rows_than_it_may():
    """Also where nobody else waits; and those behind it in the queue are not held up."""
    core = make_core(rows=4)
    most = []
    give(core, [each for i in range(9) for each in choices(100 + i, 1, "few", 2, max_tokens=30)])
    give(core, [ask(number, [5]) for number in range(2)])
    while core.busy:
        core.step()
        most.append(rows_of(core, lambda each: each.tenant.name)["few"])
    assert max(most) == 2
    assert core.load.num_gave_way == 0


def test_pages_are_no_way_around_a_share():
    """A stream that finds a row and no pages gets those of choices that hold more than it."""
    core = make_core(PagedEngine, rows=8, pages=64, context=128)
    give(core, choices(1000, 32, max_tokens=100))
    until(core, lambda: len(core.scheduler.queues.decoding) >= 2 and core.scheduler.rows.kv_cache.usage > 0.9)
    give(core, [ask(1, range(2, 60), max_tokens=9)])
    assert first_tokens(core, [1]) < 30
    assert len(collected(drained(core, 100_000))[1]) >= 32


def test_an_urgent_request_gives_no_row_to_another():
    """Shares are equal among requests of one priority; those less urgent give way first of all."""
    core = make_core(rows=4, schedule_policy="priority")
    give(core, choices(100, 8, priority=-1, max_tokens=30))
    until(core, lambda: len(core.scheduler.rows.by_row) == 4)
    give(core, [ask(1, [5], priority=0)])
    for _ in range(4):
        core.step()
        assert rows_of(core, lambda each: each.group) == {100: 4}
    assert core.load.num_gave_way == 0
    list(drained(core))


def test_who_comes_next_takes_no_time_that_grows_with_choices_of_one():
    """A step looks at few of 4,000 choices that wait."""
    core = make_core(rows=4, max_in_flight=1)
    give(core, choices(10_000, 4000, max_tokens=400))
    until(core, lambda: len(core.scheduler.rows.by_row) == 4)
    looked = 0

    class Counted(list):
        def __iter__(self):
            nonlocal looked
            for each in super().__iter__():
                looked += 1
                yield each

    queues = core.scheduler.queues
    queues.waiting, queues.waiting_of = Counted(queues.waiting), {"": Counted(queues.waiting_of[""])}
    for _ in range(10):
        core.step()
    assert looked <= 40


@pytest.mark.parametrize("seed", range(4))
def test_random_keys_and_choices_get_what_they_get_alone(seed):
    """Random requests of four keys, some of many choices, that come and go at random: each receives the tokens after
    its prompt, once; and in the end nobody holds anything."""
    draw = random.Random(seed)
    core = make_core(PagedEngine, rows=draw.choice((2, 5, 8)), max_in_flight=draw.choice((1, 2)), pages=96, context=64)
    asked, alive, updates, number = {}, set(), [], 0
    for _ in range(300):
        if draw.random() < 0.15:
            tenant, rows = draw.choice((("", None), ("a", None), ("b", 1), ("c", 3)))
            new = choices(number, draw.choice((1, 1, 3, 12)), tenant, rows, max_tokens=draw.randint(1, 30))
            number += 100
            asked |= {each.request_id: each for each in new}
            alive |= {each.request_id for each in new}
            give(core, new)
        if alive and draw.random() < 0.05:
            gone = draw.choice(sorted(alive))
            alive.discard(gone)
            update = core.abort(gone)
            updates += [update] if update is not None else []
        updates += core.step()
        core.scheduler.check_integrity()
    ids, last = collected([*updates, *drained(core, 100_000)])
    for request_id, each in asked.items():
        got = ids.get(request_id, [])
        first = each.prompt_ids[-1] + 1
        assert got == [*range(first, first + len(got))]
        assert last[request_id].finish_reason == "abort" or len(got) == each.params.max_tokens
    assert not core.scheduler.rows.tally.groups
    assert not core.scheduler.queues.waiting_tally.tenants
    core.scheduler.check_integrity()


def test_a_salt_is_kept_from_a_row_to_the_next():
    """A request finds what its salt has left, before and after it was put back, and nothing of another salt."""
    core = make_core(PagedEngine, rows=1, context=64)

    def cached(number: int, salt: str) -> int | None:
        core.add(ask(number, range(2, 42), max_tokens=4)._replace(cache_salt=salt))
        return collected(drained(core))[1][number].stats.num_cached_tokens

    assert [cached(i, salt) for i, salt in enumerate(("", "a", "a", "b", ""))] == [0, 0, 36, 0, 36]


class MixingEngine(CountingEngine):
    def collect(self, plan):
        if isinstance(plan, MixedPlan):
            parts = [super(MixingEngine, self).collect(part) for part in parts_of_plan(plan)]
            return StepResult(tuple(row for part in parts for row in part.rows))
        return super().collect(plan)


def test_who_may_not_be_packed_enters_beside_rounds():
    """Another tenant's request has the next row, and asks what a packed batch has not; one that may be packed waits
    before it.
    """
    groups = (KVGroup(FULL, 1, paired(1, 8)),)
    layout = Layout((SpecShape(1, 3, 4),), 4, 8, 2048, 64, groups, 16384, mixed=True, prompt_sizes=(8, 16, 32, 64))
    config = EngineConfig(max_running_requests=8, page_size=4, mixed_chunk="on")
    core = EngineCore(MixingEngine(), Scheduler(layout, config, [10**6]))
    give(core, choices(10, 4, "a", max_tokens=600))
    until(core, lambda: len(core.scheduler.queues.decoding) == 4)
    give(core, [*choices(50, 1, "a"), *choices(60, 1, "b", logprobs=1)])
    assert first_tokens(core, (50, 60)) < 6
