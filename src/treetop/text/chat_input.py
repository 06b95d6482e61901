"""What callers ask of a chat, checked before a template sees it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treetop.types.errors import InputError, shown

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, or GPT-OSS's the second."""


def conversations_of(given: object) -> list[list[Message]]:
    """Each conversation: a list of messages is one. Raises InputError for what is none.

    As Transformers gives messages to templates: without members that are None, and reasoning under the names they read.
    """
    listed = _listed("conversations", given)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for at, conversation in enumerate(conversations):
        where = "conversation" if conversation is listed else f"conversation {at}"
        for number, message in enumerate(_listed(where, conversation)):
            if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
                raise InputError(
                    f"{where}: message {number} must be a dict with role and content, got {shown(message)}"
                )
    return [[*map(_as_read, conversation)] for conversation in conversations]


def _as_read(message: Message) -> Message:
    said = {name: value for name, value in message.items() if value is not None}
    given = [said[name] for name in _REASONING if name in said]
    if given:  # in this order, which a template may show
        said = dict([("thinking", given[0]), *said.items()])
        said["reasoning_content"] = given[0]
    return said


def rendering(messages: Sequence[Message], options: Mapping[str, object]) -> str:
    """A line of JSON: the template's variables. Raises InputError, which names the first that is no JSON."""
    asked = {"messages": list(messages), "add_generation_prompt": True, **options}
    try:
        return json.dumps(asked)
    except (TypeError, ValueError, RecursionError):
        parts = {f"message {number}": message for number, message in enumerate(messages)}
        raise InputError(_first_wrong({**parts, **options})) from None


def _first_wrong(parts: Mapping[str, object]) -> str:
    for name, value in parts.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            return f"chat: {name} is no JSON: {error}"
    return "chat: messages and options together are no JSON"


def _listed(what: str, given: object) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise InputError(f"{what} must be a list of messages, each a dict with role and content, got {shown(given)}")
    return [*given]
