"""A process that checks structures, and may be killed for one: for its processor time or memory, or by the library.

    python -m treetop.structured.structure_process   started by `structure_checker.py`; stdin says first for which model

Each further line of stdin is a structure, each line of stdout what is wrong with one, or null. It ends with its stdin.
"""

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from treetop.structured.grammars import GrammarCompiler
from treetop.structured.output_parser import OutputParser
from treetop.structured.refusals import refused
from treetop.types.constraint import Reasoning, StructuredOutput
from treetop.types.errors import InputError

_START_S = 60.0
"""Seconds that reading the tokenizer may take."""
_NICE = 10
"""The engine goes first where processors are few."""
_NUM_STEPS = 8
"""Tokens that are tried behind the start."""


def main() -> int:
    """The timer is the system's: it also ends a process that is in the library, whoever has ended meanwhile.

    It counts processor time: a busy machine makes no structure hostile.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(_NICE)
    options = json.loads(sys.stdin.readline())
    signal.setitimer(signal.ITIMER_PROF, _START_S)
    grammars = GrammarCompiler(
        Path(options["folder"]), options["vocab_size"], options["eos_ids"], options["whitespace"]
    )
    problem = None
    try:
        grammars.load()
    except InputError as error:
        problem = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _send(problem)
    limit_memory(options["memory_mib"] << 20)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, options["timeout_s"])
        problem = problem_of(grammars, _asked(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(problem)
    return 0


def problem_of(grammars: GrammarCompiler, asked: StructuredOutput) -> str | None:
    """Why no text can be held to a structure, or not with what the library can do; None if nothing is known."""
    try:
        parser = grammars.parser(asked)
        mask = parser.mask()
    except InputError as error:
        return str(error)
    if mask is not None and not any(mask):
        return str(refused("no text has this structure"))
    return _problem_behind(parser, mask, grammars)


def _problem_behind(parser: OutputParser, mask: bytes | None, grammars: GrammarCompiler) -> str | None:
    """What a few tokens meet, of any text. A text may be a dead end; that is none of the structure's."""
    dice, size = random.Random(0), grammars.vocab_size
    for _ in range(_NUM_STEPS):
        bits = (1 << size) - 1 if mask is None else int.from_bytes(mask, "little")
        for token in grammars.eos_ids:
            bits &= ~(1 << token)
        if not bits:
            return None
        picked = [token for token in _drawn(dice, size) if bits >> token & 1]
        try:
            parser.follow(picked[:1] or [(bits & -bits).bit_length() - 1])
            mask = parser.mask()
        except InputError as error:
            return str(error) if "too complex" in str(error) else None
    return None


def _asked(line: str) -> StructuredOutput:
    said = json.loads(line)
    thought = said.pop("reasoning")
    if thought is None:
        return StructuredOutput(**said)
    again = None if thought["again"] is None else tuple(thought["again"])
    reasoning = Reasoning(**{**thought, "also_closes": tuple(thought["also_closes"]), "again": again})
    return StructuredOutput(**said, reasoning=reasoning)


def _drawn(dice: random.Random, maximum: int) -> list[int]:
    return [dice.randrange(maximum) for _ in range(64)]


def limit_memory(num_bytes: int) -> None:
    """Of what this process may still take."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    maximum = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (maximum if hard == resource.RLIM_INFINITY else min(maximum, hard), hard))


def _send(problem: Any) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
