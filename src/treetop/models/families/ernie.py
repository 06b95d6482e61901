"""ERNIE 4.5: Llama whose neighbouring dimensions turn together, with biases everywhere or nowhere. With experts, a
correction of the router's probabilities decides who is chosen, and shared ones stand beside them. Helium is the dense
one without biases.

Source: `transformers`' ernie4_5, ernie4_5_moe and helium, whose defaults these are.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, require_value, size
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    AttentionSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.types.errors import CheckpointError

_STORED = ExpertLayout(score="moe_statics.e_score_correction_bias", score_rows=True)

_DEFAULTS = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131072}
_DENSE = {"head_dim": 128, "num_key_value_heads": 2}
_EXPERTS = {"num_key_value_heads": 4, "moe_k": 6, "moe_num_experts": 64, "moe_intermediate_size": 1536}


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **_DENSE, **config}
    layer = LayerSpec(
        _attention(config, where), replace(dense_spec(config, where), bias=flag(config, "use_bias", where))
    )
    return model_config(config, where, [layer] * num_layers(config, where))


def read_helium(config: Config, where: Path) -> ModelConfig:
    """Helium, whose RoPE is interleaved too and which has no biases."""
    config = {"rope_theta": 1e5, "rms_norm_eps": 1e-8, "head_dim": 128, **config}
    layer = LayerSpec(attention_spec(config, where, interleaved=True), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))


def read_moe(config: Config, where: Path) -> ModelConfig:
    require_value(config, "use_bias", False, where)
    config = {**_DEFAULTS, **_EXPERTS, **config}
    count, number, chosen = (size(config, key, where) for key in ("num_hidden_layers", "moe_num_experts", "moe_k"))
    if chosen > number:
        raise CheckpointError(f"{where}: moe_k {chosen} exceeds moe_num_experts {number}")
    router = RouterSpec(number, chosen, RouterKind.SOFTMAX, renormalise=True, correction=True)
    inner = size(config, "moe_intermediate_size", where)
    shared = inner * size(config, "moe_num_shared_experts", where, default=2)
    experts = ExpertSpec(inner, router, shared_inner=shared, stored=_STORED)
    first, step = (size(config, f"moe_layer_{key}", where, default=1) for key in ("start_index", "interval"))
    said = config.get("moe_layer_end_index")
    last = count - 1 if said in (None, -1) else size(config, "moe_layer_end_index", where)
    attention, dense = _attention(config, where), dense_spec(config, where)
    routed = [first <= index <= last and (index + 1) % step == 0 for index in range(count)]
    return model_config(config, where, [LayerSpec(attention, experts if each else dense) for each in routed])


def unused(config: ModelConfig) -> set[str]:
    """The layer that predicts a token more."""
    return unused_tensors(config) | {f"model.mtp_{part}.0." for part in _MTP_PARTS}


_MTP_PARTS = ("block", "emb_norm", "hidden_norm", "linear_proj")


def _attention(config: Mapping[str, Any], where: Path) -> AttentionSpec:
    bias = flag(config, "use_bias", where)
    return replace(attention_spec(config, where, interleaved=True), bias=bias, output_bias=bias)
