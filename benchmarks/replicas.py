"""What replicas behind Ray Serve cost and bring, with mock engines of a slow fixed rate.

    python benchmarks/replicas.py [--replicas 4] [--seconds 60]

1. The time to the first token of one client, against `treetop serve` with the same engine.
2. Tokens a second of N replicas against one, each with as many clients as it runs requests at a time.
3. How many requests found their prefix: those whose cached tokens, as the replica's own prefix cache counted them, are
   all that earlier prompts of the same topic have in common with them. The first of each topic does not count, and
   neither 2 nor 3 counts what ended in the first half of the time.

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
from contextlib import aclosing
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve

from treetop.bench.http_client import Address, Connection
from treetop.cli import OneLineParser, exit_code
from treetop.cli.replicas import app

PORT = 8231
ROWS, TOKENS, TOPICS = 8, 128, 24
"""Requests a replica runs at a time; tokens of an answer; prefixes that prompts begin with."""
FAST, SLOW = "10,1", "300,16"
"""Engines for the two measurements: STEP_MS,TOKENS."""
PAGE, PREFIX = 16, 96


def prompt(topic: int, end: int) -> list[int]:
    """The prefix of a topic, and an end of its own."""
    topical = random.Random(topic)
    ending = random.Random(end)
    return [topical.randrange(4, 4000) for _ in range(PREFIX)] + [ending.randrange(4, 4000) for _ in range(8)]


async def ask(address: Address, topic: int, end: int, count: int) -> tuple[float, int, int]:
    """Seconds to the first text, tokens, and cached tokens of a streamed completion."""
    body = {"prompt": prompt(topic, end), "max_tokens": count, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    began_s, first_s, usage = time.perf_counter(), None, {}
    connection = Connection(address, None)
    async with aclosing(connection.events("/v1/completions", body)) as events:
        async for event in events:
            if first_s is None:
                first_s = time.perf_counter() - began_s
            usage = event.get("usage") or usage
    assert first_s is not None
    return first_s, usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def first_tokens(address: Address, count: int) -> list[float]:
    """Milliseconds, one request after the other. The first few find nothing warm and do not count."""
    times = [(await ask(address, 1, number, 2))[0] for number in range(count + 5)]
    return [each * 1000 for each in times[5:]]


async def load(address: Address, clients: int, seconds: float) -> dict[str, Any]:
    """Tokens a second of clients that ask again at once, and the share of requests that found their prefix.

    Of requests that ended in the second half of `seconds`.
    """
    began_s = time.perf_counter()
    warm_s, end_s = began_s + seconds / 2, began_s + seconds
    seen: set[int] = set()
    found: list[bool] = []
    tokens = 0

    async def client(number: int) -> None:
        nonlocal tokens
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 2)
        while time.perf_counter() < end_s:
            topic = rng.randrange(TOPICS)
            known = topic in seen
            _, count, cached = await ask(address, topic, rng.randrange(10**9), TOKENS)
            seen.add(topic)  # one that was asked while the first was on its way does not count either
            if warm_s <= time.perf_counter() < end_s:
                tokens += count
                found.extend([cached >= PREFIX] * known)

    await asyncio.gather(*(client(number) for number in range(clients)))
    rate = tokens / (end_s - warm_s)
    share = round(sum(found) / len(found), 3)
    return {"clients": clients, "tokens_per_second": round(rate, 1), "requests": len(found), "found_prefix": share}


def behind_ray(replicas: int, engine: str) -> Address:
    serve.run(app({"replicas": replicas, "mock-engine": engine, "max-running-requests": ROWS, "log-interval": 0}))
    return Address.of(f"http://127.0.0.1:{PORT}")


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
        through = asyncio.run(first_tokens(behind_ray(2, FAST), args.requests))
        one = asyncio.run(load(behind_ray(1, SLOW), ROWS, args.seconds))
        many = asyncio.run(load(behind_ray(args.replicas, SLOW), ROWS * args.replicas, args.seconds))
    finally:
        serve.shutdown()
        ray.shutdown()
    figures = {
        "first_token_ms": {"treetop serve": spread(plain), "behind Ray": spread(through)},
        "added_ms": round(statistics.median(through) - statistics.median(plain), 2),
        "one": one,
        "replicas": args.replicas,
        "many": many,
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
