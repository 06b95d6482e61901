"""From a plan to a device: weights, tables, buffers, the worst steps, and the pools in what is left."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from treetop.attention.auto import make_backend
from treetop.cache.pool import KVPool, make_pools
from treetop.checks.poison import RedZones
from treetop.checks.probes import Probes
from treetop.drafts.protocol import DrafterSpec
from treetop.engine.buffers import Zeros, make_round_buffers
from treetop.engine.cuda_graphs import num_rounds
from treetop.engine.kv_transfer import StagingSlots
from treetop.engine.memory import (
    Budget,
    MemoryUse,
    activation_allowance,
    fit,
    out_of_memory_explained,
)
from treetop.engine.model_runner import ModelRunner
from treetop.engine.offloading.host_pages import CopyStaging, HostPageCopies
from treetop.engine.startup.adapters import adapters_of, draft_adapters_of
from treetop.engine.startup.aot_compile import compile_all
from treetop.engine.startup.exact_ranks import check_ranks
from treetop.engine.startup.host_layout import with_host
from treetop.engine.startup.layer_groups import (
    causal_blocks,
    draft_layers_in_order,
    group_of,
    layers_in_order,
    recurrent_layers,
)
from treetop.engine.startup.plan import EnginePlan, captures, changed_vocab, cpu_allowance, memory_of_rank, rest_of_cpu
from treetop.engine.startup.products import Products, products_of
from treetop.engine.startup.profile_run import peak_bytes
from treetop.engine.startup.self_test import self_test_acceptance
from treetop.engine.startup.stages import stage
from treetop.engine.state import make_state
from treetop.models.kv_scales import read_kv_scales
from treetop.speculative.simulation import SimulatedAcceptance, SimulatedLengths, Simulation
from treetop.types.ids import GroupName
from treetop.types.layout import Layout
from treetop.types.sampling import num_classes
from treetop.weights.cpu_products import ChosenProduct


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A device with its memory.

    zones: at check level 3, between which every buffer lies.
    use: where memory went.
    products: on a CPU, how products with weights are taken. chosen: the same, and what was probed, for weights that
        come later: ranks have agreed on it.
    slots: to hand requests over by, if there are any.
    host_pages: that keep K/V on the host, if there are any.
    """

    runner: ModelRunner
    slots: StagingSlots | None
    host_pages: HostPageCopies | None
    zones: RedZones | None
    use: MemoryUse
    products: tuple[ChosenProduct, ...]
    chosen: Products


def build_runner(engine_plan: EnginePlan) -> BuiltRunner:
    """Load weights, make tables and buffers, try the worst steps, and give what is left to the pools.

    Raises CapacityError if what is left does not hold one request, EngineError if memory runs out on the way, and
    ConfigError where `--exactness bits` cannot be honoured.
    """
    config, place, scales = engine_plan.config, engine_plan.place, kv_scales(engine_plan)
    products = products_of(engine_plan)
    check_ranks(engine_plan)
    with out_of_memory_explained("loading weights, profile run", place.device, engine_plan.use):
        before = _allocated(place.device)
        runner, zones, zeros = _without_pools(engine_plan, products)
        slots = _make_slots(engine_plan, zeros)
        staging = CopyStaging.make(runner.layout, place.dtype.itemsize, zeros) if runner.layout.host else None
        static = _allocated(place.device) - before or engine_plan.use.budget.static
        allowance = _gpu_allowance(engine_plan, runner, scales) if place.device.type == "cuda" else 0
    memory = memory_of_rank(place)
    allowance = allowance or cpu_allowance(config, memory, place, engine_plan.layout, engine_plan.target.config)
    copies, rest = engine_plan.use.budget.copies, rest_of_cpu(config, memory, place)
    budget = Budget(memory, static, allowance, config.mem_fraction_static, copies, rest)
    layout = fit(engine_plan.layout, place.dtype.itemsize, budget, config.max_total_tokens)
    layout = replace(layout, pool_tokens=place.parallel.minimum(layout.pool_tokens))  # one host plans for all ranks
    layout = with_host(config, layout, place.dtype.itemsize)
    use = MemoryUse(layout, place.dtype.itemsize, budget)
    with out_of_memory_explained("making the KV pools", place.device, use):
        pools = make_pools(layout, place.dtype, zeros, scales)
    runner, host_pages = with_pools(runner, engine_plan.draft, layout, pools), None
    if staging is not None:
        host_pages = HostPageCopies(layout, pools, runner.state.states, staging, place.parallel)
    return BuiltRunner(runner, slots, host_pages, zones, use, products.all, products)


def kv_scales(engine_plan: EnginePlan) -> dict[GroupName, Tensor]:
    """[layers, planes, kv_heads] float32 of each group in FP8: the checkpoint's, and 1 for a draft."""
    place, model, found = engine_plan.place, engine_plan.target.config, dict[GroupName, list[Tensor]]()
    groups = [group for group in engine_plan.layout.groups if group.kv.fp8]
    for group in groups:
        if group.is_draft or place.dummy:
            found[group.name] = [torch.ones((group.kv.planes, group.kv.heads))] * group.num_layers
    if any(not group.is_draft for group in groups) and not place.dummy:
        own = [attention for attention in model.attention.values() if attention.kv_sharing_layer is None]
        for attention, scales in zip(own, read_kv_scales(engine_plan.target, place.parallel), strict=True):
            found.setdefault(group_of(attention), []).append(scales)
    return {name: torch.stack(scales).to(place.device) for name, scales in found.items()}


def _make_slots(engine_plan: EnginePlan, zeros: Zeros) -> StagingSlots | None:
    spec, config = engine_plan.kv_transfer, engine_plan.config
    if spec is None:
        return None
    return StagingSlots(spec, zeros((config.disaggregation_slots, config.disaggregation_slot_bytes), torch.uint8))


def _without_pools(engine_plan: EnginePlan, products: Products) -> tuple[ModelRunner, RedZones | None, Zeros]:
    """The runner as yet without pools; the red zones, and what makes buffers."""
    config, draft = engine_plan.config, engine_plan.draft
    place, beside = products.of_target(engine_plan.place), products.of_draft(engine_plan.place)
    backend = make_backend(config.attention_backend, engine_plan.need)
    zones = RedZones(place.device) if config.check_level >= 3 else None
    zeros: Zeros = zones.zeros if zones is not None else partial(zeros_on, place.device)
    layout, aux = engine_plan.layout, draft.aux_inputs if draft is not None else ()
    spec, model = engine_plan.target, engine_plan.target.config
    adapters = adapters_of(config, engine_plan.adapters, spec, place, layout, zeros)
    draft_adapters = draft_adapters_of(config, engine_plan.adapters, draft, place, layout, zeros)
    with stage("weights of the target"):
        target = spec.load(aux, replace(place, adapters=adapters))
    with stage("weights of the draft"):
        drafter = draft.load(target, replace(beside, adapters=draft_adapters)) if draft is not None else None
    changed = changed_vocab(config, model)
    state = make_state(
        *(layout, draft, model.hidden_size, changed, place.dtype, zeros, config.speculative_suffix_cache_tokens),
        learns=config.speculative_calibration == "learn" and config.simulate_accept_length is None,
        classes=num_classes(config.num_lora_slots),
        parallel=place.parallel,
    )
    simulation: Simulation | None = None
    if engine_plan.profile is not None:
        depths = max(shape.num_steps for shape in layout.shapes)
        simulation = SimulatedAcceptance.make(engine_plan.profile, depths, model.vocab_size, place.device)
    elif config.simulate_accept_length is not None:
        simulation = SimulatedLengths(config.simulate_accept_length)
    runner = ModelRunner(
        layout=layout,
        check_level=config.check_level,
        simulation=simulation,
        target=target,
        drafter=drafter,
        anchored=draft is not None and draft.block is not None and draft.block.anchored,
        backend=backend,
        ops=place.ops,
        pools={},
        state=state,
        buffers=make_round_buffers(
            *(layout, len(aux), model, state.calibration, place.dtype, zeros),
            blocks=causal_blocks(draft),
        ),
        target_layers={},
        draft_layers={},
        recurrent_layers=recurrent_layers(model, state.states.groups),
        probes=Probes.make(place.device, config.check_level >= 2, layout.dummy_row, place.parallel.record()),
        adapters=adapters,
        draft_adapters=draft_adapters,
    )
    return runner, zones, zeros


def with_pools(
    runner: ModelRunner, draft: DrafterSpec | None, layout: Layout, pools: dict[GroupName, KVPool]
) -> ModelRunner:
    """The runner over these pools, which are the layout's."""
    layers = {name: pool.layers() for name, pool in pools.items()}
    target_layers = layers_in_order(runner.target.config, layers)
    draft_layers = draft_layers_in_order(draft, layers, target_layers)
    return replace(runner, layout=layout, pools=pools, target_layers=target_layers, draft_layers=draft_layers)


def _gpu_allowance(engine_plan: EnginePlan, runner: ModelRunner, scales: Mapping[GroupName, Tensor]) -> int:
    """Bytes to leave free on a GPU: the worst steps, tried on pools of a null page each, once padding is proven.

    Where rounds will be captured, the kernels of those steps and of all greedy rounds are compiled before.
    """
    able, place = runner.backend.capabilities, runner.buffers.rows.device
    layout = replace(runner.layout, pool_tokens=0)
    pools = make_pools(layout, runner.buffers.aux_hidden.dtype, partial(zeros_on, place), scales)
    tried = with_pools(runner, engine_plan.draft, layout, pools)
    captured = captures(engine_plan.config, place, able)
    if captured and able.captures_first_call:
        with stage("compiling kernels"):
            compile_all(tried)
    if engine_plan.config.check_level >= 1:
        self_test_acceptance(tried)
    with stage("profile run"):
        return activation_allowance(peak_bytes(tried), num_rounds(runner) if captured else 0)


def _allocated(device: torch.device) -> int:
    """Bytes that live tensors take on a GPU; 0 on a CPU, where nothing counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
