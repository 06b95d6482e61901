"""`--kv-cache-dtype fp8_e4m3` with compressed and with sparse attention: a plane of codes and one scale a layer."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from support.engines import accept_lens, build, finish, greedy, submit, tokens
from support.families import FAMILIES
from support.fp8 import rounded
from support.fp8_pairs import with_tensors
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.tiny_models import Pair
from treetop.engine.kv_staging import staging_of
from treetop.engine.memory import pool_bytes
from treetop.kernels.kv import FP8
from treetop.tools.inspect import inspect
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, INDEXED
from treetop_debug.ranks import ranks_on_threads

OPTIONS = {"kv_cache_dtype": "fp8_e4m3", "page_size": 4, "context_length": 96}
LENGTHS = [3, 30, 17]
SCALES = [0.01, 0.03, 0.02, 0.005]
"""Of the layers' planes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """DeepSeek V3, whose file has scales by the names that Model Optimizer gives; those of values are of no plane."""
    folder = tmp_path_factory.mktemp("latents")
    saved = FAMILIES["deepseek v3"].save(folder, seed=5)
    names = {f"model.layers.{i}.self_attn.k_proj.k_scale": torch.tensor([scale]) for i, scale in enumerate(SCALES)}
    names |= {f"model.layers.{i}.self_attn.v_proj.v_scale": torch.tensor([3.0]) for i in range(len(SCALES))}
    return saved, with_tensors(saved.pair, folder / "scaled", names)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """GLM 5.2: its indexers choose 8 keys, also of longer prompts; one layer shares another's choice."""
    return FAMILIES["glm 5.2"].save(tmp_path_factory.mktemp("sparse"), seed=5).pair


def rounding(model, scales):
    """`transformers`' DeepSeek V3, whose latents and rotated keys are rounded as soon as they are made."""
    now, turn = [], theirs.apply_rotary_pos_emb_interleave

    def by_scale(x):
        return rounded((x / now[-1]).float().double()) * now[-1]

    def turned(q, k, *args, **named):
        q, k = turn(q, k, *args, **named)
        return q, by_scale(k)

    for layer, scale in zip(model.model.layers, scales, strict=True):
        wide = torch.tensor(scale, dtype=torch.float32).double()
        layer.self_attn.register_forward_pre_hook(lambda *_, wide=wide: now.append(wide))
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, out: by_scale(out))
    return patch.object(theirs, "apply_rotary_pos_emb_interleave", turned)


@pytest.mark.parametrize("scaled", few_of([False, True], 1))
def test_logits_and_tokens_are_those_of_a_model_that_rounds_latents_and_turned_keys(saved, scaled):
    """By the checkpoint's scales or by 1.0; plain, in chunks, and trees, captured and checked."""
    mine, scaled_pair = saved
    pair = scaled_pair if scaled else mine.pair
    prompts, model = pair.prompts(LENGTHS), mine.reference(torch.float64)
    with rounding(model, SCALES if scaled else [1.0] * len(SCALES)):
        want = [mine.logits(model, prompt, 16) for prompt in prompts]
    best = [logits[len(prompt) - 1 :].topk(2).values for prompt, logits in zip(prompts, want, strict=True)]
    assert min(float((each[:, 0] - each[:, 1]).min()) for each in best) > 1e-6, "a near tie tells nothing"
    texts = [
        tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) for prompt, logits in zip(prompts, want, strict=True)
    ]
    for shape, options in [
        (None, {"chunked_prefill_size": 5, "disable_radix_cache": True}),
        ((4, 3, 12), {"graphs": "sim", "check_level": 3}),
        ((1, 4, 5), {"chunked_prefill_size": 7}),
    ]:
        llm = build(pair, shape, **OPTIONS, **options)
        outputs = llm.generate(prompts, replace(greedy(16, whole=True), ignore_eos=True))
        assert tokens(outputs) == texts
        assert shape is None or sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"
    wide = build(pair, None, **{**OPTIONS, "kv_cache_dtype": "auto"})
    for prompt, logits in zip(prompts, want, strict=True):
        off, off_wide = (
            float((each.next_logits(prompt) - logits[len(prompt) - 1]).abs().max()) for each in (llm, wide)
        )
        assert off < 1e-5  # angles are made in float32
        assert off_wide > 1e-4


@pytest.mark.parametrize("name", few_of(["glm 5.2", "deepseek v32", "glm4 moe lite"], 0))
def test_speculation_changes_no_token_of_sparse_attention(tmp_path, name):
    """On both sides of the number of keys that an indexer chooses; whoever reads an indexer's key sees one code."""
    pair = FAMILIES[name].save(tmp_path, seed=3).pair
    prompts = pair.prompts([5, 21, 40])
    want = tokens(build(pair, None, **OPTIONS).generate(prompts, greedy(20)))
    llm = build(pair, (4, 3, 12), **OPTIONS, check_level=3, chunked_prefill_size=9)
    outputs = llm.generate(prompts, greedy(20))
    assert tokens(outputs) == want
    assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


def test_an_indexer_chooses_by_the_codes_of_its_keys(sparse):
    """The same logits by a whole forward without pages as from pages, and other ones than without FP8."""
    prompt = sparse.prompts([60])[0]
    llm, wide = (build(sparse, None, **{**OPTIONS, "kv_cache_dtype": kind}) for kind in ("fp8_e4m3", "auto"))
    assert llm.engine.runner.pools[INDEXED].data.dtype == FP8
    output = llm.generate([prompt], replace(greedy(4), logprobs=3))[0]
    logits = llm.next_logits([*prompt, *output.token_ids[:3]])
    want = torch.log_softmax(logits.double(), -1)
    for token, logprob in output.logprobs[3].top:
        assert logprob == pytest.approx(float(want[token]), abs=1e-5)
    assert float((wide.next_logits(prompt) - llm.next_logits(prompt)).abs().max()) > 1e-4


@pytest.mark.parametrize("kind", few_of(["latents", "sparse"], 1))
def test_cached_prefixes_and_ranks_give_the_same_tokens(saved, sparse, kind):
    pair = saved[1] if kind == "latents" else sparse
    prompts = pair.prompts(LENGTHS)
    llm = build(pair, (2, 3, 6), **OPTIONS)
    want = tokens(llm.generate(prompts, greedy(16)))
    (again,) = submit(llm, [prompts[1]], greedy(16))
    finish(llm)
    assert again.num_cached_tokens >= 20, "no prefix was found"
    assert tuple(again.output_ids) == want[1]
    with ranks_on_threads():
        ranks = build(pair, (2, 3, 6), **OPTIONS, tp_size=2)
        assert tokens(ranks.generate(prompts, greedy(16))) == want
        ranks.close()


def test_what_is_handed_over_is_what_was_computed(tmp_path):
    """Planes of codes travel, an indexer's too; a worker that keeps K/V otherwise is another kind of worker."""
    family = FAMILIES["deepseek v32"]
    family = replace(family, config={**family.config, "qk_rope_head_dim": 8, "index_head_dim": 12})
    pair = family.save(tmp_path, seed=5).pair
    prompts = pair.prompts(LENGTHS)
    want = tokens(build(pair, (2, 3, 6), **OPTIONS).generate(prompts, greedy(16)))
    workers = [Worker(pair, (2, 3, 6), **{**OPTIONS, "page_size": size}) for size in (8, 2)]
    relay = Relay(*workers, 7)
    ids = relay.submit(prompts, [greedy(16)] * len(prompts), IDS)
    relay.run()
    assert [relay.result(each)[0] for each in ids] == want
    assert not relay.local, "a request was prefilled here"
    other = Worker(pair, (2, 3, 6), **{**OPTIONS, "kv_cache_dtype": "auto"})
    assert "FP8" in staging_of(workers[0].engine).schema.difference(staging_of(other.engine).schema)


def test_a_pool_of_latents_holds_twice_the_tokens_of_16_bits(saved):
    pair: Pair = saved[1]
    options = {**OPTIONS, "dtype": "bfloat16", "max_total_tokens": 256}
    engines = [build(pair, (2, 3, 6), **{**options, "kv_cache_dtype": each}).engine for each in ("auto", "fp8_e4m3")]
    made = [sum(pool.data.nbytes for pool in engine.runner.pools.values()) for engine in engines]
    assert made == [pool_bytes(engine.layout, 2) for engine in engines]
    assert made[0] == 2 * made[1]
    runner = engines[1].runner
    assert runner.pools[FULL].data.dtype == runner.buffers.verify_tails[FULL].dtype == FP8
    torch.testing.assert_close(runner.pools[FULL].scales, torch.tensor(SCALES).view(-1, 1, 1))
    wide, narrow = (
        inspect(EngineConfig(str(pair.target), draft=None, dtype="bfloat16", kv_cache_dtype=each)).memory.pools
        for each in ("auto", "fp8_e4m3")
    )
    assert [each.bytes_per_token for each in wide] == [2 * each.bytes_per_token for each in narrow]
