"""What an API process and the engine process say to each other: typed msgpack messages, never pickles."""

from typing import Any

import msgspec

from treetop.types.config import EngineConfig
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A client asks what it talks to; the answer is a `CoreInfo`."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Requests that are planned together. Their ids come from the range that `CoreInfo` gave the client."""

    requests: tuple[EngineRequest, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests; a last update comes for those that are alive."""

    request_ids: tuple[RequestId, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The client stops after `num_tokens` tokens of the output; no more updates come."""

    request_id: RequestId
    num_tokens: int


class CoreInfo(msgspec.Struct, frozen=True, tag=True):
    """What a client must know of the engine. first_id: its requests' ids count up from here."""

    model_path: str
    vocab_size: int
    max_context: int
    max_requests: int
    num_steps: int
    first_id: int = 0


class Updates(msgspec.Struct, frozen=True, tag=True):
    """A step's updates of one client."""

    updates: tuple[RequestUpdate, ...]


class Load(msgspec.Struct, frozen=True, tag=True):
    """What the engine is busy with, told now and then. kv_usage: share of the fullest pool that requests hold."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_retractions: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or has failed; the process ends."""

    reason: str
    user_error: bool


class MockOptions(msgspec.Struct, frozen=True):
    """An engine without a model. stream: ids it gives. step_s: what a step takes. tokens: most that a round gives."""

    stream: tuple[int, ...]
    step_s: float
    tokens: int


class ProcessOptions(msgspec.Struct, frozen=True):
    """What an engine process is told on stdin. address: its socket's, ipc."""

    address: str
    config: EngineConfig
    mock: MockOptions | None = None


ToCore = Hello | Add | Abort | Finish
FromCore = CoreInfo | Updates | Load | Failed

encode = msgspec.msgpack.Encoder().encode
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def decode_to_core(message: bytes) -> ToCore:
    """Raises msgspec.ValidationError for what is no message of a client."""
    decoded: Any = _to_core.decode(message)
    return decoded  # type: ignore[no-any-return]  # a union of structs, which the stub cannot say


def decode_from_core(message: bytes) -> FromCore:
    decoded: Any = _from_core.decode(message)
    return decoded  # type: ignore[no-any-return]  # as above
