"""Measures launches of products with packed weights beside the one that engines choose, on one GPU.

    python benchmarks/quantized_launches.py FILE --seconds 300
                                        lines of JSON, behind those that FILE has, which are not measured again
    python benchmarks/quantized_launches.py FILE --write-tables
                                        without a GPU: what is worth an entry goes into quantized_gemm.json and
                                        quantized_gluon.json, and what all took into quantized_launches.json

A time is that of one product in a replayed graph of several over different weights, so that none lies in the cache;
launches of a product take turns. Their bits are compared before, and the values with the decoded weight's. Beside what
could be fast both what `choose_product` makes of the committed tables and what it makes without them, the rule, are
measured. Where the rule is within 3 % of the best there is no entry; else the best is the entry, and engines take it as
it is. Kernels are compiled before anything is timed.
"""

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache
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
    choose_product,
    quantized_gated,
    quantized_gated_reference,
    quantized_gemm,
    quantized_gemm_reference,
    splits_of,
)
from treetop.kernels.gemm.quantized_gluon import BESIDE, GluonLaunch, launch_of
from treetop.kernels.gemm.quantized_weight import factor_apart
from treetop.kernels.gemm.tiles import BLOCK, NUMBERS, TILE, Kind, TiledWeight, in_turn, tile
from treetop.kernels.triton_guard import GpuTraits, aot_compile, gpu_traits, interpreted, jit_for_any
from treetop.kernels.tuning import TunedTable

if not interpreted():  # a third of the kernels: times do not tell a size that is a multiple of 16 from others
    plain._quantized_kernel = jit_for_any("rows", "share")(plain._quantized_kernel.fn)

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
BITS = "nvfp4-bits"
NAMES = ("fp8-channel", "w4a16", "nvfp4", "mxfp4", BITS)
"""Formats, as engines have them by default. NVFP4 under `--exactness bits` has its factor in its scales, and k is not
cut."""
MODELS = tuple(dict.fromkeys(name.split()[0] for name in PRODUCTS))
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
    def kind(self) -> Kind:
        return small_weight(self.name).kind

    def weight(self) -> TiledWeight:
        """One that says this shape, of which little is there."""
        lines, k, _gated = PRODUCTS[self.shape]
        return replace(small_weight(self.name), shape=(lines, k))

    def launch(self, gpu: GpuTraits) -> Launch:
        """That engines choose."""
        return choose_product(self.weight(), PRODUCTS[self.shape][2], self.rows, gpu, self.name == BITS, True)


@cache
def small_weight(name: str) -> TiledWeight:
    return weight_of(name, 2 * TILE, BLOCK, False, torch.device("cpu"))


def by_rule(task: Task, gpu: GpuTraits) -> Launch:
    """The launch where nothing was measured."""
    empty = TunedTable(gpu.num_sms, "", dict[Any, Any]())
    with (
        mock.patch.object(plain, "load_table", return_value=empty),
        mock.patch.object(gluon, "load_table", return_value=empty),
        mock.patch.object(plain, "choose_quantized", plain.choose_quantized.__wrapped__),
        mock.patch.object(gluon, "choose", gluon.choose.__wrapped__),
    ):
        return task.launch(gpu)


def few_rows(task: Task, splits: int, gpu: GpuTraits) -> list[Launch]:
    """Of the plain kernel: more in flight where programs are few."""
    lines = PRODUCTS[task.shape][0]
    if task.rows > 32:
        ways = [(TILE, 3, 4), (TILE, 4, 4), (2 * TILE, 3, 8), (2 * TILE, 4, 8)]
    else:
        ways = [(TILE, stages, warps) for stages, warps in product((3, 4), (2, 4))]
        if -(-lines // TILE) * splits <= 2 * gpu.num_sms:
            ways.append((TILE, 6, 4))
        if -(-lines // TILE) * splits <= gpu.num_sms:
            ways.append((TILE // 2, 4, 2))
        if task.kind == "e4m3":
            ways += [(2 * TILE, 3, 8), (2 * TILE, 5, 8)]
    return [QuantizedLaunch(n, splits, stages, warps) for n, stages, warps in ways]


def ways_of(task: Task, block: tuple[int, int]) -> list[tuple[int, int, bool]]:
    """Of a block of the kernel in Gluon: warps, 0 for the usual; products ahead; and how scales are taken."""
    ready = [False] if task.kind in ("e4m3", "int4", "e2m1") else [True, False]
    if block == (256, 128):
        return [(0, ahead, each) for ahead, each in product((2, 3), ready)]
    if block != (128, 256):
        return [(0, 2, each) for each in ready]
    found = [(0, ahead, ready[0]) for ahead in ((1, 2) if len(ready) > 1 else (2,))]
    wide = NUMBERS[task.kind] == "e2m1" and PRODUCTS[task.shape][2]
    return found + [(16, 2, each) for each in ready if wide]


def many_rows(task: Task, splits: int, gpu: GpuTraits) -> list[Launch]:
    (lines, k, _gated), rows, found = PRODUCTS[task.shape], task.rows, list[Launch]()
    for block, beside in BESIDE.items():
        programs = -(-rows // block[0]) * -(-lines // block[1]) * splits
        if block[0] < 2 * rows and (block[0] > 64 or rows <= 64 or programs <= 2 * gpu.num_sms):
            for warps, ahead, ready in ways_of(task, block):
                launch = launch_of(NUMBERS[task.kind], k, block, splits, gpu, beside, warps)
                stays = -(-rows // block[0]) * -(-lines // block[1]) * launch.splits > gpu.num_sms * beside
                way = replace(launch, stays=stays, ahead=ahead, ready=ready)
                found += [gluon.joined(way)] if task.kind != "e4m3" else [way, gluon.joined(way)]
    return found


def candidates(task: Task, gpu: GpuTraits) -> list[Launch]:
    """The rule's first, then what engines choose, then what could be fast: of more rows than have the rule's splits
    with fewer, too, in blocks of as many rows as there are."""
    (lines, k, gated), whole = PRODUCTS[task.shape], task.name == BITS
    most = 1 if gated or whole else splits_of(lines, k, gpu)
    found = [by_rule(task, gpu), task.launch(gpu)]
    if task.rows <= 64:
        found += few_rows(task, most, gpu)
    if 32 < task.rows <= MAX_ROWS:
        found += many_rows(task, most, gpu)
    for splits in range(1, most + 1) if task.rows > MAX_ROWS else ():
        own = many_rows(task, splits, gpu)
        found += [each for each in own if splits == most or (isinstance(each, GluonLaunch) and each.block_m == 256)]
    return [*dict.fromkeys(found)]


def multiply(x: Tensor, weight: TiledWeight, gated: bool, launch: Launch) -> Tensor:
    return (quantized_gated if gated else quantized_gemm)(x, weight, launch=launch, gpu=gpu_traits(DEVICE))


def weight_of(name: str, lines: int, k: int, gated: bool, device: torch.device = DEVICE) -> TiledWeight:
    """As an engine has it, with a factor on its sums by default."""
    weight = random_weight(FORMATS[name.removesuffix("-bits")], lines, k, device=device)
    if name != BITS:
        weight = factor_apart(weight)
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
    """Into Triton's cache, by products of few lines in memory."""
    x, weights = torch.zeros(1024 * 32768, dtype=torch.bfloat16, device=DEVICE), dict[tuple[str, int], TiledWeight]()

    def ask() -> None:
        for task in tasks:
            lines, k, gated = PRODUCTS[task.shape]
            if (task.name, k) not in weights:
                weights[task.name, k] = weight_of(task.name, 2 * TILE, k, False)
            weight = replace(weights[task.name, k], shape=(lines, k))
            launches = candidates(task, gpu)
            more = [reference_of(splits, task.rows) for splits in {launch.splits for launch in launches}]
            for launch in dict.fromkeys([*launches, *more]):
                multiply(x[: task.rows * k].view(task.rows, k), weight, gated, launch)

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
    for launch in candidates(task, gpu):
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
    rule, today = (astuple(each) for each in (by_rule(task, gpu), task.launch(gpu)))
    return {
        "format": task.name, "name": task.shape, "kind": task.kind, "lines": lines, "k": k, "gated": gated,
        "rows": task.rows, "rule": rule, "today": today, "all": [[*launch, round(us, 2)] for us, launch in found],
        "wrong": wrong,
    }  # fmt: skip


def measure(file: Path, tasks: Sequence[Task], end: float) -> None:
    gpu, held, weights = gpu_traits(DEVICE), ("", ""), list[TiledWeight]()
    began = time.monotonic()
    compile_ahead(tasks, gpu)
    say({"compiled_s": round(time.monotonic() - began, 1)})
    for task in tasks:
        if time.monotonic() > end:
            break
        lines, k, gated = PRODUCTS[task.shape]
        if held != task[:2]:
            held = task[:2]
            weights.clear()
            weights += weights_of(task.name, lines, k, gated)
            whole = gated or task.name == BITS
            check(weights[0], gated, 1 if whole else splits_of(lines, k, gpu))
        entry = measured(task, weights, gpu)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
        us = {fields[:-1]: fields[-1] for fields in map(tuple, entry["all"])}
        best = min(us, key=us.__getitem__, default=())
        line = {"best": [*best, us.get(best)], "rule_us": us.get(entry["rule"]), "today_us": us.get(entry["today"])}
        say({"task": task, **line, "of": len(us), "wrong": entry["wrong"]})


# --------------------------------------------------------------------------------------------------------- the tables

HOPPER = GpuTraits(132, True, 227 << 10, True)
"""What tables are written for: an H200."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def launch_from(fields: Sequence[Any]) -> Launch:
    return QuantizedLaunch(*fields) if len(fields) == 4 else GluonLaunch(*fields)


def task_of(entry: Mapping[str, Any]) -> Task:
    return Task(entry["format"], entry["name"], entry["rows"])


def costs(entry: Mapping[str, Any], rule: Launch) -> Iterator[tuple[Launch, float]]:
    """Launches that an entry may have, and us: of more than `MAX_ROWS` rows, whose splits may differ, with what adding
    up their parts takes."""
    most = 1 if entry["gated"] or entry["format"] == BITS else splits_of(entry["lines"], entry["k"], HOPPER)
    for *fields, us in entry["all"]:
        launch = launch_from(fields)
        if launch.splits == rule.splits:
            yield launch, us
        elif entry["rows"] > MAX_ROWS and launch.splits <= most:
            more = launch.splits * (launch.splits > 1) * 4 + 2 * (launch.splits == 1)
            less = rule.splits * (rule.splits > 1) * 4 + 2 * (rule.splits == 1)
            yield launch, us + entry["rows"] * entry["lines"] * (more - less) / 4e6


def chosen(entries: Sequence[Mapping[str, Any]]) -> tuple[Launch, Launch, list[dict[Launch, float]]]:
    """Of the lines of a product, a kind and a class of rows: the rule's launch, the best for all, and what each line's
    took."""
    rule = by_rule(task_of(entries[0]), HOPPER)
    each = [dict(costs(entry, rule)) for entry in entries]
    common = set.intersection(*map(set, each))
    return rule, min(common, key=lambda launch: sum(math.log(us[launch]) for us in each)), each


def tables(entries: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Entries of both tables; and what `KEPT` has. Of a product that was measured twice the first line counts."""
    first = dict[Task, Mapping[str, Any]]()
    for entry in entries:
        first.setdefault(task_of(entry), entry)
    classes = defaultdict[tuple[str, str, int], list[Mapping[str, Any]]](list)
    for task, entry in sorted(first.items()):
        rule = by_rule(task, HOPPER)
        if any(launch_from(fields) == rule for *fields, _ in entry["all"]):
            classes[task.shape, task.name, max(16, task.rows)].append(entry)
    few, many, kept = list[dict[str, Any]](), list[dict[str, Any]](), defaultdict[str, dict[str, Any]](dict)
    for (shape, name, rows), found in classes.items():
        rule, best, us = chosen(found)
        for entry, each in zip(found, us, strict=True):
            both = round(min(each.values()), 1), round(each[rule], 1)
            kept[shape].setdefault(name, {})[entry["rows"]] = both[0] if both[0] == both[1] else both
        if math.prod(each[rule] / each[best] for each in us) <= WORTH ** len(us):
            continue
        lines, k, gated = PRODUCTS[shape]
        of = {"name": shape, "kind": small_weight(name).kind, "lines": lines, "k": k, "gated": gated, "rows": rows}
        if isinstance(best, QuantizedLaunch):
            few.append({**of, "launch": astuple(best)})
        else:
            cut = not gated and name != BITS and splits_of(lines, k, HOPPER) > 1
            many.append({**of, "cut": cut, "launch": astuple(best)})
    return few, many, dict(kept)


def write_tables(entries: Sequence[Mapping[str, Any]]) -> None:
    """What is not measured here beside the rule stays, and so do many rows by the plain kernel."""
    few, many, kept = tables(entries)
    measured = {
        (shape, small_weight(name).kind, max(16, rows))
        for shape, formats in kept.items()
        for name, counts in formats.items()
        for rows in counts
    }
    for path, found in ((plain.TABLE, few), (gluon.TABLE, many)):
        old = json.loads(path.read_text(encoding="utf-8"))["entries"]
        every = dict[tuple[str, str, int], dict[str, Any] | None]()
        for each in (*old, *found):
            key = each["name"], each["kind"], each["rows"]
            gone = key in measured and each not in found and not (path == plain.TABLE and each["rows"] > 64)
            every[key] = None if gone else each
        head = f'"num_sms": {HOPPER.num_sms}, "machine": {{"gpu": "NVIDIA H200"}}'
        lines = ",\n".join(json.dumps(each) for each in every.values() if each is not None)
        path.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    all_kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    for name, formats in kept.items():
        for each, counts in formats.items():
            old_counts = all_kept.setdefault(name, {}).setdefault(each, {})
            old_counts.update({str(rows): us for rows, us in counts.items()})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(all_kept[name])}" for name in PRODUCTS if name in all_kept)
    KEPT.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the command


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, nargs="+", help="more than one with --write-tables alone")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--formats", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--rows", type=int, nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--write-tables", action="store_true")
    args = parser.parse_args(arguments)
    if args.write_tables:
        write_tables([entry for file in args.file for entry in lines_of(file)])
        return 0
    end, done = time.monotonic() + args.seconds, {(e["format"], e["name"], e["rows"]) for e in lines_of(args.file[0])}
    shapes = [shape for shape in PRODUCTS if shape.split()[0] in args.models]
    tasks = [Task(*each) for each in product(args.formats, shapes, args.rows) if each not in done]
    say(machine_of())
    measure(args.file[0], tasks, end)
    return 0


if __name__ == "__main__":
    end_with(main)
