"""A chat's request on its way through the engine, and what its outputs say: reasoning, content, tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request

from treetop.api.api_state import ApiState, StructureRequest
from treetop.api.errors import ApiError
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.requests.hints import left_out
from treetop.async_llm import DeltaStream
from treetop.outputs import TextDelta
from treetop.parsers.custom import CustomCalls
from treetop.parsers.events import Arguments, CallStart, Content, Event, Parser, ReasoningDelta
from treetop.parsers.harmony import begins_message
from treetop.parsers.registry import OutputParsers
from treetop.parsers.thinking import plain
from treetop.text.prompts import SERVE_WITHOUT
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError

_TAIL = 16
"""Tokens of a prompt's end that may say where the output begins."""


class Turn:
    """A request that has been queued, with a parser for each choice."""

    def __init__(self, ids: list[int], deltas: DeltaStream, parsers: list[Parser]) -> None:
        """ids: of the prompt."""
        self.ids, self.deltas, self._parsers = ids, deltas, parsers

    def read(self, delta: TextDelta) -> list[Event]:
        """What a delta says."""
        parser = self._parsers[delta.index]
        events = parser.push(delta.text)
        if delta.output is None:
            return events
        return [*events, *parser.finish(delta.output.finish_reason == "stop")]


async def prompt_of(api: ApiState, body: ChatRequest) -> list[int]:
    """Ids of a chat as the model gets it. Raises InputError and ApiError."""
    api.check_model(body.model)
    calls, reading = body.calls, body.reading(body.most_tokens)
    options = {**_thinking_options(api, body), **body.template_options}
    if tools := calls.for_template:
        _check_tools(api, calls.forced)
        options["tools"] = tools
    api.check_messages(body.messages, body.answers)
    messages = [message.flat(*_template_traits(api)) for message in body.messages]
    return await api.chat_prompt(messages, options, reading, body.continue_final_message)


async def start_turn(api: ApiState, request: Request, body: ChatRequest, *, cuts: bool = True) -> Turn:
    """Render, check and queue a chat. Raises InputError and ApiError, before any work of the engine.

    cuts: the most tokens that are asked for may be more than the context has room for.
    """
    if body.thinking_budget is not None:
        check_budget(api, body.budget_field)
    ids = await prompt_of(api, body)
    await _check_grammars(api, request, body)
    if not cuts and body.most_tokens is not None:
        api.check_room(
            [ids], body.most_tokens, "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        )
    form, tokenizer = api.output_format, api.llm.reader.tokenizer
    tail = "" if tokenizer is None else tokenizer.decode(ids[-_TAIL:], special=True)
    special = {} if tokenizer is None else tokenizer.special_names
    reading = reading_of(form, body, tail, special)
    await api.check_structure(request, body, reading.structure)
    custom = body.calls.custom
    parsers = [CustomCalls(reading.parser(), custom) if custom else reading.parser() for _ in range(body.n)]
    deltas = api.start([ids], body, body.most_tokens, reading.structure, not special.keys().isdisjoint(reading.words))
    return Turn(ids, deltas, parsers)


async def _check_grammars(api: ApiState, request: Request, body: ChatRequest) -> None:
    """Wait until the grammars of custom tools are known to be such. Raises ApiError, which names the place of one."""
    for place, grammar in body.grammars:
        try:
            await api.check_structure(request, body, (place, grammar.structure))
        except InputError as error:
            raise ApiError(400, str(error).replace("structured_output", place, 1), place) from None


@dataclass(frozen=True, slots=True)
class OutputReading:
    """How the outputs of a request are held and read.

    structure: what they are held to, if anything.
    parser: makes the parser of one.
    words: marks that their text must show.
    """

    structure: StructureRequest | None
    parser: Callable[[], Parser]
    words: tuple[str, ...]


def reading_of(form: OutputParsers, body: ChatRequest, tail: str, special: Mapping[str, int]) -> OutputReading:
    """How a chat's outputs are read. tail: the end of the prompt's text. special: ids of special tokens by their names.

    Raises InputError.
    """
    calls, in_messages = body.calls, _is_in_messages(form, body, tail)
    held = body.structure is not None and not in_messages
    tools = calls.known if calls.for_template else None
    if held:
        parser = partial(form.answer, tail, calls.reader or plain, calls.most)
    else:
        parser = partial(form.parser, tail, tools, calls.most, in_messages or body.holds_calls)
    words = form.words(tools is not None and not held)
    return OutputReading(_with_reasoning(form, body, tail, special), parser, words)


def _with_reasoning(
    form: OutputParsers, body: ChatRequest, tail: str, special: Mapping[str, int]
) -> StructureRequest | None:
    """What the output is held to, behind what may be thought before it; and by which field."""
    held, in_messages = body.structure is not None or body.holds_calls, _is_in_messages(form, body, tail)
    reasoning = form.reasoning(tail, body.thinking_budget, held)
    if body.structure is not None and not in_messages:
        field, structure = body.structure
        return field, replace(structure, reasoning=None if form.is_harmony else reasoning)
    if held:
        field, answer = (None if body.calls.forced else body.structure) or body.answer or ("tools", None)
        return field, replace(body.calls.strict(form.strict, special, answer), reasoning=reasoning)
    if reasoning is None or reasoning.budget is None:
        return None
    return "thinking_token_budget", StructuredOutput("text", reasoning=reasoning)


def _is_in_messages(form: OutputParsers, body: ChatRequest, tail: str) -> bool:
    """Whether what an output must be, a call or JSON, stands in a message of Harmony's, and others may come first."""
    if body.structure is None or not (form.is_harmony and begins_message(tail)):
        return False
    return body.calls.forced or body.structure[1].kind in ("json_schema", "json_object")


def check_budget(api: ApiState, field: str) -> None:
    """Raise InputError, which names the field, where no budget of reasoning can be kept."""
    if api.output_format.thinking is None and not api.output_format.is_harmony:
        raise InputError(
            f"{field}: the chat template does not say with which text this model ends its reasoning; serve with"
            " --reasoning-parser"
        )
    if not api.core.info.can_constrain:
        raise InputError(f"{field}: this engine forces no tokens; {SERVE_WITHOUT}")


def _check_tools(api: ApiState, forced: bool) -> None:
    if api.rendering is not None and not api.rendering.template.reads("tools"):
        raise InputError("tools: the chat template shows none to the model; serve with another (--chat-template FILE)")
    if not forced and not api.output_format.has_calls:
        raise InputError(
            "tools: the chat template does not say how this model writes calls; serve with --tool-call-parser, or give"
            " tool_choice required"
        )


def _thinking_options(api: ApiState, body: ChatRequest) -> dict[str, Any]:
    """What a template is told of thinking: an effort, or whether to think at all.

    Raises InputError for a template that knows no such thing, unless it is a hint.
    """
    effort, thinks = body.effort, body.thinks
    if api.rendering is None:
        return {}
    switches = {} if thinks is None else thinking_switches(api, thinks, "enable_thinking")
    if effort is None:
        return switches
    if api.rendering.template.reads("reasoning_effort"):
        return {**switches, "reasoning_effort": effort}
    if not (known := thinking_switches(api, effort != "none", None)):
        if not body.takes_hints:
            raise InputError("reasoning_effort: the model's chat template knows no such thing")
        left_out("effort", "a hint that the model's chat template does not know")
    return {**known, **switches}


def thinking_switches(api: ApiState, wanted: bool, field: str | None) -> dict[str, Any]:
    """What a template is told of whether to think.

    field: who says so. InputError names it if the model only does the other. None for a hint.
    """
    if api.rendering is None:
        return {}
    form, reads = api.output_format, api.rendering.template.reads
    switches = {name: wanted for name in ("enable_thinking", "thinking") if reads(name)}
    if field is not None and not switches and wanted != (form.is_harmony or form.thinking is not None):
        raise InputError(
            f"{field}: {'' if wanted else 'not '}thinking is nothing that this model's chat template knows"
        )
    return switches


def _template_traits(api: ApiState) -> tuple[bool, bool]:
    """Of `ChatMessage.flat`."""
    template = None if api.rendering is None else api.rendering.template
    if template is None:
        return False, False
    return template.joins_arguments, "message.thinking" in template.code


@dataclass(slots=True)
class MessageAccumulator:
    """What a choice has said so far. calls: each, and the pieces of its arguments."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self.reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self.calls.append((event, []))
            elif isinstance(event, Arguments):
                self.calls[event.index][1].append(event.text)

    def message(self) -> dict[str, Any]:
        """As a chat's answer has it; vLLM's name of the reasoning stands beside DeepSeek's."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.calls:
            message["tool_calls"] = [_tool_call(call, "".join(said)) for call, said in self.calls]
        return message


def _tool_call(call: CallStart, said: str) -> dict[str, Any]:
    """said: of its arguments."""
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": said}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": said}}


def delta_of(events: list[Event]) -> dict[str, Any]:
    """What an event of a stream says of these, one entry a call."""
    said = MessageAccumulator()
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.index] = {"index": event.index, **_tool_call(event, "")}
        elif isinstance(event, Arguments):
            kind, name = ("custom", "input") if event.is_custom else ("function", "arguments")
            call = calls.setdefault(event.index, {"index": event.index, kind: {name: ""}})
            call[kind][name] += event.text
        else:
            said.take([event])
    delta: Mapping[str, Any] = {
        "content": "".join(said.content),
        "reasoning_content": "".join(said.reasoning),
        "reasoning": "".join(said.reasoning),
        "tool_calls": [*calls.values()],
    }
    return {name: value for name, value in delta.items() if value}
