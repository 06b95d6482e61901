"""`/v1/files` and `/v1/batches`, OpenAI's. Each API key sees its own."""

import asyncio
import re
from email.message import Message
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from treetop.api.batches.batches import WINDOW, Batches
from treetop.api.batches.lines import ENDPOINTS
from treetop.api.batches.store import ENDED, BatchStore, Kind, Record, StoreFullError
from treetop.api.errors import ApiError
from treetop.api.events import json_response
from treetop.api.kept_responses import owner_of, page_of
from treetop.api.limits import BodyRoute
from treetop.api.requests.fields import Body

FILES = "/v1/files"
_MOST_METADATA = 16
_FORM_FIELDS = ("purpose", "file")

Part = tuple[str, bytes]
"""Name of the file that a part of a form is, "" for none, and its bytes."""


class BatchRequest(Body):
    """A batch of the requests of a file."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"] = WINDOW  # type: ignore[assignment]  # a constant
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=_MOST_METADATA)


def read_form(content_type: str, body: bytes) -> dict[str, Part]:
    """The parts of a form by name. Raises ApiError for what is none, and for a name that is there twice. RFC 7578."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ApiError(400, "the body must be a form: multipart/form-data with purpose and file", "file")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise ApiError(400, "the form does not end with its boundary", "file")
    parts: dict[str, Part] = {}
    for piece in pieces[1:-1]:
        head, blank, content = piece.lstrip(b" \t").partition(b"\r\n\r\n")
        fields = Message()
        for line in head.decode("utf-8", "replace").split("\r\n"):
            key, _, value = line.partition(":")
            fields[key.strip() or "x-none"] = value.strip()
        name = fields.get_param("name", header="content-disposition")
        if not blank or not isinstance(name, str):
            raise ApiError(400, "a part of the form has no name", "file")
        if name in parts:
            raise ApiError(400, f"{name[:100]}: it is in the form twice", name[:100])
        parts[name] = fields.get_filename("") or "", content
    return parts


def batch_routes(store: BatchStore, batches: Batches) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    _add_batches(router, store, batches)
    return router


def file_routes(store: BatchStore) -> APIRouter:
    router = APIRouter()

    @router.post(FILES, response_model=None)
    async def upload(request: Request) -> Response:
        """A file of requests, as a form."""
        body = await request.body()
        parts = await asyncio.to_thread(read_form, request.headers.get("content-type", ""), body)
        for name in (*_FORM_FIELDS, *parts):
            if name not in parts or name not in _FORM_FIELDS:
                known = "is missing" if name in _FORM_FIELDS else "is not supported"
                raise ApiError(400, f"{name[:100]} {known}", name[:100])
        purpose = parts["purpose"][1].decode("utf-8", "replace")
        if purpose != "batch":
            raise ApiError(400, f"purpose must be batch, got {purpose[:100]!r}", "purpose")
        name, content = parts["file"]
        shown_name = re.sub(r"[^\w.() -]", "_", name)[-200:] or "file.jsonl"
        try:
            record = await asyncio.to_thread(store.add_file, owner_of(request), shown_name, purpose, content)
        except StoreFullError as error:
            raise ApiError(413, f"file: {error}; delete others", "file", "storage_full") from None
        return json_response(record)

    @router.get(FILES, response_model=None)
    async def files(
        request: Request, limit: int = 100, order: str = "desc", after: str | None = None, purpose: str | None = None
    ) -> Response:
        """Files, in pages."""
        listed = await asyncio.to_thread(store.list, "file", owner_of(request))
        mine = [each for each in listed if purpose in (None, each["purpose"])]
        return json_response(page_of(mine, limit, order, after))

    @router.get(FILES + "/{file_id}", response_model=None)
    async def file(request: Request, file_id: str) -> Response:
        """One, without its content."""
        return json_response(await _held(store, "file", file_id, request))

    @router.get(FILES + "/{file_id}/content", response_model=None)
    async def content(request: Request, file_id: str) -> Response:
        """What a file holds."""
        await _held(store, "file", file_id, request)
        return FileResponse(store.data(file_id), media_type="application/octet-stream")

    @router.delete(FILES + "/{file_id}", response_model=None)
    async def delete(request: Request, file_id: str) -> Response:
        """Forget a file."""
        await _held(store, "file", file_id, request)
        runs = await asyncio.to_thread(lambda: [record for _, record in store.unfinished()])
        if any(file_id == each["input_file_id"] for each in runs):
            raise ApiError(409, "id: a batch of this file has not ended; cancel it first", "id", "file_in_use")
        await asyncio.to_thread(store.delete, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return router


def _add_batches(router: APIRouter, store: BatchStore, batches: Batches) -> None:
    path = "/v1/batches"

    @router.post(path, response_model=None)
    async def create(request: Request, body: BatchRequest) -> Response:
        """Run a file's requests."""
        owner = owner_of(request)
        assert body.endpoint in ENDPOINTS
        if await asyncio.to_thread(store.get, body.input_file_id, owner) is None:
            raise ApiError(400, f"input_file_id: there is no {body.input_file_id[:100]!r}", "input_file_id")
        record = await asyncio.to_thread(batches.begin, owner, body.input_file_id, body.endpoint, body.metadata)
        shown = {**record}
        batches.run(owner, record)
        return json_response(shown)

    @router.get(path, response_model=None)
    async def listed(request: Request, limit: int = 20, after: str | None = None) -> Response:
        """Batches, in pages."""
        mine = await asyncio.to_thread(store.list, "batch", owner_of(request))
        return json_response(page_of(mine, limit, "desc", after))

    @router.get(path + "/{batch_id}", response_model=None)
    async def retrieve(request: Request, batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(await _held(store, "batch", batch_id, request))

    @router.post(path + "/{batch_id}/cancel", response_model=None)
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch; what is done is kept."""
        record = await _held(store, "batch", batch_id, request)
        if record["status"] in ENDED:
            raise ApiError(409, f"id: this batch is {record['status']}", "id", "batch_ended")
        await asyncio.to_thread(store.cancel, batch_id)
        return json_response(await _held(store, "batch", batch_id, request))


async def _held(store: BatchStore, kind: Kind, record_id: str, request: Request) -> Record:
    """Raises ApiError for one that is not kept for this key."""
    record = await asyncio.to_thread(store.get, record_id, owner_of(request))
    if record is None or record["object"] != kind:
        raise ApiError(404, f"id: there is no {kind} {record_id[:100]!r}", "id", f"{kind}_not_found")
    return record
