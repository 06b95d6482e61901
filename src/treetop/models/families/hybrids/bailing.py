"""Ling 3.0: Kimi delta attention whose decays are bounded, compressed attention (MLA) with a gate a head as the last
layer of each group, and DeepSeek-V3's experts behind the first layers, the late ones with limited activations.

Source: `transformers`' bailing_hybrid, whose defaults these are but for the limits, which it leaves out: they are
`expert_swiglu_limit_list` and `share_expert_swiglu_limit_list` of Ling-3.0-flash's configuration, as
ggml-org/llama.cpp#26608 and jundot/omlx#2571 have them. Ling 2.x has the same `model_type`, but lightning attention.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size, table
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.moe.experts import Activation
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    AttentionSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    Mixer,
    ModelConfig,
    layer_types,
    mlp_layer_types,
    num_layers,
)
from treetop.models.decoder import decoder_params
from treetop.models.families.deepseek import LATENT_SIZES, dense_first, latent_attention, latent_model
from treetop.models.mixers.recurrences import KimiSpec
from treetop.models.routers import corrected_sigmoids
from treetop.types.errors import CheckpointError, shown

_DEFAULTS: dict[str, Any] = {
    **LATENT_SIZES,
    "q_lora_rank": None,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000.0,
    "n_routed_experts": 512,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 768,
    "first_k_dense_replace": 2,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}
_SPELLINGS = {
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "score_function": "scoring_func",
    "model_max_length": "max_position_embeddings",
}
_AS_PUBLISHED = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_mla_nope": False,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "routing_group_score_top_k": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_activation_func": "sigmoid",
    "use_qk_norm": True,
    "rope_interleave": True,
}
_STORED = ExpertLayout(score="gate.expert_bias")
_OF_ROTATION = ("partial_rotary_factor", "rotary_dim")
"""Of a head of queries: `qk_rope_head_dim` says the same, all of which has RoPE."""
_ROPES = ("rope_parameters", "rope_scaling")
"""Where `transformers` writes them when it saves a folder."""


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **_all_turns(_in_one_spelling(config, where))}
    config |= {key: _all_turns(table(config, key, where)) for key in _ROPES if key in config}
    for key, value in _AS_PUBLISHED.items():
        require_value(config, key, value, where)
    require_value(config, "moe_shared_expert_intermediate_size", config["moe_intermediate_size"], where)
    config |= {"rope_interleave": True}
    count = num_layers(config, where)
    sparse = dense_first(config, where)
    if config.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in mlp_layer_types(config, where)]
    whole = latent_model(config, where, corrected_sigmoids(config, where), sparse, _STORED)
    mixers: dict[str, Mixer] = {FULL_ATTENTION: _latent(config, where), LINEAR_ATTENTION: _delta(config, where)}
    routed, shared = (_limits(config, f"{each}_swiglu_limit_list", count, where) for each in ("expert", "share_expert"))
    kinds = _kinds(config, count, where)
    layers = [
        _limited(replace(layer, mixer=mixers[kind]), *limits)
        for layer, kind, limits in zip(whole.layers, kinds, zip(routed, shared, strict=True), strict=True)
    ]
    return replace(whole, layers=tuple(layers))


def params(config: ModelConfig) -> list[Param]:
    """By the names of published folders: what MLA gives goes through `dense`, what KDA gives through `o_proj`."""
    full = {
        f"model.layers.{index}.self_attn.o_proj.": f"model.layers.{index}.attention.dense."
        for index, layer in enumerate(config.layers)
        if isinstance(layer.mixer, AttentionSpec)
    }
    names = {**full, ".self_attn.": ".attention.", "model.embed_tokens.": "model.word_embeddings."}
    return renamed(decoder_params(config), names)


def _in_one_spelling(config: Config, where: Path) -> Config:
    """What is said. Raises CheckpointError if two spellings of one key differ."""
    said: dict[str, Any] = {}
    for key, value in config.items():
        name = _SPELLINGS.get(key, key)
        if value is not None and said.setdefault(name, value) != value:
            raise CheckpointError(
                f"{where}: {name} is said in two spellings that differ, {shown(said[name])} and {shown(value)};"
                " remove one of them"
            )
    return said


def _all_turns(given: Config) -> Config:
    return {key: value for key, value in given.items() if key not in _OF_ROTATION}


def _latent(config: Config, where: Path) -> AttentionSpec:
    spec = latent_attention(config, where)
    assert spec.latent is not None
    return replace(spec, latent=replace(spec.latent, gate=True))


def _delta(config: Config, where: Path) -> KimiSpec:
    """`transformers` writes the width of these heads as `linear_head_dim`, and that of what has RoPE as `head_dim`."""
    width = "head_dim" if config.get("linear_head_dim") is None else "linear_head_dim"
    floor = real(config, "kda_lower_bound", where) if flag(config, "kda_safe_gate", where) else None
    heads, taps = size(config, "num_attention_heads", where), size(config, "short_conv_kernel_size", where)
    require_value(config, "linear_num_heads", heads, where)
    require_value(config, "linear_conv_kernel_dim", taps, where)
    return KimiSpec(heads, size(config, width, where), taps, narrow=False, floor=floor)


def _kinds(config: Config, count: int, where: Path) -> list[str]:
    """Of every layer: the last of each group is full."""
    group = size(config, "layer_group_size", where)
    if config.get("layer_types") is None and count % group:
        raise CheckpointError(
            f"{where}: {count} layers are not whole groups of layer_group_size {group}: what the last ones are is not"
            " said"
        )

    def of(index: int) -> str:
        return LINEAR_ATTENTION if (index + 1) % group else FULL_ATTENTION

    return layer_types(config, where, of, (FULL_ATTENTION, LINEAR_ATTENTION))


def _limits(config: Config, key: str, count: int, where: Path) -> list[float | None]:
    """Of the activations of each layer; 0 and null are none. The list may go on with layers that predict tokens."""
    listed = config.get(key)
    if listed is None:
        return [None] * count
    if not isinstance(listed, list) or len(listed) < count:
        raise CheckpointError(f"{where}: {key} must name a limit, 0 or null for each of {count} layers")
    return [real({"swiglu_limit": each}, "swiglu_limit", where) if each else None for each in listed[:count]]


def _limited(layer: LayerSpec, routed: float | None, shared: float | None) -> LayerSpec:
    """Limits are of experts and what stands beside them."""
    if not isinstance(layer.feed_forward, ExpertSpec):
        return layer
    forward = replace(layer.feed_forward, activation=Activation("silu", routed), shared_limit=shared)
    return replace(layer, feed_forward=forward)
