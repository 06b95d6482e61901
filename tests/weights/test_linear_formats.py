"""Gated delta nets in quantized weights: rows that a checkpoint interleaves are cut after they are decoded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, tokens
from support.families import LINEAR, LINEAR_EXPERTS, QWEN_MROPE, SEEING, Tiny
from support.quantized import awq, by_library, fp8_blocks, gptq, nvfp4_of_modelopt, quantized
from support.tiny_models import Pair
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError

SIZES = {
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}
NEXT = Tiny("Qwen3Next", {**LINEAR, **LINEAR_EXPERTS, **SIZES})
SEES = Tiny("Qwen3_5", {**LINEAR, **SIZES, "rope_parameters": QWEN_MROPE}, vision=SEEING["Qwen3VL"])
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS = {
    "fp8 channel": by_library("float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel"),
    "fp8 blocks": fp8_blocks(16, 16),
    "w4a16": by_library("pack-quantized", torch.bfloat16, **INT4),
    "gptq": gptq(32),
    "awq": awq(32),
    "nvfp4": nvfp4_of_modelopt(
        {"quant_method": "modelopt", "ignore": ["lm_head"], "quant_algo": "NVFP4", "group_size": 16}
    ),
}


def generated(folder, dtype="float32"):
    pair = Pair(folder, folder)
    return tokens(build(pair, None, dtype=dtype).generate(pair.prompts([20, 70], seed=1), greedy(12)))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_are_their_decoded_numbers(name, tmp_path):
    folder, decoded = quantized(NEXT.save(tmp_path / "made", seed=5).pair.target, tmp_path / "small", FORMATS[name])
    assert generated(folder) == generated(decoded)


def test_a_list_of_plain_modules_names_them_with_any_prefix(tmp_path):
    """What is fused here is named apart there, and of a folder of images without its prefix."""
    folder = SEES.save(tmp_path / "made", seed=5).pair.target
    small, decoded = quantized(folder, tmp_path / "small", FORMATS["fp8 channel"], "in_proj_")
    with pytest.raises(CheckpointError, match="in_proj"):
        target_spec(small).check()
    config = json.loads((small / "config.json").read_text())
    parts = [f"model.layers.{i}.linear_attn.in_proj_{each}" for i in (0, 1, 3) for each in ("qkv", "z", "a", "b")]
    config["quantization_config"]["ignore"] = parts
    (small / "config.json").write_text(json.dumps(config))
    assert generated(small) == generated(decoded)


def test_parts_of_one_product_in_two_formats_are_refused_by_name(tmp_path):
    folder = SEES.save(tmp_path / "made", seed=5).pair.target
    small, _ = quantized(folder, tmp_path / "small", FORMATS["fp8 channel"], "in_proj_z")
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*in_proj_z"]
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"in_proj_qkv is FP8 and .*in_proj_z"):
        _ = target_spec(small).params


def test_an_mtp_layer_in_plain_numbers_that_no_list_names_is_plain(tmp_path):
    """vllm-38650: lists forget `mtp.fc`, and all of the layer."""
    folder = NEXT.save(tmp_path / "made", seed=5).pair.target
    small, decoded = quantized(folder, tmp_path / "small", FORMATS["fp8 channel"])
    full, generator = "model.layers.2.", torch.Generator().manual_seed(2)
    source = load_file(folder / "model.safetensors")
    layer = {f"mtp.layers.0.{name.removeprefix(full)}": t for name, t in source.items() if name.startswith(full)}
    own = {f"mtp.{name}.weight": torch.zeros(32) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    own["mtp.fc.weight"] = torch.randn((32, 64), generator=generator) / 8
    for each in (small, decoded):
        tensors = {**load_file(each / "model.safetensors"), **layer, **own}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, each / "model.safetensors")
    found = []
    for each in (small, decoded):
        pair = Pair(each, each)
        outputs = build(pair, (2, 3, 6), dtype="float32").generate(pair.prompts([20], seed=1), greedy(16))
        found.append((tokens(outputs), outputs[0].metrics.accept_lens))
    assert found[0] == found[1]
