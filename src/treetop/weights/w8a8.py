"""FP8 weights whose products round their inputs to e4m3 as well, as the checkpoint says (`--quantize-activations`).

A format of what it holds beside `weights.packed`: the same codes and scales by row, multiplied as they are
(`kernels.gemm.fp8_rows`). A fixed scale of inputs lies with each row, so that whatever moves rows moves it too; the
rows of one product must agree on it. Experts and the heads of compressed attention are in other formats, and keep 16
bits.
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from treetop.kernels.fused import gate_mul, joined
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.fp8_rows import Activations, QuantizedRows, by_group, choose_fp8, fp8_rows
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.quantizing_norm import norms_codes
from treetop.kernels.gemm.scaled_mm import ROWS_OF_GROUPS, library_from, scaled_rows, why_not
from treetop.kernels.moe.experts import Activation
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.errors import CheckpointError
from treetop.weights.format import (
    MAIN,
    Biases,
    CheckpointTensor,
    ExpertProducts,
    Fetch,
    GatedLinear,
    KernelContext,
    Linear,
    Packing,
    ParameterSpec,
    Parts,
    ProductWeight,
    Span,
    StoredFormat,
    TensorSpec,
)
from treetop.weights.packed import GateOver, Packed, blocks_of
from treetop.weights.quantized import SCALES

INPUT = "input"


@dataclass(frozen=True, slots=True)
class W8A8:
    """A `HeldFormat` of FP8 weights and inputs. packed: that of the weights alone."""

    packed: Packed
    activations: Activations

    @property
    def name(self) -> str:
        return f"{self.packed.name} with activations in FP8 {self.activations}"

    @property
    def scheme(self) -> QuantScheme:
        return self.packed.scheme

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        scale = {_scale_of(source): TensorSpec((1,), SCALES, others=((),))} if self.activations.fixed else {}
        return {**self.packed.stored(source), **scale}

    def unit(self, axis: int) -> int:
        return self.packed.unit(axis)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, ParameterSpec]:
        scale = {INPUT: ParameterSpec((*shape[:-1], 1), torch.float32)} if self.activations.fixed else {}
        return {**self.packed.parts(shape, dtype), **scale}

    def read(
        self, stored: StoredFormat, source: CheckpointTensor, span: Span | None, fetch: Fetch
    ) -> dict[str, Tensor]:
        parts = self.packed.read(stored, source, span, fetch)
        if self.activations.fixed:
            scale = fetch(_scale_of(source), None).to(torch.float32).view(1, 1)
            if not bool((scale > 0) & scale.isfinite()):
                raise CheckpointError(f"tensor {_scale_of(source)}: {float(scale)} is no scale")
            parts[INPUT] = scale.expand(len(parts[MAIN]), 1)
        return parts

    def columns(self, part: str, span: Span) -> Span:
        return Span(1, 0, 1) if part == INPUT else self.packed.columns(part, span)

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        self.packed.fill_random(parts, generator)
        if INPUT in parts:
            parts[INPUT].fill_(2.0**-5)  # of inputs up to 14

    def copy_bytes(self, weight: ProductWeight, dtype: torch.dtype, gpu: GpuTraits | None, uncut: bool = False) -> int:
        return 0

    def linear(self, parts: Parts, bias: Tensor | None, kernel_context: KernelContext) -> Linear:
        return W8A8Linear(self.packed.weight(parts), bias, None, self.activations, _fixed(parts), kernel_context.ops)

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, kernel_context: KernelContext) -> GatedLinear:
        weight, fixed, ops = self.packed.weight(parts), _fixed(parts), kernel_context.ops
        if ops.gpu_for(Ops.fp8_rows) is None:
            return GateOver(W8A8Linear(weight, bias, None, self.activations, fixed, ops), weight.shape[0], kind, ops)
        return W8A8Linear(weight, bias, kind, self.activations, fixed, ops)

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, kernel_context: KernelContext
    ) -> ExpertProducts:
        return self.packed.experts(gate_up, down, biases, activation, kernel_context)


def _scale_of(source: CheckpointTensor) -> str:
    return f"{source.module}.input_scale"


def _fixed(parts: Parts) -> Tensor | None:
    """The scale of a product's inputs [1]. Raises CheckpointError if rows have several."""
    scale = parts.get(INPUT)
    if scale is None:
        return None
    if scale.device.type != "meta" and not bool((scale == scale[0]).all()):
        found = ", ".join(f"{each:.6g}" for each in scale.unique().tolist()[:3])
        raise CheckpointError(
            f"input_scale of modules that are one product here, such as q, k and v, must be one number, got {found};"
            " drop --quantize-activations"
        )
    return scale[0].clone()


def held(stored: StoredFormat, kind: str, packing: Packing, activations: bool) -> W8A8 | None:
    """Products whose inputs are quantized too, if they are to be and the checkpoint says how."""
    if not activations or kind != "matrix" or not isinstance(stored.activations, Activations):
        return None
    assert stored.scheme is not None
    return W8A8(Packed(stored.name, stored.scheme), stored.activations)


class W8A8Linear:
    """`Linear`, or with a `kind` `GatedLinear`, of inputs that are quantized.

    weight: by rows, of a gated one gates, then ups, as the bias. fixed: the scale of inputs, where it is. On a GPU by
    our kernel, of many rows by the library where it is faster and bits need not be a row's own; elsewhere by the
    references, some lines after the others. library_from: rows from which the library multiplies, or None for those of
    the table.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, kind: Gate | None, how: Activations, fixed: Tensor | None,
        ops: Ops, library_from: int | None = None,
    ) -> None:  # fmt: skip
        self._gpu, self._shape = ops.gpu_for(Ops.fp8_rows), (weight.shape[0], weight.shape[1])
        self._weight = weight if self._gpu is None else by_group(weight)
        self._bias, self._kind, self._ops, self.how = bias, kind, ops, how
        self._taken: tuple[Tensor, QuantizedRows] | None = None
        self._quantized = partial(ops.quantize_rows, how=how, fixed=fixed)
        self._library_from = _library_from(self._weight, bias, kind, ops, self._gpu, library_from)
        self.numbers = prod(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return joined(self.parts(x)).to(x.dtype)

    def reads_codes(self, columns: int) -> bool:
        """Whether a norm of so many columns may write its inputs' codes."""
        return norms_codes(self.how, columns)

    def take(self, x: Tensor, codes: QuantizedRows) -> None:
        """The codes of the inputs of the next call, if that is for this very tensor; else they are forgotten."""
        self._taken = x, codes

    def parts(self, x: Tensor) -> Tensor:
        (given, codes), self._taken = self._taken or (None, None), None
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self._gpu is not None and self._library_from is not None and len(rows) >= self._library_from:
            multiple = ROWS_OF_GROUPS if self._weight.scheme.group else 1
            whole = given is x and len(rows) % multiple == 0
            found = self._by_library(codes if codes is not None and whole else self._quantized(rows, multiple=multiple))
            found = found[None, : len(rows)]
        else:
            found = self._product(codes if codes is not None and given is x else self._quantized(rows), x.dtype)
        return found.view(len(found), *x.shape[:-1], -1)

    def read_bytes(self, rows: int) -> int:
        return self._weight.nbytes

    def _by_library(self, x: QuantizedRows) -> Tensor:
        assert self._gpu is not None
        found = scaled_rows(x, self._weight, self._bias)
        return found if self._kind is None else gate_mul(found, self._kind, self._gpu)

    def _product(self, x: QuantizedRows, dtype: torch.dtype) -> Tensor:
        weight, bias, kind, gpu = self._weight, self._bias, self._kind, self._gpu
        if gpu is not None:
            group, whole = weight.scheme.group, self._ops.profile.batch_invariant
            launch = choose_fp8(self._shape, group, kind is not None, len(x.codes), gpu, whole)
            return fp8_rows(x, weight, bias, kind, dtype=dtype, launch=launch, gpu=gpu)
        out, start = [], 0
        for block in blocks_of(weight):
            stop = start + block.shape[0]
            own = None if bias is None else bias[start:stop]
            out.append(self._ops.fp8_rows(x, block, own, kind, dtype=dtype))
            start = stop
        return torch.cat(out, -1)


def _library_from(
    weight: QuantizedWeight, bias: Tensor | None, kind: Gate | None, ops: Ops, gpu: GpuTraits | None, asked: int | None
) -> int | None:
    """Rows from which the library multiplies, those asked for or what was measured; None if it never does."""
    if gpu is None or ops.profile.batch_invariant or why_not(weight, bias, ops.context.dtype, gpu) is not None:
        return None
    return asked or library_from((weight.shape[0], weight.shape[1]), weight.scheme.group, kind is not None, gpu)
