"""From a configuration to a device: specs, capacity algebra, weights, memory, in this order."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from treetop.attention.capabilities import Capabilities, GroupNeed, Need
from treetop.attention.phase import LayerKV
from treetop.attention.registry import make_backend
from treetop.cache.pool import make_pools
from treetop.checks.poison import RedZones
from treetop.checks.probes import Probes
from treetop.engine.buffers import Zeros, make_round_buffers
from treetop.engine.device import Device
from treetop.engine.pure import Pure
from treetop.engine.state import make_state
from treetop.models.loader import (
    Placement,
    compute_device,
    compute_dtype,
    load_eagle3,
    load_target,
    read_eagle3_spec,
)
from treetop.models.spec import Eagle3Spec, ModelSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL, WINDOW, GroupName
from treetop.types.layout import PLAIN, KVGroup, Layout


def make_layout(config: EngineConfig, spec: ModelSpec, draft: Eagle3Spec | None, kind: type[Layout]) -> Layout:
    """The capacity algebra of a configuration and its models, validated."""
    context = config.context_length or spec.max_positions
    if context > spec.max_positions:
        raise ConfigError(f"--context-length {context} exceeds the model's {spec.max_positions} positions")
    shapes = (PLAIN,) if config.shape == PLAIN else (PLAIN, config.shape)
    groups = tuple(_groups(spec, draft))
    lag = choose_lag(config, _group_needs(groups, spec, draft))
    headroom = lag * max(shape.commit_width for shape in shapes)
    pool_tokens = config.max_total_tokens or config.max_running_requests * (context + headroom + config.page_size)
    layout = kind(
        shapes=shapes,
        page_size=config.page_size,
        max_requests=config.max_running_requests,
        max_context=context,
        chunk=config.chunked_prefill_size,
        groups=groups,
        pool_tokens=pool_tokens,
        lag=lag,
    )
    layout.validate()
    if config.radix_cache and any(group.window is not None for group in groups):
        raise ConfigError("--enable-radix-cache does not work with a model that has windows")
    return layout


def choose_lag(config: EngineConfig, groups: tuple[GroupNeed, ...]) -> int:
    """Steps in flight: 2 if host and device overlap, else 1. Raises ConfigError if --overlap cannot be."""
    device = compute_device(config.device)
    wanted = config.graphs == "auto" and device.type == "cuda" if config.overlap is None else config.overlap
    if not wanted:
        return 1
    need = Need(compute_dtype(config.dtype, device), device, config.page_size, groups)
    backend = make_backend(config.attention_backend, need)
    refused = overlap_refused(backend.capabilities)
    if config.overlap and refused is not None:
        raise ConfigError(f"--overlap: attention backend {backend.name} {refused}; use --no-overlap or another backend")
    on = refused is None and (config.overlap is not None or captures(config, device, backend.capabilities))
    return 2 if on else 1


def overlap_refused(able: Capabilities) -> str | None:
    """Why a round on this backend cannot be launched before the host knows the last one's results; None if it can."""
    return "plans a round with exact lengths on the host" if able.needs_host_extents else None


def captures(config: EngineConfig, device: torch.device, able: Capabilities) -> bool:
    """Whether rounds run as captured CUDA graphs."""
    return config.graphs == "auto" and device.type == "cuda" and able.captures


def read_draft_spec(config: EngineConfig, folder: Path, target: ModelSpec) -> Eagle3Spec:
    """The draft head's spec, and whether the options fit it."""
    spec = read_eagle3_spec(folder, target, config.speculative_algorithm, config.load_format == "dummy")
    if config.speculative_eagle_topk > spec.draft_vocab_size:
        raise ConfigError(
            f"--speculative-eagle-topk {config.speculative_eagle_topk} exceeds the draft vocabulary of"
            f" {spec.draft_vocab_size}"
        )
    return spec


def build_device(
    config: EngineConfig,
    pure: Pure,
    layout: Layout,
    target_from: tuple[Path, ModelSpec],
    draft_from: tuple[Path, Eagle3Spec] | None,
    place: Placement,
) -> tuple[Device, RedZones | None]:
    """Load weights and allocate memory; at check level 3 every buffer lies between red zones."""
    backend = make_backend(config.attention_backend, backend_need(layout, target_from[1], draft_from, place))
    zones = RedZones(place.device) if config.check_level >= 3 else None
    zeros: Zeros = zones.zeros if zones is not None else partial(zeros_on, place.device)
    aux = draft_from[1].aux_inputs if draft_from is not None else ()
    target = load_target(*target_from, aux, place)
    head = load_eagle3(*draft_from, target, place) if draft_from is not None else None
    pools = make_pools(layout, place.dtype, zeros)
    layers = {name: pool.layers() for name, pool in pools.items()}
    spec = target_from[1]
    device = Device(
        layout=layout,
        pure=pure,
        check_level=config.check_level,
        simulate_accept_length=config.simulate_accept_length,
        target=target,
        head=head,
        backend=backend,
        ops=place.ops,
        pools=pools,
        state=make_state(layout, head.spec.layer.hidden_size if head is not None else None, place.dtype, zeros),
        buffers=make_round_buffers(layout, len(aux), spec.hidden_size, place.dtype, zeros),
        target_layers=_in_order(spec, layers),
        draft_layers=layers.get(DRAFT, []),
        probes=Probes.make(place.device, config.check_level >= 2),
    )
    return device, zones


def backend_need(layout: Layout, spec: ModelSpec, draft_from: tuple[Path, Eagle3Spec] | None, place: Placement) -> Need:
    """What this engine asks of its attention backend."""
    draft = draft_from[1] if draft_from is not None else None
    return Need(place.dtype, place.device, layout.page_size, _group_needs(layout.groups, spec, draft))


def _group_needs(groups: tuple[KVGroup, ...], spec: ModelSpec, draft: Eagle3Spec | None) -> tuple[GroupNeed, ...]:
    needs = []
    for group in groups:
        heads = draft.layer.num_heads if group.is_draft and draft is not None else spec.num_heads
        needs.append(GroupNeed(group.name, heads, group.kv_heads, group.head_dim, group.window))
    return tuple(needs)


def _groups(spec: ModelSpec, draft: Eagle3Spec | None) -> list[KVGroup]:
    """KV groups of the target's layers by window, and the draft's."""
    groups = []
    for window in dict.fromkeys(spec.windows):  # distinct, in order
        name = FULL if window is None else WINDOW
        groups.append(KVGroup(name, spec.windows.count(window), spec.kv_heads, spec.head_dim, window))
    if len({group.name for group in groups}) != len(groups):
        raise ConfigError("a model with two different windows is not supported")
    if draft is not None:
        groups.append(KVGroup(DRAFT, 1, draft.layer.kv_heads, draft.layer.head_dim))
    return groups


def _in_order(spec: ModelSpec, layers: dict[GroupName, list[LayerKV]]) -> list[LayerKV]:
    """The target's layers in the model's order, each with its place in its group."""
    queues = {name: iter(places) for name, places in layers.items()}
    return [next(queues[FULL if window is None else WINDOW]) for window in spec.windows]


def zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
