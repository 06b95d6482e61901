"""Calls of outputs that are held to a structure: the arguments alone of a named tool, or a list of calls.

These are the forms that vLLM gives a named tool choice and `required`. A text in Lark's syntax cannot stand in JSON,
where it would be escaped, so one call of such a tool may come in place of the list:

    NAME, the end of a line, the text as it is, to the end of the output
"""

import json
from collections.abc import Mapping, Set
from typing import Any

from treetop.parsers.custom import custom_call
from treetop.parsers.json_call import json_calls
from treetop.parsers.json_text import json_value
from treetop.parsers.source import END, Markers, Steps, TextBuffer
from treetop.parsers.strict import written
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer

_LINE_END = Markers("\n")


def named_call(name: str) -> Reader:
    """The arguments of one call of this tool."""

    def read(source: TextBuffer, out: Writer) -> Steps[None]:
        yield from source.space()
        if (yield from source.peek()):
            out.start(name)
            if (yield from json_value(source, out.arguments)):
                out.end()
        yield from source.until(END, lambda _: None)

    return read


def listed_calls(source: TextBuffer, out: Writer) -> Steps[None]:
    """A list of objects, each with a name and parameters."""
    yield from json_calls(source, out)
    yield from source.until(END, lambda _: None)


def listed_or_raw(names: Set[str]) -> Reader:
    """The same, or one call as it is of one of these tools. No name begins as a list does."""

    def read(source: TextBuffer, out: Writer) -> Steps[None]:
        if (yield from source.at("[")):
            yield from listed_calls(source, out)
            return
        pieces = list[str]()
        yield from source.until(_LINE_END, pieces.append)
        name = "".join(pieces)
        yield from custom_call(name)(source, out) if name in names else source.until(END, lambda _: None)

    return read


def listed_or_raw_grammar(listed: Mapping[str, Any] | None, raw: Mapping[str, str]) -> str:
    """A grammar in Lark's syntax of what `listed_or_raw` reads.

    listed: the schema of the list; None if no tool's calls may stand in one. raw: grammars by the names of their tools;
    each is read by itself, so that their rules may have the same names.
    """
    ways = [] if listed is None else [f"%json {written(listed)}"]
    ways += [f"{json.dumps(name + _LINE_END.words[0])} %lark {{\n{grammar}\n}}" for name, grammar in raw.items()]
    return f"%llguidance {{}}\nstart: {' | '.join(ways)}"
