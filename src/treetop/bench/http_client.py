"""A small HTTP client for streams of server-sent events: it costs little, so that the server is what is measured."""

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


class Connection:
    """One request, one connection. Raises HttpError and OSError."""

    def __init__(self, address: Address, key: str | None) -> None:
        self._address, self._key = address, key

    async def get(self, path: str) -> Any:
        """The JSON of an answer."""
        return json.loads(b"".join([part async for part in self._ask("GET", path, b"")]))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event, up to [DONE]."""
        rest = b""
        async with aclosing(self._ask("POST", path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        value = json.loads(data)
                        if "error" in value:
                            raise HttpError(f"an event says: {_message(value)}")
                        yield value

    async def _ask(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        at = self._address
        context = ssl.create_default_context() if at.secure else None
        reader, writer = await asyncio.open_connection(at.host, at.port, ssl=context, limit=_MAX_LINE)
        try:
            headers = [f"{method} {at.path}{path} HTTP/1.1", f"Host: {at.host}:{at.port}", "Connection: close"]
            headers += [f"Authorization: Bearer {self._key}"] * (self._key is not None)
            headers += ["Content-Type: application/json", f"Content-Length: {len(body)}"] * (method == "POST")
            writer.write("\r\n".join([*headers, "", ""]).encode() + body)
            status, answered = await _head(reader)
            async with aclosing(_body(reader, answered)) as parts:
                if status != 200:
                    raise HttpError(f"HTTP {status}: {_said(b''.join([part async for part in parts]))}")
                async for part in parts:
                    yield part
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise HttpError("the connection ended before an answer") from None
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
