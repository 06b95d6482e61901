"""Files and batches in a folder, which processes may share: a record of JSON each, files with their bytes beside it.

Each is given to its owner alone. All calls wait for the disk: they are for threads.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from treetop.types.errors import ConfigError

Record = dict[str, Any]
Kind = Literal["file", "batch"]

KEPT_S = 30 * 24 * 3600
_ENTRY = 4096
"""Bytes of a file beside its own."""
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
ENDED = ("completed", "failed", "cancelled", "expired")


class StoreFullError(Exception):
    """What is to be kept has no room."""


class BatchStore:
    """The folder. Records are replaced as a whole, so that a reader or a kill sees one version of each."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises ConfigError, which names the option, for a folder that cannot be one."""
        self._folder, self._most_bytes = folder, most_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(0, "it cannot be written to")
        except OSError as error:
            raise ConfigError(f"--batch-dir {folder}: {error.strerror}") from None

    def room(self) -> int:
        """Bytes that are left."""
        return self._most_bytes - sum(each.stat().st_size + _ENTRY for each in self._folder.glob("*.data"))

    def get(self, record_id: str, owner: str) -> Record | None:
        """What a caller is shown. None for one that is not known to this owner."""
        held = self._read(record_id)
        return None if held is None or held["owner"] != owner else self._shown(held["shown"])

    def list(self, kind: Kind, owner: str) -> list[Record]:
        """Oldest first."""
        held = (self._read(path.stem) for path in self._folder.glob(f"{kind}-*.json"))
        mine = (self._shown(each["shown"]) for each in held if each is not None and each["owner"] == owner)
        return sorted(mine, key=lambda record: (record["created_at"], record["id"]))

    def put(self, owner: str, record: Record) -> None:
        path = self._path(record["id"], "json")
        new = path.with_suffix(f".{uuid4().hex}.new")
        with new.open("w", encoding="utf-8") as file:
            json.dump({"owner": owner, "shown": record}, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    # ------------------------------------------------------------------ files

    def add_file(self, owner: str, name: str, purpose: str, content: bytes) -> Record:
        """Raises StoreFullError."""
        self._sweep()
        if len(content) + _ENTRY > self.room():
            raise StoreFullError(f"{len(content)} bytes of --batch-bytes {self._most_bytes}, {self.room()} are left")
        file_id = new_id("file")
        with self.data(file_id).open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        return self.show_file(owner, file_id, name, purpose)

    def show_file(self, owner: str, file_id: str, name: str, purpose: str) -> Record:
        """Let a file whose bytes are there be seen from now on."""
        now_s = int(time.time())
        record = {
            "id": file_id,
            "object": "file",
            "bytes": self.data(file_id).stat().st_size,
            "created_at": now_s,
            "expires_at": now_s + KEPT_S,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self.put(owner, record)
        return record

    def data(self, file_id: str) -> Path:
        """The bytes of a file."""
        return self._path(file_id, "data")

    def delete(self, record_id: str) -> None:
        for kind in ("json", "data", "cancel", "lock"):
            self._path(record_id, kind).unlink(missing_ok=True)

    # ------------------------------------------------------------------ batches

    def unfinished(self) -> Iterator[tuple[str, Record]]:
        """Owner and record of each batch that has not ended, oldest first."""
        held = (self._read(path.stem) for path in self._folder.glob("batch-*.json"))
        open_ones = [each for each in held if each is not None and each["shown"]["status"] not in ENDED]
        for each in sorted(open_ones, key=lambda each: int(each["shown"]["created_at"])):
            yield each["owner"], each["shown"]

    @contextmanager
    def held(self, batch_id: str) -> Iterator[bool]:
        """Whether nobody else runs a batch; if so, nobody will until the end of the block or of this process."""
        lock = os.open(self._path(batch_id, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True
        finally:
            os.close(lock)

    def cancel(self, batch_id: str) -> None:
        """Ask whoever runs it to end it."""
        self._path(batch_id, "cancel").touch(mode=0o600)

    def is_cancelled(self, batch_id: str) -> bool:
        return self._path(batch_id, "cancel").exists()

    # ------------------------------------------------------------------ inside

    def _shown(self, record: Record) -> Record:
        asked = record["object"] == "batch" and record["status"] not in ENDED and self.is_cancelled(record["id"])
        return {**record, "status": "cancelling"} if asked else record

    def _path(self, record_id: str, kind: str) -> Path:
        return self._folder / f"{record_id}.{kind}"

    def _read(self, record_id: str) -> Record | None:
        if not _ID.fullmatch(record_id):
            return None
        try:
            held: Record = json.loads(self._path(record_id, "json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return held

    def _sweep(self) -> None:
        """Remove what is too old. A batch that runs holds its own files until it ends."""
        now_s, in_use = time.time(), set[str]()
        for _, batch in self.unfinished():
            in_use |= {batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]}
        for path in self._folder.glob("*.json"):
            held = self._read(path.stem)
            record = {} if held is None else held["shown"]
            ends_s = record.get("created_at", now_s) + KEPT_S
            if ends_s < now_s and path.stem not in in_use and record.get("status") not in ("validating", "in_progress"):
                self.delete(path.stem)
        for path in self._folder.glob("*.new"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now_s - 3600:
                    path.unlink()


def new_id(kind: Kind) -> str:
    return f"{kind}-{uuid4().hex}"
