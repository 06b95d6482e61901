"""`treetop bench --sweep heads`: what a head is worth on a model, measured on whole answers.

Plain decoding, chains, trees and trees with a learned calibration answer the same prompts, an engine each, one after
another. Each first answers prompts that do not count, of which a calibration learns. Plain decoding comes first and,
where time is left, once more at the end: what that gives over the first is how far the machine drifted in between.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from treetop.bench.equality import equal_outputs
from treetop.bench.heads_report import (
    AGAIN,
    ALONE,
    COLUMNS,
    BatchRun,
    Check,
    Comparison,
    Family,
    HeadFigures,
    HeadsReport,
    comparison,
    figures_of,
)
from treetop.bench.machine import measure_machine
from treetop.bench.prompts import as_questions, read_kinds
from treetop.bench.provenance import revision, versions
from treetop.bench.rounds import plain_options, up_to_step
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device, compute_dtype
from treetop.engine.startup.plan import plan_engine, read_draft_spec
from treetop.llm import LLM, RequestOutput
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.options import flag
from treetop.types.sampling import SamplingParams

CHAINS = ("3,1,4", "5,1,6", "7,1,8")
TREES = ("5,4,8", "7,4,8", "5,4,16", "8,8,32")
LEARN = "+learn"
CALIBRATED = ("5,4,16" + LEARN, "7,4,8" + LEARN)
_WARM_UP = 4
"""Prompts of each kind that do not count, at most; and of a file's kind no more than a quarter."""
_GREEDILY_WARMED = 2
"""Warm-up prompts of a configuration that learns nothing."""
_OWN = (
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_calibration",
    "speculative_calibration_dir", "speculative_policy", "speculative_shapes", "simulate_accept_length",
    "simulate_acceptance",
)  # fmt: skip
"""Engine options that the sweep sets, or that leave nothing to measure."""


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """shapes: "S,k,T" each, or "S,k,T+learn"; None is the sweep's own.
    prompts: a file; None is the package's own. num_prompts: of each kind.
    batch_size: prompts answered together.
    minutes: after which nothing more is begun.
    """

    shapes: Sequence[str] | None = None
    prompts: str | None = None
    num_prompts: int = 10
    max_tokens: int = 128
    temperatures: Sequence[float] = (0.0, 0.8)
    batch_size: int = 1
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.batch_size < 1 or self.max_tokens < 2:
            raise InputError("--num-prompts and --batch-size must be at least 1, --max-tokens at least 2")
        if not all(math.isfinite(each) and each >= 0 for each in self.temperatures):
            raise InputError("--temperatures must be finite and at least 0")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise InputError("--temperatures: one of them is given twice")
        if self.minutes is not None and not self.minutes > 0:
            raise InputError("--minutes must be above 0")


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to decode: its name, what it is, its shape, and the options of its engine."""

    name: str
    family: Family
    shape: SpecShape
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Ids by kind: those that count, and those that warm up. longest: tokens of one."""

    counted: dict[str, list[list[int]]]
    warm_up: list[list[int]]
    longest: int
    templated: bool


def run(
    model: str | None, engine_options: dict[str, Any], options: HeadsOptions, tell: Callable[[str], None], command: str
) -> HeadsReport:
    """Measure every configuration. tell: gets each line of text as it is known. command: what the report says was run.

    A configuration whose engine fails is left out and named, and an interrupt leaves out what is not measured yet; in
    the first plain decoding both are the sweep's end. Raises UserError for options that cannot work, before anything
    is measured.
    """
    date, found_versions = datetime.now(UTC).isoformat(timespec="seconds"), versions()  # of what runs, before it runs
    own = _engine_config(model, engine_options)
    folder = resolve_folder(own.model)
    positions = target_spec(folder).config.max_positions
    prompts = _read(own, options, engine_options.get("context_length", positions))
    need = prompts.longest + options.max_tokens
    sized = {
        "max_running_requests": options.batch_size,
        "context_length": min(up_to_step(need), positions),
        **engine_options,
        "disable_radix_cache": True,
    }
    if need > sized["context_length"]:
        raise ConfigError(
            f"a prompt of {prompts.longest} tokens and --max-tokens {options.max_tokens} need a context of {need}, have"
            f" {sized['context_length']}; choose other --prompts, lower --max-tokens or raise --context-length"
        )
    configurations = _configurations(own, sized, options, _deepest(own))
    for each in configurations:
        plan_engine(EngineConfig.of(model, **each.options))  # refuses what an engine would
    device = compute_device(own.device)
    machine = measure_machine(device, compute_dtype(own.dtype, device))
    tell(machine.sentence())
    tell(COLUMNS.head)
    sweep = _Sweep(model, prompts, options, tell)
    sweep.run(configurations)
    return HeadsReport(
        command=command,
        date=date,
        versions=found_versions,
        machine=machine,
        model=own.model,
        revision=revision(folder),
        head=own.draft,
        head_revision=None if own.draft is None else revision(resolve_folder(own.draft, "draft")),
        algorithm=own.algorithm,
        dtype=machine.dtype,
        prompts={kind: len(ids) for kind, ids in prompts.counted.items()},
        prompts_file=options.prompts,
        warm_up=len(prompts.warm_up),
        chat_template=prompts.templated,
        max_tokens=options.max_tokens,
        batch_size=options.batch_size,
        figures=tuple(sweep.figures),
        checks=tuple(sweep.checks),
        comparisons=tuple(sweep.comparisons(configurations)),
        skipped=sweep.skipped,
        failed=sweep.failed,
    )


def _engine_config(model: str | None, engine_options: dict[str, Any]) -> EngineConfig:
    """What was asked for, with n-gram drafts where no draft was. Raises ConfigError for what is not for this sweep."""
    given = [flag(name) for name in _OWN if engine_options.get(name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: not for --sweep heads, which sets shapes and calibrations; use --shapes"
        )
    if engine_options.get("load_format") == "dummy":
        raise ConfigError("--load-format dummy: not for --sweep heads, which measures what a head is worth")
    if engine_options.get("speculative_algorithm") == "NONE":
        raise ConfigError(
            "--speculative-algorithm NONE: --sweep heads compares drafts with plain decoding; give"
            " --speculative-draft-model-path, or drop it for n-gram drafts"
        )
    config = EngineConfig.of(model, **engine_options)
    return config if config.speculates else EngineConfig.of(model, **engine_options, speculative_algorithm="NGRAM")


def _read(own: EngineConfig, options: HeadsOptions, max_context: int) -> _Prompts:
    """The prompts as ids. Of each kind the first ones warm up. Raises InputError for a kind of a single prompt."""
    counted: dict[str, list[str]] = {}
    before: list[str] = []
    for kind, texts in read_kinds(options.prompts).items():
        if len(texts) < 2:
            raise InputError(f"--prompts {options.prompts}: kind {kind!r} needs a second prompt, to warm up with")
        warm = min(_WARM_UP, math.ceil(len(texts) / 4))
        before += texts[:warm]
        counted[kind] = texts[warm : warm + options.num_prompts]
    texts = [*before, *(text for some in counted.values() for text in some)]
    ids, templated = as_questions(resolve_folder(own.model), max_context, texts)
    left = iter(ids[len(before) :])
    by_kind = {kind: [next(left) for _ in some] for kind, some in counted.items()}
    return _Prompts(by_kind, ids[: len(before)], max(map(len, ids)), templated)


def _deepest(own: EngineConfig) -> float:
    """Levels of the deepest tree that the draft proposes."""
    shallow = replace(own, speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=2)
    draft = read_draft_spec(shallow, target_spec(resolve_folder(own.model)))
    return math.inf if draft.block is None else draft.block.max_steps


def _fitted(name: str, deepest: float) -> str:
    """A shape of the sweep's own, no deeper than that; of a chain as many nodes as levels allow."""
    text, learns = name.removesuffix(LEARN), name.endswith(LEARN)
    shape = SpecShape.parse(text, "--shapes")
    steps = int(min(shape.num_steps, deepest))
    nodes = min(shape.num_draft_tokens, 1 + shape.topk + (steps - 1) * shape.topk**2)
    return _text(SpecShape(shape.topk, steps, nodes)) + LEARN * learns


def _configurations(
    own: EngineConfig, sized: dict[str, Any], options: HeadsOptions, deepest: float
) -> list[Configuration]:
    """Plain decoding first and last, between them a draft's shapes. Raises ConfigError for what is no shape.

    deepest: levels that the sweep's own shapes have at most.
    """
    ngram = own.algorithm == "NGRAM"
    default = _text(own.shape)
    ours = (default,) if ngram else tuple(_fitted(name, deepest) for name in (*CHAINS, *TREES, *CALIBRATED))
    names = options.shapes or ours
    sized = {**sized, "speculative_algorithm": own.speculative_algorithm}
    plainly = plain_options(sized)
    found = [Configuration(ALONE, "plain", PLAIN, plainly)]
    for name in dict.fromkeys(names):
        text, learns = name.removesuffix(LEARN), name.endswith(LEARN)
        shape = SpecShape.parse(text, "--shapes")
        if shape == PLAIN and not learns:
            continue  # it is measured anyway
        own_options = {
            "speculative_num_steps": shape.num_steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.num_draft_tokens,
            "speculative_calibration": "learn" if learns else "off",
            "speculative_policy": "fixed",
        }
        family: Family = "n-gram" if ngram else "calibrated" if learns else "chain" if shape.topk == 1 else "tree"
        found.append(Configuration(f"n-gram {name}" if ngram else name, family, shape, {**sized, **own_options}))
    return [*found, Configuration(AGAIN, "plain", PLAIN, plainly)]


class _Sweep:
    """Engines one after another, and what their answers gave."""

    def __init__(
        self, model: str | None, prompts: _Prompts, options: HeadsOptions, tell: Callable[[str], None]
    ) -> None:
        self._model, self._prompts, self._options, self._tell = model, prompts, options, tell
        self._calls: dict[str, dict[float, list[BatchRun]]] = {}
        self._interrupted = False
        self.figures: list[HeadFigures] = []
        self.checks: list[Check] = []
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def run(self, configurations: Sequence[Configuration]) -> None:
        started_s, longest_s = time.monotonic(), 0.0
        limit_s = 60 * (self._options.minutes or math.inf)
        for each in configurations:
            began_s = time.monotonic()
            if self._interrupted:
                self.skipped[each.name] = "interrupted"
            elif self._calls and began_s + longest_s - started_s > limit_s:
                self.skipped[each.name] = f"--minutes {self._options.minutes:g} would not have been enough"
            else:
                self._measure(each)
                gc.collect()  # an engine's memory, before the next one takes its share
            longest_s = max(longest_s, time.monotonic() - began_s)

    def _measure(self, configuration: Configuration) -> None:
        """Warm up, answer, compare. What ends plain decoding early is raised; of others it is noted."""
        try:
            with closing(LLM(self._model, **configuration.options)) as llm:
                self._answer(configuration, llm)
        except EngineError as error:
            if not self._calls:
                raise
            self.failed[configuration.name] = str(error)
            self._tell(f"{configuration.name:14} not measured: {error}")
        except KeyboardInterrupt:
            if not self._calls:
                raise
            self.failed[configuration.name], self._interrupted = "interrupted", True

    def _answer(self, configuration: Configuration, llm: LLM) -> None:
        learns = configuration.family == "calibrated"
        name, before = configuration.name, self._prompts.warm_up if learns else self._prompts.warm_up[:_GREEDILY_WARMED]
        for temperature in self._options.temperatures:
            self._together(llm, "", before, temperature)
        own = {temperature: self._all_calls(llm, temperature) for temperature in self._options.temperatures}
        self._calls[name] = own
        plain = self._calls[ALONE]
        for temperature, calls in own.items():
            found = figures_of(name, configuration.family, temperature, calls, plain[temperature])
            self.figures += found
            self._tell(found[0].row())
            if name != ALONE:
                expected, got = (
                    [output for call in each for output in call.outputs] for each in (plain[temperature], calls)
                )
                equality = equal_outputs(llm, expected, got, sampled=temperature > 0)
                self.checks.append(Check(name, temperature, equality.ok, equality.sentence()))

    def _all_calls(self, llm: LLM, temperature: float) -> list[BatchRun]:
        return [
            call for kind, ids in self._prompts.counted.items() for call in self._together(llm, kind, ids, temperature)
        ]

    def _together(self, llm: LLM, kind: str, prompts: list[list[int]], temperature: float) -> list[BatchRun]:
        """Answers to prompts, as many together as asked. The number of a prompt is its seed."""
        calls, size = [], self._options.batch_size
        for at in range(0, len(prompts), size):
            some = prompts[at : at + size]
            params = [
                SamplingParams(temperature=temperature, max_tokens=self._options.max_tokens, seed=at + number)
                for number in range(len(some))
            ]
            began_s = time.perf_counter()
            outputs = llm.generate(some, params)
            seconds = time.perf_counter() - began_s
            _raise_failed(outputs)
            calls.append(BatchRun(kind, outputs, seconds))
        return calls

    def comparisons(self, configurations: Sequence[Configuration]) -> list[Comparison]:
        """Trees against chains that verify as many nodes, and calibrated trees against raw ones."""
        measured = [each for each in configurations if each.name in self._calls]
        found = []
        for first in measured:
            for second in measured:
                why = _in_common(first, second)
                for temperature in self._options.temperatures if why else ():
                    own, others = (self._calls[each.name][temperature] for each in (first, second))
                    found.append(comparison((first.name, second.name), why, temperature, own, others))
        return sorted((each for each in found if each is not None), key=lambda each: each.temperature)


def _in_common(first: Configuration, second: Configuration) -> str:
    """Why the first is compared with the second; "" if it is not."""
    if (first.family, second.family) == ("tree", "chain"):
        nodes = first.shape.num_draft_tokens
        return f"tree against chain, {nodes} nodes verified" if nodes == second.shape.num_draft_tokens else ""
    if first.family == "calibrated" and second.family in ("tree", "chain"):
        return "calibration learned against off" if first.shape == second.shape else ""
    return ""


def _raise_failed(outputs: Sequence[RequestOutput]) -> None:
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        raise EngineError(failed)


def _text(shape: SpecShape) -> str:
    return shape.text
