"""Requests of `/v1/responses`, and the chats that they are."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, FewMembers, check_values
from treetop.api.requests.chat_body import ChatRequest, chat_request
from treetop.api.requests.extra_fields import UnusedFields
from treetop.api.requests.fields import Body, refuse_unsupported
from treetop.api.requests.tools import MAX_TOOLS, Function, FunctionName
from treetop.text.chat_input import Message

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": (),
}
"""As `NEUTRAL` of `api/fields.py`."""


class _Echoed(BaseModel):
    """What an answer said and a client sends back. What else it holds says nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class InputText(Body):
    """Text of a message."""

    type: Literal["input_text"]
    text: str


class OutputText(_Echoed):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str


class Refusal(_Echoed):
    """What an answer said in place of one."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ItemPart = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
ItemParts = Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(_Echoed):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ItemParts


class CallItem(_Echoed):
    """A call that was made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Echoed):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ItemParts


class ReasoningText(_Echoed):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Echoed):
    """What was thought."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] = []
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


def _type_of(item: Any) -> str:
    """A message need not say that it is one."""
    said = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return said if isinstance(said, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


class ResponseTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class ResponseToolChoice(FunctionName):
    """The tool that must be called."""

    type: Literal["function"]


class TextFormat(Body):
    """What the text is held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Of the text. verbosity: nothing but what models say anyway."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """Of the reasoning, which comes as it is: there are no summaries."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponsesRequest(UnusedFields, Body):
    """OpenAI's request."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, description="all that the context holds by default")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool = False
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    store: bool = Field(True, description="keep the conversation, for previous_response_id")
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="reasoning comes in plain text, which may be sent back"
    )
    priority: int = 0
    timeout: float | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, FewMembers] = None
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31, description="as of chats")

    @model_validator(mode="before")
    @classmethod
    def _unsupported(cls, values: Any) -> Any:
        return refuse_unsupported(values, NEUTRAL)

    @property
    def own_messages(self) -> list[Message]:
        """What the input says, without instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        calls = ((number, item) for number, item in enumerate(self.input) if isinstance(item, CallItem))
        check_values((f"input[{number}].arguments", call.arguments) for number, call in calls)
        return messages_of(self.input)

    def chat(self, messages: list[Message]) -> ChatRequest:
        """messages: of the whole conversation, without instructions. Raises InputError."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        names = ("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "priority", "timeout")
        return chat_request(
            {
                **{name: getattr(self, name) for name in (*names, "chat_template_kwargs", "thinking_token_budget")},
                "messages": [*system, *messages],
                "max_completion_tokens": self.max_output_tokens,
                "tools": tools,
                "tool_choice": choice,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "response_format": self._response_format(),
            },
            answers=self._answers(),
        )

    def _answers(self) -> list[str]:
        """Where the input says which calls were answered."""
        items = () if isinstance(self.input, str) else self.input
        return [f"input[{number}].call_id" for number, item in enumerate(items) if isinstance(item, CallOutputItem)]

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if form.type != "json_schema":
            return {"type": form.type}
        said = {"name": form.name, "description": form.description, "strict": form.strict}
        schema = {} if form.schema_ is None else {"schema": form.schema_}
        return {"type": "json_schema", "json_schema": {**said, **schema}}


def messages_of(items: Sequence[MessageItem | CallItem | CallOutputItem | ReasoningItem]) -> list[Message]:
    """Messages of a chat: what an assistant thought, said and called in a row is one of them."""
    messages = list[Message]()
    open_one: Message | None = None
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            open_one = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            open_one = None
            continue
        is_later = open_one is not None and ("tool_calls" in open_one or open_one["content"])
        if open_one is None or (is_later and not isinstance(item, CallItem)):
            open_one = {"role": "assistant", "content": ""}
            messages.append(open_one)
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
            open_one["reasoning_content"] = open_one.get("reasoning_content", "") + thought
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            open_one.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            open_one["content"] = _text(item.content)
    return messages


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
