"""Numbers as they are, in floating point or, beside weights, integers: how they are stored, and how they are held.

On a GPU a weight may be kept in 12 bits too (`lossless`), or in 13 (`ordered`); on a CPU in a second order
(`cpu_products`).
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from treetop.kernels.gate import Gate
from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.moe.experts import Activation, Experts
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.weights.adapted import GatesAndUps
from treetop.weights.format import (
    MAIN,
    Biases,
    CheckpointTensor,
    ExpertProducts,
    Fetch,
    GatedLinear,
    KernelContext,
    Linear,
    ParameterSpec,
    Parts,
    ProductWeight,
    Span,
    StoredFormat,
    TensorSpec,
)
from treetop.weights.gpu_products import NoSplitKProduct
from treetop.weights.linear import LibraryGated, LibraryLinear, NoSplitKLinear, SkinnyGated, SkinnyLinear
from treetop.weights.lossless import compressed_bytes
from treetop.weights.ordered import ordered_bytes


@dataclass(frozen=True, slots=True)
class Plain:
    """A `StoredFormat`: one tensor, of one of these kinds of safetensors."""

    kinds: tuple[str, ...]
    name: str = "plain"
    scheme: QuantScheme | None = None
    activations: Activations | str | None = None

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        return {source.name: TensorSpec(source.shape, self.kinds)}

    def unit(self, axis: int) -> int:
        return 1

    def decoded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> Tensor:
        return fetch(source.name, span)

    def coded(self, source: CheckpointTensor, span: Span | None, fetch: Fetch) -> QuantizedWeight:
        raise AssertionError(f"{source.name} has no codes")


FLOATS = Plain(("F64", "F32", "F16", "BF16"))
"""Fewer bits would need scales: those are formats of their own."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """A `HeldFormat`: plain numbers in the dtype of products, decoded as they are loaded where they were quantized."""

    name: str = "plain"
    scheme: QuantScheme | None = None
    activations: Activations | None = None

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        return {}

    def unit(self, axis: int) -> int:
        return 1

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, ParameterSpec]:
        return {MAIN: ParameterSpec(shape, dtype)}

    def read(
        self, stored: StoredFormat, source: CheckpointTensor, span: Span | None, fetch: Fetch
    ) -> dict[str, Tensor]:
        return {MAIN: stored.decoded(source, span, fetch)}

    def columns(self, part: str, span: Span) -> Span:
        return span

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        parts[MAIN].normal_(std=float(parts[MAIN].shape[-1] ** -0.5), generator=generator)

    def copy_bytes(self, weight: ProductWeight, dtype: torch.dtype, gpu: GpuTraits | None, uncut: bool = False) -> int:
        if gpu is None:
            return prod(weight.shape) * dtype.itemsize
        if uncut:
            return ordered_bytes(*weight.shape, weight.gated and not weight.bias, gpu)
        return 0 if weight.bias else compressed_bytes(*weight.shape, weight.gated, gpu)

    def linear(self, parts: Parts, bias: Tensor | None, kernel_context: KernelContext) -> Linear:
        weight, gpu = parts[MAIN], kernel_context.ops.gpu_for(Ops.skinny_gemm)
        if gpu is not None and kernel_context.ops.profile.products == "probed":
            return NoSplitKLinear(_no_split_k(weight, bias, None, gpu, kernel_context))
        if gpu is None:
            return LibraryLinear(weight, bias, kernel_context.choice(weight))
        return SkinnyLinear(weight, gpu, kernel_context.copies, bias)

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, kernel_context: KernelContext) -> GatedLinear:
        weight, gpu = parts[MAIN], kernel_context.ops.gpu_for(Ops.gated_rows)
        if gpu is not None and kernel_context.ops.profile.products == "probed":
            return NoSplitKLinear(_no_split_k(weight, bias, kind, gpu, kernel_context))
        if gpu is None or bias is not None:
            return LibraryGated(weight, bias, kernel_context.choice(weight), kind)
        return SkinnyGated(weight, gpu, kernel_context.copies, kind)

    def beside_adapters(
        self, parts: Parts, bias: Tensor | None, kind: Gate, kernel_context: KernelContext
    ) -> GatesAndUps:
        """Gates and ups that adapters change before they are activated."""
        gpu, profile = kernel_context.ops.gpu_for(Ops.gated_rows), kernel_context.ops.profile
        if gpu is None or bias is not None or profile.products == "probed":
            return self.linear(parts, bias, kernel_context)
        return SkinnyGated(parts[MAIN], gpu, kernel_context.copies, kind)

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, kernel_context: KernelContext
    ) -> ExpertProducts:
        return partial(kernel_context.ops.experts, experts=Experts(gate_up[MAIN], down[MAIN], *biases, activation))


def _no_split_k(
    weight: Tensor, bias: Tensor | None, kind: Gate | None, gpu: GpuTraits, kernel_context: KernelContext
) -> NoSplitKProduct:
    return NoSplitKProduct(weight, bias, kind, gpu, kernel_context.probe_of(weight), kernel_context.copies)


UNQUANTIZED = Unquantized()
