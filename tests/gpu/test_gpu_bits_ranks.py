"""`--exactness bits` on two NVIDIA GPUs: captured trees have the bits of plain decoding on as many ranks, alone.

python -m pytest tests/gpu/test_gpu_bits_ranks.py -q
"""

import pytest
import torch

from support import expert_pairs, gpu_ranks
from support.bits import asked, bits
from support.engines import accept_lens, build
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop.engine.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

LENGTHS = [1, 17, 60, 126, 500, 507]
"""Outputs of these cross the end of attention's blocks, of 64 positions, and of its first segment, of 512. Prompts of
the last two are more rows than peer memory takes."""
BITS = {"exactness": "bits", "dtype": "bfloat16", "device": "cuda", "context_length": 600, "page_size": 16}
SIZES = {"vocab_size": 12, "max_position_embeddings": 1024}
TREE = (5, 4, 16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    target = save_random_llama(folder / "target", seed=8, intermediate_size=96, **SIZES)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=8, seed=2))


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """Experts in all layers but the first, one of them shared by all tokens, and an MTP layer."""
    folder = expert_pairs.save_glm_with_mtp(tmp_path_factory.mktemp("glm"), moe_intermediate_size=48, **SIZES)
    return Pair(folder, folder)


def served(llm, pair):
    """What it gives to all prompts; the engine is closed."""
    try:
        prompts = pair.prompts(LENGTHS)
        return llm.generate(prompts, asked(prompts))
    finally:
        llm.close()


def on_two(pair, shape, **options):
    llm = build(pair, shape, **{**BITS, "tp_size": 2, "max_total_tokens": 8 * 640, **options})
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert (llm.engine.parallel.peers is None) == options.get("disable_custom_all_reduce", False), "see the log"
    return served(llm, pair)


def test_sums_do_not_depend_on_who_brings_the_shares():
    """Peer memory, NCCL's gathering, and what is added on its way: one sum, of few rows and of many."""
    gpu_ranks.ranks_do(gpu_ranks.exact_sums_are_one)


def test_trees_on_two_ranks_have_the_bits_of_plain_decoding_on_two(llama):
    """Captured, in batches and chunks, by peer memory and by NCCL."""
    plain = bits(on_two(llama, None, max_running_requests=1))
    by_peers = on_two(llama, TREE, max_running_requests=4, chunked_prefill_size=333)
    assert bits(by_peers) == plain
    assert sum(map(sum, accept_lens(by_peers))) > 0, "nothing was accepted, so nothing was tested"
    by_nccl = on_two(llama, TREE, max_running_requests=6, chunked_prefill_size=16, disable_custom_all_reduce=True)
    assert bits(by_nccl) == plain


def test_shared_experts_give_the_bits_of_plain_decoding_on_any_rank(glm):
    """Captured trees of requests on both ranks, and plain rounds of one after another on the first."""

    def run(shape, places, **options):
        llm = expert_pairs.build(glm.target, shape, 2, **{**BITS, "max_total_tokens": 8 * 640, **options})
        expert_pairs.send_to(llm._core.core, iter(places).__next__)
        return served(llm, glm)

    plain = bits(run(None, [0] * 6, max_running_requests=1))
    outputs = run(TREE, [1, 0, 1, 1, 0, 0], max_running_requests=3, chunked_prefill_size=100)
    assert bits(outputs) == plain
    assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"
