"""Llama with windows in some layers: CWM, Ministral of 2024; Mellum 2, which has Qwen3's experts and a rotation for
each kind of layer; dots.llm1 and Solar Open, which have Qwen3's and Llama's attention and DeepSeek-V3's experts.

Source: `transformers`' cwm, ministral, mellum, dots1 and solar_open, whose defaults these are.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, size
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    mlp_layer_types,
    model_config,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.models.families import glm4_moe, qwen3_moe

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_MELLUM_ROPE = {
    FULL_ATTENTION: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
}


def read_cwm(config: Config, where: Path) -> ModelConfig:
    rope = {} if config.get("rope_scaling") is not None else {"rope_parameters": _CWM_ROPE}
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, **rope}
    config = {**defaults, "sliding_window": 8192, **_given(config)}
    attention = _windows(config, where, lambda i: SLIDING_ATTENTION if i % 4 else FULL_ATTENTION)
    return model_config(config, where, [LayerSpec(each, dense_spec(config, where)) for each in attention])


def read_ministral(config: Config, where: Path) -> ModelConfig:
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    default = FULL_ATTENTION if config["sliding_window"] is None else SLIDING_ATTENTION
    attention = _windows(config, where, lambda _: default)
    return model_config(config, where, [LayerSpec(each, dense_spec(config, where)) for each in attention])


def read_mellum(config: Config, where: Path) -> ModelConfig:
    count = num_layers(config, where)
    defaults = {"head_dim": 128, "num_key_value_heads": 4, "norm_topk_prob": True, "sliding_window": 1024}
    config = {**defaults, "rope_parameters": _MELLUM_ROPE, "mlp_layer_types": ["sparse"] * count, **_given(config)}
    whole = qwen3_moe.read({**config, "rope_parameters": None}, where)
    kinds = {"dense": dense_spec(config, where), "sparse": whole.layers[0].feed_forward}
    attention = _windows(config, where, lambda _: FULL_ATTENTION, by_layer=True)
    layers = zip(attention, mlp_layer_types(config, where), strict=True)
    return model_config(config, where, [LayerSpec(replace(spec, qk_norm=True), kinds[kind]) for spec, kind in layers])


def read_dots(config: Config, where: Path) -> ModelConfig:
    defaults = {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False, "n_shared_experts": 0}
    config = {**defaults, "first_k_dense_replace": 0, **config}
    config["n_shared_experts"] = config["n_shared_experts"] or 0
    plain = size(config, "max_window_layers", where) if config["sliding_window"] else num_layers(config, where)
    attention = _windows(config, where, lambda i: SLIDING_ATTENTION if i >= plain else FULL_ATTENTION)
    layers = zip(attention, glm4_moe.read(config, where).layers, strict=True)
    return model_config(config, where, [replace(layer, mixer=replace(spec, qk_norm=True)) for spec, layer in layers])


def read_solar(config: Config, where: Path) -> ModelConfig:
    experts = {"moe_intermediate_size": 1280, "n_routed_experts": 128, "num_experts_per_tok": 8}
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, **experts}
    config = {**defaults, **config}
    spec = replace(attention_spec(config, where, rotary_factor=1.0), output_bias=False)
    dense = {"intermediate_size": config["moe_intermediate_size"], "first_k_dense_replace": 0}  # it has none
    layers = glm4_moe.read({**config, **dense}, where).layers
    return model_config(config, where, [replace(layer, mixer=spec) for layer in layers])


def unused_mellum(config: ModelConfig) -> set[str]:
    """The layer that predicts a token more."""
    return unused_tensors(config) | {"mtp."}


def _given(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _windows(
    config: Mapping[str, Any], where: Path, default: Callable[[int], str], by_layer: bool = False
) -> list[AttentionSpec]:
    """Attention of each layer by its type. by_layer: so is the rotation."""
    kinds = layer_types(config, where, default)
    windows: dict[str, int | None] = {FULL_ATTENTION: None}
    if SLIDING_ATTENTION in kinds:
        windows[SLIDING_ATTENTION] = size(config, "sliding_window", where)
    specs = {kind: attention_spec(config, where, layer_type=kind if by_layer else None) for kind in windows}
    return [replace(specs[kind], window=windows[kind]) for kind in kinds]
