"""ERNIE 4.5, dense: Llama whose neighbouring dimensions turn together, with biases everywhere or nowhere.

Source: `transformers`' ernie4_5, whose defaults these are.
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
)

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    bias = flag(config, "use_bias", where)
    attention = replace(attention_spec(config, where, interleaved=True), bias=bias, output_bias=bias)
    dense = replace(dense_spec(config, where), bias=bias)
    return model_config(config, where, [LayerSpec(attention, dense)] * num_layers(config, where))
