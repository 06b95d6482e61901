"""Ollama's API over the chats and completions that are there: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`.

Source: Ollama's docs/api.md. Answers are JSON lines unless `stream` is false, and its own errors have one member.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from treetop.api.api_state import ApiState
from treetop.api.completions import CompletionRequest, start_completion
from treetop.api.errors import ApiError
from treetop.api.events import Answer, answered, collected, encode, json_response
from treetop.api.limits import MAX_MESSAGES, MAX_PARTS, BodyRoute, FewMembers
from treetop.api.requests.chat_body import ChatRequest, chat_request
from treetop.api.requests.fields import Body, Neutral, Stops
from treetop.api.requests.tools import ToolList
from treetop.api.turn import MessageAccumulator, Turn, start_turn
from treetop.outputs import RequestOutput, TextDelta
from treetop.parsers.events import CallEnd
from treetop.parsers.text_parser import PlainText
from treetop.types.errors import InputError
from treetop.version import __version__

Written = dict[str, Any]

HINTS = (
    "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu",
    "num_keep", "num_thread", "numa", "penalize_newline", "repeat_last_n", "use_mlock", "use_mmap", "vocab_only",
)  # fmt: skip
"""Options of a runner: here the server's own options say them."""
_LATEST = ":latest"


class OllamaOptions(Body):
    """How tokens are chosen. num_predict: -1 and -2 for all that the context holds."""

    neutral, hints = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}, HINTS
    num_predict: int | None = Field(None, ge=-2)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stops | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def said(self) -> dict[str, Any]:
        """As chats and completions say it."""
        said = self.model_dump(exclude_none=True)
        said["repetition_penalty"], most = said.pop("repeat_penalty", None), said.pop("num_predict", -1)
        return {**said, "max_tokens": most if most >= 0 else None}


class OllamaFunction(Body):
    """What was called."""

    name: str
    arguments: Annotated[dict[str, Any], FewMembers] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Body):
    """A call that was made."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """A message. What a tool gave answers the earliest open call, of `tool_name` where that is said."""

    neutral: ClassVar[Neutral] = {"images": ([],)}
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall] | None, Field(max_length=MAX_PARTS)] = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(Body):
    """What both kinds of requests say."""

    hints = ("keep_alive",)
    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = Field(None, description="json, or a JSON schema")
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: str | float | int | None = Field(None, description="taken and not used: the model stays")

    @property
    def said(self) -> dict[str, Any]:
        """As a chat says it. Raises InputError."""
        said = {"model": self.model.removesuffix(_LATEST), "stream": self.stream}
        if self.options is not None:
            said |= self.options.said
        if isinstance(self.format, dict):
            said["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        elif self.format not in (None, ""):
            if self.format != "json":
                raise InputError("format: json, or a JSON schema")
            said["response_format"] = {"type": "json_object"}
        return said

    @property
    def thinking(self) -> dict[str, Any]:
        """As a chat says it."""
        return {"enable_thinking" if isinstance(self.think, bool) else "reasoning_effort": self.think}


class OllamaChat(OllamaRequest):
    """Messages."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: ToolList | None = None

    def chat(self) -> ChatRequest:
        """Raises InputError."""
        tools = None if self.tools is None else [tool.model_dump(exclude_none=True) for tool in self.tools]
        messages = {"messages": _messages(self.messages), "tools": tools}
        return chat_request({**self.said, **self.thinking, **messages}, answers=[])


class OllamaGenerate(OllamaRequest):
    """A prompt: the user's of a chat, or, `raw` or without a chat template, a text that goes on."""

    neutral: ClassVar[Neutral] = {"context": ([],), "images": ([],), "suffix": ("",), "template": ("",)}
    prompt: str = ""
    system: str | None = None
    raw: bool = False

    def chat(self) -> ChatRequest:
        """Raises InputError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return chat_request({**self.said, **self.thinking, "messages": messages}, answers=[])

    def completion(self) -> CompletionRequest:
        """Raises InputError."""
        if self.think:
            raise InputError("think: not where a text goes on (raw)")
        if self.system and not self.raw:
            raise InputError("system: the model has no chat template; serve it with --chat-template FILE")
        said = {name: value for name, value in self.said.items() if value is not None}
        return CompletionRequest.model_validate({**said, "prompt": self.prompt})


class ShowRequest(Body):
    """A model's name."""

    model: str
    verbose: bool | None = None


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """As chats have them: each call has an id, and each result names its call."""
    made, open_calls = list[dict[str, Any]](), list[tuple[str, str]]()
    for place, message in enumerate(messages):
        said: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{place}_{i}", call.function) for i, call in enumerate(message.tool_calls)]
            open_calls += [(call_id, function.name) for call_id, function in calls]
            said["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for call_id, each in calls
            ]
        if message.role == "tool":
            fits = [c for c in open_calls if message.tool_name in (None, c[1]) and message.tool_call_id in (None, c[0])]
            if not fits:
                raise InputError(f"messages[{place}]: no open call before it that it could answer")
            open_calls.remove(fits[0])
            said["tool_call_id"] = fits[0][0]
        made.append(said)
    return made


class OllamaAnswer(Answer):
    """One request as it is answered. What it says is a message of a chat, or `response`."""

    last = b""
    media_type = "application/x-ndjson"

    def __init__(self, turn: Turn, name: str, is_chat: bool) -> None:
        self._turn, self._name, self._is_chat, self._said = turn, name, is_chat, MessageAccumulator()
        self._num_told = 0  # calls that have been told whole
        self._began_ns, self._first_ns = time.perf_counter_ns(), 0

    async def whole(self, request: Request) -> Response:
        told = list[Written]()
        (output,) = await collected(request, self._turn.deltas, lambda delta: told.extend(self._take(delta)))
        message = self._said.message()
        calls = [call for each in told for call in each.get("tool_calls", ())]
        body = {"content": message["content"] or "", "thinking": message.get("reasoning_content"), "tool_calls": calls}
        return json_response(
            {**self._line({k: v for k, v in body.items() if v or k == "content"}), **self._end(output)}
        )

    def first(self) -> Iterator[bytes]:
        return iter(())

    def events(self, delta: TextDelta) -> Iterator[bytes]:
        for body in self._take(delta):
            yield _written({**self._line(body), "done": False})
        if delta.output is not None:
            yield _written({**self._line({"content": ""}), **self._end(delta.output)})

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return _written({"error": str(error)})

    def _take(self, delta: TextDelta) -> Iterator[Written]:
        """What a delta says: text, thoughts, and calls that have ended."""
        self._first_ns = self._first_ns or time.perf_counter_ns()
        events, before = self._turn.read(delta), (len(self._said.content), len(self._said.reasoning))
        self._said.take(events)
        if text := "".join(self._said.reasoning[before[1] :]):
            yield {"content": "", "thinking": text}
        if text := "".join(self._said.content[before[0] :]):
            yield {"content": text}
        for _ in (event for event in events if isinstance(event, CallEnd)):
            call, pieces = self._said.calls[self._num_told]
            self._num_told += 1
            yield {"content": "", "tool_calls": [_call(call.id, call.name, "".join(pieces))]}

    def _line(self, body: Mapping[str, Any]) -> Written:
        head = {"model": self._name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", **body}}
        thinking = {"thinking": body["thinking"]} if "thinking" in body else {}
        return {**head, "response": body["content"], **thinking}

    def _end(self, output: RequestOutput) -> Written:
        now_ns = time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": output.finish_reason,
            "total_duration": now_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": self._first_ns - self._began_ns,
            "eval_count": len(output.token_ids),
            "eval_duration": now_ns - self._first_ns,
        }


class OllamaError(BaseModel):
    """The body of an answer that is an error."""

    error: str


_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": OllamaError}, "5XX": {"model": OllamaError}}
_LINES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}},
    **_ERRORS,
}


def _call(call_id: str, name: str, arguments: str) -> Written:
    try:
        said = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        said = None
    return {"id": call_id, "function": {"name": name, "arguments": said if isinstance(said, dict) else {}}}


def _written(line: Written) -> bytes:
    return encode(line) + b"\n"


def ollama(api: ApiState) -> APIRouter:
    router = APIRouter(route_class=BodyRoute, prefix="/api")

    @router.post("/chat", response_model=None, responses=_LINES)
    async def chat(request: Request, body: OllamaChat) -> Response:
        """Ollama's chat, as JSON lines."""
        turn = await start_turn(api, request, body.chat())
        return await answered(request, turn.deltas, OllamaAnswer(turn, body.model, True), body.stream)

    @router.post("/generate", response_model=None, responses=_LINES)
    async def generate(request: Request, body: OllamaGenerate) -> Response:
        """Ollama's completion, as JSON lines."""
        if body.raw or api.rendering is None:
            turn = await _goes_on(api, request, body.completion())
        else:
            turn = await start_turn(api, request, body.chat())
        return await answered(request, turn.deltas, OllamaAnswer(turn, body.model, False), body.stream)

    @router.get("/tags", response_model=None)
    async def tags() -> Response:
        """Models, as Ollama lists them."""
        return json_response({"models": [_model(api, name) for name in api.names]})

    @router.get("/ps", response_model=None)
    async def running() -> Response:
        """The same: all that is served is loaded."""
        return json_response({"models": [_model(api, name) for name in api.names]})

    @router.post("/show", response_model=None, responses=_ERRORS)
    async def show(body: ShowRequest) -> Response:
        """What Ollama says of a model."""
        api.check_model(body.model.removesuffix(_LATEST))
        template = "" if api.rendering is None else api.rendering.template.source
        able = {
            "completion": True,
            "tools": api.output_format.has_calls,
            "thinking": api.output_format.thinking is not None,
        }
        info = {"general.architecture": "treetop", "treetop.context_length": api.core.info.max_context}
        own = {"template": template, "details": _DETAILS, "model_info": info}
        return json_response({**own, "capabilities": [name for name, has in able.items() if has]})

    @router.get("/version", response_model=None)
    async def version() -> Response:
        """Of treetop."""
        return json_response({"version": __version__})

    return router


async def _goes_on(api: ApiState, request: Request, body: CompletionRequest) -> Turn:
    """Queue a text that goes on."""
    ids, deltas = await start_completion(api, request, body)
    return Turn(ids[0], deltas, [PlainText()])


_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _model(api: ApiState, name: str) -> Written:
    modified = datetime.fromtimestamp(api.created, UTC).isoformat().replace("+00:00", "Z")
    return {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": "", "details": _DETAILS}
