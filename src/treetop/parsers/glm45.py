"""Calls of GLM-4.5, 4.6 and 4.7: the name, then keys and values in tags.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

GLM-4.7 leaves the line ends out. Source: the chat templates of zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from treetop.parsers.arguments import TaggedArguments, Tools
from treetop.parsers.source import Markers, Source, Steps
from treetop.parsers.writer import Writer

_OPEN, _CLOSE, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_BEGIN, _NEXT = Markers(_OPEN), Markers(_KEY, _CLOSE)
_KEY_END, _VALUE, _VALUE_END = Markers("</arg_key>"), Markers("<arg_value>"), Markers("</arg_value>")


def glm45(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        pieces = list[str]()
        found = yield from source.until(_NEXT, pieces.append)
        text = "".join(pieces)
        if found is None or not text.strip():
            out.content(_OPEN + text + (found or ""))
            continue
        out.start(text.strip())
        yield from _arguments(source, TaggedArguments(source, out, tools, text.strip()), found)


def _arguments(source: Source, arguments: TaggedArguments, found: str | None) -> Steps[None]:
    while found == _KEY:
        key = list[str]()
        yield from source.until(_KEY_END, key.append)
        if not (yield from source.until(_VALUE, lambda _: None)):
            return
        if not (yield from arguments.read("".join(key).strip(), _VALUE_END)):
            return
        found = yield from source.until(_NEXT, lambda _: None)
    if found == _CLOSE:
        arguments.end()
