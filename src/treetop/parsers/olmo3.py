"""Calls of OLMo 3, as Python writes them, one a line.

    <function_calls>
    f(a=1, b='x')
    g()
    </function_calls>

Constants are Python's or JSON's. What is no call of a tool is content. Source: the chat template of
allenai/Olmo-3-7B-Instruct, and vLLM's tool_chat_template_olmo3.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.pythonic import python_call
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"
_BEGIN, _END = Markers(_OPEN), Markers(_CLOSE)


def olmo3(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        num_before = out.num_calls
        source.keep()
        yield from source.space()
        while not (yield from source.at(_CLOSE)) and (yield from python_call(source, out, tools)):
            yield from source.space()
            yield from source.word(",", ";")
            yield from source.space()
        text = source.kept()
        if out.num_calls == num_before:
            out.content(_OPEN + text)
        elif not (yield from source.word(_CLOSE)):
            out.content(text)
            yield from source.until(_END, out.content)
