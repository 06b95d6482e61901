"""Calls written as tags `invoke` and `parameter`, several in one block.

MiniMax-M2's parameters are text:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek-V3.2's, in its markup language DSML, say whether they are a text or JSON:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>
    <｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

DeepSeek-V4 calls the outer tag `tool_calls`. Sources: the chat template of MiniMaxAI/MiniMax-M2,
encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, and the parsers deepseek_v32 and deepseek_v4 in vLLM's
documentation.
"""

import re

from treetop.parsers.arguments import TaggedArguments, Tools
from treetop.parsers.source import Markers, Source, Steps
from treetop.parsers.writer import Writer

DSML = "｜DSML｜"
_TYPED_HEAD = re.compile(r'(.*?)(?:"\s+string="(true|false))?', re.DOTALL)
_HEAD_END = Markers('">')


class Invokes:
    """Reads such calls. It is called as `ToolFormat.read` is."""

    def __init__(self, block: str, prefix: str = "", typed: bool = False) -> None:
        """block: the outer tag's name. prefix: of all names. typed: parameters say what they are."""
        self._invoke, self._parameter = f'<{prefix}invoke name="', f'<{prefix}parameter name="'
        self._begin, self._call_or_end = Markers(f"<{prefix}{block}>"), Markers(self._invoke, f"</{prefix}{block}>")
        self._parameter_or_end = Markers(self._parameter, f"</{prefix}invoke>")
        self._value_end, self._typed = Markers(f"</{prefix}parameter>"), typed

    def __call__(self, source: Source, out: Writer, tools: Tools) -> Steps[None]:
        while (yield from source.until(self._begin, out.content)):
            while (yield from source.until(self._call_or_end, out.content)) == self._invoke:
                yield from self._call(source, out, tools)

    def _call(self, source: Source, out: Writer, tools: Tools) -> Steps[None]:
        pieces = list[str]()
        if not (yield from source.until(_HEAD_END, pieces.append)):
            out.content(self._invoke + "".join(pieces))
            return
        name = "".join(pieces)
        out.start(name)
        arguments = TaggedArguments(source, out, tools, name)
        while (found := (yield from source.until(self._parameter_or_end, lambda _: None))) == self._parameter:
            pieces.clear()
            if not (yield from source.until(_HEAD_END, pieces.append)):
                return
            parameter, is_text = self._head("".join(pieces))
            if not (yield from arguments.read(parameter, self._value_end, is_text)):
                return
        if found:
            arguments.end()

    def _head(self, text: str) -> tuple[str, bool | None]:
        """A parameter's name, and whether it says that it is a text; None if it does not say."""
        head = _TYPED_HEAD.fullmatch(text) if self._typed else None
        if head is None or head[2] is None:
            return text, None
        return head[1], head[2] == "true"


minimax_m2 = Invokes("minimax:tool_call")
deepseek_v32 = Invokes("function_calls", DSML, typed=True)
deepseek_v4 = Invokes("tool_calls", DSML, typed=True)
