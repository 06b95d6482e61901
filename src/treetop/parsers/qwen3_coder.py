"""Calls in tags with parameters as text, as Qwen3-Coder and others write them; Seed-OSS has tags of other names.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and ByteDance-Seed/Seed-OSS-36B-Instruct. The outer tag
may be missing, as in outputs of the smaller Qwen3-Coder, and so may any closing one; an object of JSON may stand in
place of the parameters.
"""

from treetop.parsers.arguments import TaggedArguments, Tools, ValueEnds, bare
from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer

_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
_NAME_END = Markers(">", "\n")


class TaggedFunctions:
    """Reads such calls. It is called as `ToolFormat.read` is."""

    def __init__(self, tag: str) -> None:
        """tag: name of the outer one."""
        self._opens, self._closes = f"<{tag}>", f"</{tag}>"
        self._begin = Markers(self._opens, _FUNCTION)
        self._around = _END, self._closes, self._opens, _FUNCTION
        self._next = Markers(_PARAMETER, *self._around)
        self._value_ends = ValueEnds(("\n</parameter>", "</parameter>"), (_PARAMETER, *self._around))

    def __call__(self, source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
        while marker := (yield from source.until(self._begin, out.content)):
            source.keep()
            inner = marker
            if marker == self._opens:
                yield from source.space()
                inner = yield from source.word(_FUNCTION)
            is_call = bool(inner) and (yield from self._call(source, out, tools))
            text = source.kept()
            if not is_call:
                out.content(marker + text)
                continue
            source.keep()
            yield from source.space()
            closed = yield from source.word(self._closes)
            text = source.kept()
            out.content("" if closed else text)

    def _call(self, source: TextBuffer, out: Writer, tools: Tools) -> Steps[bool]:
        """Read a call behind `<function=`. Returns whether it was one; one that has begun is one."""
        pieces = list[str]()
        ended_by = yield from source.until(_NAME_END, pieces.append)
        name = bare("".join(pieces))
        if ended_by != ">" or not name:
            return False
        source.kept()
        out.start(name)
        yield from source.space()
        if (yield from source.at("{")):
            done = yield from json_value(source, out.arguments, Ends((_PARAMETER, *self._around)))
            ended_by = yield from source.until(self._next, lambda _: None)
            source.back("" if ended_by == _END else ended_by or "")
            if done:
                out.end()
            return True
        yield from self._parameters(source, TaggedArguments(source, out, tools, name))
        return True

    def _parameters(self, source: TextBuffer, arguments: TaggedArguments) -> Steps[None]:
        while (found := (yield from source.until(self._next, lambda _: None))) == _PARAMETER:
            pieces = list[str]()
            if not (yield from source.until(_NAME_END, pieces.append)):
                break
            yield from source.word("\n")
            if not (yield from arguments.read(bare("".join(pieces)), self._value_ends)):
                return
        if found not in (_PARAMETER, _END):
            source.back(found or "")
        if (found not in (None, _PARAMETER)) or source.stopped:
            arguments.end()


qwen3_coder = TaggedFunctions("tool_call")
seed_oss = TaggedFunctions("seed:tool_call")
