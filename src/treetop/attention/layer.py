"""How the layers of one phase attend: they hand over queries and K/V and get the output, and never learn the phase."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend, TailKV
from treetop.attention.tail import attend, with_sinks
from treetop.kernels.kv import PagedKV
from treetop.types.ids import GroupName
from treetop.types.kv import KVFormat


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Where one layer's K/V live: its group, its index in the group, and its pages."""

    group: GroupName
    index: int
    kv: PagedKV


WriteKV = Callable[[Tensor, Tensor | None], Tensor]
"""(target, slots) -> queries [rows, n, heads, d]: writes a layer's new K/V, in its format, and gives its queries.

target: columns of a tail [rows, n, *format]; or, with slots [rows, n] int64, pages [slots, *format], where what goes to
slot 0 is dropped. `Ops.rotate_and_write` is one, of grouped-query attention.
"""


class Attend(Protocol):
    """Have K/V written where they belong, and attend.

    layer: index among the model's. scale: of scores. sinks: [heads] float32, if the layer has any. Returns [rows, n,
    heads, d].
    """

    def __call__(self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None) -> Tensor: ...

    def live(self) -> Tensor | None:
        """Which tokens of the batch are somebody's: [rows, n] bool; None if all are. What is padding needs no work.

        It may be longer, [tokens], where ranks exchange as many tokens as the one that has most.
        """
        ...


@dataclass(frozen=True, slots=True)
class TailColumns:
    """Of a tail, in a batch of `rows`: new K/V go to `count` of them from `start` on, queries see the first `width`."""

    rows: int
    start: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class TailAttention:
    """A decode phase: queries see the prefix and columns of the tail.

    tails: group -> [layers, max rows, capacity, *format]. plans: group -> the backend's plan, made for as many columns.
    rows: [rows] int64, of the batch.
    """

    backend: AttentionBackend[Any, Any]
    layers: Sequence[LayerKV]
    tails: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    columns: TailColumns
    rows: Tensor
    dummy_row: int

    def live(self) -> Tensor:
        return (self.rows != self.dummy_row)[:, None].expand(-1, self.columns.count)

    def __call__(self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None) -> Tensor:
        place, at = self.layers[layer], self.columns
        tail = self.tails[place.group][place.index, : at.rows, : at.width]
        q = write(tail[:, at.start : at.start + at.count], None)
        return self.backend.prefix_tail(q, place.kv, self.plans[place.group], TailKV(tail), scale, sinks)


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """A prefill phase: new K/V go to the pages first, then queries see all positions up to their own.

    slots: group -> [rows, n] int64, the null slot for padding. valid: [rows, n] bool, what is not padding; see `live`.
    """

    backend: AttentionBackend[Any, Any]
    layers: Sequence[LayerKV]
    slots: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    valid: Tensor

    def live(self) -> Tensor:
        return self.valid

    def __call__(self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None) -> Tensor:
        place = self.layers[layer]
        q = write(place.kv.data, self.slots[place.group])
        return self.backend.causal(q, place.kv, self.plans[place.group], scale, sinks)


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Attention of one sequence of `length` over itself, without pages: what everything else must agree with.

    layers: the format and the window of each.
    """

    length: int
    dtype: torch.dtype
    device: torch.device
    layers: Sequence[tuple[KVFormat, int | None]]

    def live(self) -> None:
        return None

    def __call__(self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None) -> Tensor:
        n, (form, window) = self.length, self.layers[layer]
        kv = torch.empty((1, n, *form.shape), dtype=self.dtype, device=self.device)
        q, index = write(kv, None), torch.arange(n, device=self.device)
        distance = index[:, None] - index
        visible = (distance >= 0) & (distance < (n if window is None else window))
        out, lse = attend(q, kv[:, :, 0], kv[:, :, -1], visible.expand(1, n, n), scale)
        return out if sinks is None else with_sinks(out, lse, sinks)
