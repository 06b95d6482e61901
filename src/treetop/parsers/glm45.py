"""Calls of GLM-4.5, 4.6 and 4.7, and of Hunyuan's Hy3: the name, then keys and values in tags.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

GLM-4.7 leaves the line ends out. Hy3 has a mark behind the name, and calls stand in a block:

    <tool_calls>
    <tool_call>f<tool_sep>
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>
    </tool_calls>

An object of JSON may stand in place of keys and values, and any closing tag may be missing. Sources: the chat templates
of zai-org/GLM-4.5, zai-org/GLM-4.7 and tencent/Hy3-preview.
"""

from treetop.parsers.arguments import TaggedArguments, Tools, ValueEnds, bare
from treetop.parsers.json_call import CallRules, json_call
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

WORDS = "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"
_OPEN, _CLOSE, _SEP = "<tool_call>", "</tool_call>", "<tool_sep>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_BLOCK, _BLOCK_END = "<tool_calls>", "</tool_calls>"
_AROUND = _CLOSE, _OPEN, _BLOCK_END
_BEGIN, _BEGIN_IN_BLOCKS = Markers(_OPEN), Markers(_OPEN, _BLOCK, _BLOCK_END)
_NAME_END, _NEXT = Markers(_KEY, _SEP, "{", *_AROUND), Markers(_KEY, *_AROUND)
_KEY_ENDS, _VALUE_BEGINS = Markers(_KEY_END, _VALUE, *_AROUND), Markers(_VALUE, _KEY, *_AROUND)
_VALUE_ENDS = ValueEnds((_VALUE_END,), (_KEY, *_AROUND))
_JSON_ENDS = Ends((_KEY, *_AROUND))
_SURE = _KEY, _SEP, _CLOSE
"""Behind a name these say that it is one; else it must be that of a tool."""


def glm45(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        yield from _call(source, out, tools)


def hy_v3(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while found := (yield from source.until(_BEGIN_IN_BLOCKS, out.content)):
        if found == _OPEN:
            yield from _call(source, out, tools)
        elif found == _BLOCK_END:
            out.content("" if out.num_calls else found)
        else:
            source.keep()
            yield from source.space()
            is_block = yield from source.at(_OPEN)
            text = source.kept()
            out.content("" if is_block else found + text)


def _call(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    """Read a call behind its first tag, or what is none."""
    pieces = list[str]()
    found = yield from source.until(_NAME_END, pieces.append)
    text = "".join(pieces)
    name = bare(text)
    if found in ("{", _OPEN, _BLOCK_END):
        source.back(found)
    if found == "{" and not name:
        yield from _object_with_name(source, out, text)
    elif not name or not (found in _SURE or ((found or source.stopped) and name in tools.names)):
        out.content(_OPEN + text + (found if found in _SURE else ""))
    else:
        out.start(name)
        if found == _SEP:
            yield from source.space()
        if (yield from source.at("{")):
            done = yield from json_value(source, out.arguments, _JSON_ENDS)
            yield from _close(source)
            if done:
                out.end()
        else:
            yield from _members(source, TaggedArguments(source, out, tools, name), found)


def _object_with_name(source: TextBuffer, out: Writer, before: str) -> Steps[None]:
    """Read a call as Hermes writes it, or text."""
    source.keep()
    is_call = yield from json_call(source, out, CallRules(ends=_JSON_ENDS))
    text = source.kept()
    if is_call:
        yield from _close(source)
    else:
        out.content(_OPEN + before + text)


def _close(source: TextBuffer) -> Steps[None]:
    """Read up to the call's end, and it; what else ends it stays."""
    found = yield from source.until(_NEXT, lambda _: None)
    source.back("" if found == _CLOSE else found or "")


def _members(source: TextBuffer, arguments: TaggedArguments, found: str | None) -> Steps[None]:
    """Read keys and values. found: the tag before them."""
    if found in (_SEP, _OPEN, _BLOCK_END):
        found = yield from source.until(_NEXT, lambda _: None)
    while found == _KEY:
        key = list[str]()
        found = yield from source.until(_KEY_ENDS, key.append)
        if found == _KEY_END:
            found = yield from source.until(_VALUE_BEGINS, lambda _: None)
        if found == _VALUE:
            if not (yield from arguments.read(bare("".join(key)), _VALUE_ENDS)):
                return
            found = yield from source.until(_NEXT, lambda _: None)
    if found != _CLOSE:
        source.back(found or "")
    if found is not None or source.stopped:
        arguments.end()
