"""Weights that a trainer sends: SGLang's routes, of which none reads a pickle, and no file is written."""

import base64
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from treetop.api.api_state import ApiState
from treetop.api.errors import ApiError
from treetop.api.events import json_response
from treetop.api.requests.fields import Body, Neutral
from treetop.checkpoints.handles import MAX_SIZE, NUM_COUNTERS, check_handle
from treetop.types.changes import InFlight, IpcHandle, SentTensors
from treetop.types.errors import InputError

MAX_TENSORS = 2**17
"""Of one request."""
MAX_AXES = 16
Size = Annotated[int, Field(ge=0, lt=MAX_SIZE)]
TRANSFER_PATHS = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
)
_SENT_NEUTRAL: Neutral = {"load_format": ("",), "weight_version": (), "abort_all_requests": (False,)}
"""As `Body.neutral`, of SGLang's."""


class InitGroupRequest(Body):
    """SGLang's: a group in which the trainer is rank 0, at this address."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1, lt=2**31, description="the first engine's rank")
    world_size: int = Field(ge=2, lt=2**31, description="the trainer and all ranks of all engines")
    group_name: str = Field("weight_update_group", min_length=1, max_length=200)
    backend: str = Field("nccl", description="gloo on a CPU")


class DestroyGroupRequest(Body):
    """SGLang's."""

    group_name: str = Field("weight_update_group", min_length=1, max_length=200)


class NamedTensors(Body):
    """Tensors by their names in a checkpoint, in order."""

    names: list[str] = Field(max_length=MAX_TENSORS)
    dtypes: list[str] = Field(max_length=MAX_TENSORS)
    shapes: list[Annotated[list[Size], Field(max_length=MAX_AXES)]] = Field(max_length=MAX_TENSORS)


class HandleBody(Body):
    """Where a tensor lies in a GPU's memory; see `treetop.weight_transfer`."""

    device_uuid: str = Field(max_length=100)
    offset: Size
    stride: list[Size] = Field(max_length=MAX_AXES)
    handle: str = Field(max_length=4096, description="base64")
    storage_size_bytes: Size
    storage_offset_bytes: Size
    ref_counter_handle: str = Field(max_length=4096, description="base64")
    ref_counter_offset: int = Field(ge=0, lt=NUM_COUNTERS)
    event_handle: str = Field(max_length=4096, description="base64")
    event_sync_required: bool

    @property
    def as_handle(self) -> IpcHandle:
        """Raises InputError."""
        said = {**self.model_dump(), "stride": tuple(self.stride)}
        try:
            for name in ("handle", "ref_counter_handle", "event_handle"):
                said[name] = base64.b64decode(said[name], validate=True)
        except ValueError as error:
            raise InputError(f"handles: not base64: {error}") from None
        handle = IpcHandle(**said)
        check_handle(handle)
        return handle


class HandledTensors(NamedTensors):
    """Those of them whose memory is handed over."""

    handles: list[list[HandleBody]] = Field(max_length=MAX_TENSORS)

    @property
    def sent(self) -> SentTensors:
        """Raises InputError."""
        handles = tuple(tuple(each.as_handle for each in of) for of in self.handles)
        shapes = tuple(map(tuple, self.shapes))
        return SentTensors(tuple(self.names), tuple(self.dtypes), shapes, handles=handles)


class FromDistributedRequest(NamedTensors):
    """SGLang's: rank 0 of the group broadcasts these now, then those of the draft head, if any.

    flush_cache: false keeps them until those come that complete them.
    """

    neutral = _SENT_NEUTRAL
    group_name: str = Field("weight_update_group", min_length=1, max_length=200)
    draft: NamedTensors | None = None
    flush_cache: bool = Field(True, description="false: more will come, and nothing is in force until then")
    in_flight: InFlight = Field("abort", description="of requests that are alive")

    def sent(self, tensors: NamedTensors) -> SentTensors:
        """Raises InputError."""
        shapes = tuple(map(tuple, tensors.shapes))
        return SentTensors(tuple(tensors.names), tuple(tensors.dtypes), shapes, self.group_name)


class FromTensorRequest(HandledTensors):
    """Tensors in a GPU's memory on this machine, by CUDA IPC. Pickles (`serialized_named_tensors`) are never read."""

    neutral = _SENT_NEUTRAL
    draft: HandledTensors | None = None
    flush_cache: bool = Field(True, description="false: more will come, and nothing is in force until then")
    in_flight: InFlight = Field("abort", description="of requests that are alive")


def check_updates(api: ApiState) -> None:
    """Raises ApiError."""
    if not api.options.enable_update_weights:
        raise ApiError(403, "weights cannot be replaced here: serve with --enable-update-weights")


def add_transfer(router: APIRouter, api: ApiState) -> None:
    """Beside those that change a server for everybody."""

    @router.post("/init_weights_update_group", response_model=None)
    async def init_group(body: InitGroupRequest) -> Response:
        """Answered once all ranks have met."""
        check_updates(api)
        address = body.master_address, body.master_port
        await api.llm.init_weights_update_group(
            *address, body.world_size, body.rank_offset, body.group_name, body.backend
        )
        return json_response({"success": True, "message": f"group {body.group_name} is there"})

    @router.post("/destroy_weights_update_group", response_model=None)
    async def destroy_group(body: DestroyGroupRequest) -> Response:
        """The engines leave it."""
        check_updates(api)
        await api.llm.destroy_weights_update_group(body.group_name)
        return json_response({"success": True, "message": f"group {body.group_name} is gone"})

    @router.post("/update_weights_from_distributed", response_model=None)
    async def from_distributed(body: FromDistributedRequest) -> Response:
        """Answered once all have come, and are in force or kept."""
        check_updates(api)
        draft = None if body.draft is None else body.sent(body.draft)
        model = body.sent(body) if body.names else None
        await api.llm.update_weights(model, draft, body.in_flight, not body.flush_cache)
        return json_response({"success": True, "message": f"{len(body.names)} tensors have come"})

    @router.post("/update_weights_from_tensor", response_model=None)
    async def from_tensor(body: FromTensorRequest) -> Response:
        """Answered once nothing of them is needed any more."""
        check_updates(api)
        model = body.sent if body.names else None
        draft = None if body.draft is None else body.draft.sent
        await api.llm.update_weights(model, draft, body.in_flight, not body.flush_cache)
        return json_response({"success": True, "message": f"{len(body.names)} tensors have been read"})
