"""Harmony, the format of gpt-oss: messages with a channel, and with a recipient if they are calls.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

`analysis` is reasoning; `final`, and `commentary` to nobody, are content. Source: OpenAI's Harmony response format,
cookbook.openai.com/articles/openai-harmony.
"""

import json
import re

from treetop.parsers.json_text import Ends, json_value
from treetop.parsers.source import Markers, Steps, TextBuffer
from treetop.parsers.text_parser import Reader
from treetop.parsers.writer import Writer
from treetop.types.constraint import Reasoning

WORDS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN = WORDS
_HEAD, _BODY = Markers(_MESSAGE), Markers(_END, _CALL, _RETURN, _START)
_ENDS = Ends((_END, _CALL, _RETURN, _START), in_strings=True)
_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")


def begins_message(tail: str) -> bool:
    """Whether the output of a prompt with this end begins with the rest of a message's head."""
    return tail.rstrip().endswith(_START + "assistant")


def _opened(tail: str) -> str | None:
    """The channel of the message that a prompt has begun."""
    opened = _OF_CHANNEL.findall(tail.rpartition(_START)[2]) if tail.rstrip().endswith(_MESSAGE) else []
    return opened[-1] if opened else None


def reasoning(tail: str, budget: int) -> Reasoning:
    """What an output may say in `analysis`, all its messages together: a budget that is spent ends that of now, and
    then the next is none.
    """
    opens = "" if _opened(tail) == "analysis" else f"{_CHANNEL}analysis{_MESSAGE}"
    return Reasoning(_END, opens, budget, again=(f"{_START}assistant{_CHANNEL}", "analysis", _MESSAGE))


def harmony(tail: str) -> Reader:
    """tail: the end of the prompt's text. Where it opens no message, the output goes on with a final one."""
    in_head = begins_message(tail)

    def read(source: TextBuffer, out: Writer) -> Steps[None]:
        messages = _Messages(source, out)
        if not in_head:
            yield from messages.body(_opened(tail) or "final", None)
        while (yield from messages.one()):
            pass

    return read


class _Messages:
    """Reads messages; a second one of a channel begins on a line of its own."""

    def __init__(self, source: TextBuffer, out: Writer) -> None:
        self._source, self._out = source, out
        self._said = {"analysis": False, "final": False}

    def one(self) -> Steps[bool]:
        """Read a message from its head on. Returns whether there was one."""
        pieces = list[str]()
        found = yield from self._source.until(_HEAD, pieces.append)
        head = "".join(pieces)
        if found is None:
            self._out.content(head if head.strip() not in ("", _START, _END) else "")
            return False
        channel, recipient = _OF_CHANNEL.search(head), _TO.search(head)
        yield from self.body(channel[1] if channel else "final", recipient[1] if recipient else None)
        return True

    def _arguments(self) -> Steps[None]:
        """Read a call's object; a text that is none is handed on as a string."""
        source, out, pieces = self._source, self._out, list[str]()
        yield from source.space()
        if (yield from source.at("{")):
            done = yield from json_value(source, out.arguments, _ENDS)
            found = yield from source.until(_BODY, lambda _: None)
        else:
            found = yield from source.until(_BODY, pieces.append)
            done = source.stopped
        if done or found:  # the token that ends a call ends the output, too, and is not in its text
            text = "".join(pieces)
            out.arguments(json.dumps(text, ensure_ascii=False) if text.strip() else "")
            out.end()

    def body(self, channel: str, recipient: str | None) -> Steps[None]:
        out = self._out
        if recipient is not None and recipient not in ("assistant", "user", "all"):
            out.start(recipient.removeprefix("functions."))
            yield from self._arguments()
            return
        kind = "analysis" if channel == "analysis" else "final"
        take = out.reasoning if kind == "analysis" else out.content
        if self._said[kind]:
            take("\n")
        self._said[kind] = True
        yield from self._source.until(_BODY, take)
