"""Calls in tags with parameters as text, as Qwen3-Coder and others write them; Seed-OSS has tags of other names.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and ByteDance-Seed/Seed-OSS-36B-Instruct. The outer tag
may be missing, as in outputs of the smaller Qwen3-Coder.
"""

from treetop.parsers.arguments import TaggedArguments, Tools
from treetop.parsers.source import Markers, Source, Steps
from treetop.parsers.writer import Writer

_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
_NAME_END = Markers(">", "\n")
_VALUE_END = Markers("\n</parameter>", "</parameter>")
_NEXT = Markers(_PARAMETER, _END)


def qwen3_coder(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    yield from _calls(source, out, tools, "<tool_call>", "</tool_call>")


def seed_oss(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    yield from _calls(source, out, tools, "<seed:tool_call>", "</seed:tool_call>")


def _calls(source: Source, out: Writer, tools: Tools, opens: str, closes: str) -> Steps[None]:
    begin = Markers(opens, _FUNCTION)
    while marker := (yield from source.until(begin, out.content)):
        source.keep()
        inner = marker
        if marker == opens:
            yield from source.space()
            inner = yield from source.word(_FUNCTION)
        is_call = bool(inner) and (yield from _call(source, out, tools))
        text = source.kept()
        if not is_call:
            out.content(marker + text)
            continue
        source.keep()
        yield from source.space()
        closed = yield from source.word(closes)
        text = source.kept()
        out.content("" if closed else text)


def _call(source: Source, out: Writer, tools: Tools) -> Steps[bool]:
    """Read a call behind `<function=`. Returns whether it was one; one that has begun is one."""
    pieces = list[str]()
    ended_by = yield from source.until(_NAME_END, pieces.append)
    name = "".join(pieces)
    if ended_by != ">" or not name:
        return False
    source.kept()
    out.start(name)
    arguments = TaggedArguments(source, out, tools, name)
    while (found := (yield from source.until(_NEXT, lambda _: None))) == _PARAMETER:
        pieces.clear()
        if not (yield from source.until(_NAME_END, pieces.append)):
            return True
        yield from source.word("\n")
        if not (yield from arguments.read("".join(pieces), _VALUE_END)):
            return True
    if found == _END:
        arguments.end()
    return True
