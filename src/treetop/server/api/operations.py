"""What runs a server: models, tokens, health, metrics, version."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from treetop.server.api.chat import Messages
from treetop.server.api.errors import ApiError, error_response
from treetop.server.api.events import json_response
from treetop.server.api.fields import Body
from treetop.server.api.front import Front
from treetop.server.api.limits import BodyRoute, Ids
from treetop.types.errors import InputError
from treetop.version import __version__


class TokenizeRequest(Body):
    """A prompt's text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """Ids to text."""

    model: str | None = None
    tokens: Ids = Field(description="ids")


def operations(front: Front) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    _add_tokens(router, front)
    _add_state(router, front)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(front, name) for name in front.names]})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        front.check_model(name)
        return json_response(_model(front, name))

    return router


def _add_tokens(router: APIRouter, front: Front) -> None:
    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give prompt or messages")
        if body.messages is not None:
            messages = [message.flat() for message in body.messages]
            ids = await front.chat_ids(messages, {"add_generation_prompt": body.add_generation_prompt})
        else:
            ids = await front.llm.encode(body.prompt or "", body.add_special_tokens)
        return json_response({"count": len(ids), "max_model_len": front.core.info.max_context, "tokens": ids})

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        front.check_model(body.model)
        reader = front.llm.reader
        tokenizer = reader.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer.json")

        def text_of(ids: list[int]) -> str:
            reader.check_ids("tokens:", ids)
            return tokenizer.decode_each([ids])[0]

        text = await front.llm.lanes.run(len(body.tokens), text_of, body.tokens)
        return json_response({"prompt": text})


def _add_state(router: APIRouter, front: Front) -> None:
    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """200 unless the server is about to end: an engine that is started again is no reason to end it."""
        failure = front.core.failure
        return json_response({"status": "ok"}) if failure is None else error_response(503, str(failure))

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 as long as there is an engine that goes on."""
        if front.core.pause is not None:
            return error_response(503, front.core.pause)
        return await live()

    @router.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """200 as long as new requests are welcome."""
        return error_response(503, "the server is shutting down") if front.draining else await health()

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        front.metrics.take(front.core.load, front.core.num_restarts, front.core.is_stalled)
        content, kind = front.metrics.page()
        return Response(content, media_type=kind)

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": __version__})


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "treetop",
        "root": front.names[0],
        "max_model_len": front.core.info.max_context,
    }
