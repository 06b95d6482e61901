"""SGLang's `/generate`, over completions, and `/abort_request`.

Source: its docs/basic_usage/native_api and sampling_params pages.
"""

import time
from base64 import b64encode
from collections.abc import Iterator
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from treetop.api.api_state import ApiState, new_id
from treetop.api.completions import CompletionRequest, start_completion
from treetop.api.errors import ApiError, error_body
from treetop.api.events import DONE, STREAMS, Answer, answered, collected, event, json_response
from treetop.api.kept_responses import owner_of
from treetop.api.keys.api_keys import CALLER
from treetop.api.limits import BodyRoute, FewMembers, Ids, StopIds, Texts
from treetop.api.logprobs import LEAST
from treetop.api.requests.fields import MAX_CHOICES, Body, Neutral, Stops, listed
from treetop.async_llm import DeltaStream
from treetop.outputs import RequestOutput, TextDelta
from treetop.types.errors import InputError
from treetop.types.sampling import LogprobsMode

NEUTRAL: Neutral = {
    "audio_data": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "input_embeds": (),
    "log_metrics": (True, False),
    "logprob_start_len": (-1,),
    "return_hidden_states": (False,),
    "return_text_in_logprobs": (False,),
    "token_ids_logprob": (),
    "top_logprobs_num": (0,),
}
"""As `Body.neutral`."""
ABORT_NEUTRAL: Neutral = {"abort_message": ()}
"""Likewise."""


class SglangParams(Body):
    """How tokens are chosen and when they end. top_k: -1 for all."""

    max_new_tokens: int = 128
    min_new_tokens: int | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    sampling_seed: int | None = None
    stop: Annotated[Stops | None, BeforeValidator(listed)] = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: Annotated[dict[str, float] | None, FewMembers] = None

    @property
    def said(self) -> dict[str, Any]:
        """As completions say it."""
        said = self.model_dump(exclude_none=True)
        names = {
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "sampling_seed": "seed",
            "no_stop_trim": "include_stop_str_in_output",
        }
        return {names.get(name, name): value for name, value in said.items()}


class GenerateRequest(Body):
    """Texts or ids that go on. lora_path: the name of an adapter. rid: an id that comes back."""

    neutral = NEUTRAL
    text: str | Texts | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: SglangParams = Field(default_factory=lambda: SglangParams.model_validate({}))
    stream: bool = False
    return_logprob: bool = Field(False, description="meta_info.output_token_logprobs at the end")
    logprobs_mode: LogprobsMode = Field("raw_logprobs", description="processed_logprobs: what tokens were drawn with")
    return_routed_experts: bool = Field(
        False,
        description="meta_info.routed_experts at the end: base64 of int32, the lowest byte first, of the shape"
        " meta_info.routed_experts_shape [tokens, layers with experts, top_k], of input and output but for the last"
        " token; with --enable-return-routed-experts",
    )
    routed_experts_start_len: Annotated[int, Field(ge=0)] = Field(
        0, description="without so many first tokens of these"
    )
    lora_path: str | None = Field(None, max_length=200)
    rid: str | None = Field(None, max_length=200)

    @property
    def completion(self) -> CompletionRequest:
        """Raises InputError."""
        if (self.text is None) == (self.input_ids is None):
            raise InputError("text, input_ids: give one of them")
        prompt = self.input_ids if self.text is None else self.text
        said = {**self.sampling_params.said, "stream": self.stream, "prompt": prompt, "model": self.lora_path}
        if self.return_logprob:
            said["logprobs"] = 0
        said["return_routed_experts"] = self.return_routed_experts
        said["routed_experts_start_len"] = self.routed_experts_start_len
        return CompletionRequest.model_validate(said)

    @property
    def is_one(self) -> bool:
        """Whether there is one prompt, not in a list of several, and one choice."""
        several = isinstance(self.text, list) or (bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list))
        return not several and self.sampling_params.n == 1


class AbortBody(Body):
    """Which requests of `/generate` end, with what they have."""

    neutral = ABORT_NEUTRAL
    rid: str | None = Field(None, max_length=200, description="as the request gave it")
    abort_all: bool = Field(False, description="of the same API key; with an admin's, of all")


class GenerateAnswer(Answer):
    """One request as it is answered: texts so far in events, not what is new of them."""

    last = DONE

    def __init__(self, body: GenerateRequest, deltas: DeltaStream) -> None:
        self._deltas, self._is_one, self._id = deltas, body.is_one, body.rid or new_id("gen")
        self._processed = body.logprobs_mode == "processed_logprobs"
        self._start = body.routed_experts_start_len
        self._texts, self._began_s = dict[int, list[str]](), time.perf_counter()

    async def whole(self, request: Request) -> Response:
        outputs = await collected(request, self._deltas)
        bodies = [self._body(index, output.text, output) for index, output in enumerate(outputs)]
        return json_response(bodies[0] if self._is_one else bodies)

    def first(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: TextDelta) -> Iterator[bytes]:
        pieces = self._texts.setdefault(delta.index, [])
        pieces.append(delta.text)
        text = "".join(pieces) if delta.output is None else delta.output.text
        if delta.text or delta.output is not None:
            index = {} if self._is_one else {"index": delta.index}
            yield event({**self._body(delta.index, text, delta.output), **index})

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error.status, str(error), error.param, error.code))

    def _body(self, index: int, text: str, output: RequestOutput | None) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": self._id if self._is_one else f"{self._id}_{index}", "finish_reason": None}
        if output is not None:
            reason: dict[str, Any] = {"type": output.finish_reason}
            if output.stop_string is not None:
                reason["matched"] = output.stop_string
            if output.finish_reason == "length":
                reason["length"] = len(output.token_ids)
            meta |= {
                "finish_reason": reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(output.token_ids),
                "cached_tokens": output.metrics.num_cached_tokens,
                "weight_version": str(output.metrics.weight_version),
                "e2e_latency": time.perf_counter() - self._began_s,
            }
            if output.logprobs is not None:
                own = [each.processed if self._processed else each.logprob for each in output.logprobs]
                pairs = zip(own, output.token_ids, strict=True)
                meta["output_token_logprobs"] = [[max(logprob, LEAST), token, None] for logprob, token in pairs]
            if output.routed_experts is not None:
                told = output.routed_experts.after(self._start)
                meta["routed_experts"] = b64encode(told.int32()).decode()
                meta["routed_experts_shape"] = told.shape
            return {"text": text, "output_ids": output.token_ids, "meta_info": meta}
        return {"text": text, "meta_info": meta}


def sglang(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    alive = WeakKeyDictionary[DeltaStream, tuple[str, str | None]]()  # whose each is, and its rid

    @router.post("/generate", response_model=None, responses=STREAMS)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """SGLang's, over Completions."""
        _, deltas = await start_completion(api, request, body.completion)
        alive[deltas] = owner_of(request), body.rid
        return await answered(request, deltas, GenerateAnswer(body, deltas), body.stream)

    @router.post("/abort_request", response_model=None)
    async def abort_request(request: Request, body: AbortBody) -> Response:
        """SGLang's: requests of `/generate` end, with what they have. One that is not there, or has ended, is none."""
        if api.options.num_api_workers > 1:
            words = "several API processes do not know each other's requests (--api-workers 1); close the connection"
            raise ApiError(400, f"abort_request: {words}", code="unsupported_parameter")
        if (body.rid is None) is not body.abort_all:
            raise InputError("rid, abort_all: give one of them")
        owner, key = owner_of(request), CALLER.get()
        of_all = body.abort_all and key is not None and key.is_admin
        for deltas, (whose, rid) in list(alive.items()):
            if (whose == owner or of_all) and (body.abort_all or rid == body.rid):
                deltas.end_early()
        return json_response({})

    return router
