"""Gemma 1: Llama with norms of 1 + w and scaled embeddings. Gemma 2: that with windows in every other layer, norms on
both sides of attention and feed-forward, capped scores and logits. Gemma 3, text: windows in most layers, two
rotations, norms of heads, no caps.

Source: the Gemma 3 report, arXiv:2503.19786, and `transformers`' configurations of all, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size, table
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    layer_types,
    model_config,
    num_layers,
)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_DEFAULTS_1 = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_ONLY = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_NORMS = NormNames(
    feed_forward="pre_feedforward_layernorm",
    attention_output="post_attention_layernorm",
    feed_forward_output="post_feedforward_layernorm",
)


_DEFAULTS_2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Without the keys; null is none."""


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    for key, value in _ONLY.items():
        require_value(config, key, value, where)
    pattern = size(config, "sliding_window_pattern", where)
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if (i + 1) % pattern else FULL_ATTENTION)
    rope, scale = _rope(config, where), real(config, "query_pre_attn_scalar", where) ** -0.5
    window = {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where)}
    dense = DenseSpec(size(config, "intermediate_size", where), gate="gelu_tanh")
    layers = []
    for kind in kinds:
        attention = attention_spec({**config, **rope}, where, layer_type=kind)
        layers.append(
            LayerSpec(replace(attention, window=window[kind], scale=scale, qk_norm=True), dense, norms=_NORMS)
        )
    whole = model_config(config, where, layers)
    return replace(whole, unit_offset=True, embedding_scale=whole.hidden_size**0.5)


def read_2(config: Config, where: Path) -> ModelConfig:
    caps = {key: real({**_CAPS, **config}, key, where) for key in _CAPS if {**_CAPS, **config}[key] is not None}
    config = {**_DEFAULTS_2, **{key: value for key, value in config.items() if value is not None}}
    for key in ("hidden_activation", "use_bidirectional_attention"):
        require_value(config, key, _ONLY[key], where)
    kinds = layer_types(config, where, lambda i: FULL_ATTENTION if i % 2 else SLIDING_ATTENTION)
    window = {FULL_ATTENTION: None, SLIDING_ATTENTION: size(config, "sliding_window", where)}
    attention = replace(
        attention_spec(config, where),
        scale=real(config, "query_pre_attn_scalar", where) ** -0.5,
        score_cap=caps.get("attn_logit_softcapping"),
    )
    dense = DenseSpec(size(config, "intermediate_size", where), gate="gelu_tanh")
    layers = [LayerSpec(replace(attention, window=window[kind]), dense, norms=_NORMS) for kind in kinds]
    whole = model_config(config, where, layers)
    scale, cap = whole.hidden_size**0.5, caps.get("final_logit_softcapping")
    return replace(whole, unit_offset=True, embedding_scale=scale, logits_cap=cap)


def read_1(config: Config, where: Path) -> ModelConfig:
    """Its oldest configs say gelu where they mean its approximation by tanh."""
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key) != "gelu":
            require_value(config, key, "gelu_pytorch_tanh", where)
    require_value(config, "use_bidirectional_attention", False, where)
    config = {**_DEFAULTS_1, **{key: value for key, value in config.items() if value is not None}}
    layer = LayerSpec(
        attention_spec(config, where), DenseSpec(size(config, "intermediate_size", where), gate="gelu_tanh")
    )
    whole = model_config(config, where, [layer] * num_layers(config, where))
    return replace(whole, unit_offset=True, embedding_scale=whole.hidden_size**0.5)


def _rope(config: Config, where: Path) -> dict[str, Any]:
    """`rope_parameters` by layer type; earlier spellings scale the full layers alone, and name both thetas."""
    nested, scaling = table(config, "rope_parameters", where), table(config, "rope_scaling", where)
    full = {"rope_theta": config["rope_theta"], **(table(nested, FULL_ATTENTION, where) or scaling)}
    local = {"rope_theta": config["rope_local_base_freq"], **table(nested, SLIDING_ATTENTION, where)}
    return {"rope_parameters": {**nested, FULL_ATTENTION: full, SLIDING_ATTENTION: local}, "rope_scaling": None}
