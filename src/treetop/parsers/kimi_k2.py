"""Calls of Kimi K2, whose ids hold the name and count the calls of a conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

The mark of the section may be missing, or in the singular. Source: docs/tool_call_guidance.md of
moonshotai/Kimi-K2-Instruct.
"""

import re

from treetop.parsers.arguments import Tools
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

SECTION = "<|tool_calls_section_begin|>"
WORDS = (
    SECTION,
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_SECTION_END, _CALL, _ARGUMENTS, _CALL_END = WORDS[1:]
_SECTION_TOO, _SECTION_END_TOO = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
BEGINS = SECTION, _SECTION_TOO, _CALL
"""Any of these begins calls."""
_ENDS = _CALL_END, _SECTION_END, _SECTION_END_TOO, _CALL
_BEGIN, _NEXT, _HEAD, _END = (
    Markers(*BEGINS),
    Markers(_CALL, _SECTION_END, _SECTION_END_TOO),
    Markers(_ARGUMENTS, _CALL_END),
    Markers(*_ENDS),
)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def kimi_k2(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while found := (yield from source.until(_BEGIN, out.content)):
        source.back(found if found == _CALL else "")
        while (yield from source.until(_NEXT, out.content)) == _CALL:
            if not (yield from _call(source, out)):
                break


def _call(source: TextBuffer, out: Writer) -> Steps[bool]:
    """Read a call behind its marker. Returns whether another may follow in the section."""
    head = list[str]()
    source.keep()
    found = yield from source.until(_HEAD, head.append)
    call_id = "".join(head).strip()
    name = _ID.fullmatch(call_id)
    yield from source.space()
    first = yield from source.peek()
    has_none = found == _ARGUMENTS and (not first or bool((yield from source.at(*_ENDS))))
    text = source.kept()
    if found != _ARGUMENTS or name is None or not (has_none or first == "{"):
        out.content(_CALL + text)
        return True
    out.start(name[1], call_id)
    done = yield from json_value(source, out.arguments, Ends(_ENDS, in_strings=True))
    found = yield from source.until(_END, lambda _: None)
    source.back(found if found == _CALL else "")
    if done:
        out.end()
    return found in (_CALL_END, _CALL)
