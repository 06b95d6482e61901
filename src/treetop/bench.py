"""`treetop bench`: plain against speculative decoding, with the same weights and prompts, in one run.

Outputs are compared before anything is timed. Passes of the two alternate, and ratios are taken pass by pass, so that
a machine that slows down slows both.
"""

import importlib.util
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treetop.models.loader import resolve_folder
from treetop.server.llm import LLM, RequestOutput
from treetop.types.errors import ConfigError, InputError
from treetop.types.sampling import SamplingParams

NEAR_TIE = 1e-4
"""A float32 mismatch is excused below this top-2 gap, relative to max(1, |logit|); see `Equality`."""
TIES_ALLOWED = 1e-4


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """prompts: a JSON-lines file with a `prompt` each, or None for the embedded pair's held-out prompts."""

    prompts: str | None
    num_prompts: int
    max_tokens: int
    batch_size: int
    repeats: int
    transformers: bool

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Equality:
    """How two runs' tokens compare.

    tokens: compared. ties: sequences whose first mismatch is a near tie of the plain run's two best logits, which
    matrix kernels of different row counts may break differently in float32. unequal: sequences that differ otherwise.
    More than one tie in 10^4 tokens is not excused.
    """

    tokens: int
    ties: int
    unequal: int

    @property
    def ok(self) -> bool:
        return self.unequal == 0 and self.ties <= max(1, TIES_ALLOWED * self.tokens)

    def sentence(self) -> str:
        if self.unequal:
            return f"outputs differ in {self.unequal} sequences"
        if not self.ok:
            return f"too many near ties: {self.ties} sequences in {self.tokens} tokens"
        ties = f", {self.ties} near ties excused" if self.ties else ""
        return f"outputs equal, {self.tokens} tokens{ties}"


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over the passes."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a run measured. accept_length: mean a + 1 of all rounds. acceptance_by_depth: of the rounds that got there.

    target_forwards and draft_forwards are per token emitted after the first; plain decoding has 1 and 0.
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
    plain: Rate
    speculative: Rate
    speedup: float
    transformers: Rate | None
    speedup_over_transformers: float | None

    def table(self) -> str:
        """The report as text."""
        s, k, t = self.shape
        depths = "  ".join(f"{depth}: {rate:.2f}" for depth, rate in enumerate(self.acceptance_by_depth, 1))
        rows = [
            f"tree (S={s}, k={k}, T={t}), {self.dtype}, {self.threads} threads, {self.prompts} prompts,"
            f" {self.max_tokens} tokens, batch {self.batch_size}",
            self.equality,
            f"target forwards per token   {self.target_forwards_per_token:.3f}",
            f"draft forwards per token    {self.draft_forwards_per_token:.3f}",
            f"accept length               {self.accept_length:.2f}",
            f"acceptance by depth         {depths}",
            f"plain                       {_rate(self.plain)}",
            f"speculative                 {_rate(self.speculative)}",
            f"speculative / plain         {self.speedup:.2f}x",
        ]
        if self.transformers is not None:
            rows.append(f"transformers                {_rate(self.transformers)}")
            rows.append(f"speculative / transformers  {self.speedup_over_transformers:.2f}x")
        return "\n".join(rows)


def run(model: str | None, engine_options: dict[str, Any], options: BenchOptions) -> Report:
    """Load both engines, compare, then time. Raises UserError for options that cannot work."""
    if options.transformers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--transformers: the library is not installed; pip install transformers")
    speculative = LLM(model, **engine_options)
    if speculative.draft_path is None:
        raise ConfigError("bench compares with a draft head; give --speculative-draft-model-path")
    plain = LLM(model, **{**engine_options, "draft": None, "speculative_algorithm": None})
    prompts = read_prompts(options, speculative)
    params = SamplingParams(max_tokens=options.max_tokens)
    batches = [prompts[i : i + options.batch_size] for i in range(0, len(prompts), options.batch_size)]

    def outputs_of(llm: LLM) -> list[RequestOutput]:
        return [output for batch in batches for output in llm.generate(batch, params)]

    expected, got = outputs_of(plain), outputs_of(speculative)
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
    emitted = max(sum(len(output.token_ids) - 1 for output in got), 1)
    shape = speculative.config.shape
    return Report(
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
        acceptance_by_depth=acceptance_by_depth(accept_lens, shape.num_steps),
        plain=_spread(columns[0]),
        speculative=_spread(columns[1]),
        speedup=statistics.median(row[1] / row[0] for row in rates),
        transformers=_spread(columns[2]) if options.transformers else None,
        speedup_over_transformers=statistics.median(row[1] / row[2] for row in rates) if options.transformers else None,
    )


def read_prompts(options: BenchOptions, llm: LLM) -> list[list[int]]:
    """Prompts as ids, evenly spaced over the file. Raises InputError unless it is JSON lines with a `prompt` each."""
    path = Path(options.prompts) if options.prompts else resolve_folder("builtin:nestling").parent / "prompts.jsonl"
    if llm.tokenizer is None:
        raise InputError("bench needs a tokenizer.json beside the model")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines:
            raise ValueError("it is empty")
        chosen = lines[:: max(len(lines) // options.num_prompts, 1)][: options.num_prompts]
        return [llm.tokenizer.encode(json.loads(line)["prompt"]) for line in chosen]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--prompts {path}: not JSON lines with a `prompt` each: {error}") from None


def equal_outputs(plain: LLM, expected: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> Equality:
    """Compare token for token; the first mismatch of a sequence is excused if the plain run was at a near tie there."""
    ties = unequal = 0
    for want, have in zip(expected, got, strict=True):
        if want.token_ids == have.token_ids:
            continue
        pairs = zip(want.token_ids, have.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None and _near_tie(plain, [*want.prompt_token_ids, *want.token_ids[:at]]):
            ties += 1
        else:
            unequal += 1
    return Equality(sum(len(output.token_ids) for output in expected), ties, unequal)


def acceptance_by_depth(accept_lens: Sequence[int], num_steps: int) -> tuple[float, ...]:
    """Of the rounds that accepted `depth - 1` drafts, the share that accepted `depth`, for depth 1 .. num_steps."""
    counts = Counter(accept_lens)
    reached = [sum(n for a, n in counts.items() if a >= depth) for depth in range(num_steps + 1)]
    return tuple(reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, num_steps + 1))


def transformers_pass(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Callable[[], int]:
    """A pass of transformers' greedy `generate`, one prompt at a time, with the weights and dtype of `llm`."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an optional peer

    model: Any = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=llm.engine.dtype)

    def one() -> int:
        total = 0
        for ids in prompts:
            with torch.inference_mode():
                out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
            total += out.shape[1] - len(ids)
        return total

    return one


def _near_tie(llm: LLM, ids: list[int]) -> bool:
    best = llm.engine.next_logits(ids).to(torch.float64).topk(2).values
    return bool(best[0] - best[1] < NEAR_TIE * max(1.0, float(best[0].abs())))


def _timed(one: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    tokens = one()
    return tokens / (time.perf_counter() - started_s)


def _spread(values: Sequence[float]) -> Rate:
    return Rate(statistics.median(values), min(values), max(values))


def _rate(rate: Rate) -> str:
    return f"{rate.median:.1f} tokens/s ({rate.low:.1f} .. {rate.high:.1f})"
