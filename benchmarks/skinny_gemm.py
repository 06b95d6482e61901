"""Tunes the products of few rows on one GPU and compares them with the vendor's, in one run.

    python benchmarks/skinny_gemm.py                 the committed launches against the vendor's and the floor
    python benchmarks/skinny_gemm.py --write-table   measure every candidate, write kernels/gemm/skinny_gemm.json, where
                                             entries of other rows and weights on the same kind of GPU stay
    python benchmarks/skinny_gemm.py --whole         measure launches that do not cut k, and add them to the table

A time is that of one product in a replayed graph of many over different weights, so that none lies in the cache: as in
a decode round. Results are checked before anything is timed. JSON lines on stdout; the first names the machine. What
12 bits gain over a launch is measured by `benchmarks/lossless_weights.py`, to be run again after a launch has changed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from frame import (
    DEVICE,
    compile_on_all_cores,
    copy_bytes_per_s,
    end_with,
    entries_of,
    machine_of,
    median_us,
    parser_of,
    say,
    write_entries,
)
from torch import Tensor

from treetop.kernels.fused import silu_mul
from treetop.kernels.gemm import skinny_gemm as kernels
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, choose_launch, gated_rows, row_class, shared_bytes, skinny_gemm
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.gpu_products import FEWEST_OF_LIBRARY

SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "lm_head": (128256, 4096, False),
    "draft fc": (4096, 12288, False),
    "draft qkv": (6144, 8192, False),
    "draft lm_head": (32000, 4096, False),
    "qwen3 gate_up": (24576, 4096, True),
    "qwen3 lm_head": (151936, 4096, False),
    "gpt-oss qkv": (5120, 2880, False),
    "gpt-oss output": (2880, 4096, False),
    "gpt-oss lm_head": (201088, 2880, False),
    "gpt-oss draft lm_head": (32000, 2880, False),
    "gpt-oss draft qkv": (5120, 5760, False),
    "gpt-oss draft gate_up": (34560, 2880, True),
    "gpt-oss draft down": (2880, 17280, False),
    "qwen3-moe qkv": (5120, 2048, False),
    "qwen3-moe output": (2048, 4096, False),
    "qwen3-moe lm_head": (151936, 2048, False),
}
"""Name -> (n, k, gated): the products of Llama-3.1-8B and its EAGLE-3 head, and those in which others differ.

Qwen3-8B's `down` has the shape of `draft fc`. gpt-oss is GPT-OSS-20B, with its EAGLE-3 head; qwen3-moe Qwen3-30B-A3B.
"""
ROWS = (16, 32, 64, 128, 192, 256)
TABLE = kernels.TABLE
Shapes = dict[str, tuple[int, int, bool]]
Entry = dict[str, Any]
Candidates = Callable[[int, int, int, bool], Iterator[RowsLaunch]]
SHARED_MEMORY = 227 * 1024
GAP_US = 2.0
"""What a vendor's product costs more in a round than alone: it neither starts early nor lets the next kernel do so."""


def candidates(rows: int, n: int, k: int, gated: bool) -> Iterator[RowsLaunch]:
    """Launches that could be fast: they fit, fill the GPU, and do not spill accumulators."""
    outputs, weights = (n // 2, 2) if gated else (n, 1)
    blocks = ((64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
    all_splits = (1,) if gated else (1, 2, 3, 4, 5)
    for (block_n, block_k, warps), stages, splits in product(blocks, (3, 4, 5, 6), all_splits):
        programs = -(-outputs // block_n) * splits
        accumulators = weights * block_n * row_class(rows) // (32 * warps)
        filled = programs >= 64 and (splits == 1 or programs <= 800)
        used = shared_bytes(RowsLaunch(block_n, block_k, splits, stages, warps), rows, gated)
        if filled and 40_000 < used < SHARED_MEMORY and accumulators <= 200 and k % (splits * block_k) == 0:
            for tiled in (False, True) if rows > 16 else (False,):
                for rows_left in (False, True) if rows >= 64 else (False,):
                    if rows <= 128 or tiled:  # pointers take too many registers for more
                        yield RowsLaunch(block_n, block_k, splits, stages, warps, 1, tiled, rows_left)


def whole_candidates(rows: int, n: int, k: int, gated: bool) -> Iterator[RowsLaunch]:
    """Launches without a cut of k that could be fast: narrower blocks and more stages than `candidates` has."""
    outputs, weights = (n // 2, 2) if gated else (n, 1)
    for block_n, block_k, stages, warps in product((32, 64, 128), (64, 128, 256), (3, 4, 5, 6, 8, 10), (4, 8)):
        for tiled in (False, True) if rows > 16 else (False,):
            for rows_left in (False, True) if rows >= 64 else (False,):
                launch = RowsLaunch(block_n, block_k, 1, stages, warps, int(block_k < 256), tiled, rows_left)
                accumulators = weights * block_n * row_class(rows) // (32 * warps)
                filled = -(-outputs // block_n) >= 60 and (block_n > 32 or outputs < 128 * 64)
                fits = 70_000 < shared_bytes(launch, rows, gated) < SHARED_MEMORY and (rows <= 128 or tiled)
                if filled and fits and k % block_k == 0 and (warps == 4 or accumulators >= 16) and accumulators <= 128:
                    yield launch


def calls(n: int, k: int) -> int:
    """Products in a graph: enough weights that none is found in the cache."""
    return max(3, min(12, int(1e9 // (2 * n * k))))


def multiply(x: Tensor, weight: Tensor, gated: bool, launch: RowsLaunch | None) -> Tensor:
    """None: the vendor's product."""
    gpu = gpu_traits(DEVICE)
    if launch is None:
        out = F.linear(x, weight)
        return silu_mul(out, gpu) if gated else out
    return gated_rows(x, weight, launch, gpu) if gated else skinny_gemm(x, weight, launch, gpu)


def measure_us(x: Tensor, weights: Sequence[Tensor], gated: bool, launch: RowsLaunch | None) -> float:
    return median_us([partial(multiply, x, weight, gated, launch) for weight in weights])


def fastest(
    x: Tensor, weights: Sequence[Tensor], gated: bool, launches: Iterable[RowsLaunch], want: Tensor
) -> tuple[float, RowsLaunch | None]:
    """Us and launch of the fastest; infinity without any. Raises SystemExit for a result that is not `want`."""
    found: list[tuple[float, RowsLaunch | None]] = [(float("inf"), None)]
    for launch in launches:
        check(x, weights[0], gated, launch, want)
        found.append((measure_us(x, weights, gated, launch), launch))
    return min(found, key=lambda pair: pair[0])


def check(x: Tensor, weight: Tensor, gated: bool, launch: RowsLaunch, want: Tensor) -> None:
    check_result(multiply(x, weight, gated, launch), gated, want, str(launch))


def check_result(got: Tensor, gated: bool, want: Tensor, name: str) -> None:
    """Raise SystemExit if a product, or the sum of its parts, is not `want`."""
    error = float(((got if gated else got.float().sum(0)) - want).abs().max() / want.abs().max())
    if not error < 2e-2:
        raise SystemExit(f"wrong result, nothing timed: {tuple(want.shape)}, {name}: relative error {error:.1e}")


def compile_once(job: tuple[int, int, int, bool, RowsLaunch]) -> None:
    """Compile a launch into Triton's cache on disk."""
    rows, n, k, gated, launch = job
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE)
    multiply(x, torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE), gated, launch)


@dataclass(frozen=True)
class Found:
    """The fastest launch of a product, None for the vendor's, and us of both."""

    entry: Entry
    floor_us: float

    def line(self) -> Entry:
        us: float = self.entry["us"]
        return {**self.entry, "floor_us": round(self.floor_us, 1), "over_floor": round(us / self.floor_us, 2)}


def measured(shapes: Shapes, all_rows: Sequence[int], which: Candidates | None, copy: float) -> Iterator[Found]:
    """Every shape and number of rows. which: launches to try; None for the one that is chosen today."""
    gpu = gpu_traits(DEVICE)
    for name, (n, k, gated) in shapes.items():
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5 for _ in range(calls(n, k))]
        for rows in all_rows:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
            want, vendor_us = multiply(x, weights[0], gated, None).float(), measure_us(x, weights, gated, None)
            known = filter(None, [choose_launch(rows, n, k, gated, gpu)])
            launches = known if which is None else which(rows, n, k, gated)
            us, best = fastest(x, weights, gated, launches, want)
            never = which is whole_candidates and rows <= FEWEST_OF_LIBRARY
            if best is None or (which is not None and not never and us >= vendor_us + GAP_US):
                us, best = vendor_us, None
            entry = {"name": name, "n": n, "k": k, "gated": gated, "rows": rows}
            entry |= {"launch": None if best is None else astuple(best), "us": round(us, 1)}
            yield Found({**entry, "vendor_us": round(vendor_us, 1)}, 2e6 * n * k / copy)
        del weights


def add_whole(entry: Entry, found: Entry) -> None:
    """Add what was found to the entry of the table that has this key, or to a new one."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    same = [each for each in table["entries"] if key_of(each) == key_of(entry)]
    if not same:
        same = [entry]
        table["entries"] += same
    same[0]["whole"] = found
    write_entries(TABLE, table["entries"], table["machine"])


def compile_all(shapes: Shapes, all_rows: Sequence[int], which: Candidates) -> None:
    """Compile all candidates on all cores."""
    jobs: dict[object, tuple[int, int, int, bool, RowsLaunch]] = {}
    for n, k, gated in shapes.values():
        for rows in all_rows:
            for launch in which(rows, n, k, gated):
                kernel = rows, gated, replace(launch, splits=min(launch.splits, 2))
                jobs.setdefault(kernel, (rows, n, k, gated, launch))
    compile_on_all_cores(compile_once, jobs.values())


def write_table(entries: Sequence[Entry], machine: Entry) -> None:
    """Write measured launches; others measured on the same kind of GPU stay, and so do 12 bits and whole launches."""
    joined = {key_of(e): e for e in entries_of(TABLE, machine)}
    for entry in entries:
        before = joined.get(key_of(entry), {})
        joined[key_of(entry)] = entry | {name: before[name] for name in ("compressed", "whole") if name in before}
    write_entries(TABLE, joined.values(), machine)


def key_of(entry: Entry) -> tuple[object, ...]:
    return entry["n"], entry["k"], entry["gated"], entry["rows"]


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write-table", action="store_true")
    what.add_argument("--whole", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args(arguments)
    copy = copy_bytes_per_s()
    machine = machine_of(copy)
    say(machine)
    shapes = {name: SHAPES[name] for name in args.only}
    which = whole_candidates if args.whole else candidates if args.write_table else None
    if which is not None:
        compile_all(shapes, args.rows, which)
    entries = []
    for found in measured(shapes, args.rows, which, copy):
        entries.append(found.entry)
        say(found.line())
        if args.whole:
            names = "launch", "us", "vendor_us"
            key = {name: value for name, value in found.entry.items() if name not in names}
            add_whole(key, {**{name: found.entry[name] for name in names}, "gpu": machine["gpu"]})
    if args.write_table:
        write_table(entries, machine)
    return 0


if __name__ == "__main__":
    end_with(main)
