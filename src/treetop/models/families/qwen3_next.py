"""Qwen3-Next and Qwen3.5, 3.6 and 3.8: linear attention in three layers of four; the others turn a quarter of a head
and gate what they give; norms of 1 + w. Experts, where there are any, beside a shared one with a gate of its own.

Source: `transformers`' qwen3_next, qwen3_5 and qwen3_5_moe, whose defaults these are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import Config, flag, require_value, size
from treetop.checkpoints.json_file import integers
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    LinearSpec,
    LinearStorage,
    ModelConfig,
    OutputGate,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_experts_per_token,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.models.families import qwen2
from treetop.types.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NEXT = {**_DEFAULTS, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512}
_NEXT |= {"num_key_value_heads": 2, "num_experts_per_tok": 10, "norm_topk_prob": True}
_DENSE = {**_DEFAULTS, "num_key_value_heads": 4}
_MOE = {**_NEXT, "num_experts": 256, "num_experts_per_tok": 8}
_GATE = OutputGate("sigmoid", per_number=True, in_queries=True)


def read_next(config: Config, where: Path) -> ModelConfig:
    config = {**_NEXT, **_said(config)}
    step, plain = size(config, "decoder_sparse_step", where, default=1), integers(config, "mlp_only_layers", where)
    dense = dense_spec({"intermediate_size": 5632, **config}, where)
    experts = _experts(config, where) if config["num_experts"] else None

    def feed_forward(layer: int) -> DenseSpec | ExpertSpec:
        return dense if experts is None or layer in plain or (layer + 1) % step else experts

    return _model(config, where, "by key head", [feed_forward(layer) for layer in range(num_layers(config, where))])


def read_dense(config: Config, where: Path) -> ModelConfig:
    config = {**_DENSE, **_said(config)}
    return _model(config, where, "by part", [dense_spec(config, where)] * num_layers(config, where))


def read_moe(config: Config, where: Path) -> ModelConfig:
    """Its router always renormalises."""
    require_value(config, "norm_topk_prob", True, where)
    config = {**_MOE, **_said(config)}
    return _model(config, where, "by part", [_experts(config, where)] * num_layers(config, where))


def unused(config: ModelConfig) -> set[str]:
    """The layers that predict further tokens."""
    return unused_tensors(config) | {"mtp."}


def _model(
    config: Config, where: Path, stored: LinearStorage, forwards: Sequence[DenseSpec | ExpertSpec]
) -> ModelConfig:
    for key, value in (("use_sliding_window", False), ("attn_output_gate", True), ("mamba_ssm_dtype", "float32")):
        require_value(config, key, value, where)
    require_value(config, "hidden_act", "silu", where)
    interval = size(config, "full_attention_interval", where, default=4)
    kinds = layer_types(
        config,
        where,
        lambda index: LINEAR_ATTENTION if (index + 1) % interval else FULL_ATTENTION,
        (LINEAR_ATTENTION, FULL_ATTENTION),
    )
    if FULL_ATTENTION not in kinds:
        raise CheckpointError(
            f"{where}: layer_types has no {FULL_ATTENTION}, without which this model is not supported"
        )
    attention = replace(attention_spec(config, where, rotary_factor=0.25), qk_norm=True, gate=_GATE)
    linear = _linear(config, where, stored)
    layers = (
        LayerSpec(linear if kind == LINEAR_ATTENTION else attention, forward)
        for kind, forward in zip(kinds, forwards, strict=True)
    )
    return replace(model_config(config, where, tuple(layers)), unit_offset=True)


def _linear(config: Config, where: Path, stored: LinearStorage) -> LinearSpec:
    keys, heads = (size(config, f"linear_num_{each}_heads", where) for each in ("key", "value"))
    if heads % keys != 0:
        raise CheckpointError(
            f"{where}: linear_num_value_heads {heads} must be a multiple of linear_num_key_heads {keys}"
        )
    key_dim, value_dim = (size(config, f"linear_{each}_head_dim", where) for each in ("key", "value"))
    taps = size(config, "linear_conv_kernel_dim", where)
    if taps < 2:
        raise CheckpointError(f"{where}: linear_conv_kernel_dim {taps} is not supported, only 2 and more")
    return LinearSpec(keys, heads, key_dim, value_dim, taps, stored)


def _experts(config: Config, where: Path) -> ExpertSpec:
    number = size(config, "num_experts", where)
    router = RouterSpec(
        number,
        num_experts_per_token(config, number, where),
        RouterKind.SOFTMAX,
        renormalise=flag(config, "norm_topk_prob", where),
    )
    stacked = any(
        name.endswith(".mlp.experts.gate_up_proj") and not name.startswith("mtp.") for name in _tensors(where.parent)
    )
    return ExpertSpec(
        size(config, "moe_intermediate_size", where),
        router,
        shared_inner=size(config, "shared_expert_intermediate_size", where),
        shared_gate=True,
        stored=replace(qwen2.STORED, tensors="stacked", by_rows=True) if stacked else qwen2.STORED,
    )


def _tensors(folder: Path) -> set[str]:
    """Names of what the files hold; none where weights are dummies."""
    try:
        return set(tensor_files(folder))
    except CheckpointError:
        return set()


def _said(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}
