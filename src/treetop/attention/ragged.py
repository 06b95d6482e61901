"""How layers attend in a verification whose trees a budget has cut: products see the nodes that are left, one after the
other, and attention each row's.

    tokens of the forward  | row 0: count 0 nodes | row 1: count 1 | row 2: count 2 ..   [N, 1, ...]
    the tail               | the same entries, in the memory of [rows, T]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from treetop.attention.contract import FlatBackend, TailKV
from treetop.attention.layer import ChosenKeys, Index, LayerKV, WriteKV, written_plainly
from treetop.attention.recurrent import Recurrence
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.flat import packed_nodes, spread_nodes
from treetop.kernels.kv import moved
from treetop.kernels.recurrent.states import StateInputs
from treetop.types.ids import GroupName
from treetop.types.tree import FlatNodes


@dataclass(frozen=True, slots=True)
class RaggedAttention:
    """An `Attend` of the flat nodes [N, 1]: queries see the prefix and their row's part of a flat tail.

    A backend that takes flat nodes is given them. Any other is given [rows, T] queries and columns, of which those past
    a row's count are its root's, and what it says of these is dropped: so whatever holds of whole trees holds of these.

    keys, layers, plans, recurrence: as of `TailAttention`, for [rows, T].
    tails: group -> [layers, entries, *format].
    flat: where the nodes stand.
    node_live: [N] bool.
    """

    keys: ChosenKeys
    layers: Mapping[int, LayerKV]
    tails: Mapping[GroupName, Tensor]
    plans: Mapping[GroupName, Any]
    flat: FlatNodes
    node_live: Tensor
    recurrence: Recurrence | None = None

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert self.recurrence is not None
        return self._packed(self.recurrence.convolve(layer, self._spread(x), weight, bias))

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        assert self.recurrence is not None
        q, k, v, g = (self._spread(each) for each in (inputs.q, inputs.k, inputs.v, inputs.g))
        beta = None if inputs.beta is None else self._spread(inputs.beta)
        return self._packed(self.recurrence.recur(layer, StateInputs(q, k, v, g, beta)))

    def live(self) -> Tensor:
        return self.node_live[:, None]

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor:
        place, tail = self.layers[layer], self._tail(layer)
        q = self.write(layer, write)
        seen = TailKV(tail, place.kv.value_dim, place.kv.index_dim, place.kv.scales, place.kv.parts)
        if index is None and self.keys.backend.capabilities.flat:
            backend = cast(FlatBackend, self.keys.backend)
            out = backend.flat_prefix_tail(q, place.kv, self.plans[place.group], seen, scale, sinks)
            if out is not None:
                return out
        if isinstance(index, IndexQuery):
            index = IndexQuery(self._spread(index.heads), self._spread(index.weights), index.top_k)
        seen = replace(seen, data=self._spread(moved(tail)).view(tail.dtype))
        plan = self.keys.narrowed(layer, index, place.kv, self.plans[place.group], seen)
        return self._packed(self.keys.backend.prefix_tail(self._spread(q), place.kv, plan, seen, scale, sinks))

    def write(self, layer: int, write: WriteKV) -> Tensor:
        tail, kv = self._tail(layer), self.layers[layer].kv
        if kv.parts is None:
            return write(tail, None, kv.scales)
        plain, q = written_plainly(write, kv.parts, tail.shape[:-1], tail.device)
        tail.copy_(kv.parts.packed(plain))
        return q

    def _tail(self, layer: int) -> Tensor:
        """[N, 1, *format]."""
        place = self.layers[layer]
        return self.tails[place.group][place.index, : len(self.flat.at), None]

    def _spread(self, of_nodes: Tensor) -> Tensor:
        return spread_nodes(self.flat, of_nodes)

    def _packed(self, rows: Tensor) -> Tensor:
        return packed_nodes(self.flat, rows)
