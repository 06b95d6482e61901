"""What a caller asks of one request."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from treetop.types.constraint import StructuredOutput, is_utf8
from treetop.types.errors import InputError, shown
from treetop.types.options import is_finite, option, validate

FinishReason = Literal["stop", "length", "abort"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Which of a token's log-probabilities an answer over HTTP shows, in vLLM's words."""
MAX_LOGPROBS = 20
"""Maximum `logprobs`."""
MAX_BIASES = 511
"""Tokens that a request's `logit_bias` may name."""
MAX_BAD_WORDS, LONGEST_BAD_WORD = 128, 200
"""Texts that a request's `bad_words` may be, and characters of one."""
CLASSES = 3
"""Of requests, by which drafts are calibrated: greedy, a temperature up to `WARM`, any above."""
WARM = 0.7
CALIBRATED_LORAS = 32
"""Adapters on the device that have such classes of their own; those of slots from here on share one set."""
RULING_OUT = ("min_tokens", "allowed_token_ids", "structured_output", "bad_words")
WEIGHING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""Options that change logits: those that rule tokens out, and those that make numbers others."""


def class_of_temperature(temperature: float) -> int:
    """Which of `CLASSES`: a draw agrees with a head less often than an argmax."""
    return (temperature > 0) + (temperature > WARM)


def class_of(temperature: float, lora_slot: int) -> int:
    """Of a request: by temperature, and by the slot of its adapter, whose target a head fits more or less. 0: none."""
    return min(lora_slot, CALIBRATED_LORAS) * CLASSES + class_of_temperature(temperature)


def num_classes(lora_slots: int) -> int:
    """Of an engine with so many slots for adapters: those of the base come first."""
    return CLASSES * (1 + min(lora_slots, CALIBRATED_LORAS))


class TokenLogprobs(NamedTuple):
    """Log-probabilities where a token was chosen.

    logprob, top: of the target's raw logits, the token's own, and the best (token id, its).
    processed: its own under the distribution that it was drawn from: what changes logits, what rules tokens out,
        temperature and filters are in it; 0 at temperature 0. Of a prompt's token, which nothing drew, `logprob` again.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    processed: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; `option` says of each field what it does.

    temperature 0 is greedy. Filters apply in the order temperature, top-k, top-p, min-p, each renormalised. The same
    seed gives the same tokens whatever the batch, the tree or the shape.

    Logits are changed before temperature and filters, in this order: logit_bias, repetition_penalty, frequency_penalty,
    presence_penalty. Then tokens are ruled out: those outside allowed_token_ids, before min_tokens tokens those that
    would end the request, and those that would complete the ids of one of bad_words.
    Lists, one text for a list of texts, and a dict for logit_bias will do. Raises InputError, all problems at once.
    """

    temperature: float = option(0.0, "0 is greedy", minimum=0, check=is_finite, must="must be a finite number >= 0")
    top_k: int = option(
        0, "the most likely tokens to choose from; 0 is off", minimum=-1, must="must be 0 (off), -1 (off) or positive"
    )
    top_p: float = option(1.0, "their probability together; 1 is off", above=0, maximum=1)
    min_p: float = option(0.0, "least share of the most likely token's; 0 is off", minimum=0, maximum=1)
    max_tokens: int = option(128, "tokens to generate at most; 0 only with prompt_logprobs")
    stop: tuple[str, ...] = option((), "text that ends the completion, and is cut from it; repeats", metavar="TEXT")
    stop_token_ids: tuple[int, ...] = option((), "ids that end the request", flag="")
    ignore_eos: bool = option(False, "go on past an end-of-sequence token")
    seed: int | None = option(
        None,
        "of this request's draws; None draws one; a negative one counts modulo 2^63",
        minimum=-(2**63),
        below=2**63,
        flag="",
    )
    min_tokens: int = option(0, "tokens before which nothing ends the request but max_tokens", flag="")
    presence_penalty: float = option(
        0.0, "subtracted once from the logit of a token that the output has", minimum=-2, maximum=2, flag=""
    )
    frequency_penalty: float = option(
        0.0, "subtracted from a token's logit for each time that the output has it", minimum=-2, maximum=2, flag=""
    )
    repetition_penalty: float = option(
        1.0,
        "of tokens in prompt or output: a positive logit is divided by it, another multiplied",
        minimum=0.01,
        maximum=100,
        flag="",
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), f"what is added to logits, by token id; at most {MAX_BIASES} tokens, -100 to 100 each", flag=""
    )
    allowed_token_ids: tuple[int, ...] | None = option(None, "ids that may be chosen; None for all", flag="")
    logprobs: int | None = option(
        None,
        "how many of the best tokens' log-probabilities come with each token, beside its own; None for none",
        minimum=0,
        maximum=MAX_LOGPROBS,
        flag="",
    )
    structured_output: StructuredOutput | None = option(
        None, "what the output is held to; it needs the package llguidance", flag=""
    )
    include_stop_str_in_output: bool = option(False, "text ends behind the stop string, not before it", flag="")
    skip_special_tokens: bool = option(
        True, "False shows special tokens in the text, but for one that ended the request", flag=""
    )
    truncate_prompt_tokens: int | None = option(
        None,
        "keep so many of the prompt's last tokens; -1 keeps what leaves room for max_tokens",
        check=lambda count: count == -1 or 1 <= count < 2**31,
        must="must be in [1, 2^31), or -1",
        flag="",
    )
    prompt_logprobs: int | None = option(
        None,
        "as logprobs, with each token of the prompt but the first; max_tokens may be 0 then",
        minimum=0,
        maximum=MAX_LOGPROBS,
        flag="",
    )
    bad_words: tuple[str, ...] = option(
        (), "texts whose ids, encoded with and without a space before, never appear in the output", flag=""
    )
    speculative: bool = option(
        True, "False accepts no draft: each round gives the request one token, the same as with drafts", flag=""
    )

    return_draft_trees: bool = option(
        False, "the tree that each round verified comes with its tokens; the tokens are the same", flag=""
    )
    return_routed_experts: bool = option(
        False,
        "which experts each token of prompt and output went to, but for the last; the engine needs"
        " enable_return_routed_experts",
        flag="",
    )

    def __post_init__(self) -> None:
        validate(self, InputError, self._rules, brackets=True)
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed % 2**63)

    def _rules(self) -> list[tuple[bool, str]]:
        """What spans fields, or is of a list's items."""
        ids, minimum = [token for token, _ in self.logit_bias], int(self.prompt_logprobs is None)
        return [
            (
                self.max_tokens < minimum,
                f"max_tokens must be at least {minimum}, got {shown(self.max_tokens)}",
            ),
            (any(not s for s in self.stop), "stop strings must not be empty"),
            (not all(map(is_utf8, self.stop)), "stop strings must be text that UTF-8 can write"),
            (any(token < 0 for token in self.stop_token_ids), "stop_token_ids must not be negative"),
            (
                not 0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must be in [0, max_tokens], got {shown(self.min_tokens)} with max_tokens"
                f" {shown(self.max_tokens)}",
            ),
            (any(token < 0 for token in ids), "logit_bias: token ids must not be negative"),
            (len(set(ids)) != len(ids), "logit_bias: a token id appears twice"),
            (len(ids) > MAX_BIASES, f"logit_bias may name {MAX_BIASES} tokens, got {len(ids)}"),
            (
                any(not -100 <= bias <= 100 for _, bias in self.logit_bias),
                "logit_bias: a bias must be in [-100, 100]",
            ),
            (any(not word.strip() for word in self.bad_words), "bad_words must not be empty"),
            (not all(map(is_utf8, self.bad_words)), "bad_words must be text that UTF-8 can write"),
            (
                len(self.bad_words) > MAX_BAD_WORDS or any(len(word) > LONGEST_BAD_WORD for word in self.bad_words),
                f"bad_words may be {MAX_BAD_WORDS} texts of {LONGEST_BAD_WORD} characters, not more",
            ),
            (self.allowed_token_ids == (), "allowed_token_ids must not be empty"),
            (any(token < 0 for token in self.allowed_token_ids or ()), "allowed_token_ids must not be negative"),
        ]

    @property
    def filtered(self) -> bool:
        """Whether choosing a token needs an order of the tokens by probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def tells_trees(self) -> bool:
        """Whether rounds tell their trees; one that accepts no draft has none to tell."""
        return self.return_draft_trees and self.speculative

    @property
    def logit_options(self) -> tuple[str, ...]:
        """The options in use that change logits, or rule tokens out, before one is chosen."""
        return self._in_use(RULING_OUT + WEIGHING)

    @property
    def weighs(self) -> bool:
        """Whether logits become others; what is ruled out is in the masks of a request with a structured output."""
        return bool(self._in_use(WEIGHING))

    def _in_use(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if getattr(self, name) != self.__dataclass_fields__[name].default)

    @property
    def changes_logits(self) -> bool:
        return bool(self.logit_options)


class SamplingMode(Enum):
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
    def of(cls, params: SamplingParams) -> "SamplingMode":
        """What one request needs."""
        if params.logprobs is not None:
            return cls.LOGPROBS
        if params.changes_logits:
            return cls.PROCESS
        if params.filtered:
            return cls.FILTER
        return cls.GREEDY if params.greedy else cls.SAMPLE

    @classmethod
    def costliest(cls, choices: Iterable["SamplingMode"]) -> "SamplingMode":
        """What serves all of these; GREEDY for none."""
        needed = set(choices)
        return next((choice for choice in reversed(cls) if choice in needed), cls.GREEDY)

    @property
    def processes(self) -> bool:
        """Whether logits are changed first, of the rows that ask for it."""
        return self in (SamplingMode.PROCESS, SamplingMode.LOGPROBS)

    @property
    def filters(self) -> bool:
        """Whether rows may have a top-k or a top-p."""
        return self not in (SamplingMode.GREEDY, SamplingMode.SAMPLE)
