"""Options that change logits are exact inside an accepted chain: trees give what plain decoding and a slow oracle give.

The oracle is a loop over the logits of `transformers`, one token at a time, with the formulas written out in Python.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest

from support.engines import accept_lens, build, pump, submit, tokens
from support.grids import GRID, few_of
from support.logit_options import OPTIONS, SHAPE, VOCAB, WAYS, Oracle, params_of
from support.oracles import chi_square_tail
from support.tiny_models import EOS
from treetop import SamplingParams
from treetop.engine.features.processors import words_of
from treetop.kernels.sampling.process import BIAS_SHIFT, ENDS, IN_PROMPT, ONE
from treetop.types.errors import InputError
from treetop.types.messages import RowHistory

# Options that change logits, each by itself and then together.


@pytest.fixture(scope="module")
def oracle(strong_pair):
    return Oracle(strong_pair)


@pytest.fixture(scope="module")
def asked(strong_pair, oracle):
    """Prompts, each with one option and one way to choose, and what the oracle says."""
    params = [params_of(option, way, seed) for seed, option in enumerate(OPTIONS) for way in WAYS]
    prompts = strong_pair.prompts([(7 * i) % 23 + 1 for i in range(len(params))])
    return prompts, params, [oracle.run(*each) for each in zip(prompts, params, strict=True)]


@pytest.mark.slow
def test_the_options_change_the_output(strong_pair, asked):
    """Each of them, in every way to choose: else a test that compares would prove nothing."""
    prompts, params, want = asked
    neutral = [
        SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, p.max_tokens, seed=p.seed, ignore_eos=True)
        for p in params
    ]
    assert not any(
        a == b for a, b in zip(tokens(build(strong_pair, None).generate(prompts, neutral)), want, strict=True)
    )


def test_plain_decoding_equals_the_oracle(strong_pair, asked):
    prompts, params, want = asked
    assert tokens(build(strong_pair, None).generate(prompts, params)) == want


def check_tree(pair, asked, shape, **options) -> None:
    prompts, params, want = asked
    outputs = build(pair, shape, **options).generate(prompts, params)
    assert tokens(outputs) == want
    if shape[1] >= 2 and shape[2] >= 6:
        assert sum(map(sum, accept_lens(outputs))) > len(outputs), "hardly anything was accepted"


@pytest.mark.parametrize(
    ("shape", "graphs", "level"), few_of([(SHAPE, "sim", 3), ((4, 3, 37), "off", 1), ((1, 5, 6), "sim", 2)], 0, 1)
)
def test_trees_equal_the_oracle(strong_pair, asked, shape, graphs, level):
    """All options and ways side by side in batches; also as captured graphs, on poisoned scratch."""
    check_tree(strong_pair, asked, shape, graphs=graphs, check_level=level)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "page", "chunk", "batch"), GRID)
def test_every_tree_of_the_grid_equals_the_oracle(strong_pair, asked, shape, page, chunk, batch):
    options = {"page_size": page, "chunked_prefill_size": chunk, "max_running_requests": batch}
    check_tree(strong_pair, asked, shape, graphs="sim", **options)


@pytest.mark.slow
def test_retraction_and_steps_in_flight_change_nothing(strong_pair, asked):
    """A retracted request goes on with the counts of what it had emitted; its row may have been another's."""
    prompts, params, want = asked
    llm = build(
        strong_pair, (2, 3, 8), page_size=4, context_length=80, max_total_tokens=128, overlap=True, check_level=3
    )
    requests = submit(llm, prompts, params)
    for _ in pump(llm):
        pass
    assert llm.scheduler.num_retractions > 3
    assert [tuple(request.output_ids) for request in requests] == want


def test_prompts_that_the_cache_knows_count_too(strong_pair, oracle):
    """The chunk that is computed is shorter than the prompt; the repetition penalty sees all of it."""
    llm = build(strong_pair, SHAPE, page_size=4)
    (prompt,) = strong_pair.prompts([30], seed=3)
    params = params_of("repetition_penalty", "sampled")
    for _ in range(2):
        (output,) = llm.generate([prompt], params)
        assert output.token_ids == oracle.run(prompt, params)
    assert output.metrics.num_cached_tokens >= 16


@pytest.mark.slow
def test_the_row_of_a_request_forgets_the_one_before(strong_pair, oracle):
    """One row: options after none, none after options, and other options after some."""
    llm = build(strong_pair, SHAPE, max_running_requests=1)
    (prompt,) = strong_pair.prompts([8], seed=4)
    free = SamplingParams(temperature=1.1, seed=3, max_tokens=30, ignore_eos=True)
    for params in (free, params_of("all at once", "sampled"), free, params_of("logit_bias", "greedy"), free):
        assert llm.generate([prompt], params)[0].token_ids == oracle.run(prompt, params)


def test_a_request_that_asks_for_nothing_gets_its_tokens_among_those_that_do(strong_pair, oracle):
    llm = build(strong_pair, SHAPE)
    prompts = strong_pair.prompts([9, 4, 13, 6, 21, 8], seed=6)
    free = [SamplingParams(max_tokens=30, seed=8, ignore_eos=True, **WAYS[way]) for way in WAYS]
    params = [*free, *(params_of("all at once", way) for way in WAYS)]
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == [oracle.run(*each) for each in zip(prompts, params, strict=True)]


def test_a_model_may_name_an_end_that_is_not_in_its_vocabulary():
    """Checkpoints do; such a token is never chosen, and has no word."""
    history = RowHistory((4, 4, 7), (7, 5, 7), frozenset({EOS, VOCAB, 10**6}))
    words = words_of(SamplingParams(min_tokens=4, logit_bias={5: 1.0}), history, VOCAB)
    assert words == {4: IN_PROMPT, 7: IN_PROMPT + 2 * ONE, 5: ONE | 1 << BIAS_SHIFT, EOS: ENDS}


@pytest.mark.parametrize("position", [0, 1, 3])
def test_tokens_with_penalties_follow_the_changed_distribution(penalised, oracle, position):
    """Counts fit the exact mixture over what was sampled before; position 0 is the prefill's, the others are trees'."""
    prompt, params, outputs = penalised
    observed, expected = [0.0] * VOCAB, [0.0] * VOCAB
    for output in outputs:
        probs = oracle.weights(prompt, list(output.token_ids[:position]), params)
        assert probs[output.token_ids[position]] > 0, "a token that is ruled out was emitted"
        observed[output.token_ids[position]] += 1
        expected = [e + p for e, p in zip(expected, probs, strict=True)]
    assert chi_square_tail(observed, expected) > 1e-4


@pytest.mark.parametrize("position", [0, 1])
def test_tokens_come_as_often_as_their_logprobs_say(penalised, position):
    """After the commonest history: the prefill's first token, and one that a tree gave."""
    _, _, outputs = penalised
    before = Counter(output.token_ids[:position] for output in outputs).most_common(1)[0][0]
    alike = [output for output in outputs if output.token_ids[:position] == before]
    said = {output.token_ids[position]: output.logprobs[position].processed for output in alike}
    counts = Counter(output.token_ids[position] for output in alike)
    expected = [len(alike) * math.exp(logprob) for logprob in said.values()]
    observed = [*map(counts.__getitem__, said), 0]
    assert sum(expected) == pytest.approx(len(alike), rel=0.03)  # what never came is little
    assert chi_square_tail(observed, [*expected, max(len(alike) - sum(expected), 1e-9)]) > 1e-4


@pytest.fixture(scope="module")
def penalised(strong_pair):
    llm = build(strong_pair, (4, 3, 16), max_running_requests=64, context_length=64)
    (prompt,) = strong_pair.prompts([6], seed=9)
    params = [replace(params_of("all at once", "sampled", seed, 9), logprobs=0) for seed in range(700)]
    outputs = llm.generate([prompt] * len(params), params)
    assert sum(sum(output.metrics.accept_lens) for output in outputs) > 700, "hardly a draft was accepted"
    return prompt, params[0], outputs


def test_an_engine_without_processors_refuses_what_needs_them(strong_pair):
    llm = build(strong_pair, SHAPE, disable_logits_processors=True, graphs="sim")
    prompts = strong_pair.prompts([5])
    with pytest.raises(InputError, match=r"min_tokens, logit_bias: .*--disable-logits-processors"):
        llm.generate(prompts, SamplingParams(min_tokens=3, logit_bias={3: 1.0}))
    assert llm.engine.runner.state.processors is None
    assert llm.generate(prompts, SamplingParams(max_tokens=9, logprobs=1))[0].logprobs is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be in"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be in"),
        ({"min_tokens": True}, "min_tokens must be an integer"),
        ({"logit_bias": {3: 101}}, "logit_bias: a bias"),
        ({"logit_bias": {-3: 1}}, "logit_bias: token ids"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "twice"),
        ({"logit_bias": dict.fromkeys(range(512), 1.0)}, "511 tokens, got 512"),
        ({"logit_bias": [3]}, "logit_bias must be a dict"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": ("a",)}, "allowed_token_ids must be a list"),
        ({"logprobs": 21}, "logprobs must be in"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"logit_bias": {12: 1.0}}, "logit_bias token id 12 lies outside the vocabulary"),
        ({"allowed_token_ids": [99]}, "allowed_token_ids token id 99 lies outside"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "every allowed token would end the request"),
    ],
)
def test_what_cannot_be_is_refused_by_name(strong_pair, options, words):
    with pytest.raises(InputError, match=words):
        REFUSING.setdefault("llm", build(strong_pair, None)).generate(
            strong_pair.prompts([3]), SamplingParams(**options)
        )


REFUSING: dict = {}
