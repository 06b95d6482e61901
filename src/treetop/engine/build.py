"""From a configuration to a device: specs, capacity algebra, weights, memory, in this order."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from treetop.attention.capabilities import CAPABILITIES, Capabilities, Need, refusal, require
from treetop.attention.registry import make_backend
from treetop.cache.pool import KVPool, make_pools
from treetop.checks.poison import RedZones
from treetop.checks.probes import Probes
from treetop.drafts.protocol import DrafterSpec
from treetop.drafts.registry import drafter_spec, ngram_spec
from treetop.engine.buffers import Zeros, make_round_buffers
from treetop.engine.capacity_proof import prove_acceptance
from treetop.engine.compile_ahead import rehearse
from treetop.engine.cuda_graphs import num_graphs
from treetop.engine.handover import HandoverSpec, StagingSlots
from treetop.engine.layer_groups import backend_need, kv_groups, layers_in_order
from treetop.engine.memory import (
    LEAST_CHUNK_OF_CPU,
    LEAST_CHUNK_OF_GPU,
    ROWS_OF_CPU,
    ROWS_OF_GPU,
    SMALL_CHUNK,
    TOKENS_OF_A_ROW,
    Budget,
    Memory,
    MemoryUse,
    activation_allowance,
    chunk_of_gpu,
    fit,
    memory_of,
    out_of_memory_explained,
    step_bytes,
)
from treetop.engine.model_runner import ModelRunner
from treetop.engine.row_record import record_bytes, record_fields
from treetop.engine.state import make_state
from treetop.engine.weight_copies import CpuWeights, with_copies, with_second_orders
from treetop.engine.worst_steps import peak_bytes
from treetop.kernels.process import MOST_COUNT
from treetop.models.config import ModelConfig
from treetop.models.folder import resolve_folder
from treetop.models.loader import Placement, compute_device, compute_dtype, weight_bytes
from treetop.models.registry import TargetSpec, target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.ids import DRAFT, GroupName
from treetop.types.layout import KVGroup, Layout, PrefillPace
from treetop.types.parallel import ALONE, Parallel, Unmet
from treetop.weights.cpu_products import Call, ChosenProduct, Shape, choose_products


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything that is known before a weight is read.

    layout: with pools as large as the estimate lets them be. need: what attention has to do. use: that estimate of
    memory. weights: whose products are chosen by timing. handover: what staging slots hold, if there are any.
    """

    config: EngineConfig
    target: TargetSpec
    draft: DrafterSpec | None
    layout: Layout
    place: Placement
    need: Need
    use: MemoryUse
    weights: CpuWeights
    handover: HandoverSpec | None


def plan_engine(
    config: EngineConfig, parallel: Parallel | None = None, expert_ranks: Parallel | None = None
) -> EnginePlan:
    """Read the checkpoints' configs, and check every option against them and against the device's memory.

    parallel, expert_ranks: which rank this is; None for the first of ranks that have not met. The plan's configuration
    says what the given one leaves to device and memory. Raises UserError for what cannot work, before any weight is
    read.
    """
    parallel = parallel or (ALONE if config.tp_size == 1 else Unmet(config.tp_size))
    expert_ranks = expert_ranks or (ALONE if config.ep_size == 1 else Unmet(config.ep_size))
    engine_plan = _plan_own(config, parallel, expert_ranks)
    if isinstance(expert_ranks, Unmet):
        return engine_plan
    # Steps of all ranks have one size, and a request gets the same bits on any of them.
    own = engine_plan.layout.max_requests, engine_plan.layout.chunk, int(engine_plan.place.compressed)
    agreed = tuple(expert_ranks.least(number) for number in own)
    if own == agreed:
        return engine_plan
    config = replace(config, max_running_requests=agreed[0], chunked_prefill_size=agreed[1])
    return _plan_rows(replace(config, compress_weights=bool(agreed[2])), parallel, expert_ranks)


def _plan_own(config: EngineConfig, parallel: Parallel, expert_ranks: Parallel) -> EnginePlan:
    """The plan by this rank's own memory."""
    if config.max_running_requests is not None:
        return _plan_rows(config, parallel, expert_ranks)
    *many, fewest = ROWS_OF_CPU if compute_device(config.device).type == "cpu" else ROWS_OF_GPU
    for rows in many:
        with suppress(CapacityError):
            engine_plan = _plan_rows(replace(config, max_running_requests=rows), parallel, expert_ranks)
            if engine_plan.layout.pool_tokens >= rows * min(engine_plan.layout.max_context, TOKENS_OF_A_ROW):
                return engine_plan
    return _plan_rows(replace(config, max_running_requests=fewest), parallel, expert_ranks)


def _plan_rows(config: EngineConfig, parallel: Parallel, expert_ranks: Parallel) -> EnginePlan:
    """The plan for a given number of rows."""
    target = target_spec(resolve_folder(config.model))
    if config.ep_size > 1 and not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    draft = read_draft_spec(config, target) if config.speculates else None
    layout = make_layout(config, target.config, draft, parallel.size)
    device = compute_device(config.device)
    dtype = compute_dtype(config.dtype, device)
    layout, handover = _with_slots(config, layout, target.config, draft, dtype)
    dummy = config.load_format == "dummy"
    place = Placement(dtype, device, layout.max_positions, dummy, shapes=layout.shapes, parallel=parallel)
    place = replace(place, expert_ranks=expert_ranks)
    memory, static = _memory_of(place), _static_estimate(config, layout, target, draft, place)
    memory = Memory(memory.total, memory.free - static)
    allowance = _cpu_allowance(config, memory, place, layout, target.config)
    budget = Budget(memory, static, allowance, config.mem_fraction_static, rest=_rest_of_cpu(config, memory, place))
    budget = with_copies(config, place, budget, layout, target, draft)
    place = replace(place, compressed=budget.copies > 0)
    budget, weights = with_second_orders(config, place, budget, layout, target, draft)
    layout = fit(layout, dtype.itemsize, budget, config.max_total_tokens)
    need = backend_need(layout, target.config, draft, place)
    if config.attention_backend != "auto":
        require(config.attention_backend, need)
    use = MemoryUse(layout, dtype.itemsize, budget)
    if config.compress_weights is None:
        config = replace(config, compress_weights=place.compressed)
    return EnginePlan(config, target, draft, layout, place, need, use, weights, handover)


def make_layout(config: EngineConfig, model: ModelConfig, draft: DrafterSpec | None, ranks: int = 1) -> Layout:
    """The capacity algebra of a configuration and its models; the pools as large as rows can use, or as asked.

    ranks: that share the models.
    """
    context = config.context_length or model.max_positions
    if context > model.max_positions:
        raise ConfigError(f"--context-length {context} exceeds the model's {model.max_positions} positions")
    if context - 1 > MOST_COUNT and not config.disable_logits_processors:
        raise ConfigError(
            f"--context-length {context}: penalties can count {MOST_COUNT} tokens; lower it, or use"
            " --disable-logits-processors"
        )
    groups = kv_groups(model, draft, ranks)
    chunk, rows = config.chunked_prefill_size or _default_chunk(config, groups), config.max_running_requests
    assert rows is not None, "plan_engine has chosen"
    layout = Layout(
        shapes=(config.shape,),
        page_size=config.page_size,
        max_requests=rows,
        max_context=context,
        chunk=min(chunk, rows * context),  # a step can hold no more
        groups=groups,
        pool_tokens=config.max_total_tokens or 0,
        max_in_flight=choose_max_in_flight(config),
    )
    if config.max_total_tokens is None:
        layout = replace(layout, pool_tokens=layout.tokens_for_all)
    layout.validate()
    return layout


def _with_slots(
    config: EngineConfig, layout: Layout, model: ModelConfig, draft: DrafterSpec | None, dtype: torch.dtype
) -> tuple[Layout, HandoverSpec | None]:
    """The layout with the staging slots that are asked for, and what they hold.

    Raises ConfigError or CapacityError for slots that cannot hold this model's tokens.
    """
    if not config.disaggregation_slots:
        return layout, None
    odd = [group.name for group in layout.groups if group.kv.head_dim * dtype.itemsize % 4]
    if odd:
        raise ConfigError(f"--disaggregation-slots: heads of KV group {odd[0]} are not whole 32-bit words in {dtype}")
    record = record_bytes(record_fields(layout, draft, dtype))
    ranks = config.tp_size
    handover = HandoverSpec.of(layout.groups, kv_groups(model, draft, 1), dtype.itemsize, record, ranks)
    tokens = min(handover.own.tokens_per_slot(config.disaggregation_slot_bytes), layout.max_context)
    layout = replace(layout, disaggregation_slots=config.disaggregation_slots, slot_tokens=tokens)
    if config.chunked_prefill_size is None:  # no more than slots hold, to be taken while the next chunk is computed
        layout = replace(layout, chunk=min(layout.chunk, _power_of_two(config.disaggregation_slots * tokens)))
    return layout, handover


def _power_of_two(number: int) -> int:
    """The largest that is not above it."""
    return 1 << number.bit_length() - 1


def choose_max_in_flight(config: EngineConfig) -> int:
    """Steps in flight: 2 if host and device overlap, else 1. Raises ConfigError if --overlap cannot be."""
    device = compute_device(config.device)
    name = _attends(config, device)
    able = CAPABILITIES[name]
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
    return "torch" if refusal("triton", Need(compute_dtype(config.dtype, device), device)) is not None else "triton"


def _default_chunk(config: EngineConfig, groups: tuple[KVGroup, ...]) -> int:
    """Prompt tokens of a prefill step if the configuration does not say."""
    device = compute_device(config.device)
    if device.type == "cpu" or _attends(config, device) == "torch":
        return SMALL_CHUNK
    return chunk_of_gpu(memory_of(device).total, [group.window for group in groups if group.window is not None])


def pace_of(target: TargetSpec, place: Placement) -> PrefillPace:
    """What a prefill step between two rounds costs."""
    least = LEAST_CHUNK_OF_CPU if place.device.type == "cpu" else LEAST_CHUNK_OF_GPU
    return PrefillPace(least, target.attended_for_a_token(place.dtype))


def captures(config: EngineConfig, device: torch.device, able: Capabilities) -> bool:
    """Whether rounds run as captured CUDA graphs."""
    return config.graphs == "auto" and device.type == "cuda" and able.captures


def read_draft_spec(config: EngineConfig, target: TargetSpec) -> DrafterSpec:
    """The drafter's spec, and whether the options fit it."""
    if config.algorithm == "NGRAM":
        spec: DrafterSpec = ngram_spec(target.config, config.shape)
    else:
        folder = target.folder if config.draft is None else resolve_folder(config.draft, "draft")
        dummy, recurrence = config.load_format == "dummy", config.speculative_mtp_recurrence
        spec = drafter_spec(folder, target.config, config.algorithm, dummy, recurrence)
    if config.speculative_eagle_topk > spec.vocab_size:
        raise ConfigError(
            f"--speculative-eagle-topk {config.speculative_eagle_topk} exceeds the draft vocabulary of"
            f" {spec.vocab_size}"
        )
    return spec


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A device with its memory. zones: at check level 3, between which every buffer lies. use: where memory went.

    products: on a CPU, how products with weights are taken. slots: to hand requests over by, if there are any.
    """

    runner: ModelRunner
    slots: StagingSlots | None
    zones: RedZones | None
    use: MemoryUse
    products: tuple[ChosenProduct, ...]


def build_runner(engine_plan: EnginePlan) -> BuiltRunner:
    """Load weights, make tables and buffers, try the worst steps, and give what is left to the pools.

    Raises CapacityError if what is left does not hold one request, EngineError if memory runs out on the way.
    """
    config, place = engine_plan.config, engine_plan.place
    products = _products(engine_plan.weights, place)
    with out_of_memory_explained("loading weights and trying the worst steps", place.device, engine_plan.use):
        before = _allocated(place.device)
        runner, zones, zeros = _without_pools(engine_plan, replace(place, products=products))
        slots = _make_slots(engine_plan, zeros)
        static = _allocated(place.device) - before or engine_plan.use.budget.static
        allowance = _gpu_allowance(config, runner) if place.device.type == "cuda" else 0
    memory = _memory_of(place)
    allowance = allowance or _cpu_allowance(config, memory, place, engine_plan.layout, engine_plan.target.config)
    copies, rest = engine_plan.use.budget.copies, _rest_of_cpu(config, memory, place)
    budget = Budget(memory, static, allowance, config.mem_fraction_static, copies, rest)
    layout = fit(engine_plan.layout, place.dtype.itemsize, budget, config.max_total_tokens)
    layout = replace(layout, pool_tokens=place.parallel.least(layout.pool_tokens))  # one host plans for all ranks
    use = MemoryUse(layout, place.dtype.itemsize, budget)
    with out_of_memory_explained("making the KV pools", place.device, use):
        pools = make_pools(layout, place.dtype, zeros)
    return BuiltRunner(_with_pools(runner, layout, pools), slots, zones, use, tuple(products.values()))


def _products(weights: CpuWeights, place: Placement) -> dict[Shape, ChosenProduct]:
    """The products of a CPU's weights, by shape. Calls differ in their last bits: all ranks take those of the first."""
    ranks = place.parallel if place.parallel.size > 1 else place.expert_ranks
    if not weights.shapes:
        return {}
    own = choose_products(weights.shapes, place.dtype, ranks.least(weights.orders))
    every = list(Call)
    calls = torch.tensor([[every.index(call) for call in each.calls] for each in own.values()])
    first = ranks.gather(calls)[0].tolist()
    return {
        shape: replace(each, calls=tuple(every[index] for index in row))
        for (shape, each), row in zip(own.items(), first, strict=True)
    }


def _make_slots(engine_plan: EnginePlan, zeros: Zeros) -> StagingSlots | None:
    spec, config = engine_plan.handover, engine_plan.config
    if spec is None:
        return None
    return StagingSlots(spec, zeros((config.disaggregation_slots, config.disaggregation_slot_bytes), torch.uint8))


def _without_pools(engine_plan: EnginePlan, place: Placement) -> tuple[ModelRunner, RedZones | None, Zeros]:
    """The runner as yet without pools; the red zones, and what makes buffers."""
    config, draft = engine_plan.config, engine_plan.draft
    backend = make_backend(config.attention_backend, engine_plan.need)
    zones = RedZones(place.device) if config.check_level >= 3 else None
    zeros: Zeros = zones.zeros if zones is not None else partial(zeros_on, place.device)
    layout, aux = engine_plan.layout, draft.aux_inputs if draft is not None else ()
    target, model = engine_plan.target.load(aux, place), engine_plan.target.config
    changed = _changed_vocab(config, model)
    runner = ModelRunner(
        layout=layout,
        check_level=config.check_level,
        simulate_accept_length=config.simulate_accept_length,
        target=target,
        drafter=draft.load(target, place) if draft is not None else None,
        backend=backend,
        ops=place.ops,
        pools={},
        state=make_state(layout, draft, changed, place.dtype, zeros),
        buffers=make_round_buffers(layout, len(aux), model.hidden_size, model.vocab_size, place.dtype, zeros),
        target_layers=[],
        draft_layers=[],
        probes=Probes.make(place.device, config.check_level >= 2, layout.dummy_row, place.parallel.record()),
    )
    return runner, zones, zeros


def _with_pools(runner: ModelRunner, layout: Layout, pools: dict[GroupName, KVPool]) -> ModelRunner:
    """The runner over these pools, which are the layout's."""
    layers = {name: pool.layers() for name, pool in pools.items()}
    target_layers = layers_in_order(runner.target.config, layers)
    return replace(runner, layout=layout, pools=pools, target_layers=target_layers, draft_layers=layers.get(DRAFT, []))


def _memory_of(place: Placement) -> Memory:
    """Of the rank's device; ranks on a CPU share its memory."""
    memory, ranks = memory_of(place.device), place.parallel.size * place.expert_ranks.size
    sharing = ranks if place.device.type == "cpu" else 1
    return Memory(memory.total // sharing, memory.free // sharing)


def _static_estimate(
    config: EngineConfig, layout: Layout, target: TargetSpec, draft: DrafterSpec | None, place: Placement
) -> int:
    """Bytes of weights, tables and buffers, from their shapes: no less than that will be taken."""
    dtype = place.dtype
    weights = weight_bytes(place.own(target.params), dtype)
    if draft is not None:
        weights += weight_bytes(place.own(draft.params), dtype) + draft.derived * dtype.itemsize
    made: list[int] = []

    def counted(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        made.append(prod(shape) * kind.itemsize)
        return torch.empty(shape, dtype=kind, device="meta")

    model, aux = target.config, draft.aux_inputs if draft is not None else ()
    make_state(layout, draft, _changed_vocab(config, model), dtype, counted)
    make_round_buffers(layout, len(aux), model.hidden_size, model.vocab_size, dtype, counted)
    return weights + sum(made) + config.disaggregation_slots * config.disaggregation_slot_bytes


def _changed_vocab(config: EngineConfig, model: ModelConfig) -> int | None:
    """The vocabulary, if requests may change logits."""
    return None if config.disable_logits_processors else model.vocab_size


def _cpu_allowance(config: EngineConfig, memory: Memory, place: Placement, layout: Layout, model: ModelConfig) -> int:
    """On a CPU nothing measures a peak: the worst step and the fraction's rest of what is free stay free.

    A GPU's is measured later.
    """
    if place.device.type != "cpu":
        return 0
    return _rest_of_cpu(config, memory, place) + step_bytes(layout, model.vocab_size, place.dtype.itemsize)


def _rest_of_cpu(config: EngineConfig, memory: Memory, place: Placement) -> int:
    """Bytes of a CPU's free memory that the fraction leaves to others."""
    return int((1 - config.mem_fraction_static) * max(memory.free, 0)) if place.device.type == "cpu" else 0


def _gpu_allowance(config: EngineConfig, runner: ModelRunner) -> int:
    """Bytes to leave free on a GPU: the worst steps, tried on pools of a null page each, once padding is proven.

    Where rounds will be captured, the kernels of those steps and of all greedy rounds are compiled before.
    """
    able, place = runner.backend.capabilities, runner.buffers.rows.device
    layout = replace(runner.layout, pool_tokens=0)
    pools = make_pools(layout, runner.buffers.aux_hidden.dtype, partial(zeros_on, place))
    tried = _with_pools(runner, layout, pools)
    captured = captures(config, place, able)
    if captured and able.captures_first_call:
        rehearse(tried)
    if config.check_level >= 1:
        prove_acceptance(tried)
    return activation_allowance(peak_bytes(tried), num_graphs(runner) if captured else 0)


def _allocated(device: torch.device) -> int:
    """Bytes that live tensors take on a GPU; 0 on a CPU, where nothing counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
