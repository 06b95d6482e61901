"""Packed weights that ranks share: dense ones cut along rows and groups, experts as they are, give what one rank gives.

Ranks are threads here, which start in a second.
"""

from itertools import product

import pytest

from support.engines import build, greedy, sampled, tokens
from support.grids import few_of
from support.quantized import awq, by_library, fp8_blocks, fp8_whole, nvfp4_of_modelopt, quantized
from support.tiny_models import Pair, save_random_experts, save_random_head, save_random_llama
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.ranks import ranks_on_threads

FORMATS = {
    "fp8 tensor": fp8_whole({"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 blocks": fp8_blocks(16, 16),
    "w4a16": by_library("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
    "awq": awq(16),
    "nvfp4": nvfp4_of_modelopt({"quant_method": "modelopt", "ignore": ["lm_head"], "quant_algo": "NVFP4"}),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 12}
    dense = save_random_llama(folder / "dense", seed=8, intermediate_size=128, **sizes)
    more = {**sizes, "moe_intermediate_size": 64, "intermediate_size": 96}
    experts = save_random_experts(folder / "experts", "qwen3_moe", seed=3, **more)
    return {
        "dense": Pair(dense, save_random_head(folder / "dense-head", dense, draft_vocab=8, seed=2)),
        "experts": Pair(experts, save_random_head(folder / "experts-head", experts, draft_vocab=8, seed=2)),
    }


def serve(pair, shape, **options):
    """Tokens of three prompts, greedy and sampled."""
    llm = build(pair, shape, context_length=96, chunked_prefill_size=16, page_size=4, **options)
    try:
        return tokens(llm.generate(pair.prompts((1, 12, 40), seed=3), [greedy(12), sampled(3, 12), greedy(12)]))
    finally:
        llm.close()


@pytest.mark.parametrize(("kind", "name"), few_of([*product(("dense", "experts"), FORMATS)], 0, 2))
def test_ranks_with_packed_weights_give_what_one_gives_with_decoded_ones(kind, name, pairs, tmp_path):
    """float64, with trees: `--tp-size 2`, and of experts `--ep-size 2`."""
    folder, _ = quantized(pairs[kind].target, tmp_path / "target", FORMATS[name])
    pair = Pair(folder, pairs[kind].head)
    want = serve(pair, (2, 3, 6), dequantize_weights=True)
    with ranks_on_threads():
        assert serve(pair, (2, 3, 6), tp_size=2, dequantize_weights=False) == want
    if kind == "experts":
        with expert_ranks_on_threads():
            assert serve(pair, (2, 3, 6), ep_size=2, dequantize_weights=False) == want
