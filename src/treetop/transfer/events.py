"""What happens to a desk, and what it wants done. A desk is a function of these and of the time: no socket, no thread.

network, transport, scheduler --event--> desk --actions--> network, transport, scheduler
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from treetop.transfer.wire import Prompt, ToDecode, ToPrefill
from treetop.types.handover import FirstToken, Gone, Imported, Piece, PrefillEvent
from treetop.types.ids import RequestId

PeerId = NewType("PeerId", int)
"""A session with another worker. One that comes again has another id."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds.

    connect_s: for an answer to a first word. pull_s: for a piece to arrive, and again for its release. lease_s: without
    a word, after which a decode worker's attempt is given up by the prefill worker, or the prefill worker by the decode
    worker. renew_s: between two words. progress_s: without a step forward of an attempt, which then goes on locally.
    """

    connect_s: float = 2.0
    pull_s: float = 5.0
    lease_s: float = 10.0
    renew_s: float = 2.0
    progress_s: float = 30.0

    @classmethod
    def of(cls, lease_s: float) -> "Deadlines":
        """In their proportions to a lease."""
        return cls(lease_s / 5, lease_s / 2, lease_s, lease_s / 5, 3 * lease_s)


class PeerUp(NamedTuple):
    """A session has begun."""

    peer: PeerId


class PeerDown(NamedTuple):
    """A session has ended. Transfers may go on."""

    peer: PeerId


class Tick(NamedTuple):
    """Time has passed."""


# ---------------------------------------------------------------- decode


class Ask(NamedTuple):
    """A request has a row and waits for its tokens from `start` on."""

    request_id: RequestId
    start: int
    prompt: Prompt


class HeardByDecode(NamedTuple):
    """A prefill worker has said something."""

    peer: PeerId
    message: ToDecode


class Pulled(NamedTuple):
    """A transfer into a landing slot is over: all bytes are there, or not all. ended: no more can arrive."""

    slot: int
    whole: bool
    ended: bool


class Ended(NamedTuple):
    """No byte of a transfer that was given up can arrive any more."""

    slot: int


ToDecodeDesk = Ask | Imported | Gone | HeardByDecode | PeerUp | PeerDown | Pulled | Ended | Tick


class SendToPrefill(NamedTuple):
    """Tell a prefill worker."""

    peer: PeerId
    message: ToPrefill


class Pull(NamedTuple):
    """Move a piece from a peer's slot into a landing slot."""

    slot: int
    peer: PeerId
    remote_slot: int
    piece: Piece


class Land(NamedTuple):
    """Plan the import of a landing slot, whose release has been confirmed."""

    request_id: RequestId
    slot: int
    piece: Piece
    checksums: tuple[int, ...]
    first: FirstToken | None


class PrefillLocally(NamedTuple):
    """Nothing more comes from elsewhere for this request."""

    request_id: RequestId
    reason: str


class DropPeer(NamedTuple):
    """It has been silent too long: end the session."""

    peer: PeerId


DecodeAction = SendToPrefill | Pull | Land | PrefillLocally | DropPeer

# ---------------------------------------------------------------- prefill


class HeardByPrefill(NamedTuple):
    """A decode worker has said something."""

    peer: PeerId
    message: ToPrefill


ToPrefillDesk = PrefillEvent | HeardByPrefill | PeerDown | Tick


class SendToDecode(NamedTuple):
    """Tell a decode worker."""

    peer: PeerId
    message: ToDecode


class Start(NamedTuple):
    """Prefill a request under an id of this worker, for a decode worker that has `start` tokens."""

    request_id: RequestId
    start: int
    prompt: Prompt


class Pack(NamedTuple):
    """Pack a computed piece into a slot."""

    request_id: RequestId
    slot: int
    piece: Piece


class Finish(NamedTuple):
    """All pieces have been taken: row and lease may go."""

    request_id: RequestId


class Cancel(NamedTuple):
    """Nobody waits for this request any more."""

    request_id: RequestId


PrefillAction = SendToDecode | Start | Pack | Finish | Cancel


def not_sent_to(peer: PeerId, actions: Sequence[PrefillAction]) -> list[PrefillAction]:
    """Actions without words for a peer that is gone."""
    return [each for each in actions if not (isinstance(each, SendToDecode) and each.peer == peer)]
