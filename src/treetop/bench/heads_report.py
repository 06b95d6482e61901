"""What a sweep of heads gives: figures of answers, whether they are plain decoding's, and which shape beats which."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from treetop.bench.columns import Columns
from treetop.bench.intervals import Factor, Interval, ratio_interval
from treetop.bench.machine import Machine
from treetop.outputs import RequestOutput

ALL = "all"
"""Prompts of every kind."""

ALONE, AGAIN = "plain", "plain, again"
"""Plain decoding, first and last."""

Family = Literal["plain", "n-gram", "chain", "tree", "calibrated"]


class BatchRun(NamedTuple):
    """Prompts of one kind that were answered together, and how long that took."""

    kind: str
    outputs: Sequence[RequestOutput]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """One configuration at one temperature on prompts of one kind, or of all.

    accept_length: tokens a round, the bonus token included, the first token of an answer not; by resampling prompts.
        None if no answer has a second token.
    tokens_per_s: of whole requests, their prompts' time included.
    over_plain: ratio of these to plain decoding's, on the same prompts; by resampling calls.
    differ: prompts whose tokens are not plain decoding's.
    """

    configuration: str
    family: Family
    temperature: float
    kind: str
    prompts: int
    tokens: int
    accept_length: Interval | None
    tokens_per_s: float
    over_plain: Interval | None
    differ: int

    def row(self) -> str:
        accepted, faster = (each.text() if each else "-" for each in (self.accept_length, self.over_plain))
        rates = accepted, f"{self.tokens_per_s:.1f}", faster
        differ = f"{self.differ:3} of {self.prompts}"
        return COLUMNS.row([self.configuration, f"{self.temperature:g}", *rates, differ])


COLUMNS = Columns.of(
    *(("S,k,T", -14), ("temp", 5), ("accept length", 20), ("tokens/s", 11), ("over plain", 20)),
    ("tokens differ from plain's", 0),
)


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a configuration's answers are plain decoding's, by the rule of the dtype (`equality.py`)."""

    configuration: str
    temperature: float
    ok: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first` over `second` on the same prompts: ratios of accept length and of tokens a second.

    why: what both have in common.
    """

    first: str
    second: str
    why: str
    temperature: float
    accept_length: Interval
    speed: Interval

    def sentence(self) -> str:
        accepted, faster = self.accept_length, self.speed
        return (
            f"temperature {self.temperature:g}, {self.why}: {self.first} gives {accepted.text()} times the tokens a"
            f" round of {self.second} ({verdict(accepted)}), {faster.text()} times its tokens a second"
            f" ({verdict(faster)})"
        )


@dataclass(frozen=True, slots=True)
class HeadsReport:
    """All figures, by configuration, temperature and kind, and what is needed to measure them again.

    date: when it began, in UTC.
    head: the folder or id; None for drafts that have none.
    algorithm: as `--speculative-algorithm` has it; None for what the head's tensors are.
    revision, head_revision: commits of the hub's cache.
    prompts: how many of each kind; warm_up: prompts before them that do not count, of which a calibration learns.
    prompts_file: None for the package's own.
    skipped: configurations for which no time was left, and why; failed: those whose engine failed, with its error.
    """

    command: str
    date: str
    versions: dict[str, str]
    machine: Machine
    model: str
    revision: str | None
    head: str | None
    head_revision: str | None
    algorithm: str | None
    dtype: str
    prompts: dict[str, int]
    prompts_file: str | None
    warm_up: int
    chat_template: bool
    max_tokens: int
    batch_size: int
    figures: tuple[HeadFigures, ...]
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    skipped: dict[str, str]
    failed: dict[str, str]

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(each.temperature for each in self.figures))

    def conclusions(self) -> list[str]:
        """What the figures say, sentence by sentence."""
        return [*self.remarks(), *(each.sentence() for each in self.comparisons)]

    def remarks(self) -> list[str]:
        """What they say beside the comparisons: the fastest, how far the machine drifted, what went wrong."""
        whole = [each for each in self.figures if each.kind == ALL]
        found = []
        for temperature in self.temperatures:
            drafted = [each for each in whole if each.temperature == temperature and each.family != "plain"]
            best = max(drafted, key=lambda each: each.over_plain or Interval(0, 0, 0), default=None)
            if best is not None and best.over_plain is not None:
                found.append(
                    f"temperature {temperature:g}: {best.configuration} is the fastest, {best.over_plain.text()} times"
                    f" the tokens a second of plain decoding ({verdict(best.over_plain)})"
                )
        found += [
            f"temperature {each.temperature:g}: plain decoding once more at the end gives {each.over_plain.text()}"
            " times its first speed; speeds that differ less than that may be the machine"
            for each in whole
            if each.configuration == AGAIN and each.over_plain
        ]
        found += [f"{each.configuration}, temperature {each.temperature:g}: {each.sentence}" for each in self.wrong]
        return found + [f"{name} was not measured: {why}" for name, why in (self.skipped | self.failed).items()]

    @property
    def wrong(self) -> list[Check]:
        """Checks that found what must not be."""
        return [check for check in self.checks if not check.ok]

    @property
    def ok(self) -> bool:
        """Whether every answer is plain decoding's, as far as the dtype promises, and no engine failed."""
        return not self.wrong and not self.failed

    def as_json(self) -> dict[str, Any]:
        """Intervals as {"value", "low", "high"}."""
        found = {"format": "treetop-heads-1", **asdict(self)}
        for name in ("figures", "comparisons"):
            found[name] = [
                {key: each._asdict() if isinstance(each, Interval) else each for key, each in row.items()}
                for row in found[name]
            ]
        return found


def figures_of(
    name: str, family: Family, temperature: float, calls: Sequence[BatchRun], plain: Sequence[BatchRun]
) -> list[HeadFigures]:
    """Of all prompts, then of each kind. plain: the calls of plain decoding, one for one."""
    found = []
    for kind in (ALL, *dict.fromkeys(call.kind for call in calls)):
        pairs = [(a, b) for a, b in zip(calls, plain, strict=True) if kind in (ALL, a.kind)]
        own = [call for call, _ in pairs]
        outputs = [output for call in own for output in call.outputs]
        expected = [output for _, call in pairs for output in call.outputs]
        found.append(
            HeadFigures(
                configuration=name,
                family=family,
                temperature=temperature,
                kind=kind,
                prompts=len(outputs),
                tokens=sum(call.tokens for call in own),
                accept_length=ratio_interval(per_round(own)),
                tokens_per_s=sum(call.tokens for call in own) / math.fsum(call.seconds for call in own),
                over_plain=ratio_interval(per_second(own), inverse(per_second([call for _, call in pairs]))),
                differ=sum(a.token_ids != b.token_ids for a, b in zip(outputs, expected, strict=True)),
            )
        )
    return found


def comparison(
    names: tuple[str, str], why: str, temperature: float, first: Sequence[BatchRun], second: Sequence[BatchRun]
) -> Comparison | None:
    """Of two configurations on the same prompts; None if one has no round."""
    accepted = ratio_interval(per_round(first), inverse(per_round(second)))
    faster = ratio_interval(per_second(first), inverse(per_second(second)))
    return Comparison(*names, why, temperature, accepted, faster) if accepted and faster else None


def per_round(calls: Sequence[BatchRun]) -> Factor:
    """Tokens that rounds gave over rounds, prompt by prompt."""
    outputs = [output for call in calls for output in call.outputs]
    return [output.round_tokens for output in outputs], [output.metrics.target_forwards for output in outputs]


def per_second(calls: Sequence[BatchRun]) -> Factor:
    """Tokens over seconds, call by call."""
    return [call.tokens for call in calls], [call.seconds for call in calls]


def inverse(factor: Factor) -> Factor:
    return factor[1], factor[0]


def verdict(ratio: Interval) -> str:
    """Whether a ratio's interval lies above 1, below, or around it."""
    return "more" if ratio.low > 1 else "fewer" if ratio.high < 1 else "no difference shown"
