"""Qwen3, dense: Llama with norms of the query and key heads, and windows as in Qwen2."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config
from treetop.models.families.qwen2 import windows


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec({"head_dim": 128, **config}, where), qk_norm=True)
    dense = dense_spec(config, where)
    layers = [LayerSpec(replace(attention, window=window), dense) for window in windows(config, where)]
    return model_config(config, where, layers)
