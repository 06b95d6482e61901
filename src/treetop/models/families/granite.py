"""Granite: Llama with four multipliers, of embeddings, scores, what layers add, and logits. It may have experts in all
layers. Version 4: Mamba-2 in most layers or none, a feed-forward of other names, and RoPE or none. HyperCLOVA X:
Granite whose logits are multiplied, not divided, perhaps with norms behind the halves of a layer, too.

Source: `transformers`' granite, granitemoe, granitemoehybrid and hyperclovax, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    Mixer,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.models.families.hybrids.mamba import kinds, mamba_spec

_STORED = ExpertLayout(
    "stacked",
    "block_sparse_moe",
    "router.layer",
    stacked=("input_linear.weight", "output_linear.weight"),
    by_rows=True,
    shared="mlp",
    shared_in_layer=True,
    shared_stored="joined of Granite",
)


def read(config: Config, where: Path) -> ModelConfig:
    return _model(config, where, LayerSpec(_attention(config, where), dense_spec(config, where)))


def read_moe(config: Config, where: Path) -> ModelConfig:
    require_value(config, "hidden_act", "silu", where)
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, **config}
    return _model(config, where, LayerSpec(_attention(config, where), _experts(config, where)))


def read_4(config: Config, where: Path) -> ModelConfig:
    """Layers of Mamba-2 and of attention; experts, where there are any, beside a shared one."""
    require_value(config, "hidden_act", "silu", where)
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, **config}
    require_value(config, "position_embedding_type", "rope", where)
    attention = _attention(config, where)
    if config.get("position_embedding_type") is None:
        attention = replace(attention, rope=RopeSpec(attention.head_dim, attention.rope.theta, rotary_dim=0))
    inner = size(config, "shared_intermediate_size", where)
    forward: DenseSpec | ExpertSpec = DenseSpec(inner, stored="joined of Granite")
    if config["num_local_experts"]:
        forward = replace(_experts(config, where), shared_inner=inner)
    of_kind = kinds(config, where)
    mixers: dict[str, Mixer] = {FULL_ATTENTION: attention}
    if LINEAR_ATTENTION in of_kind:
        mixers[LINEAR_ATTENTION] = mamba_spec({"rms_norm_eps": 1e-6, **config}, where)
    return _model(config, where, *(LayerSpec(mixers[kind], forward) for kind in of_kind))


def read_hyperclova(config: Config, where: Path) -> ModelConfig:
    config = {"use_post_norm": True, **config}
    attention, norms = attention_spec(config, where), NormNames()
    if config.get("attention_multiplier") is not None:
        attention = _attention(config, where)
    if flag(config, "use_post_norm", where):
        norms = NormNames(attention_output="post_norm1", feed_forward_output="post_norm2")
    whole = _model(config, where, LayerSpec(attention, dense_spec(config, where), norms=norms))
    return replace(whole, logits_scale=real(config, "logits_scaling", where, 1.0))


def _experts(config: Config, where: Path) -> ExpertSpec:
    number = size(config, "num_local_experts", where)
    router = RouterSpec(number, num_experts_per_token(config, number, where), RouterKind.TOPK_SOFTMAX)
    return ExpertSpec(size(config, "intermediate_size", where), router, stored=_STORED)


def _attention(config: Config, where: Path) -> AttentionSpec:
    return replace(attention_spec(config, where), scale=real(config, "attention_multiplier", where, 1.0))


def _model(config: Config, where: Path, *layers: LayerSpec) -> ModelConfig:
    """layers: of all, or one that all are like."""
    return replace(
        model_config(config, where, layers * (num_layers(config, where) if len(layers) == 1 else 1)),
        embedding_scale=real(config, "embedding_multiplier", where, 1.0),
        residual_scale=real(config, "residual_multiplier", where, 1.0),
        logits_scale=1 / real(config, "logits_scaling", where, 1.0),
    )
