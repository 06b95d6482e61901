"""What every request passes first: a proxy's path, its id, whether work is still taken, the count, the access log."""

import asyncio
import logging
import re
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treetop.api.api_state import ApiState
from treetop.api.errors import error_response
from treetop.distributed.log_lines import FIELDS

log = logging.getLogger("treetop.access")

READS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that are no work."""
_METHODS = (*READS, "POST", "PUT", "PATCH", "DELETE")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
_LONGEST_PATH = 200
_BEGUN_AT_ONCE = 4
"""Requests in one turn of the event loop; each takes about a millisecond of it, in parts."""
_GONE = 499
"""The status of a request whose client left before an answer, as nginx counts it."""


class RootPathMiddleware:
    """Middleware: what is inside of it sees paths as if there were no proxy, which every rule by path relies on."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """root_path: begins with a slash, does not end with one."""
        self._app, self._prefix = app, f"{root_path}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._prefix):
            scope = {**scope, "path": "/" + scope["path"].removeprefix(self._prefix)}
            scope.pop("raw_path", None)
        await self._app(scope, receive, send)


class Turnstile:
    """Lets so many in per turn of the event loop, in the order of their coming.

    A turn lasts as long as all that is ready in it: a thousand requests at once would be parsed, checked and queued in
    the same few turns, and each of these would hold up every stream.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, most
        self._waiting = deque[asyncio.Future[None]]()

    async def enter(self) -> None:
        """At once if few came in this turn."""
        loop = asyncio.get_running_loop()
        if self._left == self._most:
            loop.call_soon(self._turn)
        if self._left:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self) -> None:
        self._left = self._most
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its task has been cancelled
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._most:
            asyncio.get_running_loop().call_soon(self._turn)


class AccessMiddleware:
    """Middleware around the application: request ids, draining, counts, the access log.

    - `X-Request-Id` of the request, if it is one, else a new one: in the answer, and for the log under
      `scope["state"]["request_id"]`.
    - HEAD is answered as GET is; the HTTP server leaves the body out.
    - Once the server leaves, each answer ends its connection, so that clients look for another server. Once it drains,
      only reads are answered; anything else is told to come again, which it does elsewhere.
    - So many requests that are work begin in a turn of the event loop (`Turnstile`); reads do not wait.
    - Each answer is counted by route, method and status, and logged if `--access-log` says so.
    """

    def __init__(self, app: ASGIApp, api: ApiState) -> None:
        self._app, self._api, self._turnstile = app, api, Turnstile(_BEGUN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        api, method, began_s, status = self._api, scope["method"], time.perf_counter(), _GONE
        request_id = _request_id(scope)
        state = {**scope.get("state", {}), "request_id": request_id}
        inner: Scope = {**scope, "method": "GET" if method == "HEAD" else method, "state": state}

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["X-Request-Id"] = request_id
                if api.leaving:
                    headers["Connection"] = "close"
            await send(message)

        work = method not in READS
        try:
            if work and api.draining:
                await _shutting_down()(inner, receive, answered)
                return
            api.num_working += work
            try:
                if work:
                    await self._turnstile.enter()
                with self._traced(scope, request_id):
                    await self._app(inner, receive, answered)
            finally:
                api.num_working -= work
        except asyncio.CancelledError:
            if not api.leaving:
                raise
            if status == _GONE:  # the end of a drain cuts it; a stream just ends
                await _shutting_down()(inner, receive, answered)
        finally:
            route = getattr(inner.get("route"), "path", "other")
            api.metrics.answered(route, method if method in _METHODS else "other", status)
            if api.options.access_log:
                _log(scope, status, time.perf_counter() - began_s, request_id)

    def _traced(self, scope: Scope, request_id: str) -> AbstractContextManager[None]:
        tracer = self._api.tracer
        return nullcontext() if tracer is None else tracer.answering(Headers(scope=scope), request_id)


def _shutting_down() -> Response:
    return error_response(503, "the server is shutting down", code="shutting_down")


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex


def _log(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    """A line without the query, which may hold what is nobody's business."""
    host = (scope.get("client") or ("-",))[0]
    path = quote(scope["path"], safe="/:@~+=,")[:_LONGEST_PATH]
    method = scope["method"][:20]
    fields = {"client": host, "method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
    extra = {FIELDS: {**fields, "request_id": request_id}}
    log.info("%s %s %s %d %.4f s %s", host, method, path, status, seconds, request_id, extra=extra)
