"""What the state machines of both sides take, and what they return. A scheduler's part of it is in `scheduling.py`.

sockets, agent, scheduler --event--> machine --effects--> sockets, agent, scheduler
"""

from typing import NamedTuple

import msgspec

from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.scheduling import Prompt, Recv, SchedulerEvent, Stage
from treetop.types.kv_transfer.transport import PeerId, State, Way
from treetop.types.kv_transfer.wire import Metadata, ToDecode, ToPrefill

# ---------------------------------------------------------------- events


class Connected(NamedTuple):
    """The handshake with another worker is done."""

    peer: PeerId
    metadata: Metadata


class Disconnected(NamedTuple):
    """A session has ended. Transfers may go on."""

    peer: PeerId


class Received(NamedTuple):
    """A message of another worker, after the handshake."""

    peer: PeerId
    message: ToPrefill | ToDecode


class Pulled(NamedTuple):
    """The state of the transfer into a slot has changed."""

    slot: int
    state: State


class Tick(NamedTuple):
    """Time has passed."""


Event = Connected | Disconnected | Received | Pulled | Tick | SchedulerEvent

# ---------------------------------------------------------------- effects


class Send(NamedTuple):
    """Send a message to another worker."""

    peer: PeerId
    message: ToPrefill | ToDecode


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """End the session with another worker, and begin no more transfers from it."""

    peer: PeerId


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Move what lies in a peer's slot into a slot here. chunk: None moves a whole slot, to time the link."""

    slot: int
    peer: PeerId
    remote_slot: int
    chunk: KVChunk | None
    way: Way


class Start(NamedTuple):
    """Prefill a request under an id of this worker, for a decode worker that has its first `start` tokens."""

    request_id: RequestId
    start: int
    prompt: Prompt


class FinishExport(NamedTuple):
    """All chunks have been taken: row and pages of a request that was prefilled may go."""

    request_id: RequestId


class Cancel(NamedTuple):
    """Nobody waits for this request any more."""

    request_id: RequestId


class PrefillLocally(NamedTuple):
    """Nothing more comes from a prefill worker for this request."""

    request_id: RequestId
    reason: str


class Log(NamedTuple):
    """A line for the log."""

    text: str


Effect = Send | Disconnect | Pull | Recv | Stage | Start | FinishExport | Cancel | PrefillLocally | Log
