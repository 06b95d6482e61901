"""Calls of custom tools, whose argument is a text and no object: OpenAI's `custom` tools.

Source: OpenAI's function calling guide, "Custom tools". A model writes such a call as any other, with one argument.
"""

import json
import re
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from treetop.parsers.events import Arguments, CallEnd, CallStart, Event, Parser
from treetop.parsers.json_text import escaped
from treetop.parsers.source import END, Steps, TextBuffer
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer

INPUT = "input"
"""The name of the one argument."""


def parameters(regex: str | None = None) -> dict[str, Any]:
    """A schema of the arguments of a custom tool. regex: of the whole text, in llguidance's dialect; None for any."""
    text = {"type": "string"} if regex is None else {"type": "string", "pattern": f"^(?:{regex})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


_HALF = r"\\(?:u[0-9a-fA-F]{0,3})?"
_HALF_ESCAPE = re.compile(rf"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{{2}}(?:{_HALF})?|{_HALF})\Z")
"""At the end of arguments that were cut off; of a pair of surrogates too. Group 1: whole escapes before it."""


class CustomCalls:
    """A parser whose calls of custom tools have the text that they give as their arguments.

    That text comes at once, when the call has ended: an argument is escaped JSON until then.
    """

    def __init__(self, parser: Parser, names: Set[str]) -> None:
        """parser: of the model's format. names: of the custom tools."""
        self._parser, self._names = parser, names
        self._open: dict[int, list[str]] = {}

    def push(self, text: str) -> list[Event]:
        return [*self._read(self._parser.push(text))]

    def finish(self, stopped: bool = True) -> list[Event]:
        events = [*self._read(self._parser.finish(stopped))]
        return [*events, *(event for index in [*self._open] for event in self._input(index))]

    def _read(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, CallStart) and event.name in self._names:
                self._open[event.index] = []
                yield replace(event, is_custom=True)
            elif isinstance(event, Arguments) and event.index in self._open:
                self._open[event.index].append(event.text)
            else:
                if isinstance(event, CallEnd) and event.index in self._open:
                    yield from self._input(event.index)
                yield event

    def _input(self, index: int) -> Iterator[Event]:
        if text := input_of("".join(self._open.pop(index))):
            yield Arguments(index, text, is_custom=True)


def input_of(arguments: str) -> str:
    """The text that arguments give, whole or cut off; they themselves, if they are nothing of the kind."""
    for whole in (arguments, arguments + "}", _HALF_ESCAPE.sub(r"\1", arguments) + '"}'):
        try:
            said = json.loads(whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and isinstance(said.get(INPUT), str):
            return str(said[INPUT])
    return arguments


def arguments_of(text: str) -> str:
    """The arguments of a call that gives this text."""
    return f'{{"{INPUT}": "{escaped(text)}"}}'


def custom_call(name: str) -> Reader:
    """An output that is the input of one call of this tool, as one that is held to a grammar."""

    def read(source: TextBuffer, out: Writer) -> Steps[None]:
        out.start(name)
        out.arguments(f'{{"{INPUT}": "')
        yield from source.until(END, lambda text: out.arguments(escaped(text)))
        if source.stopped:
            out.arguments('"}')
            out.end()

    return read
