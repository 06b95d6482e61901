"""Layers of Mamba-2 among attention: Bamba, whose attention turns half of a head, and Granite 4 (`families.granite`);
and Falcon-H1, whose layers have both side by side, and multipliers of nearly everything.

Source: `transformers`' bamba, granitemoehybrid and falcon_h1, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.checkpoints.params import Param, renamed
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    BothSpec,
    DenseSpec,
    LayerSpec,
    Mixer,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    model_config,
    num_layers,
)
from treetop.models.decoder import decoder_params
from treetop.models.mixers.recurrences import MambaSpec
from treetop.types.errors import CheckpointError, shown

KEYS = ("mamba_d_state",)
_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_BAMBA = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_FALCON = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024}
_NORMS = NormNames(feed_forward="pre_ff_layernorm")
_SPELLINGS = {"mamba": LINEAR_ATTENTION, "attention": FULL_ATTENTION}
"""What configs of before `transformers` 5 call the types of layers."""


def read_bamba(config: Config, where: Path) -> ModelConfig:
    config = {**_BAMBA, **_given(config)}
    full = config.get("attn_layer_indices") or []
    if config.get("layer_types") is None:
        count = num_layers(config, where)
        config["layer_types"] = [FULL_ATTENTION if i in full else LINEAR_ATTENTION for i in range(count)]
    spec = attention_spec(config, where, rotary_factor=0.5)
    mixers: dict[str, Mixer] = {FULL_ATTENTION: spec, LINEAR_ATTENTION: mamba_spec(config, where)}
    dense = dense_spec(config, where)
    return model_config(config, where, [LayerSpec(mixers[kind], dense, _NORMS) for kind in kinds(config, where)])


def read_falcon(config: Config, where: Path) -> ModelConfig:
    """Keys are multiplied too, which scores say here."""
    config = {**_FALCON, **_given(config)}
    require_value(config, "projectors_bias", flag(config, "mamba_proj_bias", where), where)
    spec = attention_spec(config, where)
    spec = replace(spec, scale=spec.scale * real(config, "key_multiplier", where, 1.0))
    normed = flag(config, "mamba_rms_norm", where)
    mamba = replace(
        mamba_spec(config, where),
        norm=None if not normed else "gate first" if config.get("mamba_norm_before_gate") is False else "norm first",
        scales=_numbers(config, "ssm_multipliers", 5, where),
        of_input=real(config, "ssm_in_multiplier", where, 1.0),
        of_output=real(config, "ssm_out_multiplier", where, 1.0),
    )
    both = BothSpec(
        spec,
        mamba,
        real(config, "attention_in_multiplier", where, 1.0),
        real(config, "attention_out_multiplier", where, 1.0),
    )
    gate, down = _numbers(config, "mlp_multipliers", 2, where)
    dense: DenseSpec = replace(dense_spec(config, where), of_gate=gate, of_output=down)
    return replace(
        model_config(config, where, [LayerSpec(both, dense, _NORMS)] * num_layers(config, where)),
        embedding_scale=real(config, "embedding_multiplier", where, 1.0),
        logits_scale=real(config, "lm_head_multiplier", where, 1.0),
    )


def params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), {".mlp.": ".feed_forward.", "model.norm.": "model.final_layernorm."})


def mamba_spec(config: Config, where: Path) -> MambaSpec:
    """Of the keys that begin with `mamba_`. Raises CheckpointError for sizes that do not fit."""
    config = {**_DEFAULTS, **_given(config)}
    heads, groups = size(config, "mamba_n_heads", where), size(config, "mamba_n_groups", where)
    inner = size(config, "mamba_expand", where) * size(config, "hidden_size", where)
    inner = size(config, "mamba_d_ssm", where, default=inner)
    if config["mamba_d_head"] == "auto":
        config["mamba_d_head"] = inner // heads
    dim = size(config, "mamba_d_head", where)
    if heads % groups or heads * dim != inner:
        raise CheckpointError(
            f"{where}: mamba_n_heads {heads} must be a multiple of mamba_n_groups {groups}, and times mamba_d_head"
            f" {dim} be the {inner} that mamba_d_ssm or mamba_expand gives"
        )
    return MambaSpec(
        heads,
        dim,
        groups,
        size(config, "mamba_d_state", where),
        size(config, "mamba_d_conv", where),
        conv_bias=flag(config, "mamba_conv_bias", where),
        bias=flag(config, "mamba_proj_bias", where),
        limits=limits(config, where),
        norm_groups=groups,
        norm_eps=real(config, "rms_norm_eps", where),
    )


def limits(config: Config, where: Path) -> tuple[float, float]:
    """`time_step_limit`, of a token's step; none by default. `transformers` writes infinity as an object."""
    said = config.get("time_step_limit")
    if said is None:
        return 0.0, float("inf")
    if isinstance(said, list):
        said = [float("inf") if each == {"__float__": "Infinity"} else each for each in said]
    if not isinstance(said, list) or len(said) != 2 or not all(type(each) in (int, float) for each in said):
        raise CheckpointError(f"{where}: time_step_limit must be two numbers, got {shown(said)}")
    return float(said[0]), float(said[1])


def kinds(config: Config, where: Path) -> list[str]:
    """Of every layer, whatever the spelling; without `layer_types` all are Mamba's."""
    count, said = num_layers(config, where), config.get("layer_types")
    if said is None:
        said = [LINEAR_ATTENTION] * count
    found = [_SPELLINGS.get(each, each) for each in said] if isinstance(said, list) else []
    if len(found) != count or any(each not in _SPELLINGS.values() for each in found):
        raise CheckpointError(
            f"{where}: layer_types must name {FULL_ATTENTION} or {LINEAR_ATTENTION} for each of {count} layers"
        )
    return found


def _numbers(config: Config, key: str, count: int, where: Path) -> Any:
    said = config.get(key)
    if said is None:
        return (1.0,) * count
    if not isinstance(said, list) or len(said) != count or not all(type(each) in (int, float) for each in said):
        raise CheckpointError(f"{where}: {key} must be {count} numbers, got {shown(said)}")
    return tuple(map(float, said))


def _given(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}
