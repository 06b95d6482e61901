"""A server of one's own, and a client that notes when its streams were given which token."""

import asyncio
import os
import re
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from treetop.bench.http_client import Address, Connection
from treetop.types.config import flag
from treetop.types.errors import EngineError


@dataclass(slots=True)
class Stream:
    """A completion as its client hears it: (when, tokens so far) of each event, in seconds of the clock."""

    asked_s: float
    events: list[tuple[float, int]] = field(default_factory=list)
    cached: int = 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.events[0][0] - self.asked_s)


class Client:
    """Asks the server for completions of ids."""

    def __init__(self, url: str) -> None:
        self.url, self._connection = url, Connection(Address.of(url), None)

    async def ask(self, ids: Sequence[int], max_tokens: int, into: Stream | None = None) -> Stream:
        """A completion, to its end. into: hears it as it comes."""
        stream = into or Stream(time.perf_counter())
        body = {"prompt": list(ids), "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with aclosing(self._connection.events("/v1/completions", body)) as events:
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


async def until(true: Callable[[], bool], tasks: Sequence["asyncio.Task[Any]"] = ()) -> None:
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
) -> AsyncIterator[Client]:
    """A `treetop serve` of its own, which ends with this. environment: variables beside those of this process."""
    flags = [word for name, value in options.items() for word in flag_of(name, value)]
    command = [sys.executable, "-m", "treetop.cli", "serve", model, "--port", "0", "--log-interval", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=PIPE, stdout=DEVNULL, start_new_session=True, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    said, reading = [], None
    try:
        found = None
        while found is None:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise EngineError(f"the server did not start: {' '.join(said[-3:])}")
            said.append(line.strip())
            found = re.search(r"on (http://\S+)", line)
        reading = asyncio.create_task(process.stderr.read())
        yield Client(found[1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reading is not None:
            await reading


def flag_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name)] if value else []
    return [] if value is None else [flag(name), str(value)]
