"""The reference backend: gathers pages and calls PyTorch's attention. Runs anywhere, in every dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec, TailKV
from treetop.attention.tail import attend, with_sinks
from treetop.kernels.attention.attention import tail_visible
from treetop.kernels.attention.indexer import IndexQuery, choose_keys
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, Ruler, decoded, make_ruler, moved, slots_at
from treetop.types.ids import GroupName

# Pages are gathered as far as the bound says: a captured round would gather the whole context.
CAPABILITIES = Capabilities(
    (torch.float64, torch.float32, *HALF), latents=None, sparse=True, fp8_kv=True, caps=True, captures=False
)


@dataclass(frozen=True, slots=True)
class TorchPrefix:
    """Slots and visibility of positions 0 .. width-1.

    slots: [rows, width] int64.
    visible: [rows, width] bool.
    """

    slots: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """visible: [rows, n, width (+ t)] bool, the prefix then the tail.
    bias: 0 where visible, -inf elsewhere.
    cap: of scores.
    """

    prefix: TorchPrefix
    visible: Tensor
    bias: Tensor
    cap: float | None = None


class TorchBackend:
    """Fused prefix + tail: one gather, one concatenation, one call for both parts. caps: of scores, by KV group."""

    name = "torch"
    capabilities = CAPABILITIES

    def __init__(self, dtype: torch.dtype, device: torch.device, caps: Mapping[GroupName, float] | None = None) -> None:
        self._dtype, self._device, self._caps = dtype, device, caps or {}

        self._ruler: Ruler | None = None

    def begin(self, metadata: AttentionMetadata) -> TorchPrefix:
        ruler = self.ruler(metadata.max_kv_len, metadata)
        visible = ruler.positions < metadata.kv_len[:, None]
        slots = slots_at(metadata.table.data, metadata.rows, ruler.column, ruler.offset, visible, metadata.page_size)
        return TorchPrefix(slots, visible)

    def ruler(self, length: int, metadata: AttentionMetadata) -> Ruler:
        """Of so many positions in this page size."""
        kept = self._ruler
        if kept is None or kept.page_size != metadata.page_size or kept.positions.shape[1] < length:
            kept = self._ruler = make_ruler(2 * length, metadata.page_size, metadata.rows.device)
        cut = (each[:, :length] for each in (kept.positions, kept.column, kept.offset))
        return Ruler(metadata.page_size, *cut)

    def plan(self, begun: TorchPrefix, metadata: AttentionMetadata) -> TorchPlan:
        visible = _prefix_visible(begun, metadata)
        if metadata.causal:
            keys = torch.arange(begun.slots.shape[1], device=visible.device)
            causal = keys <= metadata.positions[:, :, None]
            # The dummy row has no key at all; the null slot, shown to it alone, keeps its softmax from being empty.
            empty = ~begun.visible[:, None, :1] & (keys == 0)
            visible = (visible & causal) | empty
        else:
            visible = torch.cat([visible, tail_visible(metadata)], dim=2)
        return self._showing(begun, visible, self._caps.get(metadata.table.group))

    def _showing(self, begun: TorchPrefix, visible: Tensor, cap: float | None) -> TorchPlan:
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return TorchPlan(begun, visible, bias.masked_fill_(~visible, float("-inf")), cap)

    def choose(self, query: IndexQuery, kv: PagedKV, plan: TorchPlan, tail: TailKV | None) -> Tensor:
        """[rows, n, width (+ t)] bool: what is visible, if that cannot be more than is chosen."""
        if plan.visible.shape[2] <= query.top_k:
            return plan.visible
        slots = plan.prefix.slots
        keys = moved(kv.index_keys).index_select(0, slots.reshape(-1)).unflatten(0, slots.shape)
        if tail is not None:
            keys = torch.cat([keys, moved(tail.index_keys)], dim=1)
        return choose_keys(query, keys.view(kv.data.dtype), plan.visible)

    def hidden(self, plan: TorchPlan, chosen: Tensor) -> Tensor:
        return first_hidden(plan.visible, chosen)

    def narrowed(self, plan: TorchPlan, chosen: Tensor) -> TorchPlan:
        return plan if chosen is plan.visible else self._showing(plan.prefix, chosen, plan.cap)

    def prefix_tail(
        self, q: Tensor, kv: PagedKV, plan: TorchPlan, tail: TailKV, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        stored = torch.cat([_gather(kv, plan.prefix), moved(tail.planes)], dim=1)
        return _attention(q, self._read(kv, stored), plan, scale, sinks)

    def causal(self, q: Tensor, kv: PagedKV, plan: TorchPlan, scale: float, sinks: Tensor | None = None) -> Tensor:
        return _at_once(q, self._read(kv, _gather(kv, plan.prefix)), plan, scale, sinks)

    def _read(self, kv: PagedKV, stored: Tensor) -> TailKV:
        """What K/V of a layer, gathered by `_gather`, stand for."""
        return TailKV(decoded(stored.view(kv.data.dtype), kv.scales, self._dtype, kv.parts), kv.value_dim)


def first_hidden(visible: Tensor, chosen: Tensor) -> Tensor:
    """[rows] int64: the first key that some query of a row has chosen and does not see, -1 for none."""
    wrong = (chosen & ~visible).any(dim=1)
    found: Tensor = torch.where(wrong.any(dim=1), wrong.to(torch.int8).argmax(dim=1), -1)
    return found


def _prefix_visible(prefix: TorchPrefix, metadata: AttentionMetadata) -> Tensor:
    """[rows, n, width] bool: within the extent, and within what the queries see by position."""
    if metadata.oldest is None:
        return prefix.visible[:, None].expand(-1, metadata.positions.shape[1], -1)
    keys = torch.arange(prefix.slots.shape[1], device=prefix.slots.device)
    return prefix.visible[:, None] & (keys >= metadata.oldest[:, :, None])


def _gather(kv: PagedKV, prefix: TorchPrefix) -> Tensor:
    """K/V of the prefix as `moved`: [rows, width, planes, kv_heads, d]; masked lanes read the null slot, which is
    finite."""
    planes = moved(kv.planes)
    return planes.index_select(0, prefix.slots.reshape(-1)).view(*prefix.slots.shape, *planes.shape[1:])


def _attention(q: Tensor, kv: TailKV, plan: TorchPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """q: [rows, n, heads, d]; kv: of all that is seen.

    A query whose result is not finite may have met an infinite number that it does not see, of a draft beside it, for
    0 * inf is no number: its row's queries are computed again, each with zeros in place of what it does not see.
    """
    out = _at_once(q, kv, plan, scale, sinks)
    for row in broken_rows(out):
        own = slice(row, row + 1)
        for node in range(q.shape[1]):
            at = slice(node, node + 1)
            visible = plan.visible[own, at]
            seen = TailKV(kv.data[own].where(visible[0, 0, :, None, None, None], 0.0), kv.value_dim)
            alone = replace(plan, visible=visible, bias=plan.bias[own, at])
            out[own, at] = _at_once(q[own, at], seen, alone, scale, sinks)
    return out


def broken_rows(out: Tensor) -> list[int]:
    """Rows of attention's result [rows, ...] that hold a number that is not finite; on a GPU, where to look is to
    wait, none is named."""
    if out.device.type != "cpu" or isfinite(out.sum(dtype=torch.promote_types(out.dtype, torch.float32)).item()):
        return []  # a sum that overflows is looked at closely, and names none either
    rows: list[int] = (~out.isfinite()).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    return rows


def _at_once(q: Tensor, kv: TailKV, plan: TorchPlan, scale: float, sinks: Tensor | None) -> Tensor:
    """All queries in one call.

    PyTorch's attention gives no lse, as sinks need, caps no scores, and would copy a plane that is key and value for
    every head.
    """
    if sinks is not None or plan.cap is not None or kv.data.shape[2] == 1:
        out, lse = attend(q, kv.k, kv.v, plan.visible, scale, plan.cap)
        return out if sinks is None else with_sinks(out, lse, sinks)
    k, v = kv.k.transpose(1, 2), kv.v.transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=plan.bias[:, None], scale=scale, enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)


def _make(need: Need) -> TorchBackend:
    caps = {group.name: group.cap for group in need.groups if group.cap is not None}
    return TorchBackend(need.dtype, need.device, caps)


BACKEND = BackendSpec(CAPABILITIES, _make)
