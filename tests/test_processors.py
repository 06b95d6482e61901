"""Options that change logits are exact inside an accepted chain: trees give what plain decoding and a slow oracle give.

The oracle is a loop over the logits of `transformers`, one token at a time, with the formulas written out in Python.
"""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from engines import accept_lens, build, pump, submit, tokens
from oracles import chi_square_tail, drawn, float32, philox4x32_10, warped
from test_exactness import GRID
from tiny_models import EOS
from treetop import SamplingParams
from treetop.engine.processors import words_of
from treetop.kernels.process import BIAS_SHIFT, ENDS, IN_PROMPT, ONE
from treetop.types.errors import InputError
from treetop.types.messages import RowHistory

VOCAB = 12
SHAPE = (4, 5, 16)

# What the table in docs/sampling.md lists, each by itself and then together.
OPTIONS = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "a reward for repeating": {"frequency_penalty": -0.4, "presence_penalty": -0.3, "repetition_penalty": 0.8},
    "logit_bias": {"logit_bias": {5: 2.5, 0: -100, 11: 0.75}},
    "min_tokens": {"min_tokens": 17, "ignore_eos": False, "stop_token_ids": (7, 9)},
    "allowed_token_ids": {"allowed_token_ids": (1, 4, 5, 6, 8, 11)},
    "all at once": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 1.0, 7: -0.5},
        "min_tokens": 9,
        "ignore_eos": False,
        "allowed_token_ids": (EOS, 4, 5, 6, 7, 8, 10),
    },
}
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.1},
    "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}


def params_of(option: str, way: str, seed: int = 5, max_tokens: int = 30) -> SamplingParams:
    given = {"ignore_eos": True, "max_tokens": max_tokens, "seed": seed, **WAYS[way], **OPTIONS[option]}
    return SamplingParams(**given)


def changed(logits: list[float], prompt, output, params: SamplingParams) -> list[float]:
    """The formulas, token by token."""
    result = []
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for token, logit in enumerate(logits):
        value, count = logit + float32(dict(params.logit_bias).get(token, 0.0)), output.count(token)
        if token in prompt or count:
            penalty = float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= count * float32(params.frequency_penalty) + (count > 0) * float32(params.presence_penalty)
        early = token in ends and len(output) < params.min_tokens
        out = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        result.append(-math.inf if early or out else value)
    return result


class Oracle:
    """One token at a time, from the logits of `transformers`."""

    def __init__(self, pair) -> None:
        self.model = LlamaForCausalLM.from_pretrained(pair.target, dtype=torch.float64).eval()
        self.known: dict[tuple[int, ...], list[float]] = {}

    def logits(self, ids) -> list[float]:
        if tuple(ids) not in self.known:
            with torch.no_grad():
                self.known[tuple(ids)] = self.model(torch.tensor([list(ids)])).logits[0, -1].tolist()
        return self.known[tuple(ids)]

    def weights(self, prompt, output, params: SamplingParams) -> list[float]:
        logits = changed(self.logits([*prompt, *output]), prompt, output, params)
        return warped(logits, float32(params.temperature), params.top_k, float32(params.top_p), float32(params.min_p))

    def run(self, prompt, params: SamplingParams) -> tuple[int, ...]:
        output: list[int] = []
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        while len(output) < params.max_tokens:
            weights = self.weights(prompt, output, params)
            coin = philox4x32_10([len(prompt) + len(output), 0, 0, 0], [params.seed, 0])[0] / 2**32
            output.append(drawn(weights, coin))
            if output[-1] in ends:
                break
        return tuple(output)


@pytest.fixture(scope="module")
def oracle(strong_pair):
    return Oracle(strong_pair)


@pytest.fixture(scope="module")
def asked(strong_pair, oracle):
    """Prompts, each with one option and one way to choose, and what the oracle says."""
    params = [params_of(option, way, seed) for seed, option in enumerate(OPTIONS) for way in WAYS]
    prompts = strong_pair.prompts([(7 * i) % 23 + 1 for i in range(len(params))])
    return prompts, params, [oracle.run(*each) for each in zip(prompts, params, strict=True)]


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
    ("shape", "graphs", "level"), [(SHAPE, "sim", 3), ((4, 3, 37), "off", 1), ((1, 5, 6), "sim", 2)]
)
def test_trees_equal_the_oracle(strong_pair, asked, shape, graphs, level):
    """All options and ways side by side in batches; also as captured graphs, on poisoned scratch."""
    check_tree(strong_pair, asked, shape, graphs=graphs, check_level=level)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "page", "chunk", "batch"), GRID)
def test_every_tree_of_the_grid_equals_the_oracle(strong_pair, asked, shape, page, chunk, batch):
    options = {"page_size": page, "chunked_prefill_size": chunk, "max_running_requests": batch}
    check_tree(strong_pair, asked, shape, graphs="sim", **options)


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


@pytest.fixture(scope="module")
def penalised(strong_pair):
    llm = build(strong_pair, (4, 3, 16), max_running_requests=64, context_length=64)
    (prompt,) = strong_pair.prompts([6], seed=9)
    params = [params_of("all at once", "sampled", seed, 9) for seed in range(700)]
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
