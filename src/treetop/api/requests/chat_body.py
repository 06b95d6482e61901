"""Bodies of `/v1/chat/completions`: messages, their parts and calls, and the request."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, FewMembers, check_values
from treetop.api.requests.fields import Body, Neutral, SamplingFields
from treetop.api.requests.tools import Calls, CustomTool, Grammar, ToolChoice, ToolList
from treetop.parsers.custom import arguments_of
from treetop.text.chat_input import Message
from treetop.text.chat_template import check_options
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import InputError, shown

Value = TypeVar("Value")

_OWN_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
"""What a request says in fields of their own, never in `chat_template_kwargs`."""
_MAX_GRAMMARS = 32
"""Of custom tools in a request: each is checked for as long as a structure may take."""


class TextPart(Body):
    """A part of a message's content. cache_control: Anthropic's, which clients send to anybody; it is not used."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class RefusalPart(Body):
    """What an assistant said in place of an answer; the template is given it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(BaseModel):
    """What was called. arguments: an object, or its text."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """A call that an assistant made."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def flat(self, as_text: bool) -> dict[str, Any]:
        """As templates expect it. as_text: they join the arguments to other text."""
        said = self.model_dump(exclude_none=True)
        arguments = self.function.arguments
        if as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _object(arguments)
        said["function"]["arguments"] = arguments
        return said


class CustomInput(BaseModel):
    """What a custom tool was given."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    name: str
    input: str


class CustomToolCall(BaseModel):
    """A call of a custom tool that an assistant made."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    id: str | None = None
    type: Literal["custom"]
    custom: CustomInput

    @property
    def function(self) -> CalledFunction:
        """As a model writes it."""
        return CalledFunction(name=self.custom.name, arguments=arguments_of(self.custom.input))

    def flat(self, as_text: bool) -> dict[str, Any]:
        """As templates expect it; see `ToolCall`."""
        return ToolCall(id=self.id, function=self.function).flat(as_text)


def _kind_of_call(call: Any) -> str:
    """A call of a function need not say that it is one."""
    said = call.get("type") if isinstance(call, dict) else getattr(call, "type", None)
    return "function" if said is None else said if isinstance(said, str) else ""


Call = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")], Discriminator(_kind_of_call)
]


def _object(text: str) -> str | dict[str, Any]:
    """The object that a call's arguments are; the text itself if it is none, as a model may have written it."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class ChatMessage(BaseModel):
    """A message. Its other fields reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="as reasoning_content")

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any, info: ValidationInfo) -> Any:
        """Raise for a part that is no text: what else it lacks as a text would hide that."""
        kinds = ("text", "refusal") if info.data.get("role") == "assistant" else ("text",)
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                told = {"at": f"[{place}].type", "kind": shown(kind)}
                raise PydanticCustomError("unsupported", "only parts of text are supported, not {kind}", told)
        return content

    def flat(self, arguments_as_text: bool = False, has_thinking: bool = False) -> Message:
        """As templates expect it: text parts joined by a newline, no field that says nothing.

        arguments_as_text: of `ToolCall.flat`. has_thinking: the template calls reasoning `thinking`, and with calls it
        takes that or content.
        """
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        flat = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        flat |= {"role": self.role, "content": "" if content is None else content}
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            flat |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if has_thinking and not (content and self.tool_calls):
                flat["thinking"] = reasoning
        if self.tool_calls:
            flat["tool_calls"] = [call.flat(arguments_as_text) for call in self.tool_calls]
        return flat


def check_arguments(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Raise InputError for calls whose arguments hold too much together: `flat` reads their texts."""
    check_values(
        (f"messages[{number}].tool_calls[{index}].function.arguments", call.function.arguments)
        for number, message in enumerate(messages)
        for index, call in enumerate(message.tool_calls or ())
    )
    return messages


Messages = Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(check_arguments)]


class ThinkingParam(Body):
    """Whether to think, as DeepSeek's and GLM's clients say it. budget_tokens, LiteLLM's: `thinking_token_budget`."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)


class ReasoningFields(Body):
    """How to think, as OpenRouter's clients say it. max_tokens: `thinking_token_budget`."""

    neutral: ClassVar[Neutral] = {"exclude": (False,)}
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)


class ChatRequest(SamplingFields):
    """OpenAI's request, with the options of `SamplingParams`, and chat_template_kwargs."""

    messages: Messages = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="all that the context holds by default")
    chat_template_kwargs: Annotated[dict[str, Any] | None, FewMembers] = None
    add_generation_prompt: bool | None = Field(None, description="true, unless continue_final_message is")
    continue_final_message: bool = Field(False, description="the output goes on with the last message")
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto by default")
    parallel_tool_calls: bool = Field(True, description="false: one call at most")
    reasoning_effort: str | None = Field(None, description="for the chat template; none: do not think")
    thinking_token_budget: int | None = Field(
        None, ge=0, lt=2**31, description="tokens of reasoning after which its end is forced"
    )
    enable_thinking: bool | None = Field(None, description="whether to think, as in chat_template_kwargs")
    thinking: ThinkingParam | None = Field(None, description="the same, as DeepSeek's and LiteLLM's clients say it")
    reasoning: ReasoningFields | None = Field(None, description="effort and budget, as OpenRouter's clients say them")
    _answers: dict[int, str] = PrivateAttr(default_factory=dict)
    _takes_hints: bool = PrivateAttr(default=False)
    _grammar_places: Sequence[str] | None = PrivateAttr(default=None)

    @property
    def answers(self) -> dict[int, str]:
        """By the index of a message of role tool: where a request of another kind says which call it answers."""
        return self._answers

    @property
    def thinks(self) -> bool | None:
        """Whether to think; None if nothing is said of it. Raises InputError."""
        return _one_of(
            {
                "enable_thinking": self.enable_thinking,
                "thinking": None if self.thinking is None else self.thinking.type == "enabled",
                "reasoning.enabled": None if self.reasoning is None else self.reasoning.enabled,
            }
        )

    @property
    def effort(self) -> str | None:
        """Of thinking. Raises InputError."""
        other = None if self.reasoning is None else self.reasoning.effort
        return _one_of({"reasoning_effort": self.reasoning_effort, "reasoning.effort": other})

    @property
    def thinking_budget(self) -> int | None:
        """Tokens. Raises InputError."""
        return _one_of(self._budgets)

    @property
    def budget_field(self) -> str:
        """Which says `thinking_budget`."""
        return next(name for name, tokens in self._budgets.items() if tokens is not None)

    @property
    def _budgets(self) -> dict[str, int | None]:
        return {
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
            "thinking.budget_tokens": None if self.thinking is None else self.thinking.budget_tokens,
        }

    @property
    def takes_hints(self) -> bool:
        """Whether an effort that the model's template does not know is left out: agents say one to every model."""
        return self._takes_hints

    @cached_property
    def calls(self) -> Calls:
        """Raises InputError."""
        return Calls(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    @property
    def grammars(self) -> list[tuple[str, Grammar]]:
        """Those of custom tools, whether these may be called or not, and where the body has them. Raises InputError."""
        found, places = list[tuple[str, Grammar]](), self._grammar_places
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, CustomTool) and (grammar := tool.custom.grammar) is not None:
                place = f"tools[{index}].custom.format.grammar" if places is None else places[index]
                found.append((f"{place}.definition", grammar))
        if len(found) > _MAX_GRAMMARS:
            raise InputError(f"tools: {len(found)} have a grammar, at most {_MAX_GRAMMARS} may")
        return found

    @cached_property
    def structure(self) -> tuple[str, StructuredOutput] | None:
        """That of a forced call, or what is asked where none may come. Raises InputError."""
        asked, forced = super().structure, self.calls.structure
        if forced is not None:
            return "tools", forced
        return None if self.calls.may_be else asked

    @cached_property
    def answer(self) -> tuple[str, StructuredOutput] | None:
        """What is asked of an output that calls no tool, where it may call. Raises InputError."""
        asked = super().structure if self.calls.may_be else None
        if asked is not None and asked[1].kind not in ("json_schema", "json_object"):
            raise InputError(f"{asked[0]}: beside tools a JSON schema or object alone, unless tool_choice is none")
        return asked

    @property
    def holds_calls(self) -> bool:
        """Whether calls that are not forced are held to schemas. Raises InputError."""
        return self.calls.are_strict or self.answer is not None

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs: only with logprobs true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        options = self.chat_template_kwargs or {}
        check_values([("chat_template_kwargs", options)])
        try:
            check_options(options, _OWN_FIELDS)
        except InputError as error:
            raise InputError(f"chat_template_kwargs: {error}") from None
        given = self.add_generation_prompt
        return options if given is None else {**options, "add_generation_prompt": given}

    @property
    def most_tokens(self) -> int | None:
        return _one_of({"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens})


def _one_of(said: Mapping[str, Value | None]) -> Value | None:
    """What fields of one meaning say, by their names. Raises InputError where they say different things."""
    given = {name: value for name, value in said.items() if value is not None}
    if len({*given.values()}) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    return next(iter(given.values()), None)


def chat_request(
    said: dict[str, Any], answers: Sequence[str], grammar_places: Sequence[str] | None = None
) -> ChatRequest:
    """The chat that a request of another kind is, as a body would say it. Raises InputError for what it cannot be.

    answers: of the last messages of role tool, where that request says which calls they answer.
    grammar_places: of each tool, where that request has its grammar, if it has one; None as a chat has it.
    """
    try:
        chat = ChatRequest.model_validate({name: value for name, value in said.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InputError(f"{first['loc'][0] if first['loc'] else 'body'}: {first['msg']}") from None
    of_tools = [index for index, message in enumerate(chat.messages) if message.role == "tool"]
    chat._takes_hints, chat._grammar_places = True, grammar_places
    chat._answers = dict(zip(reversed(of_tools), reversed(answers), strict=False))
    return chat
