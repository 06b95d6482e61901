"""What a caller asks of one request."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Literal, NamedTuple

from treetop.types.constraint import StructuredOutput, is_utf8
from treetop.types.errors import InputError, shown

FinishReason = Literal["stop", "length", "abort"]
MOST_LOGPROBS = 20
"""Best tokens whose log-probabilities a request may have beside the chosen one's."""
MOST_BIASES = 511
"""Tokens that a request's `logit_bias` may name."""
MOST_BAD_WORDS, LONGEST_BAD_WORD = 128, 200
"""Texts that a request's `bad_words` may be, and characters of one."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the target's raw logits where a token was chosen: its own, and the best (token id, its)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 are off; filters apply in the order temperature,
    top-k, top-p, min-p, each renormalised. `seed` None draws one per request; the same seed gives the same tokens
    whatever the batch, the tree or the shape. `stop` strings end the request and are cut from its text.

    Logits are changed before temperature and filters, in this order: logit_bias (token id -> what is added; a dict will
    do), repetition_penalty (of tokens in prompt or output: a positive logit is divided by it, another multiplied),
    frequency_penalty (subtracted for each time a token is in the output), presence_penalty (once). Then tokens are
    ruled out: those outside allowed_token_ids, before min_tokens tokens those that would end the request, and those
    that would complete the ids of one of `bad_words`, as it is encoded with and without a space before it.
    `structured_output`: what the output is held to; it needs the package llguidance.
    `logprobs`: how many of the best tokens' log-probabilities come with each token, beside its own; None for none.
    `prompt_logprobs`: the same with each token of the prompt but the first; max_tokens may be 0 then.

    `seed`: a negative one is the same modulo 2^63. `include_stop_str_in_output`: text ends behind the stop string, not
    before it. `skip_special_tokens`: False shows special tokens in the text, but for one that ended the request.
    `truncate_prompt_tokens`: keep so many of the prompt's last tokens; -1 keeps what leaves room for max_tokens.
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
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = self._wrong_types() or [text for bad, text in self._rules() if bad]
        if problems:
            raise InputError("; ".join(problems))
        self._make_plain()

    def _make_plain(self) -> None:
        """Numbers of NumPy and the like become Python's, which are all that messages between processes can hold."""
        plain: dict[str, object] = {name: float(getattr(self, name)) for name in _NUMBERS}
        plain |= {name: int(getattr(self, name)) for name in _INTEGERS}
        plain |= {name: int(value) for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            plain["seed"] = int(self.seed) % 2**63
        plain["stop_token_ids"] = tuple(map(int, self.stop_token_ids))
        plain["logit_bias"] = tuple((int(token), float(bias)) for token, bias in self.logit_bias)
        if self.allowed_token_ids is not None:
            plain["allowed_token_ids"] = tuple(map(int, self.allowed_token_ids))
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _wrong_types(self) -> list[str]:
        """Fields whose value is not of their kind; True and False are no numbers."""
        kinds: list[tuple[str, str, bool]] = [
            *((name, "a number", _is(getattr(self, name), Real)) for name in _NUMBERS),
            *((name, "an integer", _is(getattr(self, name), Integral)) for name in _INTEGERS),
            ("stop", "text or a list of texts", _all(self.stop, str)),
            ("bad_words", "a list of texts", _all(self.bad_words, str)),
            ("stop_token_ids", "a list of token ids", _all(self.stop_token_ids, Integral)),
            *((name, "True or False", _is(getattr(self, name), bool)) for name in _SWITCHES),
            *(
                (name, "an integer or None", getattr(self, name) is None or _is(getattr(self, name), Integral))
                for name in _OPTIONAL
            ),
            ("logit_bias", "a dict of token ids and numbers", _pairs(self.logit_bias)),
            (
                "allowed_token_ids",
                "a list of token ids or None",
                self.allowed_token_ids is None or _all(self.allowed_token_ids, Integral),
            ),
            (
                "structured_output",
                "a StructuredOutput or None",
                self.structured_output is None or isinstance(self.structured_output, StructuredOutput),
            ),
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
            (
                self.max_tokens < (self.prompt_logprobs is None),
                f"max_tokens must be at least 1, or 0 with prompt_logprobs, got {shown(self.max_tokens)}",
            ),
            (any(not s for s in self.stop), "stop strings must not be empty"),
            (not all(map(is_utf8, self.stop)), "stop strings must be text that UTF-8 can write"),
            (any(token < 0 for token in self.stop_token_ids), "stop_token_ids must not be negative"),
            (
                self.seed is not None and not -(2**63) <= self.seed < 2**63,
                f"seed must be in [-2^63, 2^63), got {shown(self.seed)}",
            ),
            (
                self.truncate_prompt_tokens is not None
                and self.truncate_prompt_tokens != -1
                and not 1 <= self.truncate_prompt_tokens < 2**31,
                f"truncate_prompt_tokens must be in [1, 2^31), or -1, got {shown(self.truncate_prompt_tokens)}",
            ),
            *self._rules_of_logits(),
        ]

    def _rules_of_logits(self) -> list[tuple[bool, str]]:
        ids = [token for token, _ in self.logit_bias]
        rules = [
            (
                not 0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must be in [0, max_tokens], got {shown(self.min_tokens)} with max_tokens"
                f" {shown(self.max_tokens)}",
            ),
            (
                not 0.01 <= self.repetition_penalty <= 100,
                f"repetition_penalty must be in [0.01, 100], got {shown(self.repetition_penalty)}",
            ),
            (any(token < 0 for token in ids), "logit_bias: token ids must not be negative"),
            (len(set(ids)) != len(ids), "logit_bias: a token id appears twice"),
            (len(ids) > MOST_BIASES, f"logit_bias may name {MOST_BIASES} tokens, got {len(ids)}"),
            (
                any(not -100 <= bias <= 100 for _, bias in self.logit_bias),
                "logit_bias: a bias must be in [-100, 100]",
            ),
            (any(not word.strip() for word in self.bad_words), "bad_words must not be empty"),
            (not all(map(is_utf8, self.bad_words)), "bad_words must be text that UTF-8 can write"),
            (
                len(self.bad_words) > MOST_BAD_WORDS or any(len(word) > LONGEST_BAD_WORD for word in self.bad_words),
                f"bad_words may be {MOST_BAD_WORDS} texts of {LONGEST_BAD_WORD} characters, not more",
            ),
            (self.allowed_token_ids == (), "allowed_token_ids must not be empty"),
            (any(token < 0 for token in self.allowed_token_ids or ()), "allowed_token_ids must not be negative"),
            *(
                (
                    value is not None and not 0 <= value <= MOST_LOGPROBS,
                    f"{name} must be in [0, {MOST_LOGPROBS}], got {shown(value)}",
                )
                for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
        ]
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            rules.append((not -2 <= value <= 2, f"{name} must be in [-2, 2], got {shown(value)}"))
        return rules

    @property
    def filtered(self) -> bool:
        """Whether choosing a token needs an order of the tokens by probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def logit_options(self) -> tuple[str, ...]:
        """The options in use that change logits, or rule tokens out, before one is chosen."""
        neutral: dict[str, object] = {
            "min_tokens": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
        }
        neutral |= {"logit_bias": (), "allowed_token_ids": None, "structured_output": None, "bad_words": ()}
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def changes_logits(self) -> bool:
        return bool(self.logit_options)


_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "max_tokens", "min_tokens")
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def is_integer(value: object) -> bool:
    """Of Python's or NumPy's; True and False are none."""
    return _is(value, Integral)


def is_number(value: object) -> bool:
    """The same for numbers that may have a fraction."""
    return _is(value, Real)


def _all(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(_is(value, kind) for value in values)


def _pairs(values: object) -> bool:
    """Whether these are (token id, number) pairs."""
    if not isinstance(values, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in values):
        return False
    return all(_is(token, Integral) and _is(bias, Real) for token, bias in values)


class Choice(Enum):
    """How a batch's tokens are chosen; a batch takes the costliest way that one of its requests needs.

    Each way gives every request that needs less the same tokens. PROCESS changes logits first, then draws as FILTER.
    LOGPROBS does all that, and finds log-probabilities of what was chosen.
    """

    GREEDY = "greedy"
    SAMPLE = "sample"
    FILTER = "filter"
    PROCESS = "process"
    LOGPROBS = "logprobs"

    @classmethod
    def of(cls, params: SamplingParams) -> "Choice":
        """What one request needs."""
        if params.logprobs is not None:
            return cls.LOGPROBS
        if params.changes_logits:
            return cls.PROCESS
        if params.filtered:
            return cls.FILTER
        return cls.GREEDY if params.greedy else cls.SAMPLE

    @classmethod
    def costliest(cls, choices: Iterable["Choice"]) -> "Choice":
        """What serves all of these; GREEDY for none."""
        needed = set(choices)
        return next((choice for choice in reversed(cls) if choice in needed), cls.GREEDY)

    @property
    def processes(self) -> bool:
        """Whether logits are changed first, of the rows that ask for it."""
        return self in (Choice.PROCESS, Choice.LOGPROBS)

    @property
    def filters(self) -> bool:
        """Whether rows may have a top-k or a top-p."""
        return self not in (Choice.GREEDY, Choice.SAMPLE)
