"""A soak: requests come, run and are aborted at random for many rounds, and nothing leaks, fires or changes.

    python scripts/soak.py --rounds 20000 --seed 0

The embedded pair runs with device probes on and a pool too small for its rows, so that requests are retracted. The load
changes every some rounds, down to nothing and back. At the end: no request, row or page is left, GPU memory is what it
was at half time, and a random sample of the finished requests gets the same tokens from a fresh engine that has room.
Prints one JSON object; exit code 1 if anything failed, 2 for an option that cannot work.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from treetop import LLM, SamplingParams
from treetop.bench.equality import NEAR_TIE, TIES_ALLOWED, equal_outputs
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device
from treetop.cli import OneLineParser, exit_code
from treetop.kernels.sampling.sampling import RowSamplingParams, draw, philox_uniform, warp
from treetop.llm import RequestOutput, TextDelta
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError
from treetop.types.options import options_of as table_of

LOADS = (0, 1, 2, 3, 5, 8, 9, 16)
"""Live requests that a phase of the soak aims at."""
MIN_CONTEXT = 16
"""Tokens that the random prompts need room for."""
SLACK_BYTES = {"allocated": 1 << 20, "reserved": 64 << 20}
"""Growth of GPU memory from half time to the end that is no leak: blocks of other sizes, cached by the allocator."""


@dataclass(slots=True)
class Summary:
    """What a soak did and found. unequal: sampled requests that a fresh engine answers otherwise; ties: near ties."""

    rounds: int = 0
    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    tokens: int = 0
    accept_length: float = 0.0
    largest_batch: int = 0
    idle_checks: int = 0
    elapsed_s: float = 0.0
    rounds_per_s: float = 0.0
    compared: int = 0
    ties: int = 0
    unequal: int = 0
    allocated_growth_bytes: int = 0
    reserved_growth_bytes: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Stream:
    """One call of `LLM.stream` that has not ended. left: its requests that are alive."""

    deltas: Iterator[TextDelta]
    params: list[SamplingParams]
    left: int


class Soak:
    """Drives one engine through `LLM.stream`, as a user would."""

    def __init__(self, llm: LLM, seed: int, sample: int) -> None:
        self.llm, self.summary = llm, Summary()
        self.sample: list[tuple[SamplingParams, RequestOutput]] = []
        self._rng, self._sample_size = random.Random(seed), sample
        self._streams: list[Stream] = []
        self._texts = prompt_ids(llm)
        self._accepted = self._row_rounds = 0
        llm.engine.observer = lambda plan, tree, accepted: self._count(len(plan.rows))

    def run(self, rounds: int) -> Summary:
        """Soak for `rounds` decode rounds, with an idle moment at half time and at the end."""
        started_s = time.perf_counter()
        try:
            self._soak(rounds // 2)
            before = memory()
            self._soak(rounds)
            for name, growth in {name: now - before[name] for name, now in memory().items()}.items():
                setattr(self.summary, f"{name}_growth_bytes", growth)
                if growth > SLACK_BYTES[name]:
                    self._fail(f"GPU memory {name} grew by {growth} bytes after half time")
        except Exception as error:  # a probe, a lost page, a crash: all end a soak
            self._fail(f"after {self.summary.rounds} rounds: {type(error).__name__}: {error}")
        done = self.summary
        done.elapsed_s = round(time.perf_counter() - started_s, 1)
        done.rounds_per_s = round(done.rounds / max(done.elapsed_s, 1e-9), 1)
        done.accept_length = round(1 + self._accepted / max(self._row_rounds, 1), 3)
        done.retractions = self.llm.scheduler.num_retractions
        return done

    def compare(self, fresh: LLM) -> None:
        """Answer the sampled requests again on an engine that has seen nothing."""
        done = self.summary
        params = [each for each, _ in self.sample]
        again = fresh.generate([list(output.prompt_token_ids) for _, output in self.sample], params)
        tokens = 0
        for each, (_, have), want in zip(params, self.sample, again, strict=True):
            done.compared += 1
            tokens += len(want.token_ids)
            if (have.token_ids, have.finish_reason) == (want.token_ids, want.finish_reason):
                continue
            if fresh.engine.dtype == torch.float32 and near_tie(fresh, each, want, have):
                done.ties += 1
            else:
                done.unequal += 1
                self._fail(f"a fresh engine answers {each} otherwise: {want.token_ids} instead of {have.token_ids}")
        if done.ties > max(1, TIES_ALLOWED * tokens):
            self._fail(f"{done.ties} near ties in {tokens} tokens")

    def _soak(self, until: int) -> None:
        """Change the load every some rounds up to round `until`, then let everything drain."""
        rng, done = self._rng, self.summary
        load, change = rng.choice(LOADS), done.rounds
        while done.rounds < until:
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
            self._fail(f"a request failed: {output.error}")
        if not 1 <= len(output.token_ids) <= params.max_tokens:
            self._fail(f"{len(output.token_ids)} tokens for {params}")
        if len(self.sample) < self._sample_size:
            self.sample.append((params, output))
        elif (place := self._rng.randrange(done.finished)) < self._sample_size:
            self.sample[place] = (params, output)

    def _random_prompt(self) -> list[int]:
        """A piece of a held-out text: mostly short, sometimes most of the context, sometimes all but a few tokens."""
        rng, context = self._rng, self.llm.engine.layout.max_context
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
        if self.llm.scheduler.has_work:
            self._fail("requests are alive that nobody waits for")
        self.summary.idle_checks += 1

    def _count(self, rows: int) -> None:
        self.summary.rounds += 1
        self.summary.largest_batch = max(self.summary.largest_batch, rows)

    def _fail(self, what: str) -> None:
        if len(self.summary.failures) < 10:
            self.summary.failures.append(what)


def prompt_ids(llm: LLM) -> list[list[int]]:
    """Held-out texts as ids; random ids without a tokenizer."""
    if llm.tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(llm.engine.spec.vocab_size) for _ in range(40)] for _ in range(16)]
    path = resolve_folder("builtin:nestling").parent / "prompts.jsonl"
    return [llm.tokenizer.encode(json.loads(line)["prompt"]) for line in path.read_text(encoding="utf-8").splitlines()]


def random_params(rng: random.Random, llm: LLM) -> SamplingParams:
    """Greedy or sampled, filtered or not, with stops or without, of one token or up to the context wall."""
    sampled = rng.random() < 0.4
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 1.5)) if sampled else 0.0,
        top_p=rng.choice((1.0, 0.9, 0.6)) if sampled else 1.0,
        top_k=rng.choice((0, 0, 5, 50)) if sampled else 0,
        min_p=rng.choice((0.0, 0.0, 0.1)) if sampled else 0.0,
        max_tokens=rng.choice((1, 2, 7, 20, 40, 80, 10_000)),
        stop=("\n\n",) if llm.tokenizer is not None and rng.random() < 0.1 else (),
        stop_token_ids=tuple(rng.randrange(llm.engine.spec.vocab_size) for _ in range(rng.choice((0, 0, 0, 2)))),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(62),
    )


def near_tie(fresh: LLM, params: SamplingParams, want: RequestOutput, have: RequestOutput) -> bool:
    """Whether float32 may break the first mismatch either way: two best logits, or a coin at the edge of two tokens."""
    if params.greedy:
        return equal_outputs(fresh, [want], [have]).unequal == 0
    pairs = zip(want.token_ids, have.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return False
    ids = [*want.prompt_token_ids, *want.token_ids[:at]]
    logits = fresh.engine.next_logits(ids).to("cpu", torch.float64)[None]
    row = [params.temperature, params.top_k, params.top_p, params.min_p]
    probs = warp(logits, RowSamplingParams(*(torch.tensor([value]) for value in row)))
    assert params.seed is not None
    uniform = philox_uniform(torch.tensor([params.seed]), torch.tensor([len(ids)]))
    near = {int(draw(probs, (uniform + shift).clamp(0, 1 - 2.0**-32))) for shift in (-NEAR_TIE, 0.0, NEAR_TIE)}
    return {want.token_ids[at], have.token_ids[at]} <= near


def memory() -> dict[str, int]:
    """Bytes of GPU memory in use and held, once everything launched is done; zeros without a GPU."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options: room for about two and a half requests at the context wall, in eight rows."""
    return {
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
    }


def main() -> int:
    parser = OneLineParser(prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = table_of(EngineConfig)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=64, help="finished requests that a fresh engine answers again")
    parser.add_argument("--device", default="auto", choices=table["device"].choices)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "float64"), help="what equality is defined in"
    )
    parser.add_argument("--graphs", default="auto", choices=table["graphs"].choices)
    parser.add_argument("--attention-backend", default="auto", choices=table["attention_backend"].choices)
    parser.add_argument("--check-level", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--disable-radix-cache", action="store_true", help="keep no pages for prompts that repeat")
    args = parser.parse_args()
    return exit_code("soak", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Soak, compare, print. Raises UserError for options that cannot work."""
    for name, minimum in (("rounds", 1), ("sample", 0), ("context_length", MIN_CONTEXT)):
        if getattr(args, name) < minimum:
            raise InputError(f"--{name.replace('_', '-')} must be at least {minimum}, got {getattr(args, name)}")
    options = options_of(args)
    soak = Soak(LLM(**options), args.seed, args.sample)
    summary = soak.run(args.rounds)
    room = 8 * (args.context_length + 64)
    soak.compare(LLM(**{**options, "max_total_tokens": room, "disable_radix_cache": True, "check_level": 1}))
    launcher, backend = type(soak.llm.engine.launcher).__name__, soak.llm.engine.runner.backend.name
    print(
        json.dumps(
            {"options": {**options, "seed": args.seed}, "launcher": launcher, "backend": backend} | asdict(summary)
        )
    )
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
