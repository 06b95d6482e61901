"""Kimi-Linear: Kimi delta attention in three layers of four, NoPE compressed attention (MLA) in the
others, and DeepSeek-V3's experts behind the first layers.

Source: `transformers`' kimi_linear, whose defaults these are; layers in `linear_attn_config` are counted from 1.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, require_value, size, table
from treetop.checkpoints.json_file import integers
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    AttentionSpec,
    ExpertLayout,
    Mixer,
    ModelConfig,
    layer_types,
    num_layers,
)
from treetop.models.families.deepseek import dense_first, latent_attention, latent_model
from treetop.models.mixers.recurrences import KimiSpec
from treetop.models.routers import corrected_sigmoids
from treetop.types.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
_SPELLINGS = {
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
}
"""What the first release called them."""
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_STORED = ExpertLayout(block="block_sparse_moe", each=("w1", "w3", "w2"))


def read(config: Config, where: Path) -> ModelConfig:
    given = {_SPELLINGS.get(key, key): value for key, value in config.items() if value is not None}
    of_linear = table(given, "linear_attn_config", where)
    config = {**_DEFAULTS, "n_routed_experts": 256, **given}
    config |= {ours: of_linear[theirs] for theirs, ours in _LINEAR.items() if theirs in of_linear}
    for key, value in (("moe_layer_freq", 1), ("moe_router_activation_func", "sigmoid"), ("mla_use_nope", True)):
        require_value(config, key, value, where)
    kinds = _kinds(config, of_linear, where)
    sparse = dense_first(config, where)
    if config.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in config["mlp_layer_types"]]
    router = corrected_sigmoids(config, where)
    whole = latent_model({**config, "rope_parameters": None, "rope_scaling": None}, where, router, sparse, _STORED)
    mixers: dict[str, Mixer] = {FULL_ATTENTION: _latent(config, where), LINEAR_ATTENTION: _delta(config, where)}
    layers = zip(whole.layers, kinds, strict=True)
    return replace(whole, layers=tuple(replace(layer, mixer=mixers[kind]) for layer, kind in layers))


def _latent(config: Config, where: Path) -> AttentionSpec:
    spec = latent_attention({**config, "rope_parameters": None, "rope_scaling": None}, where)
    return replace(spec, rope=replace(spec.rope, rotary_dim=0, interleaved=False))


def _delta(config: Config, where: Path) -> KimiSpec:
    heads, dim = size(config, "linear_num_heads", where), size(config, "linear_head_dim", where)
    return KimiSpec(heads, dim, size(config, "linear_conv_kernel_dim", where))


def _default(index: int) -> str:
    return FULL_ATTENTION if index and index % 4 == 0 else LINEAR_ATTENTION


def _kinds(config: Config, of_linear: Config, where: Path) -> list[str]:
    """Of every layer."""
    if config.get("layer_types") is not None or "full_attn_layers" not in of_linear:
        return layer_types(config, where, _default, (FULL_ATTENTION, LINEAR_ATTENTION))
    full, linear = (set(integers(of_linear, key, where)) for key in ("full_attn_layers", "kda_layers"))
    count = num_layers(config, where)
    if full & linear or full | linear != set(range(1, count + 1)):
        raise CheckpointError(f"{where}: full_attn_layers and kda_layers must have each of 1 to {count} once")
    return [FULL_ATTENTION if index in full else LINEAR_ATTENTION for index in range(1, count + 1)]
