"""Fields of a request that all endpoints share, and those that cannot be honoured, each with what it may say."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from treetop.types.errors import InputError
from treetop.types.sampling import SamplingParams

MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 16, 1000

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "lora_path": (),
}
"""Known fields that cannot be honoured, and the values that ask for nothing; null asks for nothing either."""


def refuse_unsupported(values: Any) -> Any:
    """Drop known fields that ask for nothing. Raises for one that asks for something."""
    if not isinstance(values, dict):
        return values
    kept = dict(values)
    for name in NEUTRAL.keys() & kept.keys():
        value = kept.pop(name)
        if value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise PydanticCustomError("unsupported", "not supported", {"name": name})
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """0 is 0.0, but False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


class Body(BaseModel):
    """A request's body: types as they are said, no unknown field, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """include_usage: an event with the usage comes last."""

    include_usage: bool = False


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[Annotated[str, Field(max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]


class SamplingFields(Body):
    """How tokens are chosen and when they end. What is null or absent is the model's default."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[Stops | None, BeforeValidator(_listed)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    priority: int = 0
    timeout: float | None = Field(None, description="seconds after which the request ends with an error")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsupported(cls, values: Any) -> Any:
        return refuse_unsupported(values)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, defaults: dict[str, float], max_tokens: int) -> list[SamplingParams]:
        """Of each of the n choices; with a seed, the i-th has seed + i. Raises InputError."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream")
        own = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        chosen: dict[str, Any] = {**defaults, **own}
        return [
            SamplingParams(
                **chosen,
                max_tokens=max_tokens,
                stop=tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
                seed=None if self.seed is None else self.seed + choice,
            )
            for choice in range(self.n)
        ]
