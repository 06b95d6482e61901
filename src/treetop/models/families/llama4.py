"""Llama 4, text: layers that see their own chunk of the text alone, beside NoPE layers that see all, whose
queries grow with their position; experts in some layers, whose inputs a sigmoid of the router weighs.

Norms of heads have no weight and come after the rotation, which leaves what they divide by as it is: here they come
before it, as all norms of heads do. Source: `transformers`' llama4, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.checkpoints.json_file import integers
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.kernels.rope import QueryScale, RopeSpec, Yarn
from treetop.models.config import (
    FULL_ATTENTION,
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.models.decoder import decoder_params
from treetop.types.errors import CheckpointError

_STORED = ExpertLayout("stacked", "feed_forward", router="router", shared="shared_expert")

CHUNKED_ATTENTION = "chunked_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def read(config: Config, where: Path) -> ModelConfig:
    whole = "attention_chunk_size" in config and config["attention_chunk_size"] is None
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    require_value(config, "hidden_act", "silu", where)
    count, every = num_layers(config, where), size(config, "no_rope_layer_interval", where)
    has_rope = integers(config, "no_rope_layers", where) or [int((i + 1) % every != 0) for i in range(count)]
    if len(has_rope) < count or not set(has_rope) <= {0, 1}:
        raise CheckpointError(f"{where}: no_rope_layers must be 0 or 1 for each of {count} layers")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [CHUNKED_ATTENTION if turns_ and not whole else FULL_ATTENTION for turns_ in has_rope[:count]]
    known = [FULL_ATTENTION] if whole else [FULL_ATTENTION, CHUNKED_ATTENTION]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {count} layers")
    step = size(config, "interleave_moe_layer_step", where)
    routed = integers(config, "moe_layers", where) if "moe_layers" in config else range(step - 1, count, step)
    dense, experts = DenseSpec(size(config, "intermediate_size_mlp", where)), _experts(config, where)
    layers = [
        LayerSpec(_attention(config, bool(turns_), kind, where), experts if index in routed else dense)
        for index, (turns_, kind) in enumerate(zip(has_rope, kinds, strict=False))
    ]
    return model_config(config, where, layers)


def _attention(config: Config, has_rope: bool, kind: str, where: Path) -> AttentionSpec:
    spec = attention_spec(config, where, interleaved=True)
    if kind == CHUNKED_ATTENTION:
        spec = replace(spec, window=size(config, "attention_chunk_size", where), chunked=True)
    if has_rope:
        normed = flag(config, "use_qk_norm", where)
        if normed and isinstance(spec.rope.scaling, Yarn):
            raise CheckpointError(f"{where}: rope_type yarn is not supported with use_qk_norm")
        return replace(spec, qk_norm=normed, norm_weights=None)
    scale = QueryScale(real(config, "attn_scale", where), size(config, "floor_scale", where), offset=1)
    tempered = bool(config["attn_temperature_tuning"])  # 4 in the first release
    rope = RopeSpec(spec.head_dim, spec.rope.theta, rotary_dim=0, query_scale=scale if tempered else None)
    return replace(spec, rope=rope)


def _experts(config: Config, where: Path) -> ExpertSpec:
    number, inner = size(config, "num_local_experts", where), size(config, "intermediate_size", where)
    router = RouterSpec(number, num_experts_per_token(config, number, where), RouterKind.SIGMOID, of_inputs=True)
    return ExpertSpec(inner, router, shared_inner=inner, stored=_STORED)


def params(config: ModelConfig) -> list[Param]:
    """A feed-forward has another name than with most."""
    return renamed(decoder_params(config), {".mlp.": ".feed_forward."})
