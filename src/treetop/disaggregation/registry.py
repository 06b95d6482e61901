"""Where prefill workers say that they are there: a folder with a file for each, which is renewed while it lives."""

import hashlib
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from treetop.types.errors import ConfigError

_MAX_BYTES = 300


class Registry:
    """A folder that several hosts may share.

    stale_s: after which a file without renewal says nothing.

    Raises ConfigError if it is no folder.
    """

    def __init__(self, folder: str, stale_s: float) -> None:
        self._folder, self._stale_s = Path(folder), stale_s
        if not self._folder.is_dir():
            raise ConfigError(f"--disaggregation-registry {folder}: there is no such folder")

    def announce(self, address: str) -> None:
        """Say, or say again, that a worker is there. What cannot be written is left for the next time."""
        file = _file_of(self._folder, address)
        new = file.with_name(f".{file.stem}")
        with suppress(OSError):
            new.write_text(address + "\n", encoding="utf-8")
            new.replace(file)

    def addresses(self) -> list[str]:
        """Of those that are there, in order; none if the folder cannot be read."""
        found = []
        with suppress(OSError):
            for file in self._folder.glob("*.peer"):
                with suppress(OSError, ValueError):
                    fresh = time.time() - file.stat().st_mtime < self._stale_s
                    if fresh and file.stat().st_size <= _MAX_BYTES:
                        found.append(file.read_text(encoding="utf-8").strip())
        return sorted(found)


def withdraw(folder: str, addresses: Iterable[str]) -> None:
    """Of workers that have ended: nobody has to wait until what they said is old."""
    for address in addresses:
        with suppress(OSError):
            _file_of(Path(folder), address).unlink()


def _file_of(folder: Path, address: str) -> Path:
    return folder / f"{hashlib.sha256(address.encode()).hexdigest()[:32]}.peer"
