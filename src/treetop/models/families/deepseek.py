"""Compressed attention (MLA) before experts: DeepSeek V2 and V3, Kimi-K2, GLM-4.7-Flash; Youtu, without experts.
DeepSeek V3.2 and GLM-5, whose attention is sparse as well (DSA).

Source: `transformers`' deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa and youtu, whose defaults
these are. The norms of latents have an epsilon of their own there, whatever the config says of the others.
"""

import math
from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size, table
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.kernels.rope import Yarn
from treetop.models.config import (
    EACH,
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
    dense_spec,
    mlp_layer_types,
    model_config,
    num_layers,
    with_indexer,
)
from treetop.models.rope_config import rope_spec
from treetop.models.routers import corrected_sigmoids, router_in_groups
from treetop.types.errors import CheckpointError, shown
from treetop.types.kv import compressed

_NORM_EPS = 1e-6
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V2 = {
    **LATENT_SIZES,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}
_V3 = {
    **LATENT_SIZES,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_GLM = {
    **LATENT_SIZES,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}

_GLM_5 = {
    **_V3,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
}
_INDEX = {"index_topk": 2048, "index_head_dim": 128}


def read_v2(config: Config, where: Path) -> ModelConfig:
    """DeepSeek V2 and V2-Lite, whose router is a softmax, of groups by their best expert or of all."""
    config = {**_V2, "q_lora_rank": 1536, "rope_interleave": True, **config}
    require_value(config, "scoring_func", "softmax", where)
    require_value(config, "norm_topk_prob", False, where)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{where}: topk_method = {shown(method)} is not supported, only greedy and group_limited_greedy"
        )
    if method == "greedy":
        config = {**config, "n_group": 1, "topk_group": 1}
    router = replace(router_in_groups(config, where, RouterKind.SOFTMAX), group_best=1)
    return latent_model(config, where, router, dense_first(config, where))


def read_v3(config: Config, where: Path) -> ModelConfig:
    """DeepSeek V3 and R1; Kimi-K2 is in its layout."""
    config = {**_V3, "q_lora_rank": 1536, "rope_interleave": True, **config}
    return latent_model(config, where, corrected_sigmoids(config, where), dense_first(config, where))


def read_glm(config: Config, where: Path) -> ModelConfig:
    """GLM-4.7-Flash."""
    config = {**_GLM, "q_lora_rank": 768, "rope_interleave": True, **config}
    sparse = dense_first(config, where)
    if config.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in mlp_layer_types(config, where)]
    return latent_model(config, where, corrected_sigmoids(config, where), sparse)


def read_youtu(config: Config, where: Path) -> ModelConfig:
    """Youtu-LLM, without experts. Where `head_dim` is not what has RoPE, `transformers` turns so much: refused."""
    config = {**LATENT_SIZES, "q_lora_rank": 1536, "rope_interleave": True, "tie_word_embeddings": True, **config}
    require_value(config, "head_dim", config["qk_rope_head_dim"], where)
    layer = LayerSpec(latent_attention(config, where), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))


def read_minicpm(config: Config, where: Path) -> ModelConfig:
    """MiniCPM3, without experts, whose RoPE is in halves; embeddings, what layers add and logits are scaled."""
    sizes = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "q_lora_rank": 768}
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    config = {**sizes, **scales, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_interleave": False, **config}
    hidden, count = size(config, "hidden_size", where), num_layers(config, where)
    if config.get("v_head_dim") is None:
        config = {**config, "v_head_dim": hidden // size(config, "num_attention_heads", where)}
    layer = LayerSpec(latent_attention(config, where), dense_spec(config, where))
    depth, base = config["scale_depth"], config["dim_model_base"]
    return replace(
        model_config(config, where, [layer] * count),
        embedding_scale=real(config, "scale_emb", where),
        residual_scale=1.0 if depth is None else real(config, "scale_depth", where) / math.sqrt(count),
        logits_scale=1.0 if base is None else real(config, "dim_model_base", where) / hidden,
    )


def read_v32(config: Config, where: Path) -> ModelConfig:
    """DeepSeek V3.2, in which every layer has an indexer; its heads turn in halves, not in pairs of neighbours."""
    config = {**_V3, "q_lora_rank": 1536, "rope_interleave": True, **_INDEX, "index_n_heads": 64, **config}
    return _sparse_model(config, where, ["full"] * num_layers(config, where))


def read_glm_dsa(config: Config, where: Path) -> ModelConfig:
    """GLM-5 and 5.1; 5.2, in which most layers share the choice of one before them."""
    config = {**_GLM_5, "q_lora_rank": 2048, "rope_interleave": True, **_INDEX, "index_n_heads": 32, **config}
    return _sparse_model({"indexer_rope_interleave": True, **config}, where, _indexer_types(config, where))


def _indexer_types(config: Config, where: Path) -> list[str]:
    """full or shared for each layer: listed, by letters F and S, or each `index_topk_freq`th full after an offset."""
    count, listed = num_layers(config, where), config.get("indexer_types")
    if listed is None:
        listed = config.get("index_topk_pattern")
    if isinstance(listed, str):
        listed = [{"F": "full", "S": "shared"}.get(letter) for letter in listed]
    if listed is None:
        each = size(config, "index_topk_freq", where, default=1)
        offset = size(config, "index_skip_topk_offset", where, default=2)
        listed = ["full" if max(layer - offset + 1, 0) % each == 0 else "shared" for layer in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in ("full", "shared") for kind in listed):
        raise CheckpointError(
            f"{where}: indexer_types or index_topk_pattern must name full or shared for each of {count} layers"
        )
    if listed[0] != "full":
        raise CheckpointError(f"{where}: indexer_types: the first layer has no other whose choice it could share")
    return listed


def _sparse_model(config: Config, where: Path, indexers: list[str]) -> ModelConfig:
    """Each layer attends to what an indexer chooses. indexers: which have one of their own."""
    sparse = dense_first(config, where)
    if config.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in mlp_layer_types(config, where)]
    model = latent_model(config, where, corrected_sigmoids(config, where), sparse)
    index = IndexSpec(
        size(config, "index_n_heads", where),
        size(config, "index_head_dim", where),
        size(config, "index_topk", where),
        flag(config, "indexer_rope_interleave", where),
        _NORM_EPS,
    )
    attention = model.layers[0].attention
    rope_dim = attention.rope.head_dim
    if config.get("q_lora_rank") is None or index.head_dim <= rope_dim:
        raise CheckpointError(
            f"{where}: an indexer needs a q_lora_rank, and an index_head_dim over the qk_rope_head_dim {rope_dim}"
        )
    attends, source = [], 0
    for layer, kind in enumerate(indexers):
        if kind == "full":
            source = layer
            attends.append(with_indexer(attention, index))
        else:
            attends.append(replace(attention, index=replace(index, shares=source)))
    layers = [replace(layer, mixer=each) for layer, each in zip(model.layers, attends, strict=True)]
    return replace(model, layers=tuple(layers))


def latent_attention(config: Config, where: Path) -> AttentionSpec:
    """Compressed attention by the usual keys. Where YaRN scales all dimensions, scores are scaled by its square."""
    heads = size(config, "num_attention_heads", where)
    require_value(config, "attention_bias", False, where)
    require_value(config, "num_key_value_heads", heads, where)
    rope_dim = size(config, "qk_rope_head_dim", where)
    if rope_dim % 2 != 0:
        raise CheckpointError(f"{where}: qk_rope_head_dim {rope_dim} must be even")
    ranks = None if config.get("q_lora_rank") is None else size(config, "q_lora_rank", where)
    latent = LatentSpec(
        size(config, "kv_lora_rank", where),
        size(config, "qk_nope_head_dim", where),
        size(config, "v_head_dim", where),
        ranks,
        _NORM_EPS,
    )
    rope = rope_spec(config, rope_dim, where, interleaved=flag(config, "rope_interleave", where))
    scale = (latent.qk_nope_head_dim + rope_dim) ** -0.5
    if rope.scaling is not None:
        if not isinstance(rope.scaling, Yarn):
            raise CheckpointError(f"{where}: rope_type of compressed attention is not supported, only default and yarn")
        said = table(config, "rope_parameters", where) or table(config, "rope_scaling", where)
        of_all = real(said, "mscale_all_dim", where, 0.0)
        if of_all and rope.scaling.factor > 1:
            scale *= (0.1 * of_all * math.log(rope.scaling.factor) + 1) ** 2
    return AttentionSpec(heads, compressed(latent.rank, rope_dim), rope, scale, latent=latent)


def latent_model(
    config: Config, where: Path, router: RouterSpec, sparse: list[bool], stored: ExpertLayout = EACH
) -> ModelConfig:
    """Compressed attention in each layer. sparse: whether a layer has experts. stored: how those are."""
    require_value(config, "moe_layer_freq", 1, where)
    require_value(config, "mlp_bias", False, where)
    attention, dense = latent_attention(config, where), dense_spec(config, where)
    inner, shared = size(config, "moe_intermediate_size", where), size(config, "n_shared_experts", where, default=1)
    experts = ExpertSpec(inner, router, shared_inner=shared * inner, stored=stored)
    forward: dict[bool, DenseSpec | ExpertSpec] = {False: dense, True: experts}
    return model_config(config, where, [LayerSpec(attention, forward[each]) for each in sparse])


def dense_first(config: Config, where: Path) -> list[bool]:
    """Which layers have experts: all after the first `first_k_dense_replace`."""
    first = size(config, "first_k_dense_replace", where)
    return [layer >= first for layer in range(num_layers(config, where))]
