"""Answers that end when their client goes: one body, or a stream of server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from treetop.server.api.errors import ApiError, as_api_error, error_body
from treetop.server.async_llm import DeltaStream
from treetop.server.outputs import RequestOutput

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""What the OpenAPI schema says of an endpoint that answers with events if it is asked to."""


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def json_response(value: dict[str, Any]) -> Response:
    return Response(_encode(value), media_type="application/json")


async def collected(request: Request, deltas: DeltaStream) -> list[RequestOutput]:
    """All outputs. Aborts them if the client goes. Raises ApiError for one that failed."""
    outputs = asyncio.ensure_future(deltas.outputs())
    gone = asyncio.ensure_future(client_gone(request.receive))
    try:
        await asyncio.wait({outputs, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        deltas.close()
        gone.cancel()
        if not outputs.done():
            outputs.cancel()
    if not outputs.done():
        raise ApiError(499, "the client is gone")
    for output in outputs.result():
        check_output(output)
    return outputs.result()


def check_output(output: RequestOutput) -> None:
    if output.timed_out:
        raise ApiError(504, f"the request took too long: {output.error}", "timeout", "timeout")
    if output.user_error:
        raise ApiError(400, str(output.error))
    if output.error is not None:
        raise ApiError(500, f"the request failed: {output.error}", code="request_failed")


class EventStream(Response):
    """Events of `make`, written as they come. If the client goes, `deltas` are closed at once."""

    media_type = "text/event-stream"

    def __init__(self, deltas: DeltaStream, make: Callable[[], AsyncIterator[bytes]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._deltas, self._make = deltas, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        written = asyncio.ensure_future(self._write(scope, send))
        gone = asyncio.ensure_future(client_gone(receive))
        try:
            await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._deltas.close()
            gone.cancel()
            if not written.done():
                written.cancel()
        if written.done():
            written.result()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for each in self._make():
                await send({"type": "http.response.body", "body": each, "more_body": True})
        except Exception as error:  # the status has been sent: the error is an event
            api = as_api_error(error, scope)
            body = event(error_body(api.status, str(api), api.param, api.code))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def client_gone(receive: Receive) -> None:
    """Until the client has gone; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
