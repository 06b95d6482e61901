"""`treetop bench --sweep load`: which shape pays at which batch, and whether the policy finds it.

Two engines: a target alone, and one with its draft whose rounds have each shape in turn, and those that the policy
chooses. All passes at a batch stand side by side and are repeated, so that a ratio is of passes next to each other.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from treetop.bench.columns import Columns
from treetop.bench.equality import equal_outputs
from treetop.bench.prompts import random_prompts, read_prompts
from treetop.bench.rounds import plain_options, up_to_step
from treetop.checkpoints.folder import resolve_folder
from treetop.llm import LLM, RequestOutput
from treetop.models.registry import target_spec
from treetop.scheduler.policy import FixedShape, ShapePolicy
from treetop.text.tokenizer import open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
ALONE, AUTO = "plain", "auto"
_PROMPTS, _DUMMY_LENGTH = 64, 256
"""Prompts, and tokens of each where there are neither weights nor a tokenizer."""


@dataclass(frozen=True, slots=True)
class BatchSweepOptions:
    """batches: prompts decoded together.
    prompts: a file; None is the embedded pair's held-out ones.
    """

    batches: Sequence[int] = BATCHES
    prompts: str | None = None
    max_tokens: int = 128
    repeats: int = 5


_COLUMNS = Columns.of(
    ("batch", 5), ("shape", 10), ("tokens/s", 11), ("of a user", 11), ("plain", 9), ("accept", 8), ("rounds of auto", 0)
)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One way to decode at one batch.

    way: "plain" without a draft, "S,k,T" for rounds of one shape, or "auto".
    tokens_per_s: median over passes; over_plain: of its ratios to the plain pass beside it.
    accept_length: mean tokens of a round a row.
    rounds: shape -> rounds, of the last pass; runs: the same in order, (shape, rounds one after the other).
    """

    way: str
    batch: int
    tokens_per_s: float
    over_plain: float
    accept_length: float
    rounds: dict[str, int]
    runs: tuple[tuple[str, int], ...]

    @property
    def tokens_per_s_user(self) -> float:
        return self.tokens_per_s / self.batch

    def row(self) -> str:
        shapes = "  ".join(f"{shape}: {count}" for shape, count in self.rounds.items()) if self.way == AUTO else ""
        rates = f"{self.tokens_per_s:.1f}", f"{self.tokens_per_s_user:.1f}", f"{self.over_plain:.2f}x"
        return _COLUMNS.row([str(self.batch), self.way, *rates, f"{self.accept_length:.2f}", shapes])


@dataclass(frozen=True, slots=True)
class BatchSweepReport:
    """All points, by batch, each way in turn. equality: of the policy's outputs and plain ones."""

    model: str
    device: str
    dtype: str
    max_tokens: int
    repeats: int
    equality: str
    points: tuple[LoadPoint, ...]

    def text(self) -> str:
        where = f"{self.model}, {self.dtype} on {self.device}, {self.max_tokens} tokens, {self.repeats} passes"
        return "\n".join(
            [where, self.equality, _COLUMNS.head, *(point.row() for point in self.points), *self.verdicts()]
        )

    def verdicts(self) -> list[str]:
        """Of each batch: auto against the best fixed shape, plain among them."""
        found = []
        for batch, points in groupby(self.points, key=lambda point: point.batch):
            by_way = {point.way: point for point in points}
            auto = by_way.pop(AUTO)
            best = max(by_way.values(), key=lambda point: point.over_plain)
            found.append(f"batch {batch}: auto is {auto.over_plain / best.over_plain:.2f}x the best fixed, {best.way}")
        return found


def run(
    model: str | None, engine_options: dict[str, Any], options: BatchSweepOptions, tell: Callable[[str], None]
) -> BatchSweepReport:
    """Load both engines, compare their outputs, then time. Raises UserError for options that cannot work.

    There is no prefix cache, so that each pass is all of the work.
    """
    if any(batch < 1 for batch in options.batches) or options.max_tokens < 2 or options.repeats < 1:
        raise InputError("--batches and --repeats must be at least 1, --max-tokens at least 2")
    wanted = {**engine_options, "speculative_policy": "auto", "disable_radix_cache": True}
    if not EngineConfig.of(model, **{**wanted, "speculative_policy": "fixed", "speculative_shapes": None}).speculates:
        raise ConfigError("--sweep load compares shapes of drafts; give --speculative-draft-model-path")
    config = EngineConfig.of(model, **wanted)
    folder = resolve_folder(config.model)
    tokenizer = open_tokenizer(folder)
    if tokenizer is None and config.load_format == "dummy" and options.prompts is None:
        prompts = random_prompts(_PROMPTS, _DUMMY_LENGTH, target_spec(folder).config.vocab_size)
    else:
        prompts = read_prompts(options.prompts, _PROMPTS, tokenizer)
    context = up_to_step(max(map(len, prompts)) + options.max_tokens)
    sized = {
        "max_running_requests": max(options.batches),
        "context_length": min(context, target_spec(folder).config.max_positions),
        **wanted,
    }
    plain, drafting = LLM(model, **plain_options(sized)), LLM(model, **sized)
    sweep = _LoadSweep(plain, drafting, prompts, options)
    equality = sweep.check()
    tell(equality)
    tell(_COLUMNS.head)
    points = []
    for batch in options.batches:
        for point in sweep.measure(batch):
            tell(point.row())
            points.append(point)
    device = drafting.engine.runner.buffers.rows.device.type
    dtype = str(drafting.engine.dtype).removeprefix("torch.")
    return BatchSweepReport(config.model, device, dtype, options.max_tokens, options.repeats, equality, tuple(points))


class _LoadSweep:
    """Passes of one number of prompts by every way."""

    def __init__(self, plain: LLM, drafting: LLM, prompts: list[list[int]], options: BatchSweepOptions) -> None:
        self._plain, self._drafting, self._prompts, self._options = plain, drafting, prompts, options
        self._auto = drafting.scheduler.policy
        shapes = drafting.engine.layout.shapes
        fixed: dict[str, ShapePolicy] = {_name(shape): FixedShape(shape) for shape in shapes if shape != PLAIN}
        self._policies = {**fixed, AUTO: self._auto}
        self._params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)

    def check(self) -> str:
        """Outputs of the policy's rounds are those of the target alone. Raises EngineError if they are not.

        Simulated ones are not looked at.
        """
        if self._drafting.config.simulates:
            return "outputs not checked: acceptance is simulated"
        batch = min(max(self._options.batches), len(self._prompts))
        expected, got = self._outputs(self._plain, batch), self._outputs(self._drafting, batch)
        equality = equal_outputs(self._plain, expected, got)
        if not equality.ok:
            raise EngineError(f"--sweep load: {equality.sentence()}")
        return equality.sentence()

    def measure(self, batch: int) -> list[LoadPoint]:
        self._pass(ALONE, batch)
        self._pass(AUTO, batch)
        ways = (ALONE, *self._policies)
        passes = [{way: self._pass(way, batch) for way in ways} for _ in range(self._options.repeats)]
        points = []
        for way in ways:
            rates = [each[way][0] for each in passes]
            ratios = [each[way][0] / each[ALONE][0] for each in passes]
            _, accepted, shapes = passes[-1][way]
            runs = tuple((shape, len(list(group))) for shape, group in groupby(shapes))
            median = statistics.median
            counts = dict(Counter(shapes).most_common())
            points.append(LoadPoint(way, batch, median(rates), median(ratios), accepted, counts, runs))
        return points

    def _pass(self, way: str, batch: int) -> tuple[float, float, list[str]]:
        """Tokens a second, mean tokens of a round a row, and the shape of each round."""
        llm, shapes = self._plain if way == ALONE else self._drafting, list[str]()
        if way != ALONE:
            llm.scheduler.policy = self._policies[way]
        llm.engine.observer = _watcher(shapes)
        started_s = time.perf_counter()
        outputs = self._outputs(llm, batch)
        seconds = time.perf_counter() - started_s
        llm.engine.observer = None
        tokens = sum(len(output.token_ids) for output in outputs)
        rounds = sum(output.metrics.target_forwards for output in outputs)
        return tokens / seconds, (tokens - len(outputs)) / max(rounds, 1), shapes

    def _outputs(self, llm: LLM, batch: int) -> list[RequestOutput]:
        prompts = [self._prompts[i % len(self._prompts)] for i in range(batch)]
        return llm.generate(prompts, self._params)


def _watcher(shapes: list[str]) -> Callable[[RoundPlan, object, object], None]:
    return lambda plan, tree, accepted: shapes.append(_name(plan.shape))


def _name(shape: SpecShape) -> str:
    return shape.text
