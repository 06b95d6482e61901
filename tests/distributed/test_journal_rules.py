"""Whom a crash ends: random lives of engines that are simulated, with requests that crash them and without."""

import random
from dataclasses import dataclass, field

import pytest

from support.examples import EVERYTHING
from support.fake_core import ask
from treetop.distributed.journal import SAME_STEP_CRASHES, TRIAL_STEPS, Journal
from treetop.types.requests import RequestUpdate

SEEDS = 400 if EVERYTHING else 40
LENGTH = 150
ROWS = 8


@dataclass(eq=False)
class Engine:
    """Gives what it has a step at a time. steps: that it has begun of each request. late: what is on its way."""

    journal: Journal
    steps: dict[int, int] = field(default_factory=dict)
    late: list[RequestUpdate] = field(default_factory=list)


class World:
    """Engines, requests, and what these hear. One request crashes each engine at a step, or at a place of its output.

    An engine that dies may have sent its last step or not; the next one stands in its place in the next turn.
    """

    def __init__(self, rng, num_engines, count, at_step=None, at_place=None):
        self.rng, self.at_step, self.at_place = rng, at_step, at_place
        self.killer = None if at_step is None and at_place is None else rng.randrange(count)
        self.engines = [Engine(Journal(lambda: 0.0)) for _ in range(num_engines)]
        self.coming, self.heard, self.ends = [*range(count)], [0] * count, {}
        self.given, self.num_crashes, self.num_kills = [0] * count, 0, 0

    def take(self, update):
        assert update.request_id not in self.ends, "an end that comes twice"
        assert update.start == self.heard[update.request_id], "a token is lost or comes twice"
        self.heard[update.request_id] += len(update.new_ids)
        if update.finish_reason is not None:
            self.ends[update.request_id] = update.error

    def run(self, kills=0.0, burst=True):
        """Until all have ended. kills: the chance in each turn that an engine is killed from outside."""
        while len(self.ends) < len(self.given):
            while self.coming and (burst or self.rng.random() < 0.2):
                self.rng.choice(self.engines).journal.add([ask(self.coming.pop(0), [1], LENGTH)], self.take)
            for engine in self.rng.sample(self.engines, len(self.engines)):
                if not engine.journal.open:
                    engine.journal.opened(ROWS)
                if self.rng.random() < kills:
                    self.die(engine, killed=True)
                elif not self.step(engine):
                    self.die(engine, killed=False)
        return {number for number, error in self.ends.items() if error is not None}

    def step(self, engine) -> bool:
        """Whether it survives."""
        engine.journal.take(engine.late)
        engine.late = []
        for request in engine.journal.due():
            engine.steps[request.request_id] = 0
            self.given[request.request_id] = len(request.received)
        running = [each for each in engine.steps if each not in self.ends and self.given[each] < LENGTH]
        for number in running[:ROWS]:
            engine.steps[number] += 1
            at = self.given[number]
            if number == self.killer and (engine.steps[number] == self.at_step or at == self.at_place):
                return False
        for number in running[:ROWS]:
            at, self.given[number] = self.given[number], self.given[number] + 1
            engine.late.append(RequestUpdate(number, (1,), None, "length" if at + 1 == LENGTH else None, start=at))
        return True

    def die(self, engine, killed):
        self.num_kills, self.num_crashes = self.num_kills + killed, self.num_crashes + (not killed)
        if self.rng.random() < 0.5:
            engine.journal.take(engine.late)
        engine.steps.clear()
        engine.late = []
        engine.journal.lost("gone", killed)
        others = [each for each in self.engines if each is not engine and each.journal.open]
        engine.journal.hand_on(
            lambda request: self.rng.choice(others).journal if others and self.rng.random() < 0.8 else None
        )


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_engines_that_are_killed_from_outside_any_number_of_times_cut_nothing(num_engines):
    """Not on trial either, which a crash before has begun for all."""
    kills = 0
    for seed in range(SEEDS):
        world = World(random.Random(seed), num_engines, 10)
        for engine in world.engines[: seed % 3]:
            engine.journal.opened(ROWS)
            world.die(engine, killed=False)
        assert world.run(kills=0.05, burst=seed % 2 == 0) == set(), seed
        kills += world.num_kills
    assert kills > 5 * SEEDS


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("kills", [0.0, 0.02])
@pytest.mark.parametrize(
    "way",
    [{"at_step": each} for each in (1, TRIAL_STEPS, TRIAL_STEPS + 1, 9, 30)]
    + [{"at_place": each} for each in (0, 3, 25)],
)
def test_a_request_that_crashes_every_engine_is_ended_by_the_third_crash_and_no_other_is(num_engines, kills, way):
    """However late, however many come together, and whoever kills engines, which may let it come to its end."""
    for seed in range(SEEDS):
        world = World(random.Random(seed), num_engines, 8, **way)
        ended = world.run(kills, burst=seed % 2 == 0)
        assert ended == {world.killer} or (not ended and kills and way["at_step"] == 30), (seed, world.ends)
        assert world.num_crashes <= SAME_STEP_CRASHES, seed


def test_a_stream_whose_replicas_end_after_random_steps_is_never_cut():
    """A thousand of them, each past its trial, at the worst chance there is."""
    for seed in range(SEEDS // 10):
        rng, heard = random.Random(seed), []
        journal = Journal(lambda: 0.0, same_step_crashes=16)
        journal.add([ask(0, [1], 10**6)], heard.append)
        for _ in range(1000):
            journal.opened(1)
            (asked,) = journal.due()
            at = len(asked.received)
            steps = TRIAL_STEPS + int(rng.expovariate(1 / 5))
            journal.take([RequestUpdate(0, (1,), start=at + i) for i in range(steps)])
            journal.lost("gone")
        assert all(each.error is None for each in heard)
