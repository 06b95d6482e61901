"""What GGUF files of Llama's relatives say beyond Llama's: Granite, Phi-3, Ministral 3. Needs no PyTorch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.header import Header
from treetop.checkpoints.gguf.metadata import entry
from treetop.types.errors import CheckpointError

GRANITE_KEYS = {
    "attention.scale": ("attention_multiplier", float),
    "embedding_scale": ("embedding_multiplier", float),
    "residual_scale": ("residual_multiplier", float),
    "logit_scale": ("logits_scaling", float),
}
MINISTRAL3_YARN = {"yarn_log_multiplier": ("mscale_all_dim", float)}
PHI3_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
MIXTRAL_KEYS = {"expert_count": ("num_local_experts", int), "expert_used_count": ("num_experts_per_tok", int)}
MIXTRAL_NAMES = {"ffn_gate_inp": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS = {
    f"ffn_{stem}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for stem, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
}


def granite(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """llama.cpp takes `rope.scaling.finetuned` false for heads without RoPE."""
    key = f"{prefix}rope.scaling.finetuned"
    if header.metadata.get(key, True) is not True:
        raise CheckpointError(f"{path}: {key} {header.metadata[key]} is not supported")
    return {}


def phi3(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A window of 0 is none, as the converter writes it. Part of a head may have RoPE."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotary_size = entry(header, f"{prefix}rope.dimension_count", int, path, head_dim)
    if rotary_size > head_dim:
        raise CheckpointError(f"{path}: {prefix}rope.dimension_count {rotary_size} of heads of {head_dim}")
    share, window = rotary_size / head_dim, f"{prefix}attention.sliding_window"
    none = header.metadata.get(window, 0) == 0
    return {
        "sliding_window": None if none else entry(header, window, int, path),
        "partial_rotary_factor": share if int(head_dim * share) == rotary_size else math.nextafter(share, 1.0),
    }


def ministral3(header: Header, prefix: str, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Without a scaled rotation it is Mistral, in files of Mistral Small 3."""
    rope, scale = config.get("rope_scaling"), f"{prefix}attention.temperature_scale"
    if rope is None and scale not in header.metadata:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    if rope is None or rope["rope_type"] != "yarn":
        raise CheckpointError(f"{path}: {scale} without {prefix}rope.scaling.type yarn is not supported")
    growing = {"llama_4_scaling_beta": entry(header, scale, float, path)} if scale in header.metadata else {}
    return {"sliding_window": None, "rope_scaling": {**rope, "mscale": 1.0, **growing}}
