"""What a format of weights says of itself: how a checkpoint stores them, and how they are held and multiplied by.

Each is one file in this package, and one line in `weights.registry`. How a weight is stored is known when parameters
are declared, how it is held when an engine is planned; both before anything is read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from treetop.kernels.gate import Gate
from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.moe.experts import Activation
from treetop.kernels.moe.routes import Routes
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.weights.cpu_products import ChosenProduct, Shape
from treetop.weights.gpu_products import Probed

if TYPE_CHECKING:  # is made of these protocols
    from treetop.weights.adapted import Adapters

MAIN = ""
"""The part of a parameter that bears its name alone; a plain one has no other."""

Parts = Mapping[str, Tensor]
"""The tensors that a parameter lies in, by the names that `HeldFormat.parts` gives them."""

Packing = Literal["none", "rows", "tiles"]
"""Which quantized weights stay packed in memory: those that can, by rows; or those that can in tiles, as a GPU reads
them."""

Biases = tuple[Tensor | None, Tensor | None]
"""Of experts' gates and ups [experts, 2, inner], and of what follows [experts, hidden]."""


@dataclass(frozen=True, slots=True)
class Span:
    """start .. stop along an axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Rows of a parameter, and what they are made of.

    name, shape: what is stored, were it plain.
    transform: from the stored tensor to those rows, where they are not equal; it moves whole rows, so it is
        applied to whatever is held by row.
    rows: how many, where they are not all of its numbers.
    unit: how many rows or columns belong together, such as those of a head.
    shared: ranks in excess of the units may share one.
    span: the part of the rows that is wanted, None for all.
    stacked: what is stored has experts along axis 0, each of which the transform treats by itself; a span is of them.
    parts: the stored rows are so many equal parts, one below the other, in each of which blocks of scales begin anew.
    """

    name: str
    shape: tuple[int, ...]
    transform: Callable[[Tensor], Tensor] | None = None
    rows: int | None = None
    unit: int = 1
    shared: bool = False
    span: Span | None = None
    stacked: bool = False
    parts: int = 1

    @property
    def module(self) -> str:
        """What configurations call it: its name without the end that says weight."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a checkpoint must hold.

    kinds: how safetensors may hold it.
    others: shapes that it may have instead.
    read: if not, it may be there, whatever it is, and is not read.
    """

    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    others: tuple[tuple[int, ...], ...] = ()
    read: bool = True


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A tensor in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Fetch = Callable[[str, Span | None], Tensor]
"""Reads a stored tensor by name, or a part of it."""


class Product(Protocol):
    """A product with a weight, which it holds in the form that is fastest here. numbers: of the weight."""

    @property
    def numbers(self) -> int: ...

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weight that a product of so many rows reads."""


@runtime_checkable
class UpdatedInPlace(Protocol):
    """What knows itself how other numbers get to where its own lie, where captured rounds read them."""

    def beside(self, new: Any) -> list[tuple[Any, Any]] | None:
        """Its parts, each with that of another of its type; None where it cannot take that one's numbers."""
        ...


class Linear(Product, Protocol):
    """`x @ weight.T + bias` for x [..., in], weight [out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [..., out]."""
        ...

    def parts(self, x: Tensor) -> Tensor:
        """Returns [parts, ..., out], float32 if there is more than one part; the product is their sum."""
        ...


class GatedLinear(Product, Protocol):
    """Activated gate times up, for x [..., in] and a weight [2 * out, in] with gates first."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [..., out]."""
        ...


class ExpertProducts(Protocol):
    """The weighted sum of each token's experts."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """x: [tokens, hidden], contiguous. Returns parts [parts, tokens, hidden], 0 for padding."""
        ...


@dataclass(frozen=True, slots=True)
class KernelContext:
    """What an engine's products may use.

    ops: the operations that serve.
    copies: on a GPU weights may be kept a second time, if products are faster with that.
    chosen: on a CPU, the calls for weights of each shape.
    probed: on a GPU, where a row's bits may depend on it alone, what was found of the library's products by shape.
    adapters: beside the products; None without any.
    """

    ops: Ops
    copies: bool = False
    chosen: Mapping[Shape, ChosenProduct] = field(default_factory=dict)
    probed: Mapping[Shape, Probed] = field(default_factory=dict)
    adapters: "Adapters | None" = None

    def probe_of(self, weight: Tensor) -> Probed:
        """What was found for a weight [out, in]; of one that was not probed that the library serves nowhere."""
        shape = weight.shape[0], weight.shape[1]
        return self.probed.get(shape, Probed(shape, ()))

    def choice(self, weight: Tensor) -> ChosenProduct | None:
        """What was chosen for a weight [out, in]; None without a choice."""
        return self.chosen.get((weight.shape[0], weight.shape[1]))


class StoredFormat(Protocol):
    """How a checkpoint stores a weight. A value: equal to another that says the same.

    name: for people.
    scheme: what its codes and scales mean; None where there are none that products could decode.
    activations: how products' inputs are quantized where `--quantize-activations` asks for it, or why they are not;
        None of what is not quantized.
    """

    @property
    def name(self) -> str: ...

    @property
    def scheme(self) -> QuantScheme | None: ...

    @property
    def activations(self) -> Activations | str | None: ...

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        """The tensors that a checkpoint holds of a source. Raises CheckpointError for a shape that cannot be so."""

    def unit(self, axis: int) -> int:
        """Along this axis a parameter may be cut at multiples of it only."""

    def decoded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> Tensor:
        """What is stored of a source, or a part of it, as plain numbers in the source's shape.

        Raises CheckpointError for what is no weight, as `coded` does.
        """

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        """The same as codes and scales, where there is a `scheme`."""


class HeldFormat(Protocol):
    """How a weight lies in memory, and the products that are taken with it. A value, as a `StoredFormat` is.

    name: for people.
    scheme: of codes that products decode; None if they are taken with plain numbers.
    activations: how products quantize their inputs; None if they do not.

    Tensors may be without memory (`meta`) where an engine is planned.
    """

    @property
    def name(self) -> str: ...

    @property
    def scheme(self) -> QuantScheme | None: ...

    @property
    def activations(self) -> Activations | None: ...

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        """What it reads beside a stored weight. Raises CheckpointError for a shape that cannot be held so."""

    def unit(self, axis: int) -> int:
        """As `StoredFormat.unit`."""

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, ParameterSpec]:
        """The tensors that a parameter of this shape lies in where models compute in `dtype`; rows along axis 0."""

    def read(
        self, stored: StoredFormat, source: CheckpointTensor, span: Span | None, fetch: Fetch
    ) -> dict[str, Tensor]:
        """What lies in each part of a source's rows as they are stored, or of a span of them.

        Raises CheckpointError for what is no weight.
        """

    def columns(self, part: str, span: Span) -> Span:
        """Of a span of columns, those that a part has."""

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        """Random numbers, of which products keep their input's size, about."""

    def copy_bytes(
        self, weight: "ProductWeight", dtype: torch.dtype, gpu: GpuTraits | None, uncut: bool = False
    ) -> int:
        """Bytes of the copy that products may be faster with where models compute in `dtype`; 0 if none is.

        gpu: None on a CPU, where timing tells later. uncut: of products on a GPU that do not cut k.
        """

    def linear(self, parts: Parts, bias: Tensor | None, kernel_context: KernelContext) -> Linear:
        """The product with a weight [out, in]."""

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, kernel_context: KernelContext) -> GatedLinear:
        """That with gate and up. kind: the gate's activation."""

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, kernel_context: KernelContext
    ) -> ExpertProducts:
        """Those with experts. gate_up: parts [experts, 2, inner, ...], gates first; down: [experts, hidden, ...]."""


def read_rows(
    stored: StoredFormat, held: HeldFormat, source: CheckpointTensor, fetch: Fetch
) -> Iterator[tuple[str, Tensor]]:
    """A source's rows, or those of its span, for each part that is held; a part's may come in several pieces.

    What is taken as it is stored, or expert by expert, comes in pieces, so that little of it is in memory beside its
    parameter. Raises CheckpointError for what is no weight.
    """
    transform, span = source.transform, source.span
    whole = transform is not None and not source.stacked
    for piece in (None,) if whole else _pieces(source, stored.unit(0)):
        found = held.read(stored, source, piece, fetch)
        for part in tuple(found):
            rows = found.pop(part)
            if transform is not None:
                rows = transform(rows)
            if whole and span is not None:
                own = held.columns(part, span) if span.axis == 1 else span
                rows = rows.narrow(own.axis, own.start, own.stop - own.start)
            yield part, rows
            del rows  # before more is read


_PIECE = 2**22
"""Numbers that are read together."""


def _pieces(source: CheckpointTensor, unit: int) -> Iterator[Span]:
    """Parts of a source, or of its span, that are read one by one. unit: of rows."""
    span = source.span or Span(0, 0, source.shape[0])
    if span.axis != 0:
        yield span
        return
    each = max(1, _PIECE // prod(source.shape[1:]) // unit) * unit
    for first in range(span.start, span.stop, each):
        yield Span(0, first, min(first + each, span.stop))


@dataclass(frozen=True, slots=True)
class ProductWeight:
    """A weight that products are taken with.

    gated: gate and up, one after the other.
    bias: whether there is one.
    """

    format: HeldFormat
    shape: Shape
    gated: bool
    bias: bool
