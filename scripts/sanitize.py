"""compute-sanitizer over a small workload: our kernels are clean, and planted bugs are reported.

    python scripts/sanitize.py

Runs `scripts/sanitize_workload.py` eagerly without the caching allocator and captured between red zones, plainly and
under memcheck and initcheck, then with a bug planted: a kernel that writes one element past a pool (memcheck says so in
eager rounds, red zones in captured ones) and one that reads what nobody wrote (initcheck). Every kernel is checked,
also vendors'; reports of vendors' kernels that `sanitize_suppressions.txt` lists are counted and not failed on. Exit
code 0 only if the clean runs are clean, the planted bugs are reported and every kernel of ours was launched (unless
`--only` left runs out), 2 for an option that cannot work.
Options of the tool: docs.nvidia.com/compute-sanitizer/ComputeSanitizer, command line options.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from treetop.cli import OneLineParser, exit_code
from treetop.types.errors import ConfigError, InputError

HERE = Path(__file__).parent
SUPPRESSIONS = HERE / "sanitize_suppressions.txt"
MARK = "WORKLOAD "
HOST = "host API"
"""Stands for the kernel's name in reports about copies that the host asked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the workload. tool: None runs it plainly. plant: the bug put in; said: what then must be reported."""

    mode: str
    tool: str | None = None
    plant: str | None = None
    said: str | None = None

    @property
    def name(self) -> str:
        planted = f", planted {self.plant}" if self.plant else ""
        return f"{self.mode}, {self.tool or 'no tool'}{planted}"


PLAIN = (
    Job("eager"),
    Job("captured"),
    Job("captured", None, "overrun", "red zone: a write landed after"),
)
UNDER_TOOLS = (
    Job("eager", "memcheck"),
    Job("eager", "initcheck"),
    Job("captured", "memcheck"),
    Job("captured", "initcheck"),
    Job("eager", "memcheck", "overrun", "_planted_overrun_kernel"),
    Job("eager", "initcheck", "unwritten", "_planted_unwritten_kernel"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """One report of the tool: what it says, and the kernel that did it."""

    what: str
    kernel: str


@dataclass(frozen=True, slots=True)
class Run:
    """A finished job. code: the exit status, None if it took too long."""

    job: Job
    code: int | None
    output: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """problems: why the run fails, none if it does not. suppressed: reports by the kernel that made them."""

    run: Run
    problems: tuple[str, ...]
    suppressed: Counter[str]


def reports_of(output: str) -> list[Report]:
    """Every report in a tool's output: a line that says what, then one `at KERNEL+0x...`."""
    found, before = [], ""
    for line in output.splitlines():
        text = re.sub(r"^=+ ?", "", line) if line.startswith("====") else None
        if text is None:
            continue
        if text.startswith("Host API memory access error"):
            found.append(Report(text, HOST))
        elif (at := re.match(r"\s+at (?:0x[0-9a-f]+ in )?(.+)$", text)) and not before.startswith(" "):
            found.append(Report(before, re.split(r"\+0x[0-9a-f]+", at[1])[0]))
        before = text
    return found


def suppressions_of(text: str) -> list[tuple[str, re.Pattern[str]]]:
    """(tool, pattern) of each line that is no comment."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(tool, re.compile(pattern)) for tool, pattern in (line.split(None, 1) for line in lines)]


def judge(run: Run, suppressions: Sequence[tuple[str, re.Pattern[str]]]) -> Verdict:
    """What is wrong with a run, and what was let pass."""
    job, reports = run.job, reports_of(run.output)
    if run.code is None:
        return Verdict(run, (f"it took longer than {run.elapsed_s:.0f} s",), Counter())
    problems: list[str] = []
    if job.tool is not None and "ERROR SUMMARY" not in run.output:
        problems.append(f"{job.tool} gave no summary: {_last_line(run.output)}")
    if job.said is not None:
        heard = any(report.kernel == job.said for report in reports) if job.tool else job.said in run.output
        if not heard:
            problems.append(f"the planted bug was not reported: no {job.said!r}")
        return Verdict(run, tuple(problems), Counter())
    if run.code != 0 or MARK not in run.output:
        problems.append(f"the workload ended with {run.code}: {_last_line(run.output)}")
    problems += [
        line for line in run.output.splitlines() if "Internal Sanitizer Error" in line or "not printed" in line
    ]
    ours = {name.rpartition(".")[2] for name in workload_of(run.output).get("kernels", ())}
    suppressed: Counter[str] = Counter()
    loud: Counter[str] = Counter()
    for report in reports:
        listed = any(tool == job.tool and pattern.search(report.kernel) for tool, pattern in suppressions)
        if listed and report.kernel not in ours:
            suppressed[report.kernel] += 1
        else:
            loud[f"{report.what} at {report.kernel}"] += 1
    problems += [f"{count} x {what}" for what, count in loud.most_common()]
    return Verdict(run, tuple(problems), suppressed)


def workload_of(output: str) -> dict[str, dict[str, int]]:
    """The workload's own line: kernels of the package as module.name, and launches of each."""
    line = next((line for line in output.splitlines() if line.startswith(MARK)), None)
    found: dict[str, dict[str, int]] = {} if line is None else json.loads(line[len(MARK) :])
    return found


def execute(job: Job, tool: str, number: int, limit_s: float) -> Run:
    """Run one job; each has its own port, so that several may run side by side."""
    command = [sys.executable, str(HERE / "sanitize_workload.py"), "--mode", job.mode]
    command += ["--plant", job.plant] if job.plant else []
    command += ["--zero-products"] if job.tool == "initcheck" else []
    if job.tool is not None:
        options = ["--tool", job.tool, "--target-processes", "application-only", "--show-backtrace", "no"]
        options += ["--print-limit", "20000", "--launch-timeout", "120", "--port", str(49152 + 16 * number)]
        if job.tool == "memcheck":  # room after each allocation, so that a neighbour hides no overrun
            options += ["--padding", "512", "--report-api-errors", "no", "--destroy-on-device-error", "kernel"]
        command = [tool, *options, *command]
    caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if job.mode == "eager" else {}
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **caching}
    started_s = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, code = process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's child too
        output, code = process.communicate()[0], None
    return Run(job, code, output, time.perf_counter() - started_s)


def show(verdict: Verdict) -> None:
    run = verdict.run
    state = "FAILED" if verdict.problems else "ok"
    print(f"{state:6} {run.job.name} ({run.elapsed_s:.0f} s)", flush=True)
    for problem in verdict.problems[:12]:
        print(f"         {problem}")
    if verdict.suppressed:
        kernels = ", ".join(f"{count} in {name[:60]}" for name, count in verdict.suppressed.most_common(6))
        print(f"         suppressed: {kernels}")


def main() -> int:
    parser = OneLineParser(prog="sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side")
    parser.add_argument("--limit-s", type=float, default=200, help="a run that takes longer fails")
    parser.add_argument("--only", help="runs whose name holds this text, for example memcheck")
    parser.add_argument("--logs", metavar="FOLDER", help="keep each run's output there")
    args = parser.parse_args()
    return exit_code("sanitize", lambda: run_all(args))


def run_all(args: argparse.Namespace) -> int:
    """Run the jobs and judge them. Raises UserError for options that cannot work, and without the tool."""
    if args.jobs < 1 or not args.limit_s > 0:
        raise InputError(f"--jobs must be at least 1 and --limit-s above 0, got {args.jobs}, {args.limit_s:g}")
    if args.only is not None and not any(args.only in job.name for job in (*PLAIN, *UNDER_TOOLS)):
        raise InputError(
            f"--only {args.only}: no run is called so; {'; '.join(j.name for j in (*PLAIN, *UNDER_TOOLS))}"
        )
    if args.logs is not None:
        make_folder(Path(args.logs))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if tool is None:
        raise ConfigError("compute-sanitizer is not on PATH; install the CUDA toolkit or set CUDA_HOME")
    suppressions = suppressions_of(SUPPRESSIONS.read_text(encoding="utf-8"))
    verdicts = []
    # First the plain runs: they compile every kernel, so that nothing is compiled under a tool.
    for stage in (PLAIN, UNDER_TOOLS):
        jobs = [job for job in stage if args.only is None or args.only in job.name or job in PLAIN[:2]]
        with ThreadPoolExecutor(args.jobs) as pool:
            for run in pool.map(lambda job, n: execute(job, tool, n, args.limit_s), jobs, range(len(jobs))):
                verdicts.append(judge(run, suppressions))
                show(verdicts[-1])
                if args.logs:
                    name = re.sub(r"\W+", "-", run.job.name)
                    (Path(args.logs) / f"{name}.log").write_text(run.output, encoding="utf-8")
    launched: Counter[str] = Counter()
    ours: set[str] = set()
    for verdict in verdicts:
        said = workload_of(verdict.run.output)
        ours |= set(said.get("kernels", ()))
        launched.update(said.get("launched", {}))
    seen, unseen = sorted(ours & set(launched)), sorted(ours - set(launched))
    print(f"our kernels, launched: {', '.join(seen) or 'none'}")
    print(f"our kernels, not launched: {', '.join(unseen) or 'none'}")
    failed = [verdict for verdict in verdicts if verdict.problems]
    missed = args.only is None and bool(unseen)
    if missed:
        print("FAILED a kernel of ours was launched in no run")
    print(f"sanitize: {len(verdicts) - len(failed)} of {len(verdicts)} runs as they must be")
    return int(bool(failed) or missed or not seen)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--logs {path}: {error.strerror}") from None


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")[:200]


if __name__ == "__main__":
    sys.exit(main())
