"""On a GPU: options that change logits, and log-probabilities, in captured rounds; trees equal plain decoding.

float32 without TF32, and equality by the design's rule, see `test_gpu_exactness.py`; where logits are changed the rule
cannot look at them, so sequences may part at most once in 10^3 tokens.
"""

import random

import pytest
import torch

from support.drain import held_out
from support.engines import greedy, tokens
from support.gpu_pairs import HEAD, make
from treetop import SamplingParams
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.types.sampling import SamplingMode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COUNT = 60
OPTIONS = [
    {"presence_penalty": 0.9, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.3},
    {"logit_bias": {40: 3.0, 17: -100.0, 4095: 1.5}, "min_tokens": 30, "ignore_eos": False},
    {"allowed_token_ids": tuple(range(20, 2000))},
]
WAYS = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01}]


def all_params(**changes) -> list[SamplingParams]:
    neutral = {"max_tokens": COUNT, "ignore_eos": True, **changes}
    return [
        SamplingParams(**{**neutral, **way, **option}, seed=seed)
        for seed, (option, way) in enumerate((option, way) for option in OPTIONS for way in WAYS)
    ]


@pytest.fixture(scope="module")
def plain():
    return make(None, max_running_requests=16)


@pytest.fixture(scope="module")
def prompts(plain):
    return held_out(plain, len(OPTIONS) * len(WAYS))


@pytest.mark.parametrize("shape", [(5, 4, 16), (3, 1, 4), (8, 8, 32)])
def test_captured_trees_equal_plain_decoding(plain, prompts, shape):
    llm = make(HEAD, shape, max_running_requests=16)
    assert isinstance(llm.engine.launcher, CudaGraphs)
    want, got = (tokens(each.generate(prompts, all_params())) for each in (plain, llm))
    parted = sum(a != b for a, b in zip(want, got, strict=True))
    assert parted <= 1, f"{parted} of {len(want)} sequences differ"
    assert want != tokens(plain.generate(prompts, greedy(COUNT)))
    assert {key.choice for key in llm.engine.launcher._graphs} >= {SamplingMode.GREEDY, SamplingMode.PROCESS}


def test_kernels_give_the_tokens_of_the_reference_on_a_cpu(prompts):
    """The same requests on this machine's CPU, by plain tensor operations."""
    there = make(HEAD, max_running_requests=16)
    here = make(HEAD, max_running_requests=16, device="cpu")
    want, got = (tokens(llm.generate(prompts, all_params())) for llm in (here, there))
    assert sum(a != b for a, b in zip(want, got, strict=True)) <= 2


class Whims:
    """A set of tokens for each output, drawn from it, that can be asked along trees."""

    def __init__(self, seed: int) -> None:
        self._seed, self._output = seed, []

    def allowed(self, new_ids):
        self._output.extend(new_ids)
        dice = random.Random(f"{self._seed} {self._output}")
        return [dice.randrange(20, 4000)] if dice.random() < 0.3 else sorted(dice.sample(range(20, 4000), 2000))

    def rollback(self, num_tokens):
        del self._output[-num_tokens:]


def test_captured_rounds_stop_for_the_masks_of_constrained_rows(plain, prompts):
    """Half the rows are constrained; their trees accept drafts, and all tokens are those of plain decoding."""
    llm, params = make(HEAD, max_running_requests=16), all_params()
    held = [Whims(seed) if seed % 2 else None for seed in range(len(params))]
    again = [Whims(seed) if seed % 2 else None for seed in range(len(params))]
    want, got = plain.generate(prompts, params, held), llm.generate(prompts, params, again)
    assert sum(a != b for a, b in zip(tokens(want), tokens(got), strict=True)) <= 1
    assert any(key.grammar_masked for key in llm.engine.launcher._graphs)
    assert sum(sum(output.metrics.accept_lens) for output in got[1::2]) > 0


def test_a_retracted_request_goes_on_with_its_counts(plain, prompts):
    llm = make(HEAD, max_running_requests=8, context_length=256, max_total_tokens=768, page_size=16)
    params = all_params()
    short = [prompt[:40] for prompt in prompts]
    want, got = (tokens(each.generate(short, params)) for each in (plain, llm))
    assert sum(a != b for a, b in zip(want, got, strict=True)) <= 1
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("draft", [None, HEAD])
def test_log_probabilities_are_those_of_the_dense_model(prompts, draft):
    llm = make(draft)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, logprobs=20, frequency_penalty=0.5)
    for output in llm.generate(prompts[:3], params):
        assert len(output.logprobs) == len(output.token_ids)
        for index, (token, got) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            logits = llm.engine.next_logits([*output.prompt_token_ids, *output.token_ids[:index]])
            want = logits.double().log_softmax(-1)
            assert got.logprob == pytest.approx(want[token].item(), abs=2e-3)
            best = want.topk(20).values.tolist()
            assert [each for _, each in got.top] == pytest.approx(best, abs=2e-3)
            assert [want[each].item() for each, _ in got.top] == pytest.approx(best, abs=4e-3)
