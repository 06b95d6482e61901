"""On four NVIDIA GPUs: ranks that share a model, experts, or both, captured, and one GPU's answers."""

from contextlib import closing

import pytest
import torch

from support import expert_pairs
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.tiny_models import Pair, save_copying_head, save_weak_llama
from treetop.engine.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")

OPTIONS = {"device": "cuda", "dtype": "float32", "context_length": 256, "page_size": 16}
SIZES = {"hidden_size": 512, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
GLM_SIZES = {"vocab_size": 211, "hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64}
LENGTHS = [9, 30, 5, 40]
PARAMS = greedy(60), sampled(3, 60, temperature=0.8, top_p=0.9)
PLAIN, CHAIN, TREE = None, (1, 3, 4), (4, 5, 16)
"""The two as (k, S, T)."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Each of four ranks has a K/V head, and drafts are accepted."""
    folder = tmp_path_factory.mktemp("llama")
    target = save_weak_llama(folder / "target", seed=3, strength=0.5, **SIZES)
    return Pair(target, save_copying_head(folder / "head", target, draft_vocab=160, seed=3))


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return expert_pairs.save_glm_with_mtp(tmp_path_factory.mktemp("glm"), **GLM_SIZES)


@pytest.fixture(scope="module")
def alone(pair):
    return of_ranks(pair, TREE, 1)


@pytest.fixture(scope="module")
def glm_alone(glm):
    return of_experts(glm, 1, [None])


def of_ranks(pair, shape, ranks):
    """What an engine answers to each of `PARAMS`; one of several GPUs takes long to start, so each is asked for all."""
    with closing(build(pair, shape, tp_size=ranks, **OPTIONS)) as llm:
        assert isinstance(llm.engine.launcher, CudaGraphs)
        return [llm.generate(pair.prompts(LENGTHS), params) for params in PARAMS]


def of_experts(glm, ranks, places, **options):
    """Likewise of ranks that share experts, for each of the places: the ranks that prompts go to, None for any."""
    asked = [(params, each) for each in places for params in PARAMS]
    prompts = Pair(glm, None).prompts(LENGTHS)
    return expert_pairs.answers(glm, expert_pairs.TREE, ranks, prompts, asked, **{**OPTIONS, **options})


def differ(have, want):
    """Answers whose tokens are not the same."""
    return sum(a != b for a, b in zip(tokens(have), tokens(want), strict=True))


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_four_gpus_give_what_one_gives(pair, alone, shape):
    """Greedy and sampled: tokens, but for a near tie, whatever one GPU drafts; of the same tree accept lengths, too."""
    for shared, expected in zip(of_ranks(pair, shape, 4), alone, strict=True):
        unequal = differ(shared, expected)
        assert unequal <= 1, "more than a near tie"
        if shape == TREE and not unequal:
            assert accept_lens(shared) == accept_lens(expected)
            assert sum(map(sum, accept_lens(shared))) > 0


def test_four_gpus_that_share_experts_give_what_one_gives(glm, glm_alone):
    """Each with a request, and one with all of them."""
    places = [0, 1, 2, 3], [3, 3, 3, 3]
    for shared, expected in zip(of_experts(glm, 4, places), glm_alone * len(places), strict=True):
        assert differ(shared, expected) <= 1, "more than a near tie"


def test_two_engines_of_two_gpus_that_share_experts_give_what_one_gpu_gives(glm, glm_alone):
    """Two requests each: experts are divided among all four, a model between two."""
    for shared, expected in zip(of_experts(glm, 2, [[0, 1, 0, 1]], tp_size=2), glm_alone, strict=True):
        assert differ(shared, expected) <= 1, "more than a near tie"
