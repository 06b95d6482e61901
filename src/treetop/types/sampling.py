"""What a caller asks of one request."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Literal

from treetop.types.errors import InputError, shown

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 are off; filters apply in the order temperature,
    top-k, top-p, min-p, each renormalised. `seed` None draws one per request; the same seed gives the same tokens
    whatever the batch, the tree or the shape. `stop` strings end the request and are cut from its text.
    Raises InputError, all problems at once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = self._wrong_types() or [text for bad, text in self._rules() if bad]
        if problems:
            raise InputError("; ".join(problems))

    def _wrong_types(self) -> list[str]:
        """Fields whose value is not of their kind; True and False are no numbers."""
        kinds: list[tuple[str, str, bool]] = [
            *((name, "a number", _is(getattr(self, name), Real)) for name in ("temperature", "top_p", "min_p")),
            *((name, "an integer", _is(getattr(self, name), Integral)) for name in ("top_k", "max_tokens")),
            ("stop", "text or a list of texts", _all(self.stop, str)),
            ("stop_token_ids", "a list of token ids", _all(self.stop_token_ids, Integral)),
            ("ignore_eos", "True or False", _is(self.ignore_eos, bool)),
            ("seed", "an integer or None", self.seed is None or _is(self.seed, Integral)),
        ]
        return [f"{name} must be {what}, got {shown(getattr(self, name))}" for name, what, ok in kinds if not ok]

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                not (_finite(self.temperature) and self.temperature >= 0),
                f"temperature must be a finite number >= 0, got {shown(self.temperature)}",
            ),
            (self.top_k < -1, f"top_k must be 0 (off), -1 (off) or positive, got {shown(self.top_k)}"),
            (not 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {shown(self.top_p)}"),
            (not 0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {shown(self.min_p)}"),
            (self.max_tokens < 1, f"max_tokens must be at least 1, got {shown(self.max_tokens)}"),
            (any(not s for s in self.stop), "stop strings must not be empty"),
            (any(token < 0 for token in self.stop_token_ids), "stop_token_ids must not be negative"),
            (
                self.seed is not None and not 0 <= self.seed < 2**63,
                f"seed must be in [0, 2^63), got {shown(self.seed)}",
            ),
        ]

    @property
    def filtered(self) -> bool:
        """Whether choosing a token needs an order of the tokens by probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _all(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(_is(value, kind) for value in values)


class Choice(Enum):
    """How a batch's tokens are chosen; a batch takes the costliest way that one of its requests needs."""

    GREEDY = "greedy"
    SAMPLE = "sample"
    FILTER = "filter"

    @classmethod
    def of(cls, params: SamplingParams) -> "Choice":
        """What one request needs."""
        if params.filtered:
            return cls.FILTER
        return cls.GREEDY if params.greedy else cls.SAMPLE

    @classmethod
    def costliest(cls, choices: Iterable["Choice"]) -> "Choice":
        """What serves all of these; GREEDY for none."""
        needed = set(choices)
        return next((choice for choice in (cls.FILTER, cls.SAMPLE) if choice in needed), cls.GREEDY)
