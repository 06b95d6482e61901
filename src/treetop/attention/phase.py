"""How the layers of one phase attend: they hand over projections and get the output, and never learn the phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend, TailKV
from treetop.attention.tail import attend
from treetop.kernels.fused import HeadNorms
from treetop.kernels.kv import PagedKV
from treetop.kernels.ops import Ops
from treetop.types.ids import GroupName


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Where one layer's K/V live: its group, its index in the group, and its pages."""

    group: GroupName
    index: int
    kv: PagedKV


class Attend(Protocol):
    """Norm and rotate, store K/V, attend.

    qkv: [parts, rows, n, heads + 2 * kv_heads, d], fresh from the projection; it is used up. angles: `Ops.angles` of
    the queries' positions. norms: of query and key heads, if the layer has any. Returns [rows, n, heads, d].
    """

    def __call__(self, layer: int, qkv: Tensor, angles: Any, norms: HeadNorms | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TailAttention:
    """A decode phase: new K/V go to columns `start .. start + n` of the tail; queries see prefix and `width` columns.

    tails: group -> [layers, max rows, capacity, 2, kv_heads, head_dim]. plans: group -> the backend's plan, made for a
    tail of `width` columns.
    """

    backend: AttentionBackend[Any, Any]
    ops: Ops
    layers: Sequence[LayerKV]
    tails: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    start: int
    width: int
    scale: float

    def __call__(self, layer: int, qkv: Tensor, angles: Any, norms: HeadNorms | None) -> Tensor:
        place = self.layers[layer]
        rows, n = qkv.shape[1:3]
        tail = self.tails[place.group][place.index, :rows, : self.width]
        q = self.ops.rotate_and_write(qkv, angles, tail[:, self.start : self.start + n], None, norms)
        return self.backend.prefix_tail(q, place.kv, self.plans[place.group], TailKV(tail), self.scale)


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """A prefill phase: new K/V go to the pages first, then queries see all positions up to their own.

    slots: group -> [rows, n] int64, the null slot for padding.
    """

    backend: AttentionBackend[Any, Any]
    ops: Ops
    layers: Sequence[LayerKV]
    slots: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    scale: float

    def __call__(self, layer: int, qkv: Tensor, angles: Any, norms: HeadNorms | None) -> Tensor:
        place = self.layers[layer]
        q = self.ops.rotate_and_write(qkv, angles, place.kv.data, self.slots[place.group], norms)
        return self.backend.causal(q, place.kv, self.plans[place.group], self.scale)


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Attention of a whole sequence over itself, without pages: what everything else must agree with."""

    ops: Ops
    dtype: torch.dtype
    kv_heads: int
    scale: float
    windows: Sequence[int | None]

    def __call__(self, layer: int, qkv: Tensor, angles: Any, norms: HeadNorms | None) -> Tensor:
        _, rows, n, _, dim = qkv.shape
        kv = torch.empty((rows, n, 2, self.kv_heads, dim), dtype=self.dtype, device=qkv.device)
        q, window = self.ops.rotate_and_write(qkv, angles, kv, None, norms), self.windows[layer]
        index = torch.arange(n, device=q.device)
        distance = index[:, None] - index
        visible = (distance >= 0) & (distance < (n if window is None else window))
        return attend(q, kv[:, :, 0], kv[:, :, 1], visible.expand(q.shape[0], n, n), self.scale)[0]
