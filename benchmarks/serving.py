"""What serving costs on one device: `treetop serve` against `LLM` in this process, and prompts beside streams.

    python benchmarks/serving.py                                              Llama-3.1-8B's shape, random weights
    python benchmarks/serving.py --model builtin:nestling --batches 1 8       the embedded pair

Accept lengths are forced: text means nothing, times do. Both engines have the same options and are up side by side; one
of them works at a time. One JSON object a line, in this order:

rounds  rounds a second of B streams over HTTP, their share of those of `LLM.stream`, measured in turns
host    microseconds of a round of the largest B: scheduler, core and messages; launches; waiting for the device. Where
        steps overlap, `hidden` is the share of rounds that the device had not ended when the next one was launched
ttft    ms to the first token over HTTP, idle server: a cold prompt, one whose first nine tenths are cached, and a cold
        one as long as the rest
gaps    ms between two events of a stream over HTTP, half of the largest B: alone, and while a prompt is always being
        processed
"""

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from frame import add_model, end_with, machine_of, parser_of, preset, say
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from treetop import LLM, SamplingParams
from treetop.bench.prompts import prompt_ids
from treetop.bench.rounds import wall_times_ms, warm_up
from treetop.bench.serve import summary
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.json_file import read_object
from treetop.checkpoints.loader import compute_device
from treetop.core.engine_core import EngineCore
from treetop.core.loop import CoreLoop
from treetop.core.wire import Updates, encode
from treetop.types.changes import Change, Commit, UpdateWeights
from treetop.types.config import BUILTIN_MODEL, EngineConfig
from treetop.types.errors import EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.messages import StepPlan, StepResult
from treetop.types.requests import EngineRequest
from treetop_debug.servers import CompletionClient, Stream, served, until

PARTS = ("rounds", "host", "ttft", "gaps")
CACHED = 0.9
"""Share of a prompt that the cache has, where it has any."""
WAITED_US = 50
"""A wait that is longer finds the device at work."""
SPARE = 64
"""Rounds that a stream may go on beside those that count."""
_PAIR = ("nestling", "nestling-eagle3")


@dataclass(frozen=True, slots=True)
class Bench:
    """Both engines, and what is asked of them."""

    llm: LLM
    client: CompletionClient
    batches: list[int]
    input_tokens: int
    prompt_tokens: int
    num_rounds: int
    repeats: int
    draw: random.Random

    @property
    def accept(self) -> int:
        return int(self.llm.config.simulate_accept_length or 1)

    @property
    def skipped(self) -> int:
        """Rounds that warm up."""
        return warm_up(self.llm.engine.runner.buffers.rows.device)

    @property
    def room(self) -> int:
        """Tokens that a stream may get before it is ended."""
        return self.llm.engine.layout.max_context - self.input_tokens

    def prompt(self, count: int) -> list[int]:
        """Random ids that nobody has cached."""
        return [self.draw.randrange(self.llm.engine.spec.vocab_size) for _ in range(count)]

    async def over(self, stream: Stream, num_rounds: int) -> tuple[float, int]:
        """Wait for so many rounds of a stream. Returns their seconds, and how many they were."""
        begun = len(stream.events) - 1
        await until(lambda: rounds_since(stream, begun, num_rounds, self.accept) is not None)
        found = rounds_since(stream, begun, num_rounds, self.accept)
        assert found is not None
        return found


def rounds_since(stream: Stream, begun: int, minimum: int, accept: int) -> tuple[float, int] | None:
    """Seconds and rounds between event `begun` and the first by which `minimum` rounds have come; None before that."""
    began_s, before = stream.events[begun]
    if (stream.events[-1][1] - before) // accept < minimum:
        return None
    at_s, tokens = next(each for each in stream.events[begun:] if (each[1] - before) // accept >= minimum)
    return at_s - began_s, (tokens - before) // accept


async def rounds(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    for batch in bench.batches:
        prompts = prompt_ids(bench.llm, batch, bench.input_tokens)
        local, remote = [], []
        for _ in range(bench.repeats):
            times, accept = await asyncio.to_thread(wall_times_ms, bench.llm, prompts, bench.num_rounds)
            if accept != bench.accept:
                raise EngineError(f"rounds gave {accept} tokens, not the forced {bench.accept}")
            local.append(1e3 * len(times) / sum(times))
            async with bench.client.streams(prompts, bench.room) as streams:
                await bench.over(streams[0], bench.skipped)
                seconds, count = await bench.over(streams[0], bench.num_rounds)
            remote.append(count / seconds)
        yield {
            "batch": batch,
            "llm_rounds_per_s": shown(local),
            "server_rounds_per_s": shown(remote),
            "server_over_llm": round(statistics.median(remote) / statistics.median(local), 4),
        }


class TimedEngine:
    """An engine, and the seconds that its calls took since they were last asked for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.launch_s = self.wait_s = 0.0

    def launch(self, plan: StepPlan) -> Any:
        started_s = time.perf_counter()
        step = self._engine.launch(plan)
        self.launch_s += time.perf_counter() - started_s
        return step

    def collect(self, in_flight: Any) -> StepResult:
        started_s = time.perf_counter()
        result: StepResult = self._engine.collect(in_flight)
        self.wait_s += time.perf_counter() - started_s
        return result

    def prepare(self, change: Change) -> Commit:
        commit: Commit = self._engine.prepare(change)
        return commit

    def drop(self, change: Change) -> None:
        self._engine.drop(change)

    def lacks_room(self, change: UpdateWeights) -> bool:
        return bool(self._engine.lacks_room(change))


async def host(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    """Steps as the engine process runs them, without its socket."""
    llm, batch = bench.llm, max(bench.batches)
    engine, sizes = TimedEngine(llm.engine), []
    loop = CoreLoop(EngineCore(engine, llm.scheduler))

    def deliver(updates: list[Any]) -> None:
        encode(Updates(tuple(updates)))
        sizes.append(sum(update.accept_len is not None for update in updates))

    params, ids = SamplingParams(max_tokens=bench.room, ignore_eos=True), [RequestId(-1 - i) for i in range(batch)]
    prompts = prompt_ids(llm, batch, bench.input_tokens)
    loop.add([EngineRequest(i, tuple(p), params, 0) for i, p in zip(ids, prompts, strict=True)], deliver)
    parts: list[tuple[float, float, float]] = []  # us of a step: host, launch, wait
    while len(parts) < bench.skipped + bench.num_rounds:
        engine.launch_s = engine.wait_s = 0.0
        began_s, told = time.perf_counter(), len(sizes)
        loop.step()
        whole_s = time.perf_counter() - began_s
        if loop.core.failure is not None or not loop.core.busy:
            raise EngineError(f"the requests have ended: {loop.core.failure}")
        if sizes[told:] == [batch]:
            parts.append(
                (1e6 * (whole_s - engine.launch_s - engine.wait_s), 1e6 * engine.launch_s, 1e6 * engine.wait_s)
            )
    loop.abort(ids)
    while loop.core.busy:
        loop.step()
    own, launches, waits = zip(*parts[bench.skipped :], strict=True)
    overlaps = llm.engine.layout.max_in_flight > 1
    yield {
        "batch": batch,
        "scheduler_core_us": {"median": round(statistics.median(own), 1), "p90": round(summary(own)["p90"], 1)},
        "launch_us": round(statistics.median(launches), 1),
        "wait_us": {"median": round(statistics.median(waits), 1), "low": round(min(waits), 1)},
        "round_us": round(statistics.fmean(map(sum, parts[bench.skipped :])), 1),
        "hidden": round(statistics.fmean(wait > WAITED_US for wait in waits), 3) if overlaps else None,
    }


async def ttft(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    known = int(CACHED * bench.prompt_tokens)
    times: dict[str, list[float]] = {"cold": [], "hit": [], "rest_alone": []}
    cached = []
    for turn in range(1 + bench.repeats):  # the first warms up
        begin = bench.prompt(known)
        rest = bench.prompt_tokens - known
        for name, ids in (
            ("cold", begin + bench.prompt(rest)),
            ("hit", begin + bench.prompt(rest)),
            ("rest_alone", []),
        ):
            answer = await bench.client.ask(ids or bench.prompt(rest), 1)
            if turn:
                times[name].append(answer.ttft_ms)
                cached += [answer.cached] * (name == "hit")
    middle = {name: statistics.median(each) for name, each in times.items()}
    yield {
        "prompt_tokens": bench.prompt_tokens,
        "cached_tokens": int(statistics.median(cached)),
        **{f"{name}_ms": shown(each) for name, each in times.items()},
        "hit_over_cold": round(middle["hit"] / middle["cold"], 3),
        "uncached_share": round(1 - statistics.median(cached) / bench.prompt_tokens, 3),
    }


async def gaps(bench: Bench) -> AsyncIterator[dict[str, Any]]:
    rows = max(bench.batches) // 2
    prompts = [bench.prompt(bench.input_tokens) for _ in range(rows)]
    found: dict[str, dict[str, float]] = {}
    done: list[Stream] = []

    async def come() -> None:
        while True:
            done.append(await bench.client.ask(bench.prompt(bench.prompt_tokens), 1))

    async with bench.client.streams(prompts, bench.room) as streams:
        await bench.over(streams[0], bench.skipped)
        for name in ("alone", "with_prompts"):
            coming = asyncio.create_task(come()) if name == "with_prompts" else None
            begun = [len(each.events) for each in streams]
            await bench.over(streams[0], 2 * bench.num_rounds)
            if coming is not None:
                if coming.done():
                    coming.result()
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            times = [gap for each, at in zip(streams, begun, strict=True) for gap in gaps_ms(each, at)]
            found[name] = {key: round(value, 2) for key, value in summary(times).items()}
    ratio = {key: round(found["with_prompts"][key] / found["alone"][key], 2) for key in ("p50", "p99")}
    tokens = bench.llm.engine.config.prefill_tokens_per_round
    yield {
        "rows": rows,
        "prompt_tokens": bench.prompt_tokens,
        "prompts": len(done),
        "prefill_tokens_per_round": tokens,
        **{f"{name}_ms": each for name, each in found.items()},
        "prompt_ttft_ms": shown([each.ttft_ms for each in done]) if done else None,
        "ratio": ratio,
    }


def gaps_ms(stream: Stream, begun: int) -> list[float]:
    """Between the events of a stream, of those from the one before event `begun` on."""
    return [1e3 * (b - a) for (a, _), (b, _) in pairwise(stream.events[begun - 1 :])]


def shown(values: Sequence[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 2) for name, value in named.items()}


MEASURE: dict[str, Callable[[Bench], AsyncIterator[dict[str, Any]]]] = {
    "rounds": rounds,
    "host": host,
    "ttft": ttft,
    "gaps": gaps,
}


@contextmanager
def pair(args: argparse.Namespace, positions: int) -> Iterator[tuple[str, str]]:
    """Folders of target and head. A target without a tokenizer gets one with a word for each id, so it streams text."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if args.model == BUILTIN_MODEL:
            for name in _PAIR:
                shutil.copytree(resolve_folder(f"builtin:{name}"), folder / name)
                config = folder / name / "config.json"
                config.write_text(json.dumps({**read_object(config), "max_position_embeddings": positions}))
            yield str(folder / _PAIR[0]), str(folder / _PAIR[1])
            return
        model, draft = (args.model, args.draft) if args.model else preset(args.preset)
        target, own = resolve_folder(model), folder / "target"
        own.mkdir()
        for path in target.iterdir():
            (own / path.name).symlink_to(path.resolve())
        if not (own / "tokenizer.json").exists():
            words = {f"w{i}": i for i in range(read_object(target / "config.json")["vocab_size"])}
            Tokenizer(WordLevel(words, unk_token="w0")).save(str(own / "tokenizer.json"))
        yield str(own), draft


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Of both engines, but for model and draft. The pools hold what is asked for, so that both fit on one GPU."""
    rows, shape = max(args.batches), EngineConfig.of(None).shape
    while_others_prefill = rows * args.input_tokens // (args.prefill_tokens_per_round or rows * shape.num_draft_tokens)
    num_rounds = warm_up(compute_device(args.device)) + 4 * args.rounds + while_others_prefill + rows + SPARE
    stream = args.input_tokens + num_rounds * args.accept_length + shape.commit_width
    context = max(stream, args.prompt_tokens + 1)
    return {
        "simulate_accept_length": args.accept_length,
        "speculative_policy": "fixed",
        "load_format": "auto" if args.model else "dummy",
        "max_running_requests": rows,
        "context_length": context,
        "max_total_tokens": rows * (stream + 64) + 4 * context,
        "prefill_tokens_per_round": args.prefill_tokens_per_round,
        "device": args.device,
    }


async def run(args: argparse.Namespace) -> None:
    """Measure, and print a line for each figure."""
    options = options_of(args)
    with pair(args, options["context_length"]) as (model, draft):
        options["draft"] = draft
        began_s = time.perf_counter()
        async with served(model, options) as client:
            up_s = time.perf_counter()
            llm = await asyncio.to_thread(lambda: LLM(model, **options))
            starts_s = [round(up_s - began_s, 1), round(time.perf_counter() - up_s, 1)]
            machine = {**machine_of(), "cores": os.cpu_count(), "python": platform.python_version()}
            say({"part": "machine", **machine, "starts_s": starts_s, "options": options})
            given = args.batches, args.input_tokens, args.prompt_tokens, args.rounds, args.repeats
            bench = Bench(llm, client, *given, random.Random(0))
            for name in args.parts:
                async for figures in MEASURE[name](bench):
                    say({"part": name, **figures})
            llm.close()


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 64], metavar="B")
    parser.add_argument("--input-tokens", type=int, default=1024, metavar="N", help="prompts of streams")
    parser.add_argument("--prompt-tokens", type=int, default=8192, metavar="N", help="prompts of ttft and gaps")
    parser.add_argument("--accept-length", type=int, default=3, metavar="N", help="tokens that every round gives")
    parser.add_argument("--prefill-tokens-per-round", type=int, metavar="N", help="of both engines")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="of a measurement")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(arguments)
    counts = (*args.batches, args.input_tokens, args.prompt_tokens, args.accept_length, args.rounds, args.repeats)
    if min(counts) < 1 or ("gaps" in args.parts and max(args.batches) < 2):
        raise InputError("every number must be at least 1; gaps are of half the largest of --batches: at least 2")
    asyncio.run(run(args))
    return 0


if __name__ == "__main__":
    end_with(main)
