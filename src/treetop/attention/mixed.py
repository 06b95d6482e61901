"""How the layers of a mixed step attend: prompts and nodes go through products together, and attend apart.

    tokens of the forward  | chunk 0, its padding | chunk 1 .. | row 0's nodes | row 1's nodes ..|     [N, 1, ...]
                           `-- as a prefill: K/V to pages,  --'`-- as a verification: K/V to    --'
                               causal                              the tail, prefix and tree

Each part computes what it computes alone. So whatever holds of prefills and of rounds, of windows, sinks, latents,
indexers, FP8, recurrent layers, or to the last bit, holds in a mixed step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import Attend, Index, LayerKV, WriteKV, written_plainly
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.kv import moved, write_pages
from treetop.kernels.recurrent.states import StateInputs
from treetop.types.ids import GroupName


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a mixed forward, one row after the other, and how they attend. rows, width: of its batch."""

    attend: Attend
    rows: int
    width: int

    @property
    def count(self) -> int:
        return self.rows * self.width

    def of(self, flat: Tensor) -> Tensor:
        """Of its tokens [count, 1, ...] what its phase expects: [rows, width, ...]."""
        return flat.reshape(self.rows, self.width, *flat.shape[2:])


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """An `Attend` of tokens [N, 1], of all parts in their order.

    layers: where the K/V that each layer reads live, by index.
    exchanged: tokens that ranks with shared experts exchange, where these are more than N.
    """

    parts: tuple[Part, ...]
    layers: Mapping[int, LayerKV]
    exchanged: int = 0
    _written: set[tuple[GroupName, int]] = field(default_factory=set)

    def __call__(
        self, layer: int, write: WriteKV, scale: float, sinks: Tensor | None = None, index: Index | None = None
    ) -> Tensor:
        writes, indices = self._writes(layer, write), self._indices(index)
        return self._joined(
            [
                part.attend(layer, own, scale, sinks, asked)
                for part, own, asked in zip(self.parts, writes, indices, strict=True)
            ]
        )

    def write(self, layer: int, write: WriteKV) -> Tensor:
        writes = self._writes(layer, write)
        return self._joined([part.attend.write(layer, own) for part, own in zip(self.parts, writes, strict=True)])

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        split = zip(self.parts, self._split(x), strict=True)
        return self._joined([part.attend.convolve(layer, own, weight, bias) for part, own in split])

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        split = [self._split(each) for each in (inputs.q, inputs.k, inputs.v, inputs.g)]
        betas = [None] * len(self.parts) if inputs.beta is None else self._split(inputs.beta)
        of_parts = zip(self.parts, *split, betas, strict=True)
        return self._joined([part.attend.recur(layer, StateInputs(*own)) for part, *own in of_parts])

    def live(self) -> Tensor:
        """The excess of exchanged tokens is the whole step's, behind all parts' own."""
        found = list[Tensor]()
        for part in self.parts:
            live = part.attend.live()
            assert live is not None
            found.append(live.reshape(-1)[: part.count])
        flat = torch.cat(found)
        return F.pad(flat, (0, max(self.exchanged - len(flat), 0)))

    def _writes(self, layer: int, write: WriteKV) -> list[WriteKV]:
        """All K/V are written once, in the form in which they are stored, and each part's are copied to where they
        belong. A layer that reads another's K/V writes none, and its queries alone are divided.
        """
        place = self.layers[layer]
        at, pages = (place.group, place.index), place.kv
        total = sum(part.count for part in self.parts)
        if pages.parts is None:
            kv = torch.empty((total, 1, *pages.data.shape[1:]), dtype=pages.data.dtype, device=pages.data.device)
            q = write(kv, None, pages.scales)
        else:
            kv, q = written_plainly(write, pages.parts, (total, 1, *pages.data.shape[1:-1]), pages.data.device)
        reads = at in self._written
        self._written.add(at)
        split = zip(self._split(q), self._split(kv), strict=True)
        return [_queries_of(own) if reads else _copying(own, new, place) for own, new in split]

    def _indices(self, index: Index | None) -> Sequence[Index | None]:
        if not isinstance(index, IndexQuery):
            return [index] * len(self.parts)
        heads, weights = self._split(index.heads), self._split(index.weights)
        return [IndexQuery(own, weight, index.top_k) for own, weight in zip(heads, weights, strict=True)]

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Of all tokens [N, 1, ...] each part's, [rows, width, ...]."""
        counts = [part.count for part in self.parts]
        return [part.of(own) for part, own in zip(self.parts, flat.split(counts), strict=True)]

    def _joined(self, outs: Sequence[Tensor]) -> Tensor:
        """Of all parts' [rows, width, ...] all tokens' [N, 1, ...]."""
        return torch.cat([each.flatten(0, 1) for each in outs])[:, None]


def _queries_of(q: Tensor) -> WriteKV:
    def write(target: Tensor, slots: Tensor | None, scales: Tensor | None) -> Tensor:
        return q

    return write


def _copying(q: Tensor, kv: Tensor, place: LayerKV) -> WriteKV:
    """Of K/V that are made already, [rows, width, *format]: they are copied to a tail's columns, or to slots."""

    def write(target: Tensor, slots: Tensor | None, scales: Tensor | None) -> Tensor:
        if slots is None:
            moved(target).copy_(moved(kv))
        else:
            write_pages(place.kv, slots, kv)
        return q

    return write
