"""Compiles structured outputs to grammars of the library `llguidance`."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetop.structured.json_spacing import spaced
from treetop.structured.one_of import with_exclusive_branches
from treetop.structured.output_parser import OutputParser
from treetop.structured.reasoning import ANSWER, ReasoningLimit, before_answer, not_beginning
from treetop.structured.refusals import refused
from treetop.structured.structural_tags import lark_of
from treetop.types.constraint import JsonWhitespace, StructuredOutput
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_GBNF = 2**14
"""Characters: the library reads it in Python, in time by their square, some 0.1 s for these."""


class GrammarCompiler:
    """Makes parsers of structures for one model, on any thread. Its tokenizer is read when the first is asked for."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_ids: Sequence[int], whitespace: JsonWhitespace = "bounded"
    ) -> None:
        """whitespace: between tokens of JSON, where a structure does not say."""
        self.vocab_size, self._whitespace = vocab_size, whitespace
        self.eos_ids = tuple(token for token in dict.fromkeys(eos_ids) if token < vocab_size)
        self._folder = folder
        self._tokenizer: LLTokenizer | None = None
        self._others: dict[str, bytes] = {}

    def parser(self, asked: StructuredOutput) -> OutputParser:
        """A parser at the start of an output of this structure. It may take seconds and much memory.

        Raises InputError for what no grammar can be made of, or a tokenizer that the library cannot read.
        """
        tokenizer, reasoning = self.load(), asked.reasoning
        limit = None
        if reasoning is not None and reasoning.budget is not None:
            name = "" if reasoning.again is None else reasoning.again[1]
            if name not in self._others:
                self._others[name] = not_beginning(name.encode(), tokenizer, self.vocab_size) if name else b""
            limit = ReasoningLimit(reasoning, tokenizer, self._others[name])
        return OutputParser(None if asked.kind == "text" else self._matcher(asked), limit)

    def _matcher(self, asked: StructuredOutput) -> "LLMatcher":
        tokenizer = self.load()
        from llguidance import LLMatcher  # noqa: PLC0415  # `load` has found it

        grammars = [self._members_of(asked)]
        if asked.reasoning is not None and asked.reasoning.again is None:
            first = before_answer(asked.reasoning, self._special_id)
            grammars = [{"lark_grammar": first}, {"name": ANSWER, **grammars[0]}]
        try:
            whole = json.dumps({"grammars": grammars})
        except RecursionError:
            raise refused(f"{asked.kind}: too deep") from None
        matcher = LLMatcher(tokenizer, whole, log_level=0, limits=_limits())
        if matcher.is_error():
            raise refused(matcher.get_error())
        return matcher

    def _members_of(self, asked: StructuredOutput) -> dict[str, Any]:
        """The structure as members of one of the library's grammars. Raises InputError for one that it cannot read."""
        from llguidance import LLMatcher  # noqa: PLC0415  # `load` has found it

        def with_space(schema: Any) -> Any:
            return spaced(schema, self._whitespace, asked.whitespace)

        if asked.kind == "json_object":
            return {"json_schema": with_space({"type": "object"})}
        if asked.kind == "json_schema":
            try:
                return {"json_schema": with_space(with_exclusive_branches(json.loads(asked.spec)))}
            except (ValueError, RecursionError) as error:
                raise refused(f"json_schema cannot be read as JSON: {error}") from None
        if asked.kind == "regex":
            lark = json.loads(LLMatcher.grammar_from_regex(asked.spec))["grammars"][0]["lark_grammar"]
        elif asked.kind == "choice":  # one lexeme, so that its size is the text's and not the number of rules
            texts = " | ".join(map(json.dumps, _choices(asked.spec)))
            lark = f"start: CHOICE\nCHOICE: {texts}"
        elif asked.kind == "lark":
            lark = asked.spec
        else:
            try:
                is_grammar = asked.kind == "grammar"
                lark = _lark(asked.spec) if is_grammar else lark_of(asked.spec, self._special_id, with_space)
            except ValueError as error:
                raise refused(str(error)) from None
        return {"lark_grammar": lark}

    def _special_id(self, text: str) -> int | None:
        """The special token that a text is, if it is one."""
        tokenizer = self.load()
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return int(ids[0]) if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None

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


def _lark(spec: str) -> str:
    """A grammar in Lark's syntax, made of GBNF if it is no such. Raises ValueError for neither."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax  # noqa: PLC0415  # an extra

    if is_lark_syntax(spec):
        return spec
    if len(spec) > _MAX_GBNF:
        raise ValueError(f"grammar: {len(spec)} characters of GBNF, at most {_MAX_GBNF} are read; Lark may be longer")
    try:
        return str(gbnf_to_lark(spec))
    except RecursionError:
        raise ValueError("grammar: too deep") from None
    except Exception as error:  # the library's own, and what it meets in a text that is no grammar
        raise ValueError(f"grammar: neither Lark nor GBNF: {error}") from None


def check_installed() -> None:
    """Raise InputError without the library."""
    if importlib.util.find_spec("llguidance") is None:
        raise refused(f"it needs llguidance: install {DISTRIBUTION}[serve]")


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
