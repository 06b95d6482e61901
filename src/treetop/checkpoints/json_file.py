"""Reading the JSON files of a model folder. What is in them is anybody's, so whatever is wrong is a CheckpointError."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown

MAX_TOKENS = 2**24
"""Of a vocabulary."""
_MAX_BYTES = 2**28
"""Of a file that is read as JSON; real ones have a few megabytes."""
_MAX_DIGITS = 64
"""Longer integers are read as floating point, where the largest are infinite: they are refused by key and bound."""


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError if it is missing, no file, too large, no JSON, or something else."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}")
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, more than {_MAX_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except RecursionError:
        raise CheckpointError(f"{path}: not readable as JSON: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def not_there(path: Path) -> str:
    """Why there is no file at `path`: words for an error."""
    if path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, which is not there"
    return "not a file" if path.exists() else "no such file"


def integers(config: Mapping[str, Any], key: str, where: Path) -> tuple[int, ...]:
    """An integer or a list of them; () if there is none. -1 stands for none in some files."""
    value = config.get(key)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) or not -1 <= each <= MAX_TOKENS for each in listed):
        raise CheckpointError(
            f"{where}: {key} must be an integer or a list of integers, from -1 to {MAX_TOKENS}, got {shown(value)}"
        )
    return tuple(listed)


def custom_code(config: Mapping[str, Any]) -> str | None:
    """The Python that a config names as the model's own (`auto_map`), as words for a message; None if it names none."""
    named = config.get("auto_map")
    return None if named is None else f"auto_map names code of its own ({shown(named)}), which is never run"


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)
