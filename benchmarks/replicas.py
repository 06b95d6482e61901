"""What replicas behind Ray Serve cost and bring, with mock engines of a slow fixed rate.

    python benchmarks/replicas.py [--replicas 4] [--seconds 60]

1. The time to the first token of one client: of `treetop serve`, and of two replicas of its engine behind Ray, with
   a router that leaves the choice to Ray and with ours. Beside it what Ray itself takes: a deployment that says hello,
   through the proxy, and the first item of a stream of a replica; and what our router's choice takes.
2. Tokens a second of N replicas against one, each with half as many clients again as it runs requests at a time.
3. How many requests found their prefix: those whose cached tokens, as the replica's own prefix cache counted them, are
   all that earlier prompts of the same topic have in common with them. The first of each topic does not count, and
   neither 2 nor 3 counts the first half of the time.

One JSON object on stdout. It starts and ends a Ray of its own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from treetop.bench.http_client import Address
from treetop.bench.http_client import Client as HttpClient
from treetop.cli import OneLineParser, exit_code
from treetop.cli.replicas import app
from treetop.distributed.router import PrefixRouter, ReplicaLoad
from treetop.types.requests import PrefixPages

PORT = 8231
ROWS, LONG, SHORT, TOPICS = 4, 512, 32, 24
"""Requests a replica runs at a time; tokens of answers, for rates and for prefixes; what prompts begin with."""
CLIENTS = 6
"""For each replica, so that there is always work for it."""
FAST, SLOW = "10,1", "200,8"
"""Engines for the two measurements: STEP_MS,TOKENS."""
PAGE, PREFIX = 16, 96


class Hello:
    """What costs nothing but Ray."""

    async def __call__(self, _: object) -> str:
        return "{}"

    async def items(self) -> AsyncIterator[int]:
        yield 1


class AnyReplica(RequestRouter):
    """Whichever of all replicas Ray prefers."""

    def initialize_state(self, **_: Any) -> None:
        pass

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]


def prompt(topic: int, end: int) -> list[int]:
    """The prefix of a topic, and an end of its own."""
    topical = random.Random(topic)
    ending = random.Random(end)
    return [topical.randrange(4, 4000) for _ in range(PREFIX)] + [ending.randrange(4, 4000) for _ in range(8)]


async def ask(address: Address, topic: int, end: int, count: int) -> tuple[float, int]:
    """Seconds to the first text, and cached tokens, of a streamed completion."""
    body = {"prompt": prompt(topic, end), "max_tokens": count, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    began_s, first_s = time.perf_counter(), None
    usage: dict[str, Any] = {}
    connection = HttpClient(address, None)
    async with aclosing(connection.events("/v1/completions", body)) as events:
        async for event in events:
            if first_s is None:
                first_s = time.perf_counter() - began_s
            usage = event.get("usage") or usage
    await connection.close()
    assert first_s is not None
    return first_s, usage["prompt_tokens_details"]["cached_tokens"]


async def first_tokens(address: Address, count: int) -> list[float]:
    """Milliseconds, one request after the other. The first few find nothing warm and do not count."""
    times = [(await ask(address, 1, number, 2))[0] for number in range(count + 5)]
    return [each * 1000 for each in times[5:]]


async def hellos(url: str, handle: DeploymentHandle, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of answers of `Hello` through Ray's proxy, and of the first items of its streams."""
    connection, through, streams = HttpClient(Address.of(url), None), [], []
    for _ in range(count + 5):
        began_s = time.perf_counter()
        await connection.get("")
        through.append(1e3 * (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        async for _ in handle.options(method_name="items", stream=True).remote():
            streams.append(1e3 * (time.perf_counter() - began_s))
    await connection.close()
    return through[5:], streams[5:]


def choices_ms(count: int) -> list[float]:
    """Of our router, for a prompt of so many tokens and eight replicas."""
    router: PrefixRouter[int] = PrefixRouter()
    alive = {replica: ReplicaLoad(0, ROWS, PrefixPages(PAGE, 1, 4096)) for replica in range(8)}
    times = []
    for number in range(200):
        ids = [random.randrange(4, 4000) for _ in range(count)]
        began_s = time.perf_counter()
        router.choose(number, ids, alive)
        times.append(1e3 * (time.perf_counter() - began_s))
    return times


async def generated(address: Address) -> tuple[float, float]:
    """Tokens that clients have received so far, and when that was."""
    url = f"http://{address.host}:{address.port}/metrics"

    def page() -> str:
        with urllib.request.urlopen(url) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(page)).splitlines()
    count = next(line for line in lines if line.startswith("treetop:generation_tokens_total{"))
    return float(count.split()[-1]), time.perf_counter()


async def load(address: Address, clients: int, seconds: float, length: int) -> dict[str, Any]:
    """Tokens a second of clients that ask again at once, and the share of requests that found their prefix.

    In the second half of `seconds`. length: tokens of each answer.
    """
    began_s = time.perf_counter()
    warm_s, end_s = began_s + seconds / 2, began_s + seconds
    seen: set[int] = set()
    found: list[bool] = []

    async def client(number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 2)
        while time.perf_counter() < end_s:
            topic = rng.randrange(TOPICS)
            known = topic in seen
            _, cached = await ask(address, topic, rng.randrange(10**9), length)
            seen.add(topic)  # one that was asked while the first was on its way does not count either
            if known and warm_s <= time.perf_counter() < end_s:
                found.append(cached >= PREFIX)

    running = asyncio.gather(*(client(number) for number in range(clients)))
    await asyncio.sleep(seconds / 2)
    before, before_s = await generated(address)
    await asyncio.sleep(end_s - time.perf_counter())
    after, after_s = await generated(address)
    await running
    rate = round((after - before) / (after_s - before_s), 1)
    share = round(sum(found) / len(found), 3) if found else None
    return {"clients": clients, "tokens_per_second": rate, "requests": len(found), "found_prefix": share}


def behind_ray(replicas: int, engine: str) -> Address:
    serve.run(app({"replicas": replicas, "mock-engine": engine, "max-running-requests": ROWS, "log-interval": 0}))
    return Address.of(f"http://127.0.0.1:{PORT}")


def hello() -> DeploymentHandle:
    return serve.run(serve.deployment(num_replicas=2)(Hello).bind(), name="hello", route_prefix="/hello")


def direct(engine: str, count: int) -> list[float]:
    """First tokens of `treetop serve`, which runs meanwhile."""
    command = [sys.executable, "-m", "treetop.cli", "serve", "--port", str(PORT + 1), "--mock-engine", engine]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        while "serving" not in (line := server.stderr.readline()):
            assert line, "treetop serve has ended"
        times = asyncio.run(first_tokens(Address.of(f"http://127.0.0.1:{PORT + 1}"), count))
        server.terminate()
        server.stderr.read()
    return times


def spread(times: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {"median": round(statistics.median(times), 2), "p10": round(tenths[0], 2), "p90": round(tenths[-1], 2)}


def run(args: argparse.Namespace) -> int:
    plain = direct(FAST, args.requests)
    ray.init(num_cpus=args.replicas + 1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    try:
        with patch("treetop.ray.app.PrefixRequestRouter", AnyReplica):
            anyone = asyncio.run(first_tokens(behind_ray(2, FAST), args.requests))
        through = asyncio.run(first_tokens(behind_ray(2, FAST), args.requests))
        greeted, streamed = asyncio.run(hellos(f"http://127.0.0.1:{PORT}/hello", hello(), args.requests))
        serve.delete("hello")
        one = asyncio.run(load(behind_ray(1, SLOW), CLIENTS, args.seconds, LONG))
        several, clients = behind_ray(args.replicas, SLOW), CLIENTS * args.replicas
        many = asyncio.run(load(several, clients, args.seconds, LONG))
        short = asyncio.run(load(several, clients, args.seconds, SHORT))
    finally:
        serve.shutdown()
        ray.shutdown()
    figures = {
        "first_token_ms": {
            "treetop serve": spread(plain),
            "behind Ray, any replica": spread(anyone),
            "behind Ray": spread(through),
        },
        "added_by_routing_ms": round(statistics.median(through) - statistics.median(anyone), 2),
        "choice_ms": {f"{count} tokens": spread(choices_ms(count)) for count in (200, 2048)},
        "ray_ms": {"hello through the proxy": spread(greeted), "an item of a stream": spread(streamed)},
        "added_ms": round(statistics.median(through) - statistics.median(plain), 2),
        "one": one,
        "replicas": args.replicas,
        "many": many,
        "many_with_short_answers": short,
        "times_one": round(many["tokens_per_second"] / one["tokens_per_second"], 2),
        "cores": os.cpu_count(),
        "ray": ray.__version__,
    }
    print(json.dumps(figures, indent=1))
    return 0


def main() -> int:
    parser = OneLineParser(prog="replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="of each load (default %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=60, help="of each time to the first token (default %(default)s)"
    )
    args = parser.parse_args()
    return exit_code("replicas", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
