"""A request that goes on in another engine behind what its client has gives what one engine would have given."""

import pytest

from support.callers import Caller
from support.engines import build, greedy, sampled
from support.tiny_models import Pair, save_copying_head, save_weak_llama
from treetop.types.errors import InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams

COUNT = 24


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_weak_llama(folder / "target", strength=0.17, sharpness=0.5, vocab_size=31)
    llm = build(Pair(target, save_copying_head(folder / "head", target, draft_vocab=28)), (4, 3, 12), page_size=4)
    yield llm
    llm.close()


def run(llm, requests) -> dict:
    """Ids, log-probabilities and last update of each request, decoded together."""
    found = {request.request_id: ([], [], []) for request in requests}
    client, left = Caller(llm._core.submit), len(requests)
    client.add(requests)
    while left:
        for update in client.get():
            ids, logprobs, updates = found[update.request_id]
            assert not update.new_ids or update.start == len(ids) + len(asked_of(requests, update).received)
            ids += update.new_ids
            logprobs += update.logprobs
            updates.append(update)
            left -= update.finish_reason is not None
    return {request_id: (ids, logprobs, updates[-1]) for request_id, (ids, logprobs, updates) in found.items()}


def asked_of(requests, update) -> EngineRequest:
    return next(each for each in requests if each.request_id == update.request_id)


OPTIONS = [
    greedy(COUNT),
    sampled(5, COUNT, temperature=0.7, logprobs=2),
    sampled(6, COUNT, presence_penalty=0.8, frequency_penalty=0.4, logprobs=0),
    sampled(7, COUNT, repetition_penalty=1.6, top_k=9),
    SamplingParams(max_tokens=COUNT, min_tokens=16, stop_token_ids=tuple(range(12)), temperature=1.2, seed=8),
    sampled(9, COUNT, logit_bias={3: 2.0}, allowed_token_ids=tuple(range(0, 31, 2)), top_p=0.8),
]


@pytest.mark.parametrize("received", [1, 2, 7, 15, 22])
def test_what_follows_is_what_would_have_followed(llm, received):
    """Coins by position, penalties and least lengths by the whole output, log-probabilities, limits and stops."""
    prompts = llm_prompts(6)
    whole = run(llm, [asked(llm, prompt, params) for prompt, params in zip(prompts, OPTIONS, strict=True)])
    parts = [
        asked(llm, prompt, params, tuple(ids[:received]))
        for prompt, params, (ids, *_) in zip(prompts, OPTIONS, whole.values(), strict=True)
        if len(ids) > received
    ]
    rests = run(llm, parts)
    known = [each for each in whole.values() if len(each[0]) > received]
    for (ids, logprobs, last), (rest, of_rest, end) in zip(known, rests.values(), strict=True):
        assert rest == ids[received:]
        assert end.finish_reason == last.finish_reason
        for one, other in zip(of_rest, logprobs[received:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=1e-9)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


class Alternating:
    """Even tokens and odd ones in turn."""

    def __init__(self) -> None:
        self.count = 0

    def allowed(self, new_ids):
        self.count += len(new_ids)
        return range(self.count % 2, 31, 2)


@pytest.mark.parametrize("received", [1, 8])
def test_a_constraint_goes_on_behind_what_was_received(llm, received):
    prompt, params = llm_prompts(3)[2], sampled(5, COUNT, whole=True)
    request = asked(llm, prompt, params)
    ((whole, *_),) = run(llm, [request._replace(constraint=Alternating())]).values()
    assert [token % 2 for token in whole] == [0, 1] * (COUNT // 2)
    again = asked(llm, prompt, params, tuple(whole[:received]))
    ((rest, *_),) = run(llm, [again._replace(constraint=Alternating())]).values()
    assert rest == whole[received:]


def llm_prompts(count) -> list[list[int]]:
    return [[(5 * i + 3 * j) % 31 for j in range(3 + 4 * i)] for i in range(count)]


def asked(llm, prompt, params, received=()) -> EngineRequest:
    return EngineRequest(RequestId(llm._core.next_id()), tuple(prompt), params, params.seed or 0, received=received)


def test_a_request_that_has_all_it_may_have_is_refused(llm):
    """It would run on past its limit; it is told so, and the engine goes on."""
    full = asked(llm, [1, 2], greedy(3), (4, 5, 6))
    ((_, _, last),) = run(llm, [full]).values()
    assert "nothing is left to do" in last.error
    with pytest.raises(InputError, match="at most 3"):
        llm.scheduler.add(full._replace(request_id=RequestId(10**7)))
