"""Tunes the products of few rows with quantized weights on one GPU, and says how fast they stream, in one run.

    python benchmarks/quantized_gemm.py                the launches that are chosen: TB/s of a product's bytes
    python benchmarks/quantized_gemm.py --write-table  measure every candidate first and write
    kernels/gemm/quantized_gemm.json;
                                                   with --missing, of products that it lacks

A time is that of one product in a replayed graph of many over different weights, so that none lies in the cache: as in
a decode round. Results are checked before anything is timed. With `--write-table` no candidate begins after
`--seconds` (150); shapes come in the order of their weight in a round, and entries that were not reached stay as they
were. JSON lines on stdout; the first names the machine. bf16_us: of the weight in 16 bits, by its best launch.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from itertools import product
from typing import Any

import torch
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
from quantized_cases import FORMATS, random_weight
from torch import Tensor

from treetop.kernels.gemm import quantized_gemm as kernels
from treetop.kernels.gemm.quantized_gemm import ROWS, QuantizedLaunch, choose_quantized, quantized_gated, quantized_gemm
from treetop.kernels.gemm.tiles import BLOCK, TiledWeight, apart, decode_tiles, in_turn, tile
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.linear import SkinnyGated, SkinnyLinear

SHAPES = {
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "qwen3 gate_up": (24576, 4096, True),
    "qwen3 down": (4096, 12288, False),
    "qwen3-moe qkv": (5120, 2048, False),
    "qwen3-moe output": (2048, 4096, False),
}
"""Name -> (lines, k, gated): the products of Llama-3.1-8B, and those in which Qwen3-8B and Qwen3-30B-A3B differ."""
TUNED = ("fp8-channel", "w4a16", "nvfp4")
"""One format of each kind of numbers: what is chosen for it is chosen for others of these."""
COUNTS = (1, 4, 16, 32, 64, 256)


def candidates(lines: int, k: int, gated: bool, rows: int, splits: int | None) -> Iterator[QuantizedLaunch]:
    """Launches that could be fast. rows: one of `ROWS`. splits: those of few rows, which more rows share."""
    few = rows <= 64
    cuts = ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8)) if few else ((64, 4), (128, 4), (128, 8), (256, 8))
    blocks, stages = -(-k // BLOCK), (2, 3, 4, 6) if few else (2, 3, 4)
    for (block_n, warps), each, depth in product(cuts, (1, 2, 3, 4, 8) if splits is None else (splits,), stages):
        programs = -(-lines // block_n) * each
        if each == 1 or (not gated and 64 <= programs <= 1056 and blocks % each == 0):
            yield QuantizedLaunch(block_n, each, depth, warps)


def multiply(x: Tensor, weight: TiledWeight, gated: bool, launch: QuantizedLaunch | None = None) -> Tensor:
    lines, k = weight.shape
    gpu = gpu_traits(DEVICE)
    chosen = launch or choose_quantized(weight.scheme.numbers, (lines, k), gated, len(x), gpu)
    return (quantized_gated if gated else quantized_gemm)(x, weight, launch=chosen, gpu=gpu)


def measure_us(x: Tensor, weights: Sequence[TiledWeight], gated: bool, launch: QuantizedLaunch | None = None) -> float:
    return median_us([partial(multiply, x, weight, gated, launch) for weight in weights])


def check(x: Tensor, weight: TiledWeight, gated: bool, launch: QuantizedLaunch | None) -> None:
    """Raise SystemExit for a result that is not that of the decoded weight."""
    whole = decode_tiles(weight, 0, weight.shape[0], torch.float16, gpu_traits(DEVICE)).float()
    want = x.float() @ whole.T
    if gated:
        gate, up = apart(want, -1)
        want = torch.nn.functional.silu(gate) * up
    got = multiply(x, weight, gated, launch).float()
    error = float(((got if gated else got.sum(0)) - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"wrong result, nothing timed: {tuple(weight.shape)}, {launch}: relative error {error:.1e}")


def made(name: str, lines: int, k: int, gated: bool) -> TiledWeight:
    weight = random_weight(FORMATS[name], lines, k)
    return tile(in_turn(weight.halves())) if gated else tile(weight)


def calls(weight_bytes: float) -> int:
    """Products in a graph: enough weights that none is found in the cache."""
    return max(3, min(16, int(4e8 // weight_bytes)))


def compile_once(job: tuple[str, int, bool, QuantizedLaunch]) -> None:
    """Compile a launch into Triton's cache on disk."""
    name, rows, gated, launch = job
    with contextlib.suppress(Exception):  # what does not fit is found out again, and left out, where it is timed
        k = BLOCK * launch.splits * 16
        weight = made(name, 512, k, gated)
        multiply(torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE), weight, gated, launch)


def compile_all() -> None:
    """On all cores: a kernel depends on whether there are several splits, not on how many."""
    jobs: dict[object, tuple[str, int, bool, QuantizedLaunch]] = {}
    for name, (lines, k, gated), rows in product(TUNED, SHAPES.values(), ROWS):
        for launch in candidates(lines, k, gated, rows, None):
            key = name, rows, gated, launch.splits > 1, launch.block_n, launch.num_stages, launch.num_warps
            jobs.setdefault(key, (name, rows, gated, launch))
    compile_on_all_cores(compile_once, jobs.values())


def fastest(
    weights: Sequence[TiledWeight], gated: bool, most: int, splits: int | None, end: float
) -> tuple[float, QuantizedLaunch] | None:
    """Us, of up to 16 rows those of 1 and of 16 together, and launch of the fastest; None without any."""
    (lines, k), found = weights[0].shape, []
    for launch in candidates(lines, k, gated, most, splits):
        if time.monotonic() > end:
            break
        try:
            us = 0.0
            for rows in (1, 16) if most == 16 else (most,):
                x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
                check(x, weights[0], gated, launch)
                us += measure_us(x, weights, gated, launch)
        except Exception:  # out of shared memory or registers: Triton's errors have no common class
            continue
        found.append((us, launch))
    return min(found, key=lambda pair: pair[0]) if found else None


def tune(end: float, known: Mapping[tuple[str, int, int, bool, int], QuantizedLaunch]) -> list[dict[str, Any]]:
    """Entries of the table. known: those that are not measured again, by numbers, lines, k, gated and rows."""
    entries = []
    compile_all()
    for (shape, (lines, k, gated)), name in product(SHAPES.items(), TUNED):
        splits, numbers = None, FORMATS[name].scheme.numbers
        if all((numbers, lines, k, gated, rows) in known for rows in ROWS):
            continue
        weights = [made(name, lines, k, gated) for _ in range(2)]
        weights = [weights[i % 2] for i in range(calls(2 * weights[0].nbytes))] if weights[0].nbytes > 6e7 else [
            made(name, lines, k, gated) for _ in range(calls(weights[0].nbytes))
        ]  # fmt: skip
        for rows in ROWS:
            if (there := known.get((numbers, lines, k, gated, rows))) is not None:
                splits = there.splits
                continue
            best = fastest(weights, gated, rows, splits, end)
            if best is None:
                continue
            us, launch = best
            splits = launch.splits
            entry = {"name": shape, "numbers": numbers, "lines": lines, "k": k, "gated": gated}
            entries.append({**entry, "rows": rows, "launch": astuple(launch), "us": round(us, 1)})
            say(entries[-1])
    return entries


def write_table(entries: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Measured launches; others measured on the same kind of GPU stay."""
    keys = ("numbers", "lines", "k", "gated", "rows")
    joined = {tuple(e[key] for key in keys): e for e in (*entries_of(kernels.TABLE, machine), *entries)}
    write_entries(kernels.TABLE, joined.values(), machine)
    kernels.load_table.cache_clear()
    kernels.choose_quantized.cache_clear()


def report(names: Sequence[str], rate: float) -> None:
    """The chosen launches of every format, shape and number of rows."""
    for (shape, (lines, k, gated)), name in product(SHAPES.items(), names):
        first = made(name, lines, k, gated)
        weights = [first, *(made(name, lines, k, gated) for _ in range(calls(first.nbytes) - 1))]
        plain = [
            torch.randn(lines, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5 for _ in range(calls(2 * lines * k))
        ]
        held = [(SkinnyGated if gated else SkinnyLinear)(each, gpu_traits(DEVICE)) for each in plain]
        for rows in COUNTS:
            x = torch.randn(rows, k, dtype=torch.bfloat16, device=DEVICE)
            check(x, first, gated, None)
            us = measure_us(x, weights, gated)
            plain_us = median_us([partial(each.parts if isinstance(each, SkinnyLinear) else each, x) for each in held])
            line = {"shape": shape, "format": name, "rows": rows, "us": round(us, 1), "bf16_us": round(plain_us, 1)}
            line |= {
                "tb_s": round(first.nbytes / us / 1e6, 2),
                "share_of_copy": round(first.nbytes / us * 1e6 / rate, 2),
            }
            say(line | {"times_as_fast": round(plain_us / us, 2)})


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write-table", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args(arguments)
    end, rate = time.monotonic() + args.seconds, copy_bytes_per_s()
    machine = machine_of(rate)
    say(machine)
    if args.write_table:
        write_table(tune(end, kernels.load_table().entries if args.missing else {}), machine)
    report(args.formats, rate)
    return 0


if __name__ == "__main__":
    end_with(main)
