"""Qwen2 and 2.5: Llama with biases of q, k and v, and perhaps a window in later layers; Qwen2-MoE with experts; MiMo.

Source of MiMo: the configuration and the weights' names of XiaomiMiMo/MiMo-7B-RL.
"""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, require_value, size
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
)
from treetop.models.decoder import unused_tensors
from treetop.models.families import qwen3_moe
from treetop.types.errors import CheckpointError

STORED = ExpertLayout(shared="shared_expert")
"""Also of later families."""


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(attention_spec(config, where), bias=True, output_bias=False)
    dense = dense_spec(config, where)
    layers = [LayerSpec(replace(attention, window=window), dense) for window in windows(config, where)]
    return model_config(config, where, layers)


def read_mimo(config: Config, where: Path) -> ModelConfig:
    """MiMo, dense: layers beside it predict further tokens, which a target leaves unused."""
    require_value(config, "use_mrope", False, where)
    return read(config, where)


def unused_mimo(config: ModelConfig) -> set[str]:
    return unused_tensors(config) | {"model.mtp_layers."}


def read_moe(config: Config, where: Path) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-57B-A14B: Qwen3's experts, beside a shared one with a gate of its own."""
    config = {"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, **config}
    config = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, **config}
    spec = attention_spec(config, where)
    attention = replace(spec, bias=flag(config, "qkv_bias", where), output_bias=False)
    shared = size(config, "shared_expert_intermediate_size", where)
    forwards = (
        replace(each.feed_forward, shared_inner=shared, shared_gate=True, stored=STORED)
        if isinstance(each.feed_forward, ExpertSpec)
        else each.feed_forward
        for each in qwen3_moe.read({**config, "use_sliding_window": False}, where).layers
    )
    layers = zip(windows(config, where), forwards, strict=True)
    return model_config(config, where, [LayerSpec(replace(attention, window=window), each) for window, each in layers])


def windows(config: Config, where: Path) -> list[int | None]:
    """Of every layer: `sliding_window` of those that `layer_types` names, or of all from `max_window_layers` on."""
    slides = flag(config, "use_sliding_window", where) and config.get("sliding_window", 4096) is not None
    first = size(config, "max_window_layers", where, default=28)
    kinds = layer_types(config, where, lambda index: SLIDING_ATTENTION if slides and index >= first else FULL_ATTENTION)
    if not slides and SLIDING_ATTENTION in kinds:
        raise CheckpointError(f"{where}: layer_types has {SLIDING_ATTENTION}, but use_sliding_window is not true")
    window = size(config, "sliding_window", where, default=4096) if slides else None
    return [window if kind == SLIDING_ATTENTION else None for kind in kinds]
