"""Tool calls that are JSON objects: {"name": ..., "arguments": {...}}.

What models write beside that is read, too: the object of OpenAI's API, {"type": "function", "function": {...}}, the
name as `function`, arguments as a string of JSON.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

from treetop.parsers.json_text import NO_ENDS, Ends, json_value, mended
from treetop.parsers.source import Steps, Take, TextBuffer
from treetop.parsers.writer import Writer

_ARGUMENTS = ("arguments", "parameters")
_NAME, _FUNCTION = "name", "function"
_KEYS = frozenset((_NAME, _FUNCTION, "type", "id", *_ARGUMENTS))
_QUOTES = ('"', "'")


@dataclass(frozen=True, slots=True)
class CallRules:
    """Of calls that are read.

    names: of the tools that may be called, None for any.
    strict: a call has arguments, and nothing but what a call has.
    ends: tags of the format, at which a call ends that is not closed.
    """

    names: Collection[str] | None = None
    strict: bool = False
    ends: Ends = NO_ENDS


ANY = CallRules()


def json_call(source: TextBuffer, out: Writer, rules: CallRules = ANY) -> Steps[bool]:
    """Read an object that is a call. Returns whether it was one; if it was none, it may have been read in part."""
    if not (yield from source.word("{")):
        return False
    call = _JsonCall(out, rules)
    whole = yield from _members(source, call)
    if whole and not call.begun and call.is_known and not rules.strict:
        call.begin()
    if call.begun and (whole or bool((yield from source.peek())) or source.stopped):
        out.end()
    return call.begun


def json_calls(source: TextBuffer, out: Writer, rules: CallRules = ANY) -> Steps[bool]:
    """Read calls one behind the other, perhaps in a list. Returns whether there was one; of it nothing is kept."""
    is_any = False
    yield from source.space()
    yield from source.word("[")
    while True:
        yield from source.space()
        found = yield from source.word(",", ";", "]")
        if found == "]":
            return is_any
        if not found:
            if not (yield from json_call(source, out, rules)):
                return is_any
            is_any = True
            source.kept()


class _JsonCall:
    """What is known of a call: it begins when it has a name and arguments."""

    def __init__(self, out: Writer, rules: CallRules) -> None:
        self.out, self.rules = out, rules
        self.name: str | None = None
        self.begun = False
        self.waiting: str | None = None  # arguments that came before the name

    @property
    def is_known(self) -> bool:
        return self.name is not None and (self.rules.names is None or self.name in self.rules.names)

    def begin(self) -> None:
        assert self.name is not None
        self.out.start(self.name)
        self.begun = True


def _members(source: TextBuffer, call: _JsonCall) -> Steps[bool]:
    """Read members of an object up to its last bracket. Returns whether all is well."""
    while True:
        yield from source.space()
        found = yield from source.word(",", "}", *_QUOTES)
        if found == "}":
            return True
        if not found:
            return False
        if found in _QUOTES:
            source.back(found)
            if not (yield from _member(source, call)):
                return False


def _member(source: TextBuffer, call: _JsonCall) -> Steps[bool]:
    """Read a member. Returns whether all is well."""
    pieces, ends = list[str](), call.rules.ends
    if not (yield from json_value(source, pieces.append, ends)):
        return False
    key = _string("".join(pieces))
    yield from source.space()
    if (call.rules.strict and key not in _KEYS) or not (yield from source.word(":")):
        return False
    yield from source.space()
    if key == _FUNCTION and call.name is None and (yield from source.word("{")):
        return (yield from _members(source, call))
    if key in _ARGUMENTS and call.name is not None and not call.begun:
        if not call.is_known:
            return False
        call.begin()
        return (yield from _arguments(source, call.out.arguments, ends))
    value = list[str]()
    if key in _ARGUMENTS and not call.begun:
        done = yield from _arguments(source, value.append, ends)
        call.waiting = "".join(value)
        return done
    done = yield from json_value(source, value.append, ends)
    if key in (_NAME, _FUNCTION) and call.name is None:
        if not (yield from source.peek()):
            return False  # it may have been cut off
        call.name = _string("".join(value))
        if call.name is None:
            return False
        if call.waiting is not None and call.is_known:
            call.begin()
            call.out.arguments(call.waiting)
    return done


def _arguments(source: TextBuffer, take: Take, ends: Ends) -> Steps[bool]:
    """Read arguments: an object, or an object's text as a JSON string; null is an empty object."""
    first = yield from source.peek()
    if first and first in "{[":
        return (yield from json_value(source, take, ends))
    pieces = list[str]()
    if not (yield from json_value(source, pieces.append, ends)):
        return False
    text = "".join(pieces)
    said = (_string(text) or "").strip()
    if said[:1] in ("{", "["):
        take(mended(said))
    else:  # at the output's end it is the beginning of anything
        take("{}" if text in ("", "null", '""') or not (yield from source.peek()) else text)
    return True


def _string(text: str) -> str | None:
    """The string that a JSON string is; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
