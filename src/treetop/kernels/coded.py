# ruff: noqa: PLR0917 (kernels take what they touch as arguments)
"""Weights as codes of 8 or 4 bits with scales, and products of few rows that decode them as they are read.

    weight[i, j] = (number(codes[i, j]) - zero[i, g]) * scale[i, g]        g = j // group, in float32

and then rounded to the dtype of the product: once. A reference and the kernel give the same bits of a weight, so a
product is that with the decoded weight. In a kernel a tile of codes is decoded in registers and multiplied on tensor
cores, with sums in float32 that are rounded once; k is cut in `splits` where n alone gives too few programs, as in
`kernels.skinny_gemm`, by the weight's shape alone: a row's bits do not depend on how many there are.

Codes of 4 bits lie two in a byte, the earlier in its lower half: a tile's halves multiply the even and the odd columns
of x, and nothing moves between registers. An e4m3 or e2m1 code, shifted to the end of a float32's exponent and the
start of its mantissa, is its number times a power of two, subnormal codes too.
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.mxfp4 import E2M1
from treetop.kernels.skinny_gemm import most_splits
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

MAX_ROWS = 256
_BLOCK_M = 64
_BLOCK_K = 128
MIDDLE = 8
"""The code of 0 among integers without a zero."""

Numbers = Literal["e4m3", "e2m1", "int4"]
Scales = Literal["float32", "e8m0", "times", "over"]


@dataclass(frozen=True, slots=True)
class Coding:
    """What codes and scales mean.

    group: columns that share a scale; 0 for whole rows. The last group may have fewer.
    scales: float32; e8m0, a power of two; or e4m3 times a row's factor or over it.
    zeros: integers have a zero each group, 0 to 16.
    """

    numbers: Numbers
    group: int
    scales: Scales = "float32"
    zeros: bool = False

    @property
    def in_byte(self) -> int:
        """Codes that a byte holds."""
        return 1 if self.numbers == "e4m3" else 2

    def bytes_of(self, columns: int) -> int:
        """Of a row's codes."""
        return -(-columns // self.in_byte)

    def groups_of(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [..., columns], each row of which lies by itself.

    codes: [..., bytes] uint8.
    scale: [..., groups] float32, or uint8 where `Coding.scales` says otherwise.
    factor: [..., 1] float32, of scales of two levels; 0 is of rows that are padding.
    zero: [..., groups] uint8.
    order: [columns] int64, the group of each column where they do not follow each other.
    """

    coding: Coding
    columns: int
    codes: Tensor
    scale: Tensor
    factor: Tensor | None = None
    zero: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.scale, self.factor, self.zero) if each is not None)

    def rows(self, start: int, stop: int) -> "CodedWeight":
        """Those of axis 0."""
        factor, zero = (None if each is None else each[start:stop] for each in (self.factor, self.zero))
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop], factor=factor, zero=zero)


def decode(weight: CodedWeight) -> Tensor:
    """The numbers [..., columns] float32."""
    numbers, scale = _numbers(weight), _scales(weight)
    if weight.order is not None:
        zero = MIDDLE if weight.zero is None else weight.zero[..., weight.order].to(torch.float32)
        return numbers.sub_(zero).mul_(scale[..., weight.order])
    coding, k = weight.coding, weight.columns
    excess = -k % coding.group if coding.group else 0
    whole = torch.nn.functional.pad(numbers, (0, excess)) if excess else numbers
    groups = whole.unflatten(-1, (scale.shape[-1], -1))
    if coding.numbers == "int4":
        groups.sub_(MIDDLE if weight.zero is None else weight.zero[..., None].to(torch.float32))
    decoded: Tensor = groups.mul_(scale[..., None]).flatten(-2)[..., :k]
    return decoded


def _numbers(weight: CodedWeight) -> Tensor:
    """What the codes alone are, float32, in memory of its own."""
    if weight.coding.numbers == "e4m3":
        return weight.codes.view(torch.float8_e4m3fn).to(torch.float32)
    codes = torch.stack([weight.codes & 0xF, weight.codes >> 4], -1).flatten(-2)[..., : weight.columns]
    if weight.coding.numbers == "int4":
        return codes.to(torch.float32)
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=codes.device)
    return table[codes.int()]


def _scales(weight: CodedWeight) -> Tensor:
    """[..., groups] float32."""
    kind, scale = weight.coding.scales, weight.scale
    if kind == "float32":
        return scale
    if kind == "e8m0":
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    assert weight.factor is not None
    levels = scale.view(torch.float8_e4m3fn).to(torch.float32)
    return levels * weight.factor if kind == "times" else levels / weight.factor.where(weight.factor != 0, 1)


def coded_rows_reference(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of a weight that is decoded and rounded to x's dtype, summed in float32.

    Returns [1, rows, n].
    """
    out = x.to(torch.float32) @ decode(weight).to(x.dtype).to(torch.float32).T
    return (out if bias is None else out + bias.to(torch.float32))[None]


def coded_gated_reference(x: Tensor, weight: CodedWeight, kind: Gate = "silu", bias: Tensor | None = None) -> Tensor:
    """Activated gate times up of `coded_rows_reference`, whose first half is the gate, rounded once. [rows, n / 2]."""
    gate, up = coded_rows_reference(x, weight, bias)[0].chunk(2, dim=-1)
    return (activated_reference(gate, kind) * up).to(x.dtype)


# -------------------------------------------------------------------------------------------------------- the kernel


@dataclass(frozen=True, slots=True)
class CodedLaunch:
    """How a product is cut: outputs and columns of a block, splits of k, pipeline stages, warps."""

    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int


def choose_coded(shape: tuple[int, int], gated: bool, gpu: GpuTraits) -> CodedLaunch:
    """The launch for a weight [n, k], for any number of rows. Not measured."""
    n, k = shape
    tiles = -(-(n // 2 if gated else n) // 64)
    splits = 1 if gated or k % _BLOCK_K else most_splits(tiles, k // _BLOCK_K, gpu)
    return CodedLaunch(64, _BLOCK_K, splits, 3, 4)


def coded_rows(
    x: Tensor, weight: CodedWeight, bias: Tensor | None = None, *, launch: CodedLaunch, gpu: GpuTraits
) -> Tensor:
    """`coded_rows_reference` in parts [splits, rows, n] that add up to it; with one split rounded to x's dtype, with
    more in float32.

    x: [rows, k], contiguous, rows <= MAX_ROWS. weight: [n, k], its tensors contiguous, without an order.
    """
    n = weight.shape[0]
    dtype = x.dtype if launch.splits == 1 else torch.float32
    out = torch.empty((launch.splits, len(x), n), dtype=dtype, device=x.device)
    _launch(out, x, weight, bias, n, None, launch, gpu)
    return out


def coded_gated(
    x: Tensor,
    weight: CodedWeight,
    kind: Gate = "silu",
    bias: Tensor | None = None,
    *,
    launch: CodedLaunch,
    gpu: GpuTraits,
) -> Tensor:
    """`coded_gated_reference` in one launch, which has one split. Arguments as in `coded_rows`."""
    assert launch.splits == 1
    out = torch.empty((len(x), weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, weight.shape[0] // 2, kind, launch, gpu)
    return out


def _launch(
    out: Tensor, x: Tensor, weight: CodedWeight, bias: Tensor | None, n: int, kind: Gate | None, launch: CodedLaunch,
    gpu: GpuTraits,
) -> None:  # fmt: skip
    rows, k = x.shape
    coding, block_m = weight.coding, min(_BLOCK_M, max(16, power_of_two(rows)))
    assert rows <= MAX_ROWS
    assert k == weight.columns
    assert weight.order is None
    assert launch.splits == 1 or k % (launch.splits * launch.block_k) == 0
    held = [weight.codes, weight.scale, *(each for each in (weight.factor, weight.zero) if each is not None)]
    assert all(each.is_contiguous() for each in (x, *held))
    grid = (-(-n // launch.block_n), launch.splits, -(-rows // block_m))
    _coded_kernel[grid](
        out, x, weight.codes, weight.scale, weight.scale if weight.factor is None else weight.factor,
        weight.codes if weight.zero is None else weight.zero, x if bias is None else bias, rows, n, k,
        -(-k // launch.splits), coding.bytes_of(k), coding.groups_of(k), group=coding.group, numbers=coding.numbers,
        scales=coding.scales, has_zero=weight.zero is not None, has_bias=bias is not None, block_m=block_m,
        block_n=launch.block_n, block_k=launch.block_k, kind=kind, overlap=gpu.can_overlap,
        num_stages=launch.num_stages, num_warps=launch.num_warps, **launch_options(gpu),
    )  # fmt: skip


@jit
def _coded_kernel(
    out: Arg, x: Arg, codes: Arg, scale: Arg, factor: Arg, zero: Arg, bias: Arg, rows: Arg, n: Arg, k: Arg, share: Arg,
    width: Arg, groups: Arg, group: constexpr, numbers: constexpr, scales: constexpr, has_zero: constexpr,
    has_bias: constexpr, block_m: constexpr, block_n: constexpr, block_k: constexpr, kind: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """One block of outputs and rows over one share of k. Grid (n / block_n, splits, rows / block_m).

    out: [splits, rows, n]; x: [rows, k]; the rest as in `CodedWeight`, rows of `width` bytes and `groups` scales.
    kind: of a gate, where weight rows j and n + j give one output, or None. The first split adds the bias.
    """
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(1)
    row = tl.program_id(2) * block_m + tl.arange(0, block_m)
    start, end = split * share, tl.minimum((split + 1) * share, k)
    there = (output < n)[:, None]
    line = output.to(tl.int64)[:, None]
    if overlap:
        first = start if numbers == "e4m3" else start // 2
        ask_for(tl.where(there, codes + line * width + first, codes))
    pdl_wait(overlap, early=True)
    dtype: constexpr = x.dtype.element_ty
    x_row = x + row.to(tl.int64)[:, None] * k
    x_there = (row < rows)[:, None]
    total = tl.zeros([block_n, block_m], tl.float32)
    up = tl.zeros([block_n, block_m], tl.float32)
    for i in range(start, end, block_k):
        total = _add_block(
            total, x_row, x_there, codes, scale, factor, zero, line, there, i, end, width, groups, group, numbers,
            scales, has_zero, block_k, dtype,
        )  # fmt: skip
        if kind is not None:
            up = _add_block(
                up, x_row, x_there, codes, scale, factor, zero, line + n, there, i, end, width, groups, group,
                numbers, scales, has_zero, block_k, dtype,
            )  # fmt: skip
    if has_bias and split == 0:
        total += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
        if kind is not None:
            up += tl.load(bias + n + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
    if kind is not None:
        total = activated(total, kind) * up
    out_at = out + (split.to(tl.int64) * rows + row[None, :]) * n + output[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there & (row < rows)[None, :])


@jit
def _add_block(
    total: Arg, x_row: Arg, x_there: Arg, codes: Arg, scale: Arg, factor: Arg, zero: Arg, line: Arg, there: Arg,
    start: Arg, end: Arg, width: Arg, groups: Arg, group: constexpr, numbers: constexpr, scales: constexpr,
    has_zero: constexpr, block_k: constexpr, dtype: constexpr,
) -> Arg:  # fmt: skip
    """Add the product of columns start .. start + block_k. line: [block_n, 1], rows of the weight."""
    if numbers == "e4m3":
        column = start + tl.arange(0, block_k)[None, :]
        code = tl.load(codes + line * width + column, mask=there & (column < end), other=0)
        s, z = _scale_and_zero(
            scale, factor, zero, line, there, column, start, end, groups, group, scales, has_zero, block_k
        )
        return _add(total, _e4m3(code) * s, x_row, x_there, column, end, dtype)
    half = tl.arange(0, block_k // 2)[None, :]
    even = start + 2 * half
    code = tl.load(codes + line * width + start // 2 + half, mask=there & (even < end), other=0).to(tl.int32)
    s, z = _scale_and_zero(scale, factor, zero, line, there, even, start, end, groups, group, scales, has_zero, block_k)
    total = _add(total, _four_bits(code, z, numbers) * s, x_row, x_there, even, end, dtype)
    if group % 2 == 1:  # a byte's two columns may be of two groups
        s, z = _scale_and_zero(
            scale, factor, zero, line, there, even + 1, start, end, groups, group, scales, has_zero, block_k
        )
    return _add(total, _four_bits(code >> 4, z, numbers) * s, x_row, x_there, even + 1, end, dtype)


@jit
def _add(total: Arg, w: Arg, x_row: Arg, x_there: Arg, column: Arg, end: Arg, dtype: constexpr) -> Arg:
    """Add the product of weights [block_n, columns] with these columns of x."""
    values = tl.load(x_row + column, mask=x_there & (column < end), other=0.0)
    w = tl.where(column < end, w, 0.0).to(dtype)
    return tl.dot(w, tl.trans(values), total, input_precision="ieee")


@jit
def _scale_and_zero(
    scale: Arg, factor: Arg, zero: Arg, line: Arg, there: Arg, column: Arg, start: Arg, end: Arg, groups: Arg,
    group: constexpr, scales: constexpr, has_zero: constexpr, block_k: constexpr,
) -> Arg:  # fmt: skip
    """Of columns [1, columns] in float32, one for all of them where a block lies in one group. Without zeros 8."""
    if group == 0:
        at, valid = line * groups, there
    elif group % block_k == 0:
        at, valid = line * groups + start // group, there
    else:
        at, valid = line * groups + column // group, there & (column < end)
    s = tl.load(scale + at, mask=valid, other=0)
    if scales == "e8m0":
        bits = s.to(tl.int32)
        s = tl.maximum(bits << 23, 0x400000).to(tl.float32, bitcast=True)  # the least is a subnormal one
    elif scales == "times":
        s = _e4m3(s) * tl.load(factor + line, mask=there, other=0.0)
    elif scales == "over":
        levels, whole = _e4m3(s), tl.load(factor + line, mask=there, other=1.0)
        s = tl.div_rn(levels, tl.broadcast_to(tl.where(whole == 0.0, 1.0, whole), levels.shape))
    z = tl.full([1, 1], 8.0, tl.float32)
    if has_zero:
        z = tl.load(zero + at, mask=valid, other=0).to(tl.float32)
    return s, z


@jit
def _e4m3(code: Arg) -> Arg:
    """The numbers of codes that are no NaN, as float32: their bits with the exponent of a float32, 2 ** 120 apart."""
    bits = code.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0


@jit
def _four_bits(code: Arg, zero: Arg, numbers: constexpr) -> Arg:
    """The numbers of the lower 4 bits, as float32, of integers less their zero."""
    if numbers == "int4":
        return (code & 0xF).to(tl.float32) - zero
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
