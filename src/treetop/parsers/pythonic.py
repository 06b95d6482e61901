"""Calls as a list of Python's, of Llama 3.2 and Llama 4: an output that is such a list, perhaps between two marks.

    <|python_start|>[f(a=1, b="x"), g()]<|python_end|>

The brackets of the list may be missing. Any other output is content; so is a list that begins with no tool of the
request. An argument without a name is that of
the tool's parameter at its place.

Which templates ask for it: those that show the form as `[func_name1(params_name1=params_value1, ...), ...]` (Meta's
prompt for Llama 3.2, and vLLM's tool_chat_template_llama3.2_pythonic, _gemma3_pythonic and _toolace) or as
`[func_name1(param1=value1, ...), ...]` (its _llama4_pythonic). The templates in the folders of Llama 3.2 and 4
themselves ask for JSON. Source: the model card of meta-llama/Llama-3.2-3B-Instruct, the parsers pythonic and
llama4_pythonic in vLLM's documentation, and these files of its examples.
"""

import json
import re

from treetop.parsers.arguments import Tools, json_of_python
from treetop.parsers.source import END, Steps, Take, TextBuffer
from treetop.parsers.writer import Writer

START, STOP = WORDS = ("<|python_start|>", "<|python_end|>")
_NAME_END, _KEY_END = re.compile(r"[^A-Za-z0-9_.:/-]"), re.compile(r"[^A-Za-z0-9_]")
_BRACKET, _QUOTES = re.compile(r"[()\[\]{},'\"]"), {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}


def pythonic(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    source.keep()
    yield from source.space()
    yield from source.word(START)
    yield from source.space()
    listed = bool((yield from source.word("[")))
    separators, more = (",",) if listed else (",", ";"), True
    while more and (yield from python_call(source, out, tools)):
        yield from source.space()
        more = bool((yield from source.word(*separators))) or not listed
        if listed and not more and (yield from source.word("]")):
            yield from source.space()
            yield from source.word(STOP)
            source.kept()
            source.keep()
    out.content(source.kept())
    yield from source.until(END, out.content)


def python_call(source: TextBuffer, out: Writer, tools: Tools) -> Steps[bool]:
    """Read a call of one of the tools, behind spaces. Returns whether there was one, and it has come to its end.

    What has been read is kept: all that is no call, and nothing else.
    """
    yield from source.space()
    pieces = list[str]()
    last = yield from source.through(_NAME_END, pieces.append)
    name = "".join(pieces).removesuffix(last)
    if last != "(" or name not in tools.names:
        return False
    source.kept()
    out.start(name)
    done = yield from _Call(source, out, tools.parameters(name)).read()
    source.keep()
    return done


class _Call:
    """The arguments of one call."""

    def __init__(self, source: TextBuffer, out: Writer, names: list[str]) -> None:
        """names: of the tool's parameters, in their order."""
        self._source, self._out, self._names = source, out, names
        self._begun = ""

    def read(self) -> Steps[bool]:
        """Read up to the call's end. Returns whether it has come; a stop is one, too."""
        source, out, place = self._source, self._out, 0
        yield from source.space()
        if (yield from source.word(")")):
            out.end()
            return True
        while True:
            yield from source.space()
            name, value = (yield from self._key()), list[str]()
            if not name:
                name = self._names[place] if place < len(self._names) else str(place)
                value.append(self._begun)
            ended_by = yield from self._value(value.append)
            if not ended_by:
                return False
            text = "".join(value)[:-1]
            if text.strip() or ended_by == ",":  # but for a comma before the end
                out.arguments(f"{', ' if place else '{'}{json.dumps(name, ensure_ascii=False)}: {json_of_python(text)}")
                place += 1
            if ended_by == ")":
                out.arguments("}" if place else "{}")
                out.end()
                return True

    def _key(self) -> Steps[str]:
        """Read an argument's name; "" if it has none, and what has been read of its value is `_begun`."""
        source, pieces = self._source, list[str]()
        last = yield from source.through(_KEY_END, pieces.append)
        name = "".join(pieces).removesuffix(last)
        source.back(last)
        spaces = yield from source.space()
        if name and (yield from source.word("=")):
            yield from source.space()
            return name
        self._begun = name + spaces
        return ""

    def _value(self, take: Take) -> Steps[str]:
        """Read a value and the comma or bracket that ends it, which is returned; "" where it was cut off.

        At a stop what is open is closed.
        """
        open_brackets = list[str]()
        while last := (yield from self._source.through(_BRACKET, take)):
            if last in _QUOTES:
                if not (yield from self._string(last, take)):
                    open_brackets.append(last)
                    break
            elif last in "([{":
                open_brackets.append(")]}"["([{".index(last)])
            elif not open_brackets and last in ",)":
                return last
            elif last in ")]}" and open_brackets:
                open_brackets.pop()
        if not self._source.stopped:
            return ""
        take("".join(reversed(open_brackets)) + ")")
        return ")"

    def _string(self, quote: str, take: Take) -> Steps[bool]:
        """Read a text behind its first quote, and the last. Returns whether it has come."""
        while (last := (yield from self._source.through(_QUOTES[quote], take))) == "\\":
            if not (yield from self._source.one(take)):
                take("\\")  # so that it stands for itself
        return bool(last)
