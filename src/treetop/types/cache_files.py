"""Files that a start leaves for later ones, in the user's cache folder: what was measured or probed on this machine."""

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from treetop.types.user_cache import user_cache

log = logging.getLogger("treetop")

_MAX_BYTES = 2**26
"""Of a file that is read; ours have some kilobytes."""


def cache_file(kind: str, made_for: str) -> Path:
    """Where what was found for `made_for`, a hash of all that it depends on, is kept."""
    return user_cache(kind) / f"{made_for}.json"


def kept(file: Path) -> Any:
    """The JSON that a start has left; None for a file that is not there or is none of ours, whatever it is."""
    try:
        return json.loads(file.read_bytes()) if file.is_file() and file.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def keep(file: Path, text: str) -> None:
    """Write it, whole or not at all. A folder that cannot be written to is no error: the next start finds it out again.

    Several processes may keep the same file at a time.
    """
    own = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)
        own.replace(file)
    except OSError as error:
        log.info("%s: nothing is kept: %s", file.parent.name, error)


def keep_first(file: Path, text: str) -> Any:
    """As `keep`, but that of several processes the first one's stays. Returns the JSON that is kept, or this one."""
    own = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)
        try:
            if file.exists() and kept(file) is None:
                file.unlink()  # none of ours
            file.hardlink_to(own)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    except OSError as error:
        log.info("%s: nothing is kept: %s", file.parent.name, error)
    found = kept(file)
    return json.loads(text) if found is None else found
