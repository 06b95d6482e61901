"""Options that commands share: a flag for each row of a table of options."""

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from treetop.types.config import EngineConfig
from treetop.types.errors import InputError
from treetop.types.options import Option, flag, options_of
from treetop.types.sampling import SamplingParams

_METAVAR = {int: "N", float: "X", str: "TEXT"}


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model, and flags of all engine options. Returns the group of those that stand for another one's value."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=options_of(EngineConfig)["model"].help)
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what the engine is made of")
    add_flags(parser, EngineConfig, but=("model",))
    parser.set_defaults(takes_engine=True)
    aliases = parser.add_argument_group("the same in vLLM's and SGLang's words")
    graphs = {"dest": "graphs", "action": "store_const", "const": "off", "help": "as --graphs off"}
    aliases.add_argument("--enforce-eager", "--disable-cuda-graph", **graphs)  # type: ignore[arg-type]  # of many kinds
    overlap = {"dest": "overlap", "action": "store_false", "default": None, "help": "as --no-overlap"}
    aliases.add_argument("--disable-overlap-schedule", **overlap)  # type: ignore[arg-type]  # of many kinds
    cached = {"dest": "disable_radix_cache", "action": "store_false", "default": None, "help": "the default"}
    aliases.add_argument("--enable-prefix-caching", **cached)  # type: ignore[arg-type]  # of many kinds
    return aliases


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Flags of how tokens are chosen and when a completion ends. `--seed` is the engine's: prompts draw theirs."""
    add_flags(parser, SamplingParams)


def add_flags(parser: argparse._ActionsContainer, kind: type, but: Collection[str] = ()) -> None:
    """A flag for each option of a table; None unless it is given, so that the default stays the option's own."""
    for each in options_of(kind).values():
        if each.dest is not None and each.name not in but:
            _add_flag(parser, each)


def _add_flag(parser: argparse._ActionsContainer, row: Option) -> None:
    words = "" if row.default_words is None or "(default" in row.help else f" (default {row.default_words})"
    given: dict[str, Any] = {"dest": row.dest, "default": None, "help": row.help + words}
    if row.base is bool:
        given["action"] = argparse.BooleanOptionalAction if row.optional else "store_true"
    else:
        item = str if row.base not in (int, float) else row.base
        given |= {"type": row.read or item, "choices": row.choices or None}
        given["metavar"] = None if row.choices else row.metavar or _METAVAR[item]
        if row.several:
            given |= {"action": "extend", "nargs": "+"}
        elif isinstance(row.default, tuple) and row.read is None:
            given["action"] = "append"
    assert row.flag is not None
    parser.add_argument(row.flag, *row.aliases, **given)


def given_options(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The options of a table that were given, of those that the command has; the others keep their defaults."""
    flags = {name: row.dest for name, row in options_of(kind).items() if row.dest is not None}
    return {name: value for name, dest in flags.items() if (value := getattr(args, dest, None)) is not None}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, but for the model."""
    return {name: value for name, value in given_options(args, EngineConfig).items() if name != "model"}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options that were given. Raises InputError, which names them as flags."""
    given = given_options(args, SamplingParams)
    try:
        return SamplingParams(**given)
    except InputError as error:  # its sentences begin with the parameter's name
        raise InputError(re.sub(rf"(^|; )({'|'.join(given)})\b", lambda m: m[1] + flag(m[2]), str(error))) from None


def simulation(args: argparse.Namespace) -> str | None:
    """The option that makes outputs wrong, if one does."""
    names = "simulate_accept_length", "simulate_acceptance"
    return next((flag(name) for name in names if getattr(args, name) is not None), None)


def read_prompt(name: str) -> str:
    """The text of a `--prompt-file`."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null byte in the name
        raise InputError(f"--prompt-file {name}: {error}") from None
