"""Calls as objects of JSON behind a mark, one or several, in a list or not.

`<tool_call>`, as Hermes, Qwen2.5 and Qwen3, MiMo, ERNIE 4.5, Granite 4 and others write calls:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Granite 3, Phi-4-mini and Hunyuan-A13B have lists:

    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]
    functools[{"name": "f", "arguments": {"a": 1}}]
    <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>

Granite 3.1 writes its mark as `<tool_call>`, and Phi-4-mini's tokenizer has `<|tool_call|>`, too. Sources: the chat
templates of NousResearch/Hermes-2-Pro-Llama-3-8B, Qwen/Qwen3-8B, ibm-granite/granite-3.0-2b-instruct and
tencent/Hunyuan-A13B-Instruct, vLLM's tool_chat_template_phi4_mini, and its documentation of these parsers.
"""

from treetop.parsers.arguments import Tools
from treetop.parsers.json_call import CallRules, json_calls
from treetop.parsers.json_text import Ends
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.writer import Writer


class MarkedCalls:
    """Reads such calls. It is called as `ToolFormat.read` is."""

    def __init__(self, opens: tuple[str, ...], closes: tuple[str, ...]) -> None:
        """opens: marks of which each may begin calls. closes: what may end them."""
        self.words = (*opens, *closes)
        self._opens, self._begin, self._next = opens, Markers(*opens), Markers(*self.words)
        self._rules = CallRules(ends=Ends(self.words))

    def __call__(self, source: TextBuffer, out: Writer, tools: Tools) -> Steps[None]:
        mark = yield from source.until(self._begin, out.content)
        while mark is not None:
            source.keep()
            is_call = yield from json_calls(source, out, self._rules)
            text = source.kept()
            if is_call:
                mark = yield from source.until(self._next, lambda _: None)
            else:
                out.content(mark + text)
            if not is_call or mark not in self._opens:
                mark = yield from source.until(self._begin, out.content)


hermes = MarkedCalls(("<tool_call>",), ("</tool_call>",))
granite = MarkedCalls(("<|tool_call|>", "<tool_call>"), ("</tool_call>", "<|/tool_call|>"))
phi4_mini = MarkedCalls(("functools[", "<|tool_call|>"), ("<|/tool_call|>",))
hunyuan_a13b = MarkedCalls(("<tool_calls>",), ("</tool_calls>",))
