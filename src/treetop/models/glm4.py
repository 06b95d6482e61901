"""GLM-4, dense: half of a head turns, neighbouring dimensions together; norms on both sides, gate and up in one tensor.

Source: `transformers`' glm4, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.models.config import (
    AttentionSpec,
    Config,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
)

_NORMS = NormNames(attention_output="post_self_attn_layernorm", feed_forward_output="post_mlp_layernorm")


def attention(config: Config, where: Path, interleaved: bool) -> AttentionSpec:
    """GLM's, whose output has no bias; GLM-4.5's experts have the same, with halves that turn together."""
    spec = attention_spec(config, where, rotary_factor=0.5, interleaved=interleaved)
    return replace(spec, output_bias=False)


def read(config: Config, where: Path) -> ModelConfig:
    config = {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, **config}
    spec, dense = attention(config, where, interleaved=True), replace(dense_spec(config, where), joined=True)
    return model_config(config, where, [LayerSpec(spec, dense, norms=_NORMS)] * num_layers(config, where))
