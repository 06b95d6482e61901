"""Granite, dense: Llama with four multipliers, of embeddings, scores, what layers add, and logits.

Source: `transformers`' granite, whose defaults these are.
"""

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
    real,
)


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec(config, where), scale=real(config, "attention_multiplier", where, 1.0))
    layer = LayerSpec(attention, dense_spec(config, where))
    return replace(
        model_config(config, where, [layer] * num_layers(config, where)),
        embedding_scale=real(config, "embedding_multiplier", where, 1.0),
        residual_scale=real(config, "residual_multiplier", where, 1.0),
        logits_scale=1 / real(config, "logits_scaling", where, 1.0),
    )
