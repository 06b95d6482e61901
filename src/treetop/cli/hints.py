"""What a command line says of words that it does not know: what was meant, or why there is no such option."""

import re
import sys
from collections.abc import Iterable, Sequence

from treetop.types.errors import close_name

_WHY = {
    "--lora-paths": "--lora-modules NAME=FOLDER names adapters",
    "--max-loras-per-batch": "--max-loras says how many adapters are on the device",
    "--max-loaded-loras": "--max-cpu-loras says how many adapters may be loaded",
    "--model": "the model is a word without an option: treetop generate MODEL",
    "--model-path": "the model is a word without an option: treetop generate MODEL",
    "--quantization": "the format of weights is read from the model folder; `treetop quantize` writes others",
    "--speculative-ngram-graft": "grafts are gone; --speculative-algorithm NGRAM looks drafts up in a request's text",
    "--trust-remote-code": "no code of a model folder is ever run; `treetop models` lists what loads",
}
"""Options of other engines that have no like here, and those of ours that are gone."""
_LONGEST_WORD, _LONGEST = 200, 2000


def unknown_options(given: Sequence[str], known: Iterable[str]) -> str:
    """The error of words that are left over."""
    first = next(word for word in given if word.startswith("-")).split("=")[0]
    hint = _WHY.get(first) or _did_you_mean(first, known)
    return f"unrecognized arguments: {' '.join(given)}" + (f" ({hint})" if hint else "")


def with_hint(message: str) -> str:
    """An error of argparse: where a word is none of several, the one that is near it is named."""
    found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message, re.DOTALL)
    hint = "" if found is None else _did_you_mean(found[1], re.findall(r"[\w.-]+", found[2]))
    return f"{message}; {hint}" if hint else message


def short(message: str) -> str:
    """The same with long words, and itself, cut in the middle."""
    message = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: _cut(word[0], _LONGEST_WORD), message)
    return _cut(message, _LONGEST)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def is_read_by_a_person() -> bool:
    """Whether errors go to a terminal. What programs read of an error does not grow by guesses."""
    return sys.stderr.isatty()


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    meant = close_name(given, known) if is_read_by_a_person() else None
    return f"did you mean {meant}?" if meant else ""
