"""Requests of Anthropic's `/v1/messages`, and the chats that they are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, FewMembers, check_values
from treetop.api.requests.chat_body import ChatRequest, chat_request
from treetop.api.requests.fields import MAX_STOPS, Body, refuse_unsupported
from treetop.api.requests.tools import MAX_TOOLS
from treetop.text.chat_input import Message

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
    "output_format": (),
}
"""As `NEUTRAL` of `api/fields.py`."""


class _Block(Body):
    """cache_control: taken and not used, for every prefix is cached."""

    cache_control: Annotated[dict[str, Any] | None, FewMembers] = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = Field(None, max_length=MAX_PARTS)


class ThinkingBlock(Body):
    """What was thought. signature: none is needed."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    """A call that was made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], FewMembers]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_NOT_OF = {"user": ("thinking", "tool_use"), "assistant": ("tool_result",)}
"""Types of blocks that a role does not say."""
BlockList = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicMessage(Body):
    """A message."""

    role: Literal["user", "assistant"]
    content: str | BlockList

    @field_validator("content")
    @classmethod
    def _of_role(cls, content: str | list[Block], info: ValidationInfo) -> str | list[Block]:
        """Raise for a block that the other role says: nobody would read it."""
        role = info.data.get("role")
        for place, block in enumerate(() if isinstance(content, str) else content):
            if block.type in _NOT_OF.get(role or "", ()):
                told = {"at": f"[{place}].type", "kind": block.type, "role": role}
                raise PydanticCustomError("unsupported", "no '{kind}' in a message of role {role}", told)
        return content


class AnthropicTool(_Block):
    """A tool. Arguments stream whether `eager_input_streaming` is asked or not."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class AnthropicToolChoice(Body):
    """Which tool must be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Body):
    """Whether to think. budget_tokens: `thinking_token_budget` of chats."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)
    display: Literal["summarized"] | None = None


class OutputFormat(Body):
    """What the text is held to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """What a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsupported(cls, values: Any) -> Any:
        return refuse_unsupported(values, NEUTRAL)

    def chat(self, template_options: Mapping[str, Any]) -> ChatRequest:
        """template_options: what follows from `thinking`. Raises InputError."""
        said = {**self._chat(), "chat_template_kwargs": dict(template_options)}
        answers = (f"{place}.tool_use_id" for place, block in self._blocks() if isinstance(block, ToolResultBlock))
        return chat_request(said, answers=[*answers])

    def _blocks(self) -> Iterator[tuple[str, Block]]:
        """With their places."""
        for number, message in enumerate(self.messages):
            if not isinstance(message.content, str):
                yield from ((f"messages[{number}].content[{i}]", block) for i, block in enumerate(message.content))

    def _check_inputs(self) -> None:
        check_values(
            (f"{place}.input", block.input) for place, block in self._blocks() if isinstance(block, ToolUseBlock)
        )

    def _chat(self) -> dict[str, Any]:
        self._check_inputs()
        choice, output = self.tool_choice, self.output_config
        said: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        if self.messages[-1].role == "assistant":
            said["continue_final_message"] = True
        if self.tools:
            said["tools"] = [_tool(tool) for tool in self.tools]
        if self.thinking is not None:
            said["thinking_token_budget"] = self.thinking.budget_tokens
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            said["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
            said["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if output is not None:
            said["reasoning_effort"] = output.effort
            if output.format is not None:
                said["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
        return said

    def _messages(self) -> list[Message]:
        system = self.system if isinstance(self.system, str) else _joined(self.system or ())
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            if message.role == "assistant":
                messages.append(_of_assistant(message.content))
            else:
                messages.extend(_of_user(message.content))
        return messages


class MessagesRequest(CountRequest):
    """Anthropic's request."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, FewMembers] = None

    def _chat(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "max_tokens")
        own = {name: getattr(self, name) for name in names}
        return {**super()._chat(), **own, "stop": self.stop_sequences}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def _of_assistant(content: str | Sequence[BaseModel]) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: Message = {"role": "assistant", "content": _joined(content)}
    if thoughts := [block.thinking for block in content if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in content if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def _of_user(content: str | Sequence[BaseModel]) -> list[Message]:
    """Results of calls are messages of their own, before the text beside them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    for block in content:
        if isinstance(block, ToolResultBlock):
            said = block.content if isinstance(block.content, str) else _joined(block.content or ())
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
    texts = [block for block in content if isinstance(block, TextBlock)]
    if texts or not messages:
        messages.append({"role": "user", "content": _joined(texts)})
    return messages


def _joined(blocks: Sequence[BaseModel]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
