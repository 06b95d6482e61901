"""The prefill worker's desk: exports by (peer, request, attempt), and who may have which slot.

A slot is free, being packed, or offered, and always exactly one of these:

    free --Pack--> packing --Packed--> offered --Release, or given up--> free, its generation one higher

An export is given up when its peer takes it back, goes, or is silent for longer than a lease; what is offered of it
then counts no more, since its slots' generations have passed.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from treetop.transfer.events import (
    Cancel,
    Deadlines,
    Finish,
    HeardByPrefill,
    Pack,
    PeerDown,
    PeerId,
    PrefillAction,
    SendToDecode,
    Start,
    Tick,
    ToPrefillDesk,
    not_sent_to,
)
from treetop.transfer.wire import Abort, Offer, Prefill, Prompt, Refused, Release, Released, Renew, Renewed, ToPrefill
from treetop.types.handover import Computed, FirstToken, Gone, Packed, Piece, SlotRef
from treetop.types.ids import RequestId

Key = tuple[PeerId, int, int]
"""Peer, its request, its attempt."""


@dataclass(slots=True, eq=False)
class Export:
    """A request that is computed for a peer. packed: its tokens before this one have been given a slot.

    most: tokens of a piece. until: when it is given up without a word from its peer.
    """

    key: Key
    request_id: RequestId
    prompt: Prompt
    packed: int
    most: int
    until: float
    num_computed: int = 0
    first: FirstToken | None = None
    slots: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return len(self.prompt.ids)


@dataclass(slots=True)
class StagingSlot:
    """export: whose it is; None if it is free, or was given up while it is packed."""

    state: Literal["free", "packing", "offered"] = "free"
    generation: int = 0
    export: Export | None = None


class PrefillDesk:
    """`handle` takes what happens and the time, and returns what is to be done. It owns nothing but numbers.

    tokens_per_slot: most tokens of a piece.
    """

    def __init__(self, num_slots: int, tokens_per_slot: int, deadlines: Deadlines) -> None:
        self.slots = [StagingSlot() for _ in range(num_slots)]
        self.exports: dict[Key, Export] = {}
        self._by_id: dict[RequestId, Export] = {}
        self._tokens_per_slot, self._deadlines, self._ids = tokens_per_slot, deadlines, count()
        self._actions: list[PrefillAction] = []

    def handle(self, event: ToPrefillDesk, now: float) -> list[PrefillAction]:
        match event:
            case HeardByPrefill(peer, message):
                self._heard(peer, message, now)
            case Computed(request_id, num_tokens, first):
                self._computed(request_id, num_tokens, first)
            case Packed():
                self._packed(event)
            case Gone(request_id):
                if (export := self._by_id.get(request_id)) is not None:
                    self._drop(export, "the prefill worker gave it up", cancel=False)
            case PeerDown(peer):
                self._peer_down(peer)
            case Tick():
                pass
        for export in [each for each in self.exports.values() if each.until <= now]:
            self._drop(export, "its lease is over")
        self._pack()
        actions, self._actions = self._actions, []
        return actions

    def _heard(self, peer: PeerId, message: ToPrefill, now: float) -> None:
        until = now + self._deadlines.lease_s
        match message:
            case Prefill():
                self._start((peer, message.request, message.attempt), message, until)
            case Renew(attempts):
                for request, attempt in attempts:
                    if (export := self.exports.get((peer, request, attempt))) is not None:
                        export.until = until
                self._say(peer, Renewed())
            case Release(request, attempt, ref):
                self._release((peer, request, attempt), ref, until)
            case Abort(request, attempt):
                if (export := self.exports.get((peer, request, attempt))) is not None:
                    self._drop(export, None)

    def _start(self, key: Key, asked: Prefill, until: float) -> None:
        peer, request, attempt = key
        others = [each for each in self.exports.values() if each.key[:2] == key[:2]]
        if any(each.key[2] >= attempt for each in others):
            return  # it came twice, or late
        if not 0 <= asked.start < len(asked.prompt.ids):
            self._say(peer, Refused(request, attempt, f"no token is asked for from {asked.start} on"))
            return
        if asked.most < 1:
            self._say(peer, Refused(request, attempt, f"pieces of {asked.most} tokens are asked for"))
            return
        for older in others:
            self._drop(older, None)
        most = min(asked.most, self._tokens_per_slot)
        request_id = RequestId(next(self._ids))
        export = self.exports[key] = self._by_id[request_id] = Export(
            key, request_id, asked.prompt, asked.start, most, until
        )
        self._actions.append(Start(request_id, asked.start, export.prompt))

    def _computed(self, request_id: RequestId, num_tokens: int, first: FirstToken | None) -> None:
        export = self._by_id.get(request_id)
        if export is not None:
            export.num_computed = max(export.num_computed, num_tokens)
            export.first = first or export.first

    def _packed(self, packed: Packed) -> None:
        slot = self.slots[packed.slot]
        assert slot.state == "packing"
        export = slot.export
        if export is not None and not packed.checksums:
            self._drop(export, "it could not be packed")
        if slot.export is None or export is None:
            self._free(packed.slot)
            return
        slot.state = "offered"
        peer, request, attempt = export.key
        ref = SlotRef(packed.slot, slot.generation)
        first = export.first if packed.piece.last else None
        self._say(peer, Offer(request, attempt, ref, packed.piece, packed.checksums, first))

    def _release(self, key: Key, ref: SlotRef, until: float) -> None:
        """Only what was offered to this attempt, and not been used again, may count."""
        peer, request, attempt = key
        ok = 0 <= ref.slot < len(self.slots) and still_offered(self.slots[ref.slot], ref, key)
        self._say(peer, Released(request, attempt, ref, ok))
        if not ok:
            return
        self._free(ref.slot)
        export = self.exports.get(key)
        if export is not None:
            export.until = until
            if export.packed == export.total and not export.slots:
                self._remove(export)
                self._actions.append(Finish(export.request_id))

    def _pack(self) -> None:
        """Give free slots to what has been computed, first come, first served."""
        free = [i for i, slot in enumerate(self.slots) if slot.state == "free"]
        for export in self.exports.values():
            while free and export.packed < export.num_computed:
                end = min(export.packed + export.most, export.num_computed)
                if end == export.total and export.first is None:
                    break
                index = free.pop(0)
                slot = self.slots[index]
                slot.state, slot.export = "packing", export
                export.slots.add(index)
                piece = Piece(export.packed, end - export.packed, export.total)
                export.packed = end
                self._actions.append(Pack(export.request_id, index, piece))

    def _peer_down(self, peer: PeerId) -> None:
        for export in [each for each in self.exports.values() if each.key[0] == peer]:
            self._drop(export, None)
        self._actions = not_sent_to(peer, self._actions)

    def _drop(self, export: Export, reason: str | None, cancel: bool = True) -> None:
        """Give an export up. reason: what its peer is told."""
        self._remove(export)
        for index in [*export.slots]:
            if self.slots[index].state == "packing":
                self.slots[index].export = None  # the device may still write it
            else:
                self._free(index)
        if cancel:
            self._actions.append(Cancel(export.request_id))
        if reason is not None:
            peer, request, attempt = export.key
            self._say(peer, Refused(request, attempt, reason))

    def _remove(self, export: Export) -> None:
        del self.exports[export.key], self._by_id[export.request_id]

    def _free(self, index: int) -> None:
        slot = self.slots[index]
        if slot.export is not None:
            slot.export.slots.discard(index)
        slot.state, slot.export, slot.generation = "free", None, slot.generation + 1

    def _say(self, peer: PeerId, message: Offer | Released | Refused | Renewed) -> None:
        self._actions.append(SendToDecode(peer, message))


def still_offered(slot: StagingSlot, ref: SlotRef, key: Key) -> bool:
    """Whether a slot holds what was offered to this attempt under this generation (vllm-52234)."""
    export = slot.export
    return slot.state == "offered" and slot.generation == ref.generation and export is not None and export.key == key
