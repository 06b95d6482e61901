"""Llama with `layer_types`, `sliding_window` and perhaps `attention_sinks`: a family of tests alone.

The frozen checkpoints have it, and what tests sinks without experts.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, size
from treetop.models.config import (
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
)
from treetop.models.registry import Family

NAME = "WindowedLlamaForCausalLM"


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec(config, where), sinks=flag(config, "attention_sinks", where))
    dense, window = dense_spec(config, where), size(config, "sliding_window", where)
    layers = [
        LayerSpec(replace(attention, window=window if kind == SLIDING_ATTENTION else None), dense)
        for kind in layer_types(config, where)
    ]
    return model_config(config, where, layers)


FAMILY = Family(read, "a test model")
