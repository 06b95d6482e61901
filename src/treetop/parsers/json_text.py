"""JSON as models write it, read piece by piece and handed on as JSON.

What is JSON goes through as it is. Else Python's quotes and words, raw line ends in strings, commas too many or too
few, names and texts without quotes, and brackets that do not fit are put right; what a tag of the format or the
output's end leaves open is closed.
"""

import json
import re
from typing import NamedTuple, NoReturn

from treetop.parsers.source import Markers, Steps, Take, TextBuffer

_BARE = re.compile(r"""[,{}\[\]\n<"]""")
_BARE_KEY = re.compile(r"[:,}\]\s<]")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"{": "}", "[": "]"}
_OPENS = {closing: opening for opening, closing in _CLOSES.items()}


class Ends(NamedTuple):
    """Tags that end a value. in_strings: also where they stand in a string, for no text has them."""

    tags: tuple[str, ...] = ()
    in_strings: bool = False


NO_ENDS = Ends()


def json_value(source: TextBuffer, take: Take, ends: Ends = NO_ENDS, quote: str = "") -> Steps[bool]:
    """Read a value. Returns whether it is complete; at a stop it is.

    ends: tags of the format, which stay. quote: what the format has around texts in place of quotes, without escapes.
    Nothing is taken where no value begins.
    """
    return (yield from _Value(source, take, ends, quote).read())


def mended(text: str) -> str:
    """The JSON of a text that is meant to be."""
    source, pieces = TextBuffer(), list[str]()
    source.feed(text)
    source.end(True)
    for _ in json_value(source, pieces.append):
        raise AssertionError("it waits behind the end of the text")
    return "".join(pieces)


def scalar(text: str) -> str:
    """The JSON of a word without quotes."""
    said = OF_PYTHON.get(text, text)
    try:
        json.loads(said, parse_constant=refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return said


def escaped(text: str) -> str:
    """A piece of a string, as JSON has it between its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def refuse(name: str) -> NoReturn:
    """Of what Python's library takes and JSON has not: NaN and the infinities."""
    raise ValueError(name)


class _Level:
    """An open bracket. wants: what comes next: a key, a colon, a value, or (after) a comma."""

    def __init__(self, bracket: str) -> None:
        self.bracket, self.wants = bracket, "key" if bracket == "{" else "value"


class _Value:
    """A value on its way through. Spaces and a comma wait in `_held` until it is known what follows them."""

    def __init__(self, source: TextBuffer, take: Take, ends: Ends, quote: str) -> None:
        self._source, self._take, self._ends, self._quote = source, take, ends, quote
        self._levels: list[_Level] = []
        self._num_open = {"{": 0, "[": 0}
        self._held = ""
        firsts = "".join({tag[0] for tag in ends.tags}) if ends.in_strings else ""
        self._inside = {mark: re.compile(rf"[{mark}\\\x00-\x1f{re.escape(firsts)}]") for mark in "\"'"}

    def read(self) -> Steps[bool]:
        source = self._source
        while True:
            self._held += yield from source.space()
            if self._ends.tags and (yield from source.at(*self._ends.tags)):
                return self._close_all()
            first = yield from source.peek()
            if first == "":
                return source.stopped and self._close_all()
            if not self._levels and first in ",:}]":
                return True
            done = yield from self._token(first)
            if done is False:
                return source.stopped and self._close_all()
            if not self._levels:
                return True

    def _token(self, first: str) -> Steps[bool]:
        """Read a token. Returns whether it came to its end."""
        source = self._source
        if self._quote and (yield from source.word(self._quote)):
            return (yield from self._quoted())
        if first in "\"'":
            yield from source.one(_nothing)
            return (yield from self._string(first))
        if first in "{[,:}]":
            yield from source.one(_nothing)
            self._mark(first)
            return True
        return (yield from self._word())

    def _mark(self, mark: str) -> None:
        level = self._levels[-1] if self._levels else None
        if mark in "{[":
            self._item(mark, False)
            self._levels.append(_Level(mark))
            self._num_open[mark] += 1
        elif mark in "}]":
            self._close(mark)
        elif level is not None and mark == ":" and level.wants == "colon":
            self._write(":")
            level.wants = "value"
        elif level is not None and mark == ",":
            self._complete(level)
            if level.wants == "after" and "," not in self._held:
                self._held += ","

    def _item(self, text: str, is_string: bool) -> None:
        """A key or a value begins with this text, with what is missing before it."""
        level = self._levels[-1] if self._levels else None
        if level is None:
            self._held = ""
        elif level.wants == "colon":
            self._take(":")
            level.wants = "value"
        elif level.wants == "after":
            if "," not in self._held:
                self._take("," if self._held else ", ")
            level.wants = "key" if level.bracket == "{" else "value"
        if level is not None and level.wants == "key" and not is_string:
            self._write('"": ')
            level.wants = "value"
        self._write(text)
        if level is not None:
            level.wants = "colon" if level.wants == "key" else "after"

    def _write(self, text: str) -> None:
        self._take(self._held + text)
        self._held = ""

    def _complete(self, level: _Level) -> None:
        """A key without a value gets one."""
        if level.wants == "colon":
            self._take(": null")
            level.wants = "after"
        elif level.wants == "value" and level.bracket == "{":
            self._take("null")
            level.wants = "after"

    def _close(self, bracket: str) -> None:
        """Close levels up to one of this bracket; nothing, if there is none."""
        if not self._num_open[_OPENS[bracket]]:
            return
        while self._levels:
            level = self._levels.pop()
            self._num_open[level.bracket] -= 1
            self._complete(level)
            self._held = self._held.replace(",", "")
            self._write(_CLOSES[level.bracket])
            if _CLOSES[level.bracket] == bracket:
                return

    def _close_all(self) -> bool:
        self._held = ""
        while self._levels:
            self._close(_CLOSES[self._levels[-1].bracket])
        return True

    def _string(self, mark: str) -> Steps[bool]:
        """Read a string behind its first quote."""
        source, take = self._source, self._take
        self._item('"', True)
        while True:
            yield from source.before(self._inside[mark], lambda text: take(text if mark == '"' else _doubled(text)))
            if self._ends.in_strings and (yield from source.at(*self._ends.tags)):
                take('"')
                return True
            pieces = list[str]()
            if not (yield from source.one(pieces.append)):
                self._take('"' if source.stopped else "")
                return False
            if pieces[0] == mark:
                take('"')
                return True
            if pieces[0] == "\\":
                take((yield from self._escape()))
            else:
                take(escaped(pieces[0]))

    def _escape(self) -> Steps[str]:
        """What stands for an escape, read behind its backslash; nothing, if it was cut off."""
        pieces = list[str]()
        if not (yield from self._source.one(pieces.append)):
            return ""
        letter = pieces[0]
        if letter in _ESCAPES:
            return "\\" + letter
        if letter != "u":
            return letter if letter == "'" else "\\n" if letter == "\n" else "\\\\" + escaped(letter)
        digits = list[str]()
        while len(digits) < 4 and (yield from self._source.peek()) in _HEX:
            yield from self._source.one(digits.append)
        if len(digits) == 4:
            return "\\u" + "".join(digits)
        return "\\\\u" + "".join(digits) if (yield from self._source.peek()) else ""

    def _quoted(self) -> Steps[bool]:
        """Read a text between the format's own quotes, behind the first."""
        source = self._source
        self._item('"', True)
        tags = self._ends.tags if self._ends.in_strings else ()
        found = yield from source.until(Markers(self._quote, *tags), lambda text: self._take(escaped(text)))
        if found is None:
            self._take('"' if source.stopped else "")
            return False
        source.back("" if found == self._quote else found)
        self._take('"')
        return True

    def _word(self) -> Steps[bool]:
        """Read a word without quotes: a number, a constant, or a text."""
        source, pieces = self._source, list[str]()
        level = self._levels[-1] if self._levels else None
        is_key = level is not None and level.bracket == "{" and level.wants in ("key", "after")
        yield from source.one(pieces.append)
        yield from source.before(_BARE_KEY if is_key else _BARE, pieces.append)
        if not (yield from source.peek()) and not source.stopped:
            return False
        text = "".join(pieces)
        word = text.rstrip()
        self._item(json.dumps(word, ensure_ascii=False) if is_key else scalar(word), is_key)
        self._held = text[len(word) :]
        return True


def _nothing(text: str) -> None:
    """Takes what is written otherwise."""


def _doubled(text: str) -> str:
    return text.replace('"', '\\"')
