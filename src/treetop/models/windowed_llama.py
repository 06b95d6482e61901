"""Llama with `layer_types`, `sliding_window` and perhaps `attention_sinks`: treetop's own test model.

`debug/two_group.py` writes it.
"""

from dataclasses import replace
from pathlib import Path

from treetop.models.config import (
    Config,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    flag,
    model_config,
    num_layers,
    size,
)
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec(config, where), sinks=flag(config, "attention_sinks", where))
    dense = dense_spec(config, where)
    window, kinds, count = size(config, "sliding_window", where), config.get("layer_types"), num_layers(config, where)
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(known):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {count} layers")
    layers = [LayerSpec(replace(attention, window=known[kind]), dense) for kind in kinds]
    return model_config(config, where, layers)
