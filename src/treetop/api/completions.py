"""`/v1/completions`: text or ids go on; several prompts and choices at once."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag

from treetop.api.api_state import ApiState
from treetop.api.choices import Choice, Choices
from treetop.api.errors import ApiError
from treetop.api.events import DONE, STREAMS, Answer, EventTemplate, answered
from treetop.api.limits import BodyRoute, Ids, Texts
from treetop.api.logprobs import LogprobWriter, PromptTokens, Tokens, tokens_of
from treetop.api.requests.fields import SamplingFields
from treetop.async_llm import DeltaStream
from treetop.outputs import RequestOutput, TextDelta
from treetop.types.errors import InputError

DEFAULT_MAX_TOKENS = 16
_KIND = "text_completion"


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


class Completion(Answer):
    """One request as it is answered. Each choice begins with its prompt's echo."""

    last = DONE

    def __init__(
        self, api: ApiState, body: CompletionRequest, ids: list[list[int]], echo: list[str], deltas: DeltaStream
    ) -> None:
        self._choices = Choices(api, body, ids, deltas, "cmpl", _KIND)
        self._tokenizer = api.llm.reader.tokenizer
        self._body, self._ids, self._echo = body, ids, echo
        self._logprobs = [LogprobWriter(self._tokenizer, body.logprobs_mode) for _ in range(len(ids) * body.n)]
        self._waits = body.echo and body.logprobs is not None  # for the prompt's log-probabilities
        self._templates: list[EventTemplate | None] = [
            None if body.shows_tokens or body.logprobs is not None else self._template(index)
            for index in range(len(self._logprobs) * body.stream)
        ]

    async def whole(self, request: Request) -> Response:
        def choice_of(index: int, output: RequestOutput) -> Choice:
            text, prompt = self._prefix(index) + output.text, self._prompt_tokens(output)
            choice = self._choice(index, text, output, tokens_of(output), prompt)
            prompt_ids = self._choices.prompt_ids(index)
            return {**choice, **prompt_ids, **self._choices.tokens_of(index, output), **self._of_prompt(output)}

        return await self._choices.whole(request, _KIND, choice_of)

    def first(self) -> Iterable[bytes]:
        tells = (self._body.echo or self._body.return_token_ids) and not self._waits
        count = len(self._ids) * self._body.n if tells else 0
        return self._choices.first(self._first(index) for index in range(count))

    def events(self, delta: TextDelta) -> Iterable[bytes]:
        template = self._templates[delta.index]
        if template is not None and delta.output is None:
            return (template.event(delta.text),) if delta.text else ()
        return self._choices.events(delta, self._pieces(delta))

    def end(self) -> bytes:
        return self._choices.end()

    def failed(self, error: ApiError) -> bytes:
        return self._choices.failed(error)

    def _pieces(self, delta: TextDelta) -> Iterator[Choice]:
        if self._waits and delta.prompt_logprobs is not None:
            yield self._first(delta.index, self._prompt_tokens(delta))
        if delta.text or delta.tokens or delta.output is not None or self._body.shows_tokens:
            choice = self._choice(delta.index, delta.text, delta.output, delta.tokens)
            yield {**choice, **self._choices.tokens_of(delta.index, delta)}

    def _template(self, index: int) -> EventTemplate | None:
        return self._choices.template(self._choice(index, EventTemplate.HOLE, None))

    def _first(self, index: int, prompt: PromptTokens = ()) -> Choice:
        """What a stream says of a prompt."""
        choice = self._choice(index, self._prefix(index), None, (), prompt)
        return {**choice, **self._choices.prompt_ids(index), **self._choices.tokens_of(index, TextDelta(index, ""))}

    def _prompt_tokens(self, given: RequestOutput | TextDelta) -> PromptTokens:
        """The prompt's tokens with their log-probabilities, where these are echoed."""
        logprobs = given.prompt_logprobs
        if logprobs is None or not self._body.echo:
            return ()
        prompt = given.prompt_token_ids if isinstance(given, RequestOutput) else self._ids[given.index // self._body.n]
        return list(zip(prompt, logprobs, strict=True))

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """`prompt_logprobs`, in vLLM's form."""
        maximum, logprobs = self._body.prompt_logprobs, output.prompt_logprobs
        if maximum is None or logprobs is None:
            return {}
        return {"prompt_logprobs": self._logprobs[0].prompt(output.prompt_token_ids, logprobs, maximum)}

    def _choice(
        self, index: int, text: str, output: RequestOutput | None, tokens: Tokens = (), prompt: PromptTokens = ()
    ) -> Choice:
        reason, maximum = None if output is None else output.finish_reason, self._body.logprobs
        logprobs = None if maximum is None else self._logprobs[index].completion([*prompt, *tokens], maximum)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prefix(self, index: int) -> str:
        return self._echo[index // self._body.n]


async def echoed(api: ApiState, body: CompletionRequest, ids: list[list[int]]) -> list[str]:
    """What each prompt's choices begin with: its text, as it was given or as its ids read, if that is asked for."""
    tokenizer, given = api.llm.reader.tokenizer, [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if body.truncate_prompt_tokens is not None:
        given = ids
    if not body.echo or (tokenizer is None and not isinstance(given[0], str)):
        return [""] * len(ids)
    if isinstance(given[0], str):
        return given
    assert tokenizer is not None
    return await api.llm.lanes.run(sum(map(len, ids)), tokenizer.decode_each, ids)


async def start_completion(
    api: ApiState, request: Request, body: CompletionRequest
) -> tuple[list[list[int]], DeltaStream]:
    """Queue what another API asks for: ids of its prompts, and their outputs.

    Without `max_tokens` to the context's end.
    """
    api.check_model(body.model)
    api.check_count(body.num_prompts * body.n)
    most = body.max_tokens if "max_tokens" in body.model_fields_set else None
    ids = await api.llm.ids_of(body.prompt, body.reading(most))
    if not ids:
        raise InputError("prompt: the list is empty")
    await api.check_structure(request, body, body.structure)
    return ids, api.start(ids, body, most, body.structure)


def completions(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/completions", response_model=None, responses=STREAMS)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """OpenAI's Completions: text, ids, or lists of either; several choices, streams."""
        api.check_model(body.model)
        api.check_count(body.num_prompts * body.n)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        ids = await api.llm.ids_of(body.prompt, body.reading(max_tokens))
        if not ids:
            raise InputError("prompt: the list is empty")
        if "max_tokens" in body.model_fields_set:
            api.check_room(ids, max_tokens, "max_tokens")
        await api.check_structure(request, body, body.structure)
        echo = await echoed(api, body, ids)
        deltas = api.start(ids, body, max_tokens, body.structure)
        return await answered(request, deltas, Completion(api, body, ids, echo, deltas), body.stream)

    return router
