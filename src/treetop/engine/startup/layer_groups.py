"""Which layers share a group, of K/V or of states: what pools, states and attention backends are made for."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.contract import as_it_is
from treetop.attention.layer import LayerKV
from treetop.attention.recurrent import RecurrentLayer
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.protocol import DrafterSpec
from treetop.engine.routed_experts import expert_group
from treetop.kernels.recurrent.states import LinearStates
from treetop.models.config import AttentionSpec, ModelConfig, attention_of_rank
from treetop.types.errors import ConfigError
from treetop.types.ids import FULL, INDEXED, STATE, WINDOW, GroupName, draft_group, state_group
from treetop.types.kv import KVFormat
from treetop.types.layout import KVGroup, Layout
from treetop.types.routed_experts import ExpertShape
from treetop.types.state import StateGroup


def backend_need(layout: Layout, model: ModelConfig, draft: DrafterSpec | None, place: LoadContext) -> Need:
    """What this engine asks of its attention backend."""
    groups = group_needs(model, draft, place.parallel.size)
    queries = max(layout.verify_tail, layout.extend_tail, layout.max_topk, layout.block)
    rows = layout.max_requests
    in_flight = layout.max_in_flight
    fp8 = any(group.kv.fp8 for group in layout.groups)
    exact, integers = place.profile.exact_attention, place.profile.integers.attention
    need = Need(place.dtype, place.device, layout.page_size, groups, in_flight, rows, queries, exact, fp8)
    return replace(need, integers=integers)


def group_needs(model: ModelConfig, draft: DrafterSpec | None, ranks: int) -> tuple[GroupNeed, ...]:
    """What one of `ranks` ranks asks for, of each KV group."""
    return tuple(
        GroupNeed(
            name,
            of[0].num_heads,
            of[0].kv.heads,
            of[0].head_dim,
            of[0].window,
            of[0].kv.value_dim,
            top_k=max(0 if layer.index is None else layer.index.top_k for layer in of),
            cap=of[0].score_cap,
            index_dim=of[0].kv.index_dim,
        )
        for name, of in layer_groups(model, draft, ranks).items()
    )


def kv_groups(
    model: ModelConfig,
    draft: DrafterSpec | None,
    ranks: int,
    fp8: bool = False,
    fp8_draft: bool = False,
    stores: Callable[[KVFormat], KVFormat] = as_it_is,
    experts: ExpertShape | None = None,
) -> tuple[KVGroup, ...]:
    """The KV groups of one of `ranks` ranks.

    fp8: the target's K/V are in it; fp8_draft: the draft's own. stores: of the attention backend. experts: a group
    of those that tokens went to, the last; None for none.
    """
    of_draft = () if draft is None else draft_groups(draft)
    of_layers = tuple(
        KVGroup(
            name,
            len(of),
            stores(replace(of[0].kv, fp8=fp8_draft if name in of_draft else fp8)),
            of[0].window,
            of[0].chunked,
        )
        for name, of in layer_groups(model, draft, ranks).items()
    )
    return of_layers if experts is None else (*of_layers, expert_group(experts))


def layer_groups(model: ModelConfig, draft: DrafterSpec | None, ranks: int = 1) -> dict[GroupName, list[AttentionSpec]]:
    """KV group -> the layers that it has K/V of: the target's by window or indexer, the drafter's by window and block.

    ranks: that share the models; each layer is what one of them computes.
    """
    groups: dict[GroupName, list[AttentionSpec]] = {}
    for attention in model.attention.values():
        if attention.kv_sharing_layer is None:
            groups.setdefault(group_of(attention), []).append(attention_of_rank(attention, ranks))
    if draft is not None:
        for name, own in zip(draft_groups(draft), draft.attention, strict=True):
            groups.setdefault(name, []).append(attention_of_rank(own, ranks))
    for name, layers in groups.items():
        if len({(layer.window, layer.chunked) for layer in layers}) != 1:
            raise ConfigError("a model with two different windows is not supported")
        if len({layer.score_cap for layer in layers}) != 1:
            raise ConfigError(f"layers of KV group {name} with different caps of scores are not supported")
        if len({(layer.num_heads, layer.kv) for layer in layers}) != 1:
            raise ConfigError(f"layers of KV group {name} with different heads are not supported")
    return groups


def draft_groups(draft: DrafterSpec) -> tuple[GroupName, ...]:
    """The KV group of each of a drafter's layers."""
    causal = (True,) * len(draft.attention) if draft.block is None else draft.block.causal
    kinds = [(layer.window, sees) for layer, sees in zip(draft.attention, causal, strict=True)]
    order = list(dict.fromkeys(kinds))
    return tuple(draft_group(order.index(kind)) for kind in kinds)


def causal_blocks(draft: DrafterSpec | None) -> dict[GroupName, bool]:
    """KV group -> whether queries of the drafter's block see it up to themselves alone. Empty without a block."""
    if draft is None or draft.block is None:
        return {}
    return dict(zip(draft_groups(draft), draft.block.causal, strict=True))


def draft_layers_in_order(
    draft: DrafterSpec | None, layers: dict[GroupName, list[LayerKV]], target: Mapping[int, LayerKV]
) -> dict[int, LayerKV]:
    """Where the K/V that each of the drafter's layers reads live, by index: its own, or of the target's layers."""
    if draft is None:
        return {}
    queues = {name: iter(places) for name, places in layers.items()}
    places = [target[index] for index in draft.reads_target] or [next(queues[name]) for name in draft_groups(draft)]
    return dict(enumerate(places))


def group_of(attention: AttentionSpec) -> GroupName:
    """The KV group of a layer of the target."""
    if attention.kv.index_dim:
        return INDEXED
    return FULL if attention.window is None else WINDOW


def layers_in_order(model: ModelConfig, layers: dict[GroupName, list[LayerKV]]) -> dict[int, LayerKV]:
    """The target's layers that attend, by index, each with the place in its group of the K/V that it reads."""
    queues = {name: iter(places) for name, places in layers.items()}
    found: dict[int, LayerKV] = {}
    for index, attention in model.attention.items():
        shared = attention.kv_sharing_layer
        found[index] = next(queues[group_of(attention)]) if shared is None else found[shared]
    return found


def state_groups(model: ModelConfig, ranks: int = 1) -> tuple[StateGroup, ...]:
    """The groups of states of one of `ranks` ranks: layers of one kind each, in the order of their first layers."""
    kinds = [spec.of_rank(ranks).state(STATE, 1) for spec in model.recurrent.values()]
    return tuple(
        replace(kind, name=state_group(i), num_layers=kinds.count(kind)) for i, kind in enumerate(dict.fromkeys(kinds))
    )


def recurrent_layers(model: ModelConfig, states: Mapping[GroupName, LinearStates]) -> dict[int, RecurrentLayer]:
    """The target's recurrent layers, by index, each with the place of its states in its group."""
    kinds = {index: spec.state(STATE, 1) for index, spec in model.recurrent.items()}
    order, found = list(dict.fromkeys(kinds.values())), dict[int, RecurrentLayer]()
    for index, kind in kinds.items():
        name = state_group(order.index(kind))
        found[index] = RecurrentLayer(name, sum(each.group == name for each in found.values()), states[name])
    return found
