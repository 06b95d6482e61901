"""Low-rank adapters beside products: each row of a batch adds its own adapter's (`kernels.gemm.adapter_rows`).

    y[row] = W x[row] + B[slot of the row] (A[slot of the row] x[row])

Factors lie in the dtype in which models compute, whatever the weights beside them are held in. Tables are as they are
made for ever: captured rounds read them, so an adapter comes and goes in its slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from treetop.kernels.fused import joined
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.adapter_rows import AdapterFactors, RowTiles, most_tiles, tokens_of_tile
from treetop.kernels.table import Ops
from treetop.weights.format import Linear, Product


@runtime_checkable
class AddsAdapters(Protocol):
    """A `Linear` that adds what adapters do in its own launch, where it has few rows."""

    def adapted(self, x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor | None:
        """The parts of the product with x [rows, n, in] and what adapters add; None for more rows."""
        ...


@runtime_checkable
class ActivatesAdapted(Protocol):
    """`GatesAndUps` that are activated in that launch, too."""

    def adapted_gates(self, x: Tensor, factors: AdapterFactors, tiles: RowTiles) -> Tensor | None:
        """What a `GatedLinear` gives for x [rows, n, in], with what adapters add; None for more rows."""
        ...


class GatesAndUps(Product, Protocol):
    """Both of a `GatedLinear`, not activated."""

    def parts(self, x: Tensor) -> Tensor:
        """Returns [parts, ..., 2 * out], as of a `Linear`."""
        ...


@dataclass(frozen=True, slots=True)
class Adapters:
    """factors: by the name of the product's parameter. slots: how many, with that of no adapter.

    current: [rows] int64, the slots of the rows of the batch that a model is run on. tiled: [5, rows] int32, of
    `RowTiles`.
    """

    factors: Mapping[str, AdapterFactors]
    slots: int
    current: Tensor
    tiled: Tensor

    def select(self, slots: Tensor, n: int, ops: Ops) -> None:
        """What follows is of rows with these slots [rows] int64, n tokens each."""
        self.current[: len(slots)].copy_(slots)
        if ops.profile.batch_invariant or ops.gpu_for(Ops.shrink) is not None:
            ops.tile_rows(self.tiles(len(slots), n), self.slots)

    def tiles(self, rows: int, n: int) -> RowTiles:
        """Of a batch of so many rows with n tokens each."""
        per_tile = max(1, tokens_of_tile(n) // n)
        order, present, *where = self.tiled.unbind()
        most = most_tiles(rows, per_tile, self.slots)
        return RowTiles(per_tile, self.current[:rows], order[:rows], present[:rows], *(each[:most] for each in where))

    def linear(self, name: str, base: Linear, ops: Ops) -> Linear:
        """A product with what adapters add to it; as it is where they change nothing."""
        return AdaptedLinear(base, self.factors[name], self, ops) if name in self.factors else base


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A `Linear` for x [rows, n, in]."""

    base: Linear
    factors: AdapterFactors
    adapters: Adapters
    ops: Ops

    @property
    def numbers(self) -> int:
        return self.base.numbers

    def read_bytes(self, rows: int) -> int:
        return self.base.read_bytes(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return joined(self.parts(x)).to(x.dtype)

    def parts(self, x: Tensor) -> Tensor:
        tiles = self.adapters.tiles(*x.shape[:2])
        if isinstance(self.base, AddsAdapters):
            found = self.base.adapted(x, self.factors, tiles)
            if found is not None:
                return found
        inner = self.ops.shrink(x, self.factors, tiles)
        return self.ops.expand(self.base.parts(x), inner, self.factors, tiles)


@dataclass(frozen=True, slots=True)
class AdaptedGated:
    """A `GatedLinear` of a product whose gates and ups adapters change before they are activated."""

    both: GatesAndUps
    kind: Gate
    factors: AdapterFactors
    adapters: Adapters
    ops: Ops

    @property
    def numbers(self) -> int:
        return self.both.numbers

    def read_bytes(self, rows: int) -> int:
        return self.both.read_bytes(rows)

    def __call__(self, x: Tensor) -> Tensor:
        tiles = self.adapters.tiles(*x.shape[:2])
        if isinstance(self.both, ActivatesAdapted):
            found = self.both.adapted_gates(x, self.factors, tiles)
            if found is not None:
                return found
        inner = self.ops.shrink(x, self.factors, tiles)
        return self.ops.expand_gated(self.both.parts(x), inner, self.factors, tiles, self.kind)
