"""K/V that are no pair: one plane through pools, tails, commits and the prefix cache. And attention sinks."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import one_plane, windowed_llama
from support.engines import accept_lens, accepted, build, finish, greedy, submit, tokens
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import Pair, save_random_head
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import BACKENDS, refusal
from treetop.debug.two_group import write_two_group_pair
from treetop.engine.memory import bytes_per_token, pool_bytes
from treetop.models.registry import FAMILIES
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL
from treetop.types.kv import KVFormat, paired


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The one-plane target, and a head of the usual kind."""
    monkeypatch.setitem(FAMILIES, one_plane.NAME, one_plane.FAMILY)
    target = one_plane.save(tmp_path / "target")
    return Pair(target, save_random_head(tmp_path / "head", target, draft_vocab=None))


@pytest.mark.parametrize(("shape", "options"), [
    (None, {}),
    ((4, 3, 12), {"graphs": "sim", "check_level": 3}),
    ((1, 4, 5), {"check_level": 2}),
    ((3, 4, 20), {"disable_radix_cache": True}),
], ids=str)  # fmt: skip
def test_a_target_of_one_plane_gives_the_tokens_of_its_dense_reference(pair, shape, options):
    """Prefill in chunks, rounds of ragged batches; drafts are accepted, so tails are committed."""
    llm = build(pair, shape, page_size=4, chunked_prefill_size=6, context_length=80, **options)
    prompts = pair.prompts([3, 14, 9])
    outputs = llm.generate(prompts, greedy(16, whole=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [*prompt, *output.token_ids[:-1]]
        dense = one_plane.dense_logits(pair.target, ids)[len(prompt) - 1 :]
        assert tuple(dense.argmax(-1).tolist()) == output.token_ids
        for n, logits in enumerate(dense):
            ours = llm.next_logits(ids[: len(prompt) + n])
            assert float((logits - ours).abs().max()) < 1e-5  # angles are made in float32
    assert shape is None or sum(map(sum, accept_lens(outputs))) > (10 if shape[0] > 1 else 0)


def test_a_plane_takes_half_the_pool_and_the_tail_of_a_pair(pair):
    """Pools, tails and their counts follow the format; the head keeps its pair."""
    llm = build(pair, (2, 3, 6), page_size=4, context_length=80)
    device, layout = llm.engine.runner, llm.engine.layout
    assert layout.group(FULL).kv == KVFormat(1, 1, 16, 12)
    assert layout.group(DRAFT).kv == paired(2, 8)
    assert device.pools[FULL].data.shape[2:] == device.buffers.verify_tails[FULL].shape[3:] == (1, 1, 16)
    assert device.pools[DRAFT].data.shape[2:] == device.buffers.extend_tails[DRAFT].shape[3:] == (2, 2, 8)
    assert bytes_per_token(layout, 8) == {FULL: 4 * 16 * 8, DRAFT: 2 * 2 * 8 * 8}
    assert sum(pool.data.nbytes for pool in device.pools.values()) == pool_bytes(layout, 8)


def test_a_cached_prefix_of_one_plane_gives_the_same_tokens_and_accepted_lengths(pair):
    """Prompts that begin alike share pages of both groups; a hit is computed as the prompt would be."""
    first, other = pair.prompts([24, 5])
    prompts = [[*first, *other], [*first, *other[::-1]]]
    options = {"page_size": 4, "chunked_prefill_size": 7, "context_length": 80}
    cold = [build(pair, (3, 3, 8), **options).generate([prompt], greedy(20))[0] for prompt in prompts]
    llm = build(pair, (3, 3, 8), **options)
    submit(llm, [first], greedy(4))
    finish(llm)
    for prompt, want in zip(prompts, cold, strict=True):
        (request,) = submit(llm, [prompt], greedy(20))
        finish(llm)
        assert request.num_cached_tokens >= 20, "no prefix was found"
        assert tuple(request.output_ids) == want.token_ids
        assert tuple(accepted(request)) == want.metrics.accept_lens


def test_backends_that_need_a_pair_are_refused_for_one_plane(pair, monkeypatch):
    """The libraries read keys and values apart, all but FlashMLA; PyTorch and our kernels read one plane as both."""
    group = GroupNeed(FULL, 4, 1, 576, latent=512)
    for name, backend in BACKENDS.items():
        able = backend.capabilities
        if name in ("torch", "triton"):
            assert able.latents is None or {256, 512} <= set(able.latents)
        elif name not in ("flashmla", "gluon", "segments"):
            need = Need(torch.bfloat16, torch.device("cuda"), 16, (group,))
            assert "no kernel for compressed attention (MLA)" in refusal(name, need).reason
    monkeypatch.setitem(BACKENDS, "fa3", replace(BACKENDS["fa3"], probes=()))  # as where there is a GPU
    refused(ConfigError, lambda: build(pair, None, dtype="bfloat16", attention_backend="fa3"), "fa3", "(MLA)")


@pytest.mark.parametrize("options", few_of([{}, {"graphs": "sim", "check_level": 3}], 0), ids=str)
def test_sinks_enter_once_in_prefill_and_in_rounds(tmp_path, monkeypatch, options):
    """Windows and sinks: what is generated is what one dense pass chooses, and another sink would choose otherwise."""
    target, head = write_two_group_pair(tmp_path, window=12)
    path = target / "model.safetensors"
    monkeypatch.setitem(FAMILIES, windowed_llama.NAME, windowed_llama.FAMILY)
    with_sinks = {"architectures": [windowed_llama.NAME], "attention_sinks": True}
    config = {**json.loads((target / "config.json").read_text()), **with_sinks}
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(path)
    sinks = {f"model.layers.{i}.self_attn.sinks": torch.linspace(-1, 4, 4).roll(i) for i in range(4)}
    texts = []
    for scale in (1.0, -3.0):
        save_file({**weights, **{name: scale * sink for name, sink in sinks.items()}}, path)
        both = Pair(target, head)
        options = {"page_size": 4, "chunked_prefill_size": 7, "context_length": 100, **options}
        llm = build(both, (4, 3, 12), **options)
        prompts = both.prompts([3, 30])
        outputs = llm.generate(prompts, greedy(24))
        for prompt, output in zip(prompts, outputs, strict=True):
            for n, token in enumerate(output.token_ids):
                assert int(llm.next_logits([*prompt, *output.token_ids[:n]]).argmax()) == token
        assert tokens(outputs) == tokens(build(both, None, **options).generate(prompts, greedy(24)))
        texts.append(tokens(outputs))
    assert texts[0] != texts[1]
