"""`--exactness bits` on a GPU: engines give the tokens and log-probabilities of plain decoding, to the bit.

Tiny models of every kind of layer, captured and eager, greedy and sampled, in any tree, batch and chunk.

python -m pytest tests/gpu/test_gpu_bits.py -q -m "not slow"
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from support.bits import asked, bits
from support.drain import held_out
from support.engines import accept_lens, build
from support.expert_pairs import save_glm_with_mtp
from support.families import FAMILIES
from support.gpu_pairs import make
from support.lookups import lookup
from support.tiny_models import (
    Pair,
    copy_folder,
    llama_config,
    save_mxfp4,
    save_random,
    save_random_experts,
    save_random_head,
    save_random_llama,
)
from treetop import SamplingParams
from treetop.attention.segments_backend import SegmentsBackend
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.startup import probed_products
from treetop.kernels.gemm.ordered_weights import ordered_gemm, why_not_ordered
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights import gpu_products, ordered

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LENGTHS = [1, 4, 17, 60, 63, 121, 126, 500, 507] * 4
"""Outputs of these cross the end of attention's blocks, of 64 positions, and of its first segment, of 512."""
SIZES = {"vocab_size": 12, "max_position_embeddings": 1024}
"""Of so few tokens a head that knows nothing is often right."""
EVEN = {
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 48,
    "intermediate_size": 48,
}
"""Sizes of which no product has rows that are no multiple of 16, as published ones are."""
LATENT = {**EVEN, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 8}
INDEXED = {"index_topk": 70, "index_n_heads": 24, "index_head_dim": 32}
"""Of planes whose every part is a multiple of 16, and of more keys than a block has."""
LATENTS = {
    "deepseek v3": {**EVEN, "q_lora_rank": 32},
    "deepseek v32": {**LATENT, **INDEXED},
    "glm 5.2": {**LATENT, **INDEXED},
}
MODELS = ["llama", "windows", "qwen3 moe", "gpt-oss", "glm mtp", "qwen3 next", "deepseek v3", "glm 5.2"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By name. GPT-OSS has sinks, windows and experts in MXFP4; GLM drafts by its own layer, which has experts.
    Layers of Qwen3-Next keep states; DeepSeek-V3's attention is compressed, GLM-5.2's sparse, too.
    """
    folder = tmp_path_factory.mktemp("bits")
    windowed = {**llama_config(**SIZES).to_dict(), "model_type": "mistral", "sliding_window": 48}
    stacked = save_random_experts(folder / "stacked", "gpt_oss", seed=4, intermediate_size=64, **SIZES)
    targets = {
        "llama": save_random_llama(folder / "llama", seed=8, **SIZES),
        "windows": save_random(MistralForCausalLM, MistralConfig(**windowed), folder / "windows", seed=8),
        "qwen3 moe": save_random_experts(folder / "qwen3", "qwen3_moe", seed=3, moe_intermediate_size=48, **SIZES),
        "gpt-oss": save_mxfp4(folder / "gpt_oss", stacked, seed=5),
    }
    made = {
        name: Pair(target, save_random_head(folder / f"{name} head", target, draft_vocab=11, seed=2))
        for name, target in targets.items()
    }
    glm = save_glm_with_mtp(folder / "glm", moe_intermediate_size=48, **SIZES)
    of_families = {
        name: longer(even(name, sizes, folder / name), folder / f"{name}, longer")
        for name, sizes in {"qwen3 next": EVEN, **LATENTS}.items()
    }
    return {**made, "glm mtp": Pair(glm, glm), **of_families}


def even(name, sizes, folder):
    """A family's tiny pair in sizes of which products are exact on a GPU."""
    made_of = FAMILIES[name]
    return replace(made_of, config={**made_of.config, **sizes}).save(folder).pair


def longer(pair, folder):
    """The same pair for longer contexts."""
    positions = {"max_position_embeddings": SIZES["max_position_embeddings"]}
    return Pair(*(copy_folder(each, folder / each.name, **positions) for each in (pair.target, pair.head)))


def serve(pair, shape, **options):
    """An engine that has run all prompts, and its outputs."""
    mtp = shape is not None and pair.head == pair.target
    make = partial(lookup, speculative_algorithm="MTP") if mtp else build
    given = {"exactness": "bits", "dtype": "bfloat16", "device": "cuda", "context_length": 600, "page_size": 16}
    llm = make(pair, shape, **{**given, "max_total_tokens": 33 * 640, **options})
    assert llm.engine.layout.max_context == 600
    assert isinstance(llm.engine.runner.backend, SegmentsBackend)
    prompts = pair.prompts(LENGTHS)
    outputs = llm.generate(prompts, asked(prompts))
    llm.scheduler.check_integrity()
    return llm, outputs


@pytest.fixture(scope="module")
def plain(pairs):
    """Bits of plain decoding of one request at a time, by model, dtype and what K/V are kept in; made once each."""
    made = {}

    def of(name, dtype="bfloat16", kept="auto"):
        if (name, dtype, kept) not in made:
            options = {"max_running_requests": 1, "dtype": dtype, "kv_cache_dtype": kept}
            llm, outputs = serve(pairs[name], None, **options)
            made[name, dtype, kept] = bits(outputs)
            llm.close()
        return made[name, dtype, kept]

    return of


WIDE, TREE, CHAIN = (8, 5, 60), (5, 4, 16), (1, 6, 7)
CASES = [
    ("llama", CHAIN, 3, 333, "auto", "bfloat16"),
    ("llama", TREE, 33, 16, "off", "bfloat16"),
    ("qwen3 moe", TREE, 8, 333, "auto", "bfloat16"),
    ("gpt-oss", WIDE, 3, 333, "auto", "bfloat16"),
    ("qwen3 next", TREE, 8, 333, "auto", "bfloat16"),
    ("deepseek v3", TREE, 33, 333, "auto", "bfloat16"),
    ("deepseek v3", WIDE, 3, 16, "off", "float16"),
    ("deepseek v32", CHAIN, 8, 333, "auto", "float16"),
    ("glm 5.2", WIDE, 8, 333, "auto", "bfloat16"),
    ("glm 5.2", TREE, 3, 16, "auto", "float16"),
]
WHOLE = [
    pytest.param(name, shape, batch, chunk, graphs, dtype, marks=pytest.mark.slow)
    for dtype in ("bfloat16", "float16")
    for name in MODELS
    for shape, graphs in ((None, "auto"), (WIDE, "off"), (TREE, "auto"), (CHAIN, "off"))
    for batch, chunk in ((1, 16), (8, 333), (33, 16))
]


@pytest.mark.parametrize(("name", "shape", "batch", "chunk", "graphs", "dtype"), [*CASES, *WHOLE])
def test_every_bit_is_that_of_plain_decoding(pairs, plain, *, name, shape, batch, chunk, graphs, dtype):
    options = {"max_running_requests": batch, "chunked_prefill_size": chunk, "graphs": graphs, "dtype": dtype}
    llm, outputs = serve(pairs[name], shape, **options)
    assert isinstance(llm.engine.launcher, CudaGraphs) == (graphs == "auto")
    llm.close()
    assert bits(outputs) == plain(name, dtype)
    if shape is not None:
        assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 14, "intermediate_size": 48}
EVEN_BY_KIND = {
    "lfm2": {"intermediate_size": 72},
    "bamba": MAMBA,
    "granite 4 hybrid": {**MAMBA, "shared_intermediate_size": 48},
    "falcon h1": {**MAMBA, "mamba_d_ssm": 64},
    "nemotron h": {
        "mamba_num_heads": 8,
        "ssm_state_size": 14,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "minimax": {"intermediate_size": 48},
}
"""Sizes as `EVEN`, a model of each kind of recurrence, beside dense layers and experts."""


@pytest.mark.parametrize("name", EVEN_BY_KIND)
def test_states_of_every_kind_change_no_bit(name, tmp_path):
    """Mamba-2, short convolutions and lightning attention: trees in a batch, captured, as plain decoding of one."""
    pair = even(name, EVEN_BY_KIND[name], tmp_path)
    given = {"exactness": "bits", "dtype": "bfloat16", "device": "cuda", "context_length": 192, "page_size": 16}
    prompts = pair.prompts([1, 17, 60, 63, 64, 65, 90, 3])
    llm = build(pair, None, **given, max_running_requests=1)
    want = bits(llm.generate(prompts, asked(prompts)))
    llm.close()
    accepted = 0
    for shape, batch, chunk, graphs in ((TREE, 8, 333, "auto"), (CHAIN, 3, 16, "off"), (None, 8, 64, "auto")):
        sizes = {"max_running_requests": batch, "chunked_prefill_size": chunk, "graphs": graphs}
        llm = build(pair, shape, **given, **sizes)
        outputs = llm.generate(prompts, asked(prompts))
        llm.close()
        assert bits(outputs) == want, (shape, batch, chunk)
        accepted += sum(map(sum, accept_lens(outputs))) if shape is not None else 0
    assert accepted > 0, "nothing was accepted, so nothing was tested"
    loose = build(pair, TREE, **{**given, "exactness": "ties"}, max_running_requests=8)
    assert bits(loose.generate(prompts, asked(prompts))) != want, "the comparison sees nothing"
    loose.close()


FP8 = "fp8_e4m3"


@pytest.mark.parametrize(
    ("name", "dtype", "kept"),
    [("llama", "bfloat16", "auto"), ("glm 5.2", "bfloat16", "auto"), ("llama", "float16", FP8)],
)
def test_a_retraction_and_a_prefix_from_the_cache_change_no_bit(pairs, plain, name, dtype, kept):
    """What was decoded is prefilled again, or read where a tree's rounds have left it."""
    options = {"dtype": dtype, "kv_cache_dtype": kept}
    llm, outputs = serve(pairs[name], TREE, max_running_requests=8, max_total_tokens=800, **options)
    assert llm.scheduler.num_retractions > 0
    assert bits(outputs) == plain(name, dtype, kept)
    prompts = pairs[name].prompts(LENGTHS)[:4]
    first = llm.generate(prompts, asked(prompts))
    assert bits(first) == plain(name, dtype, kept)[:4]
    more = [[*prompt, *output.token_ids[:-3]] for prompt, output in zip(prompts, first, strict=True)]
    hit = llm.generate(more, asked(more))
    llm.close()
    fresh, _ = serve(pairs[name], None, max_running_requests=1, graphs="off", **options)
    assert bits(hit) == bits(fresh.generate(more, asked(more)))
    fresh.close()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        ("gpt-oss", "bfloat16"),
        ("windows", "bfloat16"),
        ("qwen3 next", "bfloat16"),
        ("deepseek v3", "bfloat16"),
        ("glm 5.2", "bfloat16"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name, dtype in (("llama", "float16"), ("gpt-oss", "float16"), ("qwen3 moe", "bfloat16"))
        ),
    ],
)
def test_kv_in_fp8_change_no_bit(pairs, plain, name, dtype):
    """A tree's columns are rounded as pages are."""
    want = plain(name, dtype, FP8)
    for shape, batch, chunk, graphs in ((TREE, 8, 333, "auto"), (None, 33, 16, "off")):
        options = {"max_running_requests": batch, "chunked_prefill_size": chunk, "graphs": graphs, "dtype": dtype}
        llm, outputs = serve(pairs[name], shape, kv_cache_dtype=FP8, **options)
        llm.close()
        assert bits(outputs) == want, shape
        if shape is not None:
            assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


def test_kv_in_fp8_have_bits_of_their_own(plain):
    assert plain("llama", kept=FP8) != plain("llama")


@pytest.mark.parametrize("name", LATENTS)
def test_without_it_logits_of_compressed_attention_differ(pairs, plain, name):
    llm, outputs = serve_by_default(pairs[name])
    llm.close()
    assert bits(outputs) != plain(name)


def test_logprobs_of_a_prefill_are_those_of_the_tokens_as_they_were_drawn(pairs, plain):
    """By plain rounds of many, whose outputs are prefilled again together."""
    llm, outputs = serve(pairs["llama"], None, max_running_requests=33, chunked_prefill_size=77, graphs="off")
    assert bits(outputs) == plain("llama")
    whole = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    again = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    llm.close()
    for before, after in zip(outputs, again, strict=True):
        recomputed = [each.logprob for each in after.prompt_logprobs[len(before.prompt_token_ids) :]]
        assert recomputed == [each.logprob for each in before.logprobs]


class AnyWeight(dict):
    """A table in which each weight in whole tiles has launches, one of each form."""

    def get(self, key, default=None):
        *_, gated, rows = key
        return {"launch": {8: (1, 7, 1), 16: (4, 3, 4) if gated else (2, 5, 4, True), 32: (4, 2, 4)}[rows]}


@pytest.fixture
def ordered_products(monkeypatch, tmp_path):
    """Rows of all products with weights in 13 bits, which any weight in whole tiles has, probed anew."""
    if (problem := why_not_ordered(torch.bfloat16, gpu_traits(torch.device("cuda")))) is not None:
        pytest.skip(problem)
    table = ordered.load_table()
    if not table.holds_for(gpu_traits(torch.device("cuda"))):
        pytest.skip("nothing was measured on a GPU like this one")
    taken = []

    def counted(x, *rest):
        taken.append(len(x))
        return ordered_gemm(x, *rest)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ordered, "load_table", lambda: replace(table, entries=AnyWeight()))
    monkeypatch.setattr(gpu_products, "ordered_gemm", counted)
    for each in (ordered.offers, probed_products._probed):
        each.cache_clear()
    yield taken
    for each in (ordered.offers, probed_products._probed):
        each.cache_clear()


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_weights_in_13_bits_change_no_bit(ordered_products, graphs):
    """Of the embedded pair, plainly and by trees, captured and eager, against 16 bits and one request at a time."""
    given = {"exactness": "bits", "dtype": "bfloat16", "graphs": graphs}
    plain = make(None, compress_weights=False, max_running_requests=1, **given)
    before = len(ordered_products)
    prompts = held_out(plain, 8)
    want = bits(plain.generate(prompts, asked(prompts)))
    assert len(ordered_products) == before
    plain.close()
    for shape, batch in (((3, 1, 4), 8), ((5, 4, 16), 1), (None, 8)):
        drafting = {"shape": shape} if shape else {"draft": None}
        llm = make(**drafting, compress_weights=True, max_running_requests=batch, **given)
        got = llm.generate(prompts, asked(prompts))
        llm.close()
        assert bits(got) == want, (shape, batch)
    assert {8, 16, 32} <= set(ordered_products[before:])


def test_without_it_logits_differ(pairs, plain):
    """The comparison sees what it is for."""
    llm, outputs = serve_by_default(pairs["llama"])
    llm.close()
    assert bits(outputs) != plain("llama")


def serve_by_default(pair):
    llm = build(pair, TREE, dtype="bfloat16", device="cuda", context_length=600, max_running_requests=8)
    prompts = pair.prompts(LENGTHS)
    return llm, llm.generate(prompts, asked(prompts))
