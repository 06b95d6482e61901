"""Anthropic's `/v1/messages`: blocks in, blocks out."""

import json
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from treetop.api.api_state import ApiState, new_id
from treetop.api.blocks import Block, Blocks, Step
from treetop.api.errors import ApiError, anthropic_body
from treetop.api.events import STREAMS, Answer, EventTemplate, answered, collected, json_response, typed_event
from treetop.api.limits import BodyRoute
from treetop.api.requests.messages_body import CountRequest, MessagesRequest, ThinkingOptions
from treetop.api.turn import Turn, check_budget, prompt_of, start_turn, thinking_switches
from treetop.outputs import RequestOutput, TextDelta


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of an answer that is an error."""

    type: str
    error: AnthropicErrorDetail
    request_id: str | None = None


_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": AnthropicError}, "5XX": {"model": AnthropicError}}
Written = dict[str, Any]


class MessagesAnswer(Answer):
    """One request as it is answered."""

    last = b""

    def __init__(self, api: ApiState, body: MessagesRequest, turn: Turn) -> None:
        self._api, self._turn, self._blocks = api, turn, Blocks()
        self._templates: dict[int, EventTemplate] = {}  # by block, of the events by which it grows
        self._id, self._model, self._most = new_id("msg"), body.model or api.names[0], body.max_tokens

    async def whole(self, request: Request) -> Response:
        def see(delta: TextDelta) -> None:
            for _ in self._blocks.take(self._turn.read(delta)):
                pass

        (output,) = await collected(request, self._turn.deltas, see)
        content = [_content(block) for block in self._blocks.all]
        return json_response(self._message(content, self._stop(output), self._usage(output)))

    def first(self) -> Iterator[bytes]:
        used = {"input_tokens": len(self._turn.ids), "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, used)
        yield typed_event({"type": "message_start", "message": message})

    def events(self, delta: TextDelta) -> Iterator[bytes]:
        for step, block, text in self._blocks.take(self._turn.read(delta)):
            if step == "grows":
                yield self._template(block).event(text)
                continue
            for each in _written(step, block, text):
                yield typed_event(each)
        if delta.output is not None:
            for closes in self._blocks.close():
                for each in _written(*closes):
                    yield typed_event(each)
            end = {"delta": self._stop(delta.output), "usage": self._usage(delta.output)}
            yield typed_event({"type": "message_delta", **end})
            yield typed_event({"type": "message_stop"})

    def end(self) -> bytes:
        return b""

    def _template(self, block: Block) -> EventTemplate:
        if block.index not in self._templates:
            (grows,) = _written("grows", block, EventTemplate.HOLE)
            self._templates[block.index] = EventTemplate(typed_event(grows))
        return self._templates[block.index]

    def failed(self, error: ApiError) -> bytes:
        return typed_event(anthropic_body(error.status, str(error)))

    def _message(self, content: list[Written], stop: Written, usage: Written) -> Written:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **stop, "usage": usage}

    def _stop(self, output: RequestOutput) -> Written:
        if output.finish_reason == "length":
            is_cut = len(output.token_ids) < self._most
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif output.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": output.stop_string if reason == "stop_sequence" else None}

    def _usage(self, output: RequestOutput) -> Written:
        """Input tokens are those that no cache had, as Anthropic counts."""
        usage = self._api.usage([self._turn.ids], [output])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _content(block: Block) -> Written:
    """A whole block. Arguments that are no object, as of a call that was cut off, are left out."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        said = json.loads(block.text)
    except (ValueError, RecursionError):
        said = None
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": said if isinstance(said, dict) else {}}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _written(step: Step, block: Block, text: str) -> Iterator[Written]:
    """The events of a step of a block."""
    if step == "opens":
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(block)}
    elif step == "grows":
        kind, name = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}
    else:
        yield {"type": "content_block_stop", "index": block.index}


def _thinking(api: ApiState, asked: ThinkingOptions | None) -> dict[str, Any]:
    """What a template is told of `thinking`. Raises InputError for what this model cannot do."""
    if asked is None or api.rendering is None:
        return {}
    if asked.budget_tokens is not None:
        check_budget(api, "thinking: budget_tokens")
    as_it_wants = asked.type == "adaptive"
    return thinking_switches(api, asked.type != "disabled", None if as_it_wants else f"thinking: {asked.type}")


def messages(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/messages", response_model=None, responses={**STREAMS, **_ERRORS})
    async def complete(request: Request, body: MessagesRequest) -> Response:
        """Anthropic's Messages: blocks, tools, thinking, streams."""
        turn = await start_turn(api, request, body.chat(_thinking(api, body.thinking)))
        return await answered(request, turn.deltas, MessagesAnswer(api, body, turn), body.stream)

    @router.post("/v1/messages/count_tokens", response_model=None, responses=_ERRORS)
    async def count_tokens(body: CountRequest) -> Response:
        """Tokens of such a request's prompt."""
        ids = await prompt_of(api, body.chat(_thinking(api, body.thinking)))
        return json_response({"input_tokens": len(ids)})

    return router
