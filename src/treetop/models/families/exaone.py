"""EXAONE 4: norms of heads, norms behind layers alone; where most layers have a window, the others do not turn. With
experts (K-EXAONE) the same attention, behind norms as Llama's.

Source: `transformers`' exaone4 and exaone_moe, whose defaults these are.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, size
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
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
from treetop.models.families import glm4_moe
from treetop.models.families.olmo import NORMS
from treetop.types.errors import CheckpointError, shown

_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}
_EXPERTS: dict[str, Any] = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}


def read(config: Config, where: Path) -> ModelConfig:
    config, dense = {**_DEFAULTS, **config}, dense_spec(config, where)
    return model_config(config, where, [LayerSpec(each, dense, norms=NORMS) for each in _attention(config, where)])


def read_moe(config: Config, where: Path) -> ModelConfig:
    """Its experts are DeepSeek-V3's in other words."""
    config = {**_DEFAULTS, **_EXPERTS, **config}
    config |= {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    count = num_layers(config, where)
    first = min(size(config, "first_k_dense_replace", where), count)
    named = mlp_layer_types(
        {"mlp_layer_types": ["dense"] * first + ["sparse"] * (count - first), **_said(config)}, where
    )
    experts = glm4_moe.read({**config, "first_k_dense_replace": 0}, where).layers[0].experts
    assert experts is not None
    kinds: dict[str, DenseSpec | ExpertSpec] = {
        "dense": dense_spec(config, where),
        "sparse": replace(experts, stored=ExpertLayout(score="e_score_correction_bias")),
    }
    layers = zip(_attention(config, where), named, strict=True)
    return model_config(config, where, [LayerSpec(attention, kinds[kind]) for attention, kind in layers])


def _said(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def unused_moe(config: ModelConfig) -> set[str]:
    """Layers that predict further tokens."""
    return unused_tensors(config) | {"mtp."}


def _attention(config: Mapping[str, Any], where: Path) -> list[AttentionSpec]:
    """Of each layer. Without a window all layers turn."""
    has_rope = replace(attention_spec(config, where), qk_norm=True)
    if config["sliding_window"] is None:
        return [has_rope] * num_layers(config, where)
    still = replace(has_rope, rope=RopeSpec(has_rope.head_dim, has_rope.rope.theta, rotary_dim=0))
    slides, pattern = replace(has_rope, window=size(config, "sliding_window", where)), _pattern(config, where)
    kinds = layer_types(config, where, lambda i: pattern[i])
    return [slides if kind == SLIDING_ATTENTION else still for kind in kinds]


def _pattern(config: Mapping[str, Any], where: Path) -> list[str]:
    """Types of layers by `sliding_window_pattern`: one of so many is full, or letters L and G, and the last layer G."""
    count, pattern = num_layers(config, where), config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise CheckpointError(f"{where}: sliding_window_pattern must be letters L and G, got {shown(pattern)}")
        slides = [index < count - 1 and pattern[index % len(pattern)] == "L" for index in range(count)]
    else:
        every = size(config, "sliding_window_pattern", where, default=4)
        slides = [(index + 1) % every != 0 for index in range(count)]
    return [SLIDING_ATTENTION if each else FULL_ATTENTION for each in slides]
