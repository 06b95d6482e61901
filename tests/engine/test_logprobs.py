"""Log-probabilities are those of the target's raw logits where each token was chosen, with trees and without."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from support.engines import build, tokens
from support.grids import few_of
from treetop import SamplingParams

SHAPE = (4, 5, 16)
WAYS = {
    "greedy": {"logprobs": 3},
    "sampled": {"logprobs": 0, "temperature": 1.2},
    "changed": {"logprobs": 20, "temperature": 0.9, "top_k": 5, "frequency_penalty": 0.8, "logit_bias": {5: 3.0}},
}


@pytest.fixture(scope="module")
def model(strong_pair):
    return LlamaForCausalLM.from_pretrained(strong_pair.target, dtype=torch.float64).eval()


def params_of(way: str, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 25, "seed": 4, "ignore_eos": True, **WAYS[way], **changes})


def expected(model, output) -> torch.Tensor:
    """log_softmax of the logits that each token was chosen from, [tokens, vocab]."""
    ids = [*output.prompt_token_ids, *output.token_ids]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[len(output.prompt_token_ids) - 1 : -1]


def check(model, output, maximum: int) -> None:
    assert len(output.logprobs) == len(output.token_ids)
    for token, got, want in zip(output.token_ids, output.logprobs, expected(model, output), strict=True):
        assert got.logprob == pytest.approx(want[token].item(), abs=2e-5)
        values, ids = want.sort(descending=True, stable=True)
        assert [token_id for token_id, _ in got.top] == ids[:maximum].tolist()
        assert [logprob for _, logprob in got.top] == pytest.approx(values[:maximum].tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("shape", "options"), few_of([(None, {}), (SHAPE, {"graphs": "sim", "check_level": 3}), ((1, 5, 6), {})], 0, 1)
)
def test_every_token_has_the_logprobs_of_its_own_row(strong_pair, model, shape, options):
    """Asked for in one batch with requests that do not ask and that ask for more; a tiny vocabulary has few best."""
    llm = build(strong_pair, shape, **options)
    prompts = strong_pair.prompts([9, 3, 14, 6], seed=2)
    free = SamplingParams(max_tokens=25, ignore_eos=True)
    outputs = llm.generate(prompts, [params_of("greedy"), free, *map(params_of, ("sampled", "changed"))])
    assert outputs[1].logprobs is None
    for output, maximum in zip((outputs[0], *outputs[2:]), (3, 0, 12), strict=True):
        check(model, output, maximum)
    asked = [params_of(way, logprobs=None) for way in WAYS]
    unasked = llm.generate([prompts[0], *prompts[2:]], asked)
    assert tokens(unasked) == tokens([outputs[0], *outputs[2:]]), "asking changed the tokens"


def test_what_a_stop_cuts_off_has_none(weak_pair):
    """Stop ids, limits and stop strings inside an accepted chain: as many log-probabilities as tokens."""
    llm = build(weak_pair, SHAPE)
    (whole,) = llm.generate(["def f(x):"], params_of("greedy", max_tokens=30))
    for changes in ({"max_tokens": 7}, {"stop_token_ids": (whole.token_ids[9],)}, {"stop": whole.text[6:9]}):
        (output,) = llm.generate(["def f(x):"], params_of("greedy", **{"max_tokens": 30, **changes}))
        count = len(output.token_ids)
        assert count < 30
        assert [each.logprob for each in output.logprobs] == pytest.approx(
            [each.logprob for each in whole.logprobs[:count]], abs=1e-6
        )


def test_a_stream_carries_the_tokens_with_theirs(weak_pair):
    llm = build(weak_pair, SHAPE)
    seen = []
    for delta in llm.stream("def f(x):", params_of("greedy")):
        seen += delta.tokens
        if delta.output is not None:
            assert [token for token, _ in seen] == list(delta.output.token_ids)
            assert tuple(each for _, each in seen) == delta.output.logprobs
    assert not any(math.isnan(each.logprob) for _, each in seen)
