"""OLMo 2 and 3: norms behind attention and feed-forward and none before, norms of all queries and all keys; in OLMo 3
windows in three layers of four.

Source: `transformers`' olmo2 and olmo3, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    Config,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_layers,
    size,
    table,
)

_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")


def read_2(config: Config, where: Path) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, **config}
    return _model(config, where, [_attention(config, where, None)] * num_layers(config, where))


def read_3(config: Config, where: Path) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, **config}
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if (i + 1) % 4 else FULL_ATTENTION)
    rope, window = (
        _rope(config, where),
        {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where)},
    )
    layers = [replace(_attention({**config, **rope}, where, kind), window=window[kind]) for kind in kinds]
    return _model(config, where, layers)


def _attention(config: Config, where: Path, layer_type: str | None) -> AttentionSpec:
    return replace(attention_spec(config, where, layer_type=layer_type), whole_qk_norm=True)


def _model(config: Config, where: Path, attention: list[AttentionSpec]) -> ModelConfig:
    dense = dense_spec(config, where)
    return model_config(config, where, [LayerSpec(each, dense, norms=_NORMS) for each in attention])


def _rope(config: Config, where: Path) -> dict[str, Any]:
    """`rope_parameters` by layer type; an earlier `rope_scaling` is of the full layers alone."""
    nested, scaling = table(config, "rope_parameters", where), table(config, "rope_scaling", where)
    full = table(nested, FULL_ATTENTION, where) or scaling
    each = {FULL_ATTENTION: full, SLIDING_ATTENTION: table(nested, SLIDING_ATTENTION, where)}
    default = {"rope_theta": config["rope_theta"]}
    parts = {kind: {**default, **part} for kind, part in each.items()}
    return {"rope_parameters": {**nested, **parts}, "rope_scaling": None}
