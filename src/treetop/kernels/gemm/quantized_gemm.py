"""Products of few rows with a quantized weight that lies in tiles: each tile is decoded as it is read.

    y = x @ weight.T + bias        x: [rows, k]; of more than MAX_ROWS the library is faster with decoded weights,
                                   unless `quantized_gluon` multiplies them

A program computes `block_n` lines over one share of k, with the weight as the left operand and sums in float32 that are
rounded once. A gated weight's gates and ups are lines in turn, so that the activation is a product's end. k is cut in
`splits` where lines alone give too few programs, by the weight's shape alone: a row's bits do not depend on how many
there are.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.gemm import quantized_gluon
from treetop.kernels.gemm.quantized_gluon import GluonLaunch
from treetop.kernels.gemm.quantized_weight import decode
from treetop.kernels.gemm.tiles import (
    BLOCK,
    TILE,
    Kind,
    TiledWeight,
    apart,
    tile_arguments,
    tile_options,
    tile_product,
    untile,
)
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl
from treetop.kernels.tuning import TunedTable, read_table

MAX_ROWS = 256
_MOST_OF_BLOCK = 128
TABLE = Path(__file__).with_name("quantized_gemm.json")


@dataclass(frozen=True, slots=True)
class QuantizedLaunch:
    """How a product is cut: lines of a block, a multiple of 64 or half of that; splits of k; pipeline stages; warps."""

    block_n: int
    splits: int
    num_stages: int
    num_warps: int


def quantized_gemm_reference(x: Tensor, weight: TiledWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of a weight that is decoded and rounded to x's dtype, summed in float32. A factor of sums
    goes to them before the bias.

    Returns [1, rows, lines].
    """
    by_rows = untile(weight)
    out = x.to(torch.float32) @ decode(by_rows).to(x.dtype).to(torch.float32).T
    if by_rows.scheme.scales == "e4m3":
        assert by_rows.factor is not None
        out *= by_rows.factor[:, 0]
    return (out if bias is None else out + bias.to(torch.float32))[None]


def quantized_gated_reference(
    x: Tensor, weight: TiledWeight, kind: Gate = "silu", bias: Tensor | None = None
) -> Tensor:
    """Activated gate times up of `quantized_gemm_reference`, whose lines they are in turn, rounded once. [rows, lines /
    2].

    bias: of all gates, then of all ups.
    """
    gate, up = apart(quantized_gemm_reference(x, weight)[0], -1)
    if bias is not None:
        first, second = bias.to(torch.float32).chunk(2)
        gate, up = gate + first, up + second
    return (activated_reference(gate, kind) * up).to(x.dtype)


def quantized_gemm(
    x: Tensor, weight: TiledWeight, bias: Tensor | None = None, *, launch: QuantizedLaunch | GluonLaunch, gpu: GpuTraits
) -> Tensor:
    """`quantized_gemm_reference` in parts [splits, rows, lines] that add up to it: of several in float32, of one in x's
    dtype.

    x: [rows, k], contiguous.
    """
    dtype = x.dtype if launch.splits == 1 else torch.float32
    out = torch.empty((launch.splits, len(x), weight.shape[0]), dtype=dtype, device=x.device)
    _launch(out, x, weight, bias, None, launch, gpu)
    return out


def quantized_gated(
    x: Tensor,
    weight: TiledWeight,
    kind: Gate = "silu",
    bias: Tensor | None = None,
    *,
    launch: QuantizedLaunch | GluonLaunch,
    gpu: GpuTraits,
) -> Tensor:
    """`quantized_gated_reference` in one launch, which has one split. Arguments as in `quantized_gemm`."""
    assert launch.splits == 1
    out = torch.empty((len(x), weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, bias, kind, launch, gpu)
    return out


def _launch(
    out: Tensor, x: Tensor, weight: TiledWeight, bias: Tensor | None, kind: Gate | None,
    launch: QuantizedLaunch | GluonLaunch, gpu: GpuTraits,
) -> None:  # fmt: skip
    (rows, k), (lines, columns) = x.shape, weight.shape
    block_m = row_block(rows)
    assert k == columns
    assert x.is_contiguous()
    if isinstance(launch, GluonLaunch):
        quantized_gluon.multiply(out, x, weight, bias, kind, launch, gpu)
        return
    blocks = -(-k // BLOCK)
    share = -(-blocks // launch.splits)
    grid = (-(-rows // block_m), -(-lines // launch.block_n), launch.splits)
    _quantized_kernel[grid](
        out, x, *tile_arguments(weight), x if bias is None else bias, rows, lines, k, share,
        **tile_options(weight, x.dtype, gpu), has_bias=bias is not None, block_m=block_m, block_n=launch.block_n,
        kind=kind, overlap=gpu.can_overlap, num_stages=launch.num_stages, num_warps=launch.num_warps,
        **launch_options(gpu),
    )  # fmt: skip


@jit
def _quantized_kernel(
    out: Arg, x: Arg, words: Arg, scale: Arg, factor: Arg, zero: Arg, bias: Arg, rows: Arg, lines: Arg, k: Arg,
    share: Arg, numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr,
    per: constexpr, whole_blocks: constexpr, fast: constexpr, has_bias: constexpr, block_m: constexpr,
    block_n: constexpr, kind: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of lines and rows over one share of k, in blocks. Grid (rows / block_m, lines / block_n, splits).

    out: [splits, rows, n]. kind: of a gate, where lines are gates and ups in turn, or None. The first split adds the
    bias.
    """
    split = tl.program_id(2)
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    line = tl.program_id(1) * block_n + tl.arange(0, block_n)
    blocks, tiles = (k + 127) // 128, (lines + 63) // 64
    first, last = split * share, tl.minimum((split + 1) * share, blocks)
    if overlap:  # 64 words are a cache line
        size: constexpr = 4096 if numbers == "e4m3" else 2048
        own = tl.minimum(tl.program_id(1) * block_n // 64, tiles - 1).to(tl.int64) * blocks
        ask_for(words + (own + tl.minimum(first, blocks - 1)) * size + tl.arange(0, size // 64) * 64)
    pdl_wait(overlap, early=True)
    x_at = x + row.to(tl.int64)[:, None] * k
    total = tile_product(
        x_at, row < rows, words, scale, factor, zero, tl.minimum(line // 64, tiles - 1), line % 64, first, last, k,
        numbers, scales, form, group, has_zero, per, whole_blocks, fast, block_m, block_n, x.dtype.element_ty,
    )  # fmt: skip
    if kind is not None:
        n = lines // 2
        output = tl.program_id(1) * (block_n // 2) + tl.arange(0, block_n // 2)
        gate, up = tl.split(tl.permute(tl.reshape(total, [block_n // 2, 2, block_m]), [0, 2, 1]))
        if has_bias:
            gate += tl.load(bias + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + n + output, mask=output < n, other=0.0).to(tl.float32)[:, None]
        value = activated(gate, kind) * up
        at = out + row.to(tl.int64)[None, :] * n + output[:, None]
        tl.store(at, value.to(out.dtype.element_ty), mask=(output < n)[:, None] & (row < rows)[None, :])
    else:
        if has_bias and split == 0:
            total += tl.load(bias + line, mask=line < lines, other=0.0).to(tl.float32)[:, None]
        at = out + (split.to(tl.int64) * rows + row[None, :]) * lines + line[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=(line < lines)[:, None] & (row < rows)[None, :])


# ------------------------------------------------------------------------------------------------------- the launch


ROWS = (16, 32, 64, MAX_ROWS)
"""Numbers of rows up to which launches are the same."""
_FEW = 32
"""Rows up to which a block has one tile of lines where nothing was measured."""


def up_to(rows: int) -> int:
    """The one of `ROWS` that a number of rows counts to: of more, in blocks, the last."""
    return next((most for most in ROWS if rows <= most), MAX_ROWS)


def choose_product(
    weight: TiledWeight, gated: bool, rows: int, gpu: GpuTraits, whole: bool, by_gluon: bool
) -> QuantizedLaunch | GluonLaunch:
    """The launch for a weight, with splits that are the same for up to `MAX_ROWS` rows. One that was measured is taken
    as it is, but of FP8 in groups, which was not: it takes that of FP8 by line, changed as `_for_two` says.

    by_gluon: the kernel in Gluon has nothing against the weight, and multiplies what has many rows. Of up to 64 the
    plain one does where it was measured and has an entry, and of FP8 in groups, for which only it was.
    """
    kind, (lines, k) = weight.kind, weight.shape
    launch = choose_quantized(kind, (lines, k), gated, rows, gpu, whole)
    known = load_table().find((kind, lines, k, gated, up_to(rows)), gpu) is not None
    in_groups = kind == "e4m3" and weight.scheme.group > 0
    if by_gluon and not (rows <= 64 and (known or in_groups)):
        found = quantized_gluon.choose(kind, (lines, k), gated, rows, launch.splits, MAX_ROWS, gpu)
        if found is not None:
            return found
    return launch if known and not in_groups else _for_two(launch, weight, rows, gpu)


def _for_two(launch: QuantizedLaunch, weight: TiledWeight, rows: int, gpu: GpuTraits) -> QuantizedLaunch:
    """A launch of up to 64 rows with a stage less, where only so a second program has room on a multiprocessor.

    One alone stands still while it waits for its products. So FP8 in blocks, whose stages have scales too, takes with
    three stages 0.77 of the time: `gate_up` and `down` of Llama-3.1-8B, 64 rows, an H200.
    """
    if rows > 64 or not gpu.by_warp_groups or gpu.has_tensor_memory:
        return launch
    of_line = 2 * weight.words.shape[-1] + (4 * weight.per_block if weight.scheme.group else 0)
    half = (gpu.shared_bytes - 1024) // 2  # each program takes 1 KiB more, of 228
    x, codes = 2 * BLOCK * row_block(rows), launch.block_n * of_line  # bytes of a stage; of codes there is one less
    taken = launch.num_stages * x + (launch.num_stages - 1) * codes
    return replace(launch, num_stages=launch.num_stages - 1) if taken - x - codes <= half < taken else launch


@cache
def choose_quantized(
    kind: Kind, shape: tuple[int, int], gated: bool, rows: int, gpu: GpuTraits, whole: bool = False
) -> QuantizedLaunch:
    """The launch for a weight [lines, k]. whole: k is not cut.

    `quantized_gemm.json` has those that were measured and are faster than this rule by over 3 %
    (`benchmarks/quantized_launches.py`). By the rule up to 16 rows of 4 bits have two warps and three stages, so that
    more programs lie on a multiprocessor, in a gate with folded scales four; of more than 32 rows blocks have twice the
    lines where k is not cut. Halves whose k is not cut give fewer programs than multiprocessors: blocks of half the
    lines, by two warps with 16 each, which wait for no product, take 0.65 to 0.89 of the time.
    """
    lines, k = shape
    found = load_table().find((kind, lines, k, gated, up_to(rows)), gpu)
    if found is not None:
        return replace(found, splits=1) if whole else found
    cuts = (load_table().find((kind, lines, k, gated, most), gpu) for most in ROWS)
    cut = next((other.splits for other in cuts if other is not None), None)
    splits = 1 if gated or whole else cut or splits_of(lines, k, gpu)
    measured = gpu.by_warp_groups and not gpu.has_tensor_memory  # the kind of GPU that what follows was seen on
    alone = -(-lines // TILE) * (1 if rows <= 16 else 2) <= gpu.num_sms
    if measured and rows <= _FEW and kind == "halves" and splits == 1 and not gated and alone:
        return QuantizedLaunch(TILE // 2, splits, 4, 2)
    if measured and rows <= 16 and kind != "e4m3":
        return QuantizedLaunch(TILE, splits, 4 if gated and kind == "folded" else 3, 2)
    if measured and _FEW < rows <= 64 and splits > 1:
        return QuantizedLaunch(TILE, splits, 3, 4)
    block_n = TILE if rows <= _FEW else 2 * TILE
    stage = 2 * BLOCK * row_block(rows) + block_n * BLOCK  # bytes of x and, at most, of codes
    stages = max(2, min(4, (gpu.shared_bytes - _SPARE) // stage))
    return QuantizedLaunch(block_n, splits, stages, block_n // 16)


def splits_of(lines: int, k: int, gpu: GpuTraits) -> int:
    """How k is cut for any number of rows: in up to four, as long as that gives three programs a multiprocessor at
    most; of these so that 256 rows, in blocks of 128 lines, take least, and among equals in the most.

    A product of 5,120 lines so takes 0.7 of what it takes in four where rows are many, for its last blocks are not
    alone, and 1.1 where they are few.
    """
    tiles, blocks = -(-lines // TILE), -(-k // BLOCK)

    def turns(splits: int) -> int:
        return -(-(-(-tiles // 2) * splits) // gpu.num_sms) * -(-blocks // splits)

    fine = [s for s in (4, 3, 2, 1) if s == 1 or (tiles * s <= 3 * gpu.num_sms and (s - 1) * -(-blocks // s) < blocks)]
    return min(fine, key=turns)


_SPARE = 16 << 10
"""Bytes of shared memory for what is no stage."""


def row_block(rows: int) -> int:
    """Rows of a block."""
    return min(_MOST_OF_BLOCK, max(16, power_of_two(rows)))


@cache
def load_table() -> TunedTable[QuantizedLaunch]:
    """The committed table, by kind, lines, k, whether gated, and up to which of `ROWS`."""
    return read_table(TABLE, lambda entry: QuantizedLaunch(*entry["launch"]), ("kind", "lines", "k", "gated", "rows"))
