"""Qwen3 with experts: every layer, or those that its config says."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, require_value, size
from treetop.checkpoints.json_file import integers
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    DenseSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.types.errors import CheckpointError


def read_vl(config: Config, where: Path) -> ModelConfig:
    """The language model of Qwen3-VL, which holds experts in tensors of all of them; its router always renormalises."""
    require_value(config, "norm_topk_prob", True, where)
    whole = read({**config, "norm_topk_prob": True}, where)
    layers = (
        replace(layer, feed_forward=replace(layer.feed_forward, stored=ExpertLayout("stacked")))
        if isinstance(layer.feed_forward, ExpertSpec)
        else layer
        for layer in whole.layers
    )
    return replace(whole, layers=tuple(layers))


def read(config: Config, where: Path) -> ModelConfig:
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{where}: use_sliding_window = true is not supported with Qwen3MoeForCausalLM")
    # without a head_dim of its own a head is as wide as the hidden size gives
    attention, count = replace(attention_spec(config, where), qk_norm=True), num_layers(config, where)
    number = size(config, "num_local_experts" if "num_local_experts" in config else "num_experts", where)
    router = RouterSpec(
        number,
        num_experts_per_token(config, number, where),
        RouterKind.SOFTMAX,
        renormalise=flag(config, "norm_topk_prob", where),
    )
    experts, dense = ExpertSpec(size(config, "moe_intermediate_size", where), router), dense_spec(config, where)
    step, plain = size(config, "decoder_sparse_step", where, default=1), integers(config, "mlp_only_layers", where)

    def feed_forward(layer: int) -> DenseSpec | ExpertSpec:
        return experts if layer not in plain and (layer + 1) % step == 0 else dense

    return model_config(config, where, [LayerSpec(attention, feed_forward(layer)) for layer in range(count)])
