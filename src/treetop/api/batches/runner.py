"""Runs requests of a file through the application, as if each had come over a connection."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO
from uuid import uuid4

from starlette.types import ASGIApp, Message, Scope

from treetop.api.batches.lines import BatchLine, answer_line
from treetop.api.kept_responses import OWNER

_AGAIN_S = 0.25
"""Before a request that found no room is made again."""
_NO_ROOM = (429, 503)

Keep = Callable[[BatchLine, int, bytes], None]
"""Takes a request, the status of its answer and the line to keep."""


async def ask(app: ASGIApp, url: str, body: bytes, owner: str, request_id: str) -> tuple[int, bytes]:
    """Status and body of one answer."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {OWNER: owner},
    }
    said = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces = 500, list[bytes]()

    async def receive() -> Message:
        if said:
            return said.pop()
        await asyncio.Event().wait()  # the client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(pieces)


class BatchRunner:
    """Makes requests of one application, so many at a time whatever files they are of. Of one event loop."""

    def __init__(self, app: ASGIApp, at_a_time: int) -> None:
        self._app, self._at_a_time = app, at_a_time
        self._places = asyncio.Semaphore(at_a_time)

    async def run(
        self, lines: Iterable[BatchLine], file: BinaryIO, owner: str, keep: Keep, goes_on: Callable[[], bool]
    ) -> None:
        """Answer all lines of a file, in any order. A request that finds no room is made again.

        goes_on: asked before each request; those that run are always ended and kept.
        """
        waiting = iter(lines)
        workers = [
            asyncio.ensure_future(self._work(waiting, file, owner, keep, goes_on)) for _ in range(self._at_a_time)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for each in workers:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(
        self, waiting: Iterator[BatchLine], file: BinaryIO, owner: str, keep: Keep, goes_on: Callable[[], bool]
    ) -> None:
        while True:
            async with self._places:
                line = next(waiting, None) if goes_on() else None
                if line is None:
                    return
                request_id = uuid4().hex
                status, body = await ask(self._app, line.url, line.body(file), owner, request_id)
                while status in _NO_ROOM and goes_on():
                    await asyncio.sleep(_AGAIN_S)
                    status, body = await ask(self._app, line.url, line.body(file), owner, request_id)
                if status not in _NO_ROOM:
                    keep(line, status, answer_line(line.custom_id, status, request_id, body))
