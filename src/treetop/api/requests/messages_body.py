"""Requests of Anthropic's `/v1/messages`, and the chats that they are."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, FewMembers, check_values
from treetop.api.requests.chat_body import ChatRequest, chat_request
from treetop.api.requests.fields import MAX_STOPS, Body, Neutral
from treetop.api.requests.hints import left_out
from treetop.api.requests.tools import MAX_TOOLS
from treetop.text.chat_input import Message

NEUTRAL: Neutral = {
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "inference_geo": (),
    "output_format": (),
}
"""As `Body.neutral`."""


_OF_PROVIDER = (
    r"^(advisor|bash|code_execution|computer|mcp_toolset|memory|text_editor|tool_search_tool(_bm25|_regex)?|web_fetch|"
    r"web_search)(_[0-9]{8})?$"
)
"""Types of tools of Anthropic's own, most with a date behind them."""


class _Block(Body):
    """cache_control: taken and not used, for every prefix is cached."""

    hints: ClassVar[tuple[str, ...]] = ("cache_control",)
    cache_control: Annotated[dict[str, Any] | None, FewMembers] = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = Field(None, max_length=MAX_PARTS)


class ThinkingBlock(_Block):
    """What was thought. signature: none is needed."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """What another model thought, encrypted: left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    """A call that was made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], FewMembers]
    caller: dict[str, Any] | None = None


class ToolReferenceBlock(_Block):
    """A tool that a search found, among those of `tools`. A model is told its name; it has been shown the tool."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


ResultBlock = Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


class ProviderBlock(BaseModel):
    """What a tool of Anthropic's own servers was asked and gave: left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    type: Literal[
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ProviderBlock,
    Field(discriminator="type"),
]
_NOT_OF = {
    "user": ("thinking", "redacted_thinking", "tool_use"),
    "assistant": ("tool_result",),
    "system": ("thinking", "redacted_thinking", "tool_use", "tool_result"),
}
"""Types of blocks that a role does not say."""
BlockList = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicMessage(_Block):
    """A message. Of role system, in the middle of a conversation: a model reads it as text of the user's."""

    role: Literal["user", "assistant", "system"]
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
    """A tool. Arguments stream whether `eager_input_streaming` is asked or not.

    defer_loading: to be shown once a search finds it; here it is shown at once.
    allowed_callers: a model alone.
    """

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_PARTS)] = None


class ServerTool(BaseModel):
    """A tool that Anthropic's own servers run, or that its models alone know. It is left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    type: Annotated[str, Field(pattern=_OF_PROVIDER)]


def _kind_of_tool(tool: Any) -> str:
    """A tool need not say that it is one."""
    said = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "provider" if isinstance(said, str) and re.search(_OF_PROVIDER, said) else "custom"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[ServerTool, Tag("provider")], Discriminator(_kind_of_tool)
]


class AnthropicToolChoice(Body):
    """Which tool must be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Body):
    """Whether to think. budget_tokens: `thinking_token_budget` of chats."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """What the text is held to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class KeepThinking(Body):
    """So many of the last turns that thought."""

    type: Literal["all", "thinking_turns"]
    value: int | None = Field(None, ge=1)


class ClearThinking(Body):
    """Thoughts of earlier turns go. What is kept is a template's own: most show those since the last user alone."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeepThinking | None = None


class ContextManagement(Body):
    """What goes of a long conversation. Nothing else goes here: a client shortens what it sends."""

    edits: Annotated[list[ClearThinking], Field(max_length=MAX_PARTS)] | None = None


class CountRequest(_Block):
    """What a prompt is made of."""

    neutral = NEUTRAL
    hints: ClassVar[tuple[str, ...]] = ("cache_control", "context_management")
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    context_management: ContextManagement | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

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
        self._say_left_out()
        choice, output = self.tool_choice, self.output_config
        said: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        if self.messages[-1].role == "assistant":
            said["continue_final_message"] = True
        if self.tools:
            said["tools"] = [_tool(tool) for tool in self.tools if isinstance(tool, AnthropicTool)]
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

    def _say_left_out(self) -> None:
        """Tell in the log what is without effect here."""
        for _, block in self._blocks():
            if isinstance(block, ProviderBlock | RedactedThinkingBlock):
                left_out(f"messages: {block.type}", "a block of Anthropic's own is left out")
        edits = self.context_management.edits if self.context_management is not None else None
        if any(edit.keep != "all" for edit in edits or ()):
            left_out(
                "context_management: clear_thinking", "a hint: what is kept of thoughts is the chat template's own"
            )
        for tool in self.tools or ():
            if isinstance(tool, ServerTool):
                left_out(f"tools: {tool.type}", "a tool of Anthropic's own is left out: no model here has it")
            elif tool.defer_loading:
                left_out("tools: defer_loading", "a hint: all tools are shown at once")

    def _messages(self) -> list[Message]:
        system = self.system if isinstance(self.system, str) else _joined(self.system or ())
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        joins = False  # a system's text and the user's beside it are one message: templates want turns
        for message in self.messages:
            if message.role == "assistant":
                messages.append(_of_assistant(message.content))
                continue
            first, *others = _of_user(message.content)
            joins |= message.role == "system"
            if joins and messages and messages[-1]["role"] == first["role"] == "user":
                messages[-1]["content"] += f"\n\n{first['content']}"
            else:
                messages.append(first)
            messages.extend(others)
            joins = message.role == "system"
        return messages


class MessagesRequest(CountRequest):
    """Anthropic's request."""

    hints: ClassVar[tuple[str, ...]] = (*CountRequest.hints, "metadata", "speed")
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
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock | ToolReferenceBlock))
