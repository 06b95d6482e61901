"""What changes the server for everybody: weights, sleep, adapters. Where there are keys, it is for an admin's alone."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from treetop.api.api_state import ApiState
from treetop.api.errors import ApiError, ErrorBody
from treetop.api.events import TEXT, json_response
from treetop.api.keys.api_keys import CALLER, Keys
from treetop.api.keys.weight_transfer_routes import TRANSFER_PATHS, add_transfer, check_updates
from treetop.api.limits import BodyRoute
from treetop.api.requests.fields import Body
from treetop.types.changes import InFlight
from treetop.types.errors import InputError


class UpdateWeightsRequest(Body):
    """Folders on the server's machine; SGLang's name for the target's."""

    model_path: str = Field(min_length=1)
    draft_model_path: str | None = Field(None, min_length=1, description="the draft head's; without it the head stays")
    in_flight: InFlight = Field("abort", description="of requests that are alive: retract lets them go on")


class LoadLoraRequest(Body):
    """vLLM's: a folder on the server's machine."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = Field(False, description="true is refused: unload it first")


class UnloadLoraRequest(Body):
    """vLLM's."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = Field(None, description="taken and not needed")


ADMIN_PATHS = (
    "/update_weights_from_disk",
    *TRANSFER_PATHS,
    "/sleep",
    "/wake_up",
    "/flush_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""Of all routes here."""
REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "where there are keys: the key is missing or wrong"},
    403: {"model": ErrorBody, "description": "the key is no admin's, or the server was started without this"},
}
"""What the OpenAPI schema says of them beside what it says of all endpoints."""


class AdminRoute(BodyRoute):
    """A route that asks for an admin key before it reads a body, if the server has keys of any kind."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            check_admin(request.app.state.keys)
            return await handle(request)

        return handled


def check_admin(keys: Keys) -> None:
    """Raise ApiError unless the request in hand came with an admin key, or there is no key of any kind."""
    key = CALLER.get()
    if key is None and keys.has_admin:
        raise ApiError(401, "wrong or missing admin key: Authorization: Bearer KEY, or X-Api-Key: KEY")
    if key is None or key.is_admin:
        return
    if keys.has_admin:
        raise ApiError(403, f"the key {key.name!r} may not do this: bring that of --admin-api-key")
    raise ApiError(403, "this changes the server for everybody, and it has keys: serve with --admin-api-key KEY too")


def administration(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=AdminRoute, responses=REFUSED)

    @router.post("/update_weights_from_disk", response_model=None)
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Go on with other weights: what is answered from then on is theirs alone."""
        check_updates(api)
        await api.llm.update_weights(body.model_path, body.draft_model_path, body.in_flight)
        return json_response({"success": True, "message": f"the weights of {body.model_path} are in force"})

    add_transfer(router, api)

    @router.post("/sleep", response_model=None, response_class=Response)
    async def sleep(level: int = 1) -> Response:
        """vLLM's: requests end, and memory is given back."""
        _check_sleep_mode(api)
        await api.llm.sleep(level)
        return Response(status_code=200)

    @router.post("/wake_up", response_model=None, response_class=Response)
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """vLLM's. tags: weights, kv_cache; both without any."""
        _check_sleep_mode(api)
        await api.llm.wake_up(tags)
        return Response(status_code=200)

    @router.post("/flush_cache", response_model=None, response_class=Response, responses=TEXT)
    async def flush_cache() -> Response:
        """SGLang's: every cached prefix is forgotten; requests that run go on, by a prefill."""
        await api.llm.flush_cache()
        return PlainTextResponse("Cache flushed.\n")

    @router.post("/v1/load_lora_adapter", response_model=None, response_class=Response, responses=TEXT)
    async def load_lora_adapter(body: LoadLoraRequest) -> Response:
        """Requests may give its name as their model from now on."""
        if body.load_inplace:
            raise InputError("load_inplace: not supported; unload the adapter, then load it under the same name")
        if body.lora_name in api.base_names:
            raise InputError(f"lora_name: {body.lora_name!r} is the model's own name here; give another")
        await api.llm.load_lora(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None, response_class=Response, responses=TEXT)
    async def unload_lora_adapter(body: UnloadLoraRequest) -> Response:
        """Requests that have named it go on with it."""
        if body.lora_name not in api.core.info.loras:
            raise ApiError(404, f"lora_name: {body.lora_name!r} is no adapter of this server", "lora_name")
        await api.llm.unload_lora(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_sleep_mode(api: ApiState) -> None:
    if not api.options.enable_sleep_mode:
        raise ApiError(403, "this server does not sleep: serve with --enable-sleep-mode")
