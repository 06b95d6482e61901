"""OLMo 2 and 3: norms behind attention and feed-forward and none before, norms of all queries and all keys; in OLMo 3
windows in three layers of four. OLMoE and FlexOlmo: experts, in FlexOlmo with these norms, in OLMoE with Llama's.

Source: `transformers`' olmo2, olmo3, olmoe and flex_olmo, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, require_value, size, table
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_layers,
)
from treetop.models.families import qwen3_moe

NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
"""Behind attention and feed-forward alone."""


def read_2(config: Config, where: Path) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, **config}
    return _model(config, where, [_attention(config, where, None)] * num_layers(config, where))


def read_3(config: Config, where: Path) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, **config}
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if (i + 1) % 4 else FULL_ATTENTION)
    rope, window = (
        _rope(config, where),
        {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where)},
    )
    layers = [replace(_attention({**config, **rope}, where, kind), window=window[kind]) for kind in kinds]
    return _model(config, where, layers)


def read_moe(config: Config, where: Path) -> ModelConfig:
    """OLMoE."""
    require_value(config, "clip_qkv", None, where)
    defaults = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, **config}
    return _experts(defaults, where, NormNames())


def read_flex(config: Config, where: Path) -> ModelConfig:
    return _experts({"rope_theta": 5e5, "num_experts": 7, "num_experts_per_tok": 5, **config}, where, NORMS)


def _experts(config: Config, where: Path, norms: NormNames) -> ModelConfig:
    """Experts in every layer, as Qwen3's."""
    config = {**config, "moe_intermediate_size": config.get("intermediate_size")}
    layer = replace(qwen3_moe.read(config, where).layers[0], mixer=_attention(config, where, None), norms=norms)
    return model_config(config, where, [layer] * num_layers(config, where))


def _attention(config: Config, where: Path, layer_type: str | None) -> AttentionSpec:
    return replace(attention_spec(config, where, layer_type=layer_type), whole_qk_norm=True)


def _model(config: Config, where: Path, attention: list[AttentionSpec]) -> ModelConfig:
    dense = dense_spec(config, where)
    return model_config(config, where, [LayerSpec(each, dense, norms=NORMS) for each in attention])


def _rope(config: Config, where: Path) -> dict[str, Any]:
    """`rope_parameters` by layer type; an earlier `rope_scaling` is of the full layers alone."""
    nested, scaling = table(config, "rope_parameters", where), table(config, "rope_scaling", where)
    full = table(nested, FULL_ATTENTION, where) or scaling
    each = {FULL_ATTENTION: full, SLIDING_ATTENTION: table(nested, SLIDING_ATTENTION, where)}
    default = {"rope_theta": config["rope_theta"]}
    parts = {kind: {**default, **part} for kind, part in each.items()}
    return {"rope_parameters": {**nested, **parts}, "rope_scaling": None}
