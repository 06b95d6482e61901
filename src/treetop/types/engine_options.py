"""Options of `LLM` and `AsyncLLM` as an editor sees them. `EngineConfig` says what each does; a test ties the two."""

from collections.abc import Mapping
from typing import TypedDict

from treetop.types.config import (
    Algorithm,
    Backend,
    Calibration,
    DeviceName,
    DType,
    Exactness,
    ExactSums,
    Graphs,
    KVCacheDType,
    LinearPrefill,
    LoadFormat,
    MixedChunk,
    Recurrence,
    SchedulePolicy,
    SpeculativePolicy,
)
from treetop.types.constraint import JsonWhitespace


class EngineOptions(TypedDict, total=False):
    """Every field of `EngineConfig` but model and draft, which `LLM` takes by place. See docs/options.md."""

    speculative_algorithm: Algorithm | None
    speculative_suffix_lookup: bool
    speculative_suffix_cache_tokens: int
    speculative_mtp_recurrence: Recurrence
    speculative_eagle_recurrence: Recurrence
    speculative_draft_window_size: int | None
    speculative_draft_kv_cache_dtype: KVCacheDType | None
    speculative_policy: SpeculativePolicy | None
    speculative_shapes: str | None
    speculative_max_deferred: int | None
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_node_budget: int | None
    speculative_calibration: Calibration | None
    speculative_calibration_dir: str | None
    page_size: int | None
    max_running_requests: int | None
    context_length: int | None
    max_total_tokens: int | None
    mem_fraction_static: float
    chunked_prefill_size: int | None
    prefill_tokens_per_round: int | None
    target_gap_ms: float | None
    mixed_chunk: MixedChunk
    prefill_graph_max_tokens: int
    schedule_policy: SchedulePolicy
    disable_radix_cache: bool
    state_checkpoint_every: int | None
    state_checkpoint_memory: float | None
    kv_offloading_size: float | None
    kv_offloading_folder: str | None
    kv_offloading_disk_size: float | None
    enable_return_routed_experts: bool
    disable_logits_processors: bool
    attention_backend: Backend
    linear_attn_prefill_backend: LinearPrefill
    graphs: Graphs
    overlap: bool | None
    dtype: DType
    kv_cache_dtype: KVCacheDType
    exactness: Exactness
    exact_sums: ExactSums
    device: DeviceName
    load_format: LoadFormat
    compress_weights: bool | None
    dequantize_weights: bool | None
    quantize_activations: bool
    simulate_accept_length: float | None
    simulate_acceptance: str | None
    check_level: int
    lora_modules: tuple[str, ...] | Mapping[str, str]
    enable_lora: bool
    enable_draft_lora: bool
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int
    seed: int | None
    tp_size: int
    ep_size: int
    disable_custom_all_reduce: bool
    step_timeout: float
    structured_output_timeout: float
    structured_output_memory: int
    structured_output_whitespace: JsonWhitespace
    disaggregation_slots: int
    disaggregation_slot_bytes: int
