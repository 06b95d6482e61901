"""The command lines that are frozen, and what is kept of each: exit code, stdout and stderr without times and paths."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frozen.checkpoints import Pair
from frozen.names import COMMAND, FAULT_VARIABLE, FLAGS

SOURCE = Path(__file__).parents[2] / "src"
Transcript = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A command line. keep: what is kept of stdout, as lines. loose: of stderr only that it is one line, and its start.

    Words of `argv` may hold {text}, {text-head}, {llama}, ... (folders of pairs) and {tmp}.
    """

    name: str
    argv: tuple[str, ...]
    keep: Callable[[str], list[str]] = str.splitlines
    loose: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _generate(*more: str) -> tuple[str, ...]:
    return ("generate", "{text}", "--dtype", "float64", "--device", "cpu", *more)


HEAD = (FLAGS["draft"], "{text-head}")
TREE = (*HEAD, FLAGS["topk"], "2", FLAGS["steps"], "3", FLAGS["nodes"], "6")
BAD = ("generate", "--prompt", "x")


def doctor_lines(out: str) -> list[str]:
    """What does not depend on the machine: tensors, the capacity table, how many cases agree."""
    kept = [line for line in out.splitlines() if re.match(r"(target|draft|conformance): ", line)]
    table = re.findall(r"^│ +(\w[\w.]*) +│ +(\d+) +│ (.+?) +│ +(--[\w-]+) +│$", out, re.MULTILINE)
    return [*kept, *(" | ".join(cells) for cells in table)]


LINES = (
    # ---- generate
    Line("one prompt", _generate(*TREE, "--prompt", "def f(", "--max-tokens", "16")),
    Line(
        "several prompts, echoed",
        _generate("--prompt", "cat", "--prompt-file", "{tmp}/dog.txt", "--max-tokens", "8", "--echo"),
    ),
    Line(
        "json, sampled, stop strings",
        _generate(
            *TREE,
            "--json",
            "--seed",
            "3",
            "--temperature",
            "0.8",
            "--top-p",
            "0.9",
            "--stop",
            "e",
            "--stop",
            "zz",
            "--prompt",
            "x = 1",
            "--prompt",
            "the cat",
            "--max-tokens",
            "30",
        ),
    ),
    Line(
        "embedded pair, compared with plain",
        (
            "generate",
            "--dtype",
            "float64",
            "--device",
            "cpu",
            "--compare-plain",
            "--max-tokens",
            "20",
            "--prompt",
            "import os\n",
        ),
    ),
    # ---- other commands
    Line(
        "trace",
        (
            "trace",
            "{text}",
            "--dtype",
            "float64",
            "--device",
            "cpu",
            *TREE,
            "--prompt",
            "def f(",
            "--max-tokens",
            "9",
            "--output",
            "{tmp}/page.html",
        ),
    ),
    Line(
        "doctor", ("doctor", "{text}", "--device", "cpu", *TREE, FLAGS["context"], "128", "--cases", "2"), doctor_lines
    ),
    # ---- a fault named in the environment
    Line(
        "a fault, caught",
        _generate(*TREE, "--prompt", "cat", FLAGS["level"], "1"),
        environment={FAULT_VARIABLE: "sgl-27360"},
    ),
    # ---- bad input: exit code 2, one line
    Line("no command", (), loose=True),
    Line("unknown command", ("serf",), loose=True),
    Line("unknown option", (*BAD, "--speed", "11")),
    Line("shortened option", (*BAD, "--max-tok", "11")),
    Line("not among the choices", (*BAD, FLAGS["graphs"], "maybe"), loose=True),
    Line("not a number", (*BAD, FLAGS["page"], "four"), loose=True),
    Line("no prompt", ("generate",)),
    Line("bad sampling, all at once", (*BAD, "--max-tokens", "0", "--temperature", "-1", "--top-p", "0")),
    Line("no such prompt file", ("generate", "--prompt-file", "{tmp}/none.txt")),
    Line("bad options, all at once", (*BAD, FLAGS["page"], "3", FLAGS["rows"], "0", FLAGS["topk"], "1")),
    Line("pool too small", _generate(*TREE, "--prompt", "x", FLAGS["context"], "64", FLAGS["pool"], "32")),
    Line("prompt too long", _generate("--prompt", "x", "--prompt", "0123456789", FLAGS["context"], "8")),
    Line("another target's head", _generate(FLAGS["draft"], "{llama-head}", "--prompt", "x")),
    Line("trace without a prompt", ("trace", "--output", "{tmp}/page2.html")),
    Line("bench with a sweep's and a comparison's options", ("bench", "--sweep", "batch", "--repeats", "2")),
)


def environment(**more: str) -> dict[str, str]:
    """One thread, wide tables, the sources of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name != FAULT_VARIABLE}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "240", "HF_HUB_OFFLINE": "1", **more}


def start(argv: tuple[str, ...], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *argv], env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def transcripts(pairs: Mapping[str, Pair], folder: Path) -> dict[str, Transcript]:
    """Run all lines, two at a time. folder: an empty one."""
    (folder / "dog.txt").write_text("dog")
    places = {"tmp": str(folder)}
    for name, pair in pairs.items():
        places |= {name: str(pair.target), f"{name}-head": str(pair.head)}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((line.name for line in LINES), pool.map(lambda line: _run(line, places), LINES), strict=True))


def _run(line: Line, places: Mapping[str, str]) -> Transcript:
    process = start(tuple(word.format_map(places) for word in line.argv), **line.environment)
    out, err = process.communicate(timeout=300)
    said = _normal(err, places)
    transcript: Transcript = {"exit": process.returncode, "stdout": line.keep(_normal(out, places))}
    if line.loose:
        return {**transcript, "stderr": [each.split(":")[0] for each in said.splitlines()]}
    return {**transcript, "stderr": said.splitlines()}


def _normal(text: str, places: Mapping[str, str]) -> str:
    """Times, speeds and folders become words."""
    for name in sorted(places, key=lambda name: -len(places[name])):
        text = text.replace(places[name], f"{{{name}}}")
    text = re.sub(r"\d[\d.]* tokens/s", "N tokens/s", text)
    text = re.sub(r'("tokens_per_second": )[\d.e+-]+', r"\1N", text)
    return re.sub(
        r"[\d.]+x the speed of plain decoding in this run \([\d.]+ s\)", "Nx the speed of plain decoding", text
    )


# ---------------------------------------------------------------- faults

FAULTS = ("doctor", "--faults", "--device", "cpu")


def fault_table(out: str) -> list[list[str]]:
    """(fault, guard) of each row of the table of faults."""
    _, _, table = out.partition("\nfaults\n")
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0]]
