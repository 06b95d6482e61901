"""Clients that are slow, silent, or too many: they are let go or wait, and others are served."""

import asyncio
import fcntl
import json
import logging
import os
import resource
import socket
import sys
import termios
import time
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from itertools import cycle
from pathlib import Path

import httpx
import pytest
import uvicorn

from support.serving import mock
from support.waiting import WAIT_S, until
from treetop.serve.connections import RESERVED_FILES, ClientTimeouts, Connection, LimitedListener, most_connections
from treetop.serve.log_limit import LogLimit
from treetop.types.errors import ConfigError

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture(scope="module")
def hurried():
    """A server of two API processes that waits half a second for what was begun, and a second for what was not."""
    flags = ("--http-read-timeout", "0.5", "--timeout-keep-alive", "1", "--api-workers", "2")
    with mock(5, "4", *flags) as running:
        yield running
        assert running.get("/health").status_code == 200


def opened(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def said_in_time(server, said: bytes) -> socket.socket:
    """A connection that has said this before the server's patience can have ended, however busy the machine is."""
    while True:
        began, connection = time.monotonic(), opened(server)
        with suppress(ConnectionError):
            connection.sendall(said)
            if time.monotonic() - began < 0.4:
                return connection
        connection.close()


def heard(connection: socket.socket) -> bytes:
    """All until the server ends the connection."""
    said = b""
    with suppress(ConnectionError):  # what it was sent and has not read
        while piece := connection.recv(4096):
            said += piece
    return said


@pytest.mark.parametrize(
    "said",
    [b"GET /hea", HEAD, HEAD + b"Content-Length: 100\r\n\r\n", HEAD + b"Content-Length: 100\r\n\r\n{"],
    ids=["a line", "a head", "no body", "half a body"],
)
def test_a_request_that_is_not_said_to_its_end_is_a_408(hurried, said):
    """The connection ends; half a head and half a body alike."""
    with closing(said_in_time(hurried, said)) as connection:
        answer = heard(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "--http-read-timeout" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_answers_on_a_kept_connection_come_at_once(workers):
    """Head and body are two writes: the second does not wait until the client has acknowledged the first (40 ms).

    Where it does, each answer takes that long, but for some at the beginning; on a busy machine one of many is quick.
    """
    flags = ("--timeout-keep-alive", "600", "--api-workers", workers)
    with mock(5, "1", *flags) as server, closing(opened(server)) as connection:

        def seconds() -> float:
            began_s, answer = time.monotonic(), b""
            connection.sendall(HEALTH)
            while not answer.endswith(b"}"):
                piece = connection.recv(4096)
                assert piece, "the connection is not kept"
                answer += piece
            return time.monotonic() - began_s

        for _ in range(20):
            seconds()
        assert any(seconds() < 0.020 for _ in range(1000))


def test_a_body_must_come_at_the_minimal_rate():
    """What came in one piece counts for the whole body: a burst, then a trickle, is soon too little."""
    flags = ("--http-read-timeout", "0.2", "--http-min-rate", "100000")
    with mock(5, "4", *flags) as server, closing(opened(server)) as connection:
        connection.sendall(HEAD + b"Content-Length: 9999999\r\n\r\n" + b" " * 60_000)
        connection.settimeout(0.02)
        began_s, answer = time.monotonic(), b""
        while not answer:
            assert time.monotonic() - began_s < WAIT_S, "it is kept"
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                with suppress(ConnectionError):  # the answer has come meanwhile
                    connection.sendall(b" " * 200)  # above 1 KiB a second
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"--http-min-rate" in answer + heard(connection)


def test_what_is_no_http_is_logged_with_its_client(hurried):
    with closing(opened(hurried)) as connection:
        host, port = connection.getsockname()
        connection.sendall(b"no such thing\r\n\r\n")
        assert heard(connection).startswith(b"HTTP/1.1 400 ")
        hurried.wait_for(rf"Invalid HTTP request received\. \(client {host}:{port}\)")


def test_a_length_beside_chunks_ends_the_connection(hurried):
    """RFC 9112, 6.3: a proxy in front may have believed the length. What it holds for a second request is not read."""
    smuggled = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with closing(opened(hurried)) as connection:
        connection.sendall(HEAD + smuggled + HEALTH)
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_slash_too_many_is_no_redirect_to_whoever_the_host_names(hurried):
    answer = hurried.post("/v1/completions/", {"prompt": "a"}, headers={"Host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize("said", [b"", HEALTH], ids=["nothing", "one request"])
def test_a_connection_without_a_request_ends_without_a_word(hurried, said):
    with closing(said_in_time(hurried, said)) as connection:
        answer = heard(connection)
    assert answer.count(b"HTTP/1.1") == bool(said)


@pytest.mark.parametrize("body", [b"", b"Content-Length: 9999999\r\n\r\n"], ids=["head", "body"])
def test_a_byte_now_and_then_does_not_keep_a_connection(hurried, body):
    """What counts is the whole head, and for a body how much comes."""
    with closing(said_in_time(hurried, HEAD + body)) as connection:
        connection.settimeout(0.05)
        began, answer = time.monotonic(), b""
        while not answer:
            assert time.monotonic() - began < WAIT_S, "it is kept"
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                with suppress(ConnectionError):  # the answer has come meanwhile
                    connection.sendall(b"x")
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_what_comes_after_a_refusal_does_not_keep_a_connection(hurried):
    """The body is too large, which is said before it is read. Whoever goes on sending it is soon cut off."""
    with closing(said_in_time(hurried, HEAD + b"Content-Length: 99999999999\r\n\r\n")) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
        until(lambda: not takes(connection, b"x" * 100))


def takes(connection: socket.socket, piece: bytes) -> bool:
    """Whether the other side still has it open."""
    try:
        connection.sendall(piece)
    except ConnectionError:
        return False
    return True


def test_a_body_that_comes_steadily_may_take_longer_than_the_timeout(hurried):
    """Whoever was away for long itself, on a busy machine, begins again."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "x" * 40_000}).encode()
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    while True:
        with closing(said_in_time(hurried, head)) as connection:
            *pauses, answer = in_pieces(connection, [body[start : start + 2000] for start in range(0, len(body), 2000)])
        if max(pauses) < 0.3:
            break
    assert sum(pauses) > 1
    assert answer.startswith(b"HTTP/1.1 200 ")


def in_pieces(connection: socket.socket, pieces: list[bytes]) -> list:
    """The pauses between pieces in seconds, in which nothing was answered, and what is answered then."""
    last_s, pauses, answer = time.monotonic(), [], b""
    for piece in pieces:
        connection.settimeout(0.1 if piece is not pieces[-1] else WAIT_S)
        with suppress(ConnectionError, TimeoutError):
            connection.sendall(piece)
            answer = answer or connection.recv(4096)
        last_s, before_s = time.monotonic(), last_s
        pauses.append(last_s - before_s)
    return [*pauses[:-1], answer]


def test_a_stream_outlives_both_timeouts(hurried):
    """They are about what a client says, not about what it is told."""
    body = {"prompt": "a", "max_tokens": 1500, "stream": True}
    began = time.monotonic()
    with httpx.stream("POST", hurried.url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert time.monotonic() - began > 1


class Body:
    """An application whose answer is as large as a path says. told: whether it heard that its client has gone."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * int(scope["path"][1:]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.told.set()


class Clock:
    """A loop's, which stands still until it is told to go on; all else is the loop's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.now_s, self.timers = loop, 0.0, list[tuple[float, asyncio.TimerHandle]]()

    def __getattr__(self, name: str):
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback, *args) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(0, callback, args, self._loop)
        timer._scheduled = False  # not in a heap of the loop's
        self.timers.append((self.now_s + delay, timer))
        return timer

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for at_s, timer in self.timers if at_s <= self.now_s and not timer.cancelled()]
        self.timers = [each for each in self.timers if each[0] > self.now_s]
        for each in due:
            each._run()


def with_little_room() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return pair


def over_tcp() -> tuple[socket.socket, socket.socket]:
    """The sending side's queue is many times what the reading one takes in."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        ours.connect(listening.getsockname())
        theirs, _ = listening.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 150_000)
    return ours, theirs


@asynccontextmanager
async def one_connection(pair=with_little_room):
    """A client's socket and the server's side of it, with its clock and application."""
    ours, theirs = pair()
    for each in (ours, theirs):
        each.setblocking(False)
    app, gone, loop = Body(), asyncio.Event(), asyncio.get_running_loop()
    config = uvicorn.Config(app, http="h11", log_config=None, access_log=False, lifespan="off")
    config.load()
    timeouts = ClientTimeouts(read_s=10, idle_s=10, min_rate=0, write_s=20)
    connection = Connection(config, uvicorn.server.ServerState(), timeouts, gone.set)
    connection.loop = clock = Clock(loop)
    with closing(ours):
        await loop.connect_accepted_socket(lambda: connection, theirs)
        try:
            yield ours, connection, clock, app, gone
        finally:
            connection.transport.abort()
            await gone.wait()


async def asked(client: socket.socket, connection: Connection, size: int) -> None:
    """Until an answer waits for its client."""
    await asyncio.get_running_loop().sock_sendall(client, b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n" % size)
    while not connection.is_paused:
        await asyncio.sleep(0)


def queued(connection: Connection) -> int:
    """Bytes that the kernel keeps of what was sent."""
    own = connection.transport.get_extra_info("socket")
    return int.from_bytes(fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def test_an_answer_that_is_not_read_ends_with_its_connection(caplog):
    """Also when some was read before. The application hears it, so its request ends, too."""

    async def run(reads: int) -> None:
        async with one_connection() as (client, connection, clock, app, gone):
            await asked(client, connection, 200_000)
            if reads:
                before = connection.transport.get_write_buffer_size()
                while connection.transport.get_write_buffer_size() == before:
                    await asyncio.get_running_loop().sock_recv(client, reads)
                clock.go_on(20)
            clock.go_on(19.9)
            await asyncio.sleep(0)
            assert not gone.is_set()
            clock.go_on(0.2)
            await gone.wait()
            await app.told.wait()

    for reads in (0, 100):
        asyncio.run(asyncio.wait_for(run(reads), WAIT_S))
    assert caplog.text.count("an answer was not read for 20 seconds (--http-write-timeout)") == 2


def test_what_is_read_of_the_kernels_queue_counts():
    """Over TCP, whose kernel asks for more only once a good part of its queue is free: nothing moves here till then."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with one_connection(over_tcp) as (client, connection, clock, _, gone):
            await asked(client, connection, 2_000_000)
            here, still = connection.transport.get_write_buffer_size(), 0
            for _ in range(8):
                before = queued(connection)
                while queued(connection) == before:
                    await loop.sock_recv(client, 2048)
                still += connection.transport.get_write_buffer_size() == here
                clock.go_on(20)
                await asyncio.sleep(0)
                assert not gone.is_set()
            assert still
            while not gone.is_set():  # now nothing is read; what is on its way may still come
                clock.go_on(20)
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_an_answer_that_is_read_slowly_comes_whole():
    """A little in each time is enough, however long it takes; a connection whose answers are read has no time-out."""

    async def run() -> None:
        async with one_connection() as (client, connection, clock, _, gone):
            await asked(client, connection, 400_000)
            received = b""
            for _ in range(6):
                before = connection.transport.get_write_buffer_size()
                while connection.transport.get_write_buffer_size() == before:
                    received += await asyncio.get_running_loop().sock_recv(client, 4096)
                    await asyncio.sleep(0)
                clock.go_on(20)
            while received.count(b"x") < 400_000:
                received += await asyncio.get_running_loop().sock_recv(client, 4096)
            assert not gone.is_set()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_what_is_closing_ends_although_nobody_reads():
    """A server that leaves, or an idle connection's end, waits for what is unread no longer than an answer does."""

    async def run() -> None:
        async with one_connection() as (client, connection, clock, _, gone):
            await asked(client, connection, 200_000)
            connection.transport.close()
            await asyncio.sleep(0)
            assert not gone.is_set()
            clock.go_on(20)
            await gone.wait()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_more_connections_than_files_neither_end_the_server_nor_fill_its_log():
    """Those who come too late wait; once the silent ones are let go, they are served.

    Wherever they stand still among themselves for longer than that, enough of them come at once before or after.
    """
    with mock(1, "4", "--timeout-keep-alive", "2", most_files=256) as server, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(closing(opened(server)))
        assert server.get("/health", timeout=WAIT_S).status_code == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
        until(lambda: any("128 connections are taken" in line for line in server.said))
        assert len(server.said) < 30, "".join(server.said[-5:])


@pytest.mark.parametrize("most_files", [None, pytest.param(384, marks=pytest.mark.slow)])
def test_five_hundred_who_fall_silent_hold_up_no_stream_and_leave_nothing_behind(most_files):
    """Silent from the start, in a head, in a body: each is let go after its time, also where there are fewer files than
    such clients. A stream goes on beside them, others are served, and files and memory are as before."""
    body = HEAD + b"Content-Length: 99999\r\n\r\n" + b"a" * 5000
    said = [b"", HEAD[:40], body]
    flags = ("--http-read-timeout", "1", "--timeout-keep-alive", "1")
    with mock(1, "1", *flags, most_files=most_files) as server, ExitStack() as stack:
        api = server.process.pid
        asked = {"prompt": "a", "max_tokens": 2000, "stream": True}
        url = server.url + "/v1/completions"
        lines = stack.enter_context(httpx.stream("POST", url, json=asked, timeout=WAIT_S)).iter_lines()
        assert next(lines).startswith("data: {")
        files, memory = len(os.listdir(f"/proc/{api}/fd")), memory_of(api)
        silent = [stack.enter_context(closing(opened(server))) for _ in range(500)]
        for each, words in zip(silent, cycle(said)):
            with suppress(ConnectionError):  # let go already
                each.sendall(words)
        assert httpx.get(server.url + "/health", timeout=WAIT_S).status_code == 200
        assert httpx.post(url, json={"prompt": "a", "max_tokens": 3}, timeout=WAIT_S).status_code == 200
        ends = [heard(each) for each in silent]
        assert all(not end for end in ends[::3])
        assert {end[:12] for place in (1, 2) for end in ends[place::3]} <= {b"HTTP/1.1 408", b""}
        until(lambda: len(os.listdir(f"/proc/{api}/fd")) <= files)
        assert memory_of(api) - memory < 64 * 2**20
        assert [line for line in lines if line][-1] == "data: [DONE]"


def memory_of(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_bound_of_connections_is_kept_and_those_who_wait_come_in():
    with mock(1, "4", "--max-connections", "2", "--timeout-keep-alive", "100") as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(opened(server))) for _ in range(3))
        for each in (first, second):
            each.sendall(HEALTH)
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
        third.sendall(HEALTH)
        third.settimeout(0.3)
        with pytest.raises(TimeoutError):
            third.recv(4096)
        first.close()
        third.settimeout(WAIT_S)
        assert third.recv(4096).startswith(b"HTTP/1.1 200 ")
        until(lambda: any("all 2 connections are taken" in line for line in server.said))


def test_a_listener_without_open_files_tries_again(monkeypatch, caplog):
    """One line, and a pause; then whoever waited is accepted."""
    monkeypatch.setattr("treetop.serve.connections._RETRY_S", 0.01)

    class Full:
        """A socket whose first calls of accept find no file."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.left = real, 3

        def accept(self):
            self.left -= 1
            if self.left >= 0:
                raise OSError(24, os.strerror(24))
            return self.real.accept()

        def __getattr__(self, name):
            return getattr(self.real, name)

    class Kept(asyncio.Protocol):
        def __init__(self, ended) -> None:
            self.ended = ended

        def connection_made(self, transport) -> None:
            transport.write(b"hi")
            transport.close()

        def connection_lost(self, exc) -> None:
            self.ended()

    async def run() -> bytes:
        real = socket.create_server(("127.0.0.1", 0))
        listener = LimitedListener(Full(real), 1, Kept)
        listener.start()
        for _ in range(2):  # the place of the first is free again
            reader, writer = await asyncio.open_connection(*real.getsockname())
            said = await reader.read()
            writer.close()
        listener.close()
        return said

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == b"hi"
    assert [each.getMessage() for each in caplog.records].count(
        "no connection can be accepted: Too many open files"
    ) == 3


def test_connections_fit_the_open_files(monkeypatch):
    """The soft limit is raised to the hard one; what does not fit is refused with the numbers."""
    limits, raised = [(256, 1024)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))
    assert most_connections(0) == 1024 - RESERVED_FILES
    assert most_connections(100) == 100
    assert raised == [(1024, 1024)] * 2
    with pytest.raises(ConfigError, match=r"--max-connections 1000: .* need 1128 = 1000 .* have 1024.* lower it"):
        most_connections(1000)
    limits[0] = (64, 64)
    with pytest.raises(ConfigError, match=r"have 64; raise `ulimit -n`$"):
        most_connections(0)
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert most_connections(0) == 2**16 - RESERVED_FILES


def test_a_log_takes_a_few_of_each_warning_and_says_how_many_it_left_out():
    now = [0.0]
    limit = LogLimit(maximum=2, interval_s=10, clock=lambda: now[0])

    def said(words: str, *given, level=logging.WARNING) -> str | None:
        record = logging.LogRecord("treetop", level, "", 0, words, given, None)
        return record.getMessage() if limit.filter(record) else None

    assert [said("bad request %d", i) for i in range(5)] == ["bad request 0", "bad request 1", None, None, None]
    assert said("another\nwith a trace") == "another\nwith a trace"
    assert [said("told", level=logging.INFO) for _ in range(5)] == ["told"] * 5
    now[0] = 10
    assert said("bad request %d", 9) == "bad request 9 (3 more of these were left out)"
    assert [said(f"kind {i}") for i in range(1000)] == [f"kind {i}" for i in range(1000)]
