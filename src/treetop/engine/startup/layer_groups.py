"""Which layers share a KV group: what pools and attention backends are made for."""

from dataclasses import replace

from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.layer import LayerKV
from treetop.checkpoints.loader import Placement
from treetop.drafts.protocol import DrafterSpec
from treetop.models.config import AttentionSpec, ModelConfig, attention_of_rank
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL, INDEXED, WINDOW, GroupName
from treetop.types.layout import KVGroup, Layout


def backend_need(layout: Layout, model: ModelConfig, draft: DrafterSpec | None, place: Placement) -> Need:
    """What this engine asks of its attention backend."""
    groups = [
        GroupNeed(
            name,
            of[0].num_heads,
            of[0].kv.heads,
            of[0].head_dim,
            of[0].window,
            of[0].kv.value_dim,
            sparse=any(layer.index is not None for layer in of),
        )
        for name, of in layer_groups(model, draft, place.parallel.size).items()
    ]
    queries = max(layout.verify_tail, layout.extend_tail, layout.max_topk)
    rows = layout.max_requests
    in_flight = layout.max_in_flight
    fp8 = any(group.kv.fp8 for group in layout.groups)
    return Need(place.dtype, place.device, layout.page_size, tuple(groups), in_flight, rows, queries, place.exact, fp8)


def kv_groups(model: ModelConfig, draft: DrafterSpec | None, ranks: int, fp8: bool = False) -> tuple[KVGroup, ...]:
    """The KV groups of one of `ranks` ranks. fp8: K/V are in it, the draft's too."""
    return tuple(
        KVGroup(name, len(of), replace(of[0].kv, fp8=fp8), of[0].window, of[0].chunked)
        for name, of in layer_groups(model, draft, ranks).items()
    )


def layer_groups(model: ModelConfig, draft: DrafterSpec | None, ranks: int = 1) -> dict[GroupName, list[AttentionSpec]]:
    """KV group -> the layers that it has K/V of: the target's by window or indexer, and the drafter's, alike in shape.

    ranks: that share the models; each layer is what one of them computes.
    """
    groups: dict[GroupName, list[AttentionSpec]] = {}
    for layer in model.layers:
        if layer.attention.reads_layer is None:
            groups.setdefault(group_of(layer.attention), []).append(attention_of_rank(layer.attention, ranks))
    if draft is not None and draft.attention:
        groups[DRAFT] = [attention_of_rank(layer, ranks) for layer in draft.attention]
    for name, layers in groups.items():
        if len({(layer.window, layer.chunked) for layer in layers}) != 1:
            raise ConfigError("a model with two different windows is not supported")
        if len({(layer.num_heads, layer.kv) for layer in layers}) != 1:
            raise ConfigError(f"layers of KV group {name} with different heads are not supported")
    return groups


def group_of(attention: AttentionSpec) -> GroupName:
    """The KV group of a layer of the target."""
    if attention.kv.index_dim:
        return INDEXED
    return FULL if attention.window is None else WINDOW


def layers_in_order(model: ModelConfig, layers: dict[GroupName, list[LayerKV]]) -> list[LayerKV]:
    """The target's layers in the model's order, each with the place in its group of the K/V that it reads."""
    queues = {name: iter(places) for name, places in layers.items()}
    found: list[LayerKV] = []
    for attention in (layer.attention for layer in model.layers):
        shared = attention.reads_layer
        found.append(next(queues[group_of(attention)]) if shared is None else found[shared])
    return found
