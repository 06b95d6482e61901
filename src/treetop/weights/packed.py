"""Formats whose weights stay packed in memory: products decode them, each time to the bits that decoding once gives.

They are read as a checkpoint has them, by row, with a scale for each row and group (`kernels.gemm.quantized_weight`):
so ranks cut rows and groups, and what moves rows moves codes and scales alike. On a GPU they then lie in tiles
(`kernels.gemm.tiles`), and a product of few rows, or with experts, is a kernel that decodes in registers, on Hopper of
any number of rows (`kernels.gemm.quantized_gluon`). Elsewhere for more rows a block of lines is decoded into memory
that the next block uses again, and the library's product is taken with it, as on a CPU for any number: what is held is
the packed bytes and one block. Only a CPU's products of 4-bit integers in
bfloat16 take codes as they are, with other bits (`weights.cpu_int4`).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import lcm, prod

import torch
from torch import Tensor, get_num_threads

from treetop.kernels.exact import LIBRARY
from treetop.kernels.fused import batch_invariant_functions, gate_mul, gate_mul_reference, join
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.gemm.quantized_gemm import MAX_ROWS, choose_product, quantized_gated, quantized_gemm
from treetop.kernels.gemm.quantized_gluon import why_not as why_not_by_gluon
from treetop.kernels.gemm.quantized_weight import MIDDLE, QuantizedWeight, QuantScheme, decode, factor_apart
from treetop.kernels.gemm.tiles import TILE, TiledWeight, apart, decode_tiles, in_turn, tile, why_not_tiled
from treetop.kernels.moe.experts import Activation, Experts
from treetop.kernels.moe.routes import Routes
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.errors import CheckpointError
from treetop.weights.cpu_int4 import Int4Linear, takes
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
from treetop.weights.quantized import own_groups

_log = logging.getLogger(__name__)

SCALE, FACTOR, ZERO, MINIMUM = "scale", "factor", "zero", "minimum"
_BLOCK, _BLOCK_OF_GPU = 2**20, 2**26
"""Numbers that are decoded together for a product. On a GPU smaller ones, which its L2 would hold, leave the library's
products too few lines: of 512 rows of FP8 on an H200 2**24 take 1.2 times as long for `down` of Llama-3.1-8B."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A `HeldFormat` of codes. name: of what is stored."""

    name: str
    scheme: QuantScheme
    activations: Activations | None = None

    def stored(self, source: CheckpointTensor) -> dict[str, TensorSpec]:
        columns = source.shape[-1]
        if columns % self.scheme.in_byte:
            raise CheckpointError(
                f"tensor {source.name}: rows of {columns} numbers are not whole bytes of two: use --dequantize-weights"
            )
        return {}

    def unit(self, axis: int) -> int:
        return lcm(self.scheme.group or 1, self.scheme.in_byte) if axis == 1 else 1

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, ParameterSpec]:
        rows, scheme = shape[:-1], self.scheme
        groups = (*rows, scheme.groups_of(shape[-1]))
        parts = {
            MAIN: ParameterSpec((*rows, scheme.bytes_of(shape[-1])), torch.uint8),
            SCALE: ParameterSpec(groups, torch.float32 if scheme.scales == "float32" else torch.uint8),
        }
        if scheme.scales in ("times", "over"):
            parts[FACTOR] = ParameterSpec((*rows, 1), torch.float32)
        if scheme.zeros:
            parts[ZERO] = ParameterSpec(groups, torch.uint8)
        if scheme.minimums:
            parts[MINIMUM] = ParameterSpec(groups, torch.float32)
        return parts

    def read(
        self, stored: StoredFormat, source: CheckpointTensor, span: Span | None, fetch: Fetch
    ) -> dict[str, Tensor]:
        weight = stored.coded(source, span, fetch)
        if weight.order is not None:
            raise CheckpointError(
                f"tensor {source.module}.g_idx: groups are out of order, though desc_act is off: use"
                " --dequantize-weights"
            )
        found = {
            MAIN: weight.codes,
            SCALE: weight.scale,
            FACTOR: weight.factor,
            ZERO: weight.zero,
            MINIMUM: weight.minimum,
        }
        return {part: each for part, each in found.items() if each is not None}

    def columns(self, part: str, span: Span) -> Span:
        if part == MAIN:
            return Span(1, span.start // self.scheme.in_byte, -(-span.stop // self.scheme.in_byte))
        return Span(1, 0, 1) if part == FACTOR else own_groups(span, self.scheme.group)

    def fill_random(self, parts: Parts, generator: torch.Generator) -> None:
        scheme = self.scheme
        mask = 0xFE if scheme.numbers == "e4m3" else 0xFF  # no NaN
        codes = parts[MAIN].random_(0, 256, generator=generator).bitwise_and_(mask)
        if scheme.zeros:
            parts[ZERO].fill_(MIDDLE)
        if scheme.minimums:
            parts[MINIMUM].zero_()
        columns = codes.shape[-1] * scheme.in_byte
        every, one = (torch.arange(256) & mask).to(torch.uint8)[None], QuantScheme(scheme.numbers, 0)
        size = decode(QuantizedWeight(one, every.shape[1] * one.in_byte, every, torch.ones(1, 1)))
        scale = float((columns * size.square().mean()).rsqrt().to(torch.bfloat16))  # as most checkpoints have it
        if scheme.scales == "float32":
            parts[SCALE].fill_(scale)
        elif scheme.scales == "e8m0":
            parts[SCALE].fill_(127 + round(torch.tensor(scale).log2().item()))
        else:
            parts[SCALE].fill_(0x38)  # 1 in e4m3
            parts[FACTOR].fill_(scale if scheme.scales == "times" else 1 / scale)

    def copy_bytes(self, weight: ProductWeight, dtype: torch.dtype, gpu: GpuTraits | None, uncut: bool = False) -> int:
        return 0

    def linear(self, parts: Parts, bias: Tensor | None, kernel_context: KernelContext) -> Linear:
        weight, gpu = self._weight(parts, kernel_context.ops.context), kernel_context.ops.gpu_for(Ops.quantized_gemm)
        return (
            _on_a_cpu(weight, bias, kernel_context.ops)
            if gpu is None
            else TiledLinear(_tiled(weight, kernel_context), bias, gpu, kernel_context.ops.profile.batch_invariant)
        )

    def gated(self, parts: Parts, bias: Tensor | None, kind: Gate, kernel_context: KernelContext) -> GatedLinear:
        weight, gpu = self._weight(parts, kernel_context.ops.context), kernel_context.ops.gpu_for(Ops.quantized_gated)
        if gpu is None:
            return GateOver(_on_a_cpu(weight, bias, kernel_context.ops), weight.shape[0], kind, kernel_context.ops)
        return TiledGated(
            _tiled(in_turn(weight.halves()), kernel_context),
            bias,
            kind,
            gpu,
            kernel_context.ops.profile.batch_invariant,
        )

    def experts(
        self, gate_up: Parts, down: Parts, biases: Biases, activation: Activation, kernel_context: KernelContext
    ) -> ExpertProducts:
        first, second = (self._weight(each, kernel_context.ops.context) for each in (gate_up, down))
        if kernel_context.ops.gpu_for(Ops.experts) is None:
            return partial(kernel_context.ops.experts, experts=Experts(first, second, *biases, activation))
        made = Experts(_tiled(in_turn(first), kernel_context), _tiled(second, kernel_context), *biases, activation)
        return TiledExperts(kernel_context.ops.experts, made)

    def weight(self, parts: Parts) -> QuantizedWeight:
        """What is held."""
        columns = parts[MAIN].shape[-1] * self.scheme.in_byte
        return QuantizedWeight(
            self.scheme,
            columns,
            parts[MAIN],
            parts[SCALE],
            parts.get(FACTOR),
            parts.get(ZERO),
            minimum=parts.get(MINIMUM),
        )

    def _weight(self, parts: Parts, context: OpContext) -> QuantizedWeight:
        """Raises CheckpointError for numbers that are too large for the dtype of products."""
        weight = self.weight(parts)
        if context.dtype == torch.float16 and parts[MAIN].device.type != "meta":
            for block in blocks_of(weight):
                if not bool(decode(block).to(torch.float16).isfinite().all()):
                    raise CheckpointError(f"weights in {self.name} are too large for float16; use --dtype bfloat16")
        return weight


def held(stored: StoredFormat, kind: str, packing: Packing, activations: bool) -> Packed | None:
    """Codes of products' and experts' weights where they can stay packed, as `weights.registry.HELD` asks."""
    scheme = stored.scheme if packing != "none" and kind in ("matrix", "experts") else None
    if scheme is None or (packing == "tiles" and why_not_tiled(scheme) is not None):
        return None
    return Packed(stored.name, scheme)


def blocks_of(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Rows of axis 0 that are decoded together."""
    rows = weight.shape[0]
    each = max(1, _BLOCK // prod(weight.shape[1:]))
    return (weight.rows(first, min(first + each, rows)) for first in range(0, rows, each))


def _tiled(weight: QuantizedWeight, kernel_context: KernelContext) -> TiledWeight:
    """Where bits need not be those of decoded weights, a factor of two levels goes to the sums, in all products."""
    kept = weight if kernel_context.ops.profile.batch_invariant else factor_apart(weight)
    return tile(kept, kernel_context.ops.context.dtype)


def _on_a_cpu(weight: QuantizedWeight, bias: Tensor | None, ops: Ops) -> Linear:
    """In bfloat16 the product that takes 4-bit integers as they are, where there is one."""
    packed = (
        ops.context.dtype == torch.bfloat16 and not ops.profile.batch_invariant and weight.codes.device.type == "cpu"
    )
    if packed and takes(weight.scheme, tuple(weight.shape)):
        return Int4Linear(weight, bias)
    return QuantizedLinear(weight, bias, ops)


class QuantizedLinear:
    """`Linear` over a packed weight [out, in] that lies by rows."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, ops: Ops) -> None:
        self._weight, self._bias = weight, bias
        self._product = ops.profile.linear
        self.numbers = prod(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, start = [], 0
        for block in blocks_of(self._weight):
            bias = None if self._bias is None else self._bias[start : start + block.shape[0]]
            out.append(self._product(rows, decode(block).to(x.dtype), bias))
            start += block.shape[0]
        whole = out[0] if len(out) == 1 else torch.cat(out, 1)
        return whole.view(*x.shape[:-1], -1)

    def parts(self, x: Tensor) -> Tensor:
        return self(x)[None]

    def read_bytes(self, rows: int) -> int:
        return self._weight.nbytes


class GateOver:
    """`GatedLinear` of a product with a weight [2 * out, in], gates first, and a gate over it. lines: 2 * out."""

    def __init__(self, linear: Linear, lines: int, kind: Gate, ops: Ops) -> None:
        self._linear = linear
        self.numbers, self.read_bytes = linear.numbers, linear.read_bytes
        functions = (
            batch_invariant_functions(kind, lines, get_num_threads()) if ops.profile.batch_invariant else LIBRARY
        )
        gpu = ops.gpu_for(Ops.silu_mul)
        self._gate = partial(gate_mul_reference, kind=kind, functions=functions)
        if gpu is not None:
            self._gate = partial(gate_mul, kind=kind, gpu=gpu)

    def __call__(self, x: Tensor) -> Tensor:
        return self._gate(self._linear(x))


class TiledLinear:
    """`Linear` over a weight in tiles, on a GPU. whole: no sum over k is cut, and none is the library's."""

    def __init__(self, weight: TiledWeight, bias: Tensor | None, gpu: GpuTraits, whole: bool = False) -> None:
        self.weight, self._bias, self.gpu, self.whole = weight, bias, gpu, whole
        self.has_bias = bias is not None
        self._together = _decoded_together(weight, parted=False)
        self._by_gluon = _by_gluon(weight, gpu)
        self.numbers = prod(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return join(self.parts(x), x.dtype, self.gpu)

    def parts(self, x: Tensor) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), self.weight
        by_gluon = self._by_gluon and rows.dtype == torch.bfloat16
        if len(rows) > MAX_ROWS and not self.whole and not by_gluon:
            found = self._by_library(rows)[None]
        else:
            launch = choose_product(weight, False, len(rows), self.gpu, self.whole, by_gluon)
            found = quantized_gemm(rows, weight, self._bias, launch=launch, gpu=self.gpu)
        return found.view(len(found), *x.shape[:-1], -1)

    def _by_library(self, rows: Tensor) -> Tensor:
        """Lines by lines that are decoded into memory; each block's product lands in its place."""
        out = rows.new_empty((len(rows), self.weight.shape[0]))
        for each in self._together:
            own = slice(each.first, each.stop)
            block = decode_tiles(self.weight, each.first, each.stop, rows.dtype, self.gpu)
            _multiply(rows, block, None if self._bias is None else self._bias[own], out[:, own], each.runs)
        return out

    def read_bytes(self, rows: int) -> int:
        return self.weight.nbytes


def one_below_the_other(first: Linear, second: Linear) -> Linear | None:
    """One product of the lines of both; None where they do not lie in the same kind of whole tiles.

    It has the bits of the two wherever k is not cut.
    """
    if not (isinstance(first, TiledLinear) and isinstance(second, TiledLinear)):
        return None
    one, other = first.weight, second.weight
    if first.has_bias or second.has_bias or one.shape[0] % TILE or not _read_alike(one, other):
        return None
    both = zip(_parts_of(one), _parts_of(other), strict=True)
    words, scale, factor, zero = (None if a is None or b is None else torch.cat([a, b], 1) for a, b in both)
    assert words is not None
    assert scale is not None
    shape = (one.shape[0] + other.shape[0], one.shape[1])
    joint = replace(one, shape=shape, words=words, scale=scale, factor=factor, zero=zero)
    return TiledLinear(joint, None, first.gpu, first.whole)


def _parts_of(weight: TiledWeight) -> tuple[Tensor | None, ...]:
    return weight.words, weight.scale, weight.factor, weight.zero


def _read_alike(one: TiledWeight, other: TiledWeight) -> bool:
    """Whether a kernel reads both in the same way."""
    kinds = ((each.scheme, each.form, each.wide, each.zero is None, each.factor is None) for each in (one, other))
    return one.shape[-1] == other.shape[-1] and len(set(kinds)) == 1


class TiledGated:
    """`GatedLinear` over a weight in tiles, gates and ups in turn. bias: gates first. whole: as `TiledLinear`."""

    def __init__(
        self, weight: TiledWeight, bias: Tensor | None, kind: Gate, gpu: GpuTraits, whole: bool = False
    ) -> None:
        self.weight, self._bias, self.kind, self._gpu, self._whole = weight, bias, kind, gpu, whole
        self.has_bias = bias is not None
        self._together = _decoded_together(weight, parted=True)
        self._by_gluon = _by_gluon(weight, gpu)
        self.numbers = prod(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), self.weight
        by_gluon = self._by_gluon and rows.dtype == torch.bfloat16
        if len(rows) > MAX_ROWS and not self._whole and not by_gluon:
            found = self._by_library(rows)
        else:
            launch = choose_product(weight, True, len(rows), self._gpu, self._whole, by_gluon)
            found = quantized_gated(rows, weight, self.kind, self._bias, launch=launch, gpu=self._gpu)
        return found.view(*x.shape[:-1], -1)

    def _by_library(self, rows: Tensor) -> Tensor:
        """As of `TiledLinear`, a block's gates before its ups, which are activated into the block's columns."""
        weight, halves = self.weight, None if self._bias is None else self._bias.view(2, -1)
        out = rows.new_empty((len(rows), weight.shape[0] // 2))
        for each in self._together:
            block = decode_tiles(weight, each.first, each.stop, rows.dtype, self._gpu, parted=True)
            both, own = rows.new_empty((len(rows), len(block))), slice(each.first // 2, each.stop // 2)
            _multiply(rows, block, None if halves is None else halves[:, own].flatten(), both, each.runs)
            gate_mul(both, self.kind, self._gpu, out[:, own])
        return out

    def read_bytes(self, rows: int) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TiledExperts:
    """`ExpertProducts` over weights in tiles, on a GPU. products: the operation."""

    products: Callable[..., Tensor]
    experts: Experts

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return self.products(x, routes, experts=self.experts)

    @property
    def in_powers(self) -> bool:
        """Whether all scales are powers of two, as MXFP4 has them."""
        both = self.experts.gate_up, self.experts.down
        return all(isinstance(each, TiledWeight) and each.scheme.scales == "e8m0" for each in both)

    def beside(self, gate_up: GatedLinear, down: Linear) -> "TiledExperts | None":
        """With one more expert, which all tokens take, in the same launches (`Experts.shared`).

        None where that one is not of the same size and in the same kind of tiles, or has more than two weights.
        """
        if not (isinstance(gate_up, TiledGated) and isinstance(down, TiledLinear)):
            return None
        pairs = ((gate_up, self.experts.gate_up), (down, self.experts.down))
        plain = not gate_up.has_bias and not down.has_bias and gate_up.kind == self.experts.activation.kind
        alike = all(
            isinstance(own, TiledWeight) and shared.weight.shape == own.shape[1:] and _read_alike(shared.weight, own)
            for shared, own in pairs
        )
        if not (plain and alike and self.experts.activation.limit is None and self.experts.gate_up_bias is None):
            return None
        return replace(self, experts=replace(self.experts, shared=(gate_up.weight, down.weight)))


def _by_gluon(weight: TiledWeight, gpu: GpuTraits) -> bool:
    """Whether many rows in bfloat16 are the kernel's in Gluon. Why they are not is logged, each reason once."""
    why = why_not_by_gluon(weight, torch.bfloat16, gpu)
    if why is not None:
        _tell(why)
    return why is None


@cache
def _tell(why: str) -> None:
    _log.info("products of many rows with packed weights are not in Gluon: %s", why)


@dataclass(frozen=True, slots=True)
class _Together:
    """Lines first .. stop, which are decoded together. runs: of what is decoded, with the factor of their sums."""

    first: int
    stop: int
    runs: tuple[tuple[slice, float], ...]


def _decoded_together(weight: TiledWeight, parted: bool) -> list[_Together]:
    """All lines, in whole tiles. A tensor of the checkpoint has one factor of sums, so runs are few."""
    lines, k = weight.shape
    each = max(1, _BLOCK_OF_GPU // (k * TILE)) * TILE
    factors = torch.ones(lines)
    if weight.scheme.scales == "e4m3":
        assert weight.factor is not None
        factors = weight.factor.flatten()[:lines].cpu()
    found = []
    for first in range(0, lines, each):
        own = factors[first : first + each]
        values, counts = (torch.cat(apart(own, 0)) if parted else own).unique_consecutive(return_counts=True)
        stops = counts.cumsum(0).tolist()
        runs = zip(map(slice, [0, *stops], stops), values.tolist(), strict=False)
        found.append(_Together(first, first + len(own), tuple(runs)))
    return found


def _multiply(
    rows: Tensor, block: Tensor, bias: Tensor | None, out: Tensor, runs: Sequence[tuple[slice, float]]
) -> None:
    """The library's product with a block of lines, into columns of a result. Factors go to sums before rounding."""
    for own, factor in runs:
        into, of_own = out[:, own], None if bias is None else bias[own]
        beta = 0 if of_own is None else 1  # what a result has is not read
        torch.addmm(into if of_own is None else of_own, rows, block[own].T, beta=beta, alpha=factor, out=into)
