"""Lines of a process's log on stderr, as text or as JSON: one format for a server and all that it starts."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

FORMAT = "TREETOP_LOG_FORMAT"
"""How `--log-format` reaches processes: those that a server starts have its environment."""
FIELDS = "fields"
"""Of a record: what JSON says beside the message, by name."""


class JsonLines(logging.Formatter):
    """An object a line: time (UTC), level, logger, message, pid, and what the record has in `FIELDS`."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who.removesuffix(": ")

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **({"who": self._who} if self._who else {}),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def is_json() -> bool:
    return os.environ.get(FORMAT) == "json"


def log_to_stderr(level: int, text: str, who: str = "", filters: Sequence[logging.Filter] = ()) -> None:
    """text: the format of a line that is no JSON, behind who, which tells one process from another."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(who) if is_json() else logging.Formatter(who + text))
    for each in filters:
        handler.addFilter(each)
    logging.basicConfig(level=level, handlers=[handler])


def say(message: str) -> None:
    """A line of the program itself."""
    if is_json():
        record = logging.LogRecord("treetop.server", logging.INFO, "", 0, message, None, None)
        message = JsonLines("").format(record)
    print(message, file=sys.stderr, flush=True)
