"""Structures as token constraints, by the `llguidance` library: a parser of its own for each request."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammars:
    """Makes constraints for one model. Its tokenizer is read when the first is asked for."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._eos_ids = [token for token in dict.fromkeys(eos_ids) if token < vocab_size]
        self._tokenizer: LLTokenizer | None = None

    def constraint(self, asked: StructuredOutput) -> "GrammarConstraint":
        """Raises InputError for what no grammar can be made of, or a tokenizer that the library cannot read."""
        grammar = grammar_of(asked)
        from llguidance import LLMatcher  # noqa: PLC0415  # `grammar_of` has found it

        matcher = LLMatcher(self._read(), grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return GrammarConstraint(matcher, self._vocab_size, self._eos_ids)

    def _read(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance import LLTokenizer  # noqa: PLC0415  # an extra

            try:
                text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids or None)
            except Exception as error:  # the library raises ValueError and others
                raise _refused(f"{self._folder}/tokenizer.json cannot be used: {error}") from None
        return self._tokenizer


class GrammarConstraint:
    """A parser that follows one output. See `TokenConstraint`."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._size, self._eos_ids = matcher, -(-vocab_size // 8), frozenset(eos_ids)

    def allowed(self, new_ids: Sequence[int]) -> bytes:
        if not self._matcher.consume_tokens(list(new_ids)):
            raise _refused(self._matcher.get_error())
        if not self._eos_ids.isdisjoint(new_ids):  # it was to be ignored
            return b""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        return mask[: self._size]  # it is padded to words


def check_structure(asked: StructuredOutput | None) -> None:
    """Raise InputError for what no grammar can be made of. It may take a second."""
    if asked is not None:
        grammar = grammar_of(asked)
        from llguidance import LLMatcher  # noqa: PLC0415  # an extra

        problem = LLMatcher.validate_grammar(grammar)
        if problem and not problem.startswith("WARNING"):
            raise _refused(problem)


def grammar_of(asked: StructuredOutput) -> str:
    """What the library reads. Raises InputError for a structure that it cannot."""
    try:
        from llguidance import LLMatcher  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        raise _refused("it needs llguidance: install treetop[serve]") from None
    if asked.kind == "regex":
        return str(LLMatcher.grammar_from_regex(asked.spec))
    if asked.kind == "choice":
        return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, _choices(asked.spec)))}"))
    try:
        return str(
            LLMatcher.grammar_from_json_schema(asked.spec if asked.kind == "json_schema" else '{"type":"object"}')
        )
    except ValueError as error:
        raise _refused(str(error)) from None


def _choices(spec: str) -> list[str]:
    try:
        choices = json.loads(spec)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise _refused("choice needs a JSON list of texts that are not empty")
    return choices


def _refused(why: str) -> InputError:
    return InputError(f"structured_output: {' '.join(why.split())[:300]}")
