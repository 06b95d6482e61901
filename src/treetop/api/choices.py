"""An answer of choices in OpenAI's older shape, at once or in events: what completions and chats share."""

import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastapi import Request, Response

from treetop.api.api_state import ApiState, UsageSoFar, new_id
from treetop.api.drafts import DraftWriters
from treetop.api.errors import ApiError, error_body
from treetop.api.events import DONE, EventTemplate, collected, encode, event, json_response
from treetop.api.requests.fields import SamplingFields
from treetop.async_llm import DeltaStream
from treetop.outputs import RequestOutput, TextDelta

Choice = dict[str, Any]


class Choices:
    """One request's answer, of which an endpoint says what a choice is.

    prompts: ids of each; choice i of prompt j has index j * n + i.
    """

    last = DONE

    def __init__(
        self,
        api: ApiState,
        body: SamplingFields,
        prompts: Sequence[list[int]],
        deltas: DeltaStream,
        prefix: str,
        event_kind: str,
    ) -> None:
        """prefix: of the answer's id. event_kind: an event's `object`."""
        self.api, self.body, self.prompts, self.deltas = api, body, prompts, deltas
        self._id, self._name = new_id(prefix), body.model or api.names[0]
        self._created, self._event_kind = int(time.time()), event_kind
        self._begins = event(self._head(event_kind, [])).removesuffix(b"]}\n\n")
        self._usage, self._outputs = UsageSoFar(body, prompts), list[RequestOutput]()
        self._drafts = DraftWriters(body, api.llm.reader.tokenizer, prompts)

    async def whole(
        self,
        request: Request,
        kind: str,
        choice_of: Callable[[int, RequestOutput], Choice],
        beside: Callable[[RequestOutput], dict[str, Any]] = lambda _: {},
        see: Callable[[TextDelta], object] = lambda _: None,
    ) -> Response:
        """kind: the body's `object`. beside: what stands beside the choices, by the first output."""
        outputs = await collected(request, self.deltas, see)
        choices = [choice_of(index, output) for index, output in enumerate(outputs)]
        return json_response({**self._head(kind, choices), **beside(outputs[0]), **self._closing(outputs)})

    def first(self, choices: Iterable[Choice], **beside: Any) -> Iterator[bytes]:
        """What is said before anything comes, with `beside` beside it."""
        for choice in choices:
            yield self._event(choice, {**beside, **self._usage.after(choice["index"], 0)})

    def template(self, choice: Choice) -> EventTemplate | None:
        """Of events that say the same of usage. choice: with `EventTemplate.HOLE`."""
        if self.body.continuous_usage:
            return None
        return EventTemplate(self._event(choice, self._usage.after(choice["index"], 0)))

    def events(self, delta: TextDelta, choices: Iterable[Choice]) -> Iterator[bytes]:
        """choices: what the delta says."""
        if delta.output is not None:
            self._outputs.append(delta.output)
        used = self._usage.after(delta.index, len(delta.token_ids))
        for choice in choices:
            yield self._event(choice, used)

    def end(self) -> bytes:
        if not self.body.include_usage:
            return b""
        return event({**self._head(self._event_kind, []), **self._closing(self._outputs)})

    def _event(self, choice: Choice, beside: dict[str, Any]) -> bytes:
        """As `event` of it all: what is alike in all of them has been written once."""
        ends = b"," + encode(beside)[1:] if beside else b"}"
        return self._begins + encode(choice) + b"]" + ends + b"\n\n"

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error.status, str(error), error.param, error.code))

    def tokens_of(self, index: int, given: RequestOutput | TextDelta) -> dict[str, Any]:
        """What choice `index` says of its tokens beside the text: ids, drafts, experts, if they are asked for."""
        ids = {"token_ids": given.token_ids} if self.body.return_token_ids else {}
        return {**ids, **self._drafts.of(index, given), **self._experts_of(given)}

    def _experts_of(self, given: RequestOutput | TextDelta) -> dict[str, Any]:
        """`routed_experts` at a choice's end, in vLLM's form."""
        output = given if isinstance(given, RequestOutput) else given.output
        if output is None or output.routed_experts is None:
            return {}
        layers, told = self.api.core.info.expert_layers, output.routed_experts.after(self.body.experts_start)
        return {} if layers is None else {"routed_experts": b64encode(told.npy(layers)).decode()}

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """The ids of choice `index`'s prompt, if they are asked for."""
        return {"prompt_token_ids": self.prompts[index // self.body.n]} if self.body.return_token_ids else {}

    def _head(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        own = {"id": self._id, "object": kind, "created": self._created, "model": self._name}
        return {**own, "system_fingerprint": self.api.system_fingerprint, "choices": choices}

    def _closing(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        version = max((output.metrics.weight_version for output in outputs), default=0)
        used = {"usage": self.api.usage(self.prompts, outputs), "metrics": self.api.metrics.of(outputs)}
        return {**used, "weight_version": version}
