"""Answers that end when their client goes: one body, or a stream of server-sent events."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from treetop.api.errors import ApiError, as_api_error
from treetop.async_llm import DeltaStream
from treetop.core.engine_core import ASLEEP, WEIGHTS_LOST, WEIGHTS_REPLACED, WEIGHTS_UNDECIDED
from treetop.outputs import RequestOutput, TextDelta

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
"""What ends a stream of completions and chats."""
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"description": "server-sent events, if stream is true"}}}}
}
"""What the OpenAPI schema says of an endpoint that answers with events if it is asked to."""
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""And of one that answers with plain text. A response class of text would say so of its errors, too, which are JSON."""


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """One that says its type on a line of its own, too."""
    return f"event: {value['type']}\n".encode() + event(value)


STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventTemplate:
    """Events that differ in one text alone: the rest has been written once."""

    HOLE = "\0"
    """Where the text stands in what is given."""

    def __init__(self, written: bytes) -> None:
        """written: one of them, by `event` or `typed_event`; no text of a caller's follows the hole."""
        self._before, _, self._after = written.rpartition(encode(self.HOLE))

    def event(self, text: str) -> bytes:
        return self._before + encode(text) + self._after


def json_response(value: dict[str, Any] | list[dict[str, Any]]) -> Response:
    return Response(encode(value), media_type="application/json")


async def collected(
    request: Request, deltas: DeltaStream, see: Callable[[TextDelta], object] = lambda _: None
) -> list[RequestOutput]:
    """All outputs. Aborts them if the client goes. see: is given each delta. Raises ApiError for one that failed."""
    outputs = asyncio.ensure_future(deltas.outputs(see))
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
        raise ApiError(504, str(output.error), "timeout", "timeout")
    if output.user_error:
        raise ApiError(400, str(output.error))
    if output.error == WEIGHTS_REPLACED:
        raise ApiError(503, output.error, code="weights_replaced")
    if output.error in (WEIGHTS_LOST, WEIGHTS_UNDECIDED):
        raise ApiError(503, output.error, code="weights_lost")
    if output.error == ASLEEP:
        raise ApiError(503, output.error, code="engine_asleep")
    if output.error is not None:
        raise ApiError(500, f"the request failed: {output.error}", code="request_failed")


class Answer(Protocol):
    """A request as it is answered, at once or in events.

    last: what ends a stream. media_type: of one.
    """

    last: bytes
    media_type: str = "text/event-stream"

    async def whole(self, request: Request) -> Response: ...

    def first(self) -> Iterable[bytes]:
        """Events that come before any output."""
        ...

    def events(self, delta: TextDelta) -> Iterable[bytes]:
        """What a delta says."""
        ...

    def end(self) -> bytes:
        """What comes once all outputs have ended, before `last`."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that says so."""
        ...


class BodyWriter(Protocol):
    """A connection that takes more of an answer's body at once, past the layers of the web server.

    is_paused: its client is slow; nothing more is to be written yet.
    resumed: called when it is not paused any more.
    """

    resumed: Callable[[], None] | None

    @property
    def is_paused(self) -> bool: ...

    def write_body(self, data: bytes) -> None:
        """Of the answer whose head was sent last, before its end."""
        ...


WRITER = "connection"
"""Where in a scope's state the `BodyWriter` is. Servers that are not ours have none."""


async def answered(request: Request, deltas: DeltaStream, answer: Answer, stream: bool) -> Response:
    """The answer's body or stream; its deltas are closed if it cannot be made."""
    try:
        return EventStream(deltas, answer) if stream else await answer.whole(request)
    except BaseException:
        deltas.close()
        raise


class EventStream(Response):
    """Events of an answer, written as they come. If the client goes, `deltas` are closed at once.

    What a step brings is one write, made in the event loop's next turn without waking a task. While a client is slow
    nothing is written, and its deltas are joined.
    """

    def __init__(self, deltas: DeltaStream, answer: Answer) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type=answer.media_type)
        del self.headers["content-length"]
        self._deltas, self._answer = deltas, answer

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
        writer: BodyWriter | None = scope.get("state", {}).get(WRITER)
        try:
            await _send(send, b"".join(self._answer.first()))
            if writer is not None:
                await self._push(writer)
            else:
                async for delta in self._deltas:
                    await _send(send, b"".join(self._events(delta)))
            rest = self._answer.end()
        except Exception as error:  # the status has been sent: the error is an event
            rest = self._answer.failed(as_api_error(error, scope))
        await send({"type": "http.response.body", "body": rest + self._answer.last, "more_body": False})

    async def _push(self, writer: BodyWriter) -> None:
        """Write all that comes until everything has ended. Raises what ends it before that."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if writer.is_paused or ended.done():
                return
            said: list[bytes] = []
            try:
                for delta in self._deltas.taken():
                    said += self._events(delta)
                if self._deltas.over:
                    ended.set_result(None)
            except Exception as error:  # whatever it was, who awaits `ended` raises it
                ended.set_exception(error)
            writer.write_body(b"".join(said))

        writer.resumed = go_on
        try:
            self._deltas.push(go_on)
            await ended
        finally:
            writer.resumed = None

    def _events(self, delta: TextDelta) -> Iterable[bytes]:
        if delta.output is not None:
            check_output(delta.output)
        return self._answer.events(delta)


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def client_gone(receive: Receive) -> None:
    """Until the client has gone; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
