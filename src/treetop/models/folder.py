"""Where a model's folder is, and what its `generation_config.json` says. Needs no PyTorch."""

import os
import stat
from importlib import resources
from pathlib import Path
from typing import Any

from treetop.models.hub import hub_folder, is_hub_id
from treetop.models.json_file import integers, read_object
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError
from treetop.types.options import options_of

BUILTIN_PREFIX = "builtin:"
_MAX_SHOWN = 256
"""Characters of a folder's name in an error."""


def resolve_folder(name: str, option: str = "model") -> Path:
    """The checkpoint's folder: `builtin:NAME` lies in the package; else a path, or `org/name[@revision]` of the hub.

    option: under which it was given. Raises CheckpointError, which names it, if there is no folder that can be read.
    """
    shown = f"{'model' if option == 'model' else options_of(EngineConfig)[option].flag} {_short(name)}"
    if name.startswith(BUILTIN_PREFIX):
        assets = Path(str(resources.files("treetop") / "assets"))
        known = {BUILTIN_PREFIX + path.name: path for path in assets.iterdir() if path.is_dir()}
        if name not in known:
            raise CheckpointError(f"{shown}: no such builtin model; known are {', '.join(sorted(known))}")
        return known[name]
    folder = Path(name)
    try:
        if not name or not stat.S_ISDIR(folder.stat().st_mode):
            raise CheckpointError(f"{shown}: not a folder")
    except (FileNotFoundError, NotADirectoryError):
        if is_hub_id(name):
            return hub_folder(name, shown)
        raise CheckpointError(f"{shown}: no such folder") from None
    except (OSError, ValueError) as error:  # too long a name, a null byte, a folder above that is closed
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise CheckpointError(f"{shown}: {reason}") from None
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{shown}: no permission to read this folder")
    return folder


def _short(name: str) -> str:
    """A name for an error of one line."""
    shown = name if name.isprintable() and name else repr(name)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}... ({len(name)} characters)"


def generation_config(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says, unchecked; {} without one. Raises CheckpointError if it cannot be read."""
    path = folder / "generation_config.json"
    return read_object(path) if os.path.lexists(path) else {}


def extra_eos_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids that `generation_config.json` names beside those of `config.json`."""
    return integers(generation_config(folder), "eos_token_id", folder / "generation_config.json")
