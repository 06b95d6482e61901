"""Calls of Llama 3.1 to 3.3: an output that is a JSON object, or several behind `;`, perhaps behind `<|python_tag|>`.

    {"name": "f", "parameters": {"a": 1}}

An object that calls no tool of the request is content; so is one within a list or another object. Text may come before
and between. Source: the chat template of meta-llama/Llama-3.1-8B-Instruct.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_call import CallRules, json_call
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

TAG = "<|python_tag|>"
_BEGIN = Markers("{", TAG)


def llama3_json(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    rules, before = CallRules(tools.names, strict=True), _Before(out)
    while found := (yield from source.until(_BEGIN, before.take)):
        source.keep()
        source.back(found)
        yield from source.word(TAG)
        yield from source.space()
        is_inside = before.is_inside and bool((yield from source.word("{")))
        is_call = not is_inside and (yield from json_call(source, out, rules))
        text = source.kept()
        if not is_call:
            before.take(text)
            continue
        source.keep()
        yield from source.space()
        more = yield from source.word(";", ",")
        text = source.kept()
        before.take("" if more else text)


class _Before:
    """Content, of which the last two characters that are no white space say what an object behind them is."""

    def __init__(self, out: Writer) -> None:
        self._out = out
        self._last = ("", "")

    def take(self, text: str) -> None:
        self._out.content(text)
        said = text.rstrip()
        if said:
            self._last = (said[:-1].rstrip()[-1:] or self._last[1], said[-1])

    @property
    def is_inside(self) -> bool:
        """Whether it stands within another, or in a list."""
        return self._last[1] in ("[", "{", ",") or self._last == ('"', ":")
