"""Requests of `/v1/responses`, and the chats that they are."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, FewMembers, check_values
from treetop.api.requests.chat_body import ChatRequest, chat_request
from treetop.api.requests.extra_fields import UnusedFields
from treetop.api.requests.fields import Body, CacheSalt, Neutral
from treetop.api.requests.hints import left_out
from treetop.api.requests.tools import MAX_TOOLS, AnyText, Function, FunctionName, Grammar
from treetop.parsers.custom import arguments_of
from treetop.text.chat_input import Message
from treetop.types.errors import InputError

NEUTRAL: Neutral = {
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
}
"""As `Body.neutral`."""


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
    """A call that was made. namespace: of its function, if it was in one."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(_Echoed):
    """A call of a custom tool that was made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> str:
        """As a model writes them."""
        return arguments_of(self.input)


class CallOutputItem(_Echoed):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | ItemParts


class ProviderItem(_Echoed):
    """What a tool of OpenAI's own did, or its state: nothing that another model is told."""

    type: Literal[
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]


class ReasoningText(_Echoed):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Echoed):
    """What was thought."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] = []
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


_OF_PROVIDER = frozenset(get_args(ProviderItem.model_fields["type"].annotation))


def _tag_of(item: Any) -> str:
    """A message need not say that it is one."""
    said = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    if not isinstance(said, str):
        return ""
    if said == "custom_tool_call_output":
        return "function_call_output"
    return "item of the provider" if said in _OF_PROVIDER else said


AnyItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | ProviderItem
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ProviderItem, Tag("item of the provider")],
    Discriminator(_tag_of),
]
ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[Item])
"""Of what was kept."""


class ResponseTool(Function):
    """A function that may be called. defer_loading: to be shown once a search finds it; here it is shown at once."""

    type: Literal["function"]
    defer_loading: bool | None = None

    def chat_tool(self, name: str) -> dict[str, Any]:
        """As chats have it, by the name that a model is shown."""
        said = self.model_dump(exclude={"type", "defer_loading"}, exclude_none=True)
        return {"type": "function", "function": {**said, "name": name}}


class ResponseGrammar(Grammar):
    """What the text of a custom tool is."""

    type: Literal["grammar"]


class ResponseCustomTool(FunctionName):
    """A tool that is given a text and no object; see `CustomTool`."""

    type: Literal["custom"]
    description: str | None = None
    format: Annotated[AnyText | ResponseGrammar, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None

    def chat_tool(self, name: str) -> dict[str, Any]:
        """As chats have it, by the name that a model is shown."""
        custom: dict[str, Any] = {"name": name, "description": self.description}
        if isinstance(self.format, ResponseGrammar):
            custom["format"] = {"type": "grammar", "grammar": self.format.model_dump(exclude={"type"})}
        return {"type": "custom", "custom": custom}


OwnTool = Annotated[ResponseTool | ResponseCustomTool, Field(discriminator="type")]


class NamespaceTool(Body):
    """Tools of one name. A model is shown each as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ProviderTool(BaseModel):
    """A tool that OpenAI's own servers run, or that its models alone know. It is left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


AnyTool = Annotated[ResponseTool | ResponseCustomTool | NamespaceTool | ProviderTool, Field(discriminator="type")]


class ResponseToolChoice(FunctionName):
    """The tool that must be called."""

    type: Literal["function", "custom"]

    @property
    def of_chat(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"name": self.name}}


class AllowedResponseTools(Body):
    """As `AllowedTools` of chats."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[ResponseToolChoice | ProviderTool, Field(discriminator="type")]] = Field(
        min_length=1, max_length=MAX_TOOLS
    )

    @property
    def of_chat(self) -> dict[str, Any]:
        named = [each.of_chat for each in self.tools if isinstance(each, ResponseToolChoice)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": named}}


class TextFormat(Body):
    """What the text is held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Of the text. verbosity: a hint that no model here is given."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Of the reasoning, which comes as it is: there are no summaries. effort: a hint, where a template knows it."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ConversationName(Body):
    """A conversation that is kept."""

    id: str


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(UnusedFields, Body):
    """OpenAI's request."""

    neutral, hints = NEUTRAL, (*UnusedFields.model_fields, "client_metadata")
    model: str | None = None
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, description="all that the context holds by default")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool = False
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[ResponseToolChoice | AllowedResponseTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = Field(None, description="go on with it, and add to it")
    background: bool = Field(False, description="answer at once, and go on; GET /v1/responses/ID has what came of it")
    store: bool = Field(True, description="keep it, for GET /v1/responses/ID and previous_response_id")
    include: list[Included] | None = Field(
        None,
        description="reasoning comes in plain text, which may be sent back; of tools of OpenAI's own there is nothing",
    )
    client_metadata: Annotated[dict[str, Any] | None, FewMembers] = None
    priority: int = 0
    cache_salt: CacheSalt = None
    timeout: float | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, FewMembers] = None
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31, description="as of chats")

    @model_validator(mode="after")
    def _together(self) -> "ResponsesRequest":
        """Raise for what excludes each other."""
        if self.conversation is not None and self.previous_response_id is not None:
            raise PydanticCustomError("unsupported", "not with previous_response_id", {"at": ".conversation"})
        if self.background and not self.store:
            raise PydanticCustomError("unsupported", "only with store", {"at": ".background"})
        return self

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @cached_property
    def items(self) -> Sequence[AnyItem]:
        """The input. Raises InputError for more than a chat may hold."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=[InputText(type="input_text", text=self.input)])]
        calls = ((number, item) for number, item in enumerate(self.input) if isinstance(item, CallItem))
        check_values((f"input[{number}].arguments", call.arguments) for number, call in calls)
        return self.input

    def chat(self, before: Sequence[AnyItem]) -> ChatRequest:
        """before: items that the input goes on with. Raises InputError."""
        messages = messages_of([*before, *self.items])
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice | AllowedResponseTools):
            choice = choice.of_chat
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            left_out("text.verbosity", "a hint that no model here is given")
        names = ("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "priority", "timeout")
        more = ("chat_template_kwargs", "thinking_token_budget", "cache_salt")
        return chat_request(
            {
                **{name: getattr(self, name) for name in (*names, *more)},
                "messages": [*system, *messages],
                "max_completion_tokens": self.max_output_tokens,
                "tools": [tool.chat_tool(name) for name, (tool, _) in self.own_tools.items()],
                "tool_choice": choice,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "response_format": self._response_format(),
            },
            self._answers(),
            self._grammar_places(),
        )

    @cached_property
    def own_tools(self) -> dict[str, tuple[ResponseTool | ResponseCustomTool, str | None]]:
        """Those that are not OpenAI's own, by the name that a model is shown, and their namespaces.

        Raises InputError.
        """
        named = list[tuple[str, tuple[ResponseTool | ResponseCustomTool, str | None]]]()
        for tool in self.tools or ():
            if isinstance(tool, ProviderTool):
                left_out(f"tools: {tool.type}", "a tool of OpenAI's own is left out: no model here has it")
            elif isinstance(tool, NamespaceTool):
                named += [(shown_name(each.name, tool.name), (each, tool.name)) for each in tool.tools]
            else:
                named.append((tool.name, (tool, None)))
        found = dict(named)
        if len(found) < len(named):
            raise InputError("tools: two have one name")
        if any(tool.defer_loading for tool, _ in found.values()):
            left_out("tools: defer_loading", "a hint: all tools are shown at once")
        return found

    def _grammar_places(self) -> list[str]:
        """Of each of `own_tools`."""
        places = list[str]()
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, NamespaceTool):
                places += [f"tools[{index}].tools[{inner}].format" for inner in range(len(tool.tools))]
            elif not isinstance(tool, ProviderTool):
                places.append(f"tools[{index}].format")
        return places

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


def shown_name(name: str, namespace: str | None) -> str:
    """What a model is shown of a tool's name."""
    return name if namespace is None else f"{namespace}.{name}"


def messages_of(items: Sequence[AnyItem]) -> list[Message]:
    """Messages of a chat: what an assistant thought, said and called in a row is one of them."""
    messages = list[Message]()
    open_one: Message | None = None
    for item in items:
        if isinstance(item, ProviderItem):
            left_out(
                f"input: {item.type}", "an item of OpenAI's own tools is left out: it says nothing to a model here"
            )
            continue
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            open_one = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            open_one = None
            continue
        is_later = open_one is not None and ("tool_calls" in open_one or open_one["content"])
        if open_one is None or (is_later and not isinstance(item, CallItem | CustomCallItem)):
            open_one = {"role": "assistant", "content": ""}
            messages.append(open_one)
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
            open_one["reasoning_content"] = open_one.get("reasoning_content", "") + thought
        elif isinstance(item, CallItem | CustomCallItem):
            function = {"name": shown_name(item.name, item.namespace), "arguments": item.arguments}
            open_one.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            open_one["content"] = _text(item.content)
    return messages


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
