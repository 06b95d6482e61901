"""Mistral: Llama whose layers all have the same window, or none. Ministral 3: queries that grow with their position.
Mistral Small 4: that with compressed attention and experts.

Source: `transformers`' mistral, ministral3 and mistral4, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size, table
from treetop.kernels.moe.routes import RouterKind
from treetop.kernels.rope import QueryScale
from treetop.models.config import (
    ExpertLayout,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
)
from treetop.models.families.deepseek import LATENT_SIZES, dense_first, latent_model
from treetop.models.routers import renormalised, router_in_groups
from treetop.types.errors import CheckpointError


def read(config: Config, where: Path) -> ModelConfig:
    require_value(config, "layer_types", None, where)  # of Ministral
    slides = config.get("sliding_window", 4096) is not None
    window = size(config, "sliding_window", where, default=4096) if slides else None
    attention = replace(attention_spec({"num_key_value_heads": 8, **config}, where), window=window)
    return model_config(config, where, [LayerSpec(attention, dense_spec(config, where))] * num_layers(config, where))


def read_3(config: Config, where: Path) -> ModelConfig:
    """Ministral 3, and what has its text: Mistral Medium 3.5."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None, **config}
    config, rope, beta = _growing_queries(config, _ROPE_3, where)
    return _scaled(read(config, where), rope, beta, where)


def read_4(config: Config, where: Path) -> ModelConfig:
    """Mistral Small 4: compressed attention, experts by a softmax over groups."""
    config, rope, beta = _growing_queries({**_SMALL_4, **config}, _ROPE_4, where)
    share = rope.pop("partial_rotary_factor", None)
    turned, still = size(config, "qk_rope_head_dim", where), size(config, "qk_nope_head_dim", where)
    key = "partial_rotary_factor"
    if share is not None and round((turned + still) * real({key: share}, key, where)) != turned:
        raise CheckpointError(f"{where}: {key} {share} does not turn the {turned} of qk_rope_head_dim")
    router = renormalised(router_in_groups(config, where, RouterKind.SOFTMAX), config, where)
    whole = latent_model(config, where, router, dense_first(config, where), ExpertLayout("stacked", by_rows=True))
    return _scaled(whole, rope, beta, where)


def _growing_queries(
    config: Config, default: Config, where: Path
) -> tuple[dict[str, Any], dict[str, Any], float | None]:
    """The config with a table of RoPE that others have too, that table, and by how much queries grow."""
    given = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope, key = dict(table(config, given, where) or default), "llama_4_scaling_beta"
    rope.pop("max_position_embeddings", None)
    beta = rope.pop(key, None)
    return {**config, given: rope}, rope, None if beta is None else real({key: beta}, key, where)


def _scaled(whole: ModelConfig, rope: Config, beta: float | None, where: Path) -> ModelConfig:
    """The same, whose queries grow with their position."""
    if beta is None:
        return whole
    spec = whole.layers[0].attention
    scale = QueryScale(beta, size(rope, "original_max_position_embeddings", where))
    growing = replace(spec, rope=replace(spec.rope, query_scale=scale))
    return replace(whole, layers=tuple(replace(layer, mixer=growing) for layer in whole.layers))


def read_text(config: Config, where: Path) -> ModelConfig:
    """The language model of a folder of Mistral 3's layout."""
    kinds = {"ministral3": read_3, "mistral4": read_4}
    return kinds.get(str(config.get("model_type")), read)(config, where)


_ROPE_3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_ROPE_4 = {**_ROPE_3, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_SMALL_4 = {
    **LATENT_SIZES,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "rope_interleave": True,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
}
