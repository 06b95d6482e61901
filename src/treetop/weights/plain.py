"""Numbers as they are, in floating point or, beside weights, integers: the format of what is not quantized.

On a GPU a weight may be kept in 12 bits too (`twelve_bits`), on a CPU in a second order (`cpu_products`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from treetop.kernels.gate import Gate
from treetop.kernels.moe.experts import Activation, Experts
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.weights.format import (
    MAIN,
    Biases,
    ExpertProducts,
    Fetch,
    GatedLinear,
    Held,
    Holding,
    Linear,
    Parts,
    ProductWeight,
    Source,
    Span,
    Stored,
    read_rows,
)
from treetop.weights.gpu_products import WholeProduct
from treetop.weights.linear import LibraryGated, LibraryLinear, SkinnyGated, SkinnyLinear, WholeLinear
from treetop.weights.twelve_bits import compressed_bytes

_PIECE = 2**24
"""Numbers of a stored tensor that are read together."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A `WeightFormat`: one tensor, of one of these kinds of safetensors."""

    kinds: tuple[str, ...]
    name: str = "plain"

    def stored(self, source: Source) -> dict[str, Stored]:
        return {source.name: Stored(source.shape, self.kinds)}

    def unit(self, axis: int) -> int:
        return 1

    def held(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Held]:
        return {MAIN: Held(shape, dtype)}

    def read(self, source: Source, fetch: Fetch) -> Iterator[tuple[str, Tensor]]:
        """What is taken as it is stored comes in pieces, so that little of it is in memory beside its parameter."""
        if source.transform is not None or source.span is not None:
            yield MAIN, read_rows(source, source.name, fetch)
            return
        rows, step = source.shape[0], max(1, _PIECE // prod(source.shape[1:]))
        for first in range(0, rows, step):
            yield MAIN, fetch(source.name, Span(0, first, min(first + step, rows)))

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        parts[MAIN].normal_(std=float(parts[MAIN].shape[-1] ** -0.5), generator=generator)

    def copy_bytes(self, weight: ProductWeight, dtype: torch.dtype, gpu: GpuTraits | None) -> int:
        if gpu is None:
            return prod(weight.shape) * dtype.itemsize
        return 0 if weight.bias else compressed_bytes(*weight.shape, weight.gated, gpu)

    def linear(self, parts: Parts, bias: Tensor | None, holding: Holding) -> Linear:
        weight, gpu = parts[MAIN], holding.ops.gpu_for(Ops.skinny_gemm)
        if gpu is not None and holding.exact:
            return WholeLinear(WholeProduct(weight, bias, None, gpu, holding.probe_of(weight)))
        if gpu is None:
            return LibraryLinear(weight, bias, holding.choice(weight))
        return SkinnyLinear(weight, gpu, holding.copies, bias)

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, holding: Holding) -> GatedLinear:
        weight, gpu = parts[MAIN], holding.ops.gpu_for(Ops.gated_rows)
        if gpu is not None and holding.exact:
            return WholeLinear(WholeProduct(weight, bias, kind, gpu, holding.probe_of(weight)))
        if gpu is None or bias is not None:
            return LibraryGated(weight, bias, holding.choice(weight), kind)
        return SkinnyGated(weight, gpu, holding.copies, kind)

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, holding: Holding
    ) -> ExpertProducts:
        return partial(holding.ops.experts, experts=Experts(gate_up[MAIN], down[MAIN], *biases, activation))


FLOATS = Plain(("F64", "F32", "F16", "BF16"))
"""Fewer bits would need scales: those are formats of their own."""
