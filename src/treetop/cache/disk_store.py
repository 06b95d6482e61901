"""Pages of K/V in files, a page each: bounded, checksummed, the least recently used gone first.

    FOLDER/engine-0/lock          held by the engine that uses it; the next engine takes the next folder
    FOLDER/engine-0/made-for      what its pages are of; an engine of anything else begins with none
    FOLDER/engine-0/KEY.page      magic, key, length, digest, bytes

They are of what users said, so no other user of the machine may read them.

A file gets its name once it is whole, so a kill while one is written leaves no page; what it leaves is removed at the
next start. Files are not forced to the disk: what a power cut leaves torn is told by its digest, as any other damage.
"""

import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from treetop.types.errors import ConfigError

log = logging.getLogger("treetop")

KEY_BYTES = 16
_HEAD = Struct(f"<8s{KEY_BYTES}sQ16s")
_MAGIC = b"treekv1\n"
_END = ".page"
_MOST_ENGINES = 256
RETRY_S = 30.0
"""For which nothing is written after a disk refused it."""

Views = Sequence[memoryview]
"""The bytes of a page, in parts."""


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    with open(path, "wb", buffering=0, opener=_open_own) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) or 0 :]


class DiskStore:
    """Files of pages by key. `read` and `write` may be called on threads, each key by one at a time; so may `stamp`."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        made_for: str,
        write: Callable[[Path, Iterable[bytes | memoryview]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """made_for: all that pages depend on beside their tokens.

        Raises ConfigError for a folder that cannot be had.
        """
        self._max_bytes, self._write, self._clock = max_bytes, write or _write, clock
        self._guard = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.num_bytes = self.num_damaged = 0
        self._quiet_until_s = -RETRY_S
        try:
            self._lock, self.folder = _own_folder(folder)
            self._begin(made_for)
        except OSError as error:
            raise ConfigError(f"--kv-offloading-folder {folder}: {error}") from None

    def _begin(self, made_for: str) -> None:
        """What is here and may be used; all else goes."""
        note = self.folder / "made-for"
        known = note.is_file() and note.read_bytes() == made_for.encode()
        found = list[tuple[int, bytes, int]]()
        for path in self.folder.iterdir():
            key = _key_of(path)
            if known and key is not None:
                status = path.stat()
                found.append((status.st_mtime_ns, key, status.st_size))
            elif path.name not in ("lock", "made-for"):
                path.unlink()
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self.num_bytes += size
        self._make_room(0)
        if not known:
            with open(note, "wb", opener=_open_own) as file:
                file.write(made_for.encode())

    # ---------------------------------------------------------------- pages

    def holds(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def used(self, keys: Sequence[bytes]) -> None:
        """These have been used just now, the first last: a page is of no use without those before it."""
        with self._guard:
            for key in reversed(keys):
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    def stamp(self, keys: Sequence[bytes]) -> None:
        """Tell the next engine that these have been used just now, the first last. It takes a while, for a thread."""
        now = time.time_ns()
        for before, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now, now - 1000 * before))

    def write(self, key: bytes, views: Views) -> bool:
        """Keep a page. False if the disk refuses it: nothing is written then for a while."""
        size = _HEAD.size + sum(len(view) for view in views)
        if self._clock() < self._quiet_until_s or size > self._max_bytes:
            return False
        with self._guard:
            self._make_room(size)
        path = self._path(key)
        made = path.with_suffix(".part")
        try:
            self._write(made, [_HEAD.pack(_MAGIC, key, size, _digest(views)), *views])
            made.replace(path)
        except OSError as error:
            with suppress(OSError):
                made.unlink(missing_ok=True)
            self._quiet_until_s = self._clock() + RETRY_S
            log.warning("K/V are not written to %s for %g s: %s", self.folder, RETRY_S, error.strerror or error)
            return False
        with self._guard:
            self.num_bytes += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._sizes.move_to_end(key)
        return True

    def read(self, key: bytes, views: Views) -> bool:
        """Fill a page. False, and the file is gone, if it is not what was written: the views then hold nothing."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(_HEAD.size) or b""
                whole = len(head) == _HEAD.size and all(_fill(file, view) for view in views) and not file.read(1)
            size = _HEAD.size + sum(len(view) for view in views)
            if whole and _HEAD.unpack(head) == (_MAGIC, key, size, _digest(views)):
                return True
        except FileNotFoundError:  # evicted meanwhile
            return False
        except OSError as error:
            log.warning("%s: %s", path, error.strerror or error)
        log.error("K/V on the disk are damaged, and computed again: %s", path)
        with self._guard:
            self.num_damaged += 1
            self._drop(key)
        return False

    def _make_room(self, size: int) -> None:
        while self._sizes and self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._sizes)))

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self.folder / (key.hex() + _END)

    def close(self) -> None:
        """Another engine may use the folder."""
        os.close(self._lock)


def _own_folder(folder: Path) -> tuple[int, Path]:
    """The first that no living engine has. Its lock ends with the process that holds it, however that ends."""
    for number in range(_MOST_ENGINES):
        own = folder / f"engine-{number}"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # of an earlier version, and not where another user made it
            own.chmod(0o700)
        lock = os.open(own / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return lock, own
    raise OSError(f"{_MOST_ENGINES} engines use it already")


def _key_of(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.name.removesuffix(_END)) if path.name.endswith(_END) else b""
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def _fill(file: "object", view: memoryview) -> bool:
    """Whether there were as many bytes."""
    left = view
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]  # of an unbuffered file
        if not count:
            return False
        left = left[count:]
    return True


def _digest(views: Views) -> bytes:
    found = blake2b(digest_size=16)
    for view in views:
        found.update(view)
    return found.digest()
