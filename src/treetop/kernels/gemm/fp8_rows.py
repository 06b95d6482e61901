"""Products of e4m3 inputs with e4m3 weights: both codes go to the tensor cores, and sums get both scales at their end.

    codes[i, j] = e4m3(x[i, j] / scale[i, g])                  scale[i, g] = largest |x[i, j]| of group g / 448
    y[i, n]     = sum over g of (sum over j in g of codes[i, j] * weight[n, j]) * scale[i, g] * weight_scale[n, g]

rounded once. A group is a whole row (a token), or so many columns of it as the weight's blocks have. A fixed scale is
one for all rows. What a row becomes depends on it alone, so a batch changes nothing.

The reference adds products of codes in float64, which is exact: they are multiples of 2 ** -18 below 2 ** 18, and a row
has less than 2 ** 17. The kernel adds them in float32, for Hopper's tensor cores keep about 14 bits while they add up
e4m3: after each 128 columns, or each group, what they have goes to a sum in float32 registers. This kernel serves
every number of rows, with the weight as the left operand; k is cut for few rows alone, and never where bits are a row's
own. Where bits may differ, `scaled_mm` takes many.
Sources: arXiv:2412.19437 (DeepSeek-V3), section 3.3; `compressed-tensors` 0.20 `calculate_qparams`; OCP 8-bit Floating
Point Specification 1.0.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.fused import e4m3
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.gemm.quantized_gemm import row_block
from treetop.kernels.gemm.quantized_weight import QuantizedWeight
from treetop.kernels.gemm.skinny_gemm import most_splits
from treetop.kernels.kv import FP8, LARGEST
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, lanes, tl

BLOCK = 128
"""Columns after which sums go to float32, where a row has one scale."""
GROUPS = (32, 64, 128)
"""Columns of a group that are built."""
_LEAST = torch.finfo(torch.float32).eps
"""The scale of zeros, as `compressed-tensors` has it."""
_PROGRAM = 4096
"""Numbers of groups that a program quantizes."""
_AHEAD = constexpr(32)
"""Rows of a block up to which a group's scales are asked for a block ahead: they come from memory, with little to wait
under; of more rows the products last longer than they take."""


@dataclass(frozen=True, slots=True)
class Activations:
    """How the inputs of a product become e4m3.

    group: columns that share a scale; 0 for whole rows.
    fixed: the checkpoint has the scale, one for all rows.
    powers: scales are rounded up to powers of two (`scale_fmt` ue8m0).
    """

    group: int = 0
    fixed: bool = False
    powers: bool = False

    def __str__(self) -> str:
        if self.fixed:
            return "by a fixed scale"
        size = f" and group of {self.group}" if self.group else ""
        return f"by token{size}{', scales of powers of two' * self.powers}"


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Inputs in e4m3. codes: [rows, k] uint8. scale: [rows, groups] float32, of kernels with rows side by side."""

    codes: Tensor
    scale: Tensor


def quantize_rows_reference(
    x: Tensor, how: Activations, fixed: Tensor | None = None, multiple: int = 1
) -> QuantizedRows:
    """x [rows, k] in e4m3, by float32 arithmetic. fixed: [1] float32, the scale of `Activations.fixed`. multiple: rows
    are filled up with zeros to a multiple of it.

    A number beyond 448 times its scale becomes 448. NaN makes its group's scale NaN, or with a fixed one stays.
    """
    wide = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -len(x) % multiple))
    rows, k = wide.shape
    group = how.group or k
    whole = torch.nn.functional.pad(wide, (0, -k % group)).view(rows, -1, group)
    if fixed is None:
        largest = whole.abs().amax(-1)
        scale = largest / torch.full_like(largest, LARGEST)  # by a number a GPU would multiply with its inverse
        scale = torch.where(scale == 0, _LEAST, scale)
        scale = _up_to_powers(scale) if how.powers else scale
    else:
        scale = fixed.view(1, 1).expand(rows, whole.shape[1]).contiguous()
    codes = (whole / scale[..., None]).clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    return QuantizedRows(codes.view(rows, -1)[:, :k].contiguous(), scale)


def _up_to_powers(scale: Tensor) -> Tensor:
    bits = scale.view(torch.int32)
    return torch.where(bits < _INFINITE, (bits + 0x7FFFFF) & _INFINITE, bits).view(torch.float32)


_INFINITE = 0x7F800000


def fp8_rows_reference(
    x: QuantizedRows,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    kind: Gate | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The product [1, rows, lines] with a weight in e4m3 by rows, exact but for scales, rounded to `dtype` once.

    kind: of a gate, where lines are all gates, then all ups; the result is then [1, rows, lines / 2], activated in
    float32.
    """
    group, k = weight.scheme.group or weight.columns, weight.columns
    codes, lines = (each.view(FP8).to(torch.float64) for each in (x.codes, weight.codes))
    total = torch.zeros((len(codes), len(lines)), dtype=torch.float64, device=codes.device)
    for of, start in enumerate(range(0, k, group)):
        part = codes[:, start : start + group] @ lines[:, start : start + group].T
        total += part * (x.scale[:, of, None].to(torch.float64) * weight.scale[:, of].to(torch.float64))
    if bias is not None:
        total += bias.to(torch.float64)
    if kind is None:
        return total.to(dtype)[None]
    gate, up = total.to(torch.float32).chunk(2, -1)
    return (activated_reference(gate, kind) * up).to(dtype)[None]


# ------------------------------------------------------------------------------------------------------- the kernels


def quantize_rows(
    x: Tensor, how: Activations, fixed: Tensor | None = None, multiple: int = 1, *, gpu: GpuTraits
) -> QuantizedRows:
    """`quantize_rows_reference` in one launch. x: contiguous."""
    assert x.is_contiguous()
    there, k = x.shape
    rows, group = there + -there % multiple, how.group or k
    groups, width = -(-k // group), lanes(group)
    block = 1 if how.group == 0 else min(_PROGRAM // width, lanes(groups))
    codes = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device).T
    _quantize_kernel[(rows, -(-groups // block))](
        codes, scale, x, scale if fixed is None else fixed, there, rows, k, groups, group=how.group,
        fixed=fixed is not None, powers=how.powers, width=width, block=block, overlap=gpu.can_overlap,
        num_warps=max(4, min(16, width * block // 1024)), **launch_options(gpu),
    )  # fmt: skip
    return QuantizedRows(codes, scale)


@jit_for_any("present", "rows")
def _quantize_kernel(
    codes: Arg, scale: Arg, x: Arg, given: Arg, present: Arg, rows: Arg, k: Arg, groups: Arg, group: constexpr,
    fixed: constexpr, powers: constexpr, width: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """`block` groups of a row, of zeros from row `present` on. Grid (rows, groups / block)."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * block + tl.arange(0, block)
    lane = tl.arange(0, width)
    size = group if group > 0 else k
    column = own[:, None] * size + lane[None, :]
    there = (own < groups)[:, None] & (lane < size)[None, :] & (column < k)
    pdl_wait(overlap, early=True)
    held = tl.where(row < present, k, 0)
    values = tl.load(x + row * k + column, mask=there & (column < held), other=0.0).to(tl.float32)
    if fixed:
        s = tl.load(given) + tl.zeros([block], tl.float32)
    else:
        s = scale_of(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), powers)
    tl.store(scale + own.to(tl.int64) * rows + row, s, mask=own < groups)
    tl.store(codes + row * k + column, e4m3(values, s[:, None]), mask=there)


@jit
def scale_of(largest: Arg, powers: constexpr) -> Arg:
    """The scales of groups by their largest numbers, whose bits are given without signs: so NaN is the largest."""
    s = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.zeros_like(largest).to(tl.float32) + 448.0)
    s = tl.where(s == 0.0, 1.1920928955078125e-07, s)
    if powers:
        bits = s.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)
        s = bits.to(tl.float32, bitcast=True)
    return s


@dataclass(frozen=True, slots=True)
class Fp8Launch:
    """How a product is cut: lines of a block, a multiple of 64; splits of k; pipeline stages; warps."""

    block_n: int
    splits: int
    num_stages: int
    num_warps: int


def fp8_rows(
    x: QuantizedRows,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    kind: Gate | None = None,
    *,
    dtype: torch.dtype,
    launch: Fp8Launch,
    gpu: GpuTraits,
) -> Tensor:
    """`fp8_rows_reference` in parts that add up to it: of several in float32, of one in `dtype`. Of a gate one.

    Scales of a group lie side by side, of rows and of the weight's lines (`by_group`): a block of lines finds them
    together.
    """
    (rows, k), (lines, columns) = x.codes.shape, weight.shape
    assert k == columns
    assert all(each.is_contiguous() for each in (x.codes, x.scale.T, weight.codes, weight.scale.T))
    assert launch.splits == 1 or kind is None
    width = lines if kind is None else lines // 2
    made = dtype if launch.splits == 1 else torch.float32
    out = torch.empty((launch.splits, rows, width), dtype=made, device=x.codes.device)
    block_m, group = row_block(rows), weight.scheme.group
    assert group == 0 or group in GROUPS
    block_k = group or BLOCK
    blocks = -(-k // block_k)
    share = -(-blocks // launch.splits)
    _fp8_kernel[(-(-rows // block_m), -(-lines // launch.block_n), launch.splits)](
        out, x.codes.view(FP8), x.scale, weight.codes.view(FP8), weight.scale, weight.scale if bias is None else bias,
        rows, lines, k, share, grouped=group > 0, has_bias=bias is not None, kind=kind, block_m=block_m,
        block_n=launch.block_n, block_k=block_k, overlap=gpu.can_overlap, num_stages=launch.num_stages,
        num_warps=launch.num_warps, **launch_options(gpu),
    )  # fmt: skip
    return out


def by_group(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight whose scales are in memory as `fp8_rows` reads them."""
    return replace(weight, scale=weight.scale.T.contiguous().T)


@jit_for_any("rows")
def _fp8_kernel(
    out: Arg, x: Arg, x_scale: Arg, weight: Arg, weight_scale: Arg, bias: Arg, rows: Arg, lines: Arg, k: Arg,
    share: Arg, grouped: constexpr, has_bias: constexpr, kind: constexpr, block_m: constexpr, block_n: constexpr,
    block_k: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """A block of lines and rows over one share of k, in blocks. Grid (rows / block_m, lines / block_n, splits).

    out: [splits, rows, n]. kind: of a gate, where lines are gates, then ups, or None. The first split adds the bias.
    """
    split = tl.program_id(2)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    line = tl.program_id(1) * block_n + tl.arange(0, block_n)
    if kind is not None:  # as many gates, then their ups
        half: constexpr = block_n // 2
        inside = tl.arange(0, block_n)
        output = tl.program_id(1) * half + inside % half
        own = (tl.minimum(output, lines // 2 - 1) + inside // half * (lines // 2)).to(tl.int64)
    else:
        own = tl.minimum(line, lines - 1).to(tl.int64)
    blocks = (k + block_k - 1) // block_k
    first, last = split * share, tl.minimum((split + 1) * share, blocks)
    w_at = weight + own[:, None] * k
    lane = tl.arange(0, block_k)[None, :]
    if overlap:  # 128 columns are a cache line
        ask_for(weight + own * k + tl.minimum(first * block_k, k - 1))
    pdl_wait(overlap, early=True)
    there = row < rows
    x_at = x + row.to(tl.int64)[:, None] * k
    total = tl.zeros([block_n, block_m], tl.float32)
    ahead: constexpr = grouped and block_m <= _AHEAD
    if ahead:
        s, of_rows = _scales(weight_scale, x_scale, tl.minimum(first, blocks - 1), own, row, there, lines, rows)
    for block in range(first, last):
        column = block * block_k + lane
        w = tl.load(w_at + column, mask=column < k, other=0.0)
        values = tl.load(x_at + column, mask=there[:, None] & (column < k), other=0.0)
        if grouped:
            of_block = tl.minimum(block + 1, blocks - 1) if ahead else block
            s_new, of_rows_new = _scales(weight_scale, x_scale, of_block, own, row, there, lines, rows)
            if not ahead:
                s, of_rows = s_new, of_rows_new
            part = tl.dot(w, tl.trans(values), max_num_imprecise_acc=block_k)
            total += part * (s[:, None] * of_rows[None, :])
            if ahead:
                s, of_rows = s_new, of_rows_new
        else:
            total = tl.dot(w, tl.trans(values), total, max_num_imprecise_acc=block_k)
    if not grouped:
        of_rows = tl.load(x_scale + row, mask=there, other=0.0)
        total = total * (tl.load(weight_scale + own)[:, None] * of_rows[None, :])
    if kind is not None:
        n = lines // 2
        output = tl.program_id(1) * half + tl.arange(0, half)
        if has_bias:
            total += tl.load(bias + own).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, half, block_m]), [1, 2, 0]))
        at = out + row.to(tl.int64)[None, :] * n + output[:, None]
        value = activated(gate, kind) * up
        tl.store(at, value.to(out.dtype.element_ty), mask=(output < n)[:, None] & there[None, :])
    else:
        if has_bias and split == 0:
            total += tl.load(bias + own).to(tl.float32)[:, None]
        at = out + (split.to(tl.int64) * rows + row[None, :]) * lines + line[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=(line < lines)[:, None] & there[None, :])


@jit_for_any("rows")
def _scales(
    weight_scale: Arg, x_scale: Arg, block: Arg, own: Arg, row: Arg, there: Arg, lines: Arg, rows: Arg
) -> tuple[Arg, Arg]:  # fmt: skip
    """Of a block's lines and rows."""
    return tl.load(weight_scale + block * lines + own), tl.load(x_scale + block * rows + row, mask=there, other=0.0)


# ------------------------------------------------------------------------------------------------------- the launch


_FEW = 64
"""Rows up to which a launch is one of few."""


@cache
def choose_fp8(
    shape: tuple[int, int], group: int, gated: bool, rows: int, gpu: GpuTraits, whole: bool = False
) -> Fp8Launch:
    """The launch for a weight [lines, k], by its shape and by whether rows are few. whole: k is not cut.

    Few rows are bound by how fast weights stream: small blocks, about three programs a multiprocessor, a deep pipeline;
    less deep the larger a stage is, so that more programs are there at once. By groups the 448 of `gate_up` of
    Llama-3.1-8B take an H200 38 us of 32 rows with 4 stages and 54 with 6, of 64 rows 44 with 3 and 63 with 6.
    """
    (lines, k), few, block_k = shape, rows <= _FEW, group or BLOCK
    block_n = 64 if few else 128
    splits = 1 if gated or whole or not few else most_splits(-(-lines // block_n), -(-k // block_k), gpu)
    stage = block_k * (block_n + row_block(rows))  # bytes
    deep = 4 if not few or (rows <= 32 and (group or rows > 16)) else 5 if rows <= 16 else 3
    stages = max(2, min(deep, (gpu.shared_bytes - _SPARE) // stage))
    return Fp8Launch(block_n, splits, stages, 4 if few else 8)


_SPARE = 16 << 10
"""Bytes of shared memory for what is no stage."""
