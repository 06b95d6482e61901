"""The folder in which what was found or made on this machine is kept for later."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Where things of a kind are kept; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treetop" / kind
