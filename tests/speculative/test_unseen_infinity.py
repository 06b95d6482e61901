"""An infinite K or V of a draft that is rejected: trees complete what plain decoding completes, with its tokens."""

from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from support.engines import build, tokens
from support.grids import few_of
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head, save_random_llama
from treetop import SamplingParams
from treetop.attention import exact_backend, torch_backend

FLAGS = slice(48, 64)
"""Numbers of an embedding that only tokens with an infinite K or V have."""
LENGTHS = [5, 118, 127]
"""Paths of these cross the end of attention's first block of 128 positions, and windows of 16."""


def spoiled(folder, target, plane: str, weight: float) -> Pair:
    """A pair whose tokens of odd numbers are drafted, but never chosen, and overflow in the first layer's plane."""
    tensors = load_file(target / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    odd = torch.arange(len(embedding)) % 2 == 1
    embedding[:, FLAGS] = odd[:, None] * 3.0
    head[odd] = 0.0
    name = f"model.layers.0.self_attn.{plane}_proj.weight"
    tensors[name][:, FLAGS] = weight
    changed = copy_folder(target, folder / "target", tensors=tensors)
    return Pair(changed, save_random_head(folder / "head", changed, draft_vocab=None, seed=2))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {
        "llama": save_random_llama(folder / "llama", seed=8, vocab_size=24),
        "sinks and windows": save_random_experts(folder / "gpt_oss", "gpt_oss", seed=8, vocab_size=24),
    }


CASES = [
    (family, plane, *kind)
    for family in ("llama", "sinks and windows")
    for plane in ("k", "v")
    for kind in (("float16", 4e3, "ties"), ("float32", 1e38, "ties"), ("float32", 1e38, "bits"))
]


@pytest.mark.parametrize(("family", "plane", "dtype", "weight", "exactness"), few_of(CASES, 0))
def test_a_rejected_draft_that_overflows_ends_no_request(
    tmp_path, monkeypatch, targets, *, family, plane, dtype, weight, exactness
):
    pair = spoiled(tmp_path, targets[family], plane, weight)
    prompts = [[token & ~1 for token in prompt] for prompt in pair.prompts(LENGTHS)]
    asked = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2)
    broken, real = [], torch_backend.broken_rows
    for module in (torch_backend, exact_backend):
        monkeypatch.setattr(module, "broken_rows", lambda out: broken.append(real(out)) or broken[-1])

    def serve(shape):
        with closing(build(pair, shape, dtype=dtype, exactness=exactness)) as llm:
            return llm.generate(prompts, asked)

    plain = serve(None)
    assert not any(broken)
    trees = serve((4, 5, 16))
    assert any(broken), "no draft overflowed, so nothing was tested"
    assert [output.finish_reason for output in [*plain, *trees]] == ["length"] * 6
    if dtype == "float32":
        assert tokens(trees) == tokens(plain)
    else:
        assert all(_alike(*both) for both in zip(plain, trees, strict=True))


def _alike(one, other) -> bool:
    """Equal up to a token where the two best are as near as roundings of float16 are."""
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if a != b:
            best = [logprob for _, logprob in one.logprobs[at].top]
            return best[0] - best[1] < 5e-2
    return True
