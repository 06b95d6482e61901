"""A budget of bytes for the bodies that are in flight together."""

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from support.serving import mock
from support.waiting import until
from treetop.api.bodies import FREE_BYTES, Bodies, MeteredBody
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError


def coming(*pieces: int):
    """ASGI's `receive` of a body in pieces of so many bytes."""
    rest = [*pieces]

    async def receive():
        return {"type": "http.request", "body": b" " * rest.pop(0), "more_body": bool(rest)}

    return receive


def test_a_body_waits_for_room_and_goes_on_when_another_is_answered():
    """The first bytes of each are free; what is over is counted once, and given back once."""

    async def run():
        bodies = Bodies(2**20, 1000, wait_s=60)
        first, second = MeteredBody(bodies, coming(FREE_BYTES, 600)), MeteredBody(bodies, coming(FREE_BYTES + 500, 500))
        await first.receive()
        assert bodies.num_bytes == 0
        await first.receive()
        assert bodies.num_bytes == 600
        waits = asyncio.ensure_future(second.receive())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waits.done()
        first.release()
        first.release()
        await waits
        await second.receive()
        assert bodies.num_bytes == 1000
        second.release()
        assert bodies.num_bytes == 0

    asyncio.run(run())


def test_a_body_without_room_is_a_503_and_a_small_one_comes_through():
    async def run():
        bodies = Bodies(2**20, 1000, wait_s=0.01)
        await MeteredBody(bodies, coming(FREE_BYTES + 900)).receive()
        with pytest.raises(HTTPException, match="--max-bodies-bytes") as raised:
            await MeteredBody(bodies, coming(FREE_BYTES + 101)).receive()
        assert raised.value.status_code == 503
        await MeteredBody(bodies, coming(HIGH_WATER_LIMIT)).receive()  # as much as the web server holds in any case
        assert bodies.num_bytes == 900

    asyncio.run(run())


def test_connections_that_send_half_a_body_take_no_more_than_the_budget():
    """Others that are small are answered meanwhile; a large one gets 503, then, once they have gone, its answer."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    )
    flags = ("--max-body-bytes", "1000000", "--max-bodies-bytes", "1000000")
    large, answers = {"prompt": "a", "max_tokens": 1, "user": "x" * 700_000}, []
    with mock(5, "1", *flags) as server, ExitStack() as holding:
        host, port = server.url.removeprefix("http://").split(":")

        def is_refused() -> bool:
            """With one more that holds what it can, for the large one may have come before its bytes."""
            connection = holding.enter_context(closing(socket.create_connection((host, int(port)))))
            connection.sendall(head + b" " * 900_000)
            answers.append(server.post("/v1/completions", large))
            return answers[-1].status_code == 503

        until(is_refused)
        assert answers[-1].headers["retry-after"]
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        holding.close()
        until(lambda: server.post("/v1/completions", large).status_code == 200)


def test_the_budget_is_no_less_than_a_body():
    assert ServeOptions(max_body_bytes=100).bodies_bytes == 1600
    assert ServeOptions(max_body_bytes=100, max_bodies_bytes=150).bodies_bytes == 150
    with pytest.raises(ConfigError, match="--max-bodies-bytes 99: less than one body may have, --max-body-bytes 100"):
        ServeOptions(max_body_bytes=100, max_bodies_bytes=99)
