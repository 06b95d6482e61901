"""Reasoning before an answer: in a grammar the text before what has the structure, and how many tokens it may take.

output: opens? --reasoning, any text--> closes --> answer
                        ^--------- again --'

Both find where it ends in the bytes of the output, as `parsers/thinking.py` does in its text, however the tokens
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

    def __init__(self, reasoning: Reasoning, tokenizer: "LLTokenizer", others: bytes) -> None:
        """others: `not_beginning` with the name of what begins again, if anything does.

        Raises InputError if the tokenizer cannot write the mark that closes.
        """
        assert reasoning.budget is not None
        self._tokenizer, self._budget, self._others = tokenizer, reasoning.budget, others
        self._opens, self._closes = reasoning.opens.encode(), reasoning.closes.encode()
        self._ends = (self._closes, *(each.encode() for each in reasoning.also_closes))
        self._kept = max(_OPEN_BYTES, *(len(end) - 1 for end in self._ends))
        self._next = [self._first_of(self._closes[at:], at == 0) for at in range(len(self._closes))]
        self._spelled: dict[int, bytes] = {}
        self.start = Thought(None) if reasoning.opens else Thought(True)
        before, name, behind = reasoning.again or ("", "", "")
        self._before, self._again = before.encode(), (before + name + behind).encode()

    def after(self, thought: Thought, token: int) -> Thought:
        """Behind one more token."""
        if thought.inside is False and not self._again:
            return thought
        text = thought.end + self._bytes(token)
        if thought.inside is False:
            return self._outside(text, thought.spent)
        if thought.inside is None:
            text = text.lstrip(_SPACES)
            if self._opens.startswith(text) and text != self._opens:
                return Thought(None, 0, text)
            if not text.startswith(self._opens):
                return self._outside(text, 0)
            return self._inside(text[len(self._opens) :], 0)
        return self._inside(text, thought.spent + 1)

    def _outside(self, text: bytes, spent: int) -> Thought:
        """Behind text that is no reasoning, or not any more."""
        if not self._again:
            return Thought(False)
        _, begins, behind = text.partition(self._again)
        return self._inside(behind, spent) if begins else Thought(False, spent, text[1 - len(self._again) :])

    def _inside(self, text: bytes, spent: int) -> Thought:
        if any(end in text for end in self._ends):
            return Thought(False, max(spent - 1, 0) if self._again else 0)  # the mark is none of it
        return Thought(True, spent, text[-self._kept :])

    def forced(self, thought: Thought) -> int | None:
        """The one token that comes next; None if the budget forces none."""
        if not thought.inside or thought.spent < self._budget:
            return None
        begun = next(size for size in range(len(self._closes) - 1, -1, -1) if thought.end.endswith(self._closes[:size]))
        if not begun and thought.spent < self._budget + _OPEN_BYTES and _is_open(thought.end):
            return None
        return self._next[begun]

    def others(self, thought: Thought) -> bytes | None:
        """Tokens that may come next where one may not that begins reasoning again, as a mask; None for all."""
        is_spent = thought.inside is False and thought.spent >= self._budget
        return self._others if self._again and is_spent and thought.end.endswith(self._before) else None

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


def not_beginning(name: bytes, tokenizer: "LLTokenizer", vocab_size: int) -> bytes:
    """All tokens but those that begin a name, or begin with it, as a mask. It takes some 0.1 s."""
    allowed = bytearray(b"\xff" * -(-vocab_size // 8))
    for token in range(vocab_size):
        text = bytes(tokenizer.decode_bytes([token]))
        if text and (text.startswith(name) or name.startswith(text)):
            allowed[token // 8] &= ~(1 << token % 8) & 0xFF
    if vocab_size % 8:
        allowed[-1] &= (1 << vocab_size % 8) - 1
    return bytes(allowed)


def _is_open(text: bytes) -> bool:
    """Whether a text ends inside a character of UTF-8."""
    return codecs.utf_8_decode(text, "replace", False)[1] < len(text)
