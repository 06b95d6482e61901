"""A process that renders a chat template, which is anybody's code, within limits of time and memory.

    python -m treetop.text.render

stdin: a line of JSON {source, tool_use, tokens}, then a line {messages, ...} for each rendering, or null to make the
templates alone. stdout: a line {text}, {error} or {limit} for each: what the template says itself, or which limit it
ran into. A rendering that takes too long ends the process, by a signal of its own.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 2.0
"""Processor time of a rendering."""
_MEMORY_BYTES = 2**30
_MAX_CHARACTERS = 2**24


def make_template(source: str, tokens: dict[str, str]) -> Template:
    """The template as Hugging Face's chat templates expect to be run. Raises TemplateError."""
    extensions: list[type[Extension]] = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    given = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(tokens, **given, dict=_Dict(), namespace=_Names)
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}` and `{% endgeneration %}`: between them stands what trainers learn from. It is text as any."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        begin = next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=begin.lineno)


class _Dict:
    """What makes dicts, and is no class whose attributes lead on."""

    def __call__(self, *args: Any, **members: Any) -> dict[Any, Any]:
        return dict(*args, **members)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Names(Namespace):
    """A namespace that keeps nothing under a name with an underscore first. Raises SecurityError."""

    def __init__(*given: Any, **members: Any) -> None:  # without a name, which a member may have
        names, *args = given
        members = dict(*args, **members)
        for name in members:
            _check_public(name)
        Namespace.__init__(names, members)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace keeps nothing under {name!r}, which begins with an underscore")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """In the order of Hugging Face's, for those that are given by place."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # templates may give it by name
    return datetime.now().astimezone().replace(tzinfo=None).strftime(format)


def made_of(source: str, tool_use: str | None, tokens: dict[str, str]) -> tuple[Template, Template]:
    """What renders without tools, and with them. Raises TemplateError."""
    made = make_template(source, tokens)
    return made, made if tool_use is None else make_template(tool_use, tokens)


def answer(header: str, made: list[tuple[Template, Template]], line: str) -> dict[str, str]:
    """What one rendering gives. made: by `made_of`, once it has been called."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF, if nobody stops it, ends the process
    try:
        if not made:
            made.append(made_of(**json.loads(header)))
        asked = json.loads(line)
        text = "" if asked is None else _rendered(*made[0], {"tools": None, "documents": None, **asked})
    except MemoryError:
        return {"limit": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"limit": "it recurses too deep"}
    except Exception as error:  # it is anybody's code
        words = f"{type(error).__name__}: {error}"[:1000]
        return {"error": words.encode(errors="backslashreplace").decode()}  # a lone surrogate is no text to answer with
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > _MAX_CHARACTERS:
        return {"limit": f"it gives {len(text)} characters, more than {_MAX_CHARACTERS}"}
    return {"text": text}


def _rendered(without_tools: Template, with_tools: Template, asked: dict[str, Any]) -> str:
    return (without_tools if asked["tools"] is None else with_tools).render(asked)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError, OSError):  # where memory cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    header, made = sys.stdin.readline(), list[tuple[Template, Template]]()
    for line in sys.stdin:
        print(json.dumps(answer(header, made, line)), flush=True)


if __name__ == "__main__":
    main()
