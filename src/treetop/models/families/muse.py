"""Muse-Glimmer: embeddings behind a norm, windows in RoPE layers and none in NoPE layers, norms of heads without
weights, gated attention, norms on both sides whose outer ones have an epsilon of their own, capped logits.

Norms of layers multiply by 1 + w, the last one by w.
Source: `transformers`' muse_glimmer, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    NormNames,
    OutputGate,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
)
from treetop.models.decoder import decoder_params
from treetop.models.layers import norm_param
from treetop.types.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
_NORMS = NormNames(
    feed_forward="pre_feedforward_layernorm",
    attention_output="post_attention_layernorm",
    feed_forward_output="post_feedforward_layernorm",
)


def read(config: Config, where: Path) -> ModelConfig:
    windowed = config.get("sliding_window", True) is not None
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    for key, value in (("hidden_activation", "silu"), ("attention_bias", False)):
        require_value(config, key, value, where)
    count = size(config, "num_hidden_layers", where)
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if (count - 1 - i) % 4 else FULL_ATTENTION)
    if SLIDING_ATTENTION in kinds and not windowed:
        raise CheckpointError(f"{where}: sliding_window must be a number, for layer_types has {SLIDING_ATTENTION}")
    window = {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where)}
    spec = attention_spec(config, where)
    with_rope = replace(
        spec,
        scale=spec.scale * real(config, "qk_scale_factor", where),
        qk_norm=True,
        norm_weights=None,
        gate=OutputGate("sigmoid", per_number=True),
    )
    nope = replace(with_rope, rope=RopeSpec(spec.head_dim, spec.rope.theta, rotary_dim=0))
    dense, eps = dense_spec(config, where), real(config, "post_norm_eps", where)
    layers = [
        LayerSpec(replace(with_rope if has_rope else nope, window=window[kind]), dense, _NORMS, output_norm_eps=eps)
        for kind, has_rope in zip(kinds, _have_rope(config, count, spec.rope.theta, where), strict=True)
    ]
    return replace(
        model_config(config, where, layers),
        unit_offset=True,
        embedding_norm=True,
        logits_scale=real(config, "output_multiplier", where),
        logits_cap=real(config, "final_logit_softcapping", where),
    )


def params(config: ModelConfig) -> list[Param]:
    found = renamed(decoder_params(config), {".self_attn.g_proj.": ".self_attn.gate_proj."})
    last = replace(norm_param("norm", "model.norm.weight", config.hidden_size), wide=True)
    return [last if param.name == "norm" else param for param in found]


def _have_rope(config: Config, count: int, theta: float, where: Path) -> list[bool]:
    """Whether a layer has RoPE: `layer_rope_theta` has 0 for one that does not; by default every fourth from the
    last."""
    thetas = config.get("layer_rope_theta", [theta if (count - 1 - i) % 4 else 0 for i in range(count)])
    if not isinstance(thetas, list) or len(thetas) != count or any(each not in (0, theta) for each in thetas):
        raise CheckpointError(f"{where}: layer_rope_theta must be 0 or rope_theta, {theta}, for each of {count} layers")
    return [each != 0 for each in thetas]
