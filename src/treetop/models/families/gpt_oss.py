"""GPT-OSS: layers of a window and of everything, attention sinks, biases, and experts, which may be quantized."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, real, size
from treetop.kernels.moe.experts import ALPHA, LIMIT, Activation
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.types.errors import CheckpointError

_WINDOW, _FULL = "sliding_attention", "full_attention"


def read(config: Config, where: Path) -> ModelConfig:
    count = num_layers(config, where)
    with_bias = {**config, "attention_bias": config.get("attention_bias", True)}
    attention = replace(attention_spec(with_bias, where), sinks=True)
    if (real(config, "swiglu_limit", where, LIMIT), real(config, "swiglu_alpha", where, ALPHA)) != (LIMIT, ALPHA):
        raise CheckpointError(
            f"{where}: swiglu_limit and swiglu_alpha other than {LIMIT} and {ALPHA} are not supported"
        )
    number = size(config, "num_local_experts", where)
    router = RouterSpec(number, num_experts_per_token(config, number, where), RouterKind.TOPK_SOFTMAX, bias=True)
    inner = size(config, "intermediate_size", where)
    by_rows = config.get("quantization_config") is not None
    stored = ExpertLayout("stacked", router="router", by_rows=by_rows, in_turn=True)
    experts = ExpertSpec(inner, router, Activation.CLAMPED, bias=True, stored=stored)
    window = size(config, "sliding_window", where)
    kinds = config.get("layer_types") or [_FULL if layer % 2 else _WINDOW for layer in range(count)]
    windows = {_WINDOW: window, _FULL: None}
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in windows for kind in kinds):
        raise CheckpointError(f"{where}: layer_types must name {_WINDOW} or {_FULL} for each of {count} layers")
    layers = [LayerSpec(replace(attention, window=windows[kind]), experts) for kind in kinds]
    return model_config(config, where, layers)
