"""What runs a server: models, tokens, health, metrics, version."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from treetop.api.api_state import ApiState
from treetop.api.errors import ApiError, error_response
from treetop.api.events import TEXT, json_response
from treetop.api.limits import BodyRoute, Ids
from treetop.api.requests.chat_body import Messages
from treetop.api.requests.fields import Body
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


def operations(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    _add_tokens(router, api)
    _add_state(router, api)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        """Names that requests may give as their model, adapters too, and what each can do."""
        return json_response({"object": "list", "data": [_model(api, name) for name in api.names]})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One of them."""
        api.check_model(name)
        return json_response(_model(api, name))

    return router


def _add_tokens(router: APIRouter, api: ApiState) -> None:
    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Text or messages to ids."""
        api.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give prompt or messages")
        if body.messages is not None:
            api.check_messages(body.messages)
            messages = [message.flat() for message in body.messages]
            ids = await api.chat_ids(messages, {"add_generation_prompt": body.add_generation_prompt})
        else:
            ids = await api.llm.encode(body.prompt or "", body.add_special_tokens)
        return json_response({"count": len(ids), "max_model_len": api.core.info.max_context, "tokens": ids})

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Ids to text."""
        api.check_model(body.model)
        reader = api.llm.reader
        tokenizer = reader.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer.json")

        def text_of(ids: list[int]) -> str:
            reader.check_ids("tokens:", ids)
            return tokenizer.decode_each([ids])[0]

        text = await api.llm.lanes.run(len(body.tokens), text_of, body.tokens)
        return json_response({"prompt": text})


def _add_state(router: APIRouter, api: ApiState) -> None:
    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """200 unless the server is about to end: an engine that is started again is no reason to end it."""
        failure = api.core.failure
        return json_response({"status": "ok"}) if failure is None else error_response(503, str(failure))

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 as long as there is an engine that goes on."""
        if api.core.pause is not None:
            return error_response(503, api.core.pause)
        return await live()

    @router.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """200 as long as new requests are welcome."""
        return error_response(503, "the server is shutting down") if api.leaving else await health()

    @router.get("/ping", response_model=None)
    @router.post("/ping", response_model=None)
    async def ping() -> Response:
        """As SageMaker asks for it."""
        return await ready()

    @router.get("/load", response_model=None)
    async def load() -> Response:
        """Requests that run and wait, by vLLM's name; and beside it what else a router may go by."""
        load = api.core.load
        waits = {"num_running": load.num_running, "num_waiting": load.num_waiting, "kv_usage": load.kv_usage}
        return json_response({"server_load": load.num_running + load.num_waiting, **waits})

    @router.get("/server_info", response_model=None)
    @router.get("/get_server_info", response_model=None)
    async def server_info() -> Response:
        """What is served and how; no option of the server's, for a key may be among them."""
        info = api.core.info
        return json_response(
            {
                "version": __version__,
                "served_model_names": list(api.names),
                "max_model_len": info.max_context,
                "max_running_requests": info.max_requests,
                "speculative_num_steps": info.shape.num_steps,
                "speculative_eagle_topk": info.shape.topk,
                "speculative_num_draft_tokens": info.shape.num_draft_tokens,
                "exactness": info.exactness,
                "system_fingerprint": api.system_fingerprint,
            }
        )

    @router.get("/metrics", response_model=None, response_class=Response, responses=TEXT)
    async def metrics() -> Response:
        """Prometheus' text."""
        api.metrics.take(api.core.load, api.core.num_restarts, api.core.is_stalled)
        content, kind = api.metrics.page()
        return Response(content, media_type=kind)

    @router.get("/is_sleeping", response_model=None)
    async def is_sleeping() -> Response:
        """vLLM's."""
        return json_response({"is_sleeping": api.llm.is_sleeping})

    @router.get("/version", response_model=None)
    async def version() -> Response:
        """Of treetop."""
        return json_response({"version": __version__})


def _model(api: ApiState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": api.created,
        "owned_by": "treetop",
        "root": api.names[0],
        "parent": api.names[0] if name in api.core.info.loras else None,
        "max_model_len": api.core.info.max_context,
        "weight_version": api.core.info.weight_version,
        "treetop": {"chat": api.rendering is not None, "draft_trees": api.core.info.has_trees},
    }
