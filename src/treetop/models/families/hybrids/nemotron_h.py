"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, NoPE attention, a feed-forward or
experts alone, behind one norm. No feed-forward has a gate: its activation is relu(x)^2. Experts may be narrower than
the layer, between two products of all, beside a shared one that is not.

`time_step_limit` bounds Mamba-2's steps. `transformers` 5.24 bounds those of a prompt from below by `time_step_min`
instead, and those of single tokens by nothing.
Source: `transformers`' nemotron_h, whose defaults these are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.moe.experts import Activation
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    AbsentSpec,
    AttentionSpec,
    ExpertLayout,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    model_config,
)
from treetop.models.decoder import decoder_params, unused_tensors
from treetop.models.families.hybrids.mamba import limits
from treetop.models.families.ungated import ungated_spec
from treetop.models.mixers.recurrences import MambaSpec
from treetop.models.routers import corrected_sigmoids
from treetop.types.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "norm_topk_prob": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_ONE_NORM = NormNames("norm", None)
_NAMES = {
    ".self_attn.": ".mixer.",
    ".mamba.": ".mixer.",
    ".mlp.": ".mixer.",
    "model.layers.": "backbone.layers.",
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_SPELLINGS = {"mamba": "linear_attention", "attention": "full_attention"}


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    for key, value in (("attention_bias", False), ("sliding_window", None), ("mamba_hidden_act", "silu")):
        require_value(config, key, value, where)
    kinds = _kinds(config, where)
    config |= {"num_hidden_layers": len(kinds), "rms_norm_eps": real(config, "layer_norm_epsilon", where, 1e-5)}
    made = {kind: _layer(config, kind, where) for kind in dict.fromkeys(kinds)}
    return model_config(config, where, [made[kind] for kind in kinds])


def params(config: ModelConfig) -> list[Param]:
    return renamed(decoder_params(config), _NAMES)


def unused(config: ModelConfig) -> set[str]:
    """The layers that predict further tokens."""
    return unused_tensors(config) | {"mtp."}


def _kinds(config: Config, where: Path) -> list[str]:
    """Of every layer, by its list or by letters."""
    said, letters = config.get("layers_block_type", config.get("layer_types")), config.get("hybrid_override_pattern")
    if said is None and isinstance(letters, str):
        said = [_LETTERS.get(letter, letter) for letter in letters]
    found = [str(_SPELLINGS.get(each, each)) for each in said] if isinstance(said, list) else []
    if not found or any(each not in _LETTERS.values() for each in found):
        names = ", ".join(_LETTERS.values())
        raise CheckpointError(
            f"{where}: layers_block_type must name each layer's kind, or hybrid_override_pattern by its letter: {names}"
        )
    return found


def _layer(config: Config, kind: str, where: Path) -> LayerSpec:
    if kind == "linear_attention":
        return LayerSpec(_mamba(config, where), AbsentSpec(), _ONE_NORM)
    if kind == "full_attention":
        return LayerSpec(_attention(config, where), AbsentSpec(), _ONE_NORM)
    if kind == "mlp":
        bias = flag(config, "mlp_bias", where)
        return LayerSpec(AbsentSpec(), ungated_spec(config, where, "relu2", "mlp_hidden_act", bias=bias), _ONE_NORM)
    return LayerSpec(AbsentSpec(), _experts(config, where), _ONE_NORM)


def _attention(config: Config, where: Path) -> AttentionSpec:
    spec = attention_spec({**config, "partial_rotary_factor": None}, where)
    return replace(spec, rope=RopeSpec(spec.head_dim, spec.rope.theta, rotary_dim=0))


def _mamba(config: Config, where: Path) -> MambaSpec:
    heads, groups = size(config, "mamba_num_heads", where), size(config, "n_groups", where)
    if heads % groups:
        raise CheckpointError(f"{where}: mamba_num_heads {heads} must be a multiple of n_groups {groups}")
    return MambaSpec(
        heads,
        size(config, "mamba_head_dim", where),
        groups,
        size(config, "ssm_state_size", where),
        size(config, "conv_kernel", where),
        conv_bias=flag(config, "use_conv_bias", where),
        bias=flag(config, "use_bias", where),
        limits=limits(config, where),
        norm_groups=groups,
        norm_eps=real(config, "rms_norm_eps", where),
    )


def _experts(config: Config, where: Path) -> ExpertSpec:
    require_value(config, "mlp_hidden_act", "relu2", where)
    require_value(config, "mlp_bias", False, where)
    latent = config.get("moe_latent_size")
    return ExpertSpec(
        size(config, "moe_intermediate_size", where),
        corrected_sigmoids(config, where),
        Activation("relu"),
        shared_inner=size(config, "moe_shared_expert_intermediate_size", where),
        latent=0 if latent is None else size(config, "moe_latent_size", where),
        stored=ExpertLayout(each=("up_proj", "up_proj", "down_proj")),
    )
