"""Formats of codes and scales, as checkpoints store them.

A weight is (code - zero) * scale, in float32, and then rounded to the dtype in which models compute: once, unless its
scales are of 32 bits. So it has the same bits in every product, of one row or of many, and what a library of the format
decompresses has them too. Weights that stay packed (`weights.packed`) have these bits where
they are decoded, others (`weights.plain`) once they are loaded.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme, decode
from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, Fetch, Span, TensorSpec
from treetop.weights.kv_scales import all_names

SCALES = ("F32", "BF16", "F16")
"""Kinds of scales in floating point."""
WIDE = "has no activations in FP8"


class CodesLayout(Protocol):
    """How a checkpoint holds a weight's codes and scales. A value, as a format is.

    scheme: what these mean in memory; None where they do not lie so that a product decodes them.
    """

    @property
    def scheme(self) -> QuantScheme | None: ...

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        """As `StoredFormat.stored`."""

    def unit(self, axis: int) -> int:
        """As `StoredFormat.unit`."""

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        """What is stored of a source, or a part of it, in the source's shape."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A `StoredFormat` of a layout."""

    name: str
    layout: CodesLayout
    activations: Activations | str | None = WIDE

    @property
    def scheme(self) -> QuantScheme | None:
        return self.layout.scheme

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        return {**self.layout.stored(source), **_unread(source)}

    def unit(self, axis: int) -> int:
        return self.layout.unit(axis)

    def decoded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> Tensor:
        return _numbers(source, self.layout.coded(source, span, fetch))

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        weight = self.layout.coded(source, span, fetch)
        _numbers(source, weight)  # or it raises
        return weight


def _numbers(source: CheckpointTensor, weight: QuantizedWeight) -> Tensor:
    """The numbers, float32. Raises CheckpointError for what is none."""
    rows = decode(weight)
    if not bool(rows.isfinite().all()):
        raise CheckpointError(f"tensor {source.name}: its scales make weights NaN or infinite")
    return rows


def _unread(source: CheckpointTensor) -> dict[str, TensorSpec]:
    """Scales of activations and of K/V, which files may hold: `weights.w8a8` reads the former, `models.kv_scales` the
    latter."""
    module, layer, last = source.module, *source.module.rpartition(".")[::2]
    names = [f"{module}.input_scale", f"{module}.input_global_scale"]
    if last in ("k_proj", "v_proj", "qkv_proj"):
        names += all_names(layer)
    return {name: TensorSpec((), (), read=False) for name in names}


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales of blocks of numbers, by the last two axes of what is stored. rows, columns: of a block; 0 is all of them.

    A block at an edge may have fewer.
    """

    rows: int
    columns: int

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        *experts, n, k = of
        return (*experts, *(1 if each == 0 else -(-size // each) for size, each in ((n, self.rows), (k, self.columns))))

    def stored(self, of: tuple[int, ...], kinds: tuple[str, ...]) -> TensorSpec:
        """The scales of what has this shape; axes of one may be left out at their end."""
        shape = self.shape(of)
        shorter = [shape[:end] for end in range(len(shape)) if set(shape[end:]) == {1}]
        return TensorSpec(shape, kinds, others=tuple(shorter))

    def by_row(self, name: str, of: tuple[int, ...], span: Span | None, fetch: Fetch) -> Tensor:
        """Scales [..., rows, groups] float32 of a span of what has shape `of`, of columns in whole groups."""
        stored, lead = self.shape(of), len(of) - 2
        first: Span | None = None
        if span is not None and span.axis < lead:
            first, stored = span, (span.stop - span.start, *stored[1:])
        elif span is not None and span.axis == 0 and self.rows:
            first = Span(0, span.start // self.rows, -(-span.stop // self.rows))
            stored = (first.stop - first.start, *stored[1:])
        scales = fetch(name, first).to(torch.float32).view(stored)
        start, stop = (0, of[lead]) if span is None or span.axis != lead else (span.start, span.stop)
        if self.rows == 0:
            scales = scales.expand(*stored[:-2], stop - start, stored[-1])
        else:
            begun = 0 if first is None or lead else first.start * self.rows
            spread = scales if self.rows == 1 else scales.repeat_interleave(self.rows, lead)
            scales = spread.narrow(lead, start - begun, stop - start)
        if span is None or span.axis != lead + 1:
            return scales
        groups = own_groups(span, self.columns)
        return scales[..., groups.start : groups.stop]


def own_groups(columns: Span, group: int) -> Span:
    """The groups that columns are in; 0 numbers are whole rows."""
    return Span(columns.axis, columns.start // group, -(-columns.stop // group)) if group else Span(columns.axis, 0, 1)


def unpacked(words: Tensor) -> Tensor:
    """Codes of 4 bits [..., 8 * n] of words [..., n] int32, the first lowest; of bytes [..., n] uint8 two each."""
    shift = torch.arange(0, 8 * words.itemsize, 4, dtype=words.dtype, device=words.device)
    return ((words[..., None] >> shift) & 0xF).flatten(-2)


def relative_error(decoded: Tensor, weight: Tensor) -> Tensor:
    """The norm of what rounding changed, as a share of a weight's."""
    changed: Tensor = (decoded - weight).norm() / weight.norm().clamp(min=1e-30)
    return changed
