"""What messages of a chat must have and may have beside what templates are known to read."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from treetop.api.errors import ApiError
from treetop.api.requests.hints import UNKNOWN_LEFT_OUT, left_out
from treetop.types.errors import close_name, shown

if TYPE_CHECKING:
    from treetop.api.requests.chat_body import ChatMessage

_OF_API = ("role", "content", "name", "tool_calls", "tool_call_id")
_ECHOED = (
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
    "provider_specific_fields",
)
"""What official clients send back of an answer; the last is LiteLLM's, who keeps there what is not OpenAI's."""
_NEED_TEXT = ("system", "developer", "user")


def check_messages(messages: "Sequence[ChatMessage]", template: str, answers: Mapping[int, str]) -> None:
    """Raise ApiError, which names the place, for what nobody would read, or what an answer could not be about.

    template: its source. What it reads may be in a message. answers: of `ChatRequest`.
    """
    taken = {*_OF_API, *_ECHOED, *re.findall(r"\w+", template)}
    calls: set[str | None] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_members(where, message.model_extra or {}, taken)
        if message.content is None and message.role in _NEED_TEXT:
            raise _wrong(f"{where}.content", f"a message of role {message.role} needs text", "invalid_type")
        calls.update(call.id for call in message.tool_calls or ())
        if message.role == "tool":
            _check_answer(answers.get(index, f"{where}.tool_call_id"), message, calls)


def _check_members(where: str, extra: Mapping[str, object], taken: set[str]) -> None:
    for name, value in extra.items():
        if name not in taken and value not in (None, "", [], {}):
            if UNKNOWN_LEFT_OUT.get():
                left_out(f"messages: {name}", "an unknown field is left out (--ignore-unknown-fields)")
                continue
            meant = close_name(name, (*_OF_API, *_ECHOED))
            hint = f"; did you mean `{meant}`?" if meant else ", which the chat template does not read"
            raise _wrong(f"{where}.{name[:100]}", f"unknown field{hint}", "unknown_parameter")


def _check_answer(where: str, message: "ChatMessage", calls: set[str | None]) -> None:
    """calls: ids of the calls before. One without an id may be any."""
    said = (message.model_extra or {}).get("tool_call_id")
    if not isinstance(said, str):
        raise _wrong(where, "a message of role tool needs it, as text", "missing_required_parameter")
    if said not in calls and None not in calls:
        raise _wrong(where, f"no call before it has the id {shown(said)}", "invalid_value")


def _wrong(path: str, text: str, code: str) -> ApiError:
    return ApiError(400, f"{path}: {text}", path, code)
