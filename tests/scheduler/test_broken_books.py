"""An exception anywhere in scheduler or cache: every request hears of it, and what comes later is served rightly."""

import random
import sys
from pathlib import Path

import pytest

import treetop
from support.engines import build, greedy, hold_core_thread, tokens
from support.fake_core import CountingEngine, PagedEngine, ask, collected, make_core
from support.grids import few_of
from support.tiny_models import Pair
from treetop.core.loop import CoreLoop
from treetop.debug import two_group
from treetop.types.errors import EngineError
from treetop.types.ids import DRAFT, FULL, WINDOW, RequestId
from treetop.types.kv import paired
from treetop.types.layout import KVGroup

BOOKS = tuple(str(Path(treetop.__file__).parent / name) for name in ("scheduler", "cache"))
FULL_GROUP, WINDOW_GROUP = KVGroup(FULL, 1, paired(1, 8)), KVGroup(WINDOW, 1, paired(1, 8), window=10)
SOUND = ("has_work", "_reported")
"""What does nothing that could fail: one looks, one notes that updates have been handed out, as its last act."""
GROUPS = {
    "full": (FULL_GROUP,),
    "draft": (FULL_GROUP, KVGroup(DRAFT, 1, paired(1, 8))),
    "window": (FULL_GROUP, WINDOW_GROUP),
}


class Broken(BaseException):
    """What no code under test expects."""


class BreakAt:
    """Raises in the n-th line of scheduler and cache that this thread runs; 0 counts them, by place."""

    def __init__(self, number: int):
        self.left, self.places = number, []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _call(self, frame, event, arg):
        code = frame.f_code
        return self._line if code.co_filename.startswith(BOOKS) and code.co_name not in SOUND else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Broken
            if self.left < 0:
                self.places.append((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Some begin alike, at a page's end or inside one. Each goes on by counting up, as every answer does."""
    firsts = [100 * rng.randint(1, 3) for _ in range(count)]
    return [[*range(first, first + rng.choice([1, 7, 24, 25, 40]))] for first in firsts]


def serve(core, number: int, rng: random.Random, num_commands: int = 60) -> tuple[dict, dict]:
    """Requests that come, are aborted, finished and run late, beside steps. Returns the prompts, and all updates."""
    asked, updates, alive = {}, [], []

    def heard(new):
        updates.extend(new)
        alive[:] = [each for each in alive if not any(u.request_id == each and u.finish_reason for u in new)]

    for at in range(num_commands):
        chance = rng.random()
        if chance < 0.3 or at == 0:
            (prompt,) = prompts(rng, 1)
            request_id = RequestId(1000 * number + at)
            asked[request_id] = prompt
            late = rng.choice([None, None, 0.02])
            try:
                core.add(ask(request_id, prompt, rng.choice([1, 5, 30]), rng.randint(0, 2), late))
                alive.append(request_id)
            except EngineError:
                heard([])
                asked[request_id] = None  # it has been told so
        elif chance < 0.4 and alive:
            request_id = rng.choice(alive)
            update = core.abort(request_id) if chance < 0.35 else core.finish(request_id, 1)
            heard([] if update is None else [update])
        else:
            heard(core.step())
    for _ in range(2000):
        if not core.busy:
            return asked, updates
        heard(core.step())
    raise AssertionError("the core did not come to an end")


def check(asked: dict, updates: list) -> None:
    """Each request that was taken has one last update, and its tokens are right as far as they came."""
    ids, last = collected(updates)
    for request_id, prompt in asked.items():
        if prompt is None:
            assert request_id not in last
            continue
        assert last[request_id].finish_reason is not None, "a client waits for ever"
        got = ids[request_id]
        assert got == [*range(prompt[-1] + 1, prompt[-1] + 1 + len(got))]


class Clock:
    """Goes on by a millisecond whenever it is looked at."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


def core_of(groups: str, max_in_flight: int, radix: bool, policy: str = "priority"):
    return make_core(
        PagedEngine,
        rows=3,
        max_in_flight=max_in_flight,
        chunk=16,
        context=80,
        pages=44,
        clock=Clock(),
        groups=GROUPS[groups],
        disable_radix_cache=not radix,
        schedule_policy=policy,
        check_level=1,
    )


def lines_by_place(groups, max_in_flight, radix, seed) -> dict:
    """Which lines of a run are at which place of the code."""
    core, found = core_of(groups, max_in_flight, radix), {}
    with BreakAt(0) as counted:
        check(*serve(core, 0, random.Random(seed)))
    for number, place in enumerate(counted.places, start=1):
        found.setdefault(place, []).append(number)
    return found


def broken_at(line: int, groups, max_in_flight, radix, seed) -> None:
    """Break one line, and ask on: the core must not be told from a fresh one."""
    core = core_of(groups, max_in_flight, radix)
    with BreakAt(line) as breaking:
        asked, updates = serve(core, 0, random.Random(seed))
    assert breaking.left == 0
    assert isinstance(core.failure, Broken)
    check(asked, updates)
    core.scheduler.check_integrity()
    again, updates = serve(core, 1, random.Random(seed + 1))
    check(again, updates)
    assert not any(update.engine_failed for update in updates)
    core.scheduler.check_integrity()
    queues = core.scheduler.queues
    assert not core.scheduler.rows.by_row
    assert not queues.by_id
    assert not queues.waiting
    assert not any(queues.running)


SETUPS = [("window", 2, True), ("draft", 1, True), ("full", 2, False), ("window", 1, False), ("full", 2, True)]


@pytest.mark.parametrize("share", [24, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("groups", "max_in_flight", "radix"), few_of(SETUPS, 0, 2, 4))
def test_an_exception_in_any_line_of_the_books_ends_what_runs_and_nothing_else(groups, max_in_flight, radix, share):
    """A line at a time: all that was taken is told of it, and later requests are served by the right pages."""
    rng, seed = random.Random(len(groups) + max_in_flight), 5 + radix
    places = sorted(lines_by_place(groups, max_in_flight, radix, seed).items())
    assert len(places) > 250, "the requests do not reach the code"
    for _, lines in places[rng.randrange(share) :: share]:
        broken_at(rng.choice(lines), groups, max_in_flight, radix, seed)


def test_new_books_say_of_every_page_that_it_may_hold_what_is_old():
    """So check level 3 fills all of them with NaN before the next step."""
    core = core_of("window", 2, radix=True)
    core.add(ask(1, [5, 6]))
    core.step()
    core.fail(Broken())
    core.add(ask(2, [5, 6]))
    plan, pages = core.scheduler.plan(), core.engine.layout.num_pages
    assert sorted(plan.freed) == sorted((group, page) for group, maximum in pages.items() for page in range(1, maximum))


# ------------------------------------------------------------------------------------------------ whole engines


@pytest.fixture(scope="module")
def window_pair(tmp_path_factory) -> Pair:
    return Pair(*two_group.write_two_group_pair(tmp_path_factory.mktemp("windows"), 12))


@pytest.mark.parametrize("runs", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "overlap"), few_of([("window", True), ("strong", True), ("strong", False)], 0))
def test_an_engine_whose_books_broke_answers_as_a_fresh_one(request, kind, overlap, runs):
    """The device's page tables are those of the new books, with prefix hits, windows and two steps in flight."""
    pair, rng = request.getfixturevalue(f"{kind}_pair"), random.Random(int(overlap))
    options = {"overlap": overlap, "page_size": 4, "chunked_prefill_size": 16, "max_running_requests": 3}
    options |= {"context_length": 96, "max_total_tokens": 180, "check_level": 3}
    llm = build(pair, (2, 3, 6), **options)
    listed = [*pair.prompts([30, 17, 5]), pair.prompts([30])[0] + [1, 2, 3]]
    expected = tokens(llm.generate(listed, greedy(24)))
    hold_core_thread(llm)
    core = llm._core.core

    def run(number: int) -> tuple[dict, dict]:
        for at, prompt in enumerate(listed):
            core.add(ask(10_000 * number + at, prompt, 24, ignore_eos=True))
        updates = []
        while core.busy:
            updates += core.step()
        return collected(updates)

    with BreakAt(0) as counted:
        run(1)
    num_broken = 0
    for number in range(2, runs + 2):
        with BreakAt(rng.randint(1, len(counted.places))) as breaking:
            try:
                _, last = run(number)
            except EngineError:  # in `add`
                while core.busy:
                    core.step()
                last = {}
        num_broken += breaking.left == 0  # without prefix hits there are fewer lines
        assert all("Broken" in update.error for update in last.values() if update.error is not None)
        core.scheduler.check_integrity()
    assert num_broken > 0.8 * runs
    assert tokens(llm.generate(listed, greedy(24))) == expected
    assert tokens(llm.generate(listed, greedy(24))) == expected, "with what the prefix cache has now"
    core.scheduler.check_integrity()


# ------------------------------------------------------------------------------------------------ between steps


@pytest.mark.parametrize("command", ["add", "abort", "finish"])
def test_a_command_that_breaks_the_books_ends_every_request_with_a_word(monkeypatch, command):
    """Between two steps, too, each client hears of it once, and the next request runs."""
    core, told = make_core(CountingEngine(), rows=2), []
    loop = CoreLoop(core)
    loop.add([ask(1, [5], 300), ask(2, [7], 300)], told.extend)
    loop.step()
    loop.step()

    def fails(*_):
        raise Broken

    monkeypatch.setattr(core.scheduler.queues, "add" if command == "add" else "remove", fails)
    if command == "add":
        loop.add([ask(3, [9], 300)], told.extend)
    elif command == "abort":
        loop.abort([RequestId(1)])
    else:
        loop.finish(RequestId(1), 1)
    assert core.busy, "nobody would tell them"
    loop.step()
    ends = {update.request_id: update for update in told if update.finish_reason is not None}
    assert len(ends) == sum(update.finish_reason is not None for update in told) == (3 if command == "add" else 2)
    assert all(update.engine_failed and "Broken" in update.error for update in ends.values())
    loop.add([ask(9, [50], 4)], told.extend)
    while core.busy:
        loop.step()
    assert [token for update in told if update.request_id == 9 for token in update.new_ids] == [51, 52, 53, 54]
    core.scheduler.check_integrity()
