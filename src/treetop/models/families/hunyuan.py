"""Hunyuan of 2025, dense and with experts: norms of heads whose weights come after the rotation.

Source: `transformers`' hunyuan_v1_dense and hunyuan_v1_moe, whose defaults these are, and the configurations of
tencent/Hunyuan-7B-Instruct and tencent/Hunyuan-A13B-Instruct.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, real, require_value, size, table
from treetop.checkpoints.params import Param, renamed
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import (
    AttentionSpec,
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
from treetop.models.decoder import decoder_params
from treetop.types.errors import CheckpointError, shown

_ONLY = {"use_cla": False, "use_qk_norm": True, "mlp_bias": False, "moe_layer_num_skipped": 0, "norm_type": "rms"}


def read(config: Config, where: Path) -> ModelConfig:
    config = _checked(config, where)
    layer = LayerSpec(_attention(config, where), dense_spec(config, where))
    return model_config(config, where, [layer] * num_layers(config, where))


def read_moe(config: Config, where: Path) -> ModelConfig:
    config = _checked(config, where)
    config["num_experts_per_tok"] = _of_all(config, "moe_topk", 1, where)
    number, inner = size(config, "num_experts", where, default=1), size(config, "intermediate_size", where)
    for key, value in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        require_value({key: _of_all(config, key, value, where)}, key, value, where)
    chosen = num_experts_per_token(config, number, where)
    router = RouterSpec(number, chosen, RouterKind.SOFTMAX, renormalise=True)
    experts = ExpertSpec(inner, router, shared_inner=inner, stored=ExpertLayout(router="gate.wg", shared="shared_mlp"))
    return model_config(config, where, [LayerSpec(_attention(config, where), experts)] * num_layers(config, where))


def _checked(config: Config, where: Path) -> dict[str, Any]:
    """With defaults, and without what says nothing."""
    for key, value in _ONLY.items():
        require_value(config, key, value, where)
    require_value(config, "hidden_act", "silu", where)
    given = {key: value for key, value in config.items() if value is not None}
    if "head_dim" in given:
        require_value(given, "attention_head_dim", given["head_dim"], where)
    return {"rms_norm_eps": 1e-5, **({"head_dim": given["attention_head_dim"]} if _alone(given) else {}), **given}


def _alone(given: Config) -> bool:
    return "attention_head_dim" in given and "head_dim" not in given


def _of_all(config: Config, key: str, default: int, where: Path) -> Any:
    """A value that may be listed for each layer, where all are the same. Raises CheckpointError for others."""
    said = config.get(key, default)
    if not isinstance(said, list):
        return said
    if len({repr(each) for each in said}) != 1:
        raise CheckpointError(f"{where}: {key} must be the same in all layers, got {shown(said)}")
    return said[0]


def _attention(config: dict[str, Any], where: Path) -> AttentionSpec:
    """An alpha stretches theta as if the text were so much longer, whatever its length (NTK, arXiv:2309.00071)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = table(config, key, where)
        if rope.get("alpha"):
            theta = real(rope, "rope_theta", where, real(config, "rope_theta", where, 10000.0))
            hidden, heads = (size(config, each, where) for each in ("hidden_size", "num_attention_heads"))
            dim = size(config, "head_dim", where, default=hidden // heads)
            grown = theta * real(rope, "alpha", where) ** (dim / max(dim - 2, 1))
            config = {**config, key: {"rope_type": "default", "rope_theta": grown}}
    return replace(attention_spec(config, where), qk_norm=True, norm_weights="after")


def params(config: ModelConfig) -> list[Param]:
    """Norms of heads have names of their own."""
    names = {
        f".self_attn.{each}_norm.": f".self_attn.{word}_layernorm." for each, word in (("q", "query"), ("k", "key"))
    }
    return renamed(decoder_params(config), names)
