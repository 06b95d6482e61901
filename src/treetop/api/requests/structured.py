"""What asks for structured output, in the spellings of OpenAI, vLLM and SGLang."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treetop.types.constraint import StructuredOutput, StructureKind
from treetop.types.errors import InputError, shown

FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
_KINDS: dict[str, StructureKind] = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_OF_VLLM: dict[str, StructureKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "json_object": "json_object",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_WHITESPACE, _VLLM_WHITESPACE = "guided_whitespace_pattern", "whitespace_pattern"
"""Of white space in the JSON that another field asks for; the second is a member of `structured_outputs`."""
_JSON: tuple[StructureKind, ...] = ("json_schema", "structural_tag")
_SAID = ("name", "strict", "description")
"""What OpenAI's clients say of a schema: texts for people, and that the output shall have it, which it always has."""


def structured_output(given: dict[str, Any]) -> tuple[str, StructuredOutput] | None:
    """The field by which a body asks, and what for. given: those of `FIELDS` that are not null.

    Raises InputError, which names the field.
    """
    pattern = given.get(_WHITESPACE)
    others = {name: value for name, value in given.items() if name != _WHITESPACE}
    asked = {name: structure for name, value in others.items() if (structure := _structure(name, value)) is not None}
    if len(asked) > 1:
        raise InputError(f"{', '.join(asked)}: give one of them")
    if pattern is not None and not asked:
        raise InputError(f"{_WHITESPACE}: there is no JSON whose white space it could be; give guided_json, too")
    name, structure = next(iter(asked.items()), ("", None))
    return None if structure is None else (name, _with_whitespace(structure, _WHITESPACE, pattern))


def _with_whitespace(structure: StructuredOutput, where: str, pattern: Any) -> StructuredOutput:
    """where: what says the pattern; None for no pattern."""
    if pattern is None:
        return structure
    try:
        return replace(structure, whitespace=pattern)
    except InputError as error:  # says Python's name for it
        raise InputError(str(error).replace("structured_output: whitespace", where, 1)) from None


def _structure(name: str, value: Any) -> StructuredOutput | None:
    if name in _KINDS:
        return _made(name, _KINDS[name], value)
    if not isinstance(value, dict):
        raise InputError(f"{name}: must be an object, got {shown(value)}")
    return _response_format(value) if name == "response_format" else _structured_outputs(value)


def _response_format(value: dict[str, Any]) -> StructuredOutput | None:
    kind, described = value.get("type"), value.get("json_schema")
    if kind == "structural_tag":
        return _made("response_format", kind, value)
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError(
            f"response_format: type must be text, json_object, json_schema or structural_tag, got {shown(kind)}"
        )
    _check_keys("response_format", value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    if not isinstance(described, dict) or "schema" not in described:
        raise InputError("response_format: json_schema must be an object with a schema")
    _check_keys("response_format.json_schema", described, ("schema", *_SAID))
    return _made("response_format", "json_schema", described["schema"])


def _check_keys(where: str, given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise InputError for a key that would be dropped; null is as if it were not there."""
    unknown = next((name for name, value in given.items() if name not in known and value is not None), None)
    if unknown is not None:
        raise InputError(f"{where}: {shown(unknown)} is not known, only {', '.join(known)}")


def _structured_outputs(value: dict[str, Any]) -> StructuredOutput | None:
    asked = {name: each for name, each in value.items() if each not in (None, False)}
    pattern = asked.pop(_VLLM_WHITESPACE, None)
    unknown = [name for name in asked if name not in _OF_VLLM]
    if unknown:
        known = ", ".join((*_OF_VLLM, _VLLM_WHITESPACE))
        raise InputError(f"structured_outputs: {shown(unknown[0])} is not supported, only {known}")
    if len(asked) > 1:
        raise InputError(f"structured_outputs: {', '.join(asked)}: give one of them")
    made = [_made(f"structured_outputs.{name}", _OF_VLLM[name], each) for name, each in asked.items()]
    if pattern is not None and not made:
        raise InputError(f"structured_outputs.{_VLLM_WHITESPACE}: there is no JSON whose white space it could be")
    return _with_whitespace(made[0], f"structured_outputs.{_VLLM_WHITESPACE}", pattern) if made else None


def _made(where: str, kind: StructureKind, value: Any) -> StructuredOutput:
    """A schema or tags may be given as JSON, or as their text."""
    if kind == "json_object":
        return StructuredOutput(kind)
    if kind == "choice" or (kind in _JSON and not isinstance(value, str)):
        try:
            value = json.dumps(value)
        except RecursionError:
            raise InputError(f"{where}: too deep") from None
    if not isinstance(value, str):
        raise InputError(f"{where}: must be text, got {shown(value)}")
    try:
        return StructuredOutput(kind, value)
    except InputError as error:  # says Python's name for it
        raise InputError(str(error).replace("structured_output", where, 1)) from None
