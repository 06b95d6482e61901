"""What `/v1/responses` and `/v1/conversations` keep: records of JSON by id, bounded, in memory or in a file."""

import json
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from treetop.types.errors import ConfigError

Record = dict[str, Any]
Result = TypeVar("Result")

MOST_BYTES, KEPT_S = 2**26, 3600.0
"""Of memory."""
MOST_BYTES_OF_FILE, KEPT_S_IN_FILE = 2**30, 30 * 24 * 3600.0
_ENTRY = 256
"""Bytes of a record beside its id and its JSON."""
_WAIT_S = 5.0
"""For another process that writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS kept (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, until_s REAL NOT NULL,
    size INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS ends ON kept (until_s);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS grows AFTER INSERT ON kept BEGIN UPDATE total SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS shrinks AFTER DELETE ON kept BEGIN UPDATE total SET bytes = bytes - OLD.size; END;
"""


class ResponseStore:
    """Records by id, each with an owner, to whom alone it is given. The oldest make room; too large a one is not kept.

    SQLite's, on a thread of its own, so that no answer waits for a disk; what is asked is done in its order.
    """

    def __init__(
        self,
        path: str | None = None,
        most_bytes: int | None = None,
        kept_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """path: of a file, which several processes may share; None for memory. most_bytes: of all, counted.

        Raises ConfigError, which names the option, for a file that cannot be one.
        """
        self._most_bytes = most_bytes or (MOST_BYTES if path is None else MOST_BYTES_OF_FILE)
        self._kept_s = kept_s or (KEPT_S if path is None else KEPT_S_IN_FILE)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "responses")
        try:
            self._db = self._thread.submit(_opened, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"--responses-db {path}: {error}") from None

    def put(self, record_id: str, owner: str, record: Record) -> Future[None]:
        """Keep it, in place of an earlier one of its id; whoever asks later is given it."""
        return self._thread.submit(self._in_one, partial(self._put, record_id, owner, record))

    def get(self, record_id: str, owner: str) -> Future[Record | None]:
        """None for one that is not known to this owner, or not any more."""
        return self._thread.submit(self._get, record_id, owner)

    def change(self, record_id: str, owner: str, change: Callable[[Record], Record]) -> Future[Record | None]:
        """Put what `change` makes of a record in its place, at once; None if it is not known."""
        return self._thread.submit(self._in_one, partial(self._change, record_id, owner, change))

    def delete(self, record_id: str, owner: str) -> Future[bool]:
        """Whether it was there."""
        return self._thread.submit(self._in_one, partial(self._delete, record_id, owner))

    def close(self) -> None:
        """Once what was asked is done."""
        self._thread.submit(self._db.close)
        self._thread.shutdown()

    def _in_one(self, work: Callable[[], Result]) -> Result:
        """As one transaction."""
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            return work()

    def _put(self, record_id: str, owner: str, record: Record) -> None:
        db, body, now_s = self._db, _written(record), self._clock()
        size = len(body) + len(record_id) + _ENTRY
        db.execute("DELETE FROM kept WHERE id = ?", (record_id,))
        if size <= self._most_bytes:
            row = record_id, owner, now_s + self._kept_s, size, body
            db.execute("INSERT INTO kept (id, owner, until_s, size, body) VALUES (?, ?, ?, ?, ?)", row)
        db.execute("DELETE FROM kept WHERE until_s <= ?", (now_s,))
        while db.execute("SELECT bytes FROM total").fetchone()[0] > self._most_bytes:
            db.execute("DELETE FROM kept WHERE place = (SELECT min(place) FROM kept)")

    def _get(self, record_id: str, owner: str) -> Record | None:
        asked = "SELECT body FROM kept WHERE id = ? AND owner = ? AND until_s > ?"
        found = self._db.execute(asked, (record_id, owner, self._clock())).fetchone()
        return None if found is None else _read(found[0])

    def _change(self, record_id: str, owner: str, change: Callable[[Record], Record]) -> Record | None:
        found = self._get(record_id, owner)
        if found is None:
            return None
        record = change(found)
        self._put(record_id, owner, record)
        return record

    def _delete(self, record_id: str, owner: str) -> bool:
        asked = "DELETE FROM kept WHERE id = ? AND owner = ? AND until_s > ?"
        return bool(self._db.execute(asked, (record_id, owner, self._clock())).rowcount)


def _opened(path: str | None) -> sqlite3.Connection:
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # conversations are nobody else's business
        if not Path(path).is_file():
            raise OSError("no regular file")
    db = sqlite3.connect(path or ":memory:", timeout=_WAIT_S, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.executescript(_SCHEMA)
    return db


def _written(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _read(body: bytes) -> Record:
    record: Record = json.loads(body.decode("utf-8", "surrogatepass"))
    return record
