"""Log-probabilities of a prompt's tokens are those of the target's raw logits, however the prompt is computed."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from support.engines import build, pump, submit, tokens
from treetop import SamplingParams
from treetop.types.errors import InputError

SHAPE = (4, 5, 16)


@pytest.fixture(scope="module")
def model(strong_pair):
    return LlamaForCausalLM.from_pretrained(strong_pair.target, dtype=torch.float64).eval()


def params_of(maximum: int = 3, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "prompt_logprobs": maximum, **changes})


def check(model, output, maximum: int) -> None:
    """As `log_softmax` of transformers' logits says; the first token has none."""
    ids, (first, *rest) = output.prompt_token_ids, output.prompt_logprobs
    assert first is None
    assert len(rest) == len(ids) - 1
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for token, got, want in zip(ids[1:], rest, logprobs, strict=False):
        assert got.logprob == pytest.approx(want[token].item(), abs=2e-5)
        values, best = want.sort(descending=True, stable=True)
        assert [token_id for token_id, _ in got.top] == best[:maximum].tolist()
        assert [logprob for _, logprob in got.top] == pytest.approx(values[:maximum].tolist(), abs=2e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16, "page_size": 4, "check_level": 3},
        {"chunked_prefill_size": 7, "page_size": 1, "overlap": False, "max_running_requests": 2},
        {"chunked_prefill_size": 33, "page_size": 16, "graphs": "sim"},
    ],
    ids=str,
)
def test_every_prompt_token_has_its_own(strong_pair, model, shape, options):
    """In chunks, beside requests that do not ask, behind prompts that are cached, and asked twice."""
    llm = build(strong_pair, shape, **options)
    prompts = strong_pair.prompts([41, 9, 1, 30, 2], seed=3)
    asked = [params_of(3), SamplingParams(max_tokens=6, ignore_eos=True), params_of(0), params_of(12), params_of(1)]
    for _ in range(2):
        outputs = llm.generate(prompts, asked)
        assert outputs[1].prompt_logprobs is None
        for output, params in zip(outputs, asked, strict=True):
            if params.prompt_logprobs is not None:
                check(model, output, params.prompt_logprobs)
    free = llm.generate(prompts, [dataclasses.replace(each, prompt_logprobs=None) for each in asked])
    assert tokens(free) == tokens(outputs), "asking changed the tokens"
    assert free[0].metrics.num_cached_tokens > outputs[0].metrics.num_cached_tokens == 0


def test_a_prompt_that_is_put_back_keeps_what_it_knows(strong_pair, model):
    """With few pages requests give way and are computed again; every one has each log-probability once."""
    few = {"context_length": 128, "max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 8}
    llm = build(strong_pair, SHAPE, **few)
    prompts = strong_pair.prompts([30, 35, 28, 33, 31, 26], seed=5)
    outputs = llm.generate(prompts, params_of(2, max_tokens=40))
    assert llm.scheduler.num_retractions > 0
    for output in outputs:
        check(model, output, 2)
        assert len(output.token_ids) == 40
    llm.scheduler.check_integrity()


def test_one_that_is_put_back_in_the_middle_of_its_prompt_goes_on_where_it_knows(strong_pair, model):
    """Half prefilled, it gives its pages to older requests; then it computes again what it does not know."""
    few = {"context_length": 128, "max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 4}
    llm = build(strong_pair, SHAPE, **few)
    prompts = [*strong_pair.prompts([20, 20]), *strong_pair.prompts([90], seed=2)]
    older = SamplingParams(max_tokens=80, ignore_eos=True)
    requests = submit(llm, prompts, [older, older, params_of(2)])
    retracted, told = False, []
    for _, updates in pump(llm):
        long = requests[2]
        retracted |= bool(long.prompt_logprobs) and long.running is None
        told += [each.prompt_logprobs for each in updates if each.prompt_logprobs is not None]
    assert retracted, "the long prompt was never retracted while it was prefilled"
    (logprobs,) = told
    check(model, SimpleNamespace(prompt_token_ids=prompts[2], prompt_logprobs=(None, *logprobs)), 2)


def test_a_request_for_a_prompts_alone_ends_after_its_prefill(strong_pair, model):
    """max_tokens 0: no token, no round; the pages are free again, and the prompt is in the prefix cache."""
    llm = build(strong_pair, SHAPE, chunked_prefill_size=16, page_size=4)
    prompts = strong_pair.prompts([41, 1, 20], seed=6)
    outputs = llm.generate(prompts, params_of(1, max_tokens=0))
    for output in outputs:
        check(model, output, 1)
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
        assert output.metrics.target_forwards == 0
    llm.scheduler.check_integrity()
    assert not llm.scheduler.rows.by_row
    (again,) = llm.generate([prompts[0]], SamplingParams(max_tokens=3))
    assert again.metrics.num_cached_tokens == 40


def test_they_come_with_the_first_delta(strong_pair, model):
    llm = build(strong_pair, SHAPE)
    (prompt,) = strong_pair.prompts([20], seed=7)
    deltas = [*llm.stream(prompt, params_of(2, max_tokens=20))]
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert deltas[0].prompt_logprobs == deltas[-1].output.prompt_logprobs
    check(model, deltas[-1].output, 2)


def test_slices_are_no_larger_than_planned(strong_pair, monkeypatch):
    """However long a chunk is, no more logits are made at a time than the plan of memory counts."""
    llm = build(strong_pair, None, max_running_requests=1)
    maximum, seen = llm.engine.layout.prompt_lines, []
    whole = llm.engine.runner.target.logits
    monkeypatch.setattr(
        llm.engine.runner.target, "logits", lambda hidden: seen.append(hidden[..., 0].numel()) or whole(hidden)
    )
    llm.generate(strong_pair.prompts([100], seed=8), params_of(1))
    assert maximum == 16
    assert sum(seen) >= 99
    assert max(seen) == maximum


def test_logits_that_are_not_finite_end_that_request(strong_pair, monkeypatch):
    llm = build(strong_pair, None)
    whole, calls = llm.engine.runner.target.logits, []

    def broken(hidden):
        calls.append(1)
        return whole(hidden) * float("nan") if len(calls) == 1 and hidden.shape[0] > 4 else whole(hidden)

    monkeypatch.setattr(llm.engine.runner.target, "logits", broken)
    prompts = strong_pair.prompts([10, 10], seed=9)
    outputs = llm.generate(prompts, [params_of(1), SamplingParams(max_tokens=4, ignore_eos=True)])
    assert "not finite" in outputs[0].error
    assert len(outputs[1].token_ids) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be in"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        SamplingParams(**options)
