"""What benchmarks share: shapes of models, one timing loop on a GPU, lines, reports and tables in JSON."""

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from treetop.cli import OneLineParser, exit_code
from treetop.kernels.triton_guard import gpu_traits

DEVICE = torch.device("cuda")
COLD_BYTES = 512 << 20
"""K/V that one replay walks through: several times the L2 cache."""
PRESETS = Path(__file__).parent / "presets"
NAMES = (
    *("llama-3.1-8b", "qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b"),
    *("ministral-3-8b", "ernie-4.5-21b-a3b", "gemma-4-26b-a4b"),
    *("deepseek-v2-lite", "glm-4.7-flash"),
    *("qwen3-next-80b-a3b", "qwen3.5-9b"),
    *("llama-3.1-70b", "qwen3-235b-a22b"),
)
Table = dict[str, Any]


def preset(name: str) -> tuple[str, str]:
    """The folders of a target's configuration and of its head's."""
    return str(PRESETS / name), str(PRESETS / f"eagle3-{name}")


# ---------------------------------------------------------------------------------------------------------- options


def parser_of(doc: str | None) -> OneLineParser:
    """doc: of the script, whose `--help` it is."""
    return OneLineParser(
        prog=Path(sys.argv[0]).stem, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """--preset, --model and --draft."""
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0], help="shape, with random weights")
    parser.add_argument("--model", metavar="FOLDER", help="a target with weights instead, or builtin:nestling")
    parser.add_argument("--draft", metavar="FOLDER", help="its head")


def end_with(main: Callable[[list[str]], int]) -> None:
    """Run a script: what a user asked for wrongly is one line and exit code 2."""
    sys.exit(exit_code(Path(sys.argv[0]).stem, lambda: main(sys.argv[1:])))


# ---------------------------------------------------------------------------------------------------- times on a GPU


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A captured graph of `work`, replayed a few times."""
    torch.cuda.synchronize()  # what another stream still fills is not read yet
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    return graph


def times_us(launch: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each call of `launch`, between events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        launch()
    events[-1].record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Of one call, in a replayed graph of all: each on its own weights or pages, so that none lies in the cache."""

    def work() -> None:
        for call in calls:
            call()

    return statistics.median(times_us(graph_of(work).replay, repeats)) / len(calls)


def copy_bytes_per_s() -> float:
    """Device-to-device copy of 2 GiB, bytes read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    times = times_us(lambda: target.copy_(source), 24)
    return 2 * source.numel() / (statistics.median(times) * 1e-6)


def matrix_operations_per_s() -> float:
    """bf16 matrix product, 8192 cubed."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    out = torch.empty_like(a)
    times = times_us(lambda: torch.mm(a, b, out=out), 24)
    return 2 * 8192**3 / (statistics.median(times) * 1e-6)


def compile_on_all_cores(compile_once: Callable[[Any], None], jobs: Iterable[object]) -> None:
    """Fill Triton's cache on disk: `compile_once` of each job, a process a core."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_once, jobs, chunksize=4))


# ------------------------------------------------------------------------------------------------ lines and reports


def machine_of(copy: float | None = None) -> dict[str, Any]:
    """The GPU, and the bytes a second of a copy if they were measured."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"gpu": name, "torch": torch.__version__}
    return found if copy is None else {**found, "copy_tb_s": round(copy / 1e12, 2)}


def say(line: Mapping[str, Any]) -> None:
    """A line of JSON on stdout."""
    print(json.dumps(line), flush=True)


def tell(text: str) -> None:
    """For who watches, on stderr."""
    print(text, file=sys.stderr, flush=True)


def write_report(report: Mapping[str, Any], file: str | None) -> None:
    """JSON to a file, or else on stdout."""
    text = json.dumps(report, indent=1) + "\n"
    if file is None:
        print(text, end="")
    else:
        Path(file).write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------- tables of launches that engines read


def join_backends(old: Table, new: Table, tried: Collection[str]) -> Table:
    """Timings by class and backend: those of `old`, with what this run found for the backends that it tried.

    A class keeps the backends that were not tried. One that was tried and is not in `new` gave wrong results, and goes.
    """
    kept = {name: {each: timing for each, timing in row.items() if each not in tried} for name, row in old.items()}
    return {**old, **{name: {**kept.get(name, {}), **row} for name, row in new.items()}}


def text_of(head: Table, classes: Table) -> str:
    """A table by class: `head`'s fields, then `classes`, one a line and sorted."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(classes.items()))
    text = json.dumps(head, indent=1)[:-2] + ',\n "classes": {\n' + lines + "\n }\n}\n"
    json.loads(text)
    return text


def classes_of(path: Path) -> Table:
    """The classes of a committed table if it is of this GPU, else none."""
    table = json.loads(path.read_text(encoding="utf-8"))
    found: Table = table["classes"] if table["gpu"] == torch.cuda.get_device_name() else {}
    return found


def commit_of_tree() -> str:
    """What git calls this tree."""
    asked = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    if shutil.which(asked[0]) is None:
        return "a tree without git"
    found = subprocess.run(asked, cwd=PRESETS, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "a tree without git"


def add_runs(path: Path, command: str, commit: str, new: Table, tried: Collection[str]) -> None:
    """Put timings by class and backend into a committed table, each with the run that it is of: its day and `commit`.

    Whatever else the table has, its own day included, stays. tried: backends that the run measured, see
    `join_backends`. A table of another GPU begins anew.
    """
    run, old = f"{datetime.date.today().isoformat()}, {commit}", classes_of(path)
    dated = {name: {each: {**timing, "run": run} for each, timing in row.items()} for name, row in new.items()}
    if not new or not old:
        return write_classes(path, command, dated) if new else None
    head = json.loads(path.read_text(encoding="utf-8"))
    head.pop("classes")
    commands = head.setdefault("runs", {}).setdefault(run, [])
    if command not in commands:
        commands.append(command)
    classes = join_backends(old, dated, tried)
    path.write_text(text_of(head, classes), encoding="utf-8")
    tell(f"wrote {path}: {len(new)} of {len(classes)} classes")
    return None


def write_classes(path: Path, command: str, classes: Table) -> None:
    """A committed table, with the machine and the day that it was last measured on."""
    head = {
        "gpu": torch.cuda.get_device_name(),
        "num_sms": gpu_traits(DEVICE).num_sms,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }
    path.write_text(text_of(head, classes), encoding="utf-8")
    tell(f"wrote {path}: {len(classes)} classes")


def entries_of(path: Path, machine: Mapping[str, Any]) -> list[Table]:
    """The entries of a table of launches that was measured on the same kind of GPU, else none."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return table["entries"] if table is not None and table["machine"]["gpu"] == machine["gpu"] else []


def write_entries(path: Path, entries: Iterable[Mapping[str, Any]], machine: Mapping[str, Any]) -> None:
    """A table of launches, an entry a line."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    head = f'"num_sms": {gpu_traits(DEVICE).num_sms}, "machine": {json.dumps(machine)}'
    path.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
