"""llama.cpp's `/completion` and `/props`, over completions. Source: its tools/server/README.md."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from treetop.api.api_state import ApiState
from treetop.api.completions import CompletionRequest, start_completion
from treetop.api.errors import ApiError, error_body
from treetop.api.events import STREAMS, Answer, answered, collected, event, json_response
from treetop.api.limits import BodyRoute, Ids
from treetop.api.requests.fields import Body, Neutral, Stops, listed
from treetop.async_llm import DeltaStream
from treetop.outputs import RequestOutput, TextDelta

HINTS = (
    "cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "penalize_nl", "repeat_last_n", "return_progress", "slot_id",
    "timings_per_token",
)  # fmt: skip
NEUTRAL: Neutral = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "image_data": ([],),
    "lora": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "samplers": ([],),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""As `Body.neutral`."""


class LlamaCppRequest(Body):
    """A text, or ids, that go on. n_predict: -1 and -2 for all that the context holds. seed: -1 for any."""

    neutral, hints = NEUTRAL, HINTS
    prompt: str | Ids
    n_predict: int = Field(-1, ge=-2)
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int = Field(-1, ge=-1)
    stop: Annotated[Stops | None, BeforeValidator(listed)] = None
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def completion(self) -> CompletionRequest:
        """Raises ValidationError for what its own fields did not."""
        said = self.model_dump(
            exclude_none=True, exclude={"n_predict", "repeat_penalty", "seed", "grammar", "json_schema"}
        )
        most = {"max_tokens": self.n_predict} if self.n_predict >= 0 else {}
        own = {
            "repetition_penalty": self.repeat_penalty,
            "guided_grammar": self.grammar,
            "json_schema": self.json_schema,
        }
        own["seed"] = self.seed if self.seed >= 0 else None
        return CompletionRequest.model_validate({**said, **{k: v for k, v in own.items() if v is not None}, **most})


class LlamaCppAnswer(Answer):
    """One request as it is answered."""

    last = b""

    def __init__(self, deltas: DeltaStream, name: str) -> None:
        self._deltas, self._name = deltas, name

    async def whole(self, request: Request) -> Response:
        (output,) = await collected(request, self._deltas)
        return json_response({"content": output.text, **self._end(output)})

    def first(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: TextDelta) -> Iterator[bytes]:
        if delta.text:
            yield event({"content": delta.text, "tokens": delta.token_ids, "stop": False})
        if delta.output is not None:
            yield event({"content": "", "tokens": (), **self._end(delta.output)})

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error.status, str(error), error.param, error.code))

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        ended = "limit" if output.finish_reason == "length" else "eos" if output.stop_string is None else "word"
        return {
            "stop": True,
            "model": self._name,
            "tokens_predicted": len(output.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.metrics.num_cached_tokens,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": output.stop_string or "",
        }


def llama_cpp(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/completion", response_model=None, responses=STREAMS)
    async def completion(request: Request, body: LlamaCppRequest) -> Response:
        """llama.cpp's, over Completions."""
        _, deltas = await start_completion(api, request, body.completion)
        return await answered(request, deltas, LlamaCppAnswer(deltas, api.names[0]), body.stream)

    @router.get("/props", response_model=None)
    async def props() -> Response:
        """What llama.cpp says of a server."""
        template = None if api.rendering is None else api.rendering.template
        tool_use = None if template is None else template.tool_use
        return json_response(
            {
                "default_generation_settings": {"n_ctx": api.core.info.max_context},
                "total_slots": api.core.info.max_requests,
                "model_path": api.names[0],
                "chat_template": "" if template is None else template.source,
                **({} if tool_use is None else {"chat_template_tool_use": tool_use}),
                "modalities": {"vision": False, "audio": False},
            }
        )

    return router
