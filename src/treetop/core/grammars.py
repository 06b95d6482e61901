"""Grammars of structures, as the library `llguidance` reads them, and what it says of them in plain words."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetop.core.one_of import with_exclusive_branches
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MOST_WORDS = 300
"""Characters of an error that is handed on."""
_TOO_COMPLEX = ("fuel exhausted", "too many", "TooComplex", "max is", "precomputation failed", "lexer error")
"""What the library says where one of its limits ends a structure."""


class Grammars:
    """Makes parsers of structures for one model, on any thread. Its tokenizer is read when the first is asked for."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(token for token in dict.fromkeys(eos_ids) if token < vocab_size)
        self._folder = folder
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, asked: StructuredOutput) -> "LLMatcher":
        """A parser at the start of a text of this structure. It may take seconds and much memory.

        Raises InputError for what no grammar can be made of, or a tokenizer that the library cannot read.
        """
        grammar = grammar_of(asked)
        from llguidance import LLMatcher  # noqa: PLC0415  # `grammar_of` has found it

        matcher = LLMatcher(self.load(), grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise refused(matcher.get_error())
        return matcher

    def load(self) -> "LLTokenizer":
        """The tokenizer. Raises InputError if the library cannot read it."""
        if self._tokenizer is None:
            check_installed()
            from llguidance import LLTokenizer  # noqa: PLC0415  # an extra

            try:
                text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                ends = [*self.eos_ids] or None
                self._tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=ends)
            except Exception as error:  # the library raises ValueError and others
                raise refused(f"{self._folder}/tokenizer.json cannot be used: {error}") from None
        return self._tokenizer


def next_mask(matcher: "LLMatcher", new_ids: Sequence[int]) -> bytes:
    """Which tokens may follow, once the text has grown by these: bit t % 8 of byte t // 8 for token t.

    Raises InputError where the library gives up.
    """
    if new_ids and not matcher.consume_tokens(list(new_ids)):
        raise refused(matcher.get_error())
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise refused(matcher.get_error())
    return mask


def grammar_of(asked: StructuredOutput) -> str:
    """What the library reads. Raises InputError for a structure that it cannot."""
    check_installed()
    from llguidance import LLMatcher  # noqa: PLC0415  # an extra

    if asked.kind == "regex":
        return str(LLMatcher.grammar_from_regex(asked.spec))
    if asked.kind == "choice":  # one lexeme, so that its size is the text's and not the number of rules
        texts = " | ".join(map(json.dumps, _choices(asked.spec)))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    schema = with_exclusive_branches(asked.spec) if asked.kind == "json_schema" else '{"type":"object"}'
    try:
        return str(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        raise refused(str(error)) from None


def check_installed() -> None:
    """Raise InputError without the library."""
    if importlib.util.find_spec("llguidance") is None:
        raise refused("it needs llguidance: install treetop[serve]")


def refused(problem: str) -> InputError:
    """An error of the library, without its inner state."""
    return InputError(f"structured_output: {_in_words(problem)}")


def _in_words(problem: str) -> str:
    for end in ("<state>", "<non-verbose/>", "<backtrace>", "<grammar>"):
        problem = problem.split(end, maxsplit=1)[0]
    said = " ".join(problem.split())[:_MOST_WORDS]
    if "NoExtension" in said:
        return "no text has this structure"
    if "oneOf constraints are not supported" in said:
        return (
            "oneOf: its branches must exclude one another; give each a property with a const of its own, or write anyOf"
        )
    if any(word in said for word in _TOO_COMPLEX):
        return f"the structure is too complex ({said})"
    if said.startswith("panic"):
        return f"the structure cannot be read ({said})"
    return said


def _limits() -> "LLParserLimits":
    """Of the work for a structure, and for one token of it. They are the library's own, but may not change with it."""
    from llguidance import LLParserLimits  # noqa: PLC0415  # an extra

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _choices(spec: str) -> list[str]:
    try:
        choices = json.loads(spec)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise refused("choice needs a JSON list of texts that are not empty")
    return choices
