"""Products of few rows with a large weight, the bulk of a decode round: bound by how fast weights stream from memory.

    y = x @ weight.T        x: [rows, k], rows <= 256, or more in blocks; weight: [n, k]

A program computes `block_n` outputs over one share of k. With the weight as the left operand a tensor core works on 64
outputs by however few rows there are; from 64 rows on, rows may be on the left. Where n alone gives too few programs, k
is cut in `splits`, and the result is a sum of parts that the next kernel adds up as it reads. Weights do not depend on
what ran before, so a program asks for its first ones before it waits for that (programmatic dependent launch), and
memory stays busy between kernels.

A sum's bits depend on where k is cut and on nothing else of a launch. Without a cut (`choose_no_split_k`) a row has the
same bits among any others, and a bias or a gate comes after a sum that is rounded, as behind the vendor's product.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.gemm.adapter_sums import MOST_ROWS as MOST_ADAPTED
from treetop.kernels.gemm.adapter_sums import AdapterSums, add_sums, arguments, ask_for_sums
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tiles_of, tl
from treetop.kernels.tuning import TunedTable, read_table

MAX_ROWS = 256
TABLE = Path(__file__).with_name("skinny_gemm.json")


@dataclass(frozen=True, slots=True)
class RowsLaunch:
    """How a product is cut.

    ahead: blocks of k whose weights are asked for before the wait.
    tiled: by TMA.

    rows_left: x is the left operand of the product.
    block_rows: rows of a program, a power of two, where many rows are divided among programs; 0 where each has all.
    """

    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int
    ahead: int = 1
    tiled: bool = False
    rows_left: bool = False
    block_rows: int = 0


def skinny_gemm_reference(x: Tensor, weight: Tensor, splits: int, bias: Tensor | None = None) -> Tensor:
    """The parts of `x @ weight.T + bias`, each over its share of k, in float32, the bias in the first.

    Returns [splits, rows, n].
    """
    shares = zip(x.chunk(splits, dim=-1), weight.chunk(splits, dim=-1), strict=True)
    parts = torch.stack([a.to(torch.float32) @ b.to(torch.float32).T for a, b in shares])
    if bias is not None:
        parts[0] += bias.to(torch.float32)
    return parts


def gated_rows_reference(x: Tensor, weight: Tensor, kind: Gate = "silu") -> Tensor:
    """Activated gate times up of `x @ weight.T`, whose first half is the gate, rounded once. Returns [rows, n / 2]."""
    gate, up = (x.to(torch.float32) @ weight.to(torch.float32).T).chunk(2, dim=-1)
    return (activated_reference(gate, kind) * up).to(x.dtype)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    launch: RowsLaunch,
    gpu: GpuTraits,
    bias: Tensor | None = None,
    rounds: bool = False,
    sums: AdapterSums | None = None,
) -> Tensor:
    """`skinny_gemm_reference`; with one split rounded to x's dtype, with more in float32.

    x: [rows, k], contiguous, float16 or bfloat16; without `block_rows` rows <= MAX_ROWS. weight: [n, k], contiguous; k
    a multiple of `splits * block_k`. bias: [n]. rounds: the sum is rounded before the bias is added, and again then.
    sums: what adapters add, in the first split. Returns [splits, rows, n].
    """
    rows, n = x.shape[0], weight.shape[0]
    dtype = x.dtype if launch.splits == 1 else torch.float32
    out = torch.empty((launch.splits, rows, n), dtype=dtype, device=x.device)
    _launch(out, x, weight, bias, n, None, launch, gpu, rounds, sums)
    return out


def gated_rows(
    x: Tensor,
    weight: Tensor,
    launch: RowsLaunch,
    gpu: GpuTraits,
    kind: Gate = "silu",
    rounds: bool = False,
    sums: AdapterSums | None = None,
) -> Tensor:
    """`gated_rows_reference` in one launch, which has one split. Arguments as in `skinny_gemm`.

    rounds: gate and up are rounded before the activation. sums: what adapters add to them.
    """
    assert launch.splits == 1
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, None, weight.shape[0] // 2, kind, launch, gpu, rounds, sums)
    return out


def _launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    kind: Gate | None,
    launch: RowsLaunch,
    gpu: GpuTraits,
    rounds: bool,
    sums: AdapterSums | None,
) -> None:
    rows, k = x.shape
    assert rows <= MAX_ROWS or launch.block_rows
    assert launch.splits == 1 or not rounds
    assert sums is None or (rows <= MOST_ADAPTED and not launch.block_rows and not rounds)
    assert k % (launch.splits * launch.block_k) == 0
    assert x.is_contiguous()
    assert weight.is_contiguous()
    block_m, more_m = (launch.block_rows, 0) if launch.block_rows else _row_blocks(rows)
    x_tiles, more_tiles, weight_tiles = x, x, weight  # not read without `tiled`
    if launch.tiled:
        x_tiles, weight_tiles = tiles_of(x, block_m, launch.block_k), tiles_of(weight, launch.block_n, launch.block_k)
        more_tiles = tiles_of(x, more_m, launch.block_k) if more_m else x_tiles
    options, (added, sizes) = launch_options(gpu), arguments(sums, x)
    _skinny_gemm_kernel[(-(-n // launch.block_n), launch.splits, -(-rows // (block_m + more_m)))](
        out, x, weight, weight if bias is None else bias, x_tiles, more_tiles, weight_tiles, rows, n, k,
        k // launch.splits, *added, **sizes, has_bias=bias is not None,
        block_m=block_m, more_m=more_m, block_n=launch.block_n, block_k=launch.block_k, kind=kind,
        rounds=rounds, tiled=launch.tiled, rows_left=launch.rows_left, ahead=launch.ahead, overlap=gpu.can_overlap,
        num_stages=launch.num_stages, num_warps=launch.num_warps, **options,
    )  # fmt: skip


@jit
def _skinny_gemm_kernel(
    out: Arg, x: Arg, weight: Arg, bias: Arg, x_tiles: Arg, more_tiles: Arg, weight_tiles: Arg, rows: Arg, n: Arg,
    k: Arg, share: Arg, inner: Arg, b: Arg, bounds: Arg, slots: Arg, present: Arg, per_row: Arg, most: Arg,
    shares: constexpr, rank: constexpr, ranks: constexpr, joins: constexpr, has_bias: constexpr, block_m: constexpr,
    more_m: constexpr, block_n: constexpr, block_k: constexpr, kind: constexpr, rounds: constexpr, tiled: constexpr,
    rows_left: constexpr, ahead: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of outputs and rows over one share of k. out: [splits, rows, n]; x: [rows, k]; weight: [n or 2n, k].

    Grid (n / block_n, splits, rows / (block_m + more_m)). kind: of a gate, where weight rows j and n + j give one
    output, or None. Rows come in a block of block_m and one of more_m (0: none), since blocks are powers of two. tiled:
    tiles come through descriptors, not pointers. The first split adds the bias. rounds: a sum is rounded to the dtype
    of x before a bias or a gate. inner .. joins: of `add_sums`, if there are shares: the first split adds them, too.
    """
    first_column = tl.program_id(0) * block_n
    column = first_column + tl.arange(0, block_n)
    split = tl.program_id(1)
    start = split * share
    line = weight + column.to(tl.int64)[:, None] * k + start
    up_line = line + n.to(tl.int64) * k
    there = (column < n)[:, None]
    if overlap and ahead > 0:  # 64 elements of 2 bytes are a cache line
        first = tl.minimum(tl.arange(0, ahead * block_k // 64) * 64, share - 1)[None, :]
        ask_for(tl.where(there, line + first, weight))
        if kind is not None:
            ask_for(tl.where(there, up_line + first, weight))
    pdl_wait(overlap, early=True)
    size = n if kind is None else 2 * n
    if shares > 0 and overlap and split == 0:
        inside = tl.minimum(column, n - 1)
        ask_for_sums(inside, size, b, present, most, rank)
        if kind is not None:
            ask_for_sums(n + inside, size, b, present, most, rank)
    first_row = tl.program_id(2) * (block_m + more_m)
    x += first_row.to(tl.int64) * k
    rows_here = rows - first_row
    row = tl.arange(0, block_m)
    lane = tl.arange(0, block_k)
    x_at = x + row[:, None] * k + start + lane[None, :]
    total = _zeros(block_n, block_m, rows_left)
    up = _zeros(block_n, block_m, rows_left)
    if more_m > 0:
        more_row = block_m + tl.arange(0, more_m)
        more_at = x + more_row[:, None] * k + start + lane[None, :]
        more_total = _zeros(block_n, more_m, rows_left)
        more_up = _zeros(block_n, more_m, rows_left)
    for i in range(0, share, block_k):
        w = _tile(line + (i + lane)[None, :], weight_tiles, first_column, start + i, there, tiled)
        values = _tile(x_at + i, x_tiles, first_row, start + i, (row < rows_here)[:, None], tiled)
        total = _multiply(w, values, total, rows_left)
        if more_m > 0:
            more = _tile(
                more_at + i, more_tiles, first_row + block_m, start + i, (more_row < rows_here)[:, None], tiled
            )
            more_total = _multiply(w, more, more_total, rows_left)
        if kind is not None:
            w = _tile(up_line + (i + lane)[None, :], weight_tiles, n + first_column, start + i, there, tiled)
            up = _multiply(w, values, up, rows_left)
            if more_m > 0:
                more_up = _multiply(w, more, more_up, rows_left)
    if rounds:
        total, up = _rounded(total, x), _rounded(up, x)
        if more_m > 0:
            more_total, more_up = _rounded(more_total, x), _rounded(more_up, x)
    if has_bias:
        added = tl.load(bias + column, mask=(column < n) & (split == 0), other=0.0).to(tl.float32)
        added = added[None, :] if rows_left else added[:, None]
        total += added
        if more_m > 0:
            more_total += added
    if shares > 0 and split == 0:
        total = add_sums(
            total, column, size, row, rows, inner, b, bounds, slots, present, per_row, most, shares, rank, ranks, joins,
            rows_left,
        )  # fmt: skip
        if kind is not None:
            up = add_sums(
                up, n + column, size, row, rows, inner, b, bounds, slots, present, per_row, most, shares, rank, ranks,
                joins, rows_left,
            )  # fmt: skip
    out_at = out + (split * rows + first_row).to(tl.int64) * n + column[:, None]
    _store(out_at, total, up, row, rows_here, n, there, kind, rows_left)
    if more_m > 0:
        _store(out_at, more_total, more_up, more_row, rows_here, n, there, kind, rows_left)


@jit
def _zeros(block_n: constexpr, block_m: constexpr, rows_left: constexpr) -> Arg:
    """Sums for a block of outputs and a block of rows."""
    return tl.zeros([block_m, block_n] if rows_left else [block_n, block_m], tl.float32)


@jit
def _rounded(total: Arg, x: Arg) -> Arg:
    """Sums in float32, rounded to the dtype of x."""
    return total.to(x.dtype.element_ty).to(tl.float32)


@jit
def _multiply(w: Arg, values: Arg, total: Arg, rows_left: constexpr) -> Arg:
    """Add the product of weights [block_n, k] and rows [block_m, k]."""
    return tl.dot(values, tl.trans(w), total) if rows_left else tl.dot(w, tl.trans(values), total)


@jit
def _store(
    out_at: Arg, total: Arg, up: Arg, row: Arg, rows: Arg, n: Arg, there: Arg, kind: constexpr, rows_left: constexpr
) -> None:
    """Write the sums of a block of rows, rounded; of a gate its activation times up. out_at: [block_n, 1], in row 0."""
    if kind is not None:
        total = activated(total, kind) * up
    if rows_left:
        total = tl.trans(total)
    tl.store(out_at + row[None, :] * n, total.to(out_at.dtype.element_ty), mask=there & (row < rows)[None, :])


@jit
def _tile(at: Arg, tiles: Arg, first_row: Arg, first_column: Arg, there: Arg, tiled: constexpr) -> Arg:
    """A block of a matrix, by pointers `at` where `there`, or through its descriptor, which gives 0 past its edge."""
    if tiled:
        return tiles.load([first_row, first_column])
    return tl.load(at, mask=there, other=0.0, eviction_policy="evict_first")


# ------------------------------------------------------------------------------------------------------- the launch


def row_class(rows: int) -> int:
    """The rows that a launch for `rows` computes: 16, 32, 64, 128, 192 or 256."""
    return sum(_row_blocks(rows))


def _row_blocks(rows: int) -> tuple[int, int]:
    """Rows in two blocks whose sizes are powers of two, the second perhaps 0."""
    return (128, power_of_two(max(rows - 128, 64))) if rows > 128 else (max(16, power_of_two(rows)), 0)


@cache
def choose_launch(rows: int, n: int, k: int, gated: bool, gpu: GpuTraits) -> RowsLaunch | None:
    """The launch for a weight [n, k], or None where the vendor's product is faster.

    Measured ones lie in `skinny_gemm.json` (`benchmarks/skinny_gemm.py --write-table` measures again) and hold for GPUs
    like the measured one. Elsewhere, and for other weights, up to 64 rows get about three programs a multiprocessor and
    as many stages as its shared memory holds.
    """
    if rows > MAX_ROWS:
        return None
    entry = load_table().find((n, k, gated, row_class(rows)), gpu) or {}
    if "launch" in entry:
        return _of_rows(entry["launch"], rows)
    block_n, block_k = 64, 64 if k % 128 else 128
    if row_class(rows) > 64 or k % block_k or n < block_n:
        return None
    tiles = -(-(n // 2 if gated else n) // block_n)
    splits = 1 if gated else most_splits(tiles, k // block_k, gpu)
    wanted = [RowsLaunch(block_n, block_k, splits, stages, 4) for stages in (4, 3, 2)]
    return next((one for one in wanted if shared_bytes(one, rows, gated) <= gpu.shared_bytes), None)


@cache
def choose_no_split_k(rows: int, n: int, k: int, gated: bool, gpu: GpuTraits) -> RowsLaunch | None:
    """A launch without a cut of k for a weight [n, k] and any number of rows; None if k is no multiple of 16.

    Few rows take a measured one, or what `choose_launch` gives, without its splits; its blocks are narrower where they
    would be fewer than multiprocessors.
    """
    outputs = n // 2 if gated else n
    known = measured_no_split_k(rows, n, k, gated, gpu)
    if known is not None:
        return known
    size = next((each for each in (64, 32, 16) if k % each == 0), None)
    if size is None:
        return None
    if rows > 64:
        few = rows <= MAX_ROWS
        narrow, ahead = 32 if outputs < 32 * gpu.num_sms else 64, int(few and size == 64)
        alone = gated and not gpu.by_warp_groups  # operands in registers, too: of gates and ups those of 128 lines fit
        wanted = [
            RowsLaunch(
                block_n, size, 1, stages, max(4, block_n // (8 if alone else 16)), ahead, gpu.can_overlap, True, 128
            )
            for block_n in ((narrow,) if few else (64,) if alone else (128, 64))
            for stages in (6, 5, 4, 3, 2)
            if few or stages < 5
        ]
    else:
        chosen, fills = choose_launch(rows, n, k, gated, gpu), outputs >= 64 * gpu.num_sms
        if chosen is not None and (chosen.splits == 1 or fills):
            return replace(chosen, splits=1)
        block_n, block_k, ahead = 64 if fills else 32, 128 if k % 128 == 0 else size, int(size == 64)
        left = row_class(rows) == 64 and not fills
        wanted = [RowsLaunch(block_n, block_k, 1, stages, 4, ahead, rows_left=left) for stages in (6, 5, 4, 3, 2)]
    return next((one for one in wanted if shared_bytes(one, rows, gated) <= gpu.shared_bytes), wanted[-1])


def measured_no_split_k(rows: int, n: int, k: int, gated: bool, gpu: GpuTraits) -> RowsLaunch | None:
    """The fastest launch, by `benchmarks/skinny_gemm.py --whole`; None where that is the vendor's product."""
    entry = (load_table().find((n, k, gated, row_class(rows)), gpu) if rows <= MAX_ROWS else None) or {}
    return _of_rows(entry.get("whole", {}).get("launch"), rows)


def _of_rows(fields: list[Any] | None, rows: int) -> RowsLaunch | None:
    """A launch as measured with all rows of its class, for so many: by pointers where a quarter or more is missing.

    For tiles past the end of x cost 1.05 to 1.4 times the product (96 rows of 128, 40 of 64; one H200).
    """
    launch = fields and RowsLaunch(*fields)
    if launch and launch.tiled and 32 < rows <= row_class(rows) * 3 // 4:
        return replace(launch, tiled=False)
    return launch or None


def most_splits(tiles: int, blocks: int, gpu: GpuTraits) -> int:
    """Splits of k, which has so many blocks, that give up to three programs a multiprocessor, and whole blocks each."""
    return max(
        s
        for s in ((1, 2, 4) if blocks % 2 == 0 else (1, 3, 5))
        if s == 1 or (tiles * s <= 3 * gpu.num_sms and blocks % s == 0)
    )


def shared_bytes(launch: RowsLaunch, rows: int, gated: bool) -> int:
    """Shared memory of a launch: its stages of weights and of x."""
    lines = (2 if gated else 1) * launch.block_n + (launch.block_rows or row_class(rows))
    return 2 * launch.num_stages * launch.block_k * lines


@cache
def load_table() -> TunedTable[dict[str, Any]]:
    """The committed table, by n, k, whether gated, and row class. Of an entry, where it was measured:

    launch: the fields of a `RowsLaunch`, or None for the vendor's product.
    whole: `launch`, the same of those that do not cut k.
    compressed: `launch`, the fields of a `lossless_weights.LosslessLaunch`, if faster still; `most_outliers`, by rows,
        with how many in a block.
    """
    return read_table(TABLE, dict, ("n", "k", "gated", "rows"))
