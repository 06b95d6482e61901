"""`/v1/chat/completions`: messages through the chat template, the next message back."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from treetop.server.api.events import STREAMS, EventStream, check_output, collected, event, json_response
from treetop.server.api.fields import Body, SamplingFields
from treetop.server.api.front import Front, UsageSoFar, new_id
from treetop.server.api.limits import MOST_MESSAGES, MOST_PARTS, BodyRoute
from treetop.server.api.logprobs import LogprobWriter, Tokens, tokens_of
from treetop.server.async_llm import DeltaStream
from treetop.server.chat_input import Message
from treetop.server.chat_template import check_options
from treetop.server.outputs import RequestOutput, TextDelta
from treetop.types.errors import InputError, shown

_OWN_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
"""What a request says in fields of their own, never in `chat_template_kwargs`."""


class TextPart(Body):
    """A part of a message's content. cache_control: Anthropic's, which clients send to anybody; it is not used."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class RefusalPart(Body):
    """What an assistant said in place of an answer; the template is given it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


class ChatMessage(BaseModel):
    """A message. Its other fields reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any, info: ValidationInfo) -> Any:
        """Raise for a part that is no text: what else it lacks as a text would hide that."""
        kinds = ("text", "refusal") if info.data.get("role") == "assistant" else ("text",)
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                raise PydanticCustomError("part", "only parts of text are supported, not {kind}", {"kind": shown(kind)})
        return content

    def flat(self) -> Message:
        """As templates expect it: text parts joined by a newline, no field that says nothing."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {**extra, "role": self.role, "content": "" if content is None else content}


Messages = Annotated[list[ChatMessage], Field(max_length=MOST_MESSAGES, fail_fast=True)]


class ChatRequest(SamplingFields):
    """OpenAI's request, with the options of `SamplingParams`, and chat_template_kwargs."""

    messages: Messages = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="all that the context holds by default")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(None, description="true, unless continue_final_message is")
    continue_final_message: bool = Field(False, description="the output goes on with the last message")
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs: only with logprobs true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        options = self.chat_template_kwargs or {}
        try:
            check_options(options, _OWN_FIELDS)
        except InputError as error:
            raise InputError(f"chat_template_kwargs: {error}") from None
        given = self.add_generation_prompt
        return options if given is None else {**options, "add_generation_prompt": given}

    @property
    def most_tokens(self) -> int | None:
        given = {each for each in (self.max_tokens, self.max_completion_tokens) if each is not None}
        if len(given) > 1:
            raise InputError("max_tokens and max_completion_tokens: give one of them")
        return given.pop() if given else None


class Chat:
    """One request as it is answered."""

    def __init__(self, front: Front, body: ChatRequest, ids: list[int], deltas: DeltaStream) -> None:
        self._front, self._body, self._ids, self._deltas = front, body, ids, deltas
        self._id, self._name = new_id("chatcmpl"), body.model or front.names[0]
        self._created = int(time.time())
        self._logprobs = LogprobWriter(front.llm.reader.tokenizer)

    async def whole(self, request: Request) -> Response:
        outputs = await collected(request, self._deltas)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text},
                "logprobs": self._chosen(tokens_of(output)),
                "finish_reason": output.finish_reason,
                **self._ids_of(output.token_ids),
            }
            for index, output in enumerate(outputs)
        ]
        head = {**self._head("chat.completion", choices), **self._prompt_ids(), **self._of_prompt(outputs[0])}
        return json_response({**head, **self._closing(outputs)})

    async def events(self) -> AsyncIterator[bytes]:
        outputs: list[RequestOutput] = []
        usage = UsageSoFar(self._body, [self._ids])
        for index in range(self._body.n):
            beside = {**self._prompt_ids(), **usage.after(index, 0)}
            yield self._event(TextDelta(index, ""), beside, {"role": "assistant", "content": ""})
        async for delta in self._deltas:
            if delta.output is not None:
                check_output(delta.output)
                outputs.append(delta.output)
            used = usage.after(delta.index, len(delta.token_ids))
            if delta.text or delta.tokens or delta.output is not None or self._body.return_token_ids:
                yield self._event(delta, used, {"content": delta.text} if delta.text else {})
        if self._body.include_usage:
            yield event({**self._head("chat.completion.chunk", []), **self._closing(outputs)})

    def _event(self, delta: TextDelta, beside: dict[str, Any], said: dict[str, str]) -> bytes:
        choice = {
            "index": delta.index,
            "delta": said,
            "logprobs": self._chosen(delta.tokens) if delta.tokens else None,
            "finish_reason": None if delta.output is None else delta.output.finish_reason,
            **self._ids_of(delta.token_ids),
        }
        return event({**self._head("chat.completion.chunk", [choice]), **beside})

    def _ids_of(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._ids} if self._body.return_token_ids else {}

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """`prompt_logprobs`, in vLLM's form."""
        most, logprobs = self._body.prompt_logprobs, output.prompt_logprobs
        if most is None or logprobs is None:
            return {}
        return {"prompt_logprobs": self._logprobs.prompt(output.prompt_token_ids, logprobs, most)}

    def _chosen(self, tokens: Tokens) -> dict[str, Any] | None:
        return self._logprobs.chat(tokens) if self._body.logprobs else None

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "choices": choices,
        }

    def _closing(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {"usage": self._front.usage([self._ids], outputs), "metrics": self._front.metrics.of(outputs)}


def chat(front: Front) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/chat/completions", response_model=None, responses=STREAMS)
    async def complete(request: Request, body: ChatRequest) -> Response:
        front.check_model(body.model)
        most = body.most_tokens
        messages, reading = [message.flat() for message in body.messages], body.reading(most)
        ids = await front.chat_prompt(messages, body.template_options, reading, body.continue_final_message)
        await front.check_structure(request, body)
        deltas = front.start([ids], body, most)
        try:
            answer = Chat(front, body, ids, deltas)
            return EventStream(deltas, answer.events) if body.stream else await answer.whole(request)
        except BaseException:
            deltas.close()
            raise

    return router
