"""Make the golden files anew: `cd tests && python -m frozen.regenerate`, with `../src` on the path. No test runs this.

Runs are written only if they do not depend on luck: they must be the same with one thread and with two, with narrower
vector instructions, and with every weight moved to the next float32 up or down; and plain decoding must give the same
tokens. Otherwise it names the run and writes nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from frozen import golden
from frozen.checkpoints import digests, write_all
from frozen.command_line import FAULTS, fault_table, start, transcripts
from frozen.runs import build_plain, build_setup, perform, setups

Records = dict[str, list[Any]]
VARIANTS: dict[str, tuple[dict[str, str], int | None]] = {
    "two threads": ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}, None),
    "AVX2": ({"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, None),
    "nudged weights": ({"OMP_NUM_THREADS": "1"}, 1),
    "weights nudged otherwise": ({"OMP_NUM_THREADS": "1"}, 2),
}


def records(nudge: int | None, plain: bool = False) -> Records:
    """All runs in this process. plain: tokens and reasons only, of engines that decode plainly."""
    with tempfile.TemporaryDirectory() as folder:
        pairs, found = write_all(Path(folder), nudge), {}
        for setup in setups():
            llm = (build_plain if plain else build_setup)(setup, pairs[setup.pair])
            found[setup.name] = [perform(llm, pairs[setup.pair], run) for run in setup.runs]
    return found


def elsewhere(environment: dict[str, str], nudge: int | None) -> Records:
    """The same in a process with another environment."""
    command = [sys.executable, "-m", "frozen.regenerate", "--print-runs", *([] if nudge is None else [str(nudge)])]
    out = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    return json.loads(out.stdout)


def differences(first: Records, second: Records) -> list[str]:
    return [f"{name}, run {i}" for name in first for i, pair in enumerate(zip(first[name], second[name], strict=True))
            if pair[0] != pair[1]]  # fmt: skip


def without_rounds(found: Records) -> Records:
    return {name: [[[r[0], *r[2:]] for r in run] for run in runs] for name, runs in found.items()}


def make_runs() -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = {name: pool.submit(elsewhere, *variant) for name, variant in VARIANTS.items()}
        found = json.loads(json.dumps(records(None)))
        plain = json.loads(json.dumps(records(None, plain=True)))
        problems = {name: differences(found, each.result()) for name, each in waiting.items()}
    problems["plain decoding"] = differences(without_rounds(found), without_rounds(plain))
    if any(problems.values()):
        raise SystemExit("\n".join(f"{name}: {', '.join(which)}" for name, which in problems.items() if which))
    golden.save("checkpoints", digests())
    golden.save("runs", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["runs", "command_line", "faults"])
    parser.add_argument(
        "--print-runs", action="store_true", help="print the runs; `what` is then a nudge's seed, if any"
    )
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.print_runs:
        nudge = int(args.what[0]) if args.what[0].isdigit() else None
        print(json.dumps(records(nudge)))
        return
    if "runs" in args.what:
        make_runs()
    if "command_line" in args.what:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
            golden.save("command_line", transcripts(write_all(Path(folder)), Path(scratch)))
    if "faults" in args.what:
        process = start(FAULTS)
        golden.save("faults", {"cpu": fault_table(process.communicate()[0])})


if __name__ == "__main__":
    main()
