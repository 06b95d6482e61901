"""MiniMax-01 (Text-01) and MiniMax-M1: lightning attention, of every eight layers one that attends; experts everywhere.
What a layer's halves read goes on as the residual stream, times a factor; what they give is times another.

Text-01 and M1 spell their keys otherwise than `transformers`, and turn half of a head (`rotary_dim`).
Source: `transformers`' minimax, whose defaults these are; vLLM's `models/minimax_text_01.py` for the other keys.
"""

from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    LayerSpec,
    Mixer,
    ModelConfig,
    NormedStream,
    attention_spec,
    layer_types,
    model_config,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.models.families import mixtral
from treetop.models.mixers.recurrences import LightningSpec
from treetop.types.errors import CheckpointError

_FACTORS = {"full": "full_attention", "linear": "linear_attention", "mlp": "mlp"}
"""What `transformers` calls halves, without _attn, and what the first releases do."""


def read(config: Config, where: Path) -> ModelConfig:
    config = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, **config}
    for key, value in (("sliding_window", None), ("shared_intermediate_size", 0), ("postnorm", True)):
        require_value(config, key, value, where)
    config = _spelled(config, where)
    kinds = layer_types(config, where, _default, (FULL_ATTENTION, LINEAR_ATTENTION))
    if FULL_ATTENTION not in kinds:
        raise CheckpointError(f"{where}: layer_types has no {FULL_ATTENTION}, without which this model does not load")
    attention = attention_spec(config, where, rotary_factor=1.0)
    experts = mixtral.read({**config, "partial_rotary_factor": None}, where).layers[0].feed_forward
    full, linear, mlp = (_factors(config, name, where) for name in _FACTORS)
    count, layers = num_layers(config, where), []
    for index, kind in enumerate(kinds):
        of_slopes = 1 - index / (count - 1 + 1e-5) + 1e-5
        mixer: Mixer = attention
        if kind == LINEAR_ATTENTION:
            mixer = LightningSpec(attention.num_heads, attention.head_dim, of_slopes)
        stream = NormedStream(full if kind == FULL_ATTENTION else linear, mlp)
        layers.append(LayerSpec(mixer, experts, normed_stream=stream))
    return model_config(config, where, layers)


def unused(config: ModelConfig) -> set[str]:
    """Decays, which `transformers` stores."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    layers = (f"model.layers.{index}.self_attn" for index in config.recurrent)
    return unused_tensors(config) | {f"{layer}.{name}" for layer in layers for name in names}


def _default(index: int) -> str:
    return LINEAR_ATTENTION if index % 2 else FULL_ATTENTION


def _spelled(config: Config, where: Path) -> dict[str, Any]:
    """By the keys of `transformers`."""
    made = dict(config)
    types = config.get("attn_type_list")
    if types is not None and config.get("layer_types") is None:
        if not isinstance(types, list) or any(kind not in (0, 1) for kind in types):
            raise CheckpointError(f"{where}: attn_type_list must have 0 (lightning) or 1 (full) for each layer")
        made["layer_types"] = [FULL_ATTENTION if kind else LINEAR_ATTENTION for kind in types]
    for ours, theirs in _FACTORS.items():
        for each in ("alpha", "beta"):
            said = config.get(f"layernorm_{theirs}_{each}")
            if said is not None:
                made[_key(ours, each)] = said
    if config.get("rotary_dim") is not None:
        heads = size(config, "num_attention_heads", where)
        dim = size(config, "head_dim", where, default=size(config, "hidden_size", where) // heads)
        made["partial_rotary_factor"] = size(config, "rotary_dim", where) / dim
    return made


def _key(half: str, factor: str) -> str:
    return f"{half}_attn_{factor}_factor" if half != "mlp" else f"mlp_{factor}_factor"


def _factors(config: Config, half: str, where: Path) -> tuple[float, float]:
    """What goes on of what the half reads, and of what it gives."""
    return real(config, _key(half, "alpha"), where, 1.0), real(config, _key(half, "beta"), where, 1.0)
