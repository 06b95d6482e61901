"""How long clients wait for the next token when a process is killed or stopped.

    python benchmarks/recovery.py                                 two GPUs, Llama-3.1-8B's shape, random weights
    python benchmarks/recovery.py --tp-size 2                     four GPUs
    python benchmarks/recovery.py --model builtin:nestling --device cpu --prompt-tokens 400

Each drill has servers of its own, `--rows` streams, and one signal. All streams must come to their last token.

engine: the engine process of a server. rank-0, rank-1: of a server whose ranks share a model. expert-rank: of one with
--ep-size 2 and Qwen3-30B-A3B's shape, made small on a CPU. replica: one of `--dp-size` engines. decode: the engine of a
decode worker. prefill-before, -during, -after: the prefill worker, as prompts come, when half of the time to their
first token is over, or once they decode. rank-1-stopped, prefill-stopped (as -during): it goes on after
`--stopped-seconds`. With `--tp-size N` these servers have N ranks, workers too: the prefill worker has GPUs N .. 2N - 1
and others 0 .. N - 1. With `--spare-engine` nothing is killed before the process that waits has imported all.

One JSON object a drill: seconds of the longest pause of each stream from the signal on, the shortest of them, their
median and the longest; for drills of a prefill worker also seconds to the first token without any signal, for others
those of the server's start.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from frame import add_model, end_with, parser_of, preset, say
from serving import pair

from disaggregation import prompt
from treetop.distributed.process import SPARE
from treetop.types.errors import EngineError, InputError
from treetop.types.kv_transfer.options import Mode
from treetop_debug.servers import CompletionClient, Stream, descendants, processes_of, served, until, workers

SMALL = {
    "hidden_size": 64,
    "vocab_size": 1024,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_APART: tuple[Mode, ...] = ("prefill", "decode")
_HEARD = 3
"""Events of each stream before a process that serves it is killed."""


class Drills:
    """All of them, for one model."""

    def __init__(self, args: argparse.Namespace, model: str, options: dict[str, Any]) -> None:
        self._args, self._model, self._options = args, model, options
        self._draw, ranks = random.Random(0), {"tp_size": args.tp_size or 2}
        self._workers = {**options, "tp_size": args.tp_size or 1}
        self.by_name: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "engine": partial(self._alone, {}, "engine_process"),
            "rank-0": partial(self._alone, ranks, "engine_process"),
            "rank-1": partial(self._alone, ranks, "tp_worker"),
            "rank-1-stopped": partial(self._alone, ranks, "tp_worker", stopped=True),
            "expert-rank": self._expert_rank,
            "replica": partial(self._alone, {"dp_size": args.dp_size}, "engine_process"),
            "decode": self._decode,
            "prefill-before": partial(self._prefill, 0.0),
            "prefill-during": partial(self._prefill, 0.5),
            "prefill-after": partial(self._prefill, None),
            "prefill-stopped": partial(self._prefill, 0.5, stopped=True),
        }

    async def _alone(self, own: dict[str, Any], module: str, *, stopped: bool = False) -> dict[str, Any]:
        async with served(self._model, {**self._options, **own}) as server:
            return await self._while_decoding(server, module, stopped=stopped)

    async def _expert_rank(self) -> dict[str, Any]:
        with with_experts(self._args.device) as model:
            own = {"ep_size": 2, "draft": None, "speculative_algorithm": "NONE", "load_format": "dummy"}
            async with served(model, {**self._options, **own}) as server:
                return await self._while_decoding(server, "engine_process", rank=1)

    async def _decode(self) -> dict[str, Any]:
        async with workers(self._model, self._workers, _APART) as servers:
            return await self._while_decoding(servers["decode"], "engine_process")

    async def _while_decoding(
        self, server: CompletionClient, module: str, rank: int = 0, *, stopped: bool = False
    ) -> dict[str, Any]:
        """rank: among the processes of the module."""
        if self._args.spare_engine:
            await spares_wait(server)
        act = partial(self._end, processes_of(server, module)[rank : rank + 1], stopped)
        found = seconds(*await self._disturbed(server, lambda streams: heard(streams, _HEARD), act))
        return {**found, "start": round(server.start_s, 1)}

    def _end(self, pids: Sequence[int], stopped: bool) -> None:
        """Kill processes, or stop them for a while."""
        for pid in pids:
            with suppress(ProcessLookupError):  # it may have ended with the one before it
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
            if stopped:
                asyncio.get_running_loop().call_later(self._args.stopped_seconds, os.kill, pid, signal.SIGCONT)

    async def _prefill(self, share: float | None, *, stopped: bool = False) -> dict[str, Any]:
        """share: of the time to first tokens that is over when the signal comes; None for once they have come."""
        async with workers(self._model, self._workers, _APART) as servers:
            for _ in range(2):  # the first warms up
                undisturbed = await self._disturbed(servers["decode"], lambda _: True, lambda: None)
            first_s = statistics.median(each.ttft_ms for each in undisturbed[0]) / 1e3

            def due(streams: Sequence[Stream]) -> bool:
                if share is None:
                    return heard(streams, _HEARD)
                return time.perf_counter() - streams[0].asked_s >= share * first_s

            act = partial(self._end, [servers["prefill"].pid, *descendants(servers["prefill"].pid)], stopped)
            found = seconds(*await self._disturbed(servers["decode"], due, act))
            if stopped:
                await asyncio.sleep(self._args.stopped_seconds)
            return {**found, "first_token_undisturbed": round(first_s, 3)}

    async def _disturbed(
        self, server: CompletionClient, due: Callable[[Sequence[Stream]], bool], act: Callable[[], None]
    ) -> tuple[list[Stream], float]:
        """Streams to their ends, and when something was done to them: when it was due."""
        ids = [prompt(self._draw, self._args.prompt_tokens) for _ in range(self._args.rows)]
        streams = [Stream(time.perf_counter()) for _ in ids]
        asks = [
            asyncio.create_task(server.ask(each, self._args.output_tokens, into))
            for each, into in zip(ids, streams, strict=True)
        ]
        await until(lambda: due(streams), asks)
        act()
        acted_s = time.perf_counter()
        await asyncio.gather(*asks)
        if any(each.events[-1][1] != self._args.output_tokens for each in streams):
            raise EngineError("a stream ended early")
        return streams, acted_s


async def spares_wait(server: CompletionClient) -> None:
    """Until every process that waits to be an engine has been still for a second: it has imported all."""
    before, now = list[list[str]](), ticks(server)
    while not now or now != before:
        await asyncio.sleep(1.0)
        before, now = now, ticks(server)


def ticks(server: CompletionClient) -> list[list[str]]:
    """Processor time of each process that waits, as the kernel counts it."""
    folders = [Path(f"/proc/{pid}") for pid in processes_of(server, "engine_process")]
    waiting = [each for each in folders if SPARE in (each / "cmdline").read_text()]
    return [(each / "stat").read_text().rsplit(")", 1)[1].split()[11:13] for each in waiting]


def heard(streams: Sequence[Stream], count: int) -> bool:
    return all(len(each.events) >= count for each in streams)


def seconds(streams: Sequence[Stream], acted_s: float) -> dict[str, Any]:
    """The longest pause of each stream after what was done to it."""
    pauses = []
    for each in streams:
        times = [max(each.asked_s, acted_s), *(when for when, _ in each.events if when > acted_s)]
        pauses.append(max(end - begin for begin, end in pairwise(times)))
    found = {"shortest": min(pauses), "median": statistics.median(pauses), "longest": max(pauses)}
    return {"seconds": {name: round(value, 3) for name, value in found.items()}}


@contextmanager
def with_experts(device: str) -> Iterator[str]:
    """The folder of a target with experts, for random weights."""
    model, _ = preset("qwen3-30b-a3b")
    with tempfile.TemporaryDirectory() as small:
        if device == "cpu":
            config = json.loads((Path(model) / "config.json").read_text())
            (Path(small) / "config.json").write_text(json.dumps({**config, **SMALL}))
            model = small
        with pair(argparse.Namespace(model=model, draft=None), 0) as (target, _):
            yield target


async def run(args: argparse.Namespace) -> None:
    context = args.prompt_tokens + args.output_tokens + 64
    options = {
        "load_format": "auto" if args.model else "dummy",
        "max_running_requests": args.rows,
        "context_length": context,
        "max_total_tokens": 2 * args.rows * context,
        "device": args.device,
        "spare_engine": args.spare_engine,
    }
    with pair(args, context) as (model, draft):
        drills = Drills(args, model, {**options, "draft": draft})
        names = args.drills or [*drills.by_name]
        if unknown := [name for name in names if name not in drills.by_name]:
            raise InputError(f"--drills: {unknown[0]} is none of {', '.join(drills.by_name)}")
        for name in names:
            say({"drill": name, "streams": args.rows, **await drills.by_name[name]()})


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--drills", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--prompt-tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=400, metavar="N")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="streams")
    parser.add_argument("--tp-size", type=int, metavar="N", help="default: 1 of workers, 2 where a rank is killed")
    parser.add_argument("--dp-size", type=int, default=2, metavar="N", help="engines of `replica`")
    parser.add_argument("--spare-engine", action="store_true", help="of every server")
    parser.add_argument("--stopped-seconds", type=float, default=20.0, metavar="S")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args(arguments)
    if min(args.prompt_tokens, args.output_tokens, args.rows, args.stopped_seconds) < 1:
        raise InputError("every number must be at least 1")
    if args.dp_size < 2:
        raise InputError(f"--dp-size must be at least 2, got {args.dp_size}")
    if args.tp_size is not None and args.tp_size < 2:
        raise InputError(f"--tp-size must be at least 2, got {args.tp_size}")
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    end_with(main)
