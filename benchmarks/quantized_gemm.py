"""Tunes the products of few rows with quantized weights on one GPU, and says how fast they stream, in one run.

    python benchmarks/quantized_gemm.py                the launches that are chosen: TB/s of a product's bytes
    python benchmarks/quantized_gemm.py --write-table  measure every candidate first and write
    kernels/gemm/quantized_gemm.json;
                                                   with --missing, of products that it lacks
    python benchmarks/quantized_gemm.py --many-rows FILE
                                                   measure launches of the kernel in Gluon on Hopper: JSON lines, after
                                                   those that the file has, which are not measured again
    python benchmarks/quantized_gemm.py --many-rows FILE --write-table
                                                   then write kernels/gemm/quantized_gluon.json of them

A time is that of one product in a replayed graph of many over different weights, so that none lies in the cache: as in
a decode round. Results are checked before anything is timed. With `--write-table` no candidate begins after
`--seconds` (150); shapes come in the order of their weight in a round, and entries that were not reached stay as they
were. JSON lines on stdout; the first names the machine. bf16_us: of the weight in 16 bits, by its best launch.
"""

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from treetop.kernels.gemm import quantized_gluon as many_rows
from treetop.kernels.gemm.quantized_gemm import (
    ROWS,
    QuantizedLaunch,
    choose_quantized,
    quantized_gated,
    quantized_gemm,
    row_block,
)
from treetop.kernels.gemm.quantized_gluon import GluonLaunch
from treetop.kernels.gemm.quantized_weight import Numbers, factor_apart
from treetop.kernels.gemm.tiles import BLOCK, TiledWeight, apart, decode_tiles, in_turn, tile
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
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
Launch = QuantizedLaunch | GluonLaunch


def candidates(lines: int, k: int, gated: bool, rows: int, splits: int | None) -> Iterator[QuantizedLaunch]:
    """Launches that could be fast. rows: one of `ROWS`. splits: those of few rows, which more rows share."""
    few = rows <= 64
    cuts = ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8)) if few else ((64, 4), (128, 4), (128, 8), (256, 8))
    blocks, stages = -(-k // BLOCK), (2, 3, 4, 6) if few else (2, 3, 4)
    for (block_n, warps), each, depth in product(cuts, (1, 2, 3, 4, 8) if splits is None else (splits,), stages):
        programs = -(-lines // block_n) * each
        if each == 1 or (not gated and 64 <= programs <= 1056 and blocks % each == 0):
            yield QuantizedLaunch(block_n, each, depth, warps)


def multiply(x: Tensor, weight: TiledWeight, gated: bool, launch: Launch | None = None) -> Tensor:
    lines, k = weight.shape
    gpu = gpu_traits(DEVICE)
    chosen = launch or choose_quantized(weight.scheme.numbers, (lines, k), gated, len(x), gpu)
    return (quantized_gated if gated else quantized_gemm)(x, weight, launch=chosen, gpu=gpu)


def measure_us(x: Tensor, weights: Sequence[TiledWeight], gated: bool, launch: Launch | None = None) -> float:
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


# ------------------------------------------------------------------------------------------------------- of many rows

MANY_ROWS = {
    "llama-3.1-8b gate_up": (28672, 4096, True),
    "llama-3.1-8b down": (4096, 14336, False),
    "llama-3.1-8b qkv": (6144, 4096, False),
    "llama-3.1-8b output": (4096, 4096, False),
    "qwen3-8b gate_up": (24576, 4096, True),
    "qwen3-8b down": (4096, 12288, False),
    "qwen3-32b gate_up": (51200, 5120, True),
    "qwen3-32b down": (5120, 25600, False),
    "qwen3-32b qkv": (10240, 5120, False),
    "qwen3-32b output": (5120, 8192, False),
    "glm-4.5-air gate_up": (21888, 4096, True),
    "glm-4.5-air down": (4096, 10944, False),
    "glm-4.5-air shared gate_up": (2816, 4096, True),
    "glm-4.5-air shared down": (4096, 1408, False),
    "glm-4.5-air qkv": (14336, 4096, False),
    "gpt-oss-120b qkv": (5120, 2880, False),
    "gpt-oss-120b output": (2880, 4096, False),
    "qwen3-next qkv": (9216, 2048, False),
    "qwen3-next output": (2048, 4096, False),
    "qwen3-next delta qkvz": (12288, 2048, False),
    "qwen3-next shared gate_up": (1024, 2048, True),
    "qwen3-next shared down": (2048, 512, False),
}
"""Products that launches of many rows are measured for, the most important first. Of equal ones the first alone."""


FEW = {
    8: ((8, 64, 4, 4), (8, 128, 8, 3)),
    16: ((16, 64, 4, 4), (16, 128, 8, 3)),
    32: ((32, 64, 4, 4), (32, 128, 8, 2)),
    64: ((64, 64, 4, 3), (64, 128, 8, 2)),
}
"""Up to so many rows: rows and lines of a block, warps, and programs of a multiprocessor."""
MANY = ((128, 256, 16, 1), (256, 128, 8, 1), (128, 256, 8, 1), (128, 128, 8, 1))


class _Kernel(NamedTuple):
    """What is compiled for a launch, which has one split or two."""

    name: str
    gated: bool
    launch: Launch
    rows: int


def launches_of(numbers: Numbers, lines: int, k: int, rows: int, splits: int, gpu: GpuTraits) -> Iterator[GluonLaunch]:
    """Launches that could be fast. splits: of few rows, which up to `MAX_ROWS` share."""
    blocks = FEW.get(rows) or tuple(each for each in MANY if each[0] < 2 * rows)
    if 64 < rows <= 128 and lines * splits <= 64 * gpu.num_sms:  # larger ones are too few programs
        blocks += FEW[64]
    for block_m, block_n, warps, beside in blocks:
        cuts = {splits} if rows <= kernels.MAX_ROWS else {each for each in (1, 2, 4) if each <= splits}
        for launch in {many_rows.launch_of(numbers, k, (block_m, block_n), each, gpu, beside, warps) for each in cuts}:
            programs = -(-rows // block_m) * -(-lines // block_n) * launch.splits
            yield replace(launch, stays=programs > gpu.num_sms * beside)


def _compile_many(kernel: _Kernel) -> None:
    """Into Triton's cache on disk, by a product of few lines."""
    with contextlib.suppress(Exception):  # as in `compile_once`
        weight = _weight(kernel.name, 512, 1024, kernel.gated)
        x = torch.zeros(kernel.rows, 1024, dtype=torch.bfloat16, device=DEVICE)
        multiply(x, weight, kernel.gated, kernel.launch)


def measure_many(file: Path, names: Sequence[str], counts: Sequence[int], end: float) -> None:
    """Append a line for each product, format, number of rows and cut: the best launch, and the times of all.

    Bits are those of the kernel of few rows, or nothing is timed.
    """
    gpu, done = gpu_traits(DEVICE), {_key_of(entry) for entry in _lines_of(file)}
    jobs: dict[object, _Job] = {}
    for (shape, (lines, k, gated)), name, cut in product(MANY_ROWS.items(), names, (True, False)):
        job = _Job(shape, name, lines, k, gated, cut)
        if not (cut and job.plain(64, gpu).splits == 1) and any(job.key(rows) not in done for rows in counts):
            jobs.setdefault(job.key(0), job)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = dict.fromkeys(kernel for job in jobs.values() for kernel in job.kernels(counts, gpu))
        compiled = {kernel: pool.submit(_compile_many, kernel) for kernel in wanted}
        weights: Callable[..., list[TiledWeight]] = lru_cache(maxsize=1)(_weights)
        for job in jobs.values():
            wait([compiled[kernel] for kernel in job.kernels(counts, gpu)], max(0.0, end - time.monotonic()))
            for rows in counts:
                if time.monotonic() < end and job.key(rows) not in done:
                    entry = _measured(job, weights(job.name, job.lines, job.k, job.gated), rows, gpu)
                    with file.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(entry) + "\n")
                    say(entry)
        for each in compiled.values():
            each.cancel()


@dataclass(frozen=True, slots=True)
class _Job:
    """A product to be measured with weights in a format, with k cut or not."""

    shape: str
    name: str
    lines: int
    k: int
    gated: bool
    cut: bool

    def plain(self, rows: int, gpu: GpuTraits) -> QuantizedLaunch:
        """By the kernel in plain Triton."""
        numbers = FORMATS[self.name].scheme.numbers
        return choose_quantized(numbers, (self.lines, self.k), self.gated, rows, gpu, whole=not self.cut)

    def launches(self, rows: int, gpu: GpuTraits) -> list[GluonLaunch]:
        numbers, splits = FORMATS[self.name].scheme.numbers, self.plain(rows, gpu).splits
        return [*launches_of(numbers, self.lines, self.k, rows, splits, gpu)]

    def kernels(self, counts: Sequence[int], gpu: GpuTraits) -> dict[_Kernel, None]:
        """Those that `_measured` needs, in its order."""
        wanted = dict[_Kernel, None]()
        for rows in counts:
            launches, plain = self.launches(rows, gpu), self.plain(rows, gpu)
            every: list[Launch] = [replace(plain, splits=each.splits) for each in launches]
            every += [replace(each, stays=False) for each in launches]
            for launch in (replace(each, splits=min(each.splits, 2)) for each in every):
                block = row_block(rows) if isinstance(launch, QuantizedLaunch) else launch.block_m
                wanted.setdefault(_Kernel(self.name, self.gated, launch, block))
        return wanted

    def key(self, rows: int) -> tuple[object, ...]:
        return FORMATS[self.name].scheme.numbers, self.lines, self.k, self.gated, self.cut, rows


def _weight(name: str, lines: int, k: int, gated: bool) -> TiledWeight:
    """As an engine has it by default, with a factor on its sums."""
    weight = factor_apart(random_weight(FORMATS[name], lines, k))
    return tile(in_turn(weight.halves())) if gated else tile(weight)


def _weights(name: str, lines: int, k: int, gated: bool) -> list[TiledWeight]:
    first = _weight(name, lines, k, gated)
    return [first, *(_weight(name, lines, k, gated) for _ in range(calls(first.nbytes) - 1))]


def _measured(job: _Job, weights: Sequence[TiledWeight], rows: int, gpu: GpuTraits) -> dict[str, Any]:
    """A line of the file. plain_us: of up to `MAX_ROWS`, by the kernel of few rows; up to 8 count those of 1, too."""
    gated, counts, found, wrong = job.gated, (1, 8) if rows == 8 else (rows,), dict[GluonLaunch, float](), list[Any]()
    plain, plain_us = job.plain(rows, gpu), 0.0
    for count in counts:
        x, want = torch.randn(count, job.k, dtype=torch.bfloat16, device=DEVICE), dict[int, Tensor]()
        plain_us += measure_us(x, weights, gated, plain) if rows <= kernels.MAX_ROWS else 0.0
        for launch in job.launches(rows, gpu):
            if launch.splits not in want:
                want[launch.splits] = multiply(x, weights[0], gated, replace(plain, splits=launch.splits))
            try:
                right = torch.equal(multiply(x, weights[0], gated, launch), want[launch.splits])
            except Exception:  # as in `fastest`
                right = False
            if right:
                found[launch] = found.get(launch, 0.0) + measure_us(x, weights, gated, launch)
            else:
                wrong.append(astuple(launch))
    found = {launch: us for launch, us in found.items() if astuple(launch) not in wrong}
    if not found:
        raise SystemExit(f"wrong results of every launch, nothing timed: {job}, {rows} rows: {wrong}")
    best = min(found, key=found.__getitem__)
    entry = {"name": job.shape, **dict(zip(_KEY, job.key(rows), strict=True))}
    times = [[*astuple(launch), round(us, 1)] for launch, us in sorted(found.items(), key=lambda each: each[1])]
    entry |= {"launch": astuple(best), "us": round(found[best], 1), "plain_us": round(plain_us, 1)}
    return entry | {"all": times, "wrong": wrong}


_KEY = ("numbers", "lines", "k", "gated", "cut", "rows")


def _key_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[field] for field in _KEY)


def _lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def write_many(file: Path, machine: dict[str, Any]) -> None:
    """The table of a file's lines; others measured on the same kind of GPU stay. Few rows that gain nothing
    have none."""
    joined = {_key_of(entry): entry for entry in (*entries_of(many_rows.TABLE, machine), *_lines_of(file))}
    for key, entry in [*joined.items()]:
        entry.pop("all", None), entry.pop("wrong", None)
        if entry["rows"] < many_rows.FEWEST_ROWS and entry["us"] > _WORTH * entry["plain_us"]:
            del joined[key]
    write_entries(many_rows.TABLE, joined.values(), machine)


_WORTH = 0.97
"""Of the plain kernel's time: more is noise."""


# ---------------------------------------------------------------------------------------------------------- the command


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--write-table", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--formats", nargs="*", choices=FORMATS)
    parser.add_argument("--many-rows", type=Path, metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="*", choices=many_rows.ROWS, default=many_rows.ROWS)
    args = parser.parse_args(arguments)
    end, rate = time.monotonic() + args.seconds, copy_bytes_per_s()
    machine = machine_of(rate)
    say(machine)
    if args.many_rows is not None:
        measure_many(args.many_rows, args.formats or TUNED, args.rows, end)
        if args.write_table:
            write_many(args.many_rows, machine)
        return 0
    if args.write_table:
        write_table(tune(end, kernels.load_table().entries if args.missing else {}), machine)
    report(args.formats or list(FORMATS), rate)
    return 0


if __name__ == "__main__":
    end_with(main)
