"""`<tool_call>` with a JSON object, as Hermes, Qwen2.5 and Qwen3, MiMo, Hunyuan and others write calls.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B and Qwen/Qwen3-8B.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_call import json_call
from treetop.parsers.source import Markers, Source, Steps
from treetop.parsers.writer import Writer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGIN, _END = Markers(_OPEN), Markers(_OPEN, _CLOSE)


def hermes(source: Source, out: Writer, tools: Tools) -> Steps[None]:
    marker = yield from source.until(_BEGIN, out.content)
    while marker == _OPEN:
        source.keep()
        yield from source.space()
        is_call = yield from json_call(source, out)
        text = source.kept()
        if is_call:
            marker = yield from source.until(_END, lambda _: None)
        if not is_call:
            out.content(_OPEN + text)
        if not is_call or marker == _CLOSE:
            marker = yield from source.until(_BEGIN, out.content)
