"""`--kv-cache-dtype fp8_e4m3`: engines against a dense reference that rounds K/V, and against plain decoding."""

import logging
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from support.engines import accept_lens, build, finish, greedy, sampled, submit, tokens
from support.families import FAMILIES
from support.fp8 import rounded_kv
from support.fp8_pairs import A_HEAD, LENGTHS, OPTIONS, windows_pair, with_tensors
from support.handing import IDS, Relay, Worker, target_with_mtp
from support.lookups import lookup
from support.tiny_models import Pair
from treetop import LLM
from treetop.checkpoints.loader import LoadContext
from treetop.debug import oracle
from treetop.engine.kv_staging import staging_of
from treetop.engine.memory import pool_bytes
from treetop.engine.startup import exactness
from treetop.engine.startup.plan import check_kv_cache_dtype
from treetop.kernels.kv import FP8
from treetop.models.registry import target_spec
from treetop.tools.inspect import inspect
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL, WINDOW
from treetop_debug.ranks import ranks_on_threads


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return windows_pair(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def scaled_pair(pair, tmp_path_factory):
    return with_tensors(pair, tmp_path_factory.mktemp("scaled") / "target", A_HEAD)


def dense_text(pair, prompt, count, scales):
    """What greedy decoding must give, by a whole forward for each token; how near the two best logits ever are; and the
    logits before the last token."""

    def attention(x, w, prefix, config, window):
        heads, kv_heads, n = config["num_attention_heads"], config["num_key_value_heads"], x.shape[0]
        q, k, v = ((x @ w[f"{prefix}{name}_proj.weight"].T).view(n, -1, config["head_dim"]) for name in "qkv")
        theta = config.get("rope_theta", 10000.0)
        q, k = oracle._rotate(q, theta), oracle._rotate(k, theta)
        k, v = (
            rounded_kv(each, scales.get(f"{prefix}{name}_scale", torch.ones(kv_heads)).flatten())
            for each, name in ((k, "k"), (v, "v"))
        )
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (n if window is None else window))
        out = []
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = (q[:, head] @ k[:, kv].T / math.sqrt(q.shape[2])).masked_fill(hidden, -math.inf)
            out.append(torch.softmax(scores, dim=-1) @ v[:, kv])
        return torch.cat(out, dim=-1) @ w[prefix + "o_proj.weight"].T

    dense, ids, margin = oracle.DensePair(pair.target, pair.head), list(prompt), math.inf
    with patch.object(oracle, "_attention", attention):
        for _ in range(count):
            logits = dense.run_target(ids)[0][-1]
            best = logits.topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
    return tuple(ids[len(prompt) :]), margin, logits


@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_are_those_of_a_dense_model_that_rounds_its_keys_and_values(pair, scaled_pair, scaled, caplog):
    """Plain, trees and chains, in chunks of any size, captured and checked; by the checkpoint's scales, or by 1.0, as
    the log says. So are logits, and those of an engine that does not round are others."""
    mine, scales = (scaled_pair, A_HEAD) if scaled else (pair, {})
    prompts = mine.prompts(LENGTHS)
    want = [dense_text(mine, prompt, 16, scales) for prompt in prompts]
    assert min(margin for _, margin, _ in want) > 1e-6, "a near tie tells nothing"
    texts, wide = [text for text, _, _ in want], build(mine, None, **{**OPTIONS, "kv_cache_dtype": "auto"})
    for shape, options in [
        (None, {"chunked_prefill_size": 5, "disable_radix_cache": True}),
        ((4, 3, 12), {"graphs": "sim", "check_level": 3}),
        ((1, 4, 5), {"chunked_prefill_size": 7}),
    ]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "treetop"):
            llm = build(mine, shape, **OPTIONS, **options)
        assert ("no scales of K/V for 4 of 4 layers: theirs are 1.0" in caplog.text) != scaled
        outputs = llm.generate(prompts, greedy(16, whole=True))
        assert tokens(outputs) == texts
        assert shape is None or sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"
        for prompt, (text, _, logits) in zip(prompts, want, strict=True):
            off, off_wide = (
                float((each.next_logits([*prompt, *text[:-1]]) - logits).abs().max()) for each in (llm, wide)
            )
            assert off < 1e-5  # angles are made in float32
            assert off_wide > 1e-3


MORE_FAMILIES = ["laguna", "qwen3 windows", "granite"]


@pytest.mark.parametrize(
    "name", ["gemma4", "mimo v2", *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_FAMILIES)]
)
def test_speculation_changes_no_token_whatever_the_attention(tmp_path, name):
    """Windows, sinks, K/V that layers share, narrow values, norms and gates of heads."""
    mine = FAMILIES[name].save(tmp_path, seed=3).pair
    prompts = mine.prompts([5, 21])
    want = tokens(build(mine, None, **OPTIONS).generate(prompts, greedy(20)))
    llm = build(mine, (4, 3, 12), **OPTIONS, check_level=3, chunked_prefill_size=9)
    outputs = llm.generate(prompts, greedy(20))
    assert tokens(outputs) == want
    assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("kind", ["MTP", "NGRAM"])
def test_speculation_without_a_head_changes_no_token(strong_pair, tmp_path, kind):
    mine = Pair(target_with_mtp(tmp_path), None) if kind == "MTP" else strong_pair
    prompts = mine.prompts(LENGTHS)
    want = tokens(build(mine, None, **OPTIONS).generate(prompts, greedy(24)))
    llm = lookup(mine, (2, 3, 6), **OPTIONS, speculative_algorithm=kind, check_level=2)
    outputs = llm.generate(prompts, greedy(24))
    assert tokens(outputs) == want
    assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


def test_bits_are_those_of_plain_decoding(scaled_pair):
    """Log-probabilities too, in float32, whatever batch, chunk and tree."""
    options = {**OPTIONS, "exactness": "bits", "dtype": "float32"}
    prompts = scaled_pair.prompts([30, 17])
    params = [sampled(1, 12, logprobs=2), replace(greedy(12), logprobs=2)]

    def serve(shape, **more):
        outputs = build(scaled_pair, shape, **options, **more).generate(prompts, params)
        return [(o.token_ids, [(t.logprob.hex(), [p.hex() for _, p in t.top]) for t in o.logprobs]) for o in outputs]

    want = serve(None, max_running_requests=1)
    assert serve((4, 3, 12), chunked_prefill_size=16, graphs="sim", check_level=3) == want


@pytest.mark.parametrize("flag", ["kv_cache_dtype", "speculative_draft_kv_cache_dtype"])
def test_nothing_stands_against_bits_on_a_gpu(pair, monkeypatch, flag):
    """Of plain attention, with windows; of the target's K/V, or of the draft's alone. An old GPU is refused by name."""
    monkeypatch.setattr(exactness, "why_not", lambda device: None)
    monkeypatch.setattr(exactness, "exact_backend", lambda need: "segments")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    gpu, asked = torch.device("cuda"), {"device": "cuda", "exactness": "bits", flag: "fp8_e4m3"}
    config, target = EngineConfig.of(str(pair.target), draft=str(pair.head), **asked), target_spec(pair.target)
    assert exactness.why_not_exact(config, target, LoadContext(torch.bfloat16, gpu, 64), probes=False) is None
    option = f"--{flag.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"^{option} fp8_e4m3: A100 does not convert FP8.*use {option} auto"):
        check_kv_cache_dtype(config, target, gpu)


def test_a_cached_prefix_and_a_retraction_give_the_same_tokens(scaled_pair):
    """Pages hold the codes that were computed, so whoever finds them goes on as if it had computed them."""
    first, other = scaled_pair.prompts([24, 5])
    prompts = [[*first, *other], [*first, *other[::-1]], *scaled_pair.prompts([22, 23])]
    alone = build(scaled_pair, (3, 3, 8), **OPTIONS, disable_radix_cache=True)
    cold = tokens(alone.generate(prompts, greedy(24)))
    llm = build(scaled_pair, (3, 3, 8), **OPTIONS)
    submit(llm, [first], greedy(4))
    finish(llm)
    for prompt, want in zip(prompts[:2], cold, strict=False):
        (request,) = submit(llm, [prompt], greedy(24))
        finish(llm)
        assert request.num_cached_tokens >= 20, "no prefix was found"
        assert tuple(request.output_ids) == want
    tight = build(scaled_pair, (3, 3, 8), **OPTIONS, max_total_tokens=136, disable_radix_cache=True, check_level=3)
    assert tokens(tight.generate(prompts, greedy(24))) == cold
    assert tight.scheduler.num_retractions > 0, "pages never ran out"


def test_ranks_have_the_scales_of_their_own_heads(scaled_pair):
    """Two ranks give what one gives, which other scales would not."""
    prompts = scaled_pair.prompts(LENGTHS)
    want = tokens(build(scaled_pair, (2, 3, 6), **OPTIONS).generate(prompts, greedy(16)))
    with ranks_on_threads():
        llm = build(scaled_pair, (2, 3, 6), **OPTIONS, tp_size=2)
        try:
            assert tokens(llm.generate(prompts, greedy(16))) == want
        finally:
            llm.close()


def test_what_is_handed_over_is_what_was_computed(scaled_pair):
    """Codes travel; a worker that keeps K/V otherwise is another kind of worker."""
    params = [greedy(16)] * len(LENGTHS)
    prompts = scaled_pair.prompts(LENGTHS)
    want = tokens(build(scaled_pair, (2, 3, 6), **OPTIONS).generate(prompts, greedy(16)))
    workers = [Worker(scaled_pair, (2, 3, 6), **{**OPTIONS, "page_size": size}) for size in (8, 2)]
    relay = Relay(*workers, 7)
    ids = relay.submit(prompts, params, IDS)
    relay.run()
    assert [relay.result(each)[0] for each in ids] == want
    assert not relay.local, "a request was prefilled here"
    other = Worker(scaled_pair, (2, 3, 6), **{**OPTIONS, "kv_cache_dtype": "auto"})
    mine, theirs = (staging_of(each.engine).schema for each in (workers[0], other))
    assert mine.difference(staging_of(workers[1].engine).schema) is None
    assert mine.difference(theirs).startswith("groups: ")
    assert "FP8" in mine.difference(theirs)


def test_a_pool_holds_twice_the_tokens_of_16_bits(pair):
    """Pools and tails are of bytes, by the account too; the draft's as the target's. What memory there is holds twice
    as many tokens, and inspect says so."""
    options = {**OPTIONS, "dtype": "bfloat16", "max_total_tokens": 256}
    engines = [build(pair, (2, 3, 6), **{**options, "kv_cache_dtype": each}).engine for each in ("auto", "fp8_e4m3")]
    made = [sum(pool.data.nbytes for pool in engine.runner.pools.values()) for engine in engines]
    assert made == [pool_bytes(engine.layout, 2) for engine in engines]
    assert made[0] == 2 * made[1]
    runner = engines[1].runner
    for name in (FULL, WINDOW):
        assert runner.pools[name].data.dtype == runner.buffers.verify_tails[name].dtype == FP8
    assert runner.pools[DRAFT].data.dtype == runner.buffers.extend_tails[DRAFT].dtype == FP8
    assert all(bool((pool.scales == 1).all()) for pool in runner.pools.values())
    assert any("B a token in FP8" in line for line in engines[1].memory.lines())
    reports = [
        inspect(EngineConfig(str(pair.target), draft=str(pair.head), dtype="bfloat16", kv_cache_dtype=each))
        for each in ("auto", "fp8_e4m3")
    ]
    for wide, narrow in zip(*(report.memory.pools for report in reports), strict=True):
        assert wide.bytes_per_token == 2 * narrow.bytes_per_token


def test_random_weights_have_scales_of_1(pair):
    llm = LLM(str(pair.target), load_format="dummy", max_running_requests=2, **OPTIONS)
    assert bool((llm.engine.runner.pools[FULL].scales == 1).all())
    assert llm.generate(pair.prompts([5]), greedy(4))[0].token_ids
