"""Servers for the tests: real processes on 127.0.0.1, nearly all with the mock engine."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai

from support.waiting import WAIT_S
from support.warm import Popen
from treetop.checkpoints.folder import resolve_folder
from treetop.serve.mock_options import TEXT
from treetop.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = Tokenizer(resolve_folder("builtin:nestling"))
STREAM = TOKENIZER.encode(TEXT, special=False)


def replayed(num_prompt_tokens: int, count: int) -> str:
    """What the mock engine says after a prompt of so many tokens."""
    ids = [STREAM[i % len(STREAM)] for i in range(num_prompt_tokens, num_prompt_tokens + count)]
    return TOKENIZER.decode(ids)


class Server:
    """A running `treetop serve`, and what it has said."""

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        most_files: int | None = None,
        start: type[subprocess.Popen[str]] = Popen,
    ) -> None:
        """start: `subprocess.Popen` for a server, and all that it starts, which import everything themselves."""
        command = [sys.executable, "-m", "treetop.cli", "serve", "--port", "0", "--api-workers", "1", *flags]
        if most_files is not None:
            command = ["bash", "-c", f'ulimit -n {most_files}; exec "$@"', "bash", *command]
        self.process = start(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._http = httpx.Client(timeout=WAIT_S)
        self._clients: list[openai.OpenAI] = []
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.said.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str) -> re.Match[str]:
        """Until a line matches."""
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            found = re.search(words, line)
            if found:
                return found
        raise AssertionError("".join(self.said))

    def up(self) -> "Server":
        self.url = self.wait_for(r"on (https?://\S+)")[1]
        return self

    def client(self, **options) -> openai.OpenAI:
        """Closed with the server."""
        options = {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": WAIT_S, **options}
        self._clients.append(openai.OpenAI(**options))
        return self._clients[-1]

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S, **options)

    def post(self, path: str, body, **options) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self._http.post(self.url + path, content=content, headers=headers, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self._http.get(self.url + path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics, of whichever process takes the connection; 0 if it has none yet."""
        for line in self.get("/metrics", headers={"Connection": "close"}).text.splitlines():
            found = re.fullmatch(rf"{re.escape(name)}{{(.*)}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                return float(found[2])
        return 0.0

    def children(self) -> list[int]:
        """Process ids of its processes, the engine's first."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def engine(self) -> int:
        return child_of(self.process.pid, "engine_process")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it and all that it started have ended and `said` holds their last words."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert not self._reader.is_alive(), "a process that it started lives on"
        return code

    def kill(self) -> None:
        """End it, if it has not ended, and let go of what the test holds of it. What it started follows by itself."""
        self.process.kill()
        self.process.wait(WAIT_S)
        for client in (self._http, *self._clients):
            client.close()


def command_of(pid: int) -> str:
    """Empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children_of(parent: int, words: str) -> list[int]:
    """Processes that the parent's threads started with these words."""
    children: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            children += map(int, task.read_text().split())
    return [pid for pid in children if words in command_of(pid)]


def child_of(parent: int, words: str) -> int:
    """The first of `children_of`."""
    return children_of(parent, words)[0]


@contextmanager
def serving(*flags: str, **options) -> Iterator[Server]:
    """A server that is up, killed at the end if it has not ended."""
    server = Server(*flags, **options)
    try:
        yield server.up()
    finally:
        server.kill()


def mock(step_ms: float = 1, tokens: str = "1-4", *flags: str, **options):
    return serving("--mock-engine", f"{step_ms},{tokens}", "--chat-template", TEMPLATE, *flags, **options)
