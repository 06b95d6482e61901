"""Chats of every kind, by three endpoints: with tools, schemas and reasoning; and what a model says to each, alone."""

import json
from collections.abc import Callable
from typing import Any

from support.serving import TOKENIZER
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.requests.messages_body import MessagesRequest
from treetop.api.requests.responses_body import ResponsesRequest
from treetop.api.turn import reading_of
from treetop.checkpoints.folder import resolve_folder
from treetop.parsers.events import Arguments, CallStart, Content, Event, ReasoningDelta
from treetop.parsers.registry import output_format
from treetop.text.chat_prompt import chat_ids
from treetop.text.chat_template import ChatTemplate
from treetop.text.prompts import PromptReader
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo
from treetop.types.sampling import SamplingParams

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<a>"
    "<think>{% if not enable_thinking %}</think>{% endif %}"
)
FLAGS = ("--chat-template", TEMPLATE, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
"""Of a server that these are asked of."""
_FORM = output_format("", "hermes", "qwen3")
_READER = PromptReader(
    CoreInfo(str(resolve_folder("builtin:nestling")), TOKENIZER.vocab_size, 4096, 1, SpecShape(1, 1, 2))
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "up": {"type": "boolean"}},
    "required": ["n", "up"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_FUNCTION = {"name": "count", "parameters": SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_ASK = [{"role": "user", "content": "def f("}]
_THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def plain(maximum: int) -> list[tuple[str, dict]]:
    """Chats that need no structure, so that the mock engine has them, too: paths and bodies."""
    return [
        (CHAT, {"messages": _ASK, "max_tokens": maximum}),
        (CHAT, {"messages": _ASK, "max_tokens": maximum, "tools": [_TOOL], **_THINK}),
        (RESPONSES, {"input": "def f(", "max_output_tokens": maximum, "instructions": "#"}),
        (RESPONSES, {"input": "def g(", "max_output_tokens": maximum, "tools": [{"type": "function", **_FUNCTION}]}),
        (MESSAGES, {"messages": _ASK, "max_tokens": maximum, "system": "#", "stop_sequences": ["\n\n\n"]}),
        (MESSAGES, {"messages": _ASK, "max_tokens": maximum, "thinking": {"type": "enabled"}}),
    ]


def held(maximum: int) -> list[tuple[str, dict]]:
    """Chats whose outputs are held to schemas, behind reasoning of a budget or without; some are sampled."""
    form = {"type": "json_schema", "schema": SCHEMA}
    called = {"tools": [{"name": "count", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
    return [
        (CHAT, {"messages": _ASK, "tools": [_TOOL], "tool_choice": "required", "seed": 3, "temperature": 0.8}),
        (CHAT, {"messages": _ASK, "tools": [_TOOL], "tool_choice": "required", "thinking_token_budget": 4, **_THINK}),
        (CHAT, {"messages": _ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (CHAT, {"messages": _ASK, "tools": [{"type": "function", "function": {**_FUNCTION, "strict": True}}]}),
        (RESPONSES, {"input": "def g(", "text": {"format": {"name": "x", **form}}, "max_output_tokens": maximum}),
        (MESSAGES, {"messages": _ASK, "max_tokens": maximum, **called, **budget}),
        (MESSAGES, {"messages": _ASK, "max_tokens": maximum, "output_config": {"format": form}}),
    ]


def as_chat(path: str, body: dict, maximum: int) -> tuple[dict, ChatRequest]:
    """The body with what it leaves out, so that nothing is drawn anew; and the chat that it is."""
    body = {"temperature": 0, **body}
    if path == CHAT:
        body = {"max_tokens": maximum, **body}
        return body, ChatRequest.model_validate(body)
    if path == RESPONSES:
        asked = ResponsesRequest.model_validate(body)
        return body, asked.chat(())
    thinks = body.get("thinking", {}).get("type") == "enabled"
    return body, MessagesRequest.model_validate(body).chat({"enable_thinking": thinks} if "thinking" in body else {})


def said_alone(chat: ChatRequest, answer: Callable[[list[int], SamplingParams], str]) -> str:
    """All that is said to a chat, one after the other. answer: gives the text behind a prompt."""
    options = dict(chat.template_options)
    if tools := chat.calls.for_template:
        options["tools"] = tools
    ids = chat_ids(ChatTemplate(TEMPLATE, {}), _READER, [each.flat() for each in chat.messages], options)
    reading = reading_of(_FORM, chat, TOKENIZER.decode(ids[-16:], special=True), {})
    structure = None if reading.structure is None else reading.structure[1]
    maximum = chat.most_tokens
    assert maximum is not None
    text, parser = answer(ids, chat.params({}, maximum, structure)), reading.parser()
    return "".join(map(text_of, [*parser.push(text), *parser.finish()]))


def text_of(event: Event) -> str:
    if isinstance(event, CallStart):
        return event.name
    return event.text if isinstance(event, Content | ReasoningDelta | Arguments) else ""


def said_whole(path: str, answer: dict) -> str:
    """The same of an answer's body."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [message.get("reasoning_content"), message["content"]]
        return "".join(text or "" for text in texts) + "".join(f"{call['name']}{call['arguments']}" for call in calls)
    if path == RESPONSES:
        return "".join(map(_of_item, answer["output"]))
    return "".join(map(_of_block, answer["content"]))


def _of_item(item: dict) -> str:
    if item["type"] == "function_call":
        return str(item["name"] + item["arguments"])
    return "".join(part["text"] for part in item["content"])


def _of_block(block: dict) -> str:
    if block["type"] == "tool_use":
        return str(block["name"]) + json.dumps(block["input"])
    return str(block.get("text", block.get("thinking")))


def said_in(path: str, event: dict[str, Any]) -> str:
    """The same of an event of a stream."""
    if path == CHAT:
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        calls = [call["function"] for call in delta.get("tool_calls", ())]
        texts = [delta.get("reasoning_content"), delta.get("content")]
        return "".join(text or "" for text in texts) + "".join(
            call.get("name", "") + call["arguments"] for call in calls
        )
    if path == RESPONSES:
        if event["type"] == "response.output_item.added":
            return str(event["item"].get("name", ""))
        return str(event["delta"]) if event["type"].endswith(".delta") else ""
    if event["type"] == "content_block_start":
        return str(event["content_block"].get("name", ""))
    if event["type"] != "content_block_delta":
        return ""
    delta = event["delta"]
    return str(delta.get("text", delta.get("thinking", delta.get("partial_json"))))


def ends(path: str, line: str) -> bool:
    """Whether a line of a stream is the last of one that is whole."""
    if path == RESPONSES:
        return line in ("event: response.completed", "event: response.incomplete")
    return line == ("event: message_stop" if path == MESSAGES else "data: [DONE]")
