"""Checks and times attention backends on one GPU, against their floor, and writes the tables that engines choose by.

    python benchmarks/attention.py --check                 what is here, and whether every result is right; no timing
    python benchmarks/attention.py [--json FILE]           every usable backend on every shape, checked first
    python benchmarks/attention.py --write-table           the same by `auto`'s classes; writes attention/choices.json
    python benchmarks/attention.py --tune        tunes Triton's launches; writes kernels/attention/attention_config.json
    python benchmarks/attention.py --exact --unchecked     what is exact against Triton, and one long row among others
    python benchmarks/attention.py --write-table --shapes prefill --unchecked     the classes of prefill alone
    python benchmarks/attention.py --write-table --shapes sparse       those of rounds of sparse attention (DSA) alone

Every shape's result is compared with a dense float32 reference before it is timed, and again after the last replay.
One graph holds the calls of many layers, each with K/V of its own, so that nothing is read from the L2 cache that an
engine would not find there. As in a round, a rotation comes before each call, and the time is what a call adds to it.
Floor: the bytes that must move over this machine's own copy bandwidth, or the operations over its own bf16 matrix rate,
whichever is larger. Tables grow: with `--missing` only classes that they lack are measured, and `--limit-s` ends a run
early with what it has. A table is of one GPU: on another one `--replace` begins it anew. Each time that is added to the
table of `auto` says its day and commit.
"""

import argparse
import itertools
import platform
import shlex
import time
import traceback
from dataclasses import asdict, replace
from typing import Any

import torch
import triton
from attention_cases import (
    TOLERANCE,
    Backend,
    Case,
    Measured,
    build,
    check,
    describe,
    measure,
    memory_bytes,
    num_layers_for,
    reference,
    relative_error,
)
from attention_shapes import Shape, exact_shapes, prefill_shapes, shapes_to_check, shapes_to_time, sparse_shapes
from frame import (
    DEVICE,
    add_runs,
    classes_of,
    commit_of_tree,
    copy_bytes_per_s,
    end_with,
    machine_of,
    matrix_operations_per_s,
    parser_of,
    tell,
    write_classes,
    write_report,
)
from launch_tuning import LENGTHS, classes_to_tune, tune

from treetop.attention import auto
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import Need
from treetop.attention.fa3_backend import FlashOp, find_fa3
from treetop.attention.flash_pages import FlashPages
from treetop.attention.library_backend import LibraryBackend
from treetop.attention.registry import BACKENDS, refusal
from treetop.kernels.attention import attention_config
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import gpu_traits

CHOICES, LAUNCHES = auto.TABLE, attention_config.TABLE
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
    ops = Ops(OpContext(need.device, need.dtype))
    return LibraryBackend("fa3", BACKENDS["fa3"].capabilities, FlashPages(op, ops), triton_backend, ops)


def report_machine(names: list[str]) -> None:
    """What is here, and FlashAttention-3's schema, which decides how it is called."""
    tell(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for name in (name for name in names if name in BACKENDS):
        problem = refusal(name, Need(BACKENDS[name].capabilities.dtypes[0], DEVICE))
        tell(f"{name:11} {'usable' if problem is None else 'refused: ' + problem.reason}")
    if refusal("fa3", Need(torch.bfloat16, DEVICE)) is None:
        op = find_fa3()
        tell("\n".join([f"fa3 is {op.source}", *op.schemas]))


def check_all(backends: Backends, kinds: list[str], fp8: bool) -> int:
    """Every usable backend on ragged batches; how many are wrong. The first failure of each is shown in full."""
    wrong, shown = 0, set()
    for shape in (replace(shape, fp8=fp8) for shape in shapes_to_check() if shape.kind in kinds):
        case = build(shape, 1)
        for name in backends.usable(shape):
            try:
                error, failure = check(case, backends.get(name, shape)), None
            except Exception:  # whatever a library raises: show it and go on
                error, failure = float("inf"), traceback.format_exc()
            right = error <= 2 * TOLERANCE[shape.dtype]
            wrong += not right
            if not right or backends.names == [name]:
                tell(f"{'ok   ' if right else 'WRONG'} {name:11} error {error:.1e}  {shape}")
            if not right and name not in shown:
                shown.add(name)
                tell(failure or diagnose(case, backends.get(name, shape)))
    tell(f"{wrong} wrong results")
    return wrong


def diagnose(case: Case, backend: Backend) -> str:
    """Which rows are wrong, and by how much."""
    layer = case.layers[0]
    out, want = case.call(backend, case.plan(backend), layer), reference(case, layer)
    rows = [
        f"  row {i}: extent {int(case.metadata.kv_len[i])}, error {relative_error(out[i], want[i]):.1e},"
        f" {int((~torch.isfinite(out[i])).sum())} not finite"
        for i in range(case.shape.rows)
    ]
    return "\n".join(["q " + str(case.q.shape) + " strides " + str(case.q.stride()), *rows])


def time_all(backends: Backends, shapes: list[Shape], end: float) -> list[dict[str, Any]]:
    """Every usable backend on every shape until `end`, in one process; wrong results are reported and not timed."""
    copy, matrix = copy_bytes_per_s(), matrix_operations_per_s()
    tell(f"copy {copy / 1e12:.2f} TB/s, matrix products {matrix / 1e12:.0f} TFLOP/s")
    timed: list[dict[str, Any]] = []
    for shape in shapes:
        if time.monotonic() > end:
            tell(f"time is up after {len(timed)} of {len(shapes)} shapes")
            break
        if memory_bytes(shape) > torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved():
            tell(f"left out, for it needs {memory_bytes(shape) / 2**30:.0f} GiB: {shape}")
            continue
        case = build(shape, num_layers_for(shape))
        floor = 1e6 * max(shape.bytes / copy, shape.operations / matrix)
        results: dict[str, Measured] = {}
        for name in backends.usable(shape):
            try:
                backend = backends.get(name, shape)
                error = check(case, backend)
                right = error <= 2 * TOLERANCE[shape.dtype]
                result = measure(case, backend, replays_for(case, floor)) if right else None
            except Exception:  # one library's failure must not cost the others' figures
                tell(traceback.format_exc(limit=-2))
                result, error = None, float("inf")
            if result is None or not result.error <= 2 * TOLERANCE[shape.dtype]:
                tell(f"WRONG {name} on {shape}: error {error:.1e}")
                continue
            results[name] = result
        where = f"{shape.kind:8} B={shape.rows:<3} n={shape.n:<5} L={shape.prefix_len:<6} t={shape.tail:<3}"
        where += f" one L={shape.longest}" if shape.longest else ""
        times = "  ".join(
            f"{name} {r.us:.1f} ({r.us / floor:.2f}x)" + (f" + plan {r.plan_us:.0f}" if r.plan_us else "")
            for name, r in results.items()
        )
        tell(f"{where} floor {floor:7.1f} us  {times}")
        figures = {name: {**asdict(r), "ratio": r.us / floor} for name, r in results.items()}
        row: dict[str, Any] = {**describe(shape), "class": shape.call.shape_class, "floor_us": floor}
        timed.append(
            {
                **row,
                "backends": figures,
                "launch": asdict(attention_config.choose_launch(shape.call, gpu_traits(DEVICE))),
            }
        )
        del case
    return timed


def replays_for(case: Case, floor_us: float) -> int:
    """As many as take 0.25 s at twice the floor, from 5 to 40: the largest prefills take 0.1 s a call."""
    return min(max(int(0.25e6 / (2 * floor_us * len(case.layers))), 5), 40)


def classes_of_auto() -> list[Shape]:
    """The classes that `auto` is given: Llama-3.1-8B's heads, decoding and trees by context limit, and prefill; and
    rounds of sparse attention."""
    shapes = []
    sizes = itertools.product(LENGTHS.items(), (1, 8, 32, 4, 16, 64), (16, 8, 1, 4, 32, 64))
    for (limit, (length, *_)), rows, n in sizes:
        if rows * length <= 131072:
            shapes.append(Shape("tree" if n > 1 else "plain", rows, n, length, n, max_kv_len=limit))
    return sparse_shapes() + shapes + prefill_shapes()


def write_choices(timed: list[dict[str, Any]], tried: list[str], arguments: list[str], commit: str | None) -> None:
    classes = {
        row["class"]: {
            name: {"us": round(figures["us"], 2), "plan_us": round(figures["plan_us"], 1)}
            for name, figures in row["backends"].items()
            if name in BACKENDS
        }
        for row in timed
        if auto.FALLBACK in row["backends"]
    }
    add_runs(CHOICES, command_of(arguments), commit or commit_of_tree(), classes, tried)


def command_of(arguments: list[str]) -> str:
    return " ".join(["python benchmarks/attention.py", shlex.join(arguments)])


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results here instead of stdout")
    parser.add_argument("--shapes", default="tree,prefix,plain,draft,prefill,sparse", help="kinds, comma-separated")
    parser.add_argument(
        "--backends", default="triton,fa3,flashinfer,fa4,gluon", help="comma-separated; those refused are left out"
    )
    parser.add_argument("--missing", action="store_true", help="only classes that the table lacks")
    parser.add_argument("--fp8", action="store_true", help="K/V in FP8")
    parser.add_argument("--unchecked", action="store_true", help="check no ragged batches before: only what is timed")
    parser.add_argument("--replace", action="store_true", help="forget a table's classes of another GPU")
    parser.add_argument("--commit", help="what is measured, as the table of `auto` names it; by default git's commit")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no shape after this many seconds")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="check results, with diagnostics, and time nothing")
    what.add_argument("--write-table", action="store_true", help="time the classes of `auto` and write its table")
    what.add_argument(
        "--exact", action="store_true", help="time what is exact against Triton, and a batch of which one row is long"
    )
    what.add_argument("--tune", action="store_true", help="tune the Triton kernel's launches and write their table")
    options = parser.parse_args(arguments)
    if options.fp8 and (options.write_table or options.tune or options.exact):
        parser.error("--fp8: the tables and what is exact are of K/V in 16 bits")
    if options.exact:
        options.backends = "triton,segments"
    for asked, table in ((options.write_table, CHOICES), (options.tune, LAUNCHES)):
        if asked and not options.replace and not classes_of(table):
            parser.error(f"{table.name} is of another GPU; --replace forgets its classes and begins anew")
    return options


def main(arguments: list[str]) -> int:
    """Figures on stderr, JSON on stdout or in a file."""
    options = options_of(arguments)
    torch.manual_seed(0)
    backends, kinds = Backends(options.backends.split(",")), options.shapes.split(",")
    report_machine(backends.names)
    end = time.monotonic() + options.limit_s
    if options.tune:
        known = classes_of(LAUNCHES)
        classes = [shapes for shapes in classes_to_tune() if shapes[0].kind in kinds]
        if options.missing:
            classes = [shapes for shapes in classes if shapes[0].call.shape_class not in known]
        write_classes(LAUNCHES, command_of(arguments), {**known, **tune(classes, end)})
        return 0
    wrong = 0 if options.unchecked else check_all(backends, kinds, options.fp8)
    if options.check:
        return int(wrong > 0)
    shapes = exact_shapes() if options.exact else classes_of_auto() if options.write_table else shapes_to_time()
    known = auto.load_table().entries if options.missing else {}
    shapes = [replace(each, fp8=options.fp8) for each in shapes if each.kind in kinds]
    shapes = [shape for shape in shapes if shape.call.shape_class not in known]
    timed = time_all(backends, shapes, end)
    if options.write_table:
        write_choices(timed, backends.names, arguments, options.commit)
    versions = {"python": platform.python_version(), "triton": triton.__version__}
    machine = {**machine_of(), "host": platform.machine(), **versions}
    write_report({"machine": machine, "wrong": wrong, "timed": timed}, options.json)
    return int(wrong > 0)


if __name__ == "__main__":
    end_with(main)
