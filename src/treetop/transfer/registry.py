"""Where prefill workers say that they are there: a folder with a file for each, which is renewed while it lives."""

import hashlib
import time
from contextlib import suppress
from pathlib import Path

from treetop.types.errors import ConfigError

_MOST_BYTES = 300


class Registry:
    """A folder that several hosts may share. stale_s: after which a file without renewal says nothing.

    Raises ConfigError if it is no folder.
    """

    def __init__(self, folder: str, stale_s: float) -> None:
        self._folder, self._stale_s = Path(folder), stale_s
        if not self._folder.is_dir():
            raise ConfigError(f"--peer-registry {folder}: there is no such folder")
        self._own: Path | None = None

    def announce(self, address: str) -> None:
        """Say, or say again, that a worker is there. What cannot be written is left for the next time."""
        name = hashlib.sha256(address.encode()).hexdigest()[:32]
        self._own = self._folder / f"{name}.peer"
        new = self._folder / f".{name}"
        with suppress(OSError):
            new.write_text(address + "\n", encoding="utf-8")
            new.replace(self._own)

    def withdraw(self) -> None:
        if self._own is not None:
            with suppress(OSError):
                self._own.unlink()

    def addresses(self) -> list[str]:
        """Of those that are there, in order; none if the folder cannot be read."""
        found = []
        with suppress(OSError):
            for file in self._folder.glob("*.peer"):
                with suppress(OSError, ValueError):
                    fresh = time.time() - file.stat().st_mtime < self._stale_s
                    if fresh and file.stat().st_size <= _MOST_BYTES:
                        found.append(file.read_text(encoding="utf-8").strip())
        return sorted(found)
