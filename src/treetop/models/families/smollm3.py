"""SmolLM3: Llama of which some layers do not rotate, every fourth by default; these may have a window.

Source: `transformers`' smollm3, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, size
from treetop.checkpoints.json_file import integers
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_layers,
)
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    config = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, **config}
    count, every = num_layers(config, where), size(config, "no_rope_layer_interval", where, default=4)
    has_rope = integers(config, "no_rope_layers", where) or [int((i + 1) % every != 0) for i in range(count)]
    if len(has_rope) < count or not set(has_rope) <= {0, 1}:
        raise CheckpointError(f"{where}: no_rope_layers must be 0 or 1 for each of {count} layers")
    slides = flag(config, "use_sliding_window", where) and config.get("sliding_window") is not None
    kinds = layer_types(config, where, lambda i: FULL_ATTENTION if has_rope[i] or not slides else SLIDING_ATTENTION)
    windows = {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where) if slides else None}
    attention, dense = attention_spec(config, where), dense_spec(config, where)
    ropes = {1: attention.rope, 0: RopeSpec(attention.head_dim, attention.rope.theta, rotary_dim=0)}
    layers = [
        LayerSpec(replace(attention, rope=ropes[turns_], window=windows[kind]), dense)
        for turns_, kind in zip(has_rope, kinds, strict=False)
    ]
    return model_config(config, where, layers)
