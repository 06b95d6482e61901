"""Calls of Gemma 4: names and values as in JSON, texts between marks of their own.

    <|tool_call>call:f{a:<|"|>x<|"|>,n:1,l:[true,{b:null}]}<tool_call|>

A text holds no escapes. Source: the chat template of google/gemma-4-E4B-it, and Google's page on function calling with
Gemma 4.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

WORDS = ("<|tool_call>", "<tool_call|>", '<|"|>')
_OPEN, _CLOSE, _QUOTE = WORDS
_ENDS = Ends((_OPEN, _CLOSE), in_strings=True)
_BEGIN, _NAME_END, _END = Markers(_OPEN), Markers("{", _OPEN, _CLOSE), Markers(_OPEN, _CLOSE)
_CALL = "call:"


def gemma4(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        source.keep()
        yield from source.space()
        pieces = list[str]()
        yield from source.word(_CALL)
        found = yield from source.until(_NAME_END, pieces.append)
        name = "".join(pieces).strip()
        source.back(found if found in ("{", _OPEN) else "")
        text = source.kept()
        is_call = bool(name) and (found == "{" or (found is not None and name in tools.names))
        if not is_call:
            out.content(_OPEN + text)
            continue
        out.start(name)
        done = True
        if found == "{":
            done = yield from json_value(source, out.arguments, _ENDS, _QUOTE)
            found = yield from source.until(_END, lambda _: None)
            source.back(found if found == _OPEN else "")
        if done:
            out.end()
