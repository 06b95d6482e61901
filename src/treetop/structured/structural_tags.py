"""Structural tags: free text in which certain tags may come, and what stands in a tag has a schema.

The form is that of vLLM and SGLang: `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`. A text may
hold any number of tags. Once a trigger has come, one of the tags that begin with it has to follow.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

_MAX_TAGS = 256
_MAX_TEXT = 1000
"""Characters of a trigger, of what begins a tag and of what ends it."""


class Tag(NamedTuple):
    """trigger: a beginning of `begin`, and of no other trigger's text.
    schema: what stands between `begin` and `end`.
    """

    trigger: str
    begin: str
    schema: dict[str, Any]
    end: str


def lark_of(spec: str, special_id: Callable[[str], int | None], with_space: Callable[[Any], Any]) -> str:
    """A grammar of tags in Lark's syntax as llguidance reads it.

    special_id: of a text that is a special token. with_space: a schema that says what white space there may be.

    Raises ValueError for what describes no tags.
    """
    tags = _tags(spec)
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    lines = ["%llguidance {}", f"start: ({names})* text", "text: TEXT", r"TEXT: /(.|\n)*/"]
    for number, tag in enumerate(tags):
        rest = f"{_quoted(tag.begin[len(tag.trigger) :])} %json {json.dumps(with_space(tag.schema))} {_quoted(tag.end)}"
        if (special := special_id(tag.trigger)) is not None:
            lines.append(f"tag_{number}: TEXT <[{special}]> {rest}")
        else:  # a lazy lexeme ends where the trigger first comes
            lines += [f"begin_{number}[lazy]: TEXT {_quoted(tag.trigger)}", f"tag_{number}: begin_{number} {rest}"]
    return "\n".join(lines)


def _tags(spec: str) -> list[Tag]:
    try:
        given = json.loads(spec)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("structures"), list):
        raise ValueError("structural_tag needs an object with structures and triggers")
    structures, triggers = given["structures"], given.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(_is_text(each) and each for each in triggers):
        raise ValueError("structural_tag needs triggers, a list of texts that are not empty")
    if not 1 <= len(structures) <= _MAX_TAGS or len(triggers) > _MAX_TAGS:
        raise ValueError(f"structural_tag needs 1 to {_MAX_TAGS} structures and triggers")
    return [_tag(each, triggers) for each in structures]


def _tag(given: Any, triggers: list[str]) -> Tag:
    known = given if isinstance(given, dict) else {}
    begin, schema, end = known.get("begin"), known.get("schema"), known.get("end")
    if not (_is_text(begin) and _is_text(end) and isinstance(schema, dict)):
        raise ValueError("structural_tag: each of structures needs begin and end, which are texts, and a schema")
    fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
    if len(fitting) != 1:
        raise ValueError(f"structural_tag: {begin[:40]!r} must begin with one of the triggers, and with no other")
    return Tag(fitting[0], begin, schema, end)


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
