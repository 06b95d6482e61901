"""Servers of one's own, and a client that notes when its streams were given which token."""

import asyncio
import os
import random
import re
import socket
import sys
import time
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetop.bench import http_client
from treetop.types.config import EngineConfig
from treetop.types.errors import EngineError
from treetop.types.kv_transfer.options import Mode
from treetop.types.options import flag, options_of

COUNTED = (
    "num_peers",
    "num_bytes",
    "num_chunks",
    "num_requests_done",
    "num_local_prefills",
    "time_seconds",
    "overlapped_time_seconds",
)
"""Metrics of hand-overs."""
_LINES = 400
"""Last lines of what a server says that are kept."""


@dataclass(slots=True)
class Stream:
    """A completion as its client hears it: (when, tokens so far) of each event, in seconds of the clock."""

    asked_s: float
    events: list[tuple[float, int]] = field(default_factory=list)
    cached: int = 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.events[0][0] - self.asked_s)


class CompletionClient:
    """Asks the server for completions of ids. pid: of the server's process. start_s: what its start has taken.

    said: its last lines on stderr.
    """

    def __init__(self, url: str, pid: int, start_s: float, said: deque[str]) -> None:
        self.url, self.pid, self.start_s, self.said = url, pid, start_s, said
        self._http = http_client.HttpClient(http_client.Address.of(url), None)

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, ids: Sequence[int], max_tokens: int, into: Stream | None = None) -> Stream:
        """A completion, to its end. into: hears it as it comes."""
        stream = into or Stream(time.perf_counter())
        body = {"prompt": list(ids), "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                usage = event["usage"]
                if event["choices"] and usage["completion_tokens"]:
                    stream.events.append((time.perf_counter(), usage["completion_tokens"]))
                elif "prompt_tokens_details" in usage:
                    stream.cached = usage["prompt_tokens_details"]["cached_tokens"]
        return stream

    @asynccontextmanager
    async def streams(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> AsyncIterator[list[Stream]]:
        """Completions of all prompts, whose streams have begun; on leaving they are aborted. A failed one raises."""
        found = [Stream(time.perf_counter()) for _ in prompts]
        asks = (self.ask(ids, max_tokens, into) for ids, into in zip(prompts, found, strict=True))
        tasks = [asyncio.create_task(each) for each in asks]
        try:
            await until(lambda: all(each.events for each in found), tasks)
            yield found
            if any(task.done() for task in tasks):
                raise EngineError("a stream ended while it was measured")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: Callable[[], bool], tasks: Sequence["asyncio.Future[Any]"] = ()) -> None:
    """Look now and then. Raises what a task raised."""
    while not true():
        for task in tasks:
            if task.done():
                task.result()
                raise EngineError("a stream ended before it was measured")
        await asyncio.sleep(0.002)


@asynccontextmanager
async def served(
    model: str, options: dict[str, Any], environment: dict[str, str] | None = None
) -> AsyncIterator[CompletionClient]:
    """A `treetop serve` of its own, which ends with this. environment: variables beside those of this process."""
    flags = [word for name, value in options.items() for word in flag_of(name, value)]
    command = [sys.executable, "-m", "treetop.cli", "serve", model, "--port", "0", "--log-interval", "0", *flags]
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, stderr=PIPE, stdout=DEVNULL, start_new_session=True, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=_LINES)
    reading = None
    try:
        found = None
        while found is None:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise EngineError(f"the server did not start: {' '.join([*said][-3:])}")
            said.append(line.strip())
            found = re.search(r"on (http://\S+)", line)
        reading = asyncio.create_task(_keep(process.stderr, said))
        client = CompletionClient(found[1], process.pid, time.perf_counter() - began_s, said)
        try:
            yield client
        finally:
            await client.close()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reading is not None:
            await reading


async def _keep(lines: asyncio.StreamReader, said: deque[str]) -> None:
    async for line in lines:
        said.append(line.decode(errors="replace").strip())


@asynccontextmanager
async def workers(
    model: str, options: dict[str, Any], roles: Sequence[Mode], second: Mode = "prefill"
) -> AsyncIterator[dict[Mode, CompletionClient]]:
    """A server of each role; the one that decodes has found the one that prefills.

    With tp_size and ep_size in the options a server has as many GPUs. second: the role whose server has the GPUs after
    those of the others.
    """
    ranks = options.get("tp_size", 1) * options.get("ep_size", 1)
    listen = f"127.0.0.1:{free_ports(ranks)}"
    peers = {
        "null": {},
        "prefill": {"disaggregation_listen": listen},
        "decode": {"disaggregation_prefill_peers": listen},
    }
    async with AsyncExitStack() as stack:
        starts = []
        for role in roles:
            own = {} if options["device"] == "cpu" else {"CUDA_VISIBLE_DEVICES": gpus(int(role == second), ranks)}
            starts.append(
                stack.enter_async_context(served(model, {**options, **peers[role], "disaggregation_mode": role}, own))
            )
        by_role = dict(zip(roles, await asyncio.gather(*starts), strict=True))
        await until(
            lambda: metrics(by_role["decode"].url).get("kv_transfer_num_peers", 0) > 0
        )  # they come a little later
        yield by_role


def free_ports(count: int) -> int:
    """The first of so many ports of this machine, one after the other, below those that the system gives away."""
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        with ExitStack() as taken, suppress(OSError):
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def gpus(number: int, ranks: int) -> str:
    """CUDA_VISIBLE_DEVICES of a server: the ranks' GPUs, after those of `number` servers of as many."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range((number + 1) * ranks)))
    return ",".join(shown.split(",")[number * ranks : (number + 1) * ranks])


def descendants(pid: int) -> list[int]:
    """Process ids, in the order of their start where processes have as many ancestors."""
    own: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            own += map(int, task.read_text().split())
    return [*sorted(own), *(each for child in sorted(own) for each in descendants(child))]


def processes_of(server: CompletionClient, module: str) -> list[int]:
    """Processes of a server that run this module of `treetop.distributed`."""
    found = []
    for pid in descendants(server.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if f"treetop.distributed.{module}" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def handed_over(url: str) -> dict[str, float]:
    """What a worker's metrics say of its hand-overs; 0 before its engine has said anything."""
    found = metrics(url)
    return {name: found.get(f"kv_transfer_{name}", 0.0) for name in COUNTED}


def metrics(url: str) -> dict[str, float]:
    """The server's own metrics, by name without `treetop:`; of those with several labels the last."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^treetop:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def is_up(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url + "/health"):  # 503 is one
        return True
    return False


def flag_of(name: str, value: Any) -> list[str]:
    """The words of a command line that give an option of the engine or of the server."""
    known = options_of(EngineConfig).get(name)
    spelled = known.flag if known is not None and known.flag else flag(name)
    if isinstance(value, bool):
        return [spelled] if value else []
    return [] if value is None else [spelled, str(value)]
