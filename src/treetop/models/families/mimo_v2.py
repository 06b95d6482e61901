"""MiMo-V2: full layers and windows with other heads and sinks, values narrower than keys, experts that sigmoids with a
correction choose.

MiMo-V2.5 has q, k and v in one tensor, `qkv_proj`, as the ranks of a training run had it: in as many parts as full
layers have heads of keys, each part with its share of q, k and v, in FP8 by blocks that begin anew with each part.
Weights that others wrote under that name in other formats have the rows of q, then of k, then of v, and shapes do not
tell: they are refused.

Source: `transformers`' mimo_v2_flash, whose defaults these are, and XiaomiMiMo/MiMo-V2-Flash's configuration; of the
parts vllm-57508 and llama.cpp's `conversion/mimo.py`; of the other order sgl-28100.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size, table
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    AttentionSpec,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    mlp_layer_types,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.types.errors import CheckpointError, shown

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "attention_value_scale": 0.707,
    "sliding_window": 129,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
}


def read(config: Config, where: Path) -> ModelConfig:
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("n_shared_experts", 0)):
        require_value(config, key, value, where)
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    if config.get("layernorm_epsilon") is not None:
        config["rms_norm_eps"] = config["layernorm_epsilon"]
    if config.get("sliding_window_size") is not None:  # of the tokens before the query
        config["sliding_window"] = size(config, "sliding_window_size", where) + 1
    config["layer_types"] = _listed(
        config, "layer_types", "hybrid_layer_pattern", (FULL_ATTENTION, SLIDING_ATTENTION), where
    )
    config["joined"] = _joined(config, where)
    config["mlp_layer_types"] = _listed(config, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"), where)
    kinds = layer_types(config, where, lambda i: SLIDING_ATTENTION if i and (i + 1) % 6 else FULL_ATTENTION)
    number, groups = size(config, "n_routed_experts", where), size(config, "n_group", where, default=1)
    top = size(config, "topk_group", where, default=1)
    if number % groups != 0 or top > groups:
        raise CheckpointError(
            f"{where}: n_group {groups} must divide n_routed_experts {number}, and topk_group {top} be no more"
        )
    router = RouterSpec(
        number,
        num_experts_per_token(config, number // groups * top, where),
        RouterKind.SIGMOID,
        renormalise=config.get("norm_topk_prob") is None or flag(config, "norm_topk_prob", where),
        scale=real(config, "routed_scaling_factor", where, 1.0),
        correction=True,
        groups=groups,
        top_groups=top,
    )
    forward: dict[str, DenseSpec | ExpertSpec] = {
        "dense": dense_spec(config, where),
        "sparse": ExpertSpec(size(config, "moe_intermediate_size", where), router),
    }
    attention = {kind: _attention(config, kind, where) for kind in set(kinds)}
    mlps = mlp_layer_types(config, where)
    return model_config(
        config, where, [LayerSpec(attention[kind], forward[mlp]) for kind, mlp in zip(kinds, mlps, strict=True)]
    )


def _listed(config: dict[str, Any], key: str, older: str, names: tuple[str, str], where: Path) -> object:
    """What stands at the key, or at an older one that has a 0 or 1 for each layer."""
    pattern = config.get(older)
    if config.get(key) is not None or pattern is None:
        return config.get(key)
    if (
        not isinstance(pattern, list)
        or len(pattern) != num_layers(config, where)
        or any(i not in (0, 1) for i in pattern)
    ):
        raise CheckpointError(f"{where}: {older} must be 0 or 1 for each layer, got {shown(pattern)}")
    return [names[each] for each in pattern]


def _joined(config: Config, where: Path) -> int:
    """Parts of `qkv_proj`; 0 where q, k and v are three tensors. Raises CheckpointError for an unknown order."""
    key, said = "attention_projection_layout", config.get("attention_projection_layout", "split")
    if said == "split":
        return 0
    if said != "fused_qkv":
        raise CheckpointError(f"{where}: {key} = {shown(said)} is not supported, only 'split' and 'fused_qkv'")
    formats = table(config, "quantization_config", where)
    if formats.get("quant_method") != "fp8" or formats.get("weight_block_size") is None:
        raise CheckpointError(
            f"{where}: {key} = 'fused_qkv' is supported in FP8 by blocks alone, as published (quant_method fp8 with"
            " weight_block_size): elsewhere rows of q, k and v lie in one of two orders, and nothing says in which"
        )
    return size(config, "num_key_value_heads", where)


def _rope(config: Config, kind: str, theta: float, where: Path) -> dict[str, Any]:
    """The table of a kind of layers: V2.5 has one for full layers, of which windows have but another theta."""
    said = table(config, "rope_parameters", where)
    if any(isinstance(each, dict) for each in said.values()):
        return {**said}
    return {kind: {**said, "rope_theta": theta if kind == SLIDING_ATTENTION else said.get("rope_theta", theta)}}


def _attention(config: dict[str, Any], kind: str, where: Path) -> AttentionSpec:
    """Layers with a window have twice the heads of keys and values, unless the config says how many."""
    slides, kv = kind == SLIDING_ATTENTION, size(config, "num_key_value_heads", where)
    own = dict(config)
    if slides:
        for key, same in (("swa_head_dim", "head_dim"), ("swa_v_head_dim", "v_head_dim")):
            require_value(config, key, config[same], where)
        own["num_key_value_heads"] = size(config, "swa_num_key_value_heads", where, default=2 * kv)
        heads = size(config, "num_attention_heads", where)
        own["num_attention_heads"] = size(config, "swa_num_attention_heads", where, default=heads)
        own["rope_theta"] = config["swa_rope_theta"]
    own["rope_parameters"] = _rope(config, kind, own["rope_theta"], where)
    spec = attention_spec(own, where, layer_type=kind, rotary_factor=0.334)
    value_dim, said = (
        size(config, "v_head_dim", where),
        config.get(f"add_{'swa' if slides else 'full'}_attention_sink_bias"),
    )
    if value_dim > spec.head_dim:
        raise CheckpointError(f"{where}: v_head_dim {value_dim} exceeds head_dim {spec.head_dim}")
    joined = config["joined"]
    if joined and (spec.num_heads % joined or spec.kv.heads % joined):
        raise CheckpointError(
            f"{where}: qkv_proj of {joined} parts, as num_key_value_heads says, cannot hold {spec.num_heads} heads with"
            f" {spec.kv.heads} of keys and values"
        )
    return replace(
        spec,
        output_bias=False,
        joined=joined,
        parts_apart=joined > 0,
        window=size(config, "sliding_window", where) if slides else None,
        sinks=slides if said is None else bool(said),
        sink_name="attention_sink_bias",
        value_dim=value_dim if value_dim < spec.head_dim else None,
        value_scale=real(config, "attention_value_scale", where),
    )


def unused(config: ModelConfig) -> set[str]:
    """Layers that predict further tokens."""
    return unused_tensors(config) | {"model.mtp."}
