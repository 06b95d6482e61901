"""Text that comes in pieces, read by generators: each step waits, with a bare `yield`, for as much text as it needs.

A format is a generator function over a `TextBuffer`. It never sees where a piece ends, so it cannot depend on that.
What is held back is shorter than the longest marker, so the work is linear in the text however it is cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Reads a source and returns a result; each `yield` waits for more text, or for its end."""
Take = Callable[[str], object]
"""Is given text, piece by piece."""

_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Words that end what comes before them. None begins another: then the first found is the one that is meant."""

    def __init__(self, *words: str) -> None:
        self.words = words
        heads = {word[:end] for word in words for end in range(1, len(word))} - {*words}
        whole, begun = _any_of(words), _any_of(sorted(heads, key=len, reverse=True))
        self.pattern = re.compile(rf"({whole})|{begun}\Z")
        """Finds the first of the words, as group 1, or the text's end that begins one."""


def _any_of(words: "tuple[str, ...] | list[str]") -> str:
    return f"(?:{'|'.join(map(re.escape, words)) or '(?!)'})"


END = Markers()
"""Nothing but the end of the text."""


class TextBuffer:
    """The text that has come and has not been read."""

    def __init__(self) -> None:
        self._text, self._at, self.ended = "", 0, False
        self.stopped = False
        """The text has ended, and where its writer wanted it to: what is open may be closed."""
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, stopped: bool) -> None:
        """No more comes. stopped: the writer wanted to say no more; else it was cut off."""
        self.ended, self.stopped = True, stopped

    def keep(self) -> None:
        """From now on, keep what is read, for `kept`."""
        self._kept = []

    def kept(self) -> str:
        """What has been read since `keep`; no more is kept."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    def until(self, markers: Markers, take: Take) -> Steps[str | None]:
        """Read up to the first of the markers and past it. Returns it, None at the text's end."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            marker = found[1] if found is not None else None
            end = found.start() if found is not None else len(self._text)
            if marker is None and self.ended:
                end = len(self._text)
            if end > self._at:
                take(self._read(end))
            if marker is not None or self.ended:
                self._read(self._at + len(marker or ""))
                return marker
            yield

    def through(self, pattern: re.Pattern[str], take: Take) -> Steps[str]:
        """Read up to the first match of a pattern of one character, and it. Returns it, "" at the text's end."""
        while True:
            found = pattern.search(self._text, self._at)
            end = found.end() if found is not None else len(self._text)
            if end > self._at:
                take(self._read(end))
            if found is not None or self.ended:
                return found[0] if found is not None else ""
            yield

    def before(self, pattern: re.Pattern[str], take: Take) -> Steps[None]:
        """As `through`, without the character."""
        last = yield from self.through(pattern, lambda text: take(pattern.sub("", text)))
        self.back(last)

    def space(self) -> Steps[str]:
        """Read white space."""
        pieces = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None  # it matches nothing, too
            pieces.append(self._read(found.end()))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def peek(self) -> Steps[str]:
        """The next character, which stays; "" at the text's end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def word(self, *words: str) -> Steps[str]:
        """Read the one of the words that comes next, "" if none does. None of them begins another."""
        longest = max(map(len, words))
        while True:
            rest = self._text[self._at : self._at + longest]
            for word in words:
                if rest.startswith(word):
                    return self._read(self._at + len(word))
            if self.ended or not any(word.startswith(rest) for word in words):
                return ""
            yield

    def at(self, *words: str) -> Steps[str]:
        """The one of the words that comes next, which stays; "" if none does."""
        found = yield from self.word(*words)
        self.back(found)
        return found

    def one(self, take: Take) -> Steps[bool]:
        """Read a character. Returns whether there was one."""
        if not (yield from self.peek()):
            return False
        take(self._read(self._at + 1))
        return True

    def back(self, marker: str) -> None:
        """The marker that was read last comes again."""
        self._at -= len(marker)
        if self._kept and marker:
            self._kept[-1] = self._kept[-1].removesuffix(marker)

    def again(self, text: str) -> None:
        """A text that has been read comes again, before all others."""
        self._text, self._at = text + self._text[self._at :], 0

    def _read(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], end
        if self._kept is not None:
            self._kept.append(piece)
        return piece
