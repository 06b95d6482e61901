"""Gemma 4, text: full layers with wider heads with partial RoPE, values normed, K/V that later layers read again,
embeddings by layer, experts beside a dense feed-forward, capped logits.

Source: `transformers`' gemma4, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.kernels.moe.experts import Activation
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    ParallelMoESpec,
    PerLayerSpec,
    attention_spec,
    layer_types,
    model_config,
    own_config,
)
from treetop.models.decoder import unused_tensors
from treetop.types.errors import CheckpointError

_STORED = ExpertLayout("stacked", "", "router.proj", by_rows=True)

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
        FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_ONLY = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision", "attention_bias": False}
"""Images would see each other; there are none."""
_NORMS = NormNames(
    feed_forward="pre_feedforward_layernorm",
    attention_output="post_attention_layernorm",
    feed_forward_output="post_feedforward_layernorm",
)


def read(config: Config, where: Path) -> ModelConfig:
    same = "global_head_dim" in config and config["global_head_dim"] is None  # as `transformers` 5 saves equal ones
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    if same:
        config["global_head_dim"] = config["head_dim"]
    for key, value in _ONLY.items():
        require_value(config, key, value, where)
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if (i + 1) % 6 else FULL_ATTENTION)
    kinds[-1] = FULL_ATTENTION  # whatever is said of it
    own = len(kinds) - size(config, "num_kv_shared_layers", where)
    if own < 1 or set(kinds[:own]) != set(kinds):
        raise CheckpointError(f"{where}: num_kv_shared_layers must leave a layer of each kind with K/V of its own")
    last = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds)}
    inner, twice = size(config, "intermediate_size", where), flag(config, "use_double_wide_mlp", where)
    layers = []
    for index, kind in enumerate(kinds):
        shares = index >= own
        dense = DenseSpec(inner * (2 if twice and shares else 1), gate="gelu_tanh")
        experts = flag(config, "enable_moe_block", where)
        forward = ParallelMoESpec(dense, _experts(config, where)) if experts else dense
        spec = _attention(config, index, kind, where)
        if shares:
            spec = replace(spec, kv_sharing_layer=last[kind])
        layers.append(LayerSpec(spec, forward, _NORMS, scaled=True))
    whole, width = model_config(config, where, layers), size(config, "hidden_size_per_layer_input", where)
    inputs = PerLayerSpec(width, size(config, "vocab_size_per_layer_input", where), "gelu_tanh") if width else None
    capped = config.get("final_logit_softcapping") is not None
    return replace(
        whole,
        embedding_scale=whole.hidden_size**0.5,
        per_layer_embeddings=inputs,
        logits_cap=real(config, "final_logit_softcapping", where) if capped else None,
    )


def read_unified(config: Config, where: Path) -> ModelConfig:
    """Of Gemma 4 12B, which sees and hears without towers."""
    return read({**_UNIFIED, **config}, where)


_UNIFIED = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}


def _attention(config: dict[str, Any], index: int, kind: str, where: Path) -> AttentionSpec:
    if kind == SLIDING_ATTENTION:
        spec = attention_spec(config, where, layer_type=kind)
        return replace(spec, scale=1.0, qk_norm=True, value_norm=True, window=size(config, "sliding_window", where))
    same, wide = flag(config, "attention_k_eq_v", where), {"head_dim": size(config, "global_head_dim", where)}
    if same and config.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = size(config, "num_global_key_value_heads", where)
    own = own_config({**config, **wide}, index, ("head_dim", "num_key_value_heads"), where)
    spec = attention_spec(own, where, layer_type=kind, rotary_factor=1.0)
    return replace(spec, scale=1.0, qk_norm=True, value_norm=True, values_of_keys=same)


def _experts(config: dict[str, Any], where: Path) -> ExpertSpec:
    number, chosen = size(config, "num_experts", where), size(config, "top_k_experts", where)
    if chosen > number:
        raise CheckpointError(f"{where}: top_k_experts {chosen} exceeds num_experts {number}")
    router = RouterSpec(number, chosen, RouterKind.SOFTMAX, renormalise=True, factors=True)
    inner = size(config, "moe_intermediate_size", where)
    return ExpertSpec(inner, router, Activation.GELU, stored=_STORED)


def unused(config: ModelConfig) -> set[str]:
    """K/V of layers that read another's are stored, and of no use."""
    shared = [index for index, layer in enumerate(config.layers) if layer.attention.kv_sharing_layer is not None]
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return unused_tensors(config) | {
        f"model.layers.{index}.self_attn.{part}.weight" for index in shared for part in parts
    }
