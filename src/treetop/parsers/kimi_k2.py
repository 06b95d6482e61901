"""Calls of Kimi K2, whose ids hold the name and count the calls of a conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    <|tool_calls_section_end|>

Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct.
"""

import re

from treetop.parsers.arguments import Tools
from treetop.parsers.source import Markers, Source, Steps
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
_BEGIN, _NEXT, _HEAD, _END = (
    Markers(SECTION),
    Markers(_CALL, _SECTION_END),
    Markers(_ARGUMENTS, _CALL_END),
    Markers(_CALL_END, _SECTION_END),
)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


def kimi_k2(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        while (yield from source.until(_NEXT, out.content)) == _CALL:
            if not (yield from _call(source, out)):
                break


def _call(source: Source, out: Writer) -> Steps[bool]:
    """Read a call behind its marker. Returns whether another may follow in the section."""
    head = list[str]()
    found = yield from source.until(_HEAD, head.append)
    call_id = "".join(head).strip()
    name = _ID.fullmatch(call_id)
    if found != _ARGUMENTS or name is None:
        out.content(_CALL + "".join(head) + (found or ""))
        return True
    out.start(name[1], call_id)
    yield from source.space()
    found = yield from source.until(_END, out.arguments)
    if found is not None:
        out.end()
    return found == _CALL_END
