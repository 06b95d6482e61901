"""LongCat-Flash: compressed attention (MLA) whose latents are scaled, and experts of which some give what they read.

A block of a checkpoint is two layers here, each with attention, a dense feed-forward and K/V of its own: the first has
experts too, whose sum is added behind the second (`models.shortcut`). What counts layers, such as the features of a
draft head, counts these. The latent of queries times sqrt(hidden / its rank) is the same as scores times that; the
latent of keys and values is kept scaled.
Source: `transformers`' longcat_flash, whose defaults these are, and vllm's `longcat_flash.py`, which alone reads
whether latents are scaled.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.checkpoints.params import Param
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    AttentionSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    ShortcutSpec,
    dense_spec,
    model_config,
)
from treetop.models.decoder import decoder_params, unused_tensors
from treetop.models.families.deepseek import LATENT_SIZES, latent_attention
from treetop.types.errors import CheckpointError, shown
from treetop.weights.plain import FLOATS
from treetop.weights.rules import Rule

_DEFAULTS: dict[str, Any] = {
    **LATENT_SIZES,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "moe_topk": 12,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "routed_scaling_factor": 6.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LAYOUT = ExpertLayout(router="router.classifier", score="router.e_score_correction_bias")
_PLAIN = ["self_attn", "mlps", "mtp"]
_HALVES = re.compile(
    r"model\.layers\.(\d+)\.(self_attn|input_layernorm|post_attention_layernorm|mlp(?=\.(?:gate|up|down)_proj))\."
)
"""What a block has of each of its layers; the experts are one layer's."""


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    for key, value in (
        *(("attention_method", "MLA"), ("router_bias", False), ("norm_topk_prob", False), ("scoring_func", "softmax")),
        *(("n_group", 1), ("topk_group", 1), ("mlp_bias", False), ("sliding_window", None)),
        ("num_experts_per_tok", config["moe_topk"]),
        ("qk_head_dim", size(config, "qk_nope_head_dim", where) + size(config, "qk_rope_head_dim", where)),
    ):
        require_value(config, key, value, where)
    blocks = size(config, "num_layers", where)
    config |= {"num_hidden_layers": 2 * blocks, "intermediate_size": size(config, "ffn_hidden_size", where)}
    attention, dense = _attention(config, where), dense_spec(config, where)
    first = LayerSpec(attention, ShortcutSpec(dense, _experts(config, where)))
    return _with_plain(model_config(config, where, [first, LayerSpec(attention, dense)] * blocks), config, where)


def params(config: ModelConfig) -> list[Param]:
    found = []
    for param in decoder_params(config):
        sources = tuple(replace(each, name=_stored(each.name)) for each in param.sources)
        found.append(replace(param, sources=sources))
    return found


def unused(config: ModelConfig) -> set[str]:
    """The layer that predicts a further token, and what `transformers` writes of experts that have no weights."""
    found = {_stored(name) for name in unused_tensors(config)} | {"model.mtp."}
    for index, experts in enumerate(layer.experts for layer in config.layers):
        if experts is not None:
            router, block = experts.router, f"model.layers.{index // 2}.mlp.experts"
            numbers = range(router.with_weights, router.num_experts)
            found.update(f"{block}.{each}.{name}_proj.weight" for each in numbers for name in ("gate", "up"))
    return found


def _with_plain(model: ModelConfig, config: Config, where: Path) -> ModelConfig:
    """Modules that are not quantized, by `disable_quant_module`, whatever `quantization_config` says."""
    said = config.get("disable_quant_module", [])
    if not isinstance(said, list) or not all(each in _PLAIN for each in said):
        raise CheckpointError(f"{where}: disable_quant_module {shown(said)} is not supported, only some of {_PLAIN}")
    if not model.formats.rules:
        return model
    plain = (Rule(f"*.{name}.*", FLOATS) for name in said)
    return replace(model, formats=replace(model.formats, rules=(*plain, *model.formats.rules)))


def _attention(config: Config, where: Path) -> AttentionSpec:
    spec, hidden = latent_attention(config, where), size(config, "hidden_size", where)
    latent = spec.latent
    assert latent is not None
    scale = spec.scale
    if latent.query_rank is not None and flag(config, "mla_scale_q_lora", where):
        scale *= (hidden / latent.query_rank) ** 0.5
    if flag(config, "mla_scale_kv_lora", where):
        latent = replace(latent, scale=(hidden / latent.rank) ** 0.5)
    return replace(spec, scale=scale, latent=latent)


def _experts(config: Config, where: Path) -> ExpertSpec:
    number, zero = size(config, "n_routed_experts", where), size(config, "zero_expert_num", where)
    require_value(config, "zero_expert_type", "identity", where)
    chosen = size(config, "moe_topk", where)
    if chosen > number + zero:
        raise CheckpointError(f"{where}: moe_topk {chosen} exceeds the {number + zero} experts of a token's choice")
    scale = real(config, "routed_scaling_factor", where)
    router = RouterSpec(number + zero, chosen, RouterKind.SOFTMAX, scale=scale, correction=True, identity=zero)
    return ExpertSpec(size(config, "expert_ffn_hidden_size", where), router, stored=_LAYOUT)


def _stored(name: str) -> str:
    """A tensor of a layer as its block has it: model.layers.5.self_attn.o_proj is model.layers.2.self_attn.1.o_proj."""

    def of_block(found: re.Match[str]) -> str:
        block, half = divmod(int(found[1]), 2)
        module = "mlps" if found[2] == "mlp" else found[2]
        return f"model.layers.{block}.{module}.{half}."

    moved, number = _HALVES.subn(of_block, name)
    return moved if number else _OF_BLOCK.sub(lambda found: f"{found[1]}{int(found[2]) // 2}.", name)


_OF_BLOCK = re.compile(r"(model\.layers\.)(\d+)\.")
