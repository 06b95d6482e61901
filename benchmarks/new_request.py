"""How long a new request waits for its first token beside others that decode, over HTTP, with ranks that share experts.

    python benchmarks/new_request.py FOLDER --ep-size 2 [--requests 100] [--streams 2] [flags of `treetop serve`]

Prints JSON: milliseconds of completions of one token, one after the other, while `--streams` streams decode.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

_PROMPT = [5, 6, 7, 8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--streams", type=int, default=2)
    args, flags = parser.parse_known_args()
    command = [sys.executable, "-m", "treetop.cli", "serve", args.model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = next(filter(None, (re.search(r"on (http://\S+)", line) for line in server.stderr)))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            print(json.dumps(measured(found[1], args.requests, args.streams)))
        finally:
            server.terminate()


def measured(url: str, count: int, streams: int) -> dict[str, Any]:
    """The times of `count` requests."""
    over = threading.Event()
    load = [threading.Thread(target=_decode, args=(url, over, index)) for index in range(streams)]
    for each in load:
        each.start()
    times = []
    with httpx.Client(timeout=60) as client:
        for index in range(count + 10):
            begun = time.perf_counter()
            _ask(client, url, [*_PROMPT, index % 7 + 3], 1)
            times.append(1e3 * (time.perf_counter() - begun))
    over.set()
    for each in load:
        each.join()
    times = sorted(times[10:])
    return {
        "requests": count,
        "streams": streams,
        "p50_ms": round(statistics.median(times), 2),
        "p90_ms": round(times[int(0.9 * len(times))], 2),
        "mean_ms": round(statistics.mean(times), 2),
    }


def _decode(url: str, over: threading.Event, index: int) -> None:
    with httpx.Client(timeout=60) as client:
        while not over.is_set():
            _ask(client, url, [4, index + 4], 150)


def _ask(client: httpx.Client, url: str, prompt: list[int], max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    client.post(f"{url}/v1/completions", json=body).raise_for_status()


if __name__ == "__main__":
    main()
