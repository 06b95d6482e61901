"""The targets that the recipe trains: nestling itself, and three smaller ones of other architectures, made as test data.

`hybrid` and `unwindowed` are GPT-OSS with two of four experts a token; they differ in their windows alone, so that one
can be compared with the other. `dense` is Qwen2, to which `head.py --kind mtp` adds a layer in MiMo's naming.
All have four layers, whose features the EAGLE-3 head reads in the same places.

Training runs GPT-OSS through two functions of our own, registered by name with `transformers`: attention with sinks
as one fused product, and experts without a loop over them, all computed for every token. They give the same numbers.
"""

from collections.abc import Callable

import torch
from common import CONTEXT, VOCAB_SIZE
from torch.nn import functional
from transformers import (
    AttentionInterface,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SINKS = "one_product_with_sinks"
EXPERTS = "every_expert"
WINDOW = 128
ROUTER_LOSS = 0.01

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def nestling() -> PreTrainedModel:
    """About 12.2 million parameters, the embedding tied to the output layer."""
    config = LlamaConfig(
        **COMMON,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1216,
        rope_theta=10000.0,
        attention_bias=False,
        mlp_bias=False,
    )
    return LlamaForCausalLM(config)


def _gpt_oss(kinds: tuple[str, str]) -> PreTrainedModel:
    """3.8 million parameters. kinds: of the even and of the odd layers."""
    config = GptOssConfig(
        **COMMON,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=160,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=[*kinds, *kinds],
        rope_parameters=YARN,
        router_aux_loss_coef=ROUTER_LOSS,
    )
    return GptOssForCausalLM(config)


def hybrid() -> PreTrainedModel:
    """Windows and full layers in turn, as GPT-OSS has them."""
    return _gpt_oss(("sliding_attention", "full_attention"))


def unwindowed() -> PreTrainedModel:
    """The hybrid with full layers only."""
    return _gpt_oss(("full_attention", "full_attention"))


def dense() -> PreTrainedModel:
    """3.0 million parameters, biases of q, k and v."""
    config = Qwen2Config(
        **COMMON,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        rope_parameters=ROPE,
        use_sliding_window=False,
    )
    return Qwen2ForCausalLM(config)


VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "nestling": nestling,
    "hybrid": hybrid,
    "unwindowed": unwindowed,
    "dense": dense,
}


def use_fast_functions(model: PreTrainedModel) -> None:
    """Run GPT-OSS by the functions below; other models stay as they are."""
    if isinstance(model, GptOssForCausalLM):
        AttentionInterface.register(SINKS, attend_with_sinks)
        AttentionMaskInterface.register(SINKS, sdpa_mask)
        ExpertsInterface.register(EXPERTS, every_expert)
        model.config._attn_implementation = SINKS
        model.config._experts_implementation = EXPERTS


def attend_with_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    s_aux: torch.Tensor,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """Attention whose softmax counts one logit a head that has no value: `s_aux` [heads].

    query [batch, heads, n, dim], key and value [batch, kv_heads, m, dim]; attention_mask [batch, 1, n, m] bool, or None
    for a causal one (n = m) or none (n = 1). Returns [batch, n, heads, dim].
    """
    attend = _attend_one if query.shape[2] == 1 else _attend_many
    return attend(query, key, value, attention_mask, scaling, s_aux).transpose(1, 2), None


def _attend_one(query, key, value, mask, scaling, sinks):
    """One query a row: the heads that share a key in one product."""
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [batch, kv_heads, group, dim]
    scores = (grouped @ key.transpose(-1, -2)).float() * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    of_head = sinks.float().view(1, key.shape[1], -1, 1).expand(len(query), -1, -1, -1)
    weights = torch.cat([scores, of_head], dim=-1).softmax(-1)[..., :-1].to(value.dtype)
    return (weights @ value).flatten(1, 2).unsqueeze(2)


def _attend_many(query, key, value, mask, scaling, sinks):
    """The sink is a key before all others: features past the last one give its logit, and its value is 0.

    A row before the others makes the causal mask fit; it is dropped.
    """
    batch, dim = len(query), query.shape[-1]
    group, extra = query.shape[1] // key.shape[1], 8  # fused kernels want multiples of 8
    padded = [functional.pad(each, (0, extra, 1, 0)) for each in (query, key, value)]
    q, k, v = padded[0], padded[1].repeat_interleave(group, 1), padded[2].repeat_interleave(group, 1)
    unit = functional.pad(q.new_ones(1), (dim, extra - 1))
    q = q + unit
    sink = (sinks / scaling)[:, None, None] * unit  # [heads, 1, dim + extra]
    k = torch.cat([sink.expand(batch, -1, -1, -1).to(k.dtype), k[:, :, 1:]], dim=2)
    if mask is None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    else:
        mask = mask[:1] if mask.stride(0) == 0 else mask  # expanded: the same for all rows
        mask = functional.pad(mask, (1, 0, 1, 0), value=True)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out[:, :, 1:, :dim]


def every_expert(
    experts: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts for every token; those not chosen weigh 0. hidden [tokens, width], chosen and weights [tokens, k]."""
    shares = weights.new_zeros(len(hidden), experts.num_experts).scatter(1, chosen, weights)
    gate_up = hidden @ experts.gate_up_proj + experts.gate_up_proj_bias[:, None]  # [experts, tokens, 2 * inner]
    gated = experts._apply_gate(gate_up) * shares.T[..., None]
    side_by_side = gated.transpose(0, 1).flatten(1)  # [tokens, experts * inner]
    return (side_by_side @ experts.down_proj.flatten(0, 1) + shares @ experts.down_proj_bias).to(hidden.dtype)
