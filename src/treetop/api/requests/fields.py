"""Fields of a request that all endpoints share, and those that cannot be honoured, each with what it may say."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

from treetop.api.limits import AllowedIds, FewMembers, StopIds, Texts, few_members
from treetop.api.requests.extra_fields import TextFields, UnusedFields
from treetop.api.requests.hints import UNKNOWN_LEFT_OUT, left_out
from treetop.api.requests.structured import FIELDS, structured_output
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError, close_name, shown
from treetop.types.sampling import MAX_BIASES, SamplingParams

MAX_CHOICES = 128
MAX_STOPS, LONGEST_STOP = 16, 1000
MAX_NAMES_COMPARED = 8
"""Unknown names of an object that are compared with the known ones."""

Neutral = Mapping[str, tuple[Any, ...]]
"""Values by the names of fields."""
NEUTRAL: Neutral = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "lora_path": (),
}
"""As `Body.neutral`, of what chooses tokens."""


def _refuse_unsupported(values: dict[str, Any], neutral: Neutral) -> dict[str, Any]:
    """Drop known fields that ask for nothing. Raises for one that asks for something."""
    kept = dict(values)
    for name in neutral.keys() & kept.keys():
        value = kept.pop(name)
        if value is not None and not any(_same(value, each) for each in neutral[name]):
            raise PydanticCustomError("unsupported", "not supported", {"at": f".{name}"})
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """0 is 0.0, but False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


class Body(BaseModel):
    """A request's body: types as they are said, no unknown field, no NaN. Null is as good as nothing said.

    neutral: known fields that cannot be honoured, and the values that ask for nothing; null asks for nothing either.
    hints: fields that no answer depends on; those that are not declared are told in the log.
    """

    neutral: ClassVar[Neutral] = {}
    hints: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _few_members = model_validator(mode="before")(few_members)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop nulls of fields that need not be given, and fields that ask for nothing.

        Raises for a field that asks for what cannot be, and for what hides other errors: another kind of thing than
        this, and a misspelled name.
        """
        if not isinstance(values, dict):
            return values
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        values = _refuse_unsupported(values, {name: each for name, each in cls.neutral.items() if name not in fields})
        for name in [name for name in cls.hints if name in values and name not in fields]:
            left_out(name, "a hint that no answer depends on here")
            del values[name]
        optional = {name for name, field in fields.items() if not field.is_required()}
        _refuse_kind(values, fields)
        if UNKNOWN_LEFT_OUT.get():
            values = _known(values, fields)
        _refuse_misspelled(values, fields)
        return {name: value for name, value in values.items() if value is not None or name not in optional}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema, which says where null may stand."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in cls.model_fields.items():
            said = field.alias or name
            declared = schema["properties"][said]
            if not field.is_required() and {"type": "null"} not in declared.get("anyOf", ()):
                schema["properties"][said] = {"anyOf": [declared, {"type": "null"}]}
        return schema


def _refuse_kind(values: dict[str, Any], fields: Mapping[str, FieldInfo]) -> None:
    """Raise for a `type` of none of the kinds that there are: what else it lacks as one of these would hide that."""
    kinds = get_args(fields["type"].annotation) if "type" in fields else ()
    kind = values.get("type")
    if kinds and isinstance(kind, str) and kind not in kinds:
        told = {"at": ".type", "kind": shown(kind), "kinds": " or ".join(map(repr, kinds))}
        raise PydanticCustomError("unsupported", "{kind} is not supported, only {kinds}", told)


def _known(values: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Without fields that nobody knows."""
    known = {*fields}
    for name in sorted(values.keys() - known)[:MAX_NAMES_COMPARED]:
        left_out(name, "an unknown field is left out (--ignore-unknown-fields)")
    return {name: value for name, value in values.items() if name in known}


def _refuse_misspelled(values: dict[str, Any], fields: Iterable[str]) -> None:
    unknown = values.keys() - {*fields}
    for name in sorted(unknown)[:MAX_NAMES_COMPARED]:
        if meant := close_name(name, fields):
            told = {"at": f".{name}", "meant": meant}
            raise PydanticCustomError("misspelled", "unknown field; did you mean `{meant}`?", told)


class StreamOptions(Body):
    """include_usage: an event with the usage comes last.
    continuous_usage_stats: each event has its choice's so far.
    """

    neutral = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


def listed(value: Any) -> Any:
    """A text alone is a list of one."""
    return [value] if isinstance(value, str) else value


CacheSalt = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        description="only requests with the same salt share cached prefixes; vLLM's",
    ),
]
Stops = Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], Field(max_length=MAX_STOPS)]


class SamplingFields(TextFields, UnusedFields, Body):
    """How tokens are chosen and when they end. What is null or absent is the model's default."""

    neutral, hints = NEUTRAL, tuple(UnusedFields.model_fields)
    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=MAX_BIASES), FewMembers] = None
    allowed_token_ids: AllowedIds | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: Annotated[Stops | None, BeforeValidator(listed)] = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: CacheSalt = None
    timeout: float | None = Field(None, description="seconds after which the request ends with an error")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens' log-probabilities come with each token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same with each token of the prompt but the first."""
        if self.stream and self.prompt_logprobs is not None:
            raise InputError("prompt_logprobs: not in a stream")
        return self.prompt_logprobs

    @property
    def structure(self) -> tuple[str, StructuredOutput] | None:
        """What the output is held to, behind the field that says so. Raises InputError."""
        return structured_output({name: value for name in FIELDS if (value := getattr(self, name)) is not None})

    def params(
        self, defaults: dict[str, float], max_tokens: int, structure: StructuredOutput | None = None
    ) -> SamplingParams:
        """Of all choices; their seeds are `seeds`. Raises InputError."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream")
        if self.best_of not in (None, self.n):
            raise InputError(f"best_of: only equal to n, which is {self.n}; every choice is returned")
        if self.logprobs_mode == "processed_logprobs" and self.num_logprobs:
            raise InputError(
                f"logprobs_mode: processed_logprobs are of what was drawn, not of {self.num_logprobs} others;"
                " ask for logprobs 0, in a chat top_logprobs 0"
            )
        names = (*defaults, "presence_penalty", "frequency_penalty", "min_tokens")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        chosen: dict[str, Any] = {**defaults, **own}
        chosen["logit_bias"] = tuple((_token_id(name), bias) for name, bias in (self.logit_bias or {}).items())
        if self.allowed_token_ids is not None:
            chosen["allowed_token_ids"] = tuple(self.allowed_token_ids)
        chosen["structured_output"] = structure
        return SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            seed=self.seed,
            **self.text_options(),
        )

    def seeds(self, num_prompts: int) -> list[int] | None:
        """Of each choice of each prompt: the i-th has seed + i, on a ring of 2^63. None without a seed."""
        return None if self.seed is None else [(self.seed + i) % 2**63 for i in range(self.n)] * num_prompts


def _token_id(name: str) -> int:
    """A key of `logit_bias`. Raises InputError."""
    if not re.fullmatch("[0-9]{1,9}", name):
        raise InputError(f"logit_bias: keys must be token ids, got {shown(name)}")
    return int(name)
