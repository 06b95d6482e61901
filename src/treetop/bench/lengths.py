"""How many tokens prompts and answers have: as a specification says, or as a file of real ones."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from treetop.types.errors import ConfigError, InputError

Draw = Callable[[random.Random], int]
SPECIFICATION = "N, A-B (evenly), N~S (log-normal, median N), or several with weights: 9*1024,1*8192"
_MOST = 10**7


def lengths_of(given: str, option: str) -> Draw:
    """What draws lengths, at least 1, by a specification. Raises ConfigError."""
    weights: list[float] = []
    draws: list[Draw] = []
    for part in given.split(","):
        weight, star, one = part.rpartition("*")
        try:
            weights.append(float(weight) if star else 1.0)
            draws.append(_one(one.strip()))
            if not 0 < weights[-1] < math.inf:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{option} {given}: expected {SPECIFICATION}") from None
    return lambda rng: rng.choices(draws, weights)[0](rng)


def _one(text: str) -> Draw:
    """Raises ValueError."""
    median, tilde, sigma = text.partition("~")
    if tilde:
        mu, spread = math.log(_count(median)), float(sigma)
        if not 0 <= spread <= 4:
            raise ValueError
        return lambda rng: min(max(round(rng.lognormvariate(mu, spread)), 1), _MOST)
    low, dash, high = text.partition("-")
    least, most = _count(low), _count(high if dash else low)
    if least > most:
        raise ValueError
    return lambda rng: rng.randint(least, most)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= _MOST:
        raise ValueError
    return count


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(tokens of the prompt, of the answer) of each line of a file. Raises InputError unless it is JSON lines with
    `input_len` and `output_len`."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        pairs = [(line["input_len"], line["output_len"]) for line in lines]
        if not pairs or not all(type(each) is int and 1 <= each <= _MOST for pair in pairs for each in pair):
            raise ValueError("it needs a line, and lengths from 1 on")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"--lengths {path}: not JSON lines with `input_len` and `output_len`: {error}") from None
    return pairs
