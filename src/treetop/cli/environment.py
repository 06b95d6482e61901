"""Options from the environment: `TREETOP_MAX_RUNNING_REQUESTS=32` says what `--max-running-requests 32` says.

A variable counts where its flag is not on the command line; it comes before a configuration file. An empty one is none.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treetop.serve_options import ServeOptions
from treetop.types.config import EngineConfig
from treetop.types.default_model import VARIABLE
from treetop.types.errors import ConfigError, close_name, shown
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.options import Option, options_of, variable
from treetop.types.sampling import SamplingParams

_TABLES = (EngineConfig, SamplingParams, ServeOptions, DisaggregationOptions)
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MODEL, _CONFIG = variable("--model"), variable("--config")
_OTHERS = {"TREETOP_FAULT", "TREETOP_FA3_LIBRARY", "TREETOP_DISAGGREGATION_SECRET", "TREETOP_HANDOVER_SECRET", VARIABLE}
_OF_OTHERS = re.compile(r"TREETOP_TESTS\w*|\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")
"""Variables of the tests, and those that each container in Kubernetes gets for a service called treetop-something."""


def environment_words(args: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Words of a command line for the variables whose flags were not given.

    args: what was given, of a command with an engine. Of a configuration file they are told, too.
    Raises ConfigError, which names each variable that is wrong.
    """
    words: list[str] = []
    problems: list[str] = []
    if getattr(args, "config", "") is None and environment.get(_CONFIG):
        args.config = environment[_CONFIG]
        words.append(f"--config={args.config}")
    if (model := environment.get(_MODEL)) and _names_no_model(args):
        if model.startswith("-"):
            problems.append(f"{_MODEL} must name a model, got {shown(model)}")
        words.append(model)
    for row in _rows():
        text = environment.get(row.variable)
        if not text or row.name == "model" or getattr(args, str(row.dest), True) not in (None, False):
            continue
        try:
            words += _words(row, text)
        except ValueError as error:
            problems.append(f"{row.variable} {error}")
    if problems:
        raise ConfigError("; ".join(problems))
    return words


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """A line on stderr for each variable that is nearly one of ours."""
    known = {row.variable for row in _rows()} | {_MODEL, _CONFIG} | _OTHERS
    for name in environment:
        is_strange = name.startswith("TREETOP_") and name not in known and not _OF_OTHERS.fullmatch(name)
        if is_strange and (meant := close_name(name, known)):
            print(f"treetop: {name} is no option; did you mean {meant}?", file=sys.stderr)


def _names_no_model(args: argparse.Namespace) -> bool:
    return getattr(args, "model", "") is None and getattr(args, "model_flag", None) is None


def _rows() -> Iterator[Option]:
    return (row for table in _TABLES for row in options_of(table).values() if row.dest is not None)


def _words(row: Option, text: str) -> list[str]:
    """Raises ValueError with what the text must be."""
    if row.base is bool:
        value = _SWITCH.get(text.strip().lower())
        if value is None:
            raise ValueError(f"must be true or false, got {shown(text)}")
        off = [str(row.flag).replace("--", "--no-", 1)] if row.optional else []
        return [str(row.flag)] if value else off
    several = row.several or (isinstance(row.default, tuple) and row.read is None)
    return [f"{row.flag}={_checked(row, each)}" for each in (text.split() if several else [text])]


def _checked(row: Option, text: str) -> str:
    if row.read is not None:
        row.read(text)
    if row.base in (int, float):
        try:
            number: Any = row.base(text)
        except ValueError:
            why = "; a service of that name in Kubernetes sets it, unless enableServiceLinks is false"
            hint = why if re.match(r"\w+://", text) else ""
            raise ValueError(f"must be {row.kind.words}, got {shown(text)}{hint}") from None
        if wrong := row.outside(number, brackets=False):
            raise ValueError(wrong)
    if row.choices and text not in row.choices:
        raise ValueError(f"must be one of {', '.join(row.choices)}, got {shown(text)}")
    return text


def with_words(argv: Sequence[str], words: Sequence[str]) -> list[str]:
    """A command line with words after its command, before those that were given."""
    return [*argv[:1], *words, *argv[1:]]
