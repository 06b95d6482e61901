"""Every family is the model that `transformers` runs, speculation gives its tokens, and what is unknown is refused."""

import json

import pytest
import torch

from support.engines import accept_lens, build, greedy, steps, submit, tokens
from support.examples import EVERYTHING
from support.families import FAMILIES, SIZES, SMALL_4, WINDOW, YARN, Saved
from support.logits import record_last_logits, record_logits
from support.refusing import refused
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.attention import registry
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import BACKENDS, refusal
from treetop.models.config import NormedStream, attention_of_rank
from treetop.models.registry import FAMILIES as KNOWN
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import FULL, NULL_PAGE
from treetop.types.ids import WINDOW as WINDOW_GROUP

LENGTHS = (1, WINDOW - 1, WINDOW, 5 * WINDOW)
"""Prompts below the window, at its edge and far past it; 16 tokens more pass it in every case but the first."""
GRID = [(1, 1, 2), (1, 3, 4), (1, 6, 7), (2, 2, 5), (2, 3, 6), (4, 3, 12), (4, 5, 16), (8, 5, 60)]


OF_EACH_KIND = (
    *("gemma3", "qwen3 vl", "mixtral", "mimo v2", "step 3.5", "laguna", "llama 4", "hunyuan moe", "gemma4 experts"),
    *("deepseek v2", "glm 5.2", "qwen3 next", "nemotron", "falcon 40b"),
)
"""Families whose trees are compared in the short run too: one of each kind of attention, experts and folder."""


def named(name: str) -> str:
    return name.replace(" ", "-")


OFTEN = [pytest.param(name, marks=[pytest.mark.slow] * tiny.slow) for name, tiny in FAMILIES.items()]


@pytest.fixture(scope="module", params=OFTEN, ids=named)
def saved(request, tmp_path_factory) -> Saved:
    return FAMILIES[request.param].save(tmp_path_factory.mktemp("family"), seed=5)


@pytest.mark.parametrize("chunk", [17, *(pytest.param(each, marks=pytest.mark.slow) for each in (512, 5))])
def test_logits_equal_those_of_transformers(saved, chunk):
    """float32, to 1e-4 of the largest: every prompt position, then decoded positions; and the last of a prompt alone.

    In chunks of 17 the shorter prompts are one, as long as the window, and the longest is four that begin within pages.
    """
    model = saved.reference(torch.float32)
    options = {"dtype": "float32", "graphs": "off", "page_size": 4, "device": "cpu", "context_length": 128}
    llm = LLM(model=str(saved.pair.target), draft=None, chunked_prefill_size=chunk, **options)
    seen = record_logits(llm)
    for prompt in saved.pair.prompts(LENGTHS[1:] if EVERYTHING else LENGTHS[2:], seed=5):
        seen.clear()
        (output,) = llm.generate([prompt], greedy(6))
        ours = torch.cat([logits[0] for logits in seen])
        theirs = saved.logits(model, [*prompt, *output.token_ids[:-1]])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    alone = record_last_logits(llm)  # what is read of a prefill, for which its last layer goes on with few tokens
    for prompt in saved.pair.prompts(LENGTHS[1:3], seed=6):
        llm.generate([prompt], greedy(1))
        theirs = saved.logits(model, prompt)[-1]
        torch.testing.assert_close(alone[-1][0], theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["gemma3", "glm4", "qwen2 windows"])
def test_bfloat16_is_as_near_to_float64_as_that_of_transformers(name, tmp_path):
    """Norms of 1 + w are kept in float32, the rest in bfloat16."""
    saved = FAMILIES[name].save(tmp_path, seed=5)
    llm = LLM(model=str(saved.pair.target), draft=None, dtype="bfloat16", graphs="off", device="cpu")
    seen, (prompt,) = record_logits(llm), saved.pair.prompts([30])
    llm.generate([prompt], greedy(1))
    exact = saved.logits(saved.reference(torch.float64), prompt)
    theirs = saved.logits(saved.reference(torch.bfloat16), prompt)
    ours, theirs = (float((logits.double() - exact).norm() / exact.norm()) for logits in (seen[0][0], theirs))
    print(f"relative error {ours:.4f}, transformers {theirs:.4f}")
    assert 0 < ours < 1.5 * theirs < 0.3
    weights = llm.engine.runner.target.norm.weight
    assert weights.dtype == (torch.float32 if name == "gemma3" else torch.bfloat16)


def expected_tokens(saved: Saved, prompts, count: int) -> list[tuple[int, ...]]:
    """Greedy continuations by `transformers`, of one prompt after another."""
    model = saved.reference(torch.float64)
    each = [saved.logits(model, prompt, count - 1)[len(prompt) - 1 :] for prompt in prompts]
    return [tuple(logits.argmax(dim=-1).tolist()) for logits in each]


def assert_shapes_give(saved: Saved, shapes, count: int, **options) -> None:
    """With every tree, and plainly in `make test-all`, in one ragged batch, twice: the second prefixes are cached."""
    prompts = saved.pair.prompts(LENGTHS, seed=3)
    expected = expected_tokens(saved, prompts, count)
    options = {"page_size": 4, "chunked_prefill_size": 16, "context_length": 128, "max_running_requests": 4, **options}
    for shape in (None, *shapes) if EVERYTHING else shapes:
        llm = build(saved.pair, shape, **options)
        for again in (False, True):
            outputs = llm.generate(prompts, greedy(count, whole=True))
            assert tokens(outputs) == expected
            if shape is not None and shape[0] > 1:  # a chain may agree nowhere
                assert sum(map(sum, accept_lens(outputs))) > 0
            cached = max(output.metrics.num_cached_tokens for output in outputs)
            assert (cached > 0) == again


@pytest.mark.parametrize(
    "saved",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_EACH_KIND)) for name in FAMILIES],
    ids=named,
    indirect=True,
)
def test_speculative_decoding_gives_the_tokens_of_transformers(saved):
    """float64: the tokens of each prompt by itself, whatever the tree and the other rows, with the prefix cache."""
    assert_shapes_give(saved, [(3, 4, 14)], 16 if EVERYTHING else 9)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["off", "sim"])
def test_every_shape_gives_the_tokens_of_transformers(saved, graphs):
    assert_shapes_give(saved, GRID, 40, graphs=graphs, check_level=3)


@pytest.mark.slow
def test_lookup_drafts_and_retracted_rows_give_the_tokens_of_transformers(saved):
    """float64, n-gram trees: a pool with too few pages for the batch, so that rows are taken out and begin anew."""
    prompts = saved.pair.prompts(LENGTHS, seed=3)
    tree = {"speculative_eagle_topk": 3, "speculative_num_steps": 4, "speculative_num_draft_tokens": 14}
    sizes = {"page_size": 4, "context_length": 128, "max_running_requests": 4, "max_total_tokens": 140}
    options = {"dtype": "float64", "graphs": "off", "device": "cpu", "speculative_algorithm": "NGRAM"}
    llm = LLM(model=str(saved.pair.target), **tree, **sizes, **options)
    assert tokens(llm.generate(prompts, greedy(40, whole=True))) == expected_tokens(saved, prompts, 40)
    full = [each for each in target_spec(saved.pair.target).config.attention.values() if each.window is None]
    assert (llm.scheduler.num_retractions > 0) == bool(full)  # a window's pool has room for every row


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama 4"])
def test_pages_behind_a_window_are_given_back(tmp_path, name):
    """A window's pool has room for nothing else; tokens far past it are those of a pool that keeps everything."""
    pair = FAMILIES[name].save(tmp_path).pair
    options = {"page_size": 4, "chunked_prefill_size": 8, "context_length": 200, "disable_radix_cache": True}
    llm = build(pair, (3, 4, 14), max_running_requests=2, **options)
    layout, maximum = llm.engine.layout, 0
    assert layout.num_pages[WINDOW_GROUP] == 1 + 2 * layout.window_pages(WINDOW) < 1 + layout.page_columns
    requests = submit(llm, pair.prompts([90, 30], seed=2), greedy(70, whole=True))
    for _ in steps(llm):
        for running in (request.running for request in requests if request.running is not None):
            pages = running.lease.pages[WINDOW_GROUP]
            held = [page for page in pages if page != NULL_PAGE]
            assert len(held) <= layout.window_pages(WINDOW)
            maximum = max(maximum, len(pages) - len(held))
    assert maximum * layout.page_size > 120
    assert layout.window_spares(layout.group(WINDOW_GROUP)) > 120
    assert llm.scheduler.load.kv_usage == 0


def test_every_family_has_a_tiny_model():
    """A family that is added without one fails here, but for those of other files."""
    made = {tiny.architecture for tiny in FAMILIES.values()}
    made |= {"MiMoForCausalLM", "Step3p5ForCausalLM", "KimiK25ForConditionalGeneration"}
    made |= {
        "InternS2PreviewForConditionalGeneration",
        "MiniMaxText01ForCausalLM",
        "MiniMaxM1ForCausalLM",
        "BailingMoeV3ForCausalLM",
    }
    elsewhere = {f"{name}ForCausalLM" for name in ("GptOss", "Glm4Moe", "Qwen3Moe", "MiMoV2")}
    assert set(KNOWN) - elsewhere <= made


# ------------------------------------------------------------------------------------------------ spellings


def respelled(saved: Saved, folder, **changes):
    """The config that treetop reads of a copy with other keys; None takes one out."""
    target = copy_folder(saved.pair.target, folder)
    path = target / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target_spec(target).config


def test_qwen_windows_of_the_older_spelling_mean_the_same(tmp_path):
    """Without `layer_types`, the layers from `max_window_layers` on have the window."""
    saved = FAMILIES["qwen2 windows"].save(tmp_path)
    spec = target_spec(saved.pair.target).config
    assert [layer.attention.window for layer in spec.layers] == [None, None, WINDOW, WINDOW]
    assert respelled(saved, tmp_path / "old", layer_types=None) == spec
    off = respelled(saved, tmp_path / "off", layer_types=None, use_sliding_window=False)
    assert {layer.attention.window for layer in off.layers} == {None}


def test_llama_4_of_the_first_release_means_the_same(tmp_path):
    """Without layer types, with an empty list of RoPE layers, and a number that says to temper attention."""
    saved = FAMILIES["llama 4"].save(tmp_path)
    spec = target_spec(saved.pair.target).config
    attention = [layer.attention for layer in spec.layers]
    assert [(each.window, each.chunked) for each in attention] == [(WINDOW, True)] * 2 + [(None, False), (WINDOW, True)]
    assert [each.rope.query_scale is not None for each in attention] == [not each.qk_norm for each in attention]
    assert [layer.experts is not None for layer in spec.layers] == [False, True] * 2
    first = {"layer_types": None, "no_rope_layers": [], "moe_layers": None, "attn_temperature_tuning": 4}
    assert respelled(saved, tmp_path / "old", **first) == spec
    whole = copy_folder(saved.pair.target, tmp_path / "whole", layer_types=None, attention_chunk_size=None)
    assert {layer.attention.window for layer in target_spec(whole).config.layers} == {None}
    published = {"no_rope_layers": None, "no_rope_layer_interval": None, "attention_chunk_size": None}
    other = respelled(saved, tmp_path / "said", layer_types=None, **published)
    assert [layer.attention.window for layer in other.layers] == [8192] * 3 + [None]


def test_minimax_of_the_first_release_means_the_same(tmp_path):
    """Kinds as numbers, factors under other names, a part of a head that turns."""
    folder = FAMILIES["minimax"].save(tmp_path).pair.target
    config = json.loads((folder / "config.json").read_text())
    older = {"architectures": ["MiniMaxM1ForCausalLM"], "attn_type_list": [0, 0, 1, 0], "layer_types": None}
    for half in ("full", "linear", "mlp"):
        for each in ("alpha", "beta"):
            key = "mlp_{}_factor" if half == "mlp" else half + "_attn_{}_factor"
            name = half if half == "mlp" else f"{half}_attention"
            older[f"layernorm_{name}_{each}"] = config[key.format(each)]
            older[key.format(each)] = None
    found = target_spec(copy_folder(folder, tmp_path / "older", **older)).config
    assert found == target_spec(folder).config
    assert found.layers[0].normed_stream == NormedStream((1.25, 0.75), (1.75, 0.875))
    turned = target_spec(copy_folder(folder, tmp_path / "turned", **older, rotary_dim=4)).config
    assert turned.attention[2].rope.rotary_size == 4


def test_hunyuan_as_published_means_the_same(tmp_path):
    """Values by layer, sizes said twice, and a rotation whose factor an alpha makes idle."""
    saved = FAMILIES["hunyuan moe"].save(tmp_path)
    spec = target_spec(saved.pair.target).config
    rope = {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    published = {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": {**rope, "type": "dynamic"},
        "moe_topk": [3] * 4,
        "moe_intermediate_size": [24] * 4,
        "num_shared_expert": [1] * 4,
        "attention_head_dim": 12,
        "use_qk_norm": True,
        "use_cla": False,
    }
    assert respelled(saved, tmp_path / "published", **published) == spec
    assert spec.layers[0].attention.rope.theta == pytest.approx(1e4 * 50 ** (12 / 10))


@pytest.mark.parametrize(("said", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)])
def test_mistral_without_a_window_has_none_and_by_default_that_of_the_first_release(tmp_path, said, window):
    config = {**SIZES, "architectures": ["MistralForCausalLM"], **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert {layer.attention.window for layer in target_spec(tmp_path).config.layers} == {window}


def test_gemma_of_the_older_spelling_means_the_same(tmp_path):
    """A pattern in place of layer types, two thetas and a scaling in place of nested parameters, defaults left out."""
    tiny = FAMILIES["gemma3"]
    kinds = [layer.attention.window for layer in target_spec(tiny.save(tmp_path).pair.target).config.layers]
    assert kinds == [WINDOW, WINDOW, None, WINDOW]
    saved = tiny.save(tmp_path / "again")
    old = respelled(
        saved,
        tmp_path / "old",
        layer_types=None,
        rope_parameters=None,
        tie_word_embeddings=None,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert old == target_spec(saved.pair.target).config
    assert old.tied_embeddings
    ropes = [layer.attention.rope for layer in old.layers]
    assert [rope.theta for rope in ropes] == [1e4, 1e4, 1e6, 1e4]
    assert [rope.scaling is None for rope in ropes] == [True, True, False, True]


@pytest.mark.parametrize("name", ["exaone 4", "exaone moe"])
def test_letters_and_numbers_stand_for_layer_types(tmp_path, name):
    """Letters are taken in turn, and the last layer is full whatever its letter; a number is how many layers end with a
    full one. Layers that are full do not turn."""
    saved, windows = FAMILIES[name].save(tmp_path), {}
    for pattern in ("LLG", "G", 2, 3):
        config = respelled(saved, tmp_path / str(pattern), layer_types=None, sliding_window_pattern=pattern)
        attention = [layer.attention for layer in config.layers]
        windows[pattern] = [each.window for each in attention]
        assert all((each.window is None) == (each.rope.rotary_dim == 0) for each in attention)
    sliding = [WINDOW] * 2
    assert windows["LLG"] == [*sliding, None, None]
    assert windows["G"] == [None] * 4
    assert windows[2] == [WINDOW, None] * 2
    assert windows[3] == [*sliding, None, WINDOW]


# ------------------------------------------------------------------------------------------------ refusals

UNSUPPORTED = [
    ("llama 3", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama 3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama 3", {"quantization_config": {"quant_method": "bnb"}}, "quantization_config"),
    ("llama 3", {"kv_lora_rank": 512}, "kv_lora_rank"),
    ("llama 3", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("deepseek v3", {"index_topk": 8}, "index_topk"),
    ("deepseek v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek v3", {"topk_group": 5}, "topk_group"),
    ("deepseek v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek v2 lite", {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
    ("mistral4", {"rope_parameters": {**SMALL_4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama 4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("llama 4", {"attention_chunk_size": 0}, "attention_chunk_size"),
    ("llama 4", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("llama 4", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ("llama 4", {"rope_parameters": YARN}, "use_qk_norm"),
    ("hunyuan moe", {"moe_topk": [3, 3, 3, 2]}, "moe_topk"),
    ("hunyuan moe", {"num_shared_expert": [1, 1, 2, 1]}, "num_shared_expert"),
    ("hunyuan", {"use_cla": True}, "use_cla"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": "x", "rope_theta": 1e4}}, "alpha"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
    ("qwen2 windows", {"layer_types": None, "max_window_layers": -1}, "max_window_layers"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3", {"rope_parameters": {"full_attention": 1}}, "full_attention"),
    ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
    ("glm4", {"partial_rotary_factor": 0.3, "rope_parameters": {"rope_type": "default"}}, "partial_rotary_factor"),
    ("mimo", {"use_mrope": True}, "use_mrope"),
    ("phi3", {"rope_parameters": YARN}, "rope_type"),
    ("hy3", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "longrope"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
    ("minimax m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("minimax m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("exaone 4", {"layer_types": None, "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
    ("exaone moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act"),
    ("dots", {"topk_group": 3}, "topk_group"),
    ("cwm", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("falcon 7b", {"alibi": True}, "alibi"),
    ("falcon 7b", {"activation": "silu"}, "activation"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ("nemotron", {"hidden_act": "silu"}, "hidden_act"),
    ("muse", {"text_config": {"hidden_activation": "gelu", "model_type": "muse_glimmer_text"}}, "hidden_activation"),
    ("qwen3 vl moe", {"text_config": {"norm_topk_prob": False, "model_type": "qwen3_vl_moe_text"}}, "norm_topk_prob"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> a folder, made when it is asked for."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = FAMILIES[name].save(tmp_path_factory.mktemp("model")).pair.target
        return made[name]

    return model


@pytest.mark.parametrize(("name", "changes", "key"), UNSUPPORTED, ids=lambda value: str(value)[:60])
def test_an_unsupported_key_is_refused_by_name(models, tmp_path, name, changes, key):
    folder = copy_folder(models(name), tmp_path / "changed", **changes)
    refused(CheckpointError, lambda: target_spec(folder), "config.json", key)


@pytest.mark.parametrize(("architecture", "reason"), [
    ("AXK1ForCausalLM", "MLA"),
    ("DeepseekV4ForCausalLM", "hyper-connections"),
    ("Dots3NoteForConditionalGeneration", "has a norm"),
    ("MiniMaxM3SparseForConditionalGeneration", "blocks of keys"),
    ("InklingForConditionalGeneration", "convolutions"),
    ("Glm5NextForCausalLM", "sparse"),
    ("KimiK3ForCausalLM", "residuals across layers"),
    ("Qwen4ExpForConditionalGeneration", "hyper-connections"),
    ("InternS2MobiusForConditionalGeneration", "images"),
    ("Mamba2ForCausalLM", "state space"),
    ("LlavaForConditionalGeneration", "images"),
    ("VaultGemmaForCausalLM", "softcap"),
    ("BertForMaskedLM", "no decoder"),
    ("Gemma4AssistantForCausalLM", "--speculative-draft-model-path"),
    ("LlamaForCausalLMEagle3", "--speculative-draft-model-path"),
    ("Eagle3Speculator", "draft head, not of a target"),
    ("Eagle2_5_VLForConditionalGeneration", "images"),
    ("NobodyForCausalLM", "is not supported, only "),
])  # fmt: skip
def test_an_unsupported_architecture_is_refused_by_name_and_reason(models, tmp_path, architecture, reason):
    folder = copy_folder(models("llama 3"), tmp_path / "changed", architectures=[architecture])
    refused(CheckpointError, lambda: target_spec(folder), "config.json", architecture, reason)


def test_granite_4_has_mamba_where_the_types_of_its_layers_say_so(models, tmp_path):
    """Its config names Mamba's sizes whether it has such layers or not; types have two spellings."""
    kinds = ["mamba", "attention", "mamba", "attention"]
    folder = copy_folder(models("granite 4"), tmp_path / "mixed", layer_types=kinds, mamba_n_heads=8, mamba_d_head=8)
    assert list(target_spec(folder).config.recurrent) == [0, 2]
    assert not target_spec(models("granite 4")).config.recurrent


def test_a_cap_of_scores_shows_in_logits_and_needs_plain_operations(models, tmp_path):
    """Backends without it, and `bits`, are refused by name; a config may say that there is none."""
    folder, ids = models("gemma2"), [5, 7, 9, 4, 8, 6]
    free = copy_folder(folder, tmp_path / "free", attn_logit_softcapping=None)
    assert target_spec(free).config.attention[0].score_cap is None
    found = [LLM(str(each), draft=None, dtype="float64", graphs="off", device="cpu") for each in (folder, free)]
    assert not torch.allclose(*(llm.engine.next_logits(ids) for llm in found), atol=1e-4)
    need = Need(torch.float32, torch.device("cpu"), 16, (GroupNeed(FULL, 4, 2, 12, cap=0.5),))
    assert "capped scores" in registry._of_group(BACKENDS["triton"].capabilities, need, need.groups[0]).reason
    assert refusal("torch", need) is None
    with pytest.raises(ConfigError, match="--exactness bits: attention with capped scores is not exact yet"):
        LLM(str(folder), draft=None, device="cpu", dtype="float32", graphs="off", exactness="bits")


def test_a_lora_adapter_is_refused(models, tmp_path):
    """With a config of its base beside it, and alone."""
    folder = copy_folder(models("llama 3"), tmp_path / "adapter")
    (folder / "adapter_config.json").write_text("{}")
    refused(CheckpointError, lambda: target_spec(folder), "adapter_config.json", "LoRA")
    (folder / "config.json").unlink()
    refused(CheckpointError, lambda: target_spec(folder), "adapter_config.json", "LoRA")


def test_only_the_layers_for_further_tokens_may_be_left_over(models, tmp_path):
    """A tensor that belongs to nothing is an error in MiMo too."""
    target = models("mimo")
    assert target_spec(target).check() > 0
    other = copy_folder(target, tmp_path / "other", tensors={"model.mtp_layersx.0.weight": torch.zeros(1)})
    refused(CheckpointError, target_spec(other).check, "model.mtp_layersx.0.weight")


# ------------------------------------------------------------------------------------------------ text of what sees


def test_which_layers_of_muse_turn(models, tmp_path):
    """By default every fourth from the last does not; another theta than that of all is refused."""
    target = models("muse")
    text = json.loads((target / "config.json").read_text())["text_config"]
    attention = target_spec(target).config.attention
    assert [attention[layer].rope.rotary_size for layer in range(4)] == [12, 0, 12, 0]
    assert [attention[layer].window for layer in range(4)] == [WINDOW] * 3 + [None]
    plain = copy_folder(target, tmp_path / "plain", text_config={**text, "layer_rope_theta": None, "layer_types": None})
    found = target_spec(plain).config.attention
    assert [(found[layer].rope.rotary_size, found[layer].window) for layer in (2, 3)] == [(12, WINDOW), (0, None)]
    other = copy_folder(target, tmp_path / "other", text_config={**text, "layer_rope_theta": [5.0, 0, 1e4, 0]})
    refused(CheckpointError, lambda: target_spec(other), "layer_rope_theta", "10000.0", "4 layers")


def test_intern_s2_is_qwen_with_a_tower_more(models, tmp_path):
    """Its language model, its MTP layer's names too; the tower of time series is left out."""
    target = models("qwen3.5 moe of images")
    tower = {"model.time_series.encoder.weight": torch.ones(2, 2)}
    named = {"architectures": ["InternS2PreviewForConditionalGeneration"], "model_type": "intern_s2_preview"}
    folder = copy_folder(target, tmp_path / "intern", tensors=tower, **named)
    assert target_spec(folder).config == target_spec(target).config
    assert target_spec(folder).check() == target_spec(target).check()
    assert "model.time_series" in " ".join(target_spec(folder).left_out())


def test_the_flat_config_of_older_files_means_the_same(models, tmp_path):
    """Qwen2.5-VL was released without `text_config`, its rotation of the type mrope."""
    target = models("qwen2.5 vl")
    config = json.loads((target / "config.json").read_text())
    text = config.pop("text_config")
    flat = copy_folder(target, tmp_path / "flat")
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    old = {**text, **config, "rope_parameters": None, "rope_scaling": rope, "rope_theta": 1e4}
    (flat / "config.json").write_text(json.dumps(old))
    assert target_spec(flat).config == target_spec(target).config
    assert target_spec(flat).check() == target_spec(target).check()


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_whether_the_text_of_images_is_tied_its_tensors_decide(models, tmp_path, outer, inner):
    """An output matrix that is there and differs is used, whatever is said and where."""
    target = models("qwen3 vl")
    text = {**json.loads((target / "config.json").read_text())["text_config"], "tie_word_embeddings": inner}
    folder = copy_folder(target, tmp_path / "said", text_config=text, tie_word_embeddings=outer)
    said = {each for each in (outer, inner) if each is not None}
    assert not target_spec(folder).config.tied_embeddings
    headless = copy_folder(folder, tmp_path / "headless", tensors={"lm_head.weight": None})
    assert target_spec(headless).config.tied_embeddings == (said != {False})


def test_what_text_does_not_need_is_named_once_and_nothing_else_may_be_left_over(models, tmp_path, caplog):
    target = models("mistral3")
    with caplog.at_level("INFO", logger="treetop"):
        LLM(model=str(target), draft=None, device="cpu")
    (line,) = (record.message for record in caplog.records if "left out" in record.message)
    assert "vision_tower and multi_modal_projector" in line
    other = copy_folder(target, tmp_path / "other", tensors={"language_model.model.more.weight": torch.zeros(1)})
    refused(CheckpointError, target_spec(other).check, "unexpected tensor language_model.model.more.weight")


def test_another_language_model_in_a_known_folder_is_refused(models, tmp_path):
    target = models("mistral3")
    text = {**json.loads((target / "config.json").read_text())["text_config"], "model_type": "mistral5"}
    folder = copy_folder(target, tmp_path / "other", text_config=text)
    refused(CheckpointError, lambda: target_spec(folder), "text_config", "'mistral5'", "only mistral")


def test_gemma_of_images_may_leave_its_sizes_out(tmp_path):
    """The first release names no vocabulary, heads or norms: those of `transformers`' configuration count."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {**said, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = target_spec(tmp_path).config
    assert (spec.vocab_size, spec.tied_embeddings, spec.eos_token_ids, spec.max_positions) == (
        262208,
        True,
        (1, 106),
        131072,
    )
    assert (spec.layers[0].attention.num_heads, spec.layers[0].attention.kv.heads) == (8, 4)
    assert [layer.attention.window for layer in spec.layers[:6]] == [1024] * 5 + [None]


def test_norms_over_all_heads_are_refused_with_several_ranks(models):
    """A rank has a part of the heads alone."""
    spec = target_spec(models("olmo2")).config.layers[0].attention
    assert attention_of_rank(spec, 1) == spec
    refused(ConfigError, lambda: attention_of_rank(spec, 2), "--tp-size 2", "norms of queries and keys")
