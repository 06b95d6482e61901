"""Serve a model and read its answer as it is written.

    python examples/serve_and_stream.py

Starts `treetop serve` with the model and draft that need no download, waits until it is ready, and asks it as any
client of OpenAI's API does. Needs the extra `serve`.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Raises RuntimeError if the server ends instead."""
    while server.poll() is None:
        try:
            with urlopen(f"{url}/health/ready", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server has ended: exit status {server.returncode}")


def streamed(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer, each as it comes."""
    asked = Request(f"{url}/v1/completions", json.dumps(body | {"stream": True}).encode())
    asked.add_header("Content-Type", "application/json")
    with urlopen(asked) as answer:
        for line in answer:
            said = line.decode().strip().removeprefix("data: ")
            if said == "[DONE]":
                return
            if said:
                yield json.loads(said)


def main() -> None:
    port = free_port()
    command = [sys.executable, "-m", "treetop.cli", "serve", "builtin:nestling", "--port", str(port)]
    command += ["--speculative-draft-model-path", "builtin:nestling-eagle3"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url)
        for event in streamed(url, {"prompt": "def area(width, height):\n", "max_tokens": 40, "temperature": 0}):
            print(event["choices"][0]["text"], end="", flush=True)
        print()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
