"""Qwen3, dense: Llama with norms of the query and key heads."""

from dataclasses import replace
from pathlib import Path

from treetop.models.config import Config, LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{where}: use_sliding_window = true is not supported with Qwen3ForCausalLM")
    layer = LayerSpec(replace(attention_spec(config, where), qk_norm=True), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))
