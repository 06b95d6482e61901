"""What an event of a stream costs the API process, in processor time, and what a server costs that has nothing to do.

    python benchmarks/front_end.py [--endpoint completions chat responses messages] [--streams 64 256] [--step-ms 40]
                                   [--tokens 1] [--seconds 5] [--idle-seconds 10]

A mock engine gives each of the streams so many tokens a step, the same to all at once, to `treetop serve` with one API
process; a client that only counts reads them. Time is counted while all streams run: requests have begun before and end
after. It is that of all threads of a process, by /proc, so of Linux. Where events come faster than the process writes
them they are joined, and `tokens_an_event` says so; so do tokens without text, which make no event. One JSON object a
line.
"""

import argparse
import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from treetop.bench.http_client import Address, HttpError
from treetop.cli import OneLineParser, exit_code
from treetop_debug.servers import Client, served, until

_PATHS = {name: f"/v1/{name}" for name in ("completions", "responses", "messages")} | {"chat": "/v1/chat/completions"}
_MODEL = "builtin:nestling"
_BEGUN = 4
"""Events after which a stream has begun."""
_SETTLE_S = 1.0
"""Between the first event of the last stream and the first look."""


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes) -> None:
        self._request, self.num_events, self.num_bytes = request, 0, 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.num_bytes and b" 200 " not in data[:20] and not self.ended.done():
            self.ended.set_exception(HttpError(f"the server says: {data[:300]!r}"))
        self.num_events += data.count(b"data: ")
        self.num_bytes += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        self._transport.abort()


def request_of(endpoint: str, at: Address, max_tokens: int) -> bytes:
    body: dict[str, Any] = {"model": _MODEL, "stream": True, "temperature": 0}
    if endpoint == "completions":
        body |= {"prompt": [5] * 16, "max_tokens": max_tokens, "ignore_eos": True}
    elif endpoint == "responses":
        body |= {"input": "How are you?", "max_output_tokens": max_tokens}
    else:
        body |= {"messages": [{"role": "user", "content": "How are you?"}], "max_tokens": max_tokens}
    if endpoint == "chat":
        body["ignore_eos"] = True
    said = json.dumps(body).encode()
    head = f"POST {_PATHS[endpoint]} HTTP/1.1\r\nHost: {at.host}:{at.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(said)}\r\n\r\n".encode() + said


def busy_s(pid: int) -> float:
    """Seconds of processor time that all threads of a process have taken."""
    total = 0
    for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            total += int(each.read_text(encoding="ascii").split()[0])
    return total / 1e9


def engine_of(pid: int) -> int:
    """The engine process that a server has started."""
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in each.read_text(encoding="ascii").split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise LookupError(f"process {pid} has no engine process")


async def measure(client: Client, endpoint: str, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    at = Address.of(client.url)
    steps = int(1000 * (args.seconds + 30) / args.step_ms)
    request = request_of(endpoint, at, min(steps * args.tokens, args.context - 64))
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(lambda: Reader(request), at.host, at.port))[1] for _ in range(streams)]
    try:
        await until(lambda: all(each.num_events > _BEGUN for each in readers), [each.ended for each in readers])
        await asyncio.sleep(_SETTLE_S)
        pids = {"api": client.pid, "engine": engine_of(client.pid)}
        events, began_s = sum(each.num_events for each in readers), time.perf_counter()
        before = {name: busy_s(pid) for name, pid in pids.items()}
        await asyncio.sleep(args.seconds)
        events, elapsed_s = sum(each.num_events for each in readers) - events, time.perf_counter() - began_s
        took = {name: busy_s(pid) - before[name] for name, pid in pids.items()}
        if any(each.ended.done() for each in readers):
            raise LookupError("a stream ended while it was measured: raise --context, or lower --seconds")
    finally:
        for each in readers:
            each.close()
    tokens = streams * args.tokens * elapsed_s * 1000 / args.step_ms
    return {
        "endpoint": endpoint,
        "streams": streams,
        "events_per_s": round(events / elapsed_s),
        "tokens_an_event": round(tokens / events, 2),
        "api_us_an_event": round(1e6 * took["api"] / events, 1),
        "engine_us_an_event": round(1e6 * took["engine"] / events, 1),
        "api_cores": round(took["api"] / elapsed_s, 3),
    }


async def idle(client: Client, seconds: float) -> dict[str, Any]:
    pids = {"api": client.pid, "engine": engine_of(client.pid)}
    before = {name: busy_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    return {
        "idle_s": seconds,
        **{f"{name}_ms": round(1e3 * (busy_s(pid) - before[name]), 1) for name, pid in pids.items()},
    }


async def run_all(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {
        "mock_engine": f"{args.step_ms},{args.tokens}",
        "api_workers": 1,
        "max_running_requests": max(args.streams),
        "context_length": args.context,
        "chat_template": "{{ messages[0].content }}",
    }
    async with served(_MODEL, options) as client:
        print(json.dumps(await idle(client, args.idle_seconds)), flush=True)
        for endpoint in args.endpoint:
            for streams in args.streams:
                print(json.dumps(await measure(client, endpoint, args, streams)), flush=True)


def run() -> int:
    parser = OneLineParser(prog="front_end", description="Processor time of an event in the API process.")
    parser.add_argument("--endpoint", nargs="+", choices=[*_PATHS], default=["completions", "chat"])
    parser.add_argument("--streams", nargs="+", type=int, default=[64, 256], help="at a time (default 64 256)")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the mock engine (default 40)")
    parser.add_argument("--tokens", type=int, default=1, help="of a step for each stream (default 1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default 5)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="without any request (default 10)")
    parser.add_argument("--context", type=int, default=2048, help="of the mock engine, in tokens (default 2048)")
    args = parser.parse_args()
    asyncio.run(run_all(args))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("front_end", run))
