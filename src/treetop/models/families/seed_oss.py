"""Seed-OSS: Llama whose heads are wider than the hidden size gives, with biases of q, k and v.

Source: `transformers`' seed_oss, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.values import Config, flag
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers


def read(config: Config, where: Path) -> ModelConfig:
    config = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, **config}
    attention = replace(attention_spec(config, where), output_bias=flag(config, "attention_out_bias", where))
    return model_config(config, where, [LayerSpec(attention, dense_spec(config, where))] * num_layers(config, where))
