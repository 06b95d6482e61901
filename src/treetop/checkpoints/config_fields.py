"""Values of a `config.json`, each checked for its type and its bounds. An error names the file and the key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.checkpoints.json_file import MAX_TOKENS
from treetop.types.errors import CheckpointError, shown

Config = Mapping[str, Any]

_MAX_HEADS, _MAX_WIDTH, _MAX_POSITIONS, _MAX_EXPERTS = 2**10, 2**20, 2**31, 2**10
_BOUNDS: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 2**10),
    "num_layers": (1, 2**9),
    "num_attention_heads": (1, _MAX_HEADS),
    "num_key_value_heads": (1, _MAX_HEADS),
    "head_dim": (2, 2**12),
    "hidden_size": (1, _MAX_WIDTH),
    "backbone_hidden_size": (1, _MAX_WIDTH),
    "num_centroids": (1, 2**20),
    "centroid_intermediate_top_k": (1, 2**20),
    "target_hidden_size": (1, _MAX_WIDTH),
    "intermediate_size": (1, _MAX_WIDTH),
    "vocab_size": (1, MAX_TOKENS),
    "draft_vocab_size": (1, MAX_TOKENS),
    "max_position_embeddings": (1, _MAX_POSITIONS),
    "original_max_position_embeddings": (1, _MAX_POSITIONS),
    "sliding_window": (1, _MAX_POSITIONS),
    "swa_window_size": (1, _MAX_POSITIONS),
    "block_size": (2, 64),
    "markov_rank": (1, 2**14),
    "selector_rank": (1, 2**14),
    "selector_top_k": (1, 2**10),
    "conv_kernel_size": (1, 64),
    "conv_group_size": (1, _MAX_WIDTH),
    "gru_hidden_dim": (1, _MAX_WIDTH),
    "emb_dim": (1, _MAX_WIDTH),
    "pure_draft_prefix_len": (0, 64),
    "max_window_layers": (0, 2**10),
    "sliding_window_pattern": (1, 2**10),
    "full_attention_interval": (1, 2**10),
    "linear_num_key_heads": (1, _MAX_HEADS),
    "linear_num_value_heads": (1, _MAX_HEADS),
    "linear_key_head_dim": (1, 2**12),
    "linear_value_head_dim": (1, 2**12),
    "linear_conv_kernel_dim": (1, 2**6),
    "query_pre_attn_scalar": (1e-6, 1e6),
    "rope_local_base_freq": (1.0, 1e15),
    "num_experts": (1, _MAX_EXPERTS),
    "num_local_experts": (1, _MAX_EXPERTS),
    "n_routed_experts": (1, _MAX_EXPERTS),
    "zero_expert_num": (0, _MAX_EXPERTS),
    "expert_ffn_hidden_size": (1, _MAX_WIDTH),
    "num_experts_per_tok": (1, _MAX_EXPERTS),
    "n_shared_experts": (0, 2**6),
    "n_group": (1, _MAX_EXPERTS),
    "topk_group": (1, _MAX_EXPERTS),
    "moe_intermediate_size": (1, _MAX_WIDTH),
    "decoder_sparse_step": (1, 2**10),
    "first_k_dense_replace": (0, 2**10),
    "num_nextn_predict_layers": (0, 2**6),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "swiglu_alpha": (1e-6, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "full_attn_alpha_factor": (1e-6, 1e6),
    "full_attn_beta_factor": (1e-6, 1e6),
    "linear_attn_alpha_factor": (1e-6, 1e6),
    "linear_attn_beta_factor": (1e-6, 1e6),
    "mlp_alpha_factor": (1e-6, 1e6),
    "mlp_beta_factor": (1e-6, 1e6),
    "scale_emb": (1e-6, 1e6),
    "scale_depth": (1e-6, 1e6),
    "dim_model_base": (1, _MAX_WIDTH),
    "logits_scaling": (1e-6, 1e6),
    "no_rope_layer_interval": (1, 2**10),
    "attention_chunk_size": (1, _MAX_POSITIONS),
    "floor_scale": (1, _MAX_POSITIONS),
    "attn_scale": (1e-6, 1e3),
    "interleave_moe_layer_step": (1, 2**10),
    "intermediate_size_mlp": (1, _MAX_WIDTH),
    "rotary_dim": (2, 2**12),
    "num_shared_experts": (0, 2**6),
    "router_scaling_factor": (1e-6, 1e6),
    "moe_num_experts": (1, _MAX_EXPERTS),
    "moe_k": (1, _MAX_EXPERTS),
    "moe_topk": (1, _MAX_EXPERTS),
    "alpha": (1e-6, 1e9),
    "moe_num_shared_experts": (0, 2**6),
    "moe_layer_start_index": (0, 2**10),
    "moe_layer_end_index": (0, 2**10),
    "moe_layer_interval": (1, 2**10),
    "moe_routed_scaling_factor": (1e-6, 1e6),
    "shared_expert_intermediate_size": (0, _MAX_WIDTH),
    "shared_intermediate_size": (1, _MAX_WIDTH),
    "share_expert_dim": (0, _MAX_WIDTH),
    "num_sliding_attention_heads": (1, _MAX_HEADS),
    "llama_4_scaling_beta": (1e-6, 1e3),
    "final_logit_softcapping": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e6),
    "global_head_dim": (2, 2**12),
    "num_global_key_value_heads": (1, _MAX_HEADS),
    "hidden_size_per_layer_input": (0, 2**14),
    "vocab_size_per_layer_input": (1, MAX_TOKENS),
    "num_kv_shared_layers": (0, 2**10),
    "top_k_experts": (1, _MAX_EXPERTS),
    "v_head_dim": (1, 2**12),
    "kv_lora_rank": (1, 2**13),
    "q_lora_rank": (1, 2**14),
    "qk_nope_head_dim": (1, 2**12),
    "qk_rope_head_dim": (2, 2**12),
    "index_n_heads": (1, _MAX_HEADS),
    "index_head_dim": (2, 2**12),
    "index_topk": (1, _MAX_POSITIONS),
    "index_topk_freq": (1, 2**10),
    "index_skip_topk_offset": (0, 2**10),
    "swa_num_attention_heads": (1, _MAX_HEADS),
    "swa_num_key_value_heads": (1, _MAX_HEADS),
    "sliding_window_size": (1, _MAX_POSITIONS),
    "attention_value_scale": (1e-6, 1e6),
    "rms_norm_eps": (1e-30, 1.0),
    "layer_norm_eps": (1e-30, 1.0),
    "layer_norm_epsilon": (1e-30, 1.0),
    "norm_epsilon": (1e-30, 1.0),
    "norm_eps": (1e-30, 1.0),
    "conv_L_cache": (2, 64),
    "linear_head_dim": (1, _MAX_WIDTH),
    "short_conv_kernel_size": (2, 2**8),
    "layer_group_size": (1, 2**10),
    "kda_lower_bound": (-1e3, -1e-3),
    "linear_num_heads": (1, _MAX_HEADS),
    "mamba_num_heads": (1, _MAX_HEADS),
    "mamba_head_dim": (1, _MAX_WIDTH),
    "n_groups": (1, _MAX_HEADS),
    "ssm_state_size": (1, _MAX_WIDTH),
    "conv_kernel": (2, 64),
    "moe_latent_size": (1, _MAX_WIDTH),
    "moe_shared_expert_intermediate_size": (1, _MAX_WIDTH),
    "mamba_n_heads": (1, _MAX_HEADS),
    "mamba_d_head": (1, _MAX_WIDTH),
    "mamba_n_groups": (1, _MAX_HEADS),
    "mamba_d_state": (1, _MAX_WIDTH),
    "mamba_d_conv": (2, 64),
    "mamba_d_ssm": (1, _MAX_WIDTH),
    "mamba_expand": (1, 64),
    "key_multiplier": (1e-6, 1e6),
    "ssm_in_multiplier": (1e-6, 1e6),
    "ssm_out_multiplier": (1e-6, 1e6),
    "attention_in_multiplier": (1e-6, 1e6),
    "attention_out_multiplier": (1e-6, 1e6),
    "lm_head_multiplier": (1e-6, 1e6),
    "block_ffn_dim_multiplier": (1e-6, 1e6),
    "block_multiple_of": (1, _MAX_WIDTH),
    "num_dense_layers": (0, 2**10),
    "logit_scale": (1e-6, 1e6),
    "qk_scale_factor": (1e-6, 1e6),
    "output_multiplier": (1e-6, 1e6),
    "post_norm_eps": (1e-30, 1.0),
    "rotary_pct": (1e-6, 1.0),
    "rotary_emb_base": (1.0, 1e15),
    "num_kv_heads": (1, _MAX_HEADS),
    "ffn_hidden_size": (1, _MAX_WIDTH),
    "num_ln_in_parallel_attn": (1, 2),
    "rope_theta": (1.0, 1e15),
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "partial_rotary_factor": (1e-6, 1.0),
}
"""Least and most of every number that is read. Real models lie far within; beyond, sizes of tensors overflow."""


def size(config: Config, key: str, where: Path, default: int | None = None) -> int:
    return int(_bounded(config, key, where, default, "an integer", (int,)))


def real(config: Config, key: str, where: Path, default: float | None = None) -> float:
    return float(_bounded(config, key, where, default, "a number", (int, float)))


def _bounded(
    config: Config, key: str, where: Path, default: float | None, what: str, kinds: tuple[type[int | float], ...]
) -> int | float:
    """The number at `key`, or the default. Raises CheckpointError unless it is of its kind and within its bounds."""
    value = config.get(key)
    if value is None:
        value = default
    minimum, maximum = _BOUNDS[key]
    if not isinstance(value, kinds) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise CheckpointError(f"{where}: {key} must be {what} from {minimum} to {maximum}, got {shown(value)}")
    return value


def flag(config: Config, key: str, where: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} must be true or false, got {shown(value)}")
    return bool(value)


def table(config: Config, key: str, where: Path) -> Config:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, got {shown(value)}")
    return value or {}


def require_value(config: Config, key: str, value: object, where: Path) -> None:
    """Raises CheckpointError if a key is there with another value than the only one that is supported."""
    found = config.get(key)
    if found is not None and found != value:
        raise CheckpointError(f"{where}: {key} = {shown(found)} is not supported, only {shown(value)}")
