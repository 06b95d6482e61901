"""Llama 2 and 3: every layer attends to everything, dense. Seed-OSS: that with heads wider than the hidden size gives,
and biases of q, k and v.

Source of Seed-OSS: `transformers`' seed_oss, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers


def read(config: Config, where: Path) -> ModelConfig:
    layer = LayerSpec(attention_spec(config, where), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))


def read_seed_oss(config: Config, where: Path) -> ModelConfig:
    config = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, **config}
    attention = replace(attention_spec(config, where), output_bias=flag(config, "attention_out_bias", where))
    return model_config(config, where, [LayerSpec(attention, dense_spec(config, where))] * num_layers(config, where))
