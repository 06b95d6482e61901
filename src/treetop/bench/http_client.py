"""A small HTTP client for streams of server-sent events: it costs little, so that the server is what is measured.

Connections are kept and used again, as clients with a pool do.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from treetop.types.errors import ConfigError, TreetopError

_MAX_HEADERS = 2**16
_MAX_LINE = 2**24


class HttpError(TreetopError):
    """An answer with an error, or none."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. path: before `/v1`."""

    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Of http://HOST:PORT/PATH, with or without /v1 at its end. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url}: expected http://HOST:PORT")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, path)


@dataclass(slots=True)
class _Kept:
    """A connection. used: a request has been answered over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False


class HttpClient:
    """Requests to one server, any number at a time, within one event loop. Raises HttpError and OSError.

    A connection whose answer was read to its end waits for the next request. One that the server has closed meanwhile
    is replaced by a new one, once for each that waited.
    """

    def __init__(self, address: Address, key: str | None) -> None:
        self._address, self._key = address, key
        self._idle: list[_Kept] = []
        self.num_opened = 0

    async def close(self) -> None:
        """Let go of the connections that wait."""
        while self._idle:
            writer = self._idle.pop().writer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def get(self, path: str) -> Any:
        """The JSON of an answer."""
        return json.loads(b"".join([part async for part in self._ask("GET", path, b"")]))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event, up to [DONE], behind which there is nothing but the end of the answer."""
        rest, ended = b"", False
        async with aclosing(self._ask("POST", path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and not ended:
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            ended = True
                            continue
                        value = json.loads(data)
                        if "error" in value:
                            raise HttpError(f"an event says: {_message(value)}")
                        yield value

    async def _ask(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        at = self._address
        headers = [f"{method} {at.path}{path} HTTP/1.1", f"Host: {at.host}:{at.port}"]
        headers += [f"Authorization: Bearer {self._key}"] * (self._key is not None)
        headers += ["Content-Type: application/json", f"Content-Length: {len(body)}"] * (method == "POST")
        kept, status, answered = await self._sent("\r\n".join([*headers, "", ""]).encode() + body)
        is_whole = False
        try:
            async with aclosing(_body(kept.reader, answered)) as parts:
                if status != 200:
                    raise HttpError(f"HTTP {status}: {_said(b''.join([part async for part in parts]))}")
                async for part in parts:
                    yield part
            is_whole = True
        finally:
            if is_whole and _stays(answered):
                kept.used = True
                self._idle.append(kept)
            else:
                kept.writer.close()

    async def _sent(self, request: bytes) -> tuple[_Kept, int, dict[str, str]]:
        """Where the request was sent, and the head of its answer."""
        while True:
            kept = self._idle.pop() if self._idle else await self._opened()
            try:
                kept.writer.write(request)
                return kept, *await _head(kept.reader)
            except BaseException as error:
                kept.writer.close()
                if not (kept.used and isinstance(error, _GoneError | ConnectionError)):
                    raise

    async def _opened(self) -> _Kept:
        at = self._address
        context = ssl.create_default_context() if at.secure else None
        self.num_opened += 1
        return _Kept(*await asyncio.open_connection(at.host, at.port, ssl=context, limit=_MAX_LINE))


class _GoneError(HttpError):
    """The server ended a connection before it answered."""


def _stays(headers: Mapping[str, str]) -> bool:
    """Whether the connection of an answer that was read may be used again."""
    has_end = "content-length" in headers or "transfer-encoding" in headers
    return has_end and headers.get("connection", "").lower() != "close"


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        said = HttpError if error.partial else _GoneError
        raise said("the connection ended before an answer") from None
    except asyncio.LimitOverrunError:
        raise HttpError("the answer's head has no end") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    words = first.split()
    if len(head) > _MAX_HEADERS or len(words) < 2 or not words[1].isdecimal():
        raise HttpError(f"no HTTP: {first[:100]!r}")
    return int(words[1]), {name.strip().lower(): value.strip() for name, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0] or b"x", 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while (await reader.readline()).strip():
                pass  # trailers, up to an empty line
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while part := await reader.read(2**16):
                yield part
    except (asyncio.IncompleteReadError, ValueError):
        raise HttpError("the connection ended before the answer did") from None


def _said(text: bytes) -> str:
    try:
        return _message(json.loads(text))
    except ValueError:
        return repr(text[:200])


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
