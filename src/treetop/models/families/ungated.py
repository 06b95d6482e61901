"""Feed-forwards without a gate: Arcee and Apertus, which are Llama but for that, Apertus with norms of heads; Nemotron
of 2024 and Starcoder2, whose norms subtract the mean and have biases, Nemotron's multiplying by 1 + w.

Source: `transformers`' arcee, apertus, nemotron and starcoder2, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, size
from treetop.models.config import (
    AttentionSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    Ungated,
    UngatedSpec,
    attention_spec,
    model_config,
    num_layers,
)
from treetop.types.errors import CheckpointError, shown

_ACTIVATIONS: dict[str, Ungated] = {
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "xielu": "xielu",
}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_arcee(config: Config, where: Path) -> ModelConfig:
    config = {"rms_norm_eps": 1e-5, **config}
    forward = ungated_spec(config, where, "relu2", bias=flag(config, "mlp_bias", where))
    return _model(config, where, LayerSpec(attention_spec(config, where), forward))


def read_apertus(config: Config, where: Path) -> ModelConfig:
    rope = {} if config.get("rope_scaling") is not None else {"rope_parameters": _APERTUS_ROPE}
    config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 65536, **rope, **_given(config)}
    attention = replace(attention_spec(config, where), qk_norm=True)
    names = NormNames("attention_layernorm", "feedforward_layernorm")
    return _model(config, where, LayerSpec(attention, ungated_spec(config, where, "xielu"), names))


def read_nemotron(config: Config, where: Path) -> ModelConfig:
    config = {"max_position_embeddings": 4096, **_given(config)}
    config["rms_norm_eps"] = real(config, "norm_eps", where, 1e-5)
    forward = ungated_spec(config, where, "relu2", bias=flag(config, "mlp_bias", where))
    whole = _model(config, where, LayerSpec(attention_spec(config, where, rotary_factor=0.5), forward))
    return replace(whole, norm="layer with bias", unit_offset=True)


def read_starcoder(config: Config, where: Path) -> ModelConfig:
    """A window in all layers, or none."""
    config = {"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True, **_given(config)}
    config |= {"rms_norm_eps": real(config, "norm_epsilon", where, 1e-5), "attention_bias": config["use_bias"]}
    window = None if config.get("sliding_window") is None else size(config, "sliding_window", where)
    attention: AttentionSpec = replace(attention_spec(config, where), window=window)
    bias = flag(config, "use_bias", where)
    forward = replace(ungated_spec(config, where, "gelu_pytorch_tanh", bias=bias), names=("c_fc", "c_proj"))
    return replace(_model(config, where, LayerSpec(attention, forward)), norm="layer with bias")


def ungated_spec(
    config: Config,
    where: Path,
    default: str,
    key: str = "hidden_act",
    inner: str = "intermediate_size",
    bias: bool = False,
) -> UngatedSpec:
    """A feed-forward without a gate, its activation by the names of `transformers`."""
    said = config.get(key, default)
    if said not in _ACTIVATIONS:
        raise CheckpointError(f"{where}: {key} {shown(said)} is not supported, only {', '.join(_ACTIVATIONS)}")
    return UngatedSpec(size(config, inner, where), _ACTIVATIONS[said], bias)


def _given(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _model(config: Config, where: Path, layer: LayerSpec) -> ModelConfig:
    return model_config(config, where, [layer] * num_layers(config, where))
