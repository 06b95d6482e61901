"""Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another, perhaps a window in all layers.

Part of a head may have RoPE. Rotations of the type longrope, which depend on a text's length, are refused.
Source: `transformers`' phi3, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, size
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
    window = None if config.get("sliding_window") is None else size(config, "sliding_window", where)
    attention = replace(attention_spec(config, where, rotary_factor=1.0), joined=1, window=window)
    if attention.rope.scaling is not None:  # `transformers` takes yarn for longrope here
        raise CheckpointError(f"{where}: a rope_type other than default is not supported with Phi3ForCausalLM")
    dense = replace(dense_spec(config, where), stored="joined")
    return model_config(config, where, [LayerSpec(attention, dense)] * num_layers(config, where))
