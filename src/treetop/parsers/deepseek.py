"""Calls of DeepSeek-V3 and R1, whose arguments stand in a fence, and of V3.1, whose do not.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.source import Markers, Source, Steps
from treetop.parsers.writer import Writer

WORDS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_SECTION, _SECTION_END, _CALL, _SEP, _CALL_END = WORDS
_BEGIN, _NEXT, _HEAD = Markers(_SECTION), Markers(_CALL, _SECTION_END), Markers(_SEP, _CALL_END)
_FENCE_END = "\n```"
_FENCE = Markers("```json\n", _CALL_END)
_FENCED_END, _END = Markers(_FENCE_END, _CALL_END), Markers(_CALL_END)


def deepseek_v31(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    yield from _calls(source, out, False)


def deepseek_v3(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    yield from _calls(source, out, True)


def _calls(source: Source, out: Writer, fenced: bool) -> Steps[None]:
    while (yield from source.until(_BEGIN, out.content)):
        while (yield from source.until(_NEXT, out.content)) == _CALL:
            yield from _call(source, out, fenced)


def _call(source: Source, out: Writer, fenced: bool) -> Steps[None]:
    pieces = list[str]()
    source.keep()
    found = yield from source.until(_HEAD, pieces.append)
    if fenced and found == _SEP:
        pieces.clear()  # what kind of tool it is: always a function
        found = yield from source.until(_FENCE, pieces.append)
    name, text = "".join(pieces).strip(), source.kept()
    if found in (None, _CALL_END) or not name:
        out.content(_CALL + text)
        return
    out.start(name)
    found = yield from source.until(_FENCED_END if fenced else _END, out.arguments)
    if found == _FENCE_END:
        found = yield from source.until(_END, lambda _: None)
    if found is not None:
        out.end()
