"""Sampled tokens of the production engine have the target's distribution, with trees and without."""

import pytest
import torch
from transformers import LlamaForCausalLM

from support.engines import build, greedy, sampled, tokens
from support.oracles import chi_square_tail, float32, warped
from treetop import SamplingParams

SAMPLES = 600
SHAPE = (4, 3, 16)
KINDS = [  # temperature, top_k, top_p, min_p of one row each, all in one batch
    (0.4, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.2, 0, 0.75, 0.0),
    (2.0, 0, 1.0, 0.125),
    (1.0, 6, 0.875, 0.0625),
]
LIMIT = 1e-4  # of a test whose seeds are fixed: it passes or fails for ever


@pytest.fixture(scope="module")
def drawn_outputs(strong_pair):
    """kind -> SAMPLES outputs of four tokens for one prompt; every batch holds all kinds and greedy rows."""
    llm = build(strong_pair, SHAPE, max_running_requests=64, context_length=64)
    prompt = strong_pair.prompts([6], seed=9)[0]
    params = []
    for sample in range(SAMPLES):
        for kind, (temperature, top_k, top_p, min_p) in enumerate(KINDS):
            seed = 1_000_003 * kind + sample
            params.append(sampled(seed, 4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
        if sample % 9 == 0:
            params.append(greedy(4))
    outputs = llm.generate([prompt] * len(params), params)
    assert sum(sum(output.metrics.accept_lens) for output in outputs) > SAMPLES, "hardly a draft was accepted"
    by_params: dict[tuple, list] = {}
    for each, output in zip(params, outputs, strict=True):
        by_params.setdefault((each.temperature, each.top_k, each.top_p, each.min_p), []).append(output)
    return prompt, by_params


@pytest.fixture(scope="module")
def distribution(strong_pair, drawn_outputs):
    """(ids, kind) -> exact probabilities of the next token, from transformers in float64."""
    model = LlamaForCausalLM.from_pretrained(strong_pair.target, dtype=torch.float64).eval()
    prompt, by_params = drawn_outputs
    known: dict[tuple[int, ...], list[float]] = {}

    def look_up(lines):
        with torch.no_grad():
            known.update(zip(lines, model(torch.tensor(lines)).logits[:, -1].tolist(), strict=True))

    for position in range(4):  # all that was drawn after, at once
        look_up([*{(*prompt, *output.token_ids[:position]) for each in by_params.values() for output in each}])

    def probabilities(ids, kind):
        if tuple(ids) not in known:
            look_up([tuple(ids)])
        temperature, top_k, top_p, min_p = kind
        return warped(known[tuple(ids)], float32(temperature), top_k, top_p, min_p)

    return probabilities


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_tokens_follow_the_targets_distribution_at_every_depth(drawn_outputs, distribution, kind, position):
    """Token n's counts fit the exact mixture over the prefixes that were sampled before it.

    Token 0 comes from the prefill, the later ones from within trees. No token of probability 0 appears.
    """
    prompt, by_params = drawn_outputs
    outputs = by_params[kind]
    observed, expected = [0.0] * 12, [0.0] * 12
    for output in outputs:
        probs = distribution([*prompt, *output.token_ids[:position]], kind)
        token = output.token_ids[position]
        assert probs[token] > 0, "a token that the filters exclude was emitted"
        observed[token] += 1
        expected = [e + p for e, p in zip(expected, probs, strict=True)]
    assert chi_square_tail(observed, expected) > LIMIT


@pytest.mark.parametrize("kind", KINDS[:2])
def test_pairs_of_neighbouring_tokens_are_drawn_independently(drawn_outputs, distribution, kind):
    """Joint counts of tokens 1 and 2 fit p(first) p(second | first): their uniforms are independent."""
    prompt, by_params = drawn_outputs
    starts: dict[int, list] = {}
    for output in by_params[kind]:
        starts.setdefault(output.token_ids[0], []).append(output)
    common = max(starts.values(), key=len)
    start = common[0].token_ids[0]
    observed, expected = [0.0] * 144, []
    first = distribution([*prompt, start], kind)
    for a, p in enumerate(first):
        expected += [len(common) * p * each for each in distribution([*prompt, start, a], kind)]
    for output in common:
        observed[12 * output.token_ids[1] + output.token_ids[2]] += 1
    assert len(common) > 100
    assert chi_square_tail(observed, expected) > LIMIT


def test_greedy_rows_in_a_sampling_batch_are_greedy(strong_pair, drawn_outputs):
    """A greedy request gives its one output among whatever neighbours."""
    prompt, by_params = drawn_outputs
    (alone,) = build(strong_pair, None).generate([prompt], greedy(4))
    assert {output.token_ids for output in by_params[(0.0, 0, 1.0, 0.0)]} == {alone.token_ids}


def test_the_test_of_fit_rejects_a_wrong_distribution(drawn_outputs, distribution):
    """The same counts against another temperature's probabilities fail: the test has power."""
    prompt, by_params = drawn_outputs
    observed = [0.0] * 12
    for output in by_params[KINDS[0]]:
        observed[output.token_ids[0]] += 1
    wrong = distribution(prompt, KINDS[1])
    assert chi_square_tail(observed, [SAMPLES * p for p in wrong]) < LIMIT


def test_the_same_seeds_give_the_same_tokens_and_fresh_ones_differ(strong_pair):
    """A seed fixes a request; without one the engine's own seed fixes the run, request by request."""
    prompts = strong_pair.prompts([5, 5, 5])
    runs = []
    for engine_seed in (0, 0, 1):
        llm = build(strong_pair, SHAPE, seed=engine_seed)
        unseeded = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
        runs.append((tokens(llm.generate(prompts, sampled(3, 30))), tokens(llm.generate([prompts[0]] * 3, unseeded))))
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[2][0]
    assert runs[0][1] != runs[2][1]
    assert len(set(runs[0][1])) == 3
