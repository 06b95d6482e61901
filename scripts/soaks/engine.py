"""The embedded pair in this process: requests come, run and are aborted at random for many rounds.

Device probes are on, and the pool is too small for its rows, so that requests are retracted. The load changes every
some rounds, down to nothing and back. With `--kv-offloading-size` half of the prompts go on from earlier answers, whose
K/V the host kept; now and then all pages there are damaged. At the end no request, row or page is left, GPU memory is
what it was at half time, and a random sample of the finished requests gets the same tokens from a fresh engine that has
room.
"""

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from soaks.common import MOST_TIMES, Answered, Summary, compare, random_params
from treetop import LLM, SamplingParams
from treetop.bench.equality import TIES_ALLOWED
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device
from treetop.llm import RequestOutput, TextDelta
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop_debug.patching import instead, replaced

LEAST = (("rounds", 1),)
LOADS = (0, 1, 2, 3, 5, 8, 9, 16)
"""Live requests that a phase of the soak aims at."""
SLACK_BYTES = {"allocated": 1 << 20, "reserved": 64 << 20}
"""Growth of GPU memory from half time to the end that is no leak: blocks of other sizes, cached by the allocator."""


@dataclass(slots=True, kw_only=True)
class EngineSummary(Summary):
    """Of a soak of one engine."""

    rounds: int = 0
    largest_batch: int = 0
    idle_checks: int = 0
    damages: int = 0
    rounds_per_s: float = 0.0


@dataclass(slots=True)
class Stream:
    """One call of `LLM.stream` that has not ended. left: its requests that are alive."""

    deltas: Iterator[TextDelta]
    params: list[SamplingParams]
    left: int


class Soak:
    """Drives one engine through `LLM.stream`, as a user would."""

    def __init__(self, llm: LLM, seed: int, sample: int) -> None:
        self.llm, self.summary = llm, EngineSummary(seed=seed)
        self.sample: list[Answered] = []
        self._rng, self._sample_size = random.Random(seed), sample
        self._streams: list[Stream] = []
        self._texts = prompt_ids(llm)
        self._accepted = self._row_rounds = 0
        self._earlier = deque[list[int]](maxlen=64 if llm.engine.layout.host is not None else 0)
        llm.engine.observer = lambda plan, tree, accepted: self._count(len(plan.rows))

    def run(self, rounds: int, lacks: Callable[[EngineSummary], bool] = lambda _: False) -> EngineSummary:
        """Soak for `rounds` decode rounds, with an idle moment at half time and at the end.

        lacks: whether something has not happened yet that depends on threads; then it goes on, but not for ever.
        """
        started_s = time.perf_counter()
        try:
            self._soak(rounds // 2)
            before = memory()
            self._soak(rounds, lacks)
            growth = {name: now - before[name] for name, now in memory().items()}
            self.summary.grew("GPU memory", growth, SLACK_BYTES)
        except Exception as error:  # a probe, a lost page, a crash: all end a soak
            self.summary.fail(f"after {self.summary.rounds} rounds: {type(error).__name__}: {error}")
        done = self.summary
        done.elapsed_s = round(time.perf_counter() - started_s, 1)
        done.rounds_per_s = round(done.rounds / max(done.elapsed_s, 1e-9), 1)
        done.accept_length = round(1 + self._accepted / max(self._row_rounds, 1), 3)
        done.retractions = self.llm.scheduler.num_retractions
        return done

    def compare(self, fresh: LLM) -> None:
        """Answer the sampled requests again on an engine that has seen nothing."""
        tokens, ties = compare(self.summary, fresh, self.sample), self.summary.ties
        if ties > max(1, TIES_ALLOWED * tokens):
            self.summary.fail(f"{ties} near ties in {tokens} tokens")

    def _soak(self, until: int, lacks: Callable[[EngineSummary], bool] = lambda _: False) -> None:
        """Change the load every some rounds up to round `until`, or further, then let everything drain."""
        rng, done = self._rng, self.summary
        load, change = rng.choice(LOADS), done.rounds
        while done.rounds < until or (done.rounds < MOST_TIMES * until and lacks(done)):
            if done.rounds >= change:
                load, change = rng.choice(LOADS), done.rounds + rng.randrange(10, 200)
            alive = sum(stream.left for stream in self._streams)
            if alive == 0:
                self._idle()
                load = max(load, 1)
            if alive < load:
                self._arrive(rng.randint(1, load - alive))
            self._pull(rng.choice(self._streams))
        while self._streams:
            self._pull(rng.choice(self._streams))
        self._idle()

    def _arrive(self, count: int) -> None:
        params = [random_params(self._rng, self.llm) for _ in range(count)]
        prompts = [self._random_prompt() for _ in params]
        self._streams.append(Stream(iter(self.llm.stream(prompts, params)), params, count))
        self.summary.arrived += count

    def _pull(self, stream: Stream) -> None:
        """The next piece of a stream, or, now and then, its end by abort."""
        if self._rng.random() < 0.01:
            stream.deltas.close()  # type: ignore[attr-defined]  # a generator
            self.summary.aborted += stream.left
            self._streams.remove(stream)
            return
        delta = next(stream.deltas, None)
        if delta is None:
            self._streams.remove(stream)
        elif delta.output is not None:
            stream.left -= 1
            self._finished(stream.params[delta.index], delta.output)

    def _finished(self, params: SamplingParams, output: RequestOutput) -> None:
        done = self.summary
        done.finished += 1
        done.tokens += len(output.token_ids)
        self._accepted += sum(output.metrics.accept_lens)
        self._row_rounds += len(output.metrics.accept_lens)
        if output.error is not None or output.finish_reason == "abort":
            self.summary.fail(f"a request failed: {output.error}")
        if not 1 <= len(output.token_ids) <= params.max_tokens:
            self.summary.fail(f"{len(output.token_ids)} tokens for {params}")
        self._earlier.append([*output.prompt_token_ids, *output.token_ids])
        one = Answered(output.prompt_token_ids, params, [*output.token_ids], output.finish_reason)
        if len(self.sample) < self._sample_size:
            self.sample.append(one)
        elif (place := self._rng.randrange(done.finished)) < self._sample_size:
            self.sample[place] = one

    def _random_prompt(self) -> list[int]:
        """A piece of a held-out text: mostly short, sometimes most of the context, sometimes all but a few tokens."""
        rng, context = self._rng, self.llm.engine.layout.max_context
        if self._earlier and rng.random() < 0.5:
            earlier = rng.choice(self._earlier)
            return [*earlier, *rng.choice(self._texts)][: min(len(earlier) + rng.randint(1, 32), context - 1)]
        longest = rng.choice((context // 8, context // 4, context // 2, context - 1))
        length = context - rng.randint(1, 8) if rng.random() < 0.05 else rng.randint(1, longest)
        text: list[int] = []
        while len(text) < length:
            text += rng.choice(self._texts)
        start = rng.randrange(len(text) - length + 1)
        return text[start : start + length]

    def _idle(self) -> None:
        """Nothing is alive: all rows and pages are accounted for, and nobody is left in a queue."""
        self.llm._core.flush()  # the last steps of requests that have ended
        self.llm.scheduler.check_integrity()
        if self.llm.scheduler.queues.by_id:
            self.summary.fail("requests are alive that nobody waits for")
        self.summary.idle_checks += 1
        host = self.llm.engine.host_pages
        if host is not None and self._rng.random() < 0.05:
            for group in host._groups.values():
                for slab in group.slabs:
                    slab.result()[:, ::5] ^= 1 << 6
            self.summary.damages += 1

    def _count(self, rows: int) -> None:
        self.summary.rounds += 1
        self.summary.largest_batch = max(self.summary.largest_batch, rows)


def prompt_ids(llm: LLM) -> list[list[int]]:
    """Held-out texts as ids; random ids without a tokenizer."""
    if llm.tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(llm.engine.spec.vocab_size) for _ in range(40)] for _ in range(16)]
    path = resolve_folder("builtin:nestling").parent / "prompts.jsonl"
    return [llm.tokenizer.encode(json.loads(line)["prompt"]) for line in path.read_text(encoding="utf-8").splitlines()]


def memory() -> dict[str, int]:
    """Bytes of GPU memory in use and held, once everything launched is done; zeros without a GPU."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options: room for about two and a half requests at the context wall, in eight rows."""
    return {
        "model": BUILTIN_MODEL,
        "draft": BUILTIN_DRAFT,
        "device": compute_device(args.device).type,
        "dtype": args.dtype,
        "graphs": args.graphs,
        "attention_backend": args.attention_backend,
        "check_level": args.check_level,
        "page_size": args.page_size,
        "disable_radix_cache": args.disable_radix_cache,
        "context_length": args.context_length,
        "max_running_requests": 8,
        "chunked_prefill_size": 128,
        "max_total_tokens": 5 * args.context_length // 2,
        "kv_offloading_size": args.kv_offloading_size,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Soak and compare; what is printed."""
    options = options_of(args)
    with replaced([instead("treetop.engine.startup.host_layout:refuse_cpu", lambda size, device: None)]):
        soak = Soak(LLM(**options), args.seed, args.sample)
    summary = soak.run(args.rounds)
    tier = soak.llm.scheduler.load.host_tier
    if tier is not None and (not tier.loaded_tokens or tier.failed_loads > summary.damages):
        summary.fail(f"the tier on the host: {tier}, {summary.damages} damages")
    room = 8 * (args.context_length + 64)
    alone = {"max_total_tokens": room, "disable_radix_cache": True, "check_level": 1, "kv_offloading_size": None}
    soak.compare(LLM(**{**options, **alone}))
    launcher, backend = type(soak.llm.engine.launcher).__name__, soak.llm.engine.runner.backend.name
    found = {"options": {**options, "seed": args.seed}, "launcher": launcher, "backend": backend} | asdict(summary)
    return found if tier is None else {**found, "host_tier": tier._asdict()}
