"""GLM-4.5 and 4.6: heads with partial RoPE, dense layers first, then routed experts and shared ones."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, size
from treetop.checkpoints.params import stored_tensors
from treetop.models.attention import attention_params
from treetop.models.config import (
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    dense_spec,
    model_config,
    num_layers,
)
from treetop.models.decoder import unused_tensors
from treetop.models.families import glm4
from treetop.models.feed_forward import feed_forward_params
from treetop.models.routers import corrected_sigmoids


def read(config: Config, where: Path) -> ModelConfig:
    attention = replace(glm4.attention(config, where, False), qk_norm=flag(config, "use_qk_norm", where))
    count, first = num_layers(config, where), size(config, "first_k_dense_replace", where, default=1)
    router = corrected_sigmoids(config, where)
    inner, shared = (
        size(config, "moe_intermediate_size", where),
        size(config, "n_shared_experts", where, default=1),
    )
    experts, dense = ExpertSpec(inner, router, shared_inner=shared * inner), dense_spec(config, where)

    def feed_forward(layer: int) -> DenseSpec | ExpertSpec:
        return dense if layer < first else experts

    return model_config(config, where, [LayerSpec(attention, feed_forward(layer)) for layer in range(count)])


def read_vl(config: Config, where: Path) -> ModelConfig:
    """The text of GLM-4.5V and 4.6V."""
    return read({"attention_bias": True, **config}, where)


def unused(config: ModelConfig) -> set[str]:
    """The layer after the last, which predicts a token more (MTP): targets have one and do not need it."""
    stored, hidden, layer = f"model.layers.{len(config.layers)}", config.hidden_size, config.layers[-1]
    params = [
        *attention_params(layer.attention, "", f"{stored}.self_attn", hidden, hidden),
        *feed_forward_params(layer.feed_forward, "", f"{stored}.mlp", hidden),
    ]
    return unused_tensors(config) | set(stored_tensors(params)) | {f"{stored}.{name}.weight" for name in _MTP}


_MTP = (
    *("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "eh_proj"),
    *("shared_head.norm", "shared_head.head", "embed_tokens"),
)
"""What a layer of MTP has beside what every layer has."""
