"""Qwen2 and 2.5, dense: Llama with biases of q, k and v, and perhaps a window in later layers."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.values import Config, flag, size
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
)
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec(config, where), bias=True, output_bias=False)
    dense = dense_spec(config, where)
    layers = [LayerSpec(replace(attention, window=window), dense) for window in windows(config, where)]
    return model_config(config, where, layers)


def windows(config: Config, where: Path) -> list[int | None]:
    """Of every layer: `sliding_window` of those that `layer_types` names, or of all from `max_window_layers` on."""
    slides = flag(config, "use_sliding_window", where) and config.get("sliding_window", 4096) is not None
    first = size(config, "max_window_layers", where, default=28)
    kinds = layer_types(config, where, lambda index: SLIDING_ATTENTION if slides and index >= first else FULL_ATTENTION)
    if not slides and SLIDING_ATTENTION in kinds:
        raise CheckpointError(f"{where}: layer_types has {SLIDING_ATTENTION}, but use_sliding_window is not true")
    window = size(config, "sliding_window", where, default=4096) if slides else None
    return [window if kind == SLIDING_ATTENTION else None for kind in kinds]
