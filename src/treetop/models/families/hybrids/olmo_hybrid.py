"""OLMo Hybrid: gated delta nets in three layers of four, with norms before their halves, and the attention of OLMo 3 in
the others, with norms behind them and RoPE or none. A delta net's beta is up to 2, and its norm's eps is 1e-5.

Source: `transformers`' olmo_hybrid, whose defaults these are. Checkpoints call the norms of linear layers otherwise.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from treetop.checkpoints.config_fields import Config, flag, require_value, size, table
from treetop.kernels.rope import RopeSpec
from treetop.models.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    LayerSpec,
    LinearSpec,
    ModelConfig,
    NormNames,
    attention_spec,
    dense_spec,
    layer_types,
    model_config,
    num_layers,
)
from treetop.models.families import olmo
from treetop.types.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-6}
_BEFORE = NormNames("attention_layer_norm", "feedforward_layer_norm")


def read(config: Config, where: Path) -> ModelConfig:
    config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    require_value(config, "hidden_act", "silu", where)
    count = num_layers(config, where)
    last = count - 1 if count < 4 else 3

    def default(index: int) -> str:
        return FULL_ATTENTION if index % 4 == last else LINEAR_ATTENTION

    kinds = layer_types(config, where, default, (FULL_ATTENTION, LINEAR_ATTENTION))
    if FULL_ATTENTION not in kinds:
        raise CheckpointError(f"{where}: layer_types has no {FULL_ATTENTION}, without which this model does not load")
    attention = replace(attention_spec(config, where), whole_qk_norm=True)
    said = table(config, "rope_parameters", where) or config
    if said.get("rope_theta") is None:
        attention = replace(attention, rope=RopeSpec(attention.head_dim, attention.rope.theta, rotary_dim=0))
    dense = dense_spec(config, where)
    made = {
        FULL_ATTENTION: LayerSpec(attention, dense, olmo.NORMS),
        LINEAR_ATTENTION: LayerSpec(_linear(config, where), dense, _BEFORE),
    }
    return model_config(config, where, [made[kind] for kind in kinds])


def _linear(config: Config, where: Path) -> LinearSpec:
    heads = size(config, "num_attention_heads", where)
    keys, values = (size(config, f"linear_num_{each}_heads", where, default=heads) for each in ("key", "value"))
    if values % keys:
        raise CheckpointError(f"{where}: linear_num_value_heads {values} must be a multiple of {keys} key heads")
    key_dim = size(config, "linear_key_head_dim", where, default=int(0.75 * size(config, "hidden_size", where) / keys))
    return LinearSpec(
        keys,
        values,
        key_dim,
        size(config, "linear_value_head_dim", where, default=2 * key_dim),
        size(config, "linear_conv_kernel_dim", where, default=4),
        "by tensor",
        of_beta=2.0 if flag({"linear_allow_neg_eigval": True, **config}, "linear_allow_neg_eigval", where) else 1.0,
        norm_eps=1e-5,
    )
