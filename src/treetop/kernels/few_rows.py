# ruff: noqa: PLR0917 (kernels take what they touch as arguments)
"""Products of few rows with a large weight, the bulk of a decode round: bound by how fast weights stream from memory.

    y = x @ weight.T        x: [rows, k], rows <= 256; weight: [n, k]

A program computes `block_n` outputs over one share of k, with the weight as the left operand: a tensor core then works
on 64 outputs by however few rows there are. Where n alone gives too few programs, k is cut in `splits`, and the result
is a sum of parts that the next kernel adds up as it reads. Weights do not depend on what ran before, so a program asks
for its first ones before it waits for that (programmatic dependent launch), and memory stays busy between kernels.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl

MAX_ROWS = 256
_TABLE = Path(__file__).with_name("few_rows.json")


@dataclass(frozen=True, slots=True)
class RowsLaunch:
    """How a product is cut. ahead: blocks of k whose weights are asked for before the wait."""

    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int
    ahead: int = 1


def few_rows_reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """The parts of `x @ weight.T`, each over its share of k, in float32. Returns [splits, rows, n]."""
    shares = zip(x.chunk(splits, dim=-1), weight.chunk(splits, dim=-1), strict=True)
    return torch.stack([a.to(torch.float32) @ b.to(torch.float32).T for a, b in shares])


def gated_rows_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`silu(gate) * up` of `x @ weight.T`, whose first half is the gate, rounded once. Returns [rows, n / 2]."""
    gate, up = (x.to(torch.float32) @ weight.to(torch.float32).T).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def few_rows(x: Tensor, weight: Tensor, launch: RowsLaunch, gpu: GpuTraits) -> Tensor:
    """`few_rows_reference`; with one split rounded to x's dtype, with more in float32.

    x: [rows, k], contiguous, float16 or bfloat16, rows <= 256. weight: [n, k], contiguous; k a multiple of
    `splits * block_k`. Returns [splits, rows, n].
    """
    rows, n = x.shape[0], weight.shape[0]
    dtype = x.dtype if launch.splits == 1 else torch.float32
    out = torch.empty((launch.splits, rows, n), dtype=dtype, device=x.device)
    _launch(out, x, weight, n, False, launch, gpu)
    return out


def gated_rows(x: Tensor, weight: Tensor, launch: RowsLaunch, gpu: GpuTraits) -> Tensor:
    """`gated_rows_reference` in one launch, which has one split. Arguments as in `few_rows`."""
    assert launch.splits == 1
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(out, x, weight, weight.shape[0] // 2, True, launch, gpu)
    return out


def _launch(out: Tensor, x: Tensor, weight: Tensor, n: int, gated: bool, launch: RowsLaunch, gpu: GpuTraits) -> None:
    rows, k = x.shape
    assert rows <= MAX_ROWS
    assert k % (launch.splits * launch.block_k) == 0
    assert x.is_contiguous()
    assert weight.is_contiguous()
    options = {"launch_pdl": True} if gpu.can_overlap else {}
    _few_rows_kernel[(-(-n // launch.block_n), launch.splits)](
        out, x, weight, rows, n, k, k // launch.splits,
        block_m=row_class(rows), block_n=launch.block_n, block_k=launch.block_k, gated=gated, ahead=launch.ahead,
        overlap=gpu.can_overlap, num_stages=launch.num_stages, num_warps=launch.num_warps, **options,
    )  # fmt: skip


@jit
def _few_rows_kernel(
    out: Arg, x: Arg, weight: Arg, rows: Arg, n: Arg, k: Arg, share: Arg,
    block_m: constexpr, block_n: constexpr, block_k: constexpr, gated: constexpr, ahead: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """One block of outputs over one share of k. out: [splits, rows, n]; x: [rows, k]; weight: [n or 2n, k].

    Grid (n / block_n, splits). gated: weight rows j and n + j give one output.
    """
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(1)
    start = split * share
    there = column < n
    line = weight + column.to(tl.int64)[:, None] * k + start
    up_line = line + n.to(tl.int64) * k
    if overlap:
        if ahead > 0:  # 64 elements of 2 bytes are a cache line
            first = tl.minimum(tl.arange(0, ahead * block_k // 64) * 64, share - 1)[None, :]
            _ask_for(tl.where(there[:, None], line + first, weight))
            if gated:
                _ask_for(tl.where(there[:, None], up_line + first, weight))
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, block_m)
    lane = tl.arange(0, block_k)
    x_at = x + row[:, None] * k + start + lane[None, :]
    live = (row < rows)[:, None]
    total = tl.zeros([block_n, block_m], tl.float32)
    up = tl.zeros([block_n, block_m], tl.float32)
    for i in range(0, share, block_k):
        at = (i + lane)[None, :]
        w = tl.load(line + at, mask=there[:, None], other=0.0, eviction_policy="evict_first")
        values = tl.trans(tl.load(x_at + i, mask=live, other=0.0))
        total = tl.dot(w, values, total)
        if gated:
            w = tl.load(up_line + at, mask=there[:, None], other=0.0, eviction_policy="evict_first")
            up = tl.dot(w, values, up)
    if gated:
        total = total * tl.sigmoid(total) * up
    out_at = out + (split * rows + row[None, :]) * n + column[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


@jit
def _ask_for(at: Arg) -> None:
    """Bring the cache lines at `at` into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------------- the launch


def row_class(rows: int) -> int:
    """The block of rows that serves `rows`: a power of two, at least 16."""
    return max(16, 1 << max(rows - 1, 0).bit_length())


@cache
def choose_launch(rows: int, n: int, k: int, gated: bool, num_sms: int) -> RowsLaunch | None:
    """The launch for a weight [n, k], or None where the vendor's product is faster.

    Measured ones lie in `few_rows.json` (`bench/few_rows.py --write-table` measures again); other weights get, up to 64
    rows, about three programs a multiprocessor.
    """
    if rows > MAX_ROWS:
        return None
    entry = _table().get((n, k, gated, row_class(rows)), _UNKNOWN)
    if entry != _UNKNOWN:
        return None if entry is None else RowsLaunch(*entry)
    block_n, block_k = 64, 128
    if row_class(rows) > 64 or k % block_k or n < block_n:
        return None
    tiles = -(-(n // 2 if gated else n) // block_n)
    splits = [s for s in (1, 2, 4) if s == 1 or (not gated and tiles * s <= 3 * num_sms and k % (s * block_k) == 0)]
    return RowsLaunch(block_n, block_k, splits[-1], 4, 4)


_UNKNOWN = (0,)


@cache
def _table() -> dict[tuple[int, int, bool, int], tuple[int, ...] | None]:
    """(n, k, gated, row class) -> the fields of a launch, or None for the vendor's product."""
    entries = json.loads(_TABLE.read_text(encoding="utf-8"))["entries"] if _TABLE.is_file() else []
    return {
        (e["n"], e["k"], e["gated"], e["rows"]): None if e["launch"] is None else tuple(e["launch"]) for e in entries
    }
