"""Drafts of every kind but EAGLE's own, captured on a GPU: tokens of plain decoding, accept lengths of eager rounds.

python -m pytest tests/gpu/test_gpu_drafts.py -q
"""

from pathlib import Path

import pytest
import torch

from support.assistants import save_assistant, save_assisted
from support.block_heads import LAYOUTS
from support.block_heads import saved as save_block_head
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.peagle_heads import LAYOUTS as PEAGLE_LAYOUTS
from support.peagle_heads import saved as save_peagle
from support.tiny_models import Pair, save_random_head, save_random_llama, save_tokenizer
from treetop.bench.equality import equal_outputs
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.models.registry import target_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LOOKUP = {"speculative_suffix_lookup": True, "speculative_suffix_cache_tokens": 4096}


def llama(folder: Path) -> Path:
    return save_random_llama(folder / "target", seed=5, head_dim=16)


def of_block(name):
    return lambda folder: (Pair(llama(folder), save_block_head(folder, name)), {})


def of_peagle(name):
    return lambda folder: (Pair(llama(folder), save_peagle(folder, PEAGLE_LAYOUTS[name])[0]), {})


def language_model(folder):
    draft = save_random_llama(folder / "draft", seed=5, head_dim=16, num_hidden_layers=1)
    return Pair(llama(folder), draft), {"speculative_algorithm": "STANDALONE"}


def language_model_of_other_words(folder):
    """Its words are every second of the target's, backwards."""
    pair, options = language_model(folder)
    vocab = target_spec(pair.target).config.vocab_size
    save_tokenizer(pair.target, vocab, lambda token: f"{token:04}".encode())
    save_tokenizer(pair.head, vocab, lambda token: f"{2 * (vocab - token):04}".encode())
    return pair, options


def assistant(folder, *clusters):
    target = save_assisted(folder / "target")
    return Pair(target, save_assistant(folder / "head", target, *clusters)), {}


def lookup_beside_a_head(folder):
    target = save_random_llama(folder / "target", seed=8, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2)), LOOKUP


def lookup_beside_an_assistant(folder):
    return assistant(folder)[0], LOOKUP


CASES = {
    **{name: of_block(name) for name in LAYOUTS},
    **{f"P-EAGLE, {name}": of_peagle(name) for name in PEAGLE_LAYOUTS},
    "a language model": language_model,
    "a language model of other words": language_model_of_other_words,
    "an assistant": assistant,
    "an assistant with clusters": lambda folder: assistant(folder, 8, 2),
    "lookup beside a head": lookup_beside_a_head,
    "lookup beside an assistant": lookup_beside_an_assistant,
}
"""A pair made in a folder, and its options."""


@pytest.mark.parametrize("name", CASES)
def test_captured_trees_of_a_draft(name, tmp_path):
    """float32: up to near ties a CPU's tokens, plainly and with trees; bfloat16: captured as eager, rounds too."""
    pair, more = CASES[name](tmp_path)
    prompts, shape = pair.prompts([1, 9, 40], seed=3), (4, 4, 14)
    options = {"page_size": 4, "chunked_prefill_size": 16, "context_length": 128, "max_running_requests": 4}
    cpu = build(pair, None, **options, dtype="float32", device="cpu", graphs="off")
    expected = cpu.generate(prompts, greedy(24))
    options |= more
    llm = build(pair, shape, **options, dtype="float32", device="cuda", graphs="auto")
    assert isinstance(llm.engine.launcher, CudaGraphs)
    assert equal_outputs(cpu, expected, llm.generate(prompts, greedy(24))).ok
    llm.close()
    found, params = [], [greedy(24), sampled(3, 24), greedy(20)]
    for graphs in ("auto", "off"):
        llm = build(pair, shape, **options, dtype="bfloat16", device="cuda", graphs=graphs, overlap=False)
        outputs = llm.generate(prompts, params)
        found.append((tokens(outputs), accept_lens(outputs)))
        llm.close()
    assert found[0] == found[1]
