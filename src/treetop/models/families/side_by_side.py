"""Attention and feed-forward that read the same residual stream, and are added to it together: Cohere's Command R, R7B
and A, Falcon, GPT-NeoX (Pythia), Phi-1 and Phi-2. Their norms subtract the mean; only Cohere's have no bias.

Falcon's and GPT-NeoX's q, k and v lie in one tensor: of each group of heads its queries, its key, its value. Falcon of
one norm a layer gives both what that norm gives; of 2 norms, and GPT-NeoX, each half has its own.
Source: `transformers`' cohere, cohere2, falcon, gpt_neox and phi, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_layers,
)
from treetop.models.decoder import decoder_params, unused_tensors
from treetop.models.families.ungated import ungated_spec

_ONE_NORM = NormNames(feed_forward=None)
_FALCON_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.qkv_proj.": ".self_attention.query_key_value.",
    ".self_attn.o_proj.": ".self_attention.dense.",
}
_NEOX_NAMES = {
    "model.layers.": "gpt_neox.layers.",
    "model.embed_tokens.": "gpt_neox.embed_in.",
    "model.norm.": "gpt_neox.final_layer_norm.",
    "lm_head.": "embed_out.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.o_proj.": ".attention.dense.",
}
_PHI_NAMES = {".self_attn.o_proj.": ".self_attn.dense.", "model.norm.": "model.final_layernorm."}


def read_cohere(config: Config, where: Path) -> ModelConfig:
    """Command R and Aya; its heads turn in pairs."""
    require_value(config, "use_qk_norm", False, where)
    config = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True, **_given(config)}
    layer = LayerSpec(attention_spec(config, where, interleaved=True), dense_spec(config, where), _ONE_NORM)
    return _cohere(config, where, [layer] * num_layers(config, where))


def read_cohere_2(config: Config, where: Path) -> ModelConfig:
    """Command R7B and A: windows in RoPE layers; the others turn nothing."""
    config = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True, **_given(config)}
    every = size(config, "sliding_window_pattern", where, default=4)
    kinds = layer_types(config, where, lambda index: SLIDING_ATTENTION if (index + 1) % every else FULL_ATTENTION)
    with_rope, dense = attention_spec(config, where, interleaved=True), dense_spec(config, where)
    windowed = replace(with_rope, window=size(config, "sliding_window", where, default=4096))
    full = replace(with_rope, rope=RopeSpec(with_rope.head_dim, with_rope.rope.theta, rotary_dim=0))
    layers = [LayerSpec(windowed if kind == SLIDING_ATTENTION else full, dense, _ONE_NORM) for kind in kinds]
    return _cohere(config, where, layers)


def read_falcon(config: Config, where: Path) -> ModelConfig:
    require_value(config, "alibi", False, where)
    defaults = {"bias": False, "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True}
    config = {**defaults, "activation": "gelu", **_given(config)}
    config["rms_norm_eps"] = real(config, "layer_norm_epsilon", where, 1e-5)
    heads, hidden = size(config, "num_attention_heads", where), size(config, "hidden_size", where)
    new, bias = flag(config, "new_decoder_architecture", where), flag(config, "bias", where)
    kv_heads = size(config, "num_kv_heads", where, default=heads) if new else 1 if config["multi_query"] else heads
    config |= {"num_key_value_heads": kv_heads, "attention_bias": bias}
    config["ffn_hidden_size"] = config.get("ffn_hidden_size", 4 * hidden)
    attention = replace(attention_spec(config, where), joined=kv_heads)
    forward = ungated_spec(config, where, "gelu", "activation", "ffn_hidden_size", bias)
    layer = LayerSpec(attention, replace(forward, names=("dense_h_to_4h", "dense_4h_to_h")))
    if new and size(config, "num_ln_in_parallel_attn", where, default=2) == 2:
        layer = replace(layer, norms=NormNames("ln_attn", "ln_mlp"), side_by_side=True)
    elif new or flag(config, "parallel_attn", where):
        layer = replace(layer, norms=_ONE_NORM, side_by_side=True)
    return replace(model_config(config, where, [layer] * num_layers(config, where)), norm="layer with bias")


def read_neox(config: Config, where: Path) -> ModelConfig:
    config = {"attention_bias": True, "hidden_act": "gelu", "use_parallel_residual": True, **_given(config)}
    config["rms_norm_eps"] = real(config, "layer_norm_eps", where, 1e-5)
    config["rope_theta"] = real(config, "rope_theta", where, real(config, "rotary_emb_base", where, 10000.0))
    spec = attention_spec(config, where, rotary_factor=real(config, "rotary_pct", where, 0.25))
    forward = ungated_spec(config, where, "gelu", bias=True)
    layer = LayerSpec(
        replace(spec, joined=spec.num_heads),
        replace(forward, names=("dense_h_to_4h", "dense_4h_to_h")),
        side_by_side=flag(config, "use_parallel_residual", where),
    )
    return replace(model_config(config, where, [layer] * num_layers(config, where)), norm="layer with bias")


def read_phi(config: Config, where: Path) -> ModelConfig:
    require_value(config, "qk_layernorm", False, where)
    config = {"hidden_act": "gelu_new", "attention_bias": True, **_given(config)}
    config["rms_norm_eps"] = real(config, "layer_norm_eps", where, 1e-5)
    forward = replace(ungated_spec(config, where, "gelu_new", bias=True), names=("fc1", "fc2"))
    layer = LayerSpec(attention_spec(config, where, rotary_factor=0.5), forward, _ONE_NORM, side_by_side=True)
    whole = model_config(config, where, [layer] * num_layers(config, where))
    return replace(whole, norm="layer with bias", logits_bias=True)


def falcon_params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), _FALCON_NAMES)


def neox_params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), _NEOX_NAMES)


def phi_params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), _PHI_NAMES)


def neox_unused(config: ModelConfig) -> set[str]:
    """Masks and frequencies that older writers stored."""
    names = ("bias", "masked_bias", "rotary_emb.inv_freq")
    layers = range(len(config.layers))
    return unused_tensors(config) | {f"gpt_neox.layers.{i}.attention.{each}" for i in layers for each in names}


def _given(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _cohere(config: Config, where: Path, layers: list[LayerSpec]) -> ModelConfig:
    eps = real(config, "layer_norm_eps", where, 1e-5)
    whole = model_config({**config, "rms_norm_eps": eps}, where, [replace(each, side_by_side=True) for each in layers])
    return replace(whole, norm="layer", logits_scale=real(config, "logit_scale", where))
