"""Mixed steps: a chunk of prompts in the forward of a round changes no token, whatever the round and the model."""

from collections import Counter
from dataclasses import replace

import pytest

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.fake_recorder import FakeRecorder
from treetop import SamplingParams
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.rounds import RoundKey
from treetop.types.messages import MixedPlan

SHAPE = (2, 3, 6)
LENGTHS = [9, 30, 1, 17, 44, 22, 13, 5]


def asked(count):
    """Greedy, sampled and filtered requests of different lengths, with log-probabilities here and there."""
    kinds = [
        lambda i: greedy(26 - i),
        lambda i: sampled(i, 22),
        lambda i: sampled(i, 18 + i, top_k=4, temperature=0.8, logprobs=2),
        lambda i: SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(i % 12,), prompt_logprobs=1),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def run(llm, prompts, params):
    """What requests get, with as many steps in flight as there may be; and how many steps there were of each kind."""
    requests = submit(llm, prompts, params)
    kinds = Counter(type(plan) for plan, _ in pump(llm))
    return [tuple(request.output_ids) for request in requests], kinds


@pytest.fixture(scope="module")
def plainly(strong_pair):
    """Prompts, what is asked, and what plain decoding gives, a step at a time."""
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None, overlap=False).generate(prompts, params))


@pytest.mark.parametrize(
    ("shape", "graphs", "overlap", "radix"),
    [
        (None, "off", False, True),
        (None, "sim", True, False),
        ((1, 3, 4), "sim", True, True),
        (SHAPE, "off", False, False),
        ((4, 3, 16), "sim", True, True),
    ],
)
def test_no_token_changes_beside_prompts(strong_pair, plainly, *, shape, graphs, overlap, radix):
    """Plain rounds, chains, trees; prefixes that are found; pages, padding and buffers poisoned."""
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "page_size": 4, "max_running_requests": 4, "check_level": 3}
    options |= {"graphs": graphs, "overlap": overlap, "disable_radix_cache": not radix}
    llm = build(strong_pair, shape, mixed_chunk="on", **options)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert kinds[MixedPlan] > 8
    assert run(llm, prompts, params)[0] == expected  # with what the cache has, if it has anything
    assert not llm.scheduler.rows.by_row


def test_log_probabilities_are_those_of_plain_decoding(strong_pair):
    """Of outputs and of prompts, in steps with rounds and chunks that ask."""
    prompts = strong_pair.prompts(LENGTHS)
    params = [replace(each, logprobs=2, prompt_logprobs=1) for each in asked(len(prompts))]
    options = {"chunked_prefill_size": 8, "max_running_requests": 4, "disable_radix_cache": True}
    plain, mixed = (
        build(strong_pair, shape, mixed_chunk=mode, **options).generate(prompts, params)
        for shape, mode in ((None, "off"), (SHAPE, "on"))
    )
    assert tokens(mixed) == tokens(plain)
    for one, other in zip(plain, mixed, strict=True):
        for part in ("logprobs", "prompt_logprobs"):
            for mine, theirs in zip(getattr(one, part), getattr(other, part), strict=True):
                if mine is not None:
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_requests_that_are_retracted_get_the_same(strong_pair, plainly):
    """Pages are short: a round that cannot be planned puts nobody back who is in the chunk beside it."""
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "page_size": 4, "max_running_requests": 4, "context_length": 96}
    llm = build(strong_pair, SHAPE, mixed_chunk="on", check_level=3, max_total_tokens=120, **options)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert llm.scheduler.num_retractions > 0
    assert kinds[MixedPlan] > 4


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_captured_rounds_lend_their_forward_to_prompts(strong_pair, plainly, shape):
    """DRAFT and EXTEND are graphs that were captured at the start, the forward between them is not; also where the host
    says between them what may follow.
    """
    prompts, params, expected = plainly
    options = {"chunked_prefill_size": 8, "max_running_requests": 4, "disable_radix_cache": True, "overlap": True}
    llm, recorder = build(strong_pair, shape, mixed_chunk="on", **options), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    at_start = len(graphs)
    got, kinds = run(llm, prompts, params)
    assert got == expected
    assert sum(key.mixed for key in recorder.replayed if isinstance(key, RoundKey)) == (
        kinds[MixedPlan] if shape else 0
    )
    sampled_later = {key for key in recorder.recorded[at_start:] if isinstance(key, RoundKey) and key.mixed}
    assert not sampled_later, "how tokens are chosen is between the graphs"
