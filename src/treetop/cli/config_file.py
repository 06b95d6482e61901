"""The configuration file of `treetop serve`: YAML of its flags, which becomes words of its command line."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetop.cli.environment import with_words
from treetop.cli.serve import add_options, check_packages
from treetop.types.errors import ConfigError


def with_config_file(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """The command line with the flags of `--config FILE` before its own. Raises ConfigError."""
    check_packages()
    import yaml  # of the serve extra

    where = f"--config {args.config}"
    try:
        given = yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{where}: expected flags and their values, as in `context-length: 4096`")
    return with_words(argv, words_of(given, where))


def words_of(given: Mapping[str, Any], where: str) -> list[str]:
    """Flags without dashes, and their values, as words of a command line. Raises ConfigError that begins with where."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    bare = {word for action in parser._actions if action.nargs == 0 for word in action.option_strings}
    words: list[str] = []
    for name, value in given.items():
        words += _words("--" + name.replace("_", "-"), value, where, bare)
    return words


def _words(name: str, value: Any, where: str, bare: Collection[str]) -> list[str]:
    """bare: flags without a value."""
    if name == "--config":
        raise ConfigError(f"{where}: config files do not nest")
    if value is True:
        return [name]
    if value is False and (off := name.replace("--", "--no-", 1)) in bare:
        return [off]
    if value is False and name in bare:
        return []
    if value is False:
        raise ConfigError(f"{where}: {name[2:]} is no flag that can be false")
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in listed):
        raise ConfigError(f"{where}: {name[2:]} must be text, a number, true or false, or a list of these")
    return [f"{name}={each}" for each in listed]
