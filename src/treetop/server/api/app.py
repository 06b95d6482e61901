"""The application: routes, errors, and the gate in front of them."""

import hmac

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treetop.server.api.access import Access
from treetop.server.api.chat import ChatRequest, chat
from treetop.server.api.completions import CompletionRequest, completions
from treetop.server.api.errors import RESPONSES, add_error_handlers, as_api_error, error_response
from treetop.server.api.front import Front
from treetop.server.api.limits import BodyMeter, too_large
from treetop.server.api.operations import DetokenizeRequest, TokenizeRequest, operations
from treetop.version import __version__

_OPEN = ("/health", "/health/live", "/health/ready", "/metrics", "/version")
"""Paths that need no key."""
_REQUESTS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def make_app(front: Front) -> FastAPI:
    app = FastAPI(title="treetop", version=__version__, docs_url=None, redoc_url=None, responses=RESPONSES)
    add_error_handlers(app, {name for each in _REQUESTS for name in each.model_fields})
    for router in (completions(front), chat(front), operations(front)):
        app.include_router(router)
    app.add_middleware(Gate, keys=front.options.api_key, max_body_bytes=front.options.max_body_bytes)
    if front.options.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.options.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Access, front=front)  # the last is the outermost
    return app


class Gate:
    """Turns away whoever has no key, and bodies that hold too much, before anything is made of them.

    What a bug raises ends here, as a 500.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], max_body_bytes: int) -> None:
        self._app, self._keys, self._most = app, [key.encode() for key in keys], max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in _OPEN and not self._is_valid_key(headers.get("authorization", "")):
            await error_response(401, "wrong or missing API key: Authorization: Bearer KEY")(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._most:
            await error_response(413, too_large(self._most))(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, self._counted(receive), noted)
        except Exception as error:  # a bug: told here, for what is above would log its words
            api = as_api_error(error, scope)
            if not started:
                await error_response(api.status, str(api), api.param, api.code)(scope, receive, send)

    def _is_valid_key(self, given: str) -> bool:
        """Whether it is one of the keys, in a time that does not tell how much of it is right."""
        scheme, _, key = given.partition(" ")
        sent = key.strip().encode()
        matches = [hmac.compare_digest(sent, each) for each in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _counted(self, receive: Receive) -> Receive:
        meter = BodyMeter(self._most)

        async def counted() -> Message:
            message = await receive()
            meter.take(message.get("body", b""))
            return message

        return counted
