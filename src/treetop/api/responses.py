"""`/v1/responses`: items in, items out; an answer may be gone on with while it is kept."""

import time
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from treetop.api.api_state import ApiState, new_id
from treetop.api.blocks import Block, Blocks, Step
from treetop.api.errors import RESPONSES_PATH, ApiError
from treetop.api.events import STREAMS, Answer, EventTemplate, answered, collected, json_response, typed_event
from treetop.api.kept_responses import Keeper, KeptResponses, owner_of
from treetop.api.limits import BodyRoute
from treetop.api.requests.responses_body import ResponsesRequest
from treetop.api.turn import Turn, start_turn
from treetop.async_llm import DeltaStream
from treetop.outputs import RequestOutput, TextDelta
from treetop.parsers.events import CallEnd

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
_NUMBER, _NUMBERED = "sequence_number", b'"sequence_number":0'
"""Of an event among all, and how the first one's is written."""
Written = dict[str, Any]


class ResponsesAnswer(Answer):
    """One request as it is answered."""

    last = b""

    def __init__(self, api: ApiState, body: ResponsesRequest, turn: Turn, keeper: Keeper) -> None:
        """keeper: is given the response once it has ended."""
        self._api, self._body, self._turn, self._keeper = api, body, turn, keeper
        self.id, self._created = new_id("resp"), int(time.time())
        self._blocks, self._ids = Blocks(), list[str]()
        self._statuses: dict[int, str] = {}  # of items that are closed, by block
        self._num_reasoning, self._sequence = 0, -1
        self._templates: dict[
            int, tuple[bytes, EventTemplate]
        ] = {}  # by block: what comes before the number, and after

    async def whole(self, request: Request) -> Response:
        (output,) = await collected(request, self._turn.deltas, lambda delta: [*self._take(delta)])
        return json_response(self._end(output))

    def first(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def events(self, delta: TextDelta) -> Iterator[bytes]:
        for step, block, text, status in self._take(delta):
            if step == "grows":
                yield self._grown(block, text)
                continue
            for each in self._written(step, block, text, status):
                yield self._event(each.pop("type"), **each)
        if delta.output is not None:
            response = self._end(delta.output)
            yield self._event(f"response.{response['status']}", response=response)

    def end(self) -> bytes:
        return b""

    @property
    def deltas(self) -> DeltaStream:
        return self._turn.deltas

    def begun(self) -> Written:
        """The response before anything has come."""
        return self._response("in_progress")

    def ended(self, status: Literal["cancelled", "failed"], error: ApiError | None = None) -> bytes:
        """The event of an end before its time; the response is kept as it is then."""
        items = [self._item(block, self._statuses.get(block.index, "incomplete")) for block in self._blocks.all]
        response = self._response(status, items)
        if error is not None:
            response["error"] = {"code": error.code or "server_error", "message": str(error)}
        self._keeper.keep(response)
        return self._event(f"response.{status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or "server_error", message=str(error), param=error.param)

    def _event(self, kind: str, **said: Any) -> bytes:
        self._sequence += 1
        return typed_event({"type": kind, _NUMBER: self._sequence, **said})

    def _grown(self, block: Block, text: str) -> bytes:
        """As `_event` of a block that grows: but for its number and the text it has been written."""
        if block.index not in self._templates:
            (grows,) = self._written("grows", block, EventTemplate.HOLE, "")
            before, number, after = typed_event({"type": grows.pop("type"), _NUMBER: 0, **grows}).partition(_NUMBERED)
            self._templates[block.index] = before + number[:-1], EventTemplate(after)
        self._sequence += 1
        before, template = self._templates[block.index]
        return b"%b%d%b" % (before, self._sequence, template.event(text))

    def _take(self, delta: TextDelta) -> Iterator[tuple[Step, Block, str, str]]:
        """What a delta does to which block, by which text, and the status of an item that it closes.

        What the end of the output closes is as complete as the output: also a call, whose end a parser says for it.
        """
        events, last = self._turn.read(delta), "completed" if delta.output is None else _status(delta.output)
        for index, event in enumerate(events, 1):
            ends = isinstance(event, CallEnd) and index == len(events)
            for step, block, text in self._blocks.take([event]):
                if step == "opens":
                    self._ids.append(new_id(_PREFIX["custom" if block.is_custom else block.kind]))
                yield self._closed(step, block, text, last if ends else "completed")
        self._num_reasoning += len(delta.token_ids) if self._blocks.is_reasoning else 0
        if delta.output is not None:
            for step, block, text in self._blocks.close():
                yield self._closed(step, block, text, last)

    def _closed(self, step: Step, block: Block, text: str, status: str) -> tuple[Step, Block, str, str]:
        if step == "closes":
            self._statuses[block.index] = status
        return step, block, text, status

    def _written(self, step: Step, block: Block, text: str, status: str) -> Iterator[Written]:
        """The events of a step of a block. status: of the item that it closes."""
        where = {"item_id": self._ids[block.index], "output_index": block.index}
        part, name = {**where, "content_index": 0}, f"response.{'output' if block.kind == 'text' else 'reasoning'}_text"
        if block.kind == "call":
            part = where
            name = f"response.{'custom_tool_call_input' if block.is_custom else 'function_call_arguments'}"
        logprobs: Written = {"logprobs": []} if block.kind == "text" else {}
        if step == "opens":
            yield {"type": "response.output_item.added", "output_index": block.index, "item": self._item(block)}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **part, "part": _part(block)}
        elif step == "grows":
            yield {"type": f"{name}.delta", **part, "delta": text, **logprobs}
        elif block.kind == "call":
            yield {"type": f"{name}.done", **part, **self._called(block)}
        else:
            yield {"type": f"{name}.done", **part, "text": block.text, **logprobs}
            yield {"type": "response.content_part.done", **part, "part": _part(block)}
        if step == "closes":
            item = self._item(block, status)
            yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _item(self, block: Block, status: str = "in_progress") -> Written:
        base = {"id": self._ids[block.index], "status": status}
        parts = [] if status == "in_progress" else [_part(block)]
        if block.kind == "text":
            return {**base, "type": "message", "role": "assistant", "content": parts}
        if block.kind == "reasoning":
            return {**base, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        kind = "custom_tool_call" if block.is_custom else "function_call"
        return {**base, "type": kind, "call_id": block.id, **self._called(block)}

    def _called(self, block: Block) -> Written:
        """What a call says: of which tool, and what it is given."""
        said = {"input" if block.is_custom else "arguments": block.text}
        tool, namespace = self._body.own_tools.get(block.name, (None, None))
        if tool is None or namespace is None:
            return {"name": block.name, **said}
        return {"name": tool.name, "namespace": namespace, **said}

    def _end(self, output: RequestOutput) -> Written:
        """The response, which is kept if it is to be."""
        items = [self._item(block, self._statuses[block.index]) for block in self._blocks.all]
        response = self._response(_status(output), items, self._usage(output))
        self._keeper.keep(response)
        return response

    def _usage(self, output: RequestOutput) -> Written:
        usage = self._api.usage([self._turn.ids], [output])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _most(self) -> int | None:
        """Tokens of the output: what was asked, or what the context has room for if that is less."""
        asked, room = self._body.max_output_tokens, self._api.core.info.max_context - len(self._turn.ids)
        return None if asked is None else min(asked, room)

    def _response(self, status: str, items: list[Written] | None = None, usage: Written | None = None) -> Written:
        body, defaults = self._body, self._api.defaults
        said = body.model_dump(mode="json", by_alias=True, include={"tools", "tool_choice", "text", "reasoning"})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": body.background,
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": self._most(),
            "model": body.model or self._api.names[0],
            "output": items or [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": said["reasoning"] or {"effort": None, "summary": None},
            "store": self._keeper.keeps,
            "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
            "text": said["text"] or {"format": {"type": "text"}},
            "tool_choice": said["tool_choice"] or "auto",
            "tools": said["tools"] or [],
            "top_p": defaults["top_p"] if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": body.metadata or {},
            "user": body.user,
        }


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"


def _part(block: Block) -> Written:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def responses(api: ApiState, kept: KeptResponses) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post(RESPONSES_PATH, response_model=None, responses=STREAMS)
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """OpenAI's Responses: items, function calls, reasoning; kept, in the background, streams."""
        keeper = await kept.keeper(body, owner_of(request))
        turn = await start_turn(api, request, body.chat(keeper.before))
        answer = ResponsesAnswer(api, body, turn, keeper)
        if body.background:
            return kept.begin(request, answer, keeper, body.stream)
        return await answered(request, turn.deltas, answer, body.stream)

    return router
