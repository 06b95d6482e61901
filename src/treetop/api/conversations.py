"""`/v1/conversations`: items that are kept by name, which responses go on with and add to."""

import time
from asyncio import wrap_future
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from treetop.api.api_state import new_id
from treetop.api.errors import ApiError
from treetop.api.events import json_response
from treetop.api.kept_responses import KeptResponses, held_conversation, kept_items, owner_of, page_of
from treetop.api.limits import BodyRoute, FewMembers
from treetop.api.requests.fields import Body
from treetop.api.requests.responses_body import Item
from treetop.api.response_store import Record

PATH = "/v1/conversations"
MOST_ADDED = 20
"""Items of one request, as OpenAI has it."""
Items = Annotated[list[Item], Field(max_length=MOST_ADDED, fail_fast=True)]


class ConversationRequest(Body):
    """A new conversation."""

    items: Items | None = None
    metadata: Annotated[dict[str, Any] | None, FewMembers] = None


class MetadataRequest(Body):
    """Of a conversation, in place of what was there."""

    metadata: Annotated[dict[str, Any], FewMembers]


class ItemsRequest(Body):
    """More items of a conversation."""

    items: Items = Field(min_length=1)


def conversations(kept: KeptResponses) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    path = PATH + "/{name}"

    async def held(request: Request, name: str) -> Record:
        return await held_conversation(kept.store("conversation"), name, owner_of(request))

    async def changed(request: Request, name: str, change: Callable[[Record], Record]) -> Record:
        found = await wrap_future(kept.store("conversation").change(name, owner_of(request), change))
        return await held(request, name) if found is None else found

    @router.post(PATH, response_model=None)
    async def create(request: Request, body: ConversationRequest) -> Response:
        """A conversation that responses go on with."""
        name, record = new_id("conv"), {
            "created_at": int(time.time()), "metadata": body.metadata or {}, "items": kept_items(body.items or ()),
        }  # fmt: skip
        await wrap_future(kept.store("conversation").put(name, owner_of(request), record))
        return json_response(_shown(name, record))

    @router.get(path, response_model=None)
    async def retrieve(request: Request, name: str) -> Response:
        """One, without its items."""
        return json_response(_shown(name, await held(request, name)))

    @router.post(path, response_model=None)
    async def update(request: Request, name: str, body: MetadataRequest) -> Response:
        """Its metadata."""
        record = await changed(request, name, lambda found: {**found, "metadata": body.metadata})
        return json_response(_shown(name, record))

    @router.delete(path, response_model=None)
    async def delete(request: Request, name: str) -> Response:
        """Forget it."""
        await held(request, name)
        await wrap_future(kept.store("conversation").delete(name, owner_of(request)))
        return json_response({"id": name, "object": "conversation.deleted", "deleted": True})

    @router.get(path + "/items", response_model=None)
    async def list_items(
        request: Request, name: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """Its items, in pages."""
        return json_response(page_of((await held(request, name))["items"], limit, order, after))

    @router.post(path + "/items", response_model=None)
    async def add_items(request: Request, name: str, body: ItemsRequest) -> Response:
        """Items behind those it has."""
        added = kept_items(body.items)
        await changed(request, name, lambda found: {**found, "items": [*found["items"], *added]})
        return json_response(page_of(added, MOST_ADDED, "asc", None))

    @router.get(path + "/items/{item}", response_model=None)
    async def retrieve_item(request: Request, name: str, item: str) -> Response:
        """One item."""
        return json_response(_item(await held(request, name), item))

    @router.delete(path + "/items/{item}", response_model=None)
    async def delete_item(request: Request, name: str, item: str) -> Response:
        """Forget one item."""
        _item(await held(request, name), item)
        record = await changed(
            request, name, lambda found: {**found, "items": [each for each in found["items"] if each["id"] != item]}
        )
        return json_response(_shown(name, record))

    return router


def _shown(name: str, record: Record) -> Record:
    return {"id": name, "object": "conversation", **{key: record[key] for key in ("created_at", "metadata")}}


def _item(record: Record, item: str) -> Record:
    """Raises ApiError for one that is not there."""
    found = [each for each in record["items"] if each["id"] == item]
    if not found:
        raise ApiError(404, f"item: there is no {item[:100]!r} in this conversation", "item", "item_not_found")
    held: Record = found[0]
    return held
