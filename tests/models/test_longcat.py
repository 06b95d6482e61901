"""LongCat-Flash: what its config says, its faults, and its MTP layer. Its logits and trees: `test_families.py`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.dense_drafts import AFTER_NORM, DenseFamilyMtp, DenseTarget, dense_of
from support.engines import build, greedy, sampled, tokens
from support.families import FAMILIES, LATENT
from support.head_layouts import assert_drafts
from support.quantized import fp8_blocks, quantized
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop import LLM
from treetop.drafts.registry import find_draft
from treetop.models.config import ShortcutSpec
from treetop.models.families import longcat
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError
from treetop_debug.model_faults import LONGCAT_FAULTS

WHERE = Path("config.json")
PUBLISHED = {
    "vocab_size": 131072, "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048, "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256,
    "zero_expert_type": "identity", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 6.0, "router_bias": False,
    "rope_theta": 10000000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_method": "MLA",
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_bias": False, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return FAMILIES["longcat"].save(tmp_path_factory.mktemp("longcat"), seed=5)


def test_a_block_is_two_layers_of_which_the_first_has_experts():
    """The sizes of the published model; keys that are left out have these values too."""
    config = longcat.read(PUBLISHED, WHERE)
    assert len(config.layers) == len(config.attention) == 56
    first, second = config.layers[:2]
    assert isinstance(first.feed_forward, ShortcutSpec)
    assert (first.feed_forward.dense, first.mixer) == (second.feed_forward, second.mixer)
    assert second.experts is None
    router = first.experts.router
    assert (router.num_experts, router.with_weights, router.top_k, router.scale) == (768, 512, 12, 6.0)
    assert router.computing == 8
    assert first.attention.scale == pytest.approx(192**-0.5 * 2)
    assert first.attention.latent.scale == pytest.approx(12**0.5)
    needed = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "eos_token_id")
    assert longcat.read({key: PUBLISHED[key] for key in needed}, WHERE) == config


def test_latents_are_scaled_as_the_config_says():
    """`transformers` scales both whatever it says."""
    for key, of_scores, of_latent in (("mla_scale_q_lora", 1, 12**0.5), ("mla_scale_kv_lora", 2, 1)):
        attention = longcat.read({**PUBLISHED, key: False}, WHERE).layers[0].attention
        assert attention.scale == pytest.approx(192**-0.5 * of_scores)
        assert attention.latent.scale == pytest.approx(of_latent)


@pytest.mark.parametrize(("key", "value"), [
    ("zero_expert_type", "copy"),
    ("router_bias", True),
    ("norm_topk_prob", True),
    ("attention_method", "GQA"),
    ("attention_bias", True),
    ("moe_topk", 769),
    ("num_layers", None),
    ("hidden_act", "gelu"),
    ("scoring_func", "sigmoid"),
    ("n_group", 8),
    ("sliding_window", 512),
    ("qk_head_dim", 256),
    ("num_experts_per_tok", 6),
])  # fmt: skip
def test_keys_that_cannot_be_honoured_are_refused(key, value):
    refused(CheckpointError, lambda: longcat.read({**PUBLISHED, key: value}, WHERE), "config.json", key)


def test_tensors_are_named_as_a_block_has_them(saved, tmp_path):
    """One that is missing, of another shape or nobody's is an error that names it; the MTP layer may be there."""
    folder, block = saved.pair.target, "model.layers.1"
    named = [source.name for param in target_spec(folder).params for source in param.sources]
    assert {f"{block}.self_attn.1.o_proj.weight", f"{block}.mlps.0.up_proj.weight"} <= set(named)
    assert {f"{block}.mlp.experts.4.up_proj.weight", f"{block}.post_attention_layernorm.1.weight"} <= set(named)
    wrong = {
        f"{block}.mlp.experts.4.up_proj.weight": None,
        f"{block}.self_attn.1.kv_a_layernorm.weight": torch.ones(21),
        f"{block}.mlp.router.classifier.weight": torch.ones(5, 32),
        f"{block}.mlp.experts.5.down_proj.weight": torch.ones(32, 24),
        "model.layers.2.self_attn.0.o_proj.weight": torch.ones(32, 32),
    }
    for number, (name, tensor) in enumerate(wrong.items()):
        other = copy_folder(folder, tmp_path / str(number), tensors={name: tensor})
        refused(CheckpointError, target_spec(other).check, name)
    more = copy_folder(folder, tmp_path / "mtp", tensors={"model.mtp.norm.weight": torch.ones(32)})
    assert target_spec(more).check() == target_spec(folder).check()


@pytest.mark.parametrize("left", [[], ["self_attn", "mlps"]], ids=str)
def test_blocks_in_fp8_are_what_they_decode_to(saved, tmp_path, left):
    """All products, or the experts alone where `disable_quant_module` says so; what it cannot name is refused."""
    packed, decoded = quantized(saved.pair.target, tmp_path / "small", fp8_blocks(16, 16), "lm_head", *left)
    packed = copy_folder(packed, tmp_path / "said", disable_quant_module=left)
    (ids,) = saved.pair.prompts([20], seed=2)
    options = {"draft": None, "dtype": "float32", "graphs": "off", "device": "cpu"}
    one, other = (LLM(str(each), **options).engine.next_logits(ids) for each in (packed, decoded))
    assert torch.equal(one, other)
    wrong = copy_folder(packed, tmp_path / "wrong", disable_quant_module=["mlp"])
    refused(CheckpointError, lambda: target_spec(wrong), "disable_quant_module", "mlps")


@pytest.mark.parametrize("name", LONGCAT_FAULTS)
def test_a_fault_shows_in_logits(saved, name):
    """Each of them loads; nothing but a comparison with `transformers` tells."""
    folder, (ids,) = str(saved.pair.target), saved.pair.prompts([20], seed=2)
    options = {"draft": None, "dtype": "float64", "graphs": "off", "device": "cpu"}
    right = LLM(folder, **options).engine.next_logits(ids)
    with LONGCAT_FAULTS[name].active():
        wrong = LLM(folder, **options).engine.next_logits(ids)
    assert float((wrong - right).abs().max() / right.abs().max()) > 1e-3


# ------------------------------------------------------------------------------------------------ the MTP layer

MTP = "model.mtp.layers.0"
OWN = (f"{MTP}.enorm.m", f"{MTP}.hnorm.m", f"{MTP}.eh_proj", "model.mtp.norm")


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory):
    """A folder with its layer, which is one of DeepSeek-V3 without experts, and a model of `transformers` of such."""
    folder, tiny = tmp_path_factory.mktemp("mtp"), FAMILIES["longcat"]
    target = replace(tiny, config={**tiny.config, "vocab_size": 211}).save(folder / "target", seed=9).pair.target
    sizes = {**LATENT, "first_k_dense_replace": 1, "num_hidden_layers": 1}
    rope = {"rope_type": "default", "rope_theta": 1e7}
    dense = replace(FAMILIES["deepseek v3"], config={**sizes, "rope_parameters": rope})
    theirs = dense.save(folder / "dense", seed=7).theirs
    tensors, generator = {}, torch.Generator().manual_seed(2)
    for name, tensor in load_file(theirs / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            moved = name.replace(".mlp.", ".transformer_layer.mlp.")
            tensors[moved.replace("model.layers.0", MTP)] = tensor
    for name in OWN:
        shape = (32, 64) if "proj" in name else (32,)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.12 + ("proj" not in name)
    tensors["model.mtp.embed_tokens.weight"] = torch.zeros(211, 32)
    return copy_folder(target, folder / "both", tensors=tensors, num_nextn_predict_layers=1), theirs


def test_its_layer_drafts_what_it_must(with_mtp):
    """Its latents are scaled as the target's; the state that goes on is the normed one."""
    both, dense = with_mtp
    assert (find_draft(both).algorithm, find_draft(both).layout) == ("MTP", "LongCat")
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64, **how).eval()
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.q_a_layernorm.weight *= (32 / 24) ** 0.5
        attention.kv_a_layernorm.weight *= (32 / 20) ** 0.5
    target = DenseTarget(both, **how)
    config = json.loads((both / "config.json").read_text())
    reference = DenseFamilyMtp(
        *(dense_of(both, config), target.embedding, target.lm_head, torch.zeros(211, dtype=torch.long), ""),
        *(OWN, False, True),
        model=model,
        zeroed=False,
    )
    assert_drafts(Pair(both, both), target, reference, (AFTER_NORM,))


def test_tokens_with_its_layer_are_those_of_plain_decoding(with_mtp, tmp_path):
    both, _ = with_mtp
    pair = Pair(both, both)
    prompts, params = pair.prompts([25, 5]), [greedy(12), sampled(1, 12)]
    plain = tokens(build(pair, None, page_size=4).generate(prompts, params))
    llm = build(pair, (3, 3, 9), page_size=4, graphs="sim", check_level=3)
    assert tokens(llm.generate(prompts, params)) == plain
    more = copy_folder(both, tmp_path / "more", tensors={f"{MTP}.self_attn.more.weight": torch.zeros(6)})
    refused(CheckpointError, lambda: build(Pair(more, more), (3, 3, 9)), f"{MTP}.self_attn.more.weight")
