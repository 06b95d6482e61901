"""GLM-4, dense, of 2024 and 2025, and the text of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR: a part of a head has RoPE,
neighbouring dimensions together; norms on both sides, but in the models of 2024; gate and up in one tensor.

Source: `transformers`' glm and glm4, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, require_value, size
from treetop.models.config import (
    AttentionSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
)
from treetop.models.decoder import unused_tensors

_NORMS = NormNames(attention_output="post_self_attn_layernorm", feed_forward_output="post_mlp_layernorm")


def attention(config: Config, where: Path, interleaved: bool) -> AttentionSpec:
    """GLM's, whose output has no bias; GLM-4.5's experts have the same, with halves that turn together."""
    spec = attention_spec(config, where, rotary_factor=0.5, interleaved=interleaved)
    return replace(spec, output_bias=False)


def read(config: Config, where: Path) -> ModelConfig:
    config = {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, **config}
    spec, dense = attention(config, where, interleaved=True), replace(dense_spec(config, where), stored="joined")
    return model_config(config, where, [LayerSpec(spec, dense, norms=_NORMS)] * num_layers(config, where))


def read_2024(config: Config, where: Path) -> ModelConfig:
    whole = read({"rms_norm_eps": 1.5625e-7, **config}, where)
    return replace(whole, layers=tuple(replace(layer, norms=NormNames()) for layer in whole.layers))


def read_vl(config: Config, where: Path) -> ModelConfig:
    """Of GLM-4.1V, whose whole heads turn where the config does not say.

    Where `head_dim` is another, `transformers` turns so much of it in heads of hidden / heads: refused.
    """
    hidden, heads = size(config, "hidden_size", where), size(config, "num_attention_heads", where)
    require_value(config, "head_dim", hidden // heads, where)
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "partial_rotary_factor": 1.0}
    config = {**defaults, **config, "head_dim": hidden // heads}
    return read(config, where)


def read_ocr(config: Config, where: Path) -> ModelConfig:
    """Of GLM-OCR: heads of another size, no biases."""
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
    config = {**defaults, "partial_rotary_factor": 1.0, **config}
    hidden, heads = size(config, "hidden_size", where), size(config, "num_attention_heads", where)
    return read({"head_dim": hidden // heads, **config, "attention_bias": False}, where)


def unused_of_ocr(config: ModelConfig) -> set[str]:
    """The layer after the last, which predicts a token more."""
    return unused_tensors(config) | {f"model.layers.{len(config.layers)}."}
