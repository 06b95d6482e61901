"""Llama 2 and 3: every layer attends to everything, dense."""

from pathlib import Path

from treetop.checkpoints.values import Config
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers


def read(config: Config, where: Path) -> ModelConfig:
    layer = LayerSpec(attention_spec(config, where), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))
