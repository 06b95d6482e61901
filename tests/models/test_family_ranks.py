"""Families whose layers have a mechanism of their own, on ranks that share the model or its experts."""

import pytest

from support.engines import build, greedy, sampled, tokens
from support.families import FAMILIES
from support.grids import few_values
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.ranks import ranks_on_threads

LENGTHS = (1, 12, 40)
NEWER = ("nemotron", "phi", "falcon 40b", "qwen2 moe", "lfm2", "falcon h1", "nemotron h", "kimi linear", "ling 3")


def serve(pair, shape, **options):
    """Tokens of three prompts, greedy and sampled, and of one again, whose prefix is cached."""
    llm = build(pair, shape, context_length=96, chunked_prefill_size=16, page_size=4, **options)
    try:
        prompts = pair.prompts(LENGTHS, seed=3)
        outputs = llm.generate(prompts, [greedy(12), sampled(3, 12), greedy(12)])
        again = llm.generate(prompts[-1:], greedy(8))
        if "ep_size" not in options:  # whose books are in each rank
            llm.scheduler.check_integrity()
    finally:
        llm.close()
    return tokens(outputs), tokens(again)


@pytest.mark.parametrize(
    "name",
    few_values(
        [
            "gemma4",
            "gemma4 experts",
            "laguna",
            "step",
            "mimo v2",
            "ernie moe",
            "glm 5.2",
            "llama 4",
            "qwen3 next",
            *("ministral3", "hunyuan moe", "qwen3.5", *NEWER),
            "granite 4 hybrid",
            "longcat",
        ],
        1,
        2,
        4,
        6,
        7,
        8,
        22,
    ),
)
def test_ranks_give_what_one_gives(name, tmp_path):
    """float64: gates, sinks, narrow values, K/V of earlier layers and embeddings by layer, cut by heads or whole."""
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    with ranks_on_threads():
        assert serve(pair, (2, 3, 6), tp_size=2) == serve(pair, (2, 3, 6))


@pytest.mark.parametrize(
    "name",
    few_values(
        [
            *("gemma4 experts", "laguna", "deepseek v2", "llama 4", "qwen3.5 moe", "longcat"),
            *("step", "mistral4", "nemotron h", "lfm2 moe"),
        ],
        0,
        3,
        5,
    ),
)
def test_ranks_that_share_experts_give_what_one_gives(name, tmp_path):
    """float64: experts of which the router reads something else, stored one by one, together, and apart."""
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    with expert_ranks_on_threads():
        assert serve(pair, (2, 3, 6), ep_size=2) == serve(pair, (2, 3, 6))
