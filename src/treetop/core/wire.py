"""Messages between API processes and engine processes: typed msgpack messages, never pickles."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from treetop.types.changes import CHANGES, Change, asked_as
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, RequestUpdate

ID_RANGE = 2**40
"""Request ids that each client has for itself: client i those from i times this on."""


class ClientHello(msgspec.Struct, frozen=True, tag=True):
    """A client asks what it talks to; the answer is `Ready` or `Failed`. number: of this client among all."""

    number: int = 0


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Requests that are planned together. Their ids come from the client's own range."""

    requests: tuple[EngineRequest, ...]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End these requests; a last update comes for those that are alive."""

    request_ids: tuple[RequestId, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The client stops after `num_tokens` tokens of the output; no more updates come."""

    request_id: RequestId
    num_tokens: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Another client has ended without a word: so do its requests, and nothing of it counts that comes later."""

    number: int


Stage = Literal["prepare", "commit", "drop", "keep"]


class AskChange(msgspec.Struct, frozen=True, tag=True):
    """A stage of a change: prepare it, then put it in force or drop it. number: of the client's, for the answers.

    keep: no engine has taken what this client had asked of the engine before this one, which keeps what was.

    kind: of `CHANGES`, for changes have no tag of their own. encoded: the change. token: of this one among all that any
    client asks for, alike or not; the same at every stage.
    """

    number: int
    stage: Stage
    kind: str
    encoded: msgspec.Raw
    token: str = ""

    @classmethod
    def of(cls, number: int, stage: Stage, change: Change, token: str = "") -> "AskChange":
        return cls(number, stage, asked_as(change), msgspec.Raw(encode(change)), token)

    @property
    def change(self) -> Change:
        """Raises msgspec.ValidationError for what is no change of its kind."""
        return msgspec.msgpack.decode(self.encoded, type=CHANGES[self.kind])


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up; or it is, and something has changed."""

    info: CoreInfo


class Updates(msgspec.Struct, frozen=True, tag=True):
    """A step's updates of one client."""

    updates: tuple[RequestUpdate, ...]


class Load(msgspec.Struct, frozen=True, tag=True):
    """The engine's load. Told when it has changed, and once a second: it is the heartbeat of the loop, too."""

    load: CoreLoad


class ChangeDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskChange`. error: why nothing has changed.

    user_error: whoever asked can change that; conflict: by asking again.
    """

    number: int
    error: str | None = None
    user_error: bool = False
    conflict: bool = False


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """To an API process: an engine is up. It answers `EngineUp` once it has given it all that it has for it.

    addresses: of its processes, of which each takes requests.
    """

    replica: int
    addresses: tuple[str, ...]


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """To an API process: the engine has ended; another may come. killed: from outside."""

    replica: int
    reason: str
    killed: bool = False


class EngineDead(msgspec.Struct, frozen=True, tag=True):
    """To an API process: there is no engine any more."""

    replica: int
    reason: str


class KeysChanged(msgspec.Struct, frozen=True, tag=True):
    """To an API process: the file with keys has this text now, which is sound."""

    text: str


EngineEvent = EngineUp | EngineLost | EngineDead
ApiEvent = EngineEvent | KeysChanged
"""Sent to API processes, a line of JSON each."""


class KVEventsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`: where the prefix cache's pages are told of.

    endpoint: of the PUB socket. replay_endpoint: of the ROUTER that tells again. buffer_steps: batches that it has.
    hwm: messages that may wait for a slow reader; more are lost to it. hash_seed: of block hashes, PYTHONHASHSEED's.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""
    hash_seed: str = ""


class MockOptions(msgspec.Struct, frozen=True):
    """An engine without a model.

    stream: ids it gives, by position.
    step_s: what a step takes.
    minimum, maximum: tokens that a round gives.
    """

    stream: tuple[int, ...]
    step_s: float
    minimum: int
    maximum: int


class ProcessOptions(msgspec.Struct, frozen=True):
    """Options of an engine process, sent on its stdin.

    address: of its socket, ipc, in a folder of its owner alone; ranks that share experts have theirs beside it.
    log_level: of `logging`; of the ranks after the first only warnings are shown.
    disaggregation: what it does for others.
    rank: of `config.ep_size`.
    replica: of `num_replicas`, which share the machine.
    noted: a file that says which weights and adapters are in force once they have changed, for the engine after this
        one.
    kv_events: where its prefix cache is told of; None for nowhere.
    """

    address: str
    config: EngineConfig
    mock: MockOptions | None = None
    log_level: int = 30
    disaggregation: DisaggregationOptions = DisaggregationOptions()
    rank: int = 0
    replica: int = 0
    num_replicas: int = 1
    noted: str | None = None
    kv_events: KVEventsOptions | None = None

    @property
    def folder(self) -> str:
        """Where its socket lies, and where ranks meet."""
        return str(Path(self.address.removeprefix("ipc://")).parent)


def kv_events_options(given: str | None, config: EngineConfig) -> KVEventsOptions | None:
    """Of `--kv-events-config`; None where nothing is to be published. Raises ConfigError."""
    if given is None:
        return None
    try:
        options = msgspec.json.decode(given, type=KVEventsOptions)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--kv-events-config: {error}") from None
    if not options.enable_kv_cache_events or options.publisher == "null":
        return None
    if config.disable_radix_cache:
        raise ConfigError("--kv-events-config: with --disable-radix-cache there is nothing to tell")
    return options


ToCore = ClientHello | AddRequests | AbortRequests | Finish | Leave | AskChange
FromCore = Ready | Updates | Load | ChangeDone

encode = msgspec.msgpack.Encoder().encode
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def decode_to_core(message: bytes) -> ToCore:
    """Raises msgspec.ValidationError for what is no message of a client."""
    return _to_core.decode(message)


def decode_from_core(message: bytes) -> FromCore:
    return _from_core.decode(message)
