"""Low-rank adapters beside products: each row of a batch adds its own adapter's, in one product for all rows.

    y[row] = W x[row] + B[slot of the row] (A[slot of the row] x[row])

Slot 0 is of rows without an adapter: its numbers are 0 for ever. Where a weight is joined of several modules (q, k and
v) each has a part of the ranks, so that one pair of products serves them all. Factors lie in the dtype in which models
compute, whatever the weights beside them are held in.
Source: L. Chen et al., "Punica: Multi-Tenant LoRA Serving", arXiv:2310.18547.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.exact import Functions
from treetop.kernels.gate import Gate, activated_reference
from treetop.weights.format import Linear


@dataclass(frozen=True, slots=True)
class AdapterFactors:
    """Of one product, by slot. a: [slots, ranks, in]. b: [slots, out, ranks], scaled."""

    a: Tensor
    b: Tensor

    def added(self, x: Tensor, slots: Tensor) -> Tensor:
        """x: [rows, n, in]. slots: [rows] int64. Returns [rows, n, out]."""
        inner = torch.bmm(x, self.a[slots].transpose(1, 2))
        return torch.bmm(inner, self.b[slots].transpose(1, 2))


@dataclass(frozen=True, slots=True)
class Adapters:
    """factors: by the name of the product's parameter. current: [rows] int64, the slots of the rows of the batch that a
    model is run on."""

    factors: Mapping[str, AdapterFactors]
    current: Tensor

    def select(self, slots: Tensor) -> None:
        """What follows is of rows with these slots [rows] int64."""
        self.current[: len(slots)].copy_(slots)

    def linear(self, name: str, base: Linear) -> Linear:
        """A product with what adapters add to it; as it is where they change nothing."""
        return AdaptedLinear(base, self.factors[name], self.current) if name in self.factors else base


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A `Linear` for x [rows, n, in]."""

    base: Linear
    factors: AdapterFactors
    current: Tensor

    @property
    def numbers(self) -> int:
        return self.base.numbers

    def read_bytes(self, rows: int) -> int:
        return self.base.read_bytes(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x) + self.factors.added(x, self.current[: len(x)])

    def parts(self, x: Tensor) -> Tensor:
        parts, added = self.base.parts(x), self.factors.added(x, self.current[: len(x)])
        return torch.cat([parts[:1] + added.to(parts.dtype), parts[1:]])


@dataclass(frozen=True, slots=True)
class AdaptedGated:
    """A `GatedLinear` of a product whose gates and ups adapters change before they are activated."""

    both: Linear
    kind: Gate
    functions: Functions

    @property
    def numbers(self) -> int:
        return self.both.numbers

    def read_bytes(self, rows: int) -> int:
        return self.both.read_bytes(rows)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return activated_reference(gate, self.kind, self.functions) * up
