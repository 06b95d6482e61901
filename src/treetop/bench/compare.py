"""Plain against speculative decoding, with the same weights and prompts, in one run.

Outputs are compared before anything is timed. Passes of the two alternate, and ratios are taken pass by pass, so that
a machine that slows down slows both.
"""

import importlib.util
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treetop.bench.equality import equal_outputs
from treetop.bench.machine import Machine, measure_machine, synchronize
from treetop.bench.prompts import read_prompts
from treetop.bench.reliability import Reliability, ReliabilityCounter
from treetop.bench.rounds import Figures, measure, plain_options, up_to_step, warm_up
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device
from treetop.engine.startup.plan import plan_engine
from treetop.llm import LLM, RequestOutput
from treetop.models.registry import target_spec
from treetop.text.tokenizer import open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, InputError
from treetop.types.layout import SpecShape
from treetop.types.sampling import SamplingParams
from treetop.weights.cpu_products import ChosenProduct


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """prompts: a JSON-lines file with a `prompt` each, or None for the embedded pair's held-out prompts."""

    prompts: str | None = None
    num_prompts: int = 8
    max_tokens: int = 128
    batch_size: int = 1
    repeats: int = 5
    rounds: int = 20
    transformers: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "batch_size", "repeats", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over the passes."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CompareReport:
    """What a run measured.

    accept_length: mean a + 1 of all rounds.
    acceptance_by_depth: of the rounds that got there.
    acceptance_by_rank: of the nodes that had proposals on accepted paths, whose proposal of this rank was accepted.
    reliability: of the pass that is compared, in which a calibration may still be learned.

    target_forwards and draft_forwards are per token emitted after the first; plain decoding has 1 and 0.

    rounds: of plain and of speculative decoding, by phase, on prompts of the middle length.
    products: how those with weights are taken on a CPU, and why.
    """

    shape: tuple[int, int, int]
    dtype: str
    threads: int
    prompts: int
    max_tokens: int
    batch_size: int
    outputs_equal: bool
    equality: str
    target_forwards_per_token: float
    draft_forwards_per_token: float
    accept_length: float
    acceptance_by_depth: tuple[float, ...]
    acceptance_by_rank: tuple[float, ...]
    reliability: Reliability
    plain: Rate
    speculative: Rate
    speedup: float
    transformers: Rate | None
    speedup_over_transformers: float | None
    plain_over_transformers: float | None
    machine: Machine
    rounds: tuple[Figures, ...]
    products: tuple[ChosenProduct, ...]

    def table(self) -> str:
        """The report as text."""
        s, k, t = self.shape
        depths, ranks = (
            "  ".join(f"{at}: {rate:.2f}" for at, rate in enumerate(rates, 1))
            for rates in (self.acceptance_by_depth, self.acceptance_by_rank)
        )
        rows = [
            f"tree (S={s}, k={k}, T={t}), {self.dtype}, {self.threads} threads, {self.prompts} prompts,"
            f" {self.max_tokens} tokens, batch {self.batch_size}",
            self.equality,
            f"target forwards per token   {self.target_forwards_per_token:.3f}",
            f"draft forwards per token    {self.draft_forwards_per_token:.3f}",
            f"accept length               {self.accept_length:.2f}",
            f"acceptance by depth         {depths}",
            f"acceptance by rank          {ranks}",
            *self.reliability.lines(),
            f"plain                       {_rate(self.plain)}",
            f"speculative                 {_rate(self.speculative)}",
            f"speculative / plain         {self.speedup:.2f}x",
        ]
        if self.transformers is not None:
            rows.append(f"transformers                {_rate(self.transformers)}")
            rows.append(f"speculative / transformers  {self.speedup_over_transformers:.2f}x")
            rows.append(f"plain / transformers        {self.plain_over_transformers:.2f}x")
            rows += [f"products of {each.sentence()}" for each in self.products]
        rows += [self.machine.sentence(), Figures.HEADER, *(figures.row() for figures in self.rounds)]
        return "\n".join(rows)


_SPARE_ROUNDS = 64
"""Room in the context for rounds that are not timed."""


def run(model: str | None, engine_options: dict[str, Any], options: BenchOptions) -> CompareReport:
    """Load both engines, compare, then time. Raises UserError for options that cannot work.

    Contexts are as long as the prompts need unless an option says otherwise, for two engines share the memory. Prompts
    come again and again, so there is no prefix cache: each time is of the whole work.
    """
    if options.transformers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--transformers: the library is not installed; pip install transformers")
    engine_options = {**engine_options, "speculative_policy": "fixed"}
    config = EngineConfig.of(model, **engine_options)
    if not config.speculates:
        raise ConfigError(
            "bench compares with a draft; give --speculative-draft-model-path, or --speculative-algorithm MTP or NGRAM"
        )
    folder = resolve_folder(config.model)
    tokenizer = open_tokenizer(folder)
    prompts = read_prompts(options.prompts, options.num_prompts, tokenizer)
    longest = max(options.max_tokens, (options.rounds + _SPARE_ROUNDS) * config.shape.commit_width)
    context = min(up_to_step(max(map(len, prompts)) + longest), target_spec(folder).config.max_positions)
    sized = {"max_running_requests": options.batch_size, "context_length": context, **engine_options}
    sized["disable_radix_cache"] = True
    both = (plain_options(sized), sized)
    cases = [_timed_case(EngineConfig.of(model, **each), prompts, options) for each in both]
    plain, speculative = (LLM(model, **each) for each in both)
    params = SamplingParams(max_tokens=options.max_tokens)
    batches = [prompts[i : i + options.batch_size] for i in range(0, len(prompts), options.batch_size)]

    def outputs_of(llm: LLM) -> list[RequestOutput]:
        return [output for batch in batches for output in llm.generate(batch, params)]

    speculative.engine.observer = counter = ReliabilityCounter()
    expected, got = outputs_of(plain), outputs_of(speculative)
    speculative.engine.observer = None
    equality = equal_outputs(plain, expected, got)
    runs: list[Callable[[], int]] = [
        lambda: sum(len(output.token_ids) for output in outputs_of(plain)),
        lambda: sum(len(output.token_ids) for output in outputs_of(speculative)),
    ]
    if options.transformers:
        runs.append(transformers_pass(plain, prompts, options.max_tokens))
        runs[-1]()
    rates = [[_timed(one) for one in runs] for _ in range(options.repeats)]
    columns = list(zip(*rates, strict=True))
    accept_lens = [a for output in got for a in output.metrics.accept_lens]
    emitted = max(sum(output.round_tokens for output in got), 1)
    shape = speculative.config.shape
    machine = measure_machine(speculative.engine.runner.buffers.rows.device, speculative.engine.dtype)
    return CompareReport(
        shape=(shape.num_steps, shape.topk, shape.num_draft_tokens),
        dtype=str(speculative.engine.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=len(prompts),
        max_tokens=options.max_tokens,
        batch_size=options.batch_size,
        outputs_equal=equality.ok,
        equality=equality.sentence(),
        target_forwards_per_token=len(accept_lens) / emitted,
        draft_forwards_per_token=len(accept_lens) * shape.num_steps / emitted,
        accept_length=1 + sum(accept_lens) / max(len(accept_lens), 1),
        reliability=counter.diagram(),
        acceptance_by_depth=acceptance_by_depth(accept_lens, shape.num_steps),
        acceptance_by_rank=acceptance_by_rank(got, shape),
        plain=_spread(columns[0]),
        speculative=_spread(columns[1]),
        speedup=_median_ratio(rates, 1, 0),
        transformers=_spread(columns[2]) if options.transformers else None,
        speedup_over_transformers=_median_ratio(rates, 1, 2) if options.transformers else None,
        plain_over_transformers=_median_ratio(rates, 0, 2) if options.transformers else None,
        machine=machine,
        products=speculative.engine.products,
        rounds=tuple(measure(llm, *case, machine, 0.0) for llm, case in zip((plain, speculative), cases, strict=True)),
    )


def _timed_case(config: EngineConfig, prompts: list[list[int]], options: BenchOptions) -> tuple[int, int, int]:
    """(batch, prompt length, rounds) that are timed of an engine: the prompts' middle length, and what has room.

    Raises UserError for what the engine would refuse, for prompts too long, and if there is no room for a round.
    """
    layout, lengths = plan_engine(config).layout, sorted(map(len, prompts))
    width, context = config.shape.commit_width, layout.max_context
    if lengths[-1] >= context:
        raise ConfigError(
            f"a prompt of {lengths[-1]} tokens leaves no room for one more in a context of {context}; choose other"
            " --prompts or raise --context-length"
        )
    batch, length = min(options.batch_size, layout.max_requests), min(lengths[len(lengths) // 2], context // 2)
    before = warm_up(compute_device(config.device)) + batch * (1 + length // layout.chunk)
    room = (context - length) // width - before - 2
    if room < 1:
        raise ConfigError(f"a context of {context} tokens leaves no room to time rounds; raise --context-length")
    return batch, length, min(options.rounds, room)


def acceptance_by_depth(accept_lens: Sequence[int], num_steps: int) -> tuple[float, ...]:
    """Of the rounds that accepted `depth - 1` drafts, the share that accepted `depth`, for depth 1 .. num_steps."""
    counts = Counter(accept_lens)
    reached = [sum(n for a, n in counts.items() if a >= depth) for depth in range(num_steps + 1)]
    return tuple(reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, num_steps + 1))


def acceptance_by_rank(outputs: Sequence[RequestOutput], shape: SpecShape) -> tuple[float, ...]:
    """How often the target's choice was the draft's favourite in the tree, its second, ...: of all nodes on accepted
    paths after which the tree might go on. Their sum is how often a path went on.
    """
    rounds = [ranks for output in outputs for ranks in output.metrics.accept_ranks]
    counts = Counter(rank for ranks in rounds for rank in ranks)
    asked = sum(min(len(ranks) + 1, shape.num_steps) for ranks in rounds)
    return tuple(counts[rank] / asked if asked else 0.0 for rank in range(shape.topk))


def transformers_pass(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Callable[[], int]:
    """A pass of transformers' greedy `generate`, one prompt at a time, with the weights, dtype and device of `llm`."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an optional peer, which takes seconds to import

    device = llm.engine.runner.buffers.rows.device
    model: Any = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=llm.engine.dtype)
    model = model.to(device)

    def one() -> int:
        total = 0
        for ids in prompts:
            with torch.inference_mode():
                asked = torch.tensor([ids], device=device)
                out = model.generate(asked, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
            total += out.shape[1] - len(ids)
        synchronize(device)
        return total

    return one


def _timed(one: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    tokens = one()
    return tokens / (time.perf_counter() - started_s)


def _median_ratio(rates: Sequence[Sequence[float]], over: int, under: int) -> float:
    """Of two columns of rates, pass by pass."""
    return statistics.median(row[over] / row[under] for row in rates)


def _spread(values: Sequence[float]) -> Rate:
    return Rate(statistics.median(values), min(values), max(values))


def _rate(rate: Rate) -> str:
    return f"{rate.median:.1f} tokens/s ({rate.low:.1f} .. {rate.high:.1f})"
