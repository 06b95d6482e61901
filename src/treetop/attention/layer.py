"""How the layers of one phase attend: they hand over queries and K/V and get the output, and never learn the phase."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend, SparseBackend, TailKV
from treetop.attention.recurrent import DenseRecurrence, NodeRecurrence, Recurrence
from treetop.attention.tail import attend, with_sinks
from treetop.checks.probes import Probes
from treetop.kernels.attention.indexer import IndexQuery, choose_keys
from treetop.kernels.attention.metadata import first_seen
from treetop.kernels.kv import KVParts, PagedKV, decoded, kv_dtype, write_pages
from treetop.kernels.recurrent.states import StateInputs
from treetop.types.ids import GroupName
from treetop.types.kv import KVFormat
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Where one layer's K/V live: its group, its index in the group, and its pages."""

    group: GroupName
    index: int
    kv: PagedKV


WriteKV = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""(target, slots, scales) -> queries [rows, n, heads, d]: writes a layer's new K/V, in its format, and gives queries.

target: columns of a tail [rows, n, *format]; or, with slots [rows, n] int64, pages [slots, *format], where what goes to
slot 0 is dropped. scales: [planes, kv_heads] float32, of a target in FP8. `Ops.rotate_and_write` is one, of
grouped-query attention.
"""


Index = IndexQuery | int
"""What chooses the keys that a layer's sparse attention sees, or the layer whose choice it shares."""


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """The keys that an indexer has chosen in a forward, by the layer that it is of; only the last that chose counts.

    probes: whether a layer is to see a key that its plan does not show it.
    phase: of the forward.
    rows: [rows] int64, of the batch.
    """

    backend: AttentionBackend[Any, Any]
    probes: Probes
    phase: Phase
    rows: Tensor
    chosen: dict[int, Any] = field(default_factory=dict)

    def narrowed(self, layer: int, index: Index | None, kv: PagedKV, plan: Any, tail: TailKV | None) -> Any:
        """The plan of a layer, which shows what was chosen alone; as it is without an indexer."""
        if index is None:
            return plan
        backend = cast(SparseBackend[Any], self.backend)
        if isinstance(index, IndexQuery):
            self.chosen.clear()  # a prefill's choice is large
            self.chosen[layer] = backend.choose(index, kv, plan, tail)
            index = layer
        chosen = self.chosen[index]
        if self.probes.enabled:
            self.probes.index(backend.hidden(plan, chosen), -1, 0, "chosen_key", self.phase, self.rows)
        return backend.narrowed(plan, chosen)


class Attend(Protocol):
    """Have K/V written where they belong, and attend; or, in a recurrent layer, go on from the rows' states.

    layer: index among the model's. scale: of scores. sinks: [heads] float32, if the layer has any. index: what chooses
    the keys of sparse attention, or the layer before whose choice counts. Returns [rows, n, heads, value_dim].
    """

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor: ...

    def write(self, layer: int, write: WriteKV) -> Tensor:
        """Have K/V written, and attend to nothing. Returns the queries."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A depthwise convolution along each token's own past, which the row keeps. No activation.

        x: [rows, n, channels]. weight: [channels, taps], the token's own tap last. bias: [channels]. Returns x's shape.
        """

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        """What each token reads of the state after it, which the row keeps: [rows, n, heads, value_dim]."""

    def live(self) -> Tensor | None:
        """Mask of non-padding tokens: [rows, n] bool; None if all are. What is padding needs no work.

        It may be longer, [tokens], where ranks exchange as many tokens as the one that has most.
        """
        ...


def nodes_of(attend: Attend) -> NodeRecurrence | None:
    """What recurrent layers of a verification go on from, row by row; None in other phases."""
    found = attend.recurrence if isinstance(attend, TailAttention) else None
    return found if isinstance(found, NodeRecurrence) else None


def written_plainly(
    write: WriteKV, parts: KVParts, shape: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """K/V in the engine's dtype, [*shape, head_dim], of layers that store them in parts; and the queries."""
    numbers = sum(part.numbers for part in parts.parts)
    plain = torch.empty((*shape, numbers), dtype=parts.engine, device=device)
    return plain, write(plain, None, None)


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

    keys: of this forward's layers, and the backend.
    tails: group -> [layers, max rows, capacity, *format].
    plans: group -> the backend's plan, made for as many columns.
    rows: [rows] int64, of the batch.
    recurrence: of the recurrent layers, if there are any.
    """

    keys: ChosenKeys
    layers: Mapping[int, LayerKV]
    tails: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    columns: TailColumns
    rows: Tensor
    dummy_row: int
    recurrence: Recurrence | None = None

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence.convolve(layer, x, weight, bias)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence.recur(layer, inputs)

    def live(self) -> Tensor:
        return (self.rows != self.dummy_row)[:, None].expand(-1, self.columns.count)

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor:
        place, tail = self.layers[layer], self._tail(layer)
        q = self.write(layer, write)
        seen = TailKV(tail, place.kv.value_dim, place.kv.index_dim, place.kv.scales, place.kv.parts)
        plan = self.keys.narrowed(layer, index, place.kv, self.plans[place.group], seen)
        return self.keys.backend.prefix_tail(q, place.kv, plan, seen, scale, sinks)

    def write(self, layer: int, write: WriteKV) -> Tensor:
        at, kv = self.columns, self.layers[layer].kv
        columns = self._tail(layer)[:, at.start : at.start + at.count]
        if kv.parts is None:
            return write(columns, None, kv.scales)
        plain, q = written_plainly(write, kv.parts, columns.shape[:-1], columns.device)
        columns.copy_(kv.parts.packed(plain))
        return q

    def _tail(self, layer: int) -> Tensor:
        """What queries see of it, [rows, width, *format]."""
        place, at = self.layers[layer], self.columns
        return self.tails[place.group][place.index, : at.rows, : at.width]


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """A prefill phase: new K/V go to the pages first, then queries see all positions up to their own.

    keys: of this forward's layers, and the backend.
    slots: group -> [rows, n] int64, the null slot for padding.
    valid: [rows, n] bool, what is not padding; see `live`.
    recurrence: of the recurrent layers, if there are any.
    """

    keys: ChosenKeys
    layers: Mapping[int, LayerKV]
    slots: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    valid: Tensor
    recurrence: Recurrence | None = None

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence.convolve(layer, x, weight, bias)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence.recur(layer, inputs)

    def live(self) -> Tensor:
        return self.valid

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor:
        place, q = self.layers[layer], self.write(layer, write)
        plan = self.keys.narrowed(layer, index, place.kv, self.plans[place.group], None)
        return self.keys.backend.causal(q, place.kv, plan, scale, sinks)

    def write(self, layer: int, write: WriteKV) -> Tensor:
        place = self.layers[layer]
        kv, slots = place.kv, self.slots[place.group]
        if kv.parts is None:
            return write(kv.data, slots, kv.scales)
        plain, q = written_plainly(write, kv.parts, (*slots.shape, *kv.data.shape[1:-1]), slots.device)
        write_pages(kv, slots, kv.parts.packed(plain))
        return q


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Attention of one sequence of `length` over itself, without pages: what everything else must agree with.

    layers: of each that attends, by index: the format, its window and whether that is a chunk's, whose K/V it
        reads, and the scales of these in FP8.
    caps: of scores, of layers that have one.
    recurrence: of the others.
    """

    length: int
    dtype: torch.dtype
    device: torch.device
    layers: Mapping[int, tuple[KVFormat, int | None, bool, int, Tensor | None]]
    recurrence: DenseRecurrence = field(default_factory=DenseRecurrence)
    caps: Mapping[int, float] = field(default_factory=dict)
    _written: dict[int, Tensor] = field(default_factory=dict)
    _chosen: dict[int, Tensor] = field(default_factory=dict)

    def live(self) -> None:
        return None

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.recurrence.convolve(layer, x, weight, bias)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        return self.recurrence.recur(layer, inputs)

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor:
        n, (form, window, chunked, source, scales) = self.length, self.layers[layer]
        q, position = self.write(layer, write), torch.arange(n, device=self.device)
        kv = self._written[source]
        visible = position <= position[:, None]
        if window is not None:
            visible = visible & (position >= first_seen(position, window, chunked)[:, None])
        visible = visible.expand(1, n, n)
        seen = TailKV(decoded(kv, scales, self.dtype), form.value_dim, form.index_dim)
        if isinstance(index, IndexQuery):
            visible = self._chosen[layer] = choose_keys(index, TailKV(kv, index_dim=form.index_dim).index_keys, visible)
        elif index is not None:
            visible = self._chosen[index]
        out, lse = attend(q, seen.k, seen.v, visible, scale, self.caps.get(layer))
        return out if sinks is None else with_sinks(out, lse, sinks)

    def write(self, layer: int, write: WriteKV) -> Tensor:
        form, _, _, source, scales = self.layers[layer]
        if form.parts:  # no layer reads another's
            parts, shape = KVParts(form.parts, self.dtype), (1, self.length, form.planes, form.heads)
            plain, q = written_plainly(write, parts, shape, self.device)
            self._written[layer] = parts.unpacked(parts.packed(plain))
            return q
        if source == layer:
            stored = kv_dtype(form, self.dtype)
            self._written[layer] = torch.empty((1, self.length, *form.shape), dtype=stored, device=self.device)
        return write(self._written[source], None, scales)
