"""On four NVIDIA GPUs, in float32 and captured: ranks that share a model, experts, or both give one GPU's answers.

python -m pytest tests/gpu/test_gpu_four.py -q
"""

import pytest
import torch

from support.engines import accept_lens, greedy, sampled, tokens
from support.expert_pairs import TREE, build, save_glm_with_mtp
from support.tiny_models import Pair
from treetop import LLM

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")

PROMPTS = ["def area(radius):", "class Queue:\n    def __init__(self", "import os\n\ndef walk(path):\n    for name in"]
PARAMS = greedy(60), sampled(3, 60, temperature=0.8, top_p=0.9)


def served(llm, prompts):
    try:
        return [llm.generate(prompts, params) for params in PARAMS]
    finally:
        llm.close()


def but_for_a_near_tie(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        differ = sum(a != b for a, b in zip(tokens(mine), tokens(theirs), strict=True))
        assert differ <= 1, "more than a near tie"
        if not differ:
            assert accept_lens(mine) == accept_lens(theirs)


@pytest.mark.parametrize("shape", [None, (5, 4, 16)])
def test_four_ranks_of_a_model_give_what_one_gives(shape):
    """Plain decoding and trees, greedy and sampled."""
    options = {"dtype": "float32", "max_running_requests": 8, "page_size": 16, "device": "cuda"}
    if shape is None:
        options["speculative_algorithm"] = "NONE"
    else:
        names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
        options |= dict(zip(names, shape, strict=True))
    but_for_a_near_tie(served(LLM(**options, tp_size=4), PROMPTS * 2), served(LLM(**options), PROMPTS * 2))


def test_four_ranks_of_experts_and_two_engines_of_two_ranks_give_what_one_gives(tmp_path):
    """A GLM-4.5 with its MTP layer; experts are divided among all four."""
    sizes = {"vocab_size": 211, "hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64}
    folder = save_glm_with_mtp(tmp_path, **sizes)
    prompts = Pair(folder, None).prompts([9, 30, 5, 40])
    options = {"device": "cuda", "dtype": "float32", "context_length": 256, "page_size": 16}
    alone = served(build(folder, TREE, 1, **options), prompts)
    but_for_a_near_tie(served(build(folder, TREE, 4, **options), prompts), alone)
    but_for_a_near_tie(served(build(folder, TREE, 2, tp_size=2, **options), prompts), alone)
