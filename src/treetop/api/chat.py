"""`/v1/chat/completions`: messages through the chat template, the next message back."""

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from treetop.api.api_state import ApiState
from treetop.api.choices import Choice, Choices
from treetop.api.errors import ApiError
from treetop.api.events import DONE, STREAMS, Answer, EventTemplate, answered
from treetop.api.limits import BodyRoute
from treetop.api.logprobs import LogprobWriter, Tokens, tokens_of
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.turn import MessageAccumulator, Turn, delta_of, start_turn
from treetop.outputs import RequestOutput, TextDelta
from treetop.parsers.events import Content


class Chat(Answer):
    """One request as it is answered."""

    last = DONE

    def __init__(self, api: ApiState, body: ChatRequest, turn: Turn) -> None:
        self._body, self._turn = body, turn
        self._choices = Choices(api, body, [turn.ids], turn.deltas, "chatcmpl", "chat.completion.chunk")
        self._logprobs = LogprobWriter(api.llm.reader.tokenizer, body.logprobs_mode)
        self._has_calls = [False] * body.n
        plain = body.stream and not (body.shows_tokens or body.logprobs)
        self._templates = [self._template(index) if plain else None for index in range(body.n)]

    async def whole(self, request: Request) -> Response:
        said = [MessageAccumulator() for _ in range(self._body.n)]

        def see(delta: TextDelta) -> None:
            said[delta.index].take(self._turn.read(delta))

        def choice_of(index: int, output: RequestOutput) -> Choice:
            return {
                "index": index,
                "message": said[index].message(),
                "logprobs": self._chosen(tokens_of(output)),
                "finish_reason": _reason(output, bool(said[index].calls)),
                **self._choices.tokens_of(index, output),
            }

        def beside(output: RequestOutput) -> dict[str, Any]:
            return {**self._choices.prompt_ids(0), **self._of_prompt(output)}

        return await self._choices.whole(request, "chat.completion", choice_of, beside, see)

    def first(self) -> Iterable[bytes]:
        role = {"role": "assistant", "content": ""}
        choices = (self._choice(TextDelta(index, ""), role) for index in range(self._body.n))
        return self._choices.first(choices, **self._choices.prompt_ids(0))

    def events(self, delta: TextDelta) -> Iterable[bytes]:
        said, template = self._turn.read(delta), self._templates[delta.index]
        if template is not None and delta.output is None and len(said) == 1 and isinstance(said[0], Content):
            return (template.event(said[0].text),)
        return self._choices.events(delta, self._pieces(delta, delta_of(said)))

    def end(self) -> bytes:
        return self._choices.end()

    def failed(self, error: ApiError) -> bytes:
        return self._choices.failed(error)

    def _template(self, index: int) -> EventTemplate | None:
        return self._choices.template(self._choice(TextDelta(index, ""), {"content": EventTemplate.HOLE}))

    def _pieces(self, delta: TextDelta, said: dict[str, Any]) -> Iterator[Choice]:
        self._has_calls[delta.index] |= "tool_calls" in said
        if said or delta.tokens or delta.output is not None or self._body.shows_tokens:
            yield self._choice(delta, said)

    def _choice(self, delta: TextDelta, said: dict[str, Any]) -> Choice:
        return {
            "index": delta.index,
            "delta": said,
            "logprobs": self._chosen(delta.tokens) if delta.tokens else None,
            "finish_reason": None if delta.output is None else _reason(delta.output, self._has_calls[delta.index]),
            **self._choices.tokens_of(delta.index, delta),
        }

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """`prompt_logprobs`, in vLLM's form."""
        maximum, logprobs = self._body.prompt_logprobs, output.prompt_logprobs
        if maximum is None or logprobs is None:
            return {}
        return {"prompt_logprobs": self._logprobs.prompt(output.prompt_token_ids, logprobs, maximum)}

    def _chosen(self, tokens: Tokens) -> dict[str, Any] | None:
        return self._logprobs.chat(tokens) if self._body.logprobs else None


def _reason(output: RequestOutput, has_calls: bool) -> str:
    return "tool_calls" if has_calls and output.finish_reason == "stop" else output.finish_reason


def chat(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/chat/completions", response_model=None, responses=STREAMS)
    async def complete(request: Request, body: ChatRequest) -> Response:
        """OpenAI's Chat Completions: messages through the model's chat template, tools, structures, streams."""
        turn = await start_turn(api, request, body, cuts=False)
        return await answered(request, turn.deltas, Chat(api, body, turn), body.stream)

    return router
