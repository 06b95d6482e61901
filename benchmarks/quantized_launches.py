"""Measures launches of products with packed weights beside the one that the rule chooses, on one GPU.

    python benchmarks/quantized_launches.py FILE --seconds 300
                                        lines of JSON, behind those that FILE has, which are not measured again
    python benchmarks/quantized_launches.py FILE --write-tables
                                        without a GPU: what is worth an entry goes into quantized_gemm.json and
                                        quantized_gluon.json, and what all took into quantized_launches.json

A time is that of one product in a replayed graph of several over different weights, so that none lies in the cache;
launches of a product take turns. Their bits are compared before, and the values with the decoded weight's. Where the
rule is within 3 % of the best there is no entry. Of two formats with the same numbers an entry is best for both.
What `choose_product` makes of a launch for scales that lie ready (`kernels/gemm/scale_forms.py`) is not tried, and
figures of 4 bits in quantized_launches.json were taken before these.
"""

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from frame import DEVICE, end_with, graph_of, machine_of, parser_of, say, times_us
from quantized_cases import FORMATS, random_weight
from torch import Tensor

from treetop.kernels.gemm import quantized_gemm as plain
from treetop.kernels.gemm import quantized_gluon as gluon
from treetop.kernels.gemm.quantized_gemm import (
    MAX_ROWS,
    QuantizedLaunch,
    quantized_gated,
    quantized_gated_reference,
    quantized_gemm,
    quantized_gemm_reference,
    row_block,
    splits_of,
)
from treetop.kernels.gemm.quantized_gluon import BESIDE, GluonLaunch, launch_of
from treetop.kernels.gemm.quantized_weight import factor_apart
from treetop.kernels.gemm.tiles import BLOCK, TILE, TiledWeight, in_turn, tile
from treetop.kernels.triton_guard import GpuTraits, aot_compile, gpu_traits
from treetop.kernels.tuning import TunedTable

PRODUCTS = {
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
"""Name -> (lines, k, gated), the most important first. Of equal ones the first alone: Qwen3-8B's `qkv` and `output` are
Llama's, GLM-4.5-Air's `output` is Qwen3-8B's `down`, and both kinds of layers of Qwen3-Next have one `output`."""
NAMES = ("fp8-channel", "w4a16", "nvfp4", "mxfp4")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024)
KEPT = Path(__file__).with_suffix(".json")
"""By product, format and rows us of the best launch with the rule's splits, and of the rule's if that is another."""
WORTH = 1.03
"""Of the best launch's time: less is noise, and no entry."""
Launch = QuantizedLaunch | GluonLaunch


class Task(NamedTuple):
    """A product of so many rows with weights in the format of a name."""

    name: str
    shape: str
    rows: int

    @property
    def numbers(self) -> Any:
        return FORMATS[self.name].scheme.numbers


def by_rule(numbers: Any, lines: int, k: int, gated: bool, rows: int, gpu: GpuTraits) -> Launch:
    """The launch where nothing was measured."""
    empty = TunedTable(gpu.num_sms, "", dict[Any, Any]())
    with (
        mock.patch.object(plain, "load_table", return_value=empty),
        mock.patch.object(gluon, "load_table", return_value=empty),
    ):
        launch = plain.choose_quantized.__wrapped__(numbers, (lines, k), gated, rows, gpu)
        other = gluon.choose.__wrapped__(numbers, (lines, k), gated, rows, launch.splits, MAX_ROWS, gpu)
    return other or launch


def launches_of(task: Task, splits: int, gpu: GpuTraits) -> list[Launch]:
    """Launches that could be fast."""
    (lines, k, gated), numbers, rows = PRODUCTS[task.shape], task.numbers, task.rows
    if rows <= 32:
        return [QuantizedLaunch(TILE, splits, stages, warps) for stages, warps in product((3, 4), (2, 4))]
    few = [(TILE, 4), (2 * TILE, 8)] if rows <= 64 else []
    found: list[Launch] = [QuantizedLaunch(n, splits, stages, warps) for (n, warps), stages in product(few, (3, 4))]
    for block, beside in BESIDE.items():
        if block[0] < 2 * rows and (block[0] == 64) == (rows <= 64):
            for warps in (0, 16) if numbers == "e2m1" and gated and block == (128, 256) else (0,):
                launch = launch_of(numbers, k, block, splits, gpu, beside, warps)
                programs = -(-rows // block[0]) * -(-lines // block[1]) * launch.splits
                found.append(replace(launch, stays=programs > gpu.num_sms * beside))
    return found


def cuts_of(task: Task, gpu: GpuTraits) -> list[int]:
    """Splits that are tried: the rule's; of more rows than have its splits any fewer, too."""
    lines, k, gated = PRODUCTS[task.shape]
    most = 1 if gated else splits_of(lines, k, gpu)
    return [most] if task.rows <= MAX_ROWS else [*range(1, most + 1)]


def candidates(task: Task, gpu: GpuTraits) -> list[Launch]:
    """The rule's first."""
    lines, k, gated = PRODUCTS[task.shape]
    found = [by_rule(task.numbers, lines, k, gated, task.rows, gpu)]
    for splits in cuts_of(task, gpu):
        found += launches_of(task, splits, gpu)
    return [*dict.fromkeys(found)]


def multiply(x: Tensor, weight: TiledWeight, gated: bool, launch: Launch) -> Tensor:
    return (quantized_gated if gated else quantized_gemm)(x, weight, launch=launch, gpu=gpu_traits(DEVICE))


def weight_of(name: str, lines: int, k: int, gated: bool) -> TiledWeight:
    """As an engine has it by default, with a factor on its sums."""
    weight = factor_apart(random_weight(FORMATS[name], lines, k))
    return tile(in_turn(weight.halves()) if gated else weight, torch.bfloat16)


def weights_of(name: str, lines: int, k: int, gated: bool) -> list[TiledWeight]:
    """Copies, so many that none is found in the cache."""
    first = weight_of(name, lines, k, gated)
    many = max(3, min(24, -(-130_000_000 // first.nbytes)))
    parts = ("words", "scale", "factor", "zero")
    there = [(part, held) for part in parts if (held := getattr(first, part)) is not None]
    return [first, *(replace(first, **{part: held.clone() for part, held in there}) for _ in range(many - 1))]


def reference_of(splits: int, rows: int) -> QuantizedLaunch:
    """Whose bits others must have."""
    return QuantizedLaunch(TILE, splits, 3, 4) if rows <= 64 else QuantizedLaunch(2 * TILE, splits, 3, 8)


def compile_ahead(tasks: Sequence[Task], gpu: GpuTraits) -> None:
    """Into Triton's cache, by products of few lines."""
    wanted: dict[tuple[Any, ...], None] = {}
    for task in tasks:
        k, gated = PRODUCTS[task.shape][1:]
        for launch in candidates(task, gpu):
            for each in (launch, reference_of(launch.splits, task.rows)):
                blocks = -(-k // BLOCK)
                share = -(-blocks // each.splits)
                small = 1 if share == 1 else 16 if share % 16 == 0 else 2
                rows = task.rows if task.rows == 1 else row_block(task.rows)
                wanted[task.name, gated, replace(each, splits=min(each.splits, 2)), rows, small] = None
    weights: dict[tuple[Any, ...], TiledWeight] = {}

    def ask() -> None:
        for name, gated, launch, rows, share in wanted:
            k = BLOCK * share * launch.splits
            if (name, gated, k) not in weights:
                weights[name, gated, k] = weight_of(name, 512, k, gated)
            multiply(torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE), weights[name, gated, k], gated, launch)

    aot_compile(ask)


def check(weight: TiledWeight, gated: bool, splits: int) -> None:
    """Raise SystemExit for a result that is not that of the decoded weight."""
    x = torch.randn(16, weight.shape[-1], dtype=torch.bfloat16, device=DEVICE)
    want = (quantized_gated_reference if gated else quantized_gemm_reference)(x, weight).float()
    got = multiply(x, weight, gated, reference_of(splits, 16)).float()
    want, got = (want, got) if gated else (want.sum(0), got.sum(0))
    error = float((got - want).norm() / want.norm())
    if not error < 1e-2:
        raise SystemExit(f"wrong result, nothing timed: {tuple(weight.shape)}: relative error {error:.1e}")


def measured(task: Task, weights: Sequence[TiledWeight], gpu: GpuTraits) -> dict[str, Any]:
    """A line of the file: `all` launches with the us that each took, in order; `wrong` ones, which may not even run."""
    lines, k, gated = PRODUCTS[task.shape]
    x, want, graphs, wrong = torch.randn(task.rows, k, dtype=torch.bfloat16, device=DEVICE), {}, {}, []
    launches = candidates(task, gpu)
    for launch in launches:
        if launch.splits not in want:
            want[launch.splits] = multiply(x, weights[0], gated, reference_of(launch.splits, task.rows))
        try:
            if not torch.equal(multiply(x, weights[0], gated, launch), want[launch.splits]):
                wrong.append(astuple(launch))
                continue

            def work(launch: Launch = launch) -> None:
                for weight in weights:
                    multiply(x, weight, gated, launch)

            graphs[launch] = graph_of(work)
        except Exception:  # out of shared memory or registers: Triton's errors have no common class
            wrong.append(astuple(launch))
    times = defaultdict[Launch, list[float]](list)
    for _, (launch, graph) in product(range(3), graphs.items()):
        times[launch] += times_us(graph.replay, 4)
    found = sorted((statistics.median(us) / len(weights), astuple(launch)) for launch, us in times.items())
    return {
        "format": task.name, "name": task.shape, "numbers": task.numbers, "lines": lines, "k": k, "gated": gated,
        "rows": task.rows, "all": [[*launch, round(us, 2)] for us, launch in found], "wrong": wrong,
    }  # fmt: skip


def measure(file: Path, tasks: Sequence[Task], end: float) -> None:
    gpu, held, weights = gpu_traits(DEVICE), ("", ""), list[TiledWeight]()
    compile_ahead(tasks, gpu)
    for task in tasks:
        if time.monotonic() > end:
            break
        lines, k, gated = PRODUCTS[task.shape]
        if held != task[:2]:
            held = task[:2]
            weights.clear()
            weights += weights_of(task.name, lines, k, gated)
            check(weights[0], gated, 1 if gated else splits_of(lines, k, gpu))
        entry = measured(task, weights, gpu)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
        say({**entry, "all": entry["all"][:2]})


# --------------------------------------------------------------------------------------------------------- the tables

HOPPER = GpuTraits(132, True, 227 << 10, True)
"""What tables are written for: an H200."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def launch_from(fields: Sequence[Any]) -> Launch:
    return QuantizedLaunch(*fields) if len(fields) == 4 else GluonLaunch(*fields)


def costs(entry: Mapping[str, Any], rule: Launch) -> Iterator[tuple[Launch, float]]:
    """Launches that an entry may have, and us: of more than `MAX_ROWS` rows, whose splits may differ, with what adding
    up their parts takes."""
    for *fields, us in entry["all"]:
        launch = launch_from(fields)
        if launch.splits == rule.splits:
            yield launch, us
        elif entry["rows"] > MAX_ROWS and launch.splits <= splits_of(entry["lines"], entry["k"], HOPPER):
            more = launch.splits * (launch.splits > 1) * 4 + 2 * (launch.splits == 1)
            less = rule.splits * (rule.splits > 1) * 4 + 2 * (rule.splits == 1)
            yield launch, us + entry["rows"] * entry["lines"] * (more - less) / 4e6


def chosen(entries: Sequence[Mapping[str, Any]]) -> tuple[Launch, Launch, list[tuple[float, float]]]:
    """Of the lines of a product, a class of rows and numbers: the rule's launch, the best for all, and of each line
    us of its best and of the rule's."""
    first = entries[0]
    rule = by_rule(first["numbers"], first["lines"], first["k"], first["gated"], first["rows"], HOPPER)
    each = [dict(costs(entry, rule)) for entry in entries]
    common = set.intersection(*map(set, each))
    best = min(common, key=lambda launch: sum(math.log(us[launch]) for us in each))
    us = [(min(found.values()), found[rule]) for found in each]
    return rule, best, us


def tables(entries: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Entries of both tables; and what `KEPT` has."""
    classes = defaultdict[tuple[Any, ...], list[Mapping[str, Any]]](list)
    for entry in sorted(entries, key=lambda each: (*map(each.get, ("format", "rows")),)):
        rule = by_rule(entry["numbers"], entry["lines"], entry["k"], entry["gated"], entry["rows"], HOPPER)
        if any(launch_from(fields) == rule for *fields, _ in entry["all"]):
            classes[entry["name"], entry["numbers"], max(16, entry["rows"])].append(entry)
    few, many, kept = list[dict[str, Any]](), list[dict[str, Any]](), defaultdict[str, dict[str, Any]](dict)
    for (name, _, rows), found in classes.items():
        rule, best, us = chosen(found)
        for each, (least, taken) in zip(found, us, strict=True):
            both = round(least, 1), round(taken, 1)
            kept[name].setdefault(each["format"], {})[each["rows"]] = both[0] if both[0] == both[1] else both
        over = [dict(costs(entry, rule)) for entry in found]
        if math.prod(each[rule] / each[best] for each in over) <= WORTH ** len(over):
            continue
        entry = {field: found[0][field] for field in ("name", "numbers", "lines", "k", "gated")} | {"rows": rows}
        if isinstance(best, QuantizedLaunch):
            few.append({**entry, "launch": astuple(best)})
        else:
            many.append({**entry, "cut": best.splits > 1, "launch": astuple(best)})
    return few, many, dict(kept)


def write_tables(entries: Sequence[Mapping[str, Any]]) -> None:
    few, many, kept = tables(entries)
    kept_few = json.loads(plain.TABLE.read_text(encoding="utf-8"))["entries"]
    few += [each for each in kept_few if each["rows"] > 64]  # of weights that the kernel in Gluon does not read
    head = f'"num_sms": {HOPPER.num_sms}, "machine": {{"gpu": "NVIDIA H200"}}'
    for path, found in ((plain.TABLE, few), (gluon.TABLE, many)):
        lines = ",\n".join(map(json.dumps, found))
        path.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in PRODUCTS if name in kept)
    KEPT.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the command


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, nargs="+", help="more than one with --write-tables alone")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--formats", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--rows", type=int, nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--write-tables", action="store_true")
    args = parser.parse_args(arguments)
    if args.write_tables:
        write_tables([entry for file in args.file for entry in lines_of(file)])
        return 0
    end, done = time.monotonic() + args.seconds, {(e["format"], e["name"], e["rows"]) for e in lines_of(args.file[0])}
    tasks = [Task(*each) for each in product(args.formats, PRODUCTS, args.rows) if each not in done]
    say(machine_of())
    measure(args.file[0], tasks, end)
    return 0


if __name__ == "__main__":
    end_with(main)
