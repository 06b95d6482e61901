"""Calls of outputs that are held to a structure: the arguments alone of a named tool, or a list of calls.

These are the forms that vLLM gives a named tool choice and `required`.
"""

from treetop.parsers.json_call import json_calls
from treetop.parsers.json_text import json_value
from treetop.parsers.source import END, Steps, TextBuffer
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer


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
