"""What a prefill and a decode worker do together, in one process.

So what the drills do to processes is done here step by step, in seconds.
"""

import pytest

from support.engines import build, greedy, sampled
from support.grids import few_of, few_values
from support.handover_sides import LEASE_S, SHAPE, Sides
from support.waiting import WAIT_S
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest

LENGTHS = [3, 60, 40, 90, 17]
PARAMS = [greedy(10), sampled(5, 10), greedy(10), sampled(9, 10, top_k=5, logprobs=2), sampled(3, 10)]


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
