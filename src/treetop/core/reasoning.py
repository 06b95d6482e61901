"""Reasoning before an answer: in a grammar the text before what has the structure, and how many tokens it may take.

output: opens? --reasoning, any text--> closes --> answer

Both find where it ends in the bytes of the output, as `server/parsers/thinking.py` does in its text, however the tokens
cut it. A budget that is spent forces tokens one by one; draft trees meet it as a mask of one bit a node.

Source of what waits for a character to be complete: llama.cpp, `common/reasoning-budget.h`.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from treetop.types.constraint import Reasoning
from treetop.types.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPACES = b" \t\r\n"
_OPEN_BYTES = 3
"""Bytes of a character that is not complete, at most."""
ANSWER = "answer"
"""The name of the grammar that follows."""


def before_answer(reasoning: Reasoning, special_id: Callable[[str], int | None]) -> str:
    """A grammar in Lark's syntax: reasoning, then that of the name `ANSWER`. special_id: of a text that is a special
    token.

    A mark that is a special token may also be written as text, which reads the same.
    """
    closes, opens = reasoning.closes, reasoning.opens
    lines = [r"GAP: /\n{0,2}/", rf"closed[lazy]: /(.|\n)*/ {_quoted(closes)}"]
    thought = "closed"
    if (closing := special_id(closes)) is not None:
        thought = f"(closed | OPEN <[{closing}]>)"
        lines.append(rf"OPEN: /(.|\n)*/ & ~/(.|\n)*{_pattern(closes)}(.|\n)*/")
    start = f"{thought} GAP @{ANSWER}"
    if opens:
        opening = special_id(opens)
        begins = _quoted(opens) if opening is None else f"({_quoted(opens)} | <[{opening}]>)"
        start = f"(GAP {begins} {thought} GAP)? @{ANSWER}"
    return "\n".join(("%llguidance {}", f"start: {start}", *lines))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


class Thought(NamedTuple):
    """How far an output has come. inside: whether it reasons now; None while it may still begin to.

    spent: tokens of reasoning.
    end: of the bytes so far what may begin a mark.
    """

    inside: bool | None
    spent: int = 0
    end: bytes = b""


class ReasoningLimit:
    """Says which token a spent budget forces, for all outputs of one structure."""

    def __init__(self, reasoning: Reasoning, tokenizer: "LLTokenizer") -> None:
        """Raises InputError if the tokenizer cannot write the mark that closes."""
        assert reasoning.budget is not None
        self._tokenizer, self._budget = tokenizer, reasoning.budget
        self._opens, self._closes = reasoning.opens.encode(), reasoning.closes.encode()
        self._ends = (self._closes, *(each.encode() for each in reasoning.also_closes))
        self._kept = max(_OPEN_BYTES, *(len(end) - 1 for end in self._ends))
        self._next = [self._first_of(self._closes[at:], at == 0) for at in range(len(self._closes))]
        self._spelled: dict[int, bytes] = {}
        self.start = Thought(None) if reasoning.opens else Thought(True)

    def after(self, thought: Thought, token: int) -> Thought:
        """Behind one more token."""
        if thought.inside is False:
            return thought
        text = thought.end + self._bytes(token)
        if thought.inside is None:
            text = text.lstrip(_SPACES)
            if self._opens.startswith(text) and text != self._opens:
                return Thought(None, 0, text)
            if not text.startswith(self._opens):
                return Thought(False)
            return self._inside(text[len(self._opens) :], 0)
        return self._inside(text, thought.spent + 1)

    def _inside(self, text: bytes, spent: int) -> Thought:
        if any(end in text for end in self._ends):
            return Thought(False)
        return Thought(True, spent, text[-self._kept :])

    def forced(self, thought: Thought) -> int | None:
        """The one token that comes next; None if the budget forces none."""
        if not thought.inside or thought.spent < self._budget:
            return None
        begun = next(size for size in range(len(self._closes) - 1, -1, -1) if thought.end.endswith(self._closes[:size]))
        if not begun and thought.spent < self._budget + _OPEN_BYTES and _is_open(thought.end):
            return None
        return self._next[begun]

    def _bytes(self, token: int) -> bytes:
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = bytes(self._tokenizer.decode_bytes([token]))
        return known

    def _first_of(self, text: bytes, is_whole: bool) -> int:
        """The first token of a text's end. is_whole: special tokens may be in it."""
        tokenizer = self._tokenizer
        ids = tokenizer.tokenize_bytes(text)
        if is_whole:
            ids = tokenizer.tokenize_str(text.decode(), parse_special=True)
        if bytes(tokenizer.decode_bytes(ids)) != text:
            ids = tokenizer.greedy_tokenize(text.decode(errors="replace"))
        if bytes(tokenizer.decode_bytes(ids)) != text:
            raise InputError(f"structured_output: this model has no tokens for {text.decode(errors='replace')!r}")
        return ids[0]


def _is_open(text: bytes) -> bool:
    """Whether a text ends inside a character of UTF-8."""
    return codecs.utf_8_decode(text, "replace", False)[1] < len(text)
