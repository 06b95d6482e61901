"""Mistral: Llama whose layers all have the same window, or none."""

from dataclasses import replace
from pathlib import Path

from treetop.models.config import (
    Config,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
    require_value,
    size,
)


def read(config: Config, where: Path) -> ModelConfig:
    require_value(config, "layer_types", None, where)  # of Ministral
    slides = config.get("sliding_window", 4096) is not None
    window = size(config, "sliding_window", where, default=4096) if slides else None
    attention = replace(attention_spec({"num_key_value_heads": 8, **config}, where), window=window)
    return model_config(config, where, [LayerSpec(attention, dense_spec(config, where))] * num_layers(config, where))
