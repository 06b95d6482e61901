"""A server's folder for what its processes share, and the removal of those that dead servers have left.

An owner holds a lock on a file in its folder. The system lets go of it however the owner ends, so whoever gets the
lock knows that there is no owner any more, of whatever container.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

_PREFIX = "treetop-serve-"
_LOCK = "owner"


@contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder of this user alone (mode 0700), until the end of the block. Sweeps what dead owners have left."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        lock = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: nobody sweeps there
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / "new").rename(folder / _LOCK)  # nobody sees it without its lock
            yield folder
        finally:
            os.close(lock)


def sweep(where: Path) -> None:
    """Remove folders of this user whose owners have ended. One that has no lock file yet has an owner that begins."""
    for folder in where.glob(_PREFIX + "*"):
        with suppress(OSError):  # another sweeps it, or it is held
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
