"""Requests that one engine prefills and another decodes: state, tokens and accept lengths are those of one engine."""

from itertools import count
from unittest.mock import patch

import pytest

from engines import build, greedy, sampled
from handing import Relay, Worker
from tiny_models import Pair, save_copying_head, save_weak_llama
from treetop.debug import two_group

LENGTHS = [1, 4, 5, 17, 33, 60]
IDS = count(10**6)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, strong_pair):
    folder = tmp_path_factory.mktemp("handed")
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    small = {"vocab_size": 7}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        windows = Pair(*two_group.write_two_group_pair(folder, 9))
    return {
        "weak": Pair(weak, save_copying_head(folder / "weak-head", weak, draft_vocab=188)),
        "strong": strong_pair,
        "windows": windows,
    }


MIXED = [
    sampled(11, 16, temperature=0.6),
    greedy(16),
    sampled(2**62 + 5, 16, top_k=5, logprobs=2),
    sampled(13, 16, top_p=0.7, frequency_penalty=0.8, repetition_penalty=1.3),
    sampled(0, 16, min_p=0.2, temperature=1.7),
    sampled(15, 16, top_k=4, presence_penalty=0.5, logit_bias={5: 1.5}),
]
GREEDY = [greedy(16)] * len(LENGTHS)


def prompts_of(pair):
    """Six prompts, and then three that begin as some of them do."""
    first = pair.prompts(LENGTHS)
    more = pair.prompts([3, 9, 20], seed=7)
    return first, [[*first[5], *more[0]], [*first[4], *more[1]], [*first[5][:30], *more[2]]]


def aggregated(pair, shape, params, make=build, **options):
    """What one engine gives, each wave by itself: (tokens, accepted lengths, log-probabilities)."""
    llm = make(pair, shape, **{"context_length": 128, **options})
    found = []
    for wave in prompts_of(pair):
        for output in llm.generate(wave, params[: len(wave)]):
            found.append((output.token_ids, list(output.metrics.accept_lens), list(output.logprobs or ())))
    llm.close()
    return found


def handed(pair, params, prefill, decode, most, warm=()):
    """The same by two workers. warm: prompts that P has prefilled before."""
    relay = Relay(prefill, decode, most)
    if warm:
        prefill.llm.generate(warm, greedy(1))
    found = []
    for wave in prompts_of(pair):
        ids = relay.submit(wave, params[: len(wave)], IDS)
        relay.run()
        found += [relay.result(each) for each in ids]
    assert not relay.local, "a request was prefilled here"
    assert len(decode.free) == decode.engine.layout.handover_slots
    return found, relay.landed


CASES = [  # pair, shape, parameters, prefill's options, decode's, tokens of a piece
    ("weak", (4, 5, 16), GREEDY, {"page_size": 16, "overlap": True}, {"page_size": 4}, 1000),
    ("strong", (2, 3, 6), MIXED, {"page_size": 2, "chunked_prefill_size": 16}, {"graphs": "sim", "overlap": True}, 7),
    ("strong", (2, 3, 6), MIXED, {"check_level": 3, "page_size": 4}, {"check_level": 3, "page_size": 8}, 1000),
    ("windows", (2, 3, 6), MIXED, {"page_size": 8, "chunked_prefill_size": 32}, {"page_size": 2, "overlap": True}, 11),
    ("windows", (2, 3, 6), GREEDY, {"page_size": 1, "check_level": 2}, {"page_size": 8, "check_level": 3}, 1000),
    ("strong", None, MIXED, {"chunked_prefill_size": 8}, {"disable_radix_cache": True, "page_size": 4}, 5),
]


@pytest.mark.parametrize(("name", "shape", "params", "prefill", "decode", "most"), CASES)
def test_two_workers_give_what_one_gives(pairs, name, shape, params, prefill, decode, most):
    """Greedy, sampled, penalties, log-probabilities, windows, hits on either side, unequal pages, overlap."""
    pair = pairs[name]
    expected = aggregated(pair, shape, params)
    workers = Worker(pair, shape, **prefill), Worker(pair, shape, **decode)
    found, landed = handed(pair, params, *workers, most, warm=[prompts_of(pair)[0][5][:33]])
    assert found == expected
    assert landed >= len(found)
    if most < 20:
        assert landed > 2 * len(found), "long prompts come in pieces"
    if shape is not None:
        assert sum(sum(each[1]) for each in found) > 0, "nothing was accepted, so nothing was tested"
