"""Hy3: norms of heads, dense layers first, then experts that sigmoids with a correction choose, and shared ones.

Source: `transformers`' hy_v3, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, real, size
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    mlp_layer_types,
    model_config,
    num_experts_per_token,
)
from treetop.models.decoder import unused_tensors

_STORED = ExpertLayout(router="router.gate", score="expert_bias", shared="shared_mlp")


def read(config: Config, where: Path) -> ModelConfig:
    config = {"head_dim": 128, "rope_theta": 11158840.0, "rms_norm_eps": 1e-5, **config}
    attention = replace(attention_spec(config, where), qk_norm=True)
    number = size(config, "num_experts", where)
    scale, chosen = real(config, "router_scaling_factor", where, 2.826), num_experts_per_token(config, number, where)
    router = RouterSpec(number, chosen, RouterKind.SIGMOID, renormalise=True, scale=scale, correction=True)
    inner = size(config, "moe_intermediate_size", where)
    shared = inner * size(config, "num_shared_experts", where, default=1)
    kinds: dict[str, DenseSpec | ExpertSpec] = {
        "dense": dense_spec(config, where),
        "sparse": ExpertSpec(inner, router, shared_inner=shared, stored=_STORED),
    }
    return model_config(config, where, [LayerSpec(attention, kinds[kind]) for kind in mlp_layer_types(config, where)])


def unused(config: ModelConfig) -> set[str]:
    """The layer after the last, which predicts a token more."""
    return unused_tensors(config) | {f"model.layers.{len(config.layers)}."}
