"""Granite: Llama with four multipliers, of embeddings, scores, what layers add, and logits. It may have experts in all
layers. Version 4, as far as its layers are attention: its feed-forward has other names, and heads may not turn.

Source: `transformers`' granite, granitemoe and granitemoehybrid, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.values import Config, real, require_value, size
from treetop.kernels.moe.routing import RouterKind, RouterSpec
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    AttentionSpec,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)


def read(config: Config, where: Path) -> ModelConfig:
    return _model(config, where, LayerSpec(_attention(config, where), dense_spec(config, where)))


def read_moe(config: Config, where: Path) -> ModelConfig:
    require_value(config, "hidden_act", "silu", where)
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    number = size(config, "num_local_experts", where)
    router = RouterSpec(number, num_experts_per_token(config, number, where), RouterKind.TOPK_SOFTMAX)
    experts = ExpertSpec(size(config, "intermediate_size", where), router, stored="stacked of Granite")
    return _model(config, where, LayerSpec(_attention(config, where), experts))


def read_4(config: Config, where: Path) -> ModelConfig:
    """Of attention alone; `models.refused` has refused other layers."""
    require_value(config, "hidden_act", "silu", where)
    require_value(config, "num_local_experts", 0, where)
    require_value(config, "position_embedding_type", "rope", where)
    attention = _attention(config, where)
    if config.get("position_embedding_type") is None:
        attention = replace(attention, rope=RopeSpec(attention.head_dim, attention.rope.theta, rotary_dim=0))
    dense = DenseSpec(size(config, "shared_intermediate_size", where, default=1024), stored="joined of Granite")
    return _model(config, where, LayerSpec(attention, dense))


def _attention(config: Config, where: Path) -> AttentionSpec:
    return replace(attention_spec(config, where), scale=real(config, "attention_multiplier", where, 1.0))


def _model(config: Config, where: Path, layer: LayerSpec) -> ModelConfig:
    return replace(
        model_config(config, where, [layer] * num_layers(config, where)),
        embedding_scale=real(config, "embedding_multiplier", where, 1.0),
        residual_scale=real(config, "residual_multiplier", where, 1.0),
        logits_scale=1 / real(config, "logits_scaling", where, 1.0),
    )
