"""LFM2: short convolutions among layers of attention, which has norms of heads; LFM2-MoE with experts behind the first
layers, chosen by corrected sigmoids.

Source: `transformers`' lfm2 and lfm2_moe, whose defaults these are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, size
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    FULL_ATTENTION,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    layer_types,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.models.decoder import decoder_params
from treetop.models.families import mixtral
from treetop.models.mixers.recurrences import ConvSpec
from treetop.types.errors import CheckpointError

CONV = "conv"
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_FORWARD = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
_EXPERTS = {
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_NAMES = {
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".block_sparse_moe.": ".feed_forward.",
    ".e_score_correction_bias": ".expert_bias",
    "model.norm.": "model.embedding_norm.",
}


def read(config: Config, where: Path) -> ModelConfig:
    """The feed-forward is narrower than its config says, unless that says otherwise."""
    config = {**_DEFAULTS, **_FORWARD, **_given(config)}
    config["intermediate_size"] = config.get("block_ff_dim", config.get("intermediate_size"))
    inner = size(config, "intermediate_size", where)
    if flag(config, "block_auto_adjust_ff_dim", where):
        multiple = size(config, "block_multiple_of", where)
        inner = int(real(config, "block_ffn_dim_multiplier", where) * int(2 * inner / 3))
        inner = multiple * -(-inner // multiple)
    return _model(config, where, [DenseSpec(inner)] * num_layers(config, where))


def read_moe(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **_EXPERTS, **_given(config)}
    number, plain = size(config, "num_experts", where), size(config, "num_dense_layers", where)
    router = RouterSpec(
        number,
        num_experts_per_token(config, number, where),
        RouterKind.SIGMOID,
        renormalise=flag(config, "norm_topk_prob", where),
        scale=real(config, "routed_scaling_factor", where),
        correction=flag(config, "use_expert_bias", where),
        least=1e-6,
    )
    dense = DenseSpec(size(config, "intermediate_size", where))
    experts = ExpertSpec(size(config, "moe_intermediate_size", where), router, stored=mixtral.STORED)
    forwards = [dense if index < plain else experts for index in range(num_layers(config, where))]
    return _model(config, where, forwards)


def params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), _NAMES)


def _model(config: dict[str, Any], where: Path, forwards: Sequence[DenseSpec | ExpertSpec]) -> ModelConfig:
    config["rms_norm_eps"] = real(config, "norm_eps", where)
    full = config.get("full_attn_idxs")
    kinds = layer_types(
        config, where, lambda index: FULL_ATTENTION if full is None or index in full else CONV, (FULL_ATTENTION, CONV)
    )
    if FULL_ATTENTION not in kinds:
        raise CheckpointError(f"{where}: layer_types has no {FULL_ATTENTION}, without which it is not supported")
    attention = replace(attention_spec(config, where), qk_norm=True)
    bias = flag(config, "conv_bias", where)
    conv = ConvSpec(size(config, "hidden_size", where), size(config, "conv_L_cache", where), bias)
    names = NormNames("operator_norm", "ffn_norm")
    layers = (
        LayerSpec(attention if kind == FULL_ATTENTION else conv, forward, names)
        for kind, forward in zip(kinds, forwards, strict=True)
    )
    return model_config(config, where, tuple(layers))


def _given(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}
