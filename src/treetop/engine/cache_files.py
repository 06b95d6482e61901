"""Files that a start leaves for later ones, in the user's cache folder: what was measured or probed on this machine."""

import logging
import os
from pathlib import Path

log = logging.getLogger("treetop")


def cache_file(kind: str, made_for: str) -> Path:
    """Where what was found for `made_for`, a hash of all that it depends on, is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "treetop" / kind / f"{made_for}.json"


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
