"""Responses that outlive their answer: kept, handed out again, gone on with, made in the background."""

import asyncio
from asyncio import wrap_future
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Scope

from treetop.api.api_state import ApiState, new_id
from treetop.api.errors import RESPONSES_PATH, ApiError, as_api_error
from treetop.api.events import STREAM_HEADERS, check_output, json_response
from treetop.api.requests.responses_body import ITEMS, AnyItem, ResponsesRequest
from treetop.api.response_store import Record, ResponseStore
from treetop.async_llm import DeltaStream
from treetop.outputs import TextDelta

OWNER = "owner"
"""Where in a scope's state it is whose key a request came with; see `AuthMiddleware`."""
MOST_LISTED = 100
_EVENTS_KEPT_S = 60.0
"""Of a response that was made in the background, after its end."""
_NO_STORE = "several API processes keep nothing together (--responses-db FILE does, or --api-workers 1)"


def owner_of(request: Request) -> str:
    """Whose a request is: of the key that it came with, "" where none is asked for."""
    owner: str = request.scope.get("state", {}).get(OWNER, "")
    return owner


class BackgroundAnswer(Protocol):
    """A response as it is answered."""

    id: str

    @property
    def deltas(self) -> DeltaStream: ...

    def begun(self) -> Record: ...

    def first(self) -> Iterable[bytes]: ...

    def events(self, delta: TextDelta) -> Iterable[bytes]: ...

    def ended(self, status: Literal["cancelled", "failed"], error: ApiError | None = None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Keeper:
    """What is kept of one response.

    before: items that its input goes on with. own: its input's, as they are kept.
    store: None if nothing is kept of it, but in its conversation.
    """

    before: Sequence[AnyItem]
    before_kept: list[Record]
    own: list[Record]
    owner: str
    store: ResponseStore | None
    conversation: tuple[ResponseStore, str] | None

    @property
    def keeps(self) -> bool:
        return self.store is not None

    def keep(self, response: Record) -> None:
        """As it is now. One that has ended well is added to its conversation."""
        if self.store is not None:
            record = {"response": response, "input": self.own, "before": self.before_kept}
            self.store.put(response["id"], self.owner, record)
        if self.conversation is not None and response["status"] in ("completed", "incomplete"):
            store, name = self.conversation
            added = [*self.own, *response["output"]]
            store.change(name, self.owner, lambda held: {**held, "items": [*held["items"], *added]})


@dataclass(slots=True)
class _Running:
    """A response in the background. written: its events so far, each at its sequence number."""

    answer: BackgroundAnswer
    scope: Scope
    owner: str
    written: list[bytes] = field(default_factory=list)
    is_over: bool = False
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def add(self, events: Iterable[bytes]) -> None:
        self.written += events
        self.grew.set()
        self.grew = asyncio.Event()

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """Those from a sequence number on, to the end."""
        while True:
            grew, some = self.grew, self.written[first:]
            if some:
                first += len(some)
                yield b"".join(some)
            elif self.is_over:
                return
            else:
                await grew.wait()


class KeptResponses:
    """What a server keeps of responses and conversations, and responses that it makes in the background."""

    def __init__(self, api: ApiState, store: ResponseStore | None) -> None:
        """store: None where several processes could share none."""
        self._api, self._store = api, store
        self._running: dict[str, _Running] = {}

    def store(self, field: str) -> ResponseStore:
        """Raises ApiError, which names the field, if there is none."""
        if self._store is None:
            raise ApiError(400, f"{field}: {_NO_STORE}", field, "unsupported_parameter")
        return self._store

    async def record(self, response_id: str, owner: str) -> Record:
        """Raises ApiError for one that is not kept."""
        found = await wrap_future(self.store("id").get(response_id, owner))
        if found is None or "response" not in found:
            words = f"{response_id[:100]!r} is not kept here, or not any more"
            raise ApiError(404, f"id: {words}", "id", "response_not_found")
        return found

    async def keeper(self, body: ResponsesRequest, owner: str) -> Keeper:
        """Raises ApiError for what it is to go on with and is not kept, and for what cannot be made here."""
        if body.background and self._api.options.num_api_workers > 1:
            words = "background: several API processes make none (--api-workers 1)"
            raise ApiError(400, words, "background", "unsupported_parameter")
        before: list[Record] = []
        conversation = None
        if body.previous_response_id is not None:
            before = await self._earlier(body.previous_response_id, owner)
        elif (name := body.conversation_id) is not None:
            store = self.store("conversation")
            before, conversation = (await held_conversation(store, name, owner))["items"], (store, name)
        own = kept_items(body.items)
        store_of_it = self._store if body.store else None
        return Keeper(ITEMS.validate_python(before), before, own, owner, store_of_it, conversation)

    async def _earlier(self, response_id: str, owner: str) -> list[Record]:
        """The items that a response ends with."""
        name = "previous_response_id"
        found = await wrap_future(self.store(name).get(response_id, owner))
        if found is None or "response" not in found:
            words = f"{response_id[:100]!r} is not kept here, or not any more; send the items again"
            raise ApiError(400, f"{name}: {words}", name, "previous_response_not_found")
        response = found["response"]
        if response["status"] in ("in_progress", "failed", "cancelled"):
            raise ApiError(400, f"{name}: that response is {response['status']}", name, "previous_response_not_found")
        return [*found["before"], *found["input"], *response["output"]]

    def begin(self, request: Request, answer: BackgroundAnswer, keeper: Keeper, streams: bool) -> Response:
        """Make a response whatever becomes of its client."""
        running = _Running(answer, request.scope, keeper.owner)
        self._running[answer.id] = running
        keeper.keep(answer.begun())
        running.task = asyncio.ensure_future(self._run(running))
        return _streamed(running, 0) if streams else json_response(answer.begun())

    async def cancel(self, response_id: str, owner: str) -> None:
        """One that runs; nothing of one that does not. Waits until it has ended."""
        running = self._running.get(response_id)
        if running is not None and running.owner == owner and running.task is not None and not running.is_over:
            running.task.cancel()
            await asyncio.wait([running.task])

    def events(self, response_id: str, owner: str, after: int) -> Response:
        """Those behind a sequence number. Raises ApiError where they are not kept."""
        running = self._running.get(response_id)
        if running is None or running.owner != owner:
            words = "stream: events are kept of responses in the background, while they run and for a minute"
            raise ApiError(400, words, "stream", "unsupported_parameter")
        return _streamed(running, after + 1)

    async def _run(self, running: _Running) -> None:
        """To its end, which is kept. Counts as work, so that a server that leaves waits for it."""
        answer, self._api.num_working = running.answer, self._api.num_working + 1
        try:
            running.add(answer.first())
            async for delta in answer.deltas:
                if delta.output is not None:
                    check_output(delta.output)
                running.add(answer.events(delta))
        except asyncio.CancelledError:
            running.add([answer.ended("cancelled")])
        except Exception as error:  # told in the response
            running.add([answer.ended("failed", as_api_error(error, running.scope))])
        finally:
            answer.deltas.close()
            self._api.num_working -= 1
            running.is_over = True
            running.add([])
            asyncio.get_running_loop().call_later(_EVENTS_KEPT_S, self._running.pop, answer.id, None)


async def held_conversation(store: ResponseStore, name: str, owner: str) -> Record:
    """Raises ApiError for one that is not kept."""
    found = await wrap_future(store.get(name, owner))
    if found is None or "items" not in found:
        words = f"conversation: {name[:100]!r} is not kept here, or not any more"
        raise ApiError(404, words, "conversation", "conversation_not_found")
    return found


def page_of(items: Sequence[Record], limit: int, order: str, after: str | None) -> Record:
    """A list of OpenAI's: so many items behind one of them. order: asc as they came, desc. Raises ApiError."""
    if not 1 <= limit <= MOST_LISTED:
        raise ApiError(400, f"limit: from 1 to {MOST_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: asc or desc", "order")
    ordered = [*items] if order == "asc" else [*reversed(items)]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after: there is no item {after[:100]!r}", "after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > limit}


def kept_responses(kept: KeptResponses) -> APIRouter:
    router = APIRouter()
    path = RESPONSES_PATH + "/{response_id}"

    @router.get(path, response_model=None)
    async def retrieve(request: Request, response_id: str, stream: bool = False, starting_after: int = -1) -> Response:
        """A response that was kept; its events again with stream=true."""
        record = await kept.record(response_id, owner_of(request))
        if stream:
            return kept.events(response_id, owner_of(request), starting_after)
        return json_response(record["response"])

    @router.delete(path, response_model=None)
    async def delete(request: Request, response_id: str) -> Response:
        """Forget it."""
        await kept.record(response_id, owner_of(request))
        await kept.cancel(response_id, owner_of(request))
        await wrap_future(kept.store("id").delete(response_id, owner_of(request)))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(path + "/cancel", response_model=None)
    async def cancel(request: Request, response_id: str) -> Response:
        """End one that runs in the background."""
        record = await kept.record(response_id, owner_of(request))
        if not record["response"]["background"]:
            raise ApiError(400, "id: only one in the background can be cancelled", "id")
        await kept.cancel(response_id, owner_of(request))
        return json_response((await kept.record(response_id, owner_of(request)))["response"])

    @router.get(path + "/input_items", response_model=None)
    async def input_items(
        request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """The items that it answered."""
        record = await kept.record(response_id, owner_of(request))
        return json_response(page_of([*record["before"], *record["input"]], limit, order, after))

    return router


def kept_items(items: Sequence[AnyItem]) -> list[Record]:
    """Items as they are kept and listed, each with an id."""
    return [{"id": new_id(_prefix(item)), **item.model_dump(exclude_none=True)} for item in items]


def _streamed(running: _Running, first: int) -> Response:
    return StreamingResponse(running.events(first), media_type="text/event-stream", headers=STREAM_HEADERS)


def _prefix(item: AnyItem) -> str:
    """Of an item's id."""
    kind: Any = item.type
    return {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}.get(kind, "item")
