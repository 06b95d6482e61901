"""Arguments that a format writes as text between tags: their JSON follows from the tools' schemas."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from treetop.parsers.json_text import OF_PYTHON, escaped, mended, refuse
from treetop.parsers.source import Markers, Steps, Take, TextBuffer
from treetop.parsers.writer import Writer
from treetop.types.constraint import is_utf8

_DEEP = 8
"""Levels of a schema's alternatives that are looked at."""
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class Tools:
    """The tools of a request, as their schemas have them. Whatever a schema holds, there is an answer."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """schemas: of each tool's parameters, by its name."""
        self._schemas = schemas

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._schemas)

    def parameters(self, tool: str) -> list[str]:
        """Names of its parameters, in their order."""
        schema = self._schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return [*properties] if isinstance(properties, dict) else []

    def admits(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that an argument may have; empty if nothing is said of it."""
        schema = self._schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return _admitted(properties.get(parameter) if isinstance(properties, dict) else None, _DEEP)


def _admitted(schema: Any, deep: int) -> frozenset[str]:
    if not isinstance(schema, dict) or not deep:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(each for each in said if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_KINDS[type(value)] for value in values if type(value) in _KINDS)
    branches = [_admitted(each, deep - 1) for name in ("anyOf", "oneOf") for each in _listed(schema.get(name))]
    return frozenset().union(*branches) if all(branches) else frozenset()


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


class ValueEnds:
    """What ends a value between tags: its own end, or any other tag of the format, which then comes again."""

    def __init__(self, own: Sequence[str], others: Sequence[str]) -> None:
        self.markers = Markers(*own, *others, *(f"\n{tag}" for tag in others))
        self.others = frozenset(self.markers.words) - {*own}


class TaggedArguments:
    """Writes the arguments of one call as an object, member by member."""

    def __init__(self, source: TextBuffer, out: Writer, tools: Tools, tool: str) -> None:
        self._source, self._out, self._tools, self._tool = source, out, tools, tool
        self._any = False

    def read(self, name: str, ends: ValueEnds, is_text: bool | None = None) -> Steps[bool]:
        """Read the value of a parameter up to its end. Returns whether it has come to it; at a stop it has.

        is_text: whether it is a text, else JSON; None where the schema decides.
        """
        admits = self._tools.admits(self._tool, name)
        if is_text is not None:
            admits = frozenset({"string"}) if is_text else frozenset()
        self._out.arguments((", " if self._any else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._any = True
        if admits == {"string"}:
            self._out.arguments('"')
            done = yield from self._text(ends, lambda text: self._out.arguments(escaped(text)))
            self._out.arguments('"' if done else "")
            return done
        pieces = list[str]()
        done = yield from self._text(ends, pieces.append)
        if done:
            self._out.arguments(as_json("".join(pieces), admits))
        return done

    def _text(self, ends: ValueEnds, take: Take) -> Steps[bool]:
        """The beginning of a tag that waits at the output's end is no text: it would have been one."""
        source = self._source
        found = yield from source.until(ends.markers, lambda text: None if source.ended else take(text))
        if found in ends.others:
            source.back(found or "")
        return found is not None or source.stopped

    def end(self) -> None:
        self._out.arguments("}" if self._any else "{}")
        self._out.end()


def bare(name: str) -> str:
    """A name without the blanks and quotes that may stand around it."""
    return name.strip().strip("\"'").strip()


def as_json(text: str, admits: frozenset[str]) -> str:
    """The JSON of an argument that is written as text: a value of one of these types, else a string.

    Where a list or an object is meant, it may be one of Python's.
    """
    said = OF_PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(said, parse_constant=refuse)
    except (ValueError, RecursionError):
        meant = {"[": "array", "{": "object"}.get(said[:1])
        is_python = meant in admits and "string" not in admits
        return json_of_python(said) if is_python else json.dumps(text, ensure_ascii=False)
    kind = _KINDS[type(value)]
    fits = not admits or kind in admits or (kind == "integer" and "number" in admits)
    return said if fits or "string" not in admits else json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """The JSON of a value of Python's, or of JSON; of what is neither, the JSON of the text."""
    said = text.strip()
    try:
        return _written(ast.literal_eval(said))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return _written(json.loads(said, parse_constant=refuse))
    except (ValueError, RecursionError):
        return mended(said) if said[:1] in ("[", "{") else _written(said)


def _written(value: object) -> str:
    """JSON, with escapes where an escape of the value's stands for what UTF-8 cannot write."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_utf8(text) else json.dumps(value, allow_nan=False)
