"""Laguna and Step: heads by kind of layer, gated attention, windows in most layers, and experts that sigmoids with a
correction choose, beside a shared one.

Source: `transformers`' laguna and step3p7, whose defaults these are, and stepfun-ai/Step-3.5-Flash's configuration.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size, table
from treetop.checkpoints.json_file import integers
from treetop.kernels.moe.experts import Activation
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    OutputGate,
    attention_spec,
    dense_spec,
    layer_types,
    mlp_layer_types,
    model_config,
    num_experts_per_token,
    num_layers,
    own_config,
)
from treetop.types.errors import CheckpointError, shown

_EACH = ExpertLayout(score="experts.e_score_correction_bias", shared="shared_expert")
_APART = ExpertLayout("apart", "moe", score="router_bias", shared="share_expert", shared_in_layer=True)

_ROPE = {
    FULL_ATTENTION: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING_ATTENTION: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_LAGUNA = {
    "max_position_embeddings": 131072,
    "vocab_size": 100352,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "sliding_window": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 1.0,
}


def read(config: Config, where: Path) -> ModelConfig:
    require_value(config, "moe_apply_router_weight_on_input", False, where)
    require_value(config, "moe_router_logit_softcapping", 0, where)
    config = {**_LAGUNA, **config}
    if config.get("rope_parameters") is None:
        config["rope_parameters"] = _ROPE
    gating = config.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise CheckpointError(f"{where}: gating must be true, per-head or per-element, got {shown(gating)}")
    gate = OutputGate("softplus", per_number=gating == "per-element")
    kinds, count = layer_types(config, where, lambda _: FULL_ATTENTION), num_layers(config, where)
    heads = (
        integers(config, "num_attention_heads_per_layer", where)
        or (size(config, "num_attention_heads", where),) * count
    )
    if len(heads) != count:
        raise CheckpointError(f"{where}: num_attention_heads_per_layer must name heads for each of {count} layers")
    number = size(config, "num_experts", where)
    scale, chosen = real(config, "moe_routed_scaling_factor", where), num_experts_per_token(config, number, where)
    router = RouterSpec(number, chosen, RouterKind.SIGMOID, renormalise=True, scale=scale, correction=True)
    experts = ExpertSpec(
        size(config, "moe_intermediate_size", where),
        router,
        shared_inner=size(config, "shared_expert_intermediate_size", where),
        stored=_EACH,
    )
    forward: dict[str, DenseSpec | ExpertSpec] = {"dense": dense_spec(config, where), "sparse": experts}
    layers = []
    for kind, number_of_heads, mlp in zip(kinds, heads, mlp_layer_types(config, where), strict=True):
        own = {**config, "num_attention_heads": number_of_heads}
        attention = attention_spec(own, where, layer_type=kind, rotary_factor=1.0)
        window = size(config, "sliding_window", where) if kind == SLIDING_ATTENTION else None
        layers.append(LayerSpec(replace(attention, qk_norm=True, gate=gate, window=window), forward[mlp]))
    return model_config(config, where, layers)


# ------------------------------------------------------------------------------------------------------------- Step

_STEP = {
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "rope_theta": 1e4,
}
_ALIASES = {
    "num_attention_groups": "num_key_value_heads",
    "num_local_experts": "n_routed_experts",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "max_seq_len": "max_position_embeddings",
}


def read_step(config: Config, where: Path) -> ModelConfig:
    for key, value in (
        ("use_bidirectional_attention", False),
        ("moe_router_activation", "sigmoid"),
        ("zero_centered", True),
    ):
        require_value(config, key, value, where)
    renamed = {_ALIASES.get(key, key): value for key, value in config.items() if value is not None}
    config = {**_STEP, **renamed, "hidden_act": "silu"}
    count = num_layers(config, where)
    config = {
        key: value[:count] if isinstance(value, list) and key in _BY_LAYER else value for key, value in config.items()
    }
    for key in ("rope_theta", "partial_rotary_factors"):
        if isinstance(config.get(key), list) and len(config[key]) < count:
            raise CheckpointError(
                f"{where}: {key} must have a number for each of {count} layers, has {len(config[key])}"
            )
    kinds = layer_types(config, where, lambda _: FULL_ATTENTION)
    other = table(config, "attention_other_setting", where)
    sliding = size({**config, **other}, "num_attention_heads", where)
    if config.get("num_sliding_attention_heads") is not None:
        sliding = size(config, "num_sliding_attention_heads", where)
    for key in ("num_attention_groups", "head_dim"):
        require_value(other, key, config[_ALIASES.get(key, key)], where)
    number = size(config, "n_routed_experts", where)
    router = RouterSpec(
        number,
        num_experts_per_token(config, number, where),
        RouterKind.SIGMOID,
        renormalise=True,
        scale=real(config, "routed_scaling_factor", where, 1.0),
        correction=True,
    )
    scalar = real(config, "query_pre_attn_scalar", where, size(config, "head_dim", where))
    routed, shared = (_limits(config, key, count, where) for key in ("swiglu_limits", "swiglu_limits_shared"))
    layers = []
    for index, (kind, mlp) in enumerate(zip(kinds, _step_mlps(config, where), strict=True)):
        slides = kind == SLIDING_ATTENTION
        own = {**config, **_step_rope(config, index, kind, where)}
        if slides:
            own["num_attention_heads"] = sliding
        own = own_config(own, index, ("num_attention_heads",), where)
        attention = replace(
            attention_spec(own, where, layer_type=kind, rotary_factor=1.0),
            scale=scalar**-0.5,
            qk_norm=True,
            gate=OutputGate("sigmoid"),
            window=size(config, "sliding_window", where) if slides else None,
        )
        forward: DenseSpec | ExpertSpec = replace(dense_spec(config, where), limit=shared[index])
        if mlp == "sparse":
            inner, beside = (size(config, key, where) for key in ("moe_intermediate_size", "share_expert_dim"))
            activation = Activation("silu", routed[index])
            forward = ExpertSpec(inner, router, activation, beside, shared[index], stored=_APART)
        layers.append(LayerSpec(attention, forward))
    return replace(model_config(config, where, layers), unit_offset=True)


_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
"""Keys whose lists may go on with the layers that predict further tokens."""


def _step_mlps(config: Config, where: Path) -> list[str]:
    """`mlp_layer_types`, or earlier `moe_layers_enum`: the layers with experts, of which dense ones come first."""
    count, listed = num_layers(config, where), config.get("moe_layers_enum")
    if config.get("mlp_layer_types") is not None:
        return mlp_layer_types(config, where)
    try:
        each = listed.split(",") if isinstance(listed, str) else range(3, count) if listed is None else listed
        routed = {int(index) for index in each}
    except (TypeError, ValueError):
        raise CheckpointError(f"{where}: moe_layers_enum must list layers, got {shown(listed)}") from None
    return ["sparse" if index in routed else "dense" for index in range(count)]


def _limits(config: Config, key: str, count: int, where: Path) -> list[float | None]:
    """Of the activations of each layer; 0 and null are none."""
    listed = config.get(key)
    if listed is None:
        return [None] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise CheckpointError(f"{where}: {key} must name a limit, 0 or null for each of {count} layers")
    return [real({"swiglu_limit": each}, "swiglu_limit", where) if each else None for each in listed]


def _step_rope(config: Config, index: int, kind: str, where: Path) -> dict[str, Any]:
    """Thetas and parts with RoPE are lists by layer, and a scaling is of the full layers; `transformers` nests them."""
    if table(config, "rope_parameters", where):
        return {}
    theta, parts = config["rope_theta"], config.get("partial_rotary_factors")
    own: dict[str, Any] = {"rope_theta": theta[index] if isinstance(theta, list) else theta}
    if isinstance(parts, list):
        own["partial_rotary_factor"] = parts[index]
    scaling = table(config, "rope_scaling", where) if kind == FULL_ATTENTION else {}
    return {"rope_parameters": {kind: {**own, **scaling}}, "rope_scaling": None, "rope_theta": None}
