"""A process that renders a chat template, which is anybody's code, within limits of time and memory.

    python -m treetop.text.render

stdin: a line of JSON {source, tokens}, then a line {messages, ...} for each rendering, or null to make the template
alone. stdout: a line {text}, {error} or {limit} for each: what the template says itself, or which limit it ran into.
A rendering that takes too long ends the process, by a signal of its own.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0
"""Processor time of a rendering."""
_MEMORY_BYTES = 2**30
_MAX_CHARACTERS = 2**24


def make_template(source: str, tokens: dict[str, str]) -> Any:
    """The template as Hugging Face's chat templates expect to be run. Raises TemplateError."""
    extensions: list[type[Extension]] = [loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(tokens, raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def answer(header: str, made: list[Any], line: str) -> dict[str, str]:
    """What one rendering gives. made: the template, once it has been made."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF, if nobody stops it, ends the process
    try:
        if not made:
            made.append(make_template(**json.loads(header)))
        asked = json.loads(line)
        text = "" if asked is None else made[0].render(asked)
    except MemoryError:
        return {"limit": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"limit": "it recurses too deep"}
    except Exception as error:  # it is anybody's code
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > _MAX_CHARACTERS:
        return {"limit": f"it gives {len(text)} characters, more than {_MAX_CHARACTERS}"}
    return {"text": text}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError, OSError):  # where memory cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    header, made = sys.stdin.readline(), list[Any]()
    for line in sys.stdin:
        print(json.dumps(answer(header, made, line)), flush=True)


if __name__ == "__main__":
    main()
