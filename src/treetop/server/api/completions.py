"""`/v1/completions`: text or ids go on; several prompts and choices at once."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag

from treetop.server.api.events import STREAMS, EventStream, check_output, collected, event, json_response
from treetop.server.api.fields import SamplingFields
from treetop.server.api.front import Front, UsageSoFar, new_id
from treetop.server.api.limits import BodyRoute, Ids, Texts
from treetop.server.api.logprobs import LogprobWriter, PromptTokens, Tokens, tokens_of
from treetop.server.async_llm import DeltaStream
from treetop.server.outputs import RequestOutput, TextDelta
from treetop.types.errors import InputError

DEFAULT_MAX_TOKENS = 16


def _kind(prompt: Any) -> str:
    """Which of the kinds a prompt is to be, by its first item: errors are then of one kind."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, list):
        return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"
    return "text"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("lists")],
    Discriminator(_kind),
]


class CompletionRequest(SamplingFields):
    """OpenAI's request, with the options of `SamplingParams`."""

    prompt: Annotated[Prompts, Field(description="text, token ids, or a list of either")]
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, description="16 by default; null is the same")
    echo: bool = False
    logprobs: int | None = Field(None, description="best tokens whose log-probabilities come with each token's")

    @property
    def num_prompts(self) -> int:
        return len(self.prompt) if _kind(self.prompt) in ("texts", "lists") else 1

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """What is echoed has log-probabilities, too. An echo alone asks for those of the prompt and shows none."""
        asked = super().num_prompt_logprobs
        if not self.echo:
            return asked
        wanted = (asked, self.logprobs, 0 if self.max_tokens == 0 else None)
        return max((each for each in wanted if each is not None), default=None)


class Completion:
    """One request as it is answered. Choice i of prompt j has index j * n + i, and begins with echo[j]."""

    def __init__(
        self, front: Front, body: CompletionRequest, ids: list[list[int]], echo: list[str], deltas: DeltaStream
    ) -> None:
        self._front, self._body, self._ids, self._deltas = front, body, ids, deltas
        self._id, self._name = new_id("cmpl"), body.model or front.names[0]
        self._created = int(time.time())
        tokenizer = front.llm.reader.tokenizer
        self._logprobs = [LogprobWriter(tokenizer) for _ in range(len(ids) * body.n)]
        self._echo = echo

    async def whole(self, request: Request) -> Response:
        outputs = await collected(request, self._deltas)
        choices = [
            {
                **self._choice(index, self._prefix(index) + output.text, output, tokens_of(output), self._told(output)),
                **self._ids_of(output.token_ids, index),
                **self._of_prompt(output),
            }
            for index, output in enumerate(outputs)
        ]
        return json_response({**self._head(choices), **self._closing(outputs)})

    async def events(self) -> AsyncIterator[bytes]:
        outputs: list[RequestOutput] = []
        usage = UsageSoFar(self._body, self._ids)
        waits = self._body.echo and self._body.logprobs is not None  # for the prompt's log-probabilities
        if (self._body.echo or self._body.return_token_ids) and not waits:
            for index in range(len(self._ids) * self._body.n):
                yield event({**self._head([self._first(index)]), **usage.after(index, 0)})
        async for delta in self._deltas:
            if waits and delta.prompt_logprobs is not None:
                first = self._first(delta.index, self._told(delta))
                yield event({**self._head([first]), **usage.after(delta.index, 0)})
            if delta.output is not None:
                check_output(delta.output)
                outputs.append(delta.output)
            used = usage.after(delta.index, len(delta.token_ids))
            if delta.text or delta.tokens or delta.output is not None or self._body.return_token_ids:
                yield event({**self._head([self._piece(delta)]), **used})
        if self._body.include_usage:
            yield event({**self._head([]), **self._closing(outputs)})

    def _piece(self, delta: TextDelta) -> dict[str, Any]:
        choice = self._choice(delta.index, delta.text, delta.output, delta.tokens)
        return {**choice, **self._ids_of(delta.token_ids)}

    def _first(self, index: int, prompt: PromptTokens = ()) -> dict[str, Any]:
        """What a stream says of a prompt."""
        return {**self._choice(index, self._prefix(index), None, (), prompt), **self._ids_of((), index)}

    def _told(self, given: RequestOutput | TextDelta) -> PromptTokens:
        """The prompt's tokens with their log-probabilities, where these are echoed."""
        logprobs = given.prompt_logprobs
        if logprobs is None or not self._body.echo:
            return ()
        prompt = given.prompt_token_ids if isinstance(given, RequestOutput) else self._ids[given.index // self._body.n]
        return list(zip(prompt, logprobs, strict=True))

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """`prompt_logprobs`, in vLLM's form."""
        most, logprobs = self._body.prompt_logprobs, output.prompt_logprobs
        if most is None or logprobs is None:
            return {}
        tokenizer = self._front.llm.reader.tokenizer
        return {"prompt_logprobs": LogprobWriter(tokenizer).prompt(output.prompt_token_ids, logprobs, most)}

    def _choice(
        self, index: int, text: str, output: RequestOutput | None, tokens: Tokens = (), prompt: PromptTokens = ()
    ) -> dict[str, Any]:
        reason, most = None if output is None else output.finish_reason, self._body.logprobs
        logprobs = None if most is None else self._logprobs[index].completion([*prompt, *tokens], most)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _ids_of(self, token_ids: Sequence[int], index: int | None = None) -> dict[str, Any]:
        """`return_token_ids`: those of an output, and for choice `index` those of its prompt, too."""
        if not self._body.return_token_ids:
            return {}
        prompt = {} if index is None else {"prompt_token_ids": self._ids[index // self._body.n]}
        return {**prompt, "token_ids": token_ids}

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
            "choices": choices,
        }

    def _closing(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {"usage": self._front.usage(self._ids, outputs), "metrics": self._front.metrics.of(outputs)}

    def _prefix(self, index: int) -> str:
        return self._echo[index // self._body.n]


async def echoed(front: Front, body: CompletionRequest, ids: list[list[int]]) -> list[str]:
    """What each prompt's choices begin with: its text, as it was given or as its ids read, if that is asked for."""
    tokenizer, given = front.llm.reader.tokenizer, [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if body.truncate_prompt_tokens is not None:
        given = ids
    if not body.echo or (tokenizer is None and not isinstance(given[0], str)):
        return [""] * len(ids)
    if isinstance(given[0], str):
        return given
    assert tokenizer is not None
    return await front.llm.lanes.run(sum(map(len, ids)), tokenizer.decode_each, ids)


def completions(front: Front) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/completions", response_model=None, responses=STREAMS)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        front.check_model(body.model)
        front.check_count(body.num_prompts * body.n)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        ids = await front.llm.ids_of(body.prompt, body.reading(max_tokens))
        if not ids:
            raise InputError("prompt: the list is empty")
        await front.check_structure(request, body)
        echo = await echoed(front, body, ids)
        deltas = front.start(ids, body, max_tokens)
        try:
            completion = Completion(front, body, ids, echo, deltas)
            return EventStream(deltas, completion.events) if body.stream else await completion.whole(request)
        except BaseException:
            deltas.close()
            raise

    return router
