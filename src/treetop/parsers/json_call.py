"""Tool calls that are JSON objects: {"name": ..., "arguments": {...}}."""

import json
import re
from collections.abc import Collection

from treetop.parsers.source import Source, Steps, Take
from treetop.parsers.writer import Writer

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "type", "id", *_ARGUMENTS))


def json_value(source: Source, take: Take) -> Steps[bool]:
    """Read a JSON value as it is written. Returns whether it is complete.

    Only strings and brackets are followed: what else is wrong in it is for whoever parses it.
    """
    first = yield from source.peek()
    if first == "" or first not in '"{[':
        yield from source.before(_AFTER_SCALAR, take)
        return bool((yield from source.peek()))
    depth = 0
    while True:
        found = yield from source.through(_OUTSIDE, take)
        if found == '"':
            if not (yield from _rest_of_string(source, take)):
                return False
        elif not found:
            return False
        else:
            depth += 1 if found in "{[" else -1
        if depth <= 0:
            return True


def _rest_of_string(source: Source, take: Take) -> Steps[bool]:
    while True:
        found = yield from source.through(_INSIDE, take)
        if found != "\\":
            return bool(found)
        yield from source.one(take)


def json_call(source: Source, out: Writer, names: Collection[str] | None = None, strict: bool = False) -> Steps[bool]:
    """Read an object that is a call. Returns whether it was one; if it was none, it may have been read in part.

    names: of the tools that may be called, None for any. strict: it has arguments, and nothing but what a call has.
    """
    call = _Call(out, names)
    if not (yield from source.word("{")):
        return False
    while True:
        yield from source.space()
        found = yield from source.word(",", "}", '"')
        if found == ",":
            continue
        if found == "}":
            break
        if not found or not (yield from _member(source, call, strict)):
            return call.begun
    if call.name is None or (strict and not call.begun) or not call.is_known:
        return False
    if not call.begun:
        call.begin()
    out.end()
    return True


class _Call:
    """What is known of a call: it begins when it has a name and arguments."""

    def __init__(self, out: Writer, names: Collection[str] | None) -> None:
        self.out, self._names = out, names
        self.name: str | None = None
        self.begun = False
        self.waiting: str | None = None  # arguments that came before the name

    @property
    def is_known(self) -> bool:
        return self._names is None or self.name in self._names

    def begin(self) -> None:
        assert self.name is not None
        self.out.start(self.name)
        self.begun = True


def _member(source: Source, call: _Call, strict: bool) -> Steps[bool]:
    """Read a member behind its first quote. Returns whether all is well."""
    pieces = list[str]()
    if not (yield from _rest_of_string(source, pieces.append)):
        return False
    key = _string('"' + "".join(pieces))
    yield from source.space()
    if (strict and key not in _KEYS) or not (yield from source.word(":")):
        return False
    yield from source.space()
    if key in _ARGUMENTS and call.name is not None and not call.begun:
        if not call.is_known:
            return False
        call.begin()
        return (yield from _arguments(source, call.out.arguments))
    value = list[str]()
    if key in _ARGUMENTS and not call.begun:
        done = yield from _arguments(source, value.append)
        call.waiting = "".join(value)
        return done
    done = yield from json_value(source, value.append)
    if key == "name" and call.name is None:
        call.name = _string("".join(value))
        if call.name is None:
            return False
        if call.waiting is not None and call.is_known:
            call.begin()
            call.out.arguments(call.waiting)
    return done


def _arguments(source: Source, take: Take) -> Steps[bool]:
    """Read arguments: an object, or an object's text as a JSON string; null is an empty object."""
    first = yield from source.peek()
    if first and first in "{[":
        return (yield from json_value(source, take))
    pieces = list[str]()
    done = yield from json_value(source, pieces.append)
    text = "".join(pieces)
    said = _string(text)
    if not done:
        return False
    take("{}" if text == "null" or said == "" else text if said is None else said)
    return done


def _string(text: str) -> str | None:
    """The string that a JSON string is; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
