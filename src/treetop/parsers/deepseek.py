"""Calls of DeepSeek-V3 and R1, whose arguments stand in a fence, and of V3.1, whose do not.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Either parser reads both, whatever there is of the fence. Source: the chat templates of
deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

WORDS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_SECTION, _SECTION_END, _CALL, _SEP, _CALL_END = WORDS
_ENDS = _CALL_END, _CALL, _SECTION_END
_BEGIN, _NEXT = Markers(_SECTION), Markers(_CALL, _SECTION_END)
_FENCE = "```"
_HEAD, _NAME_END, _END = Markers(_SEP, *_ENDS), Markers(_FENCE, "{", *_ENDS), Markers(*_ENDS)
_KIND = "function"
"""What V3 writes in place of the name, which comes behind."""


def deepseek(source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        while (yield from source.until(_NEXT, out.content)) == _CALL:
            yield from _call(source, out)


def _call(source: TextBuffer, out: Writer) -> Steps[None]:
    source.keep()
    name = yield from _name(source)
    text = source.kept()
    if not name:
        out.content(_CALL + text)
        return
    out.start(name)
    done = yield from json_value(source, out.arguments, Ends(_ENDS, in_strings=True))
    found = yield from source.until(_END, lambda _: None)
    source.back("" if found == _CALL_END else found or "")
    if done:
        out.end()


def _name(source: TextBuffer) -> Steps[str]:
    """Read a call's head up to its object, or to its end if it has none. Returns the name; "" for what is no call."""
    head, name = list[str](), list[str]()
    found = yield from source.until(_HEAD, head.append)
    if found != _SEP:
        source.back("" if found == _CALL_END else found or "")
        return ""
    found = yield from source.until(_NAME_END, name.append)
    if found == _FENCE:
        yield from source.word("json")
        yield from source.space()
        found = yield from source.at("{")
    else:
        source.back(found or "")
    said, kind = "".join(name).strip(), "".join(head).strip()
    return (said or kind) if found and (said or found == "{" or kind != _KIND) else ""
