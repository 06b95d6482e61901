"""How much a body may hold, so that reading and checking one holds up nobody else.

A `BodyMeter` counts what comes, piece by piece, before anything is made of it. What is within its bounds is read by a
fast parser, and lists end at their first wrong item: a union of lists is told apart by its first item, so that one kind
of error is made, once.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Annotated, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError, from_json
from starlette.exceptions import HTTPException

from treetop.api.requests.hints import UNKNOWN_LEFT_OUT
from treetop.types.errors import InputError

MAX_OBJECTS = 2**17
"""Texts, lists and objects of a body; keys are texts. Each takes Python some 70 bytes or more, however short it is."""
MAX_VALUES = 2**21
"""Items and members of a body in all, numbers included."""
MAX_MEMBERS = 1024
"""Of an object whose members have names of ours."""
MAX_MESSAGES, MAX_PARTS = 8192, 1024
MAX_CHAT_VALUES = 2**17
"""Values of a chat's call arguments together, or of its template options: each is read and written again as JSON."""
MAX_STOP_IDS, MAX_ALLOWED_IDS = 1024, 2**18
_PIECE = 2**16


class ByteMeter:
    """Counts the bytes of a body as they come."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self.num_bytes = most_bytes, 0

    def take(self, piece: bytes) -> None:
        """Raises HTTPException for one byte too many."""
        self.num_bytes += len(piece)
        if self.num_bytes > self._most_bytes:
            raise HTTPException(413, too_large(self._most_bytes))


class BodyMeter(ByteMeter):
    """Counts a body as it comes. Whatever is no JSON passes, too: the parser will say so."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self._rest, self._inside = b"", 0  # half an escape; 1 inside a text, else 0
        self.num_quotes = self.num_brackets = self.num_commas = 0

    def take(self, piece: bytes) -> None:
        """Raises HTTPException for one byte, text, list, object or value too many."""
        super().take(piece)
        for start in range(0, len(piece), _PIECE):
            self.count(piece[start : start + _PIECE])
            if self.num_quotes // 2 + self.num_brackets > MAX_OBJECTS:
                raise HTTPException(400, f"the body has more than {MAX_OBJECTS} texts, lists and objects")
            if self.num_commas + self.num_brackets > MAX_VALUES:
                raise HTTPException(400, f"the body has more than {MAX_VALUES} values")

    def count(self, piece: bytes) -> None:
        """Without bounds."""
        text = (self._rest + piece).replace(b"\\\\", b"")  # what is left of backslashes escapes what follows
        self._rest = b"\\" if text.endswith(b"\\") else b""
        parts = text.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._inside ^= (len(parts) - 1) & 1
        self.num_quotes += len(parts) - 1
        self.num_brackets += outside.count(b"[") + outside.count(b"{")
        self.num_commas += outside.count(b",")


def too_large(most_bytes: int) -> str:
    return f"the body has more than {most_bytes} bytes (--max-body-bytes, max_bodies_bytes of a key)"


class BodyRequest(Request):
    """A request whose body is read as JSON by RFC 8259, fast: no NaN, and depths up to 200."""

    async def json(self) -> Any:
        """Raises json.JSONDecodeError."""
        body = await self.body()
        try:
            value = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
        await asyncio.sleep(0)  # others may run before it is checked
        return value


class BodyRoute(APIRoute):
    """A route whose body is read by `BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            UNKNOWN_LEFT_OUT.set(request.app.state.ignore_unknown_fields)
            return await handle(BodyRequest(request.scope, request.receive))

        return handled


def check_values(values: Iterable[tuple[str, str | Mapping[str, Any]]]) -> None:
    """Raise InputError, which names the path, for what holds too many texts, numbers, lists and objects together.

    values: a path and an object, or its text, which nobody has read yet.
    """
    left = MAX_CHAT_VALUES
    for path, value in values:
        left -= _num_in_text(value, left) if isinstance(value, str) else _num_in(value, left)
        if left < 0:
            raise InputError(
                f"{path}: more than {MAX_CHAT_VALUES} texts, numbers, lists and objects, with those before it"
            )


def _num_in_text(text: str, most: int) -> int:
    """Of JSON's values, keys among them; more than `most` if there are more. Whatever is no JSON counts, too."""
    meter, count = BodyMeter(len(text) * 4), 0
    for start in range(0, len(text), _PIECE):
        meter.count(text[start : start + _PIECE].encode(errors="surrogatepass"))
        count = meter.num_quotes // 2 + meter.num_brackets + meter.num_commas
        if count > most:
            break
    return count


def _num_in(value: Any, most: int) -> int:
    count, rest = 0, [iter([value])]
    while rest and count <= most:
        for each in rest.pop():
            count += 1
            if isinstance(each, dict):
                count += len(each)
                rest.append(iter(each.values()))
            elif isinstance(each, list):
                rest.append(iter(each))
            if count > most:
                break
    return count


def few_members(values: Any) -> Any:
    """Raise for an object that has far too many members, before an error is made of each."""
    if isinstance(values, dict) and len(values) > MAX_MEMBERS:
        raise PydanticCustomError("too_many", "too many fields: at most {most}", {"most": MAX_MEMBERS})
    return values


Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
AllowedIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_IDS, fail_fast=True)]
FewMembers = BeforeValidator(few_members)
