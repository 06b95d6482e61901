"""What goes wrong with a request that is handed over harms nothing else, and the request least."""

import random
from unittest.mock import patch

import pytest

from support.engines import build, greedy, sampled
from support.handing import IDS, Relay, Worker, make_pairs, run_plans
from treetop.types.errors import CheckError
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.scheduling import Dropped, Recv, Stage
from treetop.types.messages import ExportPlan
from treetop.types.requests import EngineRequest
from treetop_debug.ranks import ranks_on_threads
from treetop_debug.transfer_faults import RECORD_FAULTS


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, strong_pair):
    return make_pairs(tmp_path_factory.mktemp("handed"), strong_pair)


def test_what_one_rank_refuses_no_rank_takes(pairs):
    """A bit in the slot of the second rank: rank 0 found its own part intact."""
    prompt, params = pairs["weak"].prompts([30], seed=2)[0], greedy(6)
    with ranks_on_threads():
        prefill, decode = (Worker(pairs["weak"], (2, 3, 6), tp_size=size) for size in (1, 2))
        try:
            relay = Relay(prefill, decode)
            relay.spoil = lambda chunk, landing: decode.slots[1].memory[landing, :1].bitwise_xor_(64)
            (spoilt,) = relay.submit([prompt], [params], IDS)
            relay.run()
            assert relay.local == {spoilt}
            (alone,) = prefill.llm.generate([prompt], params)
            assert relay.result(spoilt)[0] == alone.token_ids
        finally:
            prefill.close()
            decode.close()


def test_a_flipped_bit_anywhere_in_a_slot_is_refused_and_the_request_is_prefilled_here(pairs):
    """In every segment of a middle and of a last chunk: K/V of each head of each group, and the record."""
    rng, flipped = random.Random(3), []
    prefill, decode = (Worker(pairs["windows"], (2, 3, 6), page_size=4, disable_radix_cache=True) for _ in range(2))
    prompt, params = pairs["windows"].prompts([40], seed=5)[0], sampled(4, 6)
    relay = Relay(prefill, decode, 25)
    (sound,) = relay.submit([prompt], [params], IDS)
    relay.run()
    assert not relay.local

    for chunk in (KVChunk(0, 25, 40), KVChunk(25, 15, 40)):
        for segment in decode.slots[0].spec.own.segments(chunk):
            if not segment.num_bytes:
                continue

            def spoil(moved, landing, chunk=chunk, segment=segment):
                if moved == chunk:
                    at = segment.offset + rng.randrange(segment.num_bytes)
                    decode.slots[0].memory[landing, at] ^= 1 << rng.randrange(8)
                    flipped.append(segment)

            relay.spoil = spoil
            (spoilt,) = relay.submit([prompt], [params], IDS)
            relay.run()
            assert spoilt in relay.local, segment
            assert relay.result(spoilt) == relay.result(sound)
    assert len(flipped) == 11


def test_an_offer_that_does_not_fit_is_refused_and_ends_nothing_else(pairs):
    """Too few checksums, numbers too large, another first token, log-probabilities that are missing."""
    prefill, decode = (Worker(pairs["strong"], (2, 3, 6)) for _ in range(2))
    real, prompts = decode.kv_transfer.recv, pairs["strong"].prompts([21, 22, 23, 24, 25])
    wrong = iter(
        (
            lambda checksums, first: (checksums[:-1], first),
            lambda checksums, first: ((2**64, *checksums[1:]), first),
            lambda checksums, first: (checksums, first._replace(token=(first.token + 1) % 12)),
            lambda checksums, first: (checksums, first._replace(logprobs=None)),
            lambda checksums, first: (checksums, first),
        )
    )

    def recv(given):
        real(Recv(*given[:3], *next(wrong)(*given[3:])))

    relay, params = Relay(prefill, decode), sampled(4, 6, logprobs=1)
    with patch.object(decode.kv_transfer, "recv", recv):
        ids = [relay.submit([prompt], [params], IDS)[0] for prompt in prompts]
        relay.run()
    assert relay.local == set(ids[:4])
    one = build(pairs["strong"], (2, 3, 6), context_length=128).generate(prompts, params)
    assert [relay.result(each)[0] for each in ids] == [output.token_ids for output in one]


def test_a_record_field_copied_from_another_is_caught(pairs):
    """At check level 1 by its guard; without one it does harm."""
    found = RECORD_FAULTS["record-field-copied"]
    for level in (0, 1):
        prefill, decode = (Worker(pairs["weak"], (4, 3, 8), check_level=level) for _ in range(2))
        relay = Relay(prefill, decode)
        with found.active():
            (request_id,) = relay.submit(pairs["weak"].prompts([20]), [greedy(12)], IDS)
            for _ in range(200):
                relay.step()
                if relay.done:
                    break
        failure = decode.core.failure
        if level == found.level:
            assert found.guard in str(failure)
            assert isinstance(failure, CheckError)
        else:
            alone = build(pairs["weak"], (4, 3, 8)).generate(pairs["weak"].prompts([20]), greedy(12))[0]
            accepted = [update.accept_len for update in relay.updates[request_id]][1:]
            assert failure is not None or accepted != list(alone.metrics.accept_lens)


@pytest.mark.slow
def test_aborts_failures_and_retractions_in_the_middle_keep_the_books_whole(pairs):
    """At random times a client goes, a worker gives up, a slot is spoilt, a worker drops an export; pages are short.

    Every slot that was named comes back once, all pages and rows come back, and who lives on gets what it gets alone.
    """
    rng, name = random.Random(11), "windows"
    alone = build(pairs[name], (2, 3, 6), context_length=128)
    short = {"max_total_tokens": 160, "max_running_requests": 4, "disaggregation_slots": 2}
    prefill = Worker(pairs[name], (2, 3, 6), page_size=2, chunked_prefill_size=16, overlap=True, **short)
    decode = Worker(pairs[name], (2, 3, 6), page_size=4, overlap=True, check_level=3, **short)

    def spoil(chunk, landing):
        if rng.random() < 0.1:
            decode.slots[0].memory[landing, rng.randrange(64)] ^= 1

    relay, alive, asked = Relay(prefill, decode, 15, spoil), set(), {}
    for wave in range(5):
        prompts = pairs[name].prompts([rng.randrange(1, 70) for _ in range(8)], seed=wave)
        params = [sampled(rng.randrange(99), rng.randrange(1, 40), temperature=rng.choice((0, 1.0))) for _ in prompts]
        ids = relay.submit(prompts, params, IDS)
        asked.update(zip(ids, zip(prompts, params, strict=True), strict=True))
        alive.update(ids)
        for _ in range(rng.randrange(20, 60)):
            relay.step()
            act, running = rng.random(), [*decode.scheduler.queues.by_id]
            if running and act < 0.04:
                gone = rng.choice(running)
                decode.core.abort(gone)
                alive.discard(gone)
            elif running and act < 0.08:
                relay.give_up(rng.choice(running))
            elif relay.handed and act < 0.11:
                prefill.scheduler.abort(rng.choice([*relay.handed.values()]).remote_id)
    relay.run()
    for worker in (prefill, decode):
        assert worker.core.failure is None
        assert not worker.scheduler.rows.by_row
        assert not worker.kv_transfer._exports
        assert not worker.kv_transfer._imports
        assert not worker.kv_transfer._pending
    assert decode.scheduler.num_retractions > 0
    assert len(alive) > 20
    assert len(relay.local - (asked.keys() - alive)) < len(alive), "some were handed over"
    expected = alone.generate([asked[each][0] for each in sorted(alive)], [asked[each][1] for each in sorted(alive)])
    assert [relay.result(each)[0] for each in sorted(alive)] == [output.token_ids for output in expected]


def test_a_request_that_gives_way_while_it_is_imported_or_exported(pairs):
    """Decoding requests take the pages of younger ones, wherever these stand; its worker hears of it."""
    worker = Worker(pairs["strong"], (2, 3, 6), page_size=4, max_total_tokens=132, overlap=False)
    old = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([10])[0]), greedy(100, whole=True), 0)
    young = [RequestId(next(IDS)) for _ in range(2)]
    asked = [EngineRequest(each, tuple(pairs["strong"].prompts([40], seed=each)[0]), greedy(5), 0) for each in young]
    worker.scheduler.add(old)
    worker.scheduler.add(asked[0], export_from=0)
    worker.scheduler.add(asked[1], remote=True)
    gone = []
    while old.request_id in worker.scheduler.queues.by_id:
        worker.core.step()
        worker.scheduler.check_integrity()
        gone += [event.request_id for event in worker.kv_transfer.take_events() if isinstance(event, Dropped)]
    assert sorted(gone) == young
    assert young[0] not in worker.scheduler.queues.by_id, "who wanted it can prefill it, too"
    request = worker.scheduler.queues.by_id[young[1]]
    while request.finish_reason is None:
        worker.core.step()
    assert len(request.output_ids) == 5


def test_a_failed_engine_gives_every_slot_back(pairs):
    """Those that wait for a step, and those in a step that is lost; after Dropped, so that nothing is offered."""
    worker = Worker(pairs["strong"], (2, 3, 6))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=4)
    run_plans(worker)
    worker.kv_transfer.take_events()
    worker.kv_transfer.stage(Stage(asked.request_id, 1, KVChunk(4, 10, 30)))
    plan = worker.scheduler.plan()
    assert isinstance(plan, ExportPlan)
    worker.kv_transfer.stage(Stage(asked.request_id, 2, KVChunk(14, 16, 30)))
    worker.scheduler.fail("broken")
    gone, *packed = worker.kv_transfer.take_events()
    assert isinstance(gone, Dropped)
    assert sorted((each.slot, each.checksums) for each in packed) == [(1, ()), (2, ())]
    worker.scheduler.check_integrity()
