"""The application: routes, errors, and the middleware in front of them."""

from collections.abc import Set
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treetop.api.access import READS, AccessMiddleware, RootPathMiddleware
from treetop.api.api_state import ApiState
from treetop.api.batches.batches import Batches
from treetop.api.batches.routes import FILES, batch_routes, file_routes
from treetop.api.batches.store import BatchStore
from treetop.api.bodies import MeteredBody
from treetop.api.chat import chat
from treetop.api.completions import completions
from treetop.api.conversations import conversations
from treetop.api.errors import RESPONSES, add_error_handlers, as_api_error, error_response
from treetop.api.kept_responses import OWNER, KeptResponses, kept_responses
from treetop.api.keys.administration import administration
from treetop.api.keys.api_keys import CALLER
from treetop.api.limits import too_large
from treetop.api.llama_cpp import llama_cpp
from treetop.api.messages import messages
from treetop.api.ollama import ollama
from treetop.api.operations import operations
from treetop.api.page import page, page_files
from treetop.api.requests.fields_page import BODIES
from treetop.api.responses import responses
from treetop.api.sglang import sglang
from treetop.version import __version__

OPEN = ("/health", "/health/live", "/health/ready", "/metrics", "/ping", "/version")
"""Paths that need no key."""
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
"""OpenAI's headers of limits."""


def make_app(api: ApiState) -> FastAPI:
    app = FastAPI(
        title="treetop",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
        redirect_slashes=False,  # a redirect would go wherever the client's Host says
        servers=[{"url": api.options.root_path}] if api.options.root_path else None,
    )
    app.state.ignore_unknown_fields, app.state.keys = api.options.ignore_unknown_fields, api.keys
    add_error_handlers(app, {name for each in BODIES.values() for name in each.model_fields})
    kept = KeptResponses(api, api.responses)
    of_responses = (responses(api, kept), kept_responses(kept), conversations(kept))
    for router in (
        completions(api),
        chat(api),
        *of_responses,
        messages(api),
        ollama(api),
        llama_cpp(api),
        sglang(api),
        operations(api),
        administration(api),
    ):
        app.include_router(router)
    if api.options.batch_dir is not None:
        store = BatchStore(Path(api.options.batch_dir), api.options.batch_bytes)
        app.state.batches = Batches(api, store, app)
        app.include_router(file_routes(store))
        app.include_router(batch_routes(store, app.state.batches))
    files = {} if api.options.no_ui else page_files()
    app.include_router(page(files))
    app.add_middleware(AuthMiddleware, api=api, without_key={*OPEN, *files})
    if api.options.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.options.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        )
    app.add_middleware(AccessMiddleware, api=api)
    if api.options.root_path:
        app.add_middleware(RootPathMiddleware, root_path=api.options.root_path)  # the last is the outermost
    return app


class AuthMiddleware:
    """Middleware: refuses requests without a valid API key or beyond its limits, and bodies that are too large, before
    they are parsed.

    What a bug raises ends here, as a 500.
    """

    def __init__(self, app: ASGIApp, api: ApiState, without_key: Set[str] = frozenset()) -> None:
        """without_key: paths that need none."""
        self._app, self._api, self._without_key = app, api, without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, state, keys = Headers(scope=scope), scope.setdefault("state", {}), self._api.keys
        is_ours = OWNER in state  # a request of a batch, whose owner is known
        key = keys.of_owner(state[OWNER]) if is_ours else keys.of_request(headers)
        state.setdefault(OWNER, "" if key is None else key.owner)  # in place: what is outer reads the route of it
        CALLER.set(key)
        if keys and scope["path"] not in self._without_key and key is None and not is_ours:
            await error_response(401, "wrong or missing API key: Authorization: Bearer KEY, or X-Api-Key: KEY")(
                scope, receive, send
            )
            return
        told: dict[str, str] = {}
        if key is not None and scope["method"] not in READS and not is_ours:
            allowed = keys.limits.take(key.name)
            told = allowed.headers
            self._api.metrics.of_keys.asked(key.name, allowed.refused)
            if allowed.refused is not None:
                message = (
                    f"the limit of {allowed.refused} a minute of the key {key.name!r} is"
                    f" {told[f'x-ratelimit-limit-{allowed.refused}']}; try again in {told['Retry-After']} s"
                )
                await error_response(429, message, headers=told)(scope, receive, send)
                return
        bodies = keys.bodies(key)
        length = headers.get("content-length", "0")
        if "content-length" in headers and "transfer-encoding" in headers:
            # a proxy may have believed the length: what comes next may be somebody else's (RFC 9112, 6.3)
            refused = error_response(400, "Content-Length with Transfer-Encoding", headers={"Connection": "close"})
            await refused(scope, receive, send)
            return
        if length.isdecimal() and int(length[:20]) > bodies.maximum:
            await error_response(413, too_large(bodies.maximum))(scope, receive, send)
            return
        body, started = MeteredBody(bodies, receive, is_json=scope["path"] != FILES), False

        async def noted(message: Message) -> None:
            nonlocal started
            if not started:
                body.release()
                MutableHeaders(raw=message["headers"]).update(told)
            started = True
            await send(message)

        try:
            await self._app(scope, body.receive, noted)
        except Exception as error:  # a bug: told here, for what is above would log its words
            api = as_api_error(error, scope)
            if not started:
                await error_response(api.status, str(api), api.param, api.code)(scope, receive, send)
        finally:
            body.release()
