"""Calls of Mistral's models: a list behind `[TOOL_CALLS]`, or since tokenizer v11 a marker before each call.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]
    [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

Ids are nine letters and digits, for templates take no others. Source: mistral-common, and the chat templates of
mistralai/Mistral-7B-Instruct-v0.3 and mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

import secrets
import string

from treetop.parsers.arguments import Tools
from treetop.parsers.json_call import CallRules, json_calls
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

WORDS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_CALLS, _ID, _ARGUMENTS = WORDS
_BEGIN, _NAME_END, _ID_END = Markers(_CALLS), Markers(_ID, _ARGUMENTS, "{"), Markers(_ARGUMENTS, "{")
_ENDS = Ends((_CALLS,))
_RULES = CallRules(ends=_ENDS)
_LETTERS = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def mistral(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        source.keep()
        yield from source.space()
        if (yield from source.at("[", "{")):
            is_call = yield from json_calls(source, out, _RULES)
        else:
            is_call = yield from _call(source, out)
        text = source.kept()
        if not is_call:
            out.content(_CALLS + text)


def _call(source: TextBuffer, out: Writer) -> Steps[bool]:
    name, call_id = list[str](), list[str]()
    found = yield from source.until(_NAME_END, name.append)
    if found == _ID:
        found = yield from source.until(_ID_END, call_id.append)
    if found is None or not "".join(name).strip():
        return False
    if found == "{":
        source.back(found)
    source.kept()
    out.start("".join(name).strip(), "".join(call_id).strip() or None)
    if (yield from json_value(source, out.arguments, _ENDS)):
        out.end()
    return True
