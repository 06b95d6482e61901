"""States of recurrent layers go from worker to worker in the row's record: folded, under its checksum, by name."""

import re

import pytest
import torch

from support.engines import build, greedy, sampled, steps, submit
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.lookups import lookup
from support.recurrent_models import check_dummy, check_snapshot, known_family, save_pair, snapshot, states_of
from treetop.engine.row_record import parts_of
from treetop.types.errors import CapacityError

PARAMS = [greedy(16), sampled(5, 16), greedy(16), sampled(7, 16, temperature=0.6), greedy(16)]


@pytest.fixture(scope="module", autouse=True)
def _family():
    with known_family():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("recurrent"), "sum", "delta", "full")


@pytest.mark.parametrize(("shape", "make"), few_of([(None, build), ((2, 3, 6), build), ((2, 3, 6), lookup)], 0, 2))
def test_two_workers_give_what_one_gives(pair, shape, make):
    """Tokens and accepted lengths; prompts in chunks, twice, so that prefixes repeat; pages of another size there."""
    options, prompts = (
        {"context_length": 128, "chunked_prefill_size": 16, "check_level": 2},
        pair.prompts([1, 5, 17, 33, 60]),
    )
    llm = make(pair, shape, **options)
    outputs = llm.generate(prompts, PARAMS)
    expected = [(output.token_ids, list(output.metrics.accept_lens)) for output in outputs]
    prefill, decode = (Worker(pair, shape, make, page_size=size, **options) for size in (4, 8))
    relay = Relay(prefill, decode, 20)
    for _ in range(2):
        ids = relay.submit(prompts, PARAMS, IDS)
        relay.run()
        assert [relay.result(each)[:2] for each in ids] == expected
    assert relay.received
    assert not relay.local, "a request was prefilled here"
    for worker in (prefill, decode):
        check_dummy(worker.llm)
        worker.close()


def test_a_state_that_was_changed_on_its_way_is_not_taken(pair):
    """Its checksum says so, and the request is prefilled here."""
    prompts = pair.prompts([21])
    expected = build(pair, None, context_length=128).generate(prompts, greedy(12))[0].token_ids
    prefill, decode = Worker(pair, None), Worker(pair, None)

    def spoil(chunk, landing):
        if chunk.last:
            segment = decode.slots[0].spec.own.segments(chunk)[-1]
            decode.slots[0].memory[landing, segment.offset + segment.num_bytes - 1] ^= 1

    relay = Relay(prefill, decode, spoil=spoil)
    (request_id,) = relay.submit(prompts, [greedy(12)], IDS)
    relay.run()
    assert relay.result(request_id)[0] == expected
    assert request_id in relay.local


def test_a_slot_too_small_for_states_says_how_large_one_must_be(pair):
    """The number is enough."""
    with pytest.raises(CapacityError, match="with states of recurrent layers") as caught:
        Worker(pair, None, disaggregation_slot_bytes=1 << 10)
    usual, least = (int(number) for number in re.findall(r"to(?: at least)? (\d+)", str(caught.value)))
    assert usual > least
    Worker(pair, None, disaggregation_slot_bytes=least).close()
    with pytest.raises(CapacityError):
        Worker(pair, None, disaggregation_slot_bytes=least - 16)


def test_a_record_holds_the_states_of_a_rows_tokens(pair):
    """With nothing pending, whatever rounds have left so; of every layer, in the words of the schema."""
    worker = Worker(pair, (2, 3, 6))
    (request,) = submit(worker.llm, pair.prompts([21]), greedy(40))
    for _, _ in zip(range(6), steps(worker.llm), strict=False):
        pass
    row, runner, committed = request.held.row, worker.engine.runner, request.num_computed_tokens
    before, true = snapshot(worker.llm, row, committed), states_of(worker.llm, request.ids[:committed])
    check_snapshot(before, true)
    assert before.count
    runner.state.states.fold(runner.ops, torch.tensor([row]))
    record = runner.state.record
    packed = parts_of(record.fields, record.pack(row))
    for index, place in runner.recurrent_layers.items():
        state = packed[f"state.{place.group}"][place.index]
        assert torch.allclose(state, true.states[index][committed], rtol=0, atol=1e-12)
    assert int(packed["committed"]) == committed
    words = [field.words for field in record.fields]
    assert "state.state1: [1, 4, 6, 4] float64" in words
    assert "conv.state1: [1, 40, 3] float64" in words
    worker.close()
