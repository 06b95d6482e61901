"""Both roles in one process: real state machines, sessions, schedulers and engines, and a transport that copies memory.

So what the drills do to processes is done here step by step, in seconds.
"""

import time

import pytest

from support.addresses import addresses
from support.engines import build, greedy, sampled
from support.grids import few_of, few_values
from support.handing import Worker
from support.waiting import WAIT_S
from treetop.disaggregation.connector import open_connector
from treetop.disaggregation.loopback import LoopbackTransport
from treetop.engine.kv_staging import staging_of
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.requests import EngineRequest

SHAPE = (2, 3, 6)
LENGTHS = [3, 60, 40, 90, 17]
PARAMS = [greedy(10), sampled(5, 10), greedy(10), sampled(9, 10, top_k=5, logprobs=2), sampled(3, 10)]
LEASE_S = 1.5


class Sides:
    """A prefill and a decode worker, whose steps the test runs in turns."""

    def __init__(self, pair, prefill_slots, decode_slots, lease_s=LEASE_S):
        (listen,) = addresses(1)
        self.prefill = Worker(pair, SHAPE, disaggregation_slots=prefill_slots, chunked_prefill_size=16)
        self.decode = Worker(pair, SHAPE, disaggregation_slots=decode_slots, chunked_prefill_size=16)
        self.computes = self._role(self.prefill, DisaggregationOptions("prefill", listen, lease=lease_s))
        self.asks = self._role(self.decode, DisaggregationOptions("decode", None, (listen,), lease=lease_s))
        self.prefill_lives, self.ahead_s = True, 0.0
        self.until(lambda: self.asks.asks)

    @staticmethod
    def _role(worker, options):
        return open_connector(worker.scheduler, staging_of(worker.engine), options, LoopbackTransport)

    @property
    def transport(self):
        return self.asks._agent.own.transport

    def now(self):
        """The clock of both, which a test may put ahead where nothing else can end a wait."""
        return time.monotonic() + self.ahead_s

    def step(self):
        """A turn of each. Returns what the decode worker has emitted."""
        if self.prefill_lives:
            self.computes.poll(self.now())
            self.prefill.core.step()
        self.asks.poll(self.now())
        return self.decode.core.step()

    def until(self, true):
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline
            self.step()

    def generate(self, prompts, params, first_number=0, meanwhile=lambda count: None):
        """Ids and accept lengths of each prompt. meanwhile: is told the number of chunks that have come, each turn."""
        found = {}
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True), first_number):
            found[number] = ([], [])
            asked = EngineRequest(RequestId(number), tuple(prompt), each, each.seed or 0)
            self.decode.core.add(asked, remote=self.asks.asks)
        left = len(found)
        deadline = time.monotonic() + WAIT_S
        while left:
            assert time.monotonic() < deadline
            meanwhile(self.asks.load.num_chunks)
            for update in self.step():
                assert update.error is None
                ids, lens = found[update.request_id]
                ids += update.new_ids
                lens += [] if update.accept_len is None else [update.accept_len]
                left -= update.finish_reason is not None
        return [(tuple(ids), lens) for ids, lens in found.values()]

    def nothing_is_held(self):
        self.decode.scheduler.check_integrity()
        self.prefill.scheduler.check_integrity()
        idle = (
            self.asks.load.num_requests_in_flight
            == self.asks.load.num_slots_busy
            == self.computes.load.num_requests_in_flight
            == 0
        )
        return idle and self.computes.load.num_slots_busy == 0 and not self.prefill.scheduler.has_work

    def close(self):
        for role, worker in ((self.asks, self.decode), (self.computes, self.prefill)):
            role.close()
            worker.close()


@pytest.fixture(scope="module")
def prompts(strong_pair):
    return strong_pair.prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(strong_pair, prompts):
    llm = build(strong_pair, SHAPE, context_length=128)
    outputs = llm.generate(prompts, PARAMS)
    llm.close()
    return [(output.token_ids, [*output.metrics.accept_lens]) for output in outputs]


@pytest.fixture
def sides(strong_pair, request):
    workers = Sides(strong_pair, *request.param)
    yield workers
    workers.close()


@pytest.mark.parametrize("sides", few_values([(6, 6, WAIT_S), (1, 2, WAIT_S), (2, 1, WAIT_S)], 1), indirect=True)
def test_requests_are_handed_over_through_many_slots_or_one(sides, prompts, expected):
    """Chunks wait for slots, where these are short; nothing goes another way, and nothing is held at the end."""
    assert sides.generate(prompts, PARAMS) == expected
    assert (sides.asks.load.num_requests_done, sides.asks.load.num_local_prefills) == (len(prompts), 0)
    sides.until(sides.nothing_is_held)


@pytest.mark.parametrize("sides", [(3, 3, WAIT_S)], indirect=True)
def test_neither_loop_waits_before_the_other_worker_is_told_of_a_step(sides, prompts):
    """Of a request that has been admitted, and of what has been computed for it."""
    number, waits = RequestId(7), []
    sides.decode.core.add(EngineRequest(number, tuple(prompts[1]), greedy(3), 0), remote=True)
    sides.decode.core.step()
    assert sides.asks.wait_ms == 0
    while not waits:
        sides.asks.poll(sides.now())
        assert sides.asks.wait_ms > 0
        sides.computes.poll(sides.now())
        sides.prefill.core.step()
        waits += [sides.computes.wait_ms] if sides.prefill.scheduler.kv_transfer.has_events else []
    assert waits == [0]
    sides.decode.core.abort(number)
    sides.until(sides.nothing_is_held)


@pytest.mark.parametrize("sides", [(3, 3)], indirect=True)
@pytest.mark.parametrize("how", few_of(["stalled", "broken", "dead"], 0, 2))
def test_what_stops_in_the_middle_goes_on_at_the_decode_worker(sides, prompts, expected, how):
    """A transfer that does not end, one that fails, and a worker that says nothing more, after some chunks."""

    def stop(num_chunks):
        if num_chunks >= 2:
            sides.ahead_s += LEASE_S / 100
            sides.transport.stalled, sides.transport.broken = how == "stalled", how == "broken"
            sides.prefill_lives = how != "dead"

    assert sides.generate(prompts, PARAMS, meanwhile=stop) == expected
    assert sides.asks.load.num_local_prefills > 0
    sides.transport.stalled = sides.transport.broken = False
    sides.prefill_lives = True
    sides.until(sides.nothing_is_held)
    sides.until(lambda: sides.asks.asks)
    others = [prompt[::-1] for prompt in prompts]
    sides.generate(others, PARAMS, 100)
    sides.until(sides.nothing_is_held)
