"""Mixtral: Mistral with experts in every layer. MiniMax-M2: sigmoids with a correction choose experts, part of a head
turns, and all queries and all keys have a norm.

Source: `transformers`' mixtral and minimax_m2, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, require_value, size
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    AttentionSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)

STORED = ExpertLayout(block="block_sparse_moe", score="e_score_correction_bias", each=("w1", "w3", "w2"))


def read(config: Config, where: Path) -> ModelConfig:
    config = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, **config}
    window = None if config.get("sliding_window") is None else size(config, "sliding_window", where)
    return _model(config, where, replace(attention_spec(config, where), window=window), RouterKind.TOPK_SOFTMAX)


def read_minimax(config: Config, where: Path) -> ModelConfig:
    require_value(config, "scoring_func", "sigmoid", where)
    require_value(config, "use_routing_bias", True, where)
    require_value(config, "use_qk_norm", True, where)
    require_value(config, "qk_norm_type", "per_layer", where)
    require_value(config, "shared_intermediate_size", 0, where)
    config = {"head_dim": 128, "rope_theta": 5e6, **config}
    if config.get("rotary_dim") is not None:
        share = size(config, "rotary_dim", where) / size(config, "head_dim", where)
        config = {"partial_rotary_factor": share, **config}
    attention = replace(attention_spec(config, where, rotary_factor=1.0), whole_qk_norm=True)
    return _model(config, where, attention, RouterKind.SIGMOID)


def _model(config: Config, where: Path, attention: AttentionSpec, kind: RouterKind) -> ModelConfig:
    require_value(config, "hidden_act", "silu", where)
    number, sigmoid = size(config, "num_local_experts", where), kind is RouterKind.SIGMOID
    chosen = num_experts_per_token(config, number, where)
    router = RouterSpec(number, chosen, kind, renormalise=sigmoid, correction=sigmoid)
    experts = ExpertSpec(size(config, "intermediate_size", where), router, stored=STORED)
    return model_config(config, where, [LayerSpec(attention, experts)] * num_layers(config, where))
