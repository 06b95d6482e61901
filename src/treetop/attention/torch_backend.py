"""The reference backend: gathers pages and calls PyTorch's attention. Runs anywhere, in every dtype."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.contract import Queries, TableView, TailKV
from treetop.attention.tail import attend, tail_visible
from treetop.kernels.kv import PagedKV, slots_of


@dataclass(frozen=True, slots=True)
class TorchPrefix:
    """Slots and visibility of positions 0 .. width-1. slots: [rows, width] int64; visible: [rows, width] bool."""

    slots: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """visible: [rows, n, width (+ t)] bool, the prefix then the tail."""

    prefix: TorchPrefix
    visible: Tensor


class TorchBackend:
    """Fused prefix + tail: one gather, one concatenation, one call for both parts."""

    name = "torch"

    def begin(self, view: TableView) -> TorchPrefix:
        positions = torch.arange(view.bound, device=view.rows.device)[None]
        visible = positions < view.extent[:, None]
        slots = slots_of(view.page_table, view.rows, positions, visible, view.page_size)
        return TorchPrefix(slots, visible)

    def plan(self, prefix: TorchPrefix, queries: Queries) -> TorchPlan:
        visible = _prefix_visible(prefix, queries.positions, queries.window)
        return TorchPlan(prefix, torch.cat([visible, tail_visible(queries)], dim=2))

    def plan_causal(self, prefix: TorchPrefix, positions: Tensor, window: int | None) -> TorchPlan:
        keys = torch.arange(prefix.slots.shape[1], device=positions.device)
        causal = keys <= positions[:, :, None]
        # A padding query lies past its row's extent; the key at position 0 keeps its softmax from being empty.
        visible = (_prefix_visible(prefix, positions, window) & causal) | (keys == 0)
        return TorchPlan(prefix, visible)

    def prefix(self, q: Tensor, kv: PagedKV, plan: TorchPlan, scale: float) -> tuple[Tensor, Tensor]:
        width = plan.prefix.slots.shape[1]
        return attend(q, *_gather(kv, plan.prefix), plan.visible[:, :, :width], scale)

    def prefix_tail(self, q: Tensor, kv: PagedKV, plan: TorchPlan, tail: TailKV, scale: float) -> Tensor:
        k, v = _gather(kv, plan.prefix)
        return _sdpa(q, torch.cat([k, tail.k], dim=1), torch.cat([v, tail.v], dim=1), plan.visible, scale)

    def causal(self, q: Tensor, kv: PagedKV, plan: TorchPlan, scale: float) -> Tensor:
        return _sdpa(q, *_gather(kv, plan.prefix), plan.visible, scale)


def _prefix_visible(prefix: TorchPrefix, positions: Tensor, window: int | None) -> Tensor:
    """[rows, n, width] bool: within the extent, and within the window by position."""
    rows, n = positions.shape
    if window is None:
        return prefix.visible[:, None].expand(rows, n, -1)
    keys = torch.arange(prefix.slots.shape[1], device=positions.device)
    return prefix.visible[:, None] & (positions[:, :, None] - keys < window)


def _gather(kv: PagedKV, prefix: TorchPrefix) -> tuple[Tensor, Tensor]:
    """K and V of the prefix: [rows, width, kv_heads, head_dim]; masked lanes read the null slot, which is finite."""
    flat = prefix.slots.reshape(-1)
    shape = prefix.slots.shape
    return kv.k.index_select(0, flat).unflatten(0, shape), kv.v.index_select(0, flat).unflatten(0, shape)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
