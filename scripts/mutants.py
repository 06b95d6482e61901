"""Mutation run: small faults are planted by mutmut, and a part of the suite must find each.

    python scripts/mutants.py --count 40 --seed 0 --json mutants.json

Files are in groups, each with the tests that must find its mutants.

Works on a copy of the tree in a temporary folder. mutmut leaves decorated functions alone, so that the copy's
properties are first turned into plain methods, which keeps the formulas of the layout in the run.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from treetop.cli import OneLineParser, exit_code
from treetop.types.errors import ConfigError, InputError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Group:
    """files: as `src/treetop/` sees them. tests: of those that reach a mutant of these files one must fail."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "core": Group(
        (
            "types/layout.py",
            "cache/allocator.py",
            "cache/kv_cache_manager.py",
            "kernels/tree/accept.py",
            "kernels/tree/tree.py",
            "kernels/kv.py",
            "kernels/sampling/sampling.py",
            "speculative/draft.py",
            "speculative/verify.py",
            "scheduler/stops.py",
            "engine/rounds.py",
        ),
        (
            "speculative/test_tree.py",
            "kernels/test_sampling.py",
            "cache/test_cache.py",
            "types/test_capacity.py",
            "scheduler/test_stops.py",
            "attention/test_attention.py",
            "speculative/test_visibility.py",
            "checks/test_guards.py",
            "engine/test_graphsim.py",
        ),
    ),
    "journal": Group(("distributed/journal.py",), ("distributed/test_journal.py", "distributed/test_resumption.py")),
    "disaggregation": Group(
        ("disaggregation/decode.py", "disaggregation/prefill.py", "types/kv_transfer/layout.py"),
        (
            "disaggregation/test_handover_desks.py",
            "disaggregation/test_handover_loop.py",
            "disaggregation/test_handover_words.py",
            "disaggregation/test_rank_roles.py",
        ),
    ),
    "scheduler": Group(
        (
            "scheduler/scheduler.py",
            "scheduler/queues.py",
            "scheduler/rows.py",
            "scheduler/steps.py",
            "scheduler/prefill.py",
            "scheduler/rounds.py",
            "scheduler/committer.py",
            "scheduler/constrained.py",
        ),
        (
            "scheduler/test_scheduler.py",
            "scheduler/test_schedule_policy.py",
            "scheduler/test_stops.py",
            "core/test_core.py",
            "structured/test_structured_output.py",
            "disaggregation/test_handover_loop.py",
        ),
    ),
    "prefix cache": Group(("cache/prefix_cache.py",), ("cache/test_prefix_cache.py", "cache/test_cache.py")),
    "lockstep": Group(("distributed/lockstep.py",), ("distributed/test_expert_parallel.py",)),
    "router": Group(("distributed/router.py",), ("distributed/test_prefix_router.py",)),
    "exactness": Group(
        (
            "attention/exact_backend.py",
            "attention/exact_layout.py",
            "attention/integer_sums.py",
            "exact/fixed_point.py",
            "exact/probe.py",
            "kernels/exact.py",
            "weights/cpu_products.py",
            "weights/float16_products.py",
            "engine/startup/exactness.py",
            "engine/startup/exactness_table.py",
        ),
        (
            "attention/test_exact_attention.py",
            "kernels/test_exact.py",
            "kernels/test_fixed_point.py",
            "exact/test_probe.py",
            "weights/test_float16_products.py",
            "weights/test_products.py",
            "engine/test_exactness_table.py",
        ),
    ),
    "processors": Group(
        ("kernels/sampling/process.py", "engine/features/processors.py"),
        ("engine/test_processors.py", "engine/test_constraints.py", "engine/test_logprobs.py"),
    ),
}
FILES = tuple(file for group in GROUPS.values() for file in group.files)
COPIED = ("src", "tests", "pyproject.toml", "README.md", "LICENSE")
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
VERDICTS = {0: "survived", 1: "killed", 3: "killed", 33: "no test", 36: "timeout", 37: "killed"}


def main() -> int:
    """Run, print a table, and write JSON. Exit code 1 only if the run itself failed, 2 for a bad option."""
    parser = OneLineParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="mutants to try of each group, drawn with --seed; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        action="append",
        choices=FILES,
        metavar="FILE",
        help="a file of a group, as src/treetop/ sees it; repeats",
    )
    parser.add_argument("--limit-s", type=float, default=3600, help="stop after this long and report what was tried")
    parser.add_argument("--json", metavar="FILE", help="write every verdict and the survivors' diffs")
    args = parser.parse_args()
    return exit_code("mutants", lambda: checked_run(args))


def checked_run(args: argparse.Namespace) -> int:
    """Run in a temporary folder. Raises UserError for options that cannot work, and without mutmut."""
    if args.count is not None and args.count < 1:
        raise InputError(f"--count must be at least 1, got {args.count}")
    if not args.limit_s > 0:
        raise InputError(f"--limit-s must be above 0, got {args.limit_s:g}")
    if args.json is not None and (not Path(args.json).parent.is_dir() or Path(args.json).is_dir()):
        raise InputError(f"--json {args.json}: not a file in a folder that exists")
    if not Path(MUTMUT).is_file():
        raise ConfigError(f"mutmut is not installed beside {sys.executable}; pip install -e '.[dev]'")
    with tempfile.TemporaryDirectory(prefix="treetop-mutants-") as name:
        return run(Path(name), args)


def run(folder: Path, args: argparse.Namespace) -> int:
    """Try the groups one after the other, report."""
    started_s = time.monotonic()
    verdicts_of: dict[str, str] = {}
    shown: dict[str, str] = {}
    total = 0
    for name, group in GROUPS.items():
        files = [file for file in group.files if args.only is None or file in args.only]
        left_s = args.limit_s - (time.monotonic() - started_s)
        if not files or left_s < 0:
            continue
        place = folder / name
        place.mkdir()
        made, found = try_group(place, files, group.tests, left_s, args)
        if not made:
            print(f"mutmut made no mutants of {name}", file=sys.stderr)
            return 1
        total += made
        texts = {mutant: diff(place, mutant) for mutant in sorted(found) if found[mutant] in ("survived", "no test")}
        shown |= texts
        verdicts_of |= found | {mutant: harmless(text) or found[mutant] for mutant, text in texts.items()}
    report(verdicts_of, shown, total, time.monotonic() - started_s, args)
    return 0


def try_group(
    folder: Path, files: list[str], tests: tuple[str, ...], limit_s: float, args: argparse.Namespace
) -> tuple[int, dict[str, str]]:
    """Copy the tree, make the mutants of these files, try the chosen ones. How many were made, and their verdicts."""
    started_s = time.monotonic()
    for each in COPIED:
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
        copy(ROOT / each, folder / each)
    paths = [f"src/treetop/{each}" for each in files]
    for file in paths:
        path = folder / file
        path.write_text(plain_methods(path.read_text(encoding="utf-8")), encoding="utf-8")
    with (folder / "pyproject.toml").open("a", encoding="utf-8") as config:
        config.write(settings(paths, tests))
    mutmut(folder, ["no such mutant"], limit_s)  # makes them and learns which test reaches which
    names = sorted(verdicts(folder, paths))
    chosen = names if args.count is None else random.Random(args.seed).sample(names, min(args.count, len(names)))
    if chosen:
        mutmut(folder, sorted(chosen), limit_s - (time.monotonic() - started_s))
    found = {name: code for name, code in verdicts(folder, paths).items() if name in set(chosen)}
    return len(names), {
        name: "not tried" if code is None else VERDICTS.get(code, "killed") for name, code in found.items()
    }


def plain_methods(source: str) -> str:
    """Each `@property def name` becomes `def name_` and `name = property(name_)`."""
    lines = source.splitlines()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(found, key=lambda each: -each.lineno):
        if [ast.unparse(each) for each in node.decorator_list] == ["property"]:
            assert node.end_lineno is not None
            lines.insert(node.end_lineno, f"    {node.name} = property({node.name}_)")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {node.name}(", f"def {node.name}_(")
            del lines[node.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def settings(files: list[str], tests: tuple[str, ...]) -> str:
    """mutmut's part of pyproject.toml."""
    return (
        "\n[tool.mutmut]\nsource_paths = ['src']\nalso_copy = ['tests', 'README.md', 'LICENSE']\nmax_children = 1\n"
        f"only_mutate = {files}\npytest_add_cli_args_test_selection = {[f'tests/{name}' for name in tests]}\n"
        "pytest_add_cli_args = ['-p', 'no:cacheprovider', '-m', 'not slow']\n"
    )


def mutmut(folder: Path, names: list[str], limit_s: float) -> None:
    """Run mutmut on mutants by name, in one process at a time, at most `limit_s` long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "examples")}
    command = [MUTMUT, "run", "--max-children", "1", *names]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(max(limit_s, 1))
        except subprocess.TimeoutExpired:
            print("stopped at the time limit", file=sys.stderr)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if names != ["no such mutant"] and process.returncode > 0:
        print(log.read_text(errors="replace")[-1000:], file=sys.stderr)


def verdicts(folder: Path, files: list[str]) -> dict[str, int | None]:
    """Exit code of each mutant's tests, None if it was not tried."""
    found: dict[str, int | None] = {}
    for file in files:
        path = folder / "mutants" / f"{file}.meta"
        if path.is_file():
            found |= json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


def report(
    named: dict[str, str], shown: dict[str, str], total: int, elapsed_s: float, args: argparse.Namespace
) -> None:
    """A line a file, the survivors' diffs, and JSON."""
    modules = sorted({name.rsplit(".", 1)[0] for name in named})
    columns = ("killed", "timeout", "survived", "text", "device", "no test", "not tried")
    print(f"{'module':32}" + "".join(f"{column:>11}" for column in columns))
    for module in modules:
        counts = Counter(verdict for name, verdict in named.items() if name.rsplit(".", 1)[0] == module)
        print(f"{module:32}" + "".join(f"{counts[column]:>11}" for column in columns))
    counts = Counter(named.values())
    print(f"{'all':32}" + "".join(f"{counts[column]:>11}" for column in columns))
    print(f"{len(named)} of {total} mutants in {elapsed_s:.0f} s, seed {args.seed}")
    for name, text in shown.items():
        if named[name] not in ("text", "device"):
            print(f"\n{name}: {named[name]}\n{text}")
    if args.json:
        data = {
            "total": total,
            "seed": args.seed,
            "elapsed_s": elapsed_s,
            "counts": counts,
            "verdicts": named,
            "survivors": shown,
        }
        Path(args.json).write_text(json.dumps(data, indent=1), encoding="utf-8")


def harmless(text: str) -> str | None:
    """`text` if a mutant changes a message only, `device` if it drops a device, which a CPU cannot tell; else None."""
    sides = [" ".join(line[1:] for line in text.splitlines() if line[:1] == sign) for sign in "-+"]
    if len({side.lower().replace("xx", "") for side in sides}) == 1:
        return "text"
    dropped = [re.sub(r",? *device=[\w.]+", "", side).replace(", )", ")") for side in sides]
    return "device" if dropped[0] == dropped[1] else None


def diff(folder: Path, name: str) -> str:
    """The changed lines of a mutant."""
    command = [MUTMUT, "show", name]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return "\n".join(line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---"))


if __name__ == "__main__":
    sys.exit(main())
