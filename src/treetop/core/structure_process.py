"""A process that checks structures, and may be killed for one: by its clock, for its memory, or by the library.

    python -m treetop.core.structure_process     started by `structure_checker.py`; stdin says first for which model

Each further line of stdin is a structure, each line of stdout what is wrong with one, or null. It ends with its stdin.
"""

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetop.core.grammars import Grammars, next_mask, refused
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_START_S = 60.0
"""Seconds that reading the tokenizer may take."""
_NICE = 10
"""The engine goes first where processors are few."""
_NUM_STEPS = 8
"""Tokens that are tried behind the start."""


def main() -> int:
    """The alarm is the system's: it also ends a process that is in the library, whoever has ended meanwhile."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(_NICE)
    told = json.loads(sys.stdin.readline())
    signal.setitimer(signal.ITIMER_REAL, _START_S)
    grammars = Grammars(Path(told["folder"]), told["vocab_size"], told["eos_ids"])
    problem = None
    try:
        grammars.load()
    except InputError as error:
        problem = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _say(problem)
    limit_memory(told["memory_mib"] << 20)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, told["timeout_s"])
        problem = problem_of(grammars, StructuredOutput(**json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(problem)
    return 0


def problem_of(grammars: Grammars, asked: StructuredOutput) -> str | None:
    """Why no text can be held to a structure, or not with what the library can do; None if nothing is known."""
    try:
        matcher = grammars.matcher(asked)
        mask = next_mask(matcher, ())
    except InputError as error:
        return str(error)
    if not any(mask):
        return str(refused("no text has this structure"))
    return _problem_behind(matcher, mask, grammars.eos_ids)


def _problem_behind(matcher: "LLMatcher", mask: bytes, eos_ids: Sequence[int]) -> str | None:
    """What a few tokens meet, of any text. A text may be a dead end; that is none of the structure's."""
    dice = random.Random(0)
    for _ in range(_NUM_STEPS):
        bits = int.from_bytes(mask, "little")
        for token in eos_ids:
            bits &= ~(1 << token)
        if not bits:
            return None
        picked = [token for token in _drawn(dice, len(mask) * 8) if bits >> token & 1]
        try:
            mask = next_mask(matcher, picked[:1] or [(bits & -bits).bit_length() - 1])
        except InputError as error:
            return str(error) if "too complex" in str(error) else None
    return None


def _drawn(dice: random.Random, most: int) -> list[int]:
    return [dice.randrange(most) for _ in range(64)]


def limit_memory(num_bytes: int) -> None:
    """Of what this process may still take."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _say(problem: Any) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
