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

from treetop.parsers.arguments import TaggedArguments, Tools, ValueEnds, bare
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

DSML = "｜DSML｜"
_TYPED_HEAD = re.compile(r"""(.*?)\s+string=["']?(true|false)["']?\s*""", re.DOTALL)
_HEAD_END = Markers(">")


class Invokes:
    """Reads such calls. It is called as `ToolFormat.read` is."""

    def __init__(self, block: str, prefix: str = "", typed: bool = False) -> None:
        """block: the outer tag's name. prefix: of all names. typed: parameters say what they are."""
        self._invoke, self._parameter = f"<{prefix}invoke name=", f"<{prefix}parameter name="
        self._invoke_end, block_end = f"</{prefix}invoke>", f"</{prefix}{block}>"
        self._begin, self._call_or_end = Markers(f"<{prefix}{block}>"), Markers(self._invoke, block_end)
        around = self._invoke_end, self._invoke, block_end
        self._parameter_or_end = Markers(self._parameter, *around)
        self._value_ends = ValueEnds((f"</{prefix}parameter>",), (self._parameter, *around))
        self._typed = typed

    def __call__(self, source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
        while (yield from source.until(self._begin, out.content)):
            while (yield from source.until(self._call_or_end, out.content)) == self._invoke:
                yield from self._call(source, out, tools)

    def _call(self, source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
        pieces = list[str]()
        ended = yield from source.until(_HEAD_END, pieces.append)
        name = bare("".join(pieces))
        if not ended or not name:
            out.content(self._invoke + "".join(pieces) + (ended or ""))
            return
        out.start(name)
        arguments = TaggedArguments(source, out, tools, name)
        while (found := (yield from source.until(self._parameter_or_end, lambda _: None))) == self._parameter:
            pieces.clear()
            if not (yield from source.until(_HEAD_END, pieces.append)):
                break
            parameter, is_text = self._head("".join(pieces))
            if not (yield from arguments.read(parameter, self._value_ends, is_text)):
                return
        if found not in (self._parameter, self._invoke_end):
            source.back(found or "")
        if found not in (None, self._parameter) or source.stopped:
            arguments.end()

    def _head(self, text: str) -> tuple[str, bool | None]:
        """A parameter's name, and whether it says that it is a text; None if it does not say."""
        head = _TYPED_HEAD.fullmatch(text) if self._typed else None
        if head is None:
            return bare(text), None
        return bare(head[1]), head[2] == "true"


minimax_m2 = Invokes("minimax:tool_call")
deepseek_v32 = Invokes("function_calls", DSML, typed=True)
deepseek_v4 = Invokes("tool_calls", DSML, typed=True)
