"""From a configuration to a plan: specs, capacity algebra, and what each part will take. No weight is read."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from treetop.attention.auto import page_size_for
from treetop.attention.capabilities import Capabilities, Need
from treetop.attention.contract import as_it_is
from treetop.attention.registry import BACKENDS, fallback, require
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import LoadContext, compute_device, compute_dtype, weight_bytes
from treetop.checkpoints.lora_folder import LoraFolder
from treetop.checkpoints.params import check_activations
from treetop.drafts.protocol import DrafterSpec
from treetop.drafts.registry import drafter_spec, lookup_beside, ngram_spec
from treetop.engine.buffers import make_round_buffers
from treetop.engine.kv_transfer import KVTransferSpec
from treetop.engine.memory import (
    DEFERRED_ON_CPU,
    DEFERRED_ON_GPU,
    LARGEST_PROMPTS,
    MIN_CHUNK_OF_CPU,
    MIN_CHUNK_OF_GPU,
    MIXED_CHUNK_OF_GPU,
    PREFILL_PARTS,
    ROWS_OF_CPU,
    ROWS_OF_GPU,
    SMALL_CHUNK,
    USUAL_CHUNK_OF_GPU,
    Budget,
    DeviceMemory,
    MemoryUse,
    chunk_of_gpu,
    fit,
    memory_of,
    step_bytes,
)
from treetop.engine.routed_experts import expert_shape
from treetop.engine.startup.adapters import adapters_of, draft_adapters_of, read_adapters
from treetop.engine.startup.default_policy import with_policy
from treetop.engine.startup.default_rows import allowance_of_a_gpu, tokens_of_a_row
from treetop.engine.startup.exactness import chosen_profile
from treetop.engine.startup.exactness_table import settled
from treetop.engine.startup.host_layout import check_host_tier, staging_bytes, with_copied, with_host
from treetop.engine.startup.layer_groups import backend_need, causal_blocks, group_needs, kv_groups, state_groups
from treetop.engine.startup.state_limits import uses_fla, with_checkpoints, within_states
from treetop.engine.startup.weight_copies import CpuWeights, packing, with_copies, with_second_orders
from treetop.engine.state import make_state
from treetop.kernels.kv import FP8_CAPABILITY, kv_dtype
from treetop.kernels.profile import profile_of
from treetop.kernels.sampling.process import MAX_COUNT
from treetop.models.config import ModelConfig, read_config
from treetop.models.registry import TargetSpec, target_spec
from treetop.speculative.profile import RANKS, AcceptanceProfile, read_profile
from treetop.types.config import PAGE_SIZE, EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.kv import KVFormat
from treetop.types.layout import MAX_PROMPT_BLOCK, KVGroup, Layout, PrefillCosts
from treetop.types.parallel import SINGLE_RANK, Parallel, PlaceholderRank
from treetop.types.sampling import num_classes
from treetop.weights.kv_scales import check_scheme


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything that is known before a weight is read.

    layout: with pools as large as the estimate lets them be.
    need: what attention has to do.
    use: that estimate of memory.
    weights: whose products are chosen by timing.
    kv_transfer: what staging slots hold, if there are any.
    profile: by which acceptance is simulated, if it is.
    adapters: of `--lora-modules`, checked.
    rows: how many there are and why, in words, if the options do not say.
    """

    config: EngineConfig
    target: TargetSpec
    draft: DrafterSpec | None
    layout: Layout
    place: LoadContext
    need: Need
    use: MemoryUse
    weights: CpuWeights
    kv_transfer: KVTransferSpec | None
    profile: AcceptanceProfile | None
    adapters: tuple[LoraFolder, ...] = ()
    rows: str = ""


def plan_engine(
    config: EngineConfig, parallel: Parallel | None = None, expert_ranks: Parallel | None = None, probes: bool = True
) -> EnginePlan:
    """Read the checkpoints' configs, and check every option against them and against the device's memory.

    parallel, expert_ranks: which rank this is; None for the first of ranks that have not met. probes: of `--exactness
    bits`; without them they count as passed. The plan's configuration says what the given one leaves to device and
    memory. Raises UserError for what cannot work, before any weight is read.
    """
    config = settled(with_policy(config), probes).config
    parallel = parallel or (SINGLE_RANK if config.tp_size == 1 else PlaceholderRank(config.tp_size))
    expert_ranks = expert_ranks or (SINGLE_RANK if config.ep_size == 1 else PlaceholderRank(config.ep_size))
    config = _with_page_size(config, parallel, expert_ranks)
    engine_plan = _plan_own(config, parallel, expert_ranks, probes)
    if isinstance(expert_ranks, PlaceholderRank):
        return engine_plan
    exact = int(engine_plan.place.profile.batch_invariant)
    if expert_ranks.minimum(exact) != -expert_ranks.minimum(-exact):
        raise ConfigError(
            f"--exactness auto: it is {config.exactness} here and not so on another rank, whose device or probes"
            " differ; use --exactness bits or ties on all"
        )
    # Steps of all ranks have one size, and a request gets the same bits on any of them.
    own = engine_plan.layout.max_requests, engine_plan.layout.chunk, int(engine_plan.place.compressed)
    agreed = tuple(expert_ranks.minimum(number) for number in own)
    if own == agreed:
        return engine_plan
    config = replace(config, max_running_requests=agreed[0], chunked_prefill_size=agreed[1])
    return _plan_rows(replace(config, compress_weights=bool(agreed[2])), parallel, expert_ranks, probes)


def _with_page_size(config: EngineConfig, parallel: Parallel, expert_ranks: Parallel) -> EngineConfig:
    """The configuration with `--page-size`: as asked, or as the attention backend reads pages fastest, which ranks that
    have met agree on."""
    if config.page_size is not None:
        return config
    device, target = compute_device(config.device), target_spec(resolve_folder(config.model))
    dtype, exact = compute_dtype(config.dtype, device), profile_of(config.exactness, device).exact_attention
    groups = group_needs(target.config, None, parallel.size)
    fp8 = config.fp8_kv or (config.speculates and config.fp8_draft_kv)
    size = page_size_for(config.attention_backend, Need(dtype, device, None, groups, exact=exact, fp8_kv=fp8))
    if config.state_checkpoint_every is not None and config.state_checkpoint_every % size:
        size = PAGE_SIZE
    for ranks in (parallel, expert_ranks):
        size = size if isinstance(ranks, PlaceholderRank) else ranks.minimum(size)
    return replace(config, page_size=size)


def _plan_own(config: EngineConfig, parallel: Parallel, expert_ranks: Parallel, probes: bool) -> EnginePlan:
    """The plan by this rank's own memory."""
    if config.max_running_requests is not None:
        return _plan_rows(config, parallel, expert_ranks, probes)
    *many, fewest = ROWS_OF_CPU if compute_device(config.device).type == "cpu" else ROWS_OF_GPU
    tokens, source = tokens_of_a_row(target_spec(resolve_folder(config.model)).folder, config.load_format == "dummy")
    for rows in many:
        with suppress(CapacityError):
            engine_plan = _plan_rows(replace(config, max_running_requests=rows), parallel, expert_ranks, probes)
            held, need = pool_tokens_at_last(engine_plan), rows * min(engine_plan.layout.max_context, tokens)
            if held >= need:
                return replace(engine_plan, rows=f"{rows} rows: K/V hold {held} tokens, these need {need}, {source}")
    engine_plan = _plan_rows(replace(config, max_running_requests=fewest), parallel, expert_ranks, probes)
    return replace(engine_plan, rows=f"{fewest} rows, the fewest: K/V hold {pool_tokens_at_last(engine_plan)} tokens")


def pool_tokens_at_last(engine_plan: EnginePlan) -> int:
    """Tokens of the plan's pools once a start has measured what steps take and captured its rounds, by estimate.

    Raises CapacityError if not one request fits beside these.
    """
    config, layout, place, model = engine_plan.config, engine_plan.layout, engine_plan.place, engine_plan.target.config
    if config.max_total_tokens is not None or place.device.type == "cpu":
        return layout.pool_tokens
    room = allowance_of_a_gpu(layout, model.hidden_size, model.vocab_size, not config.disable_logits_processors)
    return fit(layout, place.dtype.itemsize, replace(engine_plan.use.budget, allowance=room), None).pool_tokens


def _plan_rows(config: EngineConfig, parallel: Parallel, expert_ranks: Parallel, probes: bool) -> EnginePlan:
    """The plan for a given number of rows."""
    target = target_spec(resolve_folder(config.model))
    config = within_states(config, target.config)
    if config.ep_size > 1 and not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    draft = read_draft_spec(config, target) if config.speculates else None
    device = compute_device(config.device)
    check_kv_cache_dtype(config, target, device)
    check_quantized_activations(config, target, device)
    adapters = read_adapters(config, target, draft)
    layout = make_layout(config, target.config, draft, parallel.size)
    dtype = compute_dtype(config.dtype, device)
    layout = with_checkpoints(config, layout, dtype.itemsize)
    check_host_tier(config, device)
    layout = with_copied(config, layout, dtype.itemsize)
    layout, kv_transfer = _with_slots(config, layout, target.config, draft, dtype, parallel)
    dummy = config.load_format == "dummy"
    place = LoadContext(dtype, device, layout.max_positions, dummy, shapes=layout.shapes, parallel=parallel)
    place = replace(place, expert_ranks=expert_ranks, packed=packing(config), activations=config.quantize_activations)
    place = replace(place, profile=chosen_profile(config, target, place, adapters, probes))
    place = replace(place, fla=uses_fla(config, target.config, place))
    memory, static = memory_of_rank(place), _static_estimate(config, layout, target, draft, place, adapters)
    memory = DeviceMemory(memory.total, memory.free - static)
    allowance = cpu_allowance(config, memory, place, layout, target.config)
    budget = Budget(memory, static, allowance, config.mem_fraction_static, rest=rest_of_cpu(config, memory, place))
    budget = with_copies(config, place, budget, layout, target, draft)
    place = replace(place, compressed=budget.copies > 0)
    budget, weights = with_second_orders(config, place, budget, layout, target, draft)
    layout = with_host(config, fit(layout, dtype.itemsize, budget, config.max_total_tokens), dtype.itemsize)
    need = backend_need(layout, target.config, draft, place)
    if config.attention_backend != "auto":
        require(config.attention_backend, need)
    elif device.type == "cuda" and any(group.cap is not None for group in need.groups):
        require("triton", need)  # who wants plain operations there says so
    use = MemoryUse(layout, dtype.itemsize, budget)
    if config.compress_weights is None:
        config = replace(config, compress_weights=place.compressed)
    profile = _profile_of(config)
    return EnginePlan(config, target, draft, layout, place, need, use, weights, kv_transfer, profile, adapters)


def make_layout(config: EngineConfig, model: ModelConfig, draft: DrafterSpec | None, ranks: int = 1) -> Layout:
    """The capacity algebra of a configuration and its models; the pools as large as rows can use, or as asked.

    ranks: that share the models.
    """
    context = config.context_length or model.max_positions
    if context > model.max_positions:
        raise ConfigError(f"--context-length {context} exceeds the model's {model.max_positions} positions")
    if context - 1 > MAX_COUNT and not config.disable_logits_processors:
        raise ConfigError(
            f"--context-length {context}: penalties can count {MAX_COUNT} tokens; lower it, or use"
            " --disable-logits-processors"
        )
    assert config.page_size is not None, "plan_engine has chosen"
    experts = expert_shape(model) if config.enable_return_routed_experts else None
    groups = kv_groups(model, draft, ranks, config.fp8_kv, config.fp8_draft_kv, _stores(config), experts)
    block = None if draft is None else draft.block
    chunk, rows = config.chunked_prefill_size or _default_chunk(config, groups), config.max_running_requests
    assert rows is not None, "plan_engine has chosen"
    layout = Layout(
        shapes=config.shapes,
        page_size=config.page_size,
        max_requests=rows,
        max_context=context,
        chunk=min(chunk, rows * context),  # a step can hold no more
        groups=groups,
        pool_tokens=config.max_total_tokens or 0,
        max_in_flight=choose_max_in_flight(config),
        max_deferred=_max_deferred(config, context),
        block=0 if block is None else block.width,
        lead=block.width if block is not None and block.seen else 0,
        state_groups=state_groups(model, ranks),
        mixed=config.mixed_chunk != "off",
        prompt_sizes=_prompt_sizes(config, model, chunk),
        prefill_sizes=_prefill_sizes(config, model, chunk),
        prefill_blocks=_prefill_blocks(_power_of_two(chunk)) if _packs_prompts(config, model) else (),
        experts=experts,
    )
    if config.max_total_tokens is None:
        layout = replace(layout, pool_tokens=layout.tokens_for_all)
    layout.validate()
    return layout


def check_kv_cache_dtype(config: EngineConfig, target: TargetSpec, device: torch.device) -> None:
    """Raises ConfigError or CheckpointError where K/V cannot be what `--kv-cache-dtype` says, or the draft's option."""
    flag = (
        "--kv-cache-dtype" if config.fp8_kv else "--speculative-draft-kv-cache-dtype" if config.fp8_draft_kv else None
    )
    if flag is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"{flag} fp8_e4m3: {torch.cuda.get_device_name(device)} does not convert FP8, which needs compute"
            f" capability {'.'.join(map(str, FP8_CAPABILITY))}; use {flag} auto"
        )
    if config.fp8_kv and config.load_format != "dummy":
        check_scheme(read_config(target.folder), target.folder / "config.json")


def check_quantized_activations(config: EngineConfig, target: TargetSpec, device: torch.device) -> None:
    """Raises ConfigError where `--quantize-activations` cannot be honoured."""
    if not config.quantize_activations:
        return
    check_activations(target.params, target.folder)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"--quantize-activations: {torch.cuda.get_device_name(device)} has no products of FP8, which need compute"
            f" capability {'.'.join(map(str, FP8_CAPABILITY))}; drop the option"
        )


def _max_deferred(config: EngineConfig, context: int) -> int:
    """Tokens of a row that plain rounds may defer. A backend that plans on the host knows rounds only."""
    device = compute_device(config.device)
    able = BACKENDS[_attends(config, device)].capabilities
    if len(config.shapes) == 1 or able.needs_host_extents:
        return 0
    by_device = DEFERRED_ON_CPU if device.type == "cpu" else DEFERRED_ON_GPU
    asked = config.speculative_max_deferred
    return min(by_device if asked is None else asked, context - 1)


def _with_slots(
    config: EngineConfig, layout: Layout, model: ModelConfig, draft: DrafterSpec | None, dtype: torch.dtype,
    parallel: Parallel,
) -> tuple[Layout, KVTransferSpec | None]:  # fmt: skip
    """The layout with the staging slots that are asked for, and what they hold.

    Raises ConfigError or CapacityError for slots that cannot hold this model's tokens.
    """
    if not config.disaggregation_slots:
        return layout, None
    odd = [group for group in layout.groups if group.kv.width * group.kv.itemsize(dtype.itemsize) % 4]
    if odd:
        stored = kv_dtype(odd[0].kv, dtype)
        raise ConfigError(
            f"--disaggregation-slots: heads of KV group {odd[0].name} are not whole 32-bit words in {stored}"
        )
    state = make_state(layout, draft, model.hidden_size, None, dtype, _shape_alone, parallel=parallel)
    record, ranks = state.record.num_bytes, config.tp_size
    whole = kv_groups(model, draft, 1, config.fp8_kv, config.fp8_draft_kv, _stores(config))
    kv_transfer = KVTransferSpec.of(layout.groups, whole, dtype.itemsize, record, ranks)
    tokens = min(kv_transfer.own.tokens_per_slot(config.disaggregation_slot_bytes), layout.max_context)
    layout = replace(layout, disaggregation_slots=config.disaggregation_slots, slot_tokens=tokens)
    if config.chunked_prefill_size is None:  # no more than slots hold, to be taken while the next chunk is computed
        layout = replace(layout, chunk=min(layout.chunk, _power_of_two(config.disaggregation_slots * tokens)))
    return layout, kv_transfer


def _power_of_two(number: int) -> int:
    """The largest that is not above it."""
    return 1 << number.bit_length() - 1


def choose_max_in_flight(config: EngineConfig) -> int:
    """Steps in flight: 2 if host and device overlap, else 1. Raises ConfigError if --overlap cannot be."""
    device = compute_device(config.device)
    name = _attends(config, device)
    able = BACKENDS[name].capabilities
    if config.overlap and able.needs_host_extents:
        raise ConfigError(
            f"--overlap: attention backend {name} plans with exact lengths on the host; use --no-overlap or another"
            " backend"
        )
    wanted = captures(config, device, able) if config.overlap is None else config.overlap
    return 2 if wanted and not able.needs_host_extents else 1


def _attends(config: EngineConfig, device: torch.device) -> str:
    """The attention backend; of `auto` the one that it falls back to."""
    if config.attention_backend != "auto":
        return config.attention_backend
    exact = profile_of(config.exactness, device).exact_attention
    return fallback(Need(compute_dtype(config.dtype, device), device, exact=exact))


def _stores(config: EngineConfig) -> Callable[[KVFormat], KVFormat]:
    """How pages hold a format: as the attention backend reads it. `auto` has none that reads another."""
    return as_it_is if config.attention_backend == "auto" else BACKENDS[config.attention_backend].stores


def _default_chunk(config: EngineConfig, groups: tuple[KVGroup, ...]) -> int:
    """Prompt tokens of a prefill step if the configuration does not say."""
    device = compute_device(config.device)
    if device.type == "cpu" or _attends(config, device) == "torch":
        return SMALL_CHUNK
    return chunk_of_gpu(memory_of(device).total, [group.window for group in groups if group.window is not None])


def _prompt_sizes(config: EngineConfig, model: ModelConfig, chunk: int) -> tuple[int, ...]:
    """Tokens of prompts that a captured round may have in its forward.

    There mixed steps are launched one by one where prompts are not packed.
    """
    if config.mixed_chunk == "off" or not _packs_prompts(config, model):
        return ()
    largest = _power_of_two(min(chunk, LARGEST_PROMPTS))
    return tuple(size for size in (largest // 8, largest // 4, largest // 2, largest) if size)


def _prefill_sizes(config: EngineConfig, model: ModelConfig, chunk: int) -> tuple[tuple[int, int], ...]:
    """Of captured prefill steps: tokens, and tokens of their blocks. Wide blocks suit prompts, narrow ones what is left
    of prompts that the prefix cache has.
    """
    if not config.prefill_graph_max_tokens or not _packs_prompts(config, model):
        return ()
    largest = _power_of_two(min(chunk, config.prefill_graph_max_tokens))
    sizes = [largest * part // 16 for part in PREFILL_PARTS]
    blocks = _prefill_blocks(largest)
    return tuple((size, block) for size in dict.fromkeys(sizes) for block in blocks if size and size % block == 0)


def _prefill_blocks(largest: int) -> tuple[int, ...]:
    """Tokens of the blocks of steps of `largest` tokens at most, wide ones first."""
    wide = min(MAX_PROMPT_BLOCK, max(largest // 16, 1))
    return tuple(dict.fromkeys((wide, max(wide // 4, 1))))


def _packs_prompts(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether prompts may be in captured batches of blocks: not where rounds are not captured; where a row's blocks
    would have to go on from each other's states; where ranks exchange as many tokens as the one with most.
    """
    device = compute_device(config.device)
    able = BACKENDS[_attends(config, device)].capabilities
    captured = config.graphs == "sim" or (captures(config, device, able) and not able.needs_host_extents)
    return captured and not model.recurrent and config.ep_size == 1


def prefill_costs_of(target: TargetSpec, place: LoadContext) -> PrefillCosts:
    """What a prefill step between two rounds costs."""
    on_cpu = place.device.type == "cpu"
    minimum = MIN_CHUNK_OF_CPU if on_cpu else MIN_CHUNK_OF_GPU
    usual, mixed = (minimum, minimum) if on_cpu else (USUAL_CHUNK_OF_GPU, MIXED_CHUNK_OF_GPU)
    return PrefillCosts(minimum, usual, target.attended_for_a_token(place.dtype), mixed)


def captures(config: EngineConfig, device: torch.device, able: Capabilities) -> bool:
    """Whether rounds run as captured CUDA graphs."""
    return config.graphs == "auto" and device.type == "cuda" and able.captures


def _profile_of(config: EngineConfig) -> AcceptanceProfile | None:
    """The profile that acceptance is drawn from, if it is."""
    if config.simulate_acceptance is None:
        return None
    topk = max(shape.topk for shape in config.shapes)
    if topk > RANKS:
        raise ConfigError(f"--speculative-eagle-topk {topk}: --simulate-acceptance draws {RANKS} proposals at most")
    return read_profile(config.simulate_acceptance)


def read_draft_spec(config: EngineConfig, target: TargetSpec) -> DrafterSpec:
    """The drafter's spec, and whether the options fit it."""
    window, deepest = config.speculative_draft_window_size, max(shape.num_steps for shape in config.shapes)
    if config.algorithm == "NGRAM":
        if window is not None:
            raise ConfigError(f"--speculative-draft-window-size {window}: NGRAM has no layers; leave it out")
        spec: DrafterSpec = ngram_spec(target.config, deepest)
    else:
        folder = target.folder if config.draft is None else resolve_folder(config.draft, "draft")
        dummy, recurrence = config.load_format == "dummy", config.speculative_mtp_recurrence
        eagle3 = config.speculative_eagle_recurrence
        spec = drafter_spec(
            folder,
            target.config,
            config.algorithm,
            dummy,
            recurrence,
            window,
            eagle3,
            num_steps=deepest,
            target_folder=target.folder,
        )
        if config.speculative_suffix_lookup:
            spec = lookup_beside(spec, target.config, deepest)
    if spec.block is not None and deepest > spec.block.max_steps:
        raise ConfigError(
            f"--speculative-num-steps {deepest}: {spec.folder} proposes {spec.block.max_steps} tokens at most"
        )
    kept = config.speculative_draft_kv_cache_dtype
    if kept is not None and not spec.attention:
        raise ConfigError(f"--speculative-draft-kv-cache-dtype {kept}: this draft keeps no K/V; leave it out")
    topk = max(shape.topk for shape in config.shapes)
    if spec.block is not None and spec.block.max_topk is not None and topk > spec.block.max_topk:
        raise ConfigError(f"--speculative-eagle-topk {topk}: {spec.folder} scores {spec.block.max_topk} tokens at most")
    if topk > spec.vocab_size:
        raise ConfigError(f"--speculative-eagle-topk {topk} exceeds the draft vocabulary of {spec.vocab_size}")
    return spec


def memory_of_rank(place: LoadContext) -> DeviceMemory:
    """Of the rank's device; ranks on a CPU share its memory."""
    memory, ranks = memory_of(place.device), place.parallel.size * place.expert_ranks.size
    sharing = ranks if place.device.type == "cpu" else 1
    return DeviceMemory(memory.total // sharing, memory.free // sharing)


def _static_estimate(
    config: EngineConfig, layout: Layout, target: TargetSpec, draft: DrafterSpec | None, place: LoadContext,
    adapters: tuple[LoraFolder, ...],
) -> int:  # fmt: skip
    """Bytes of weights, tables and buffers, from their shapes: no less than that will be taken."""
    dtype = place.dtype
    weights = weight_bytes(place.own(target.params), dtype, place.packed == "tiles" and place.profile.batch_invariant)
    if draft is not None:
        weights += weight_bytes(place.own(draft.params), dtype) + draft.derived * dtype.itemsize
    made: list[int] = []

    def counted(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        made.append(prod(shape) * kind.itemsize)
        return _shape_alone(shape, kind)

    adapters_of(config, adapters, target, place, layout, counted)
    draft_adapters_of(config, adapters, draft, place, layout, counted)
    model, aux = target.config, draft.aux_inputs if draft is not None else ()
    changed = changed_vocab(config, model)
    state = make_state(
        *(layout, draft, model.hidden_size, changed, dtype, counted, config.speculative_suffix_cache_tokens),
        classes=num_classes(config.num_lora_slots),
    )
    make_round_buffers(
        *(layout, len(aux), model, state.calibration, dtype, counted),
        blocks=causal_blocks(draft),
    )
    slots = config.disaggregation_slots * config.disaggregation_slot_bytes
    return weights + sum(made) + slots + staging_bytes(config, layout, dtype.itemsize)


def _shape_alone(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def changed_vocab(config: EngineConfig, model: ModelConfig) -> int | None:
    """The vocabulary, if requests may change logits."""
    return None if config.disable_logits_processors else model.vocab_size


def cpu_allowance(
    config: EngineConfig, memory: DeviceMemory, place: LoadContext, layout: Layout, model: ModelConfig
) -> int:
    """On a CPU nothing measures a peak: the worst step and the fraction's rest of what is free stay free.

    A GPU's is measured later.
    """
    if place.device.type != "cpu":
        return 0
    return rest_of_cpu(config, memory, place) + step_bytes(layout, model.vocab_size, place.dtype.itemsize)


def rest_of_cpu(config: EngineConfig, memory: DeviceMemory, place: LoadContext) -> int:
    """Bytes of a CPU's free memory that the fraction leaves to others."""
    return int((1 - config.mem_fraction_static) * max(memory.free, 0)) if place.device.type == "cpu" else 0
