"""The parser that drives a format's reader."""

from collections.abc import Callable

from treetop.parsers.events import Content, Event
from treetop.parsers.source import Steps, TextBuffer
from treetop.parsers.writer import Writer, new_call_id

Reader = Callable[[TextBuffer, Writer], Steps[None]]
"""Reads an output to its end."""


class TextParser:
    """A `Parser` that a reader makes."""

    def __init__(self, reader: Reader, most_calls: int | None = None, new_id: Callable[[], str] = new_call_id) -> None:
        """most_calls, new_id: as `Writer` has them."""
        self._source, self._writer = TextBuffer(), Writer(most_calls, new_id)
        self._steps = reader(self._source, self._writer)

    def push(self, text: str) -> list[Event]:
        if text:
            self._source.feed(text)
            next(self._steps)  # a reader ends only at the text's end
        return self._writer.take()

    def finish(self, stopped: bool = True) -> list[Event]:
        self._source.end(stopped)
        for _ in self._steps:
            raise AssertionError("a reader waits behind the end of the text")
        self._writer.finish()
        return self._writer.take()


class PlainText:
    """A `Parser` to which all text is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self, stopped: bool = True) -> list[Event]:
        return []
