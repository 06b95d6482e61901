"""The prefill worker's side: exports by (peer, request, attempt), and who may have which slot. Pure.

A slot is free, being staged, or offered, and always exactly one of these:

    free --Stage--> staging --Staged--> offered --Release, or given up--> free, its generation one higher

An export is given up when its peer takes it back, goes, or is silent for longer than a lease; what is offered of it
then counts no more, since its slots' generations have passed.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from treetop.disaggregation.events import (
    Cancel,
    Connected,
    Disconnected,
    Effect,
    Event,
    FinishExport,
    Received,
    Send,
    Start,
)
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout, SlotRef
from treetop.types.kv_transfer.options import Deadlines
from treetop.types.kv_transfer.scheduling import Computed, Dropped, FirstToken, Prompt, Stage, Staged
from treetop.types.kv_transfer.transport import PeerId
from treetop.types.kv_transfer.wire import (
    Abort,
    Offer,
    Prefill,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    ToDecode,
    ToPrefill,
)
from treetop.types.requests import KVTransferStats

Key = tuple[PeerId, int, int]
"""Peer, its request, its attempt."""


@dataclass(slots=True, eq=False)
class ExportedRequest:
    """A request that is computed for a peer.

    staged: its tokens before this one have been given a slot.
    max_tokens: of a chunk.
    until_s: when its lease ends, unless its peer renews it.
    """

    key: Key
    request_id: RequestId
    prompt: Prompt
    staged: int
    max_tokens: int
    until_s: float
    num_computed: int = 0
    first: FirstToken | None = None
    slots: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        return len(self.prompt.ids)


@dataclass(slots=True)
class SendSlot:
    """export: whose it is; None if it is free, or was given up while it is staged."""

    state: Literal["free", "staging", "offered"] = "free"
    generation: int = 0
    export: ExportedRequest | None = None


class PrefillMachine:
    """`handle` takes what happens and the time, and returns what is to be done. It owns nothing but numbers.

    layout: of a chunk on all ranks.
    tokens_per_slot: most tokens of a chunk.
    vocab_size: prompts' tokens are below it.
    """

    asks, stuck = False, None
    refuses = (
        "this worker prefills for others (--disaggregation-mode prefill) and serves no requests: ask a decode worker"
    )

    def __init__(
        self, num_slots: int, tokens_per_slot: int, layout: ChunkLayout, vocab_size: int, deadlines: Deadlines
    ) -> None:
        self.slots = [SendSlot() for _ in range(num_slots)]
        self.exports: dict[Key, ExportedRequest] = {}
        self._by_id: dict[RequestId, ExportedRequest] = {}
        self._peers: set[PeerId] = set()
        self._tokens_per_slot, self._layout, self._vocab_size = tokens_per_slot, layout, vocab_size
        self._deadlines, self._ids = deadlines, count()
        self._effects: list[Effect] = []
        self._load = KVTransferStats(mode="prefill")

    @property
    def active(self) -> bool:
        """Whether something is waited for."""
        return bool(self._peers)

    @property
    def load(self) -> KVTransferStats:
        return self._load._replace(
            num_peers=len(self._peers),
            num_requests_in_flight=len(self.exports),
            num_slots_busy=sum(slot.state != "free" for slot in self.slots),
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                self._received(peer, message, now)
            case Computed(request_id, num_tokens, first):
                self._computed(request_id, num_tokens, first)
            case Staged():
                self._staged(event)
            case Dropped(request_id, refusal):
                if (export := self._by_id.get(request_id)) is not None:
                    self._drop(export, refusal or "the prefill worker gave it up", cancel=False)
            case Connected(peer, _):
                self._peers.add(peer)
            case Disconnected(peer):
                self._peer_down(peer)
            case _:
                pass  # time has passed
        for export in [each for each in self.exports.values() if each.until_s <= now]:
            self._drop(export, "its lease is over")
        self._stage()
        effects, self._effects = self._effects, []
        return effects

    def _received(self, peer: PeerId, message: ToPrefill | ToDecode, now: float) -> None:
        until_s = now + self._deadlines.lease_s
        match message:
            case Prefill():
                self._start((peer, message.request, message.attempt), message, until_s)
            case Renew(attempts):
                for request, attempt in attempts:
                    if (export := self.exports.get((peer, request, attempt))) is not None:
                        export.until_s = until_s
                self._send(peer, Renewed())
            case Release(request, attempt, ref):
                self._release((peer, request, attempt), ref, until_s)
            case Abort(request, attempt):
                if (export := self.exports.get((peer, request, attempt))) is not None:
                    self._drop(export, None)

    def _start(self, key: Key, asked: Prefill, until_s: float) -> None:
        peer, request, attempt = key
        others = [each for each in self.exports.values() if each.key[:2] == key[:2]]
        if any(each.key[2] >= attempt for each in others):
            return  # it came twice, or late
        if (reason := self._impossible(asked)) is not None:
            self._send(peer, Refused(request, attempt, reason))
            return
        for older in others:
            self._drop(older, None)
        max_tokens = min(asked.max_tokens, self._tokens_per_slot)
        request_id = RequestId(next(self._ids))
        export = self.exports[key] = self._by_id[request_id] = ExportedRequest(
            key, request_id, asked.prompt, asked.start, max_tokens, until_s
        )
        self._effects.append(Start(request_id, asked.start, export.prompt))

    def _impossible(self, asked: Prefill) -> str | None:
        """Why this cannot be prefilled, as far as it can be seen here."""
        if not 0 <= asked.start < len(asked.prompt.ids):
            return f"no token is asked for from {asked.start} on"
        if asked.max_tokens < 1:
            return f"chunks of {asked.max_tokens} tokens are asked for"
        if not all(0 <= token < self._vocab_size for token in asked.prompt.ids):
            return f"the prompt has tokens outside the vocabulary of {self._vocab_size}"
        return None

    def _computed(self, request_id: RequestId, num_tokens: int, first: FirstToken | None) -> None:
        export = self._by_id.get(request_id)
        if export is not None:
            export.num_computed = max(export.num_computed, num_tokens)
            export.first = first or export.first

    def _staged(self, staged: Staged) -> None:
        slot = self.slots[staged.slot]
        assert slot.state == "staging"
        export = slot.export
        if export is not None and not staged.checksums:
            self._drop(export, "it could not be staged")
        if slot.export is None or export is None:
            self._free(staged.slot)
            return
        slot.state = "offered"
        peer, request, attempt = export.key
        ref, load = SlotRef(staged.slot, slot.generation), self._load
        first = export.first if staged.chunk.last else None
        self._send(peer, Offer(request, attempt, ref, staged.chunk, staged.checksums, first))
        num_bytes = load.num_bytes + self._layout.num_bytes(staged.chunk)
        self._load = load._replace(num_chunks=load.num_chunks + 1, num_bytes=num_bytes)

    def _release(self, key: Key, ref: SlotRef, until_s: float) -> None:
        """Only what was offered to this attempt, and not been used again, may count."""
        peer, request, attempt = key
        ok = 0 <= ref.slot < len(self.slots) and still_offered(self.slots[ref.slot], ref, key)
        self._send(peer, Released(request, attempt, ref, ok))
        if not ok:
            return
        self._free(ref.slot)
        export = self.exports.get(key)
        if export is not None:
            export.until_s = until_s
            if export.staged == export.total and not export.slots:
                self._remove(export)
                self._load = self._load._replace(num_requests_done=self._load.num_requests_done + 1)
                self._effects.append(FinishExport(export.request_id))

    def _stage(self) -> None:
        """Give free slots to what has been computed, first come, first served."""
        free = [i for i, slot in enumerate(self.slots) if slot.state == "free"]
        for export in self.exports.values():
            while free and export.staged < export.num_computed:
                end = min(export.staged + export.max_tokens, export.num_computed)
                if end == export.total and export.first is None:
                    break
                index = free.pop(0)
                slot = self.slots[index]
                slot.state, slot.export = "staging", export
                export.slots.add(index)
                chunk = KVChunk(export.staged, end - export.staged, export.total)
                export.staged = end
                self._effects.append(Stage(export.request_id, index, chunk))

    def _peer_down(self, peer: PeerId) -> None:
        for export in [each for each in self.exports.values() if each.key[0] == peer]:
            self._drop(export, None)
        self._peers.discard(peer)

    def _drop(self, export: ExportedRequest, reason: str | None, cancel: bool = True) -> None:
        """Give an export up. reason: what its peer is told."""
        self._remove(export)
        for index in [*export.slots]:
            if self.slots[index].state == "staging":
                self.slots[index].export = None  # the device may still write it
            else:
                self._free(index)
        if cancel:
            self._effects.append(Cancel(export.request_id))
        if reason is not None:
            peer, request, attempt = export.key
            self._send(peer, Refused(request, attempt, reason))

    def _remove(self, export: ExportedRequest) -> None:
        del self.exports[export.key], self._by_id[export.request_id]

    def _free(self, index: int) -> None:
        slot = self.slots[index]
        if slot.export is not None:
            slot.export.slots.discard(index)
        slot.state, slot.export, slot.generation = "free", None, slot.generation + 1

    def _send(self, peer: PeerId, message: ToDecode) -> None:
        self._effects.append(Send(peer, message))


def still_offered(slot: SendSlot, ref: SlotRef, key: Key) -> bool:
    """Whether a slot holds what was offered to this attempt under this generation (vllm-52234)."""
    export = slot.export
    return slot.state == "offered" and slot.generation == ref.generation and export is not None and export.key == key
