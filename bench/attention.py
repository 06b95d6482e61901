"""Checks and times attention backends on one GPU, against their floor, and writes the tables that engines choose by.

    python bench/attention.py --check                 what is here, and whether every result is right; no timing
    python bench/attention.py [--json FILE]           every usable backend on every shape, checked first
    python bench/attention.py --write-table           the same over the classes of `auto`; writes attention/choices.json
    python bench/attention.py --tune                  launches of the Triton kernel; writes kernels/launches.json

Every shape's result is compared with a dense float32 reference before it is timed, and again after the last replay.
One graph holds the calls of many layers, each with K/V of its own, so that nothing is read from the L2 cache that an
engine would not find there. As in a round, a rotation comes before each call, and the time is what a call adds to it.
Floor: the bytes that must move over this machine's own copy bandwidth, or the operations over its own bf16 matrix rate,
whichever is larger. Tables grow: with `--missing` only classes that they lack are measured, and `--limit-s` ends a run
early with what it has.
"""

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import (
    TOLERANCE,
    Backend,
    Case,
    Measured,
    Shape,
    build,
    check,
    copy_bytes_per_s,
    describe,
    matrix_operations_per_s,
    measure,
    num_layers_for,
    reference,
    relative_error,
    shapes_to_check,
    shapes_to_time,
)
from launch_tuning import LENGTHS, classes_to_tune, tune

import treetop.attention
import treetop.kernels
from treetop.attention import auto
from treetop.attention.capabilities import CAPABILITIES, Need, refusal
from treetop.attention.flash_pages import FlashPages
from treetop.attention.libraries import FlashOp, find_fa3
from treetop.attention.library_backend import LibraryBackend
from treetop.attention.registry import make_backend
from treetop.kernels import launch
from treetop.kernels.triton_guard import gpu_traits

DEVICE = torch.device("cuda")
UNSCHEDULED = "fa3-unscheduled"


class Backends:
    """Backends by name, each made for one shape: one that plans on the host keeps the table of its batch."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def usable(self, shape: Shape) -> list[str]:
        return [name for name in self.names if refusal(name.removesuffix("-unscheduled"), shape.need) is None]

    def get(self, name: str, shape: Shape) -> Backend:
        return make_backend(name, shape.need) if name != UNSCHEDULED else unscheduled(shape.need)


def unscheduled(need: Need) -> Backend:
    """fa3 whose calls find out for themselves how to share the work, to see what a shared schedule saves."""
    found = find_fa3()
    op = FlashOp(found.fwd, None, found.source)
    triton_backend = make_backend("triton", need)
    return LibraryBackend("fa3", FlashPages(op, kernels=True), triton_backend, gpu_traits(DEVICE))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report_machine(names: list[str]) -> None:
    """What is here, and FlashAttention-3's schema, which decides how it is called."""
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for name in (name for name in names if name in CAPABILITIES):
        problem = refusal(name, Need(CAPABILITIES[name].dtypes[0], DEVICE))
        say(f"{name:11} {'usable' if problem is None else 'refused: ' + problem.reason}")
    if refusal("fa3", Need(torch.bfloat16, DEVICE)) is None:
        op = find_fa3()
        say("\n".join([f"fa3 is {op.source}", *op.schemas]))


def check_all(backends: Backends) -> int:
    """Every usable backend on ragged batches; how many are wrong. The first failure of each is shown in full."""
    wrong, shown = 0, set()
    for shape in shapes_to_check():
        case = build(shape, 1)
        for name in backends.usable(shape):
            try:
                error, failure = check(case, backends.get(name, shape)), None
            except Exception:  # whatever a library raises: show it and go on
                error, failure = float("inf"), traceback.format_exc()
            right = error <= 2 * TOLERANCE[shape.dtype]
            wrong += not right
            if not right or backends.names == [name]:
                say(f"{'ok   ' if right else 'WRONG'} {name:11} error {error:.1e}  {shape}")
            if not right and name not in shown:
                shown.add(name)
                say(failure or diagnose(case, backends.get(name, shape)))
    say(f"{wrong} wrong results")
    return wrong


def diagnose(case: Case, backend: Backend) -> str:
    """Which rows are wrong, and by how much."""
    layer = case.layers[0]
    out, want = case.call(backend, case.plan(backend), layer), reference(case, layer)
    rows = [
        f"  row {i}: extent {int(case.view.extent[i])}, error {relative_error(out[i], want[i]):.1e},"
        f" {int((~torch.isfinite(out[i])).sum())} not finite"
        for i in range(case.shape.rows)
    ]
    return "\n".join(["q " + str(case.q.shape) + " strides " + str(case.q.stride()), *rows])


def time_all(backends: Backends, shapes: list[Shape], end: float) -> list[dict[str, Any]]:
    """Every usable backend on every shape until `end`, in one process; wrong results are reported and not timed."""
    copy, matrix = copy_bytes_per_s(), matrix_operations_per_s()
    say(f"copy {copy / 1e12:.2f} TB/s, matrix products {matrix / 1e12:.0f} TFLOP/s")
    timed: list[dict[str, Any]] = []
    for shape in shapes:
        if time.monotonic() > end:
            say(f"time is up after {len(timed)} of {len(shapes)} shapes")
            break
        case = build(shape, num_layers_for(shape))
        floor = 1e6 * max(shape.bytes / copy, shape.operations / matrix)
        results: dict[str, Measured] = {}
        for name in backends.usable(shape):
            try:
                backend = backends.get(name, shape)
                error = check(case, backend)
                result = measure(case, backend) if error <= 2 * TOLERANCE[shape.dtype] else None
            except Exception:  # one library's failure must not cost the others' figures
                say(traceback.format_exc(limit=-2))
                result, error = None, float("inf")
            if result is None or not result.error <= 2 * TOLERANCE[shape.dtype]:
                say(f"WRONG {name} on {shape}: error {error:.1e}")
                continue
            results[name] = result
        where = f"{shape.kind:8} B={shape.rows:<3} n={shape.n:<5} L={shape.prefix_len:<6} t={shape.tail:<3}"
        times = "  ".join(
            f"{name} {r.us:.1f} ({r.us / floor:.2f}x)" + (f" + plan {r.plan_us:.0f}" if r.plan_us else "")
            for name, r in results.items()
        )
        say(f"{where} floor {floor:7.1f} us  {times}")
        figures = {name: {**asdict(r), "ratio": r.us / floor} for name, r in results.items()}
        row: dict[str, Any] = {**describe(shape), "class": shape.call.shape_class, "floor_us": floor}
        timed.append(
            {**row, "backends": figures, "launch": asdict(launch.choose_launch(shape.call, gpu_traits(DEVICE)))}
        )
        del case
    return timed


def classes_of_auto() -> list[Shape]:
    """The classes that `auto` tells apart: Llama-3.1-8B's heads, decoding and trees by context limit, and prefill."""
    shapes = []
    sizes = itertools.product(LENGTHS.items(), (1, 8, 32, 4, 16, 64), (16, 8, 1, 4, 32, 64))
    for (limit, (length, *_)), rows, n in sizes:
        if rows * length <= 131072:
            shapes.append(Shape("tree" if n > 1 else "plain", rows, n, length, n, bound=limit))
    prefill = [(1, 512, 1024), (1, 512, 4096), (1, 2048, 2048), (4, 512, 1024), (8, 512, 2048), (1, 512, 16384)]
    return shapes + [Shape("prefill", rows, n, length, 0) for rows, n, length in prefill]


def write_choices(timed: list[dict[str, Any]], names: str) -> None:
    classes = {
        row["class"]: {
            name: {"us": round(figures["us"], 2), "plan_us": round(figures["plan_us"], 1)}
            for name, figures in row["backends"].items()
            if name in CAPABILITIES
        }
        for row in timed
        if auto.FALLBACK in row["backends"]
    }
    write_table(treetop.attention, auto.TABLE, f"python bench/attention.py --write-table --backends {names}", classes)


def write_table(package: Any, name: str, command: str, classes: dict[str, Any]) -> None:
    """A committed table, with the machine and the day that it was last measured on; earlier classes of it stay."""
    path = Path(package.__path__[0]) / name
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["gpu"] == torch.cuda.get_device_name():
        classes = {**old["classes"], **classes}
    head = {
        "gpu": torch.cuda.get_device_name(),
        "num_sms": gpu_traits(DEVICE).num_sms,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(classes.items()))
    text = json.dumps(head, indent=1)[:-2] + ',\n "classes": {\n' + lines + "\n }\n}\n"
    json.loads(text)
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path}: {len(classes)} classes")


def main(arguments: list[str]) -> int:
    """Figures on stderr, JSON on stdout or in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results here instead of stdout")
    parser.add_argument("--shapes", default="tree,prefix,plain,draft,prefill", help="kinds to time, comma-separated")
    parser.add_argument(
        "--backends", default="triton,fa3,flashinfer,fa4", help="comma-separated; those refused are left out"
    )
    parser.add_argument("--missing", action="store_true", help="only classes that the table lacks")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no shape after this many seconds")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="check results, with diagnostics, and time nothing")
    what.add_argument("--write-table", action="store_true", help="time the classes of `auto` and write its table")
    what.add_argument("--tune", action="store_true", help="tune the Triton kernel's launches and write their table")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    backends = Backends(options.backends.split(","))
    report_machine(backends.names)
    end = time.monotonic() + options.limit_s
    if options.tune:
        known = set(launch.launch_table()["classes"]) if options.missing else set()
        classes = [shapes for shapes in classes_to_tune() if shapes[0].call.shape_class not in known]
        write_table(treetop.kernels, launch.TABLE, "python bench/attention.py --tune", tune(classes, end, say))
        return 0
    wrong = check_all(backends)
    if options.check:
        return int(wrong > 0)
    shapes = classes_of_auto() if options.write_table else shapes_to_time()
    known = set(auto.load_table().classes) if options.missing else set()
    kinds = options.shapes.split(",")
    shapes = [shape for shape in shapes if shape.kind in kinds and shape.call.shape_class not in known]
    timed = time_all(backends, shapes, end)
    if options.write_table:
        write_choices(timed, options.backends)
    report = {
        "machine": {"gpu": torch.cuda.get_device_name(), "host": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "wrong": wrong,
        "timed": timed,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(report, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
