"""The router of replicas against prefix caches that really hold pages, by random schedules. No Ray."""

import random
from dataclasses import dataclass, field

import pytest

from treetop.cache.prefix_cache import PrefixCache
from treetop.distributed.router import PrefixRouter, ReplicaLoad, page_keys
from treetop.types.errors import CheckError
from treetop.types.ids import FULL
from treetop.types.requests import PrefixPages
from treetop_debug.rank_faults import ROUTER_FAULTS


@dataclass
class Truth:
    """A replica as it is: a prefix cache of the engine's kind, which is never full, and requests that run."""

    prefix: PrefixPages | None
    rows: int
    cache: PrefixCache = field(init=False)
    running: int = 0

    def __post_init__(self):
        if self.prefix is not None:
            self.cache = PrefixCache(self.prefix.page_size, self.prefix.lookahead, {FULL: None})

    def num_held(self, ids):
        return 0 if self.prefix is None else len(self.cache.match(ids))

    def take(self, ids):
        self.running += 1
        if self.prefix is not None:
            self.cache.unpin(self.cache.extend([], ids, (len(ids) - 1) // self.prefix.page_size))

    def standing(self):
        return ReplicaLoad(self.running, self.rows, self.prefix)


def prompts(rng, vocabulary):
    """Prompts that begin alike: some go on behind an earlier one, some leave it in the middle."""
    known = [[]]
    while True:
        start = rng.choice(known)
        ids = start[: rng.randrange(len(start) + 1)] + [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 9))]
        known.append(ids[:40])
        yield tuple(ids[:40])


@pytest.mark.parametrize("seed", range(60))
def test_the_nearest_with_most_pages_is_chosen_whatever_dies_comes_back_or_refuses(seed):
    """Of a schedule: replicas come, die under load, return empty; requests end in any order; replicas differ in pages
    and draft heads. The choice is what an oracle that asks the real caches would choose."""
    rng, clock = random.Random(seed), [0.0]
    bound = rng.choice([None, 0, 1, 5])
    router = PrefixRouter(bound, lambda: clock[0])
    kinds = [PrefixPages(2, 0, 10**6), PrefixPages(3, 1, 10**6), None][: rng.randrange(1, 4)]
    alive, turn = {}, {}
    source = prompts(rng, rng.choice([2, 3]))
    for number in range(150):
        if rng.random() < 0.06 or not alive:
            alive.setdefault(rng.randrange(5), Truth(rng.choice(kinds), rng.choice([1, 4, 16])))
        if rng.random() < 0.04:
            del alive[rng.choice(list(alive))]
        for truth in alive.values():
            truth.running -= rng.randrange(min(truth.running, 3) + 1)
        ids = next(source)
        order = router.choose(number, ids, {name: truth.standing() for name, truth in alive.items()})
        assert sorted(order) == sorted(alive)
        if not alive:
            continue
        turn = {name: when for name, when in turn.items() if name in alive}
        minimum = min(truth.running for truth in alive.values())

        def expected(name, ids=ids, minimum=minimum, turn=turn):
            truth = alive[name]
            near = truth.running - minimum <= (max(truth.rows // 4, 2) if bound is None else bound)
            return (-truth.num_held(ids) if near else 1, truth.running, turn.get(name, 0))

        assert order == sorted(order, key=expected)
        turn[order[0]] = number + 1
        took = order[0]
        if rng.random() < 0.1:  # it is full, and refuses; what the router thinks it holds from now on is a guess
            took = order[-1]
            alive[order[0]].take(ids)
            alive[order[0]].running -= 1
        alive[took].take(ids)
        router.routed(number, ids, took)


def test_requests_of_one_moment_are_spread():
    """What was sent counts before the replica says so, once and not for ever; a request asked again counts once."""
    clock = [0.0]
    router = PrefixRouter(0, lambda: clock[0])
    standing = dict.fromkeys("abcd", ReplicaLoad(0, 8, PrefixPages(4, 0, 100)))
    chosen = [router.choose(n, (n,) * 9, standing)[0] for n in range(12)]
    assert sorted(chosen) == sorted("abcd" * 3)
    for _ in range(5):
        assert router.choose(11, (11,) * 9, standing)[0] == chosen[11]
    clock[0] = 2.0
    assert router.choose(12, (3,) * 9, standing)[0] == chosen[3], "what never arrived is counted for ever"


def test_a_request_that_is_asked_again_does_not_stand_in_its_own_way():
    router = PrefixRouter(0)
    both = dict.fromkeys("ab", ReplicaLoad(0, 8, PrefixPages(4, 0, 100)))
    first = router.choose(0, range(20), both)
    assert router.choose(0, range(20), both) == first


def test_what_was_sent_counts_for_a_second_each_by_its_own_time():
    clock = [0.0]
    router = PrefixRouter(0, lambda: clock[0])
    both = dict.fromkeys("ab", ReplicaLoad(0, 8, None))
    assert router.choose(0, (1,), both) == ["a", "b"]
    clock[0] = 0.9
    assert router.choose(1, (1,), both) == ["b", "a"]
    clock[0] = 1.0
    assert router.choose(2, (1,), both) == ["a", "b"]
    router.routed(2, (1,), "a")
    clock[0] = 1.5  # the first is forgotten, the second is on its way to b
    assert router.choose(3, (1,), both) == ["a", "b"]


def test_a_replica_that_has_died_may_still_take_a_request():
    """It says so late; nothing is kept for it."""
    router = PrefixRouter()
    pages = PrefixPages(4, 0, 100)
    router.choose(0, range(20), dict.fromkeys("ab", ReplicaLoad(0, 8, pages)))
    router.choose(1, range(20), {"a": ReplicaLoad(0, 8, pages)})
    router.routed(2, range(20), "b")
    assert router.num_pages("b") == 0


def test_a_request_goes_elsewhere_when_too_many_wait_at_its_prefix():
    router = PrefixRouter(2)
    pages = PrefixPages(4, 0, 100)
    (first, _) = router.choose(0, range(20), {"a": ReplicaLoad(0, 8, pages), "b": ReplicaLoad(0, 8, pages)})
    other = "b" if first == "a" else "a"
    router.routed(0, range(20), first)
    near = {first: ReplicaLoad(5, 8, pages), other: ReplicaLoad(3, 8, pages)}
    assert router.choose(1, range(20), near)[0] == first
    router.routed(1, range(20), first)
    assert router.choose(2, range(20), {**near, first: ReplicaLoad(6, 8, pages)})[0] == other
    router.routed(2, range(20), other)
    assert router.choose(3, range(20), {first: ReplicaLoad(5, 8, pages), other: ReplicaLoad(3, 8, pages)})[0] == other


def test_memory_is_bounded_and_first_pages_are_forgotten_last():
    pages = PrefixPages(2, 1, 7)
    router = PrefixRouter(9)
    rng = random.Random(0)
    for number in range(200):
        router.choose(number, [rng.randrange(50) for _ in range(40)], {"a": ReplicaLoad(0, 4, pages)})
        router.routed(number, (), "a")
        assert router.num_pages("a") == 7
    router.choose(200, range(40), {"a": ReplicaLoad(0, 4, pages)})
    held = [key in router._replicas["a"].pages for key in page_keys(range(40), 2, 1)]
    assert held == [True] * 7 + [False] * 12


def test_keys_are_those_of_the_prefix_cache():
    """Two prompts have as many equal keys as the one finds pages of the other."""
    rng = random.Random(1)
    source = prompts(rng, 2)
    for _ in range(300):
        p, lookahead = rng.choice([1, 2, 4]), rng.randrange(2)
        one, other = next(source), next(source)
        truth = Truth(PrefixPages(p, lookahead, 99), 4)
        truth.take(one)
        both = zip(page_keys(one, p, lookahead), page_keys(other, p, lookahead), strict=False)
        assert sum(a == b for a, b in both) == truth.num_held(other)


def test_a_router_that_remembers_the_dead_is_found_out():
    fault = ROUTER_FAULTS["dead-replica"]
    pages = PrefixPages(4, 0, 100)

    def route():
        router = PrefixRouter(3)
        both = dict.fromkeys("ab", ReplicaLoad(0, 8, pages))
        (_, other) = router.choose(0, range(20), both)
        return router.choose(1, range(20), {other: both[other]}) == [other]

    assert route()
    with pytest.raises(CheckError, match=fault.guard), fault.active():
        route()
