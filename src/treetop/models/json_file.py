"""Reading the JSON files of a model folder. What is in them is anybody's, so whatever is wrong is a CheckpointError."""

import json
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError

_MOST_BYTES = 2**28
"""Of a file that is read as JSON; real ones have a few megabytes."""
_MOST_DIGITS = 64
"""Longer integers are read as floating point, where the largest are infinite: they are refused by key and bound."""


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError if it is missing, no file, too large, no JSON, or something else."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {not_there(path)}")
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, more than {_MOST_BYTES}")
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


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)
