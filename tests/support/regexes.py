"""Random regular expressions, and by derivatives what may come next in a text of one: an oracle without a library.

Source: Brzozowski, Derivatives of regular expressions (JACM 1964).
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Regex:
    """kind: "none" (no text), "empty", "chars" (one of them), "then", "or" or "many" (any number of times)."""

    kind: str
    chars: frozenset[int] = frozenset()
    parts: tuple["Regex", ...] = ()


NONE, EMPTY = Regex("none"), Regex("empty")


def then(a: Regex, b: Regex) -> Regex:
    if NONE in (a, b):
        return NONE
    if EMPTY in (a, b):
        return b if a == EMPTY else a
    return Regex("then", parts=(a, b))


def either(*parts: Regex) -> Regex:
    flat = {each for part in parts for each in (part.parts if part.kind == "or" else (part,))} - {NONE}
    if len(flat) <= 1:
        return flat.pop() if flat else NONE
    return Regex("or", parts=tuple(sorted(flat, key=repr)))


def nullable(regex: Regex) -> bool:
    """Whether its texts include the empty one."""
    if regex.kind == "then":
        return all(map(nullable, regex.parts))
    if regex.kind == "or":
        return any(map(nullable, regex.parts))
    return regex.kind in ("empty", "many")


@lru_cache(maxsize=100_000)
def behind(regex: Regex, char: int) -> Regex:
    """The rests of its texts that begin with a byte."""
    if regex.kind == "chars":
        return EMPTY if char in regex.chars else NONE
    if regex.kind == "or":
        return either(*(behind(part, char) for part in regex.parts))
    if regex.kind == "many":
        return then(behind(regex.parts[0], char), regex)
    if regex.kind == "then":
        first, second = regex.parts
        rest = then(behind(first, char), second)
        return either(rest, behind(second, char)) if nullable(first) else rest
    return NONE


def behind_text(regex: Regex, text: bytes) -> Regex:
    for char in text:
        regex = behind(regex, char)
    return regex


def written(regex: Regex) -> str:
    """As libraries read it; letters and digits only."""
    if regex.kind == "chars":
        return "[" + "".join(map(chr, sorted(regex.chars))) + "]"
    if regex.kind == "or":
        return "(" + "|".join(map(written, regex.parts)) + ")"
    if regex.kind == "many":
        return f"({written(regex.parts[0])})*"
    return "".join(map(written, regex.parts))


def random_regex(dice, alphabet: bytes, depth: int = 3) -> Regex:
    """No byte is ever the only one that may come next, unless none need come."""
    way = dice.choice(["chars", "then", "or", "many", "then", "then"]) if depth else "chars"
    if way == "chars":
        return Regex("chars", frozenset(dice.sample(alphabet, dice.randint(2, min(9, len(alphabet))))))
    parts = [random_regex(dice, alphabet, depth - 1) for _ in range(1 if way == "many" else 2)]
    if way == "many":
        return parts[0] if nullable(parts[0]) else Regex("many", parts=(parts[0],))
    return then(*parts) if way == "then" else either(*parts)
