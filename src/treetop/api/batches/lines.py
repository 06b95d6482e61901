"""The two files of a batch, in OpenAI's format: a request a line, an answer a line.

A line of the input: `{"custom_id": TEXT, "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.
A line of the output: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}`.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from treetop.types.errors import InputError, shown

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MOST_PROBLEMS = 20
"""That are told of one file."""
_LONGEST_ID = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of an input file, by its place there: start and size in bytes."""

    custom_id: str
    url: str
    start: int
    size: int

    def body(self, file: BinaryIO) -> bytes:
        """Of the request, as JSON."""
        file.seek(self.start)
        return json.dumps(json.loads(file.read(self.size))["body"], ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a line, counted from 1."""

    line: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Requests of a file, and what is wrong with it: there is either no problem or nothing to run."""

    lines: tuple[BatchLine, ...]
    problems: tuple[Problem, ...]

    def check(self, name: str) -> None:
        """Raise InputError, with every problem, if there is one."""
        if self.problems:
            told = "; ".join(f"line {each.line}: {each.message}" for each in self.problems[:8])
            more = f"; and {len(self.problems) - 8} more" if len(self.problems) > 8 else ""
            raise InputError(f"{name}: {told}{more}")


def read_input(file: BinaryIO, endpoint: str | None = None, most_lines: int | None = None) -> BatchInput:
    """Look at every line of a file. endpoint: the only one that its requests may name; None for any of `ENDPOINTS`."""
    lines: list[BatchLine] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    start = 0
    for number, raw in enumerate(file, 1):
        if raw.strip():
            try:
                line = _read(raw, start, endpoint)
                if line.custom_id in seen:
                    raise _LineError("duplicate_custom_id", f"custom_id {shown(line.custom_id)} is there twice")
                seen.add(line.custom_id)
                lines.append(line)
            except _LineError as error:
                problems.append(Problem(number, error.code, str(error), error.param))
                if len(problems) == MOST_PROBLEMS:
                    break
        start += len(raw)
        if most_lines is not None and len(lines) > most_lines:
            problems.append(Problem(number, "too_many_requests", f"more than {most_lines} requests"))
            break
    if not lines and not problems:
        problems.append(Problem(1, "empty_file", "there is no request in the file"))
    return BatchInput(tuple(lines), tuple(problems))


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def _read(raw: bytes, start: int, endpoint: str | None) -> BatchLine:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        raise _LineError("invalid_json_line", "no JSON") from None
    if not isinstance(given, dict):
        raise _LineError("invalid_request", "must be an object")
    custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID:
        raise _LineError("missing_required_parameter", "custom_id must be a text of 1 to 512 characters", "custom_id")
    if given.get("method") != "POST":
        raise _LineError("invalid_method", "method must be POST", "method")
    if not isinstance(url, str) or url not in allowed:
        raise _LineError("invalid_url", f"url must be {' or '.join(allowed)}, got {shown(url)}", "url")
    if not isinstance(body, dict):
        raise _LineError("missing_required_parameter", "body must be an object", "body")
    if body.get("stream") or body.get("background"):
        raise _LineError("unsupported_parameter", "nobody could read a stream: leave stream and background out", "body")
    if unknown := given.keys() - {"custom_id", "method", "url", "body"}:
        raise _LineError("unknown_parameter", f"unknown members: {', '.join(map(shown, sorted(unknown)))}")
    return BatchLine(custom_id, url, start, len(raw))


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output. body: of the answer, whatever its status; text that is no JSON is kept as text."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        content = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return _line({"id": _new_id(), "custom_id": custom_id, "response": response, "error": None})


def unasked_line(custom_id: str, code: str, message: str) -> bytes:
    """The same for a request that was not made."""
    error = {"code": code, "message": message}
    return _line({"id": _new_id(), "custom_id": custom_id, "response": None, "error": error})


def answered_ids(path: Path) -> Iterator[str]:
    """Whose answers a file has. What a kill has left of a line at its end is cut off. Raises InputError."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = 0
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                custom_id = json.loads(raw)["custom_id"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path}: line {number}: no answer of a batch; name another file") from None
            end += len(raw)
            yield custom_id
        file.truncate(end)
        os.fsync(file.fileno())


def _new_id() -> str:
    return f"batch_req_{uuid4().hex}"


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
