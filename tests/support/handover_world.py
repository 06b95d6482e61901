"""Both state machines in a world that goes wrong: a model of workers, a network, memory and clocks, drawn at random.

Messages are lost, late, twice, in another order. Workers crash, stop and go on; sessions end; clocks jump. Transfers
copy a word at a time from memory as it stands at that moment, may stop for long, and cannot be cancelled. A word of
memory says whose it is, so that a wrong one is seen wherever it lands.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from treetop.disaggregation.decode import DecodeMachine
from treetop.disaggregation.events import (
    Cancel,
    Connected,
    Disconnect,
    Disconnected,
    FinishExport,
    PrefillLocally,
    Pull,
    Pulled,
    Received,
    Send,
    Start,
    Tick,
)
from treetop.disaggregation.prefill import PrefillMachine
from treetop.types.ids import FULL, RequestId
from treetop.types.kv import paired
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer import wire
from treetop.types.kv_transfer.layout import ChunkLayout
from treetop.types.kv_transfer.options import Deadlines
from treetop.types.kv_transfer.scheduling import (
    Admitted,
    Computed,
    Dropped,
    FirstToken,
    Imported,
    Prompt,
    Recv,
    Stage,
    Staged,
)
from treetop.types.kv_transfer.transport import PeerId
from treetop.types.kv_transfer.wire import Metadata, Released
from treetop.types.layout import KVGroup
from treetop.types.sampling import SamplingParams

WORDS = 4
"""Of a slot's memory."""
_GREEDY = SamplingParams()
LAYOUT = ChunkLayout((KVGroup(FULL, 1, paired(1, 4)),), 4, 8)
META = Metadata(100, ())
Words = list[tuple[Any, ...]]


def words_of(prompt_ids: tuple[int, ...], chunk: KVChunk) -> Words:
    return [(prompt_ids[0], chunk.start, chunk.count, i) for i in range(WORDS)]


def checksum(words: Words) -> int:
    return hash(tuple(words)) % 2**64


def checksums_of(words: Words, chunk: KVChunk) -> tuple[int, ...]:
    """As many as a chunk has segments."""
    return (checksum(words),) * len(LAYOUT.segments(chunk))


@dataclass
class Odds:
    """How wrong things go. loss, twice: of a message. stall, broken: of a transfer. mishap_s: from one to the next."""

    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.01
    stall: float = 0.0
    broken: float = 0.0
    mishap_s: float = 1e9


@dataclass(eq=False)
class PrefillNode:
    """A prefill worker: state machine, memory, and what its scheduler would do."""

    machine: PrefillMachine
    memory: list[Words]
    alive: bool = True
    stopped_until: float = 0.0
    clock: float = 0.0
    running: dict[RequestId, Start] = field(default_factory=dict)


@dataclass(eq=False)
class Transfer:
    """slot: where it writes. over: no word can come any more."""

    slot: int
    source: PrefillNode
    remote_slot: int
    left: list[int]
    over: bool = False
    told: bool = False


@dataclass(eq=False)
class DecodeNode:
    """A decode worker: state machine, memory, and what its scheduler would do.

    received: what it imports, in this order. done: how each request ended.
    """

    machine: DecodeMachine
    memory: list[Words]
    alive: bool = True
    stopped_until: float = 0.0
    clock: float = 0.0
    import_s: float = 0.0
    received: deque[Recv] = field(default_factory=deque)
    waiting: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    imported: dict[RequestId, int] = field(default_factory=dict)
    done: dict[RequestId, str] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)
    confirmed: set[Any] = field(default_factory=set)


class World:
    """One schedule. checks: whether an import compares checksums; the state machines must do without."""

    def __init__(self, seed: int, odds: Odds, *, checks: bool = False, slots: int = 3, num_prefill: int = 1) -> None:
        self.rng, self.odds, self.checks, self.num_slots = random.Random(seed), odds, checks, slots
        self.now, self._events, self._order = 0.0, [], count()
        self.deadlines = Deadlines()
        self._peers, self._request_ids = count(1), count(1)
        self.sessions: dict[PeerId, tuple[PrefillNode, DecodeNode]] = {}
        self.refused = self.wrong = self.overlaps = 0
        self.prefills = [self._new_prefill() for _ in range(num_prefill)]
        self.decode = self._new_decode()
        self.quiet = False

    # ---------------------------------------------------------------- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def soon(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s)

    def run(self, requests: int, seconds: float = 40.0) -> None:
        """A schedule, then calm, until nothing waits for anything."""
        for node in self.prefills:
            self._connect(node)
        self._tick()
        for _ in range(requests):
            self.after(self.rng.uniform(0, seconds * 0.7), self._arrive)
        if self.odds.mishap_s < seconds:
            self.after(self.soon(self.odds.mishap_s), self._mishap)
        self._until(seconds)
        self.quiet, self.odds = True, Odds()
        self._until(seconds + 120)
        self._check_end()

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self.check()
        self.now = end

    def _tick(self) -> None:
        for node in self.prefills:
            self._at_prefill(node, Tick())
        self._at_decode(self.decode, Tick())
        self.after(0.25 if not self.quiet else 1.0, self._tick)

    # ---------------------------------------------------------------- workers

    def _new_prefill(self) -> PrefillNode:
        memory: list[Words] = [[("nothing",)] * WORDS for _ in range(self.num_slots)]
        return PrefillNode(PrefillMachine(self.num_slots, 4, LAYOUT, 1000, self.deadlines), memory)

    def _new_decode(self) -> DecodeNode:
        memory: list[Words] = [[("nothing",)] * WORDS for _ in range(self.num_slots)]
        return DecodeNode(DecodeMachine(self.num_slots, 64, 4, LAYOUT, self.deadlines), memory)

    def _awake(self, node: PrefillNode | DecodeNode, act: Callable[[], None]) -> bool:
        """Whether it can act now; a stopped one does so later, a dead one never."""
        if node.alive and node.stopped_until > self.now:
            self.after(node.stopped_until - self.now + 1e-6, act)
        return node.alive and node.stopped_until <= self.now

    def _at_prefill(self, node: PrefillNode, event: Any) -> None:
        if self._awake(node, lambda: self._at_prefill(node, event)):
            for effect in node.machine.handle(event, self.now + node.clock):
                self._do_prefill(node, effect)

    def _at_decode(self, node: DecodeNode, event: Any) -> None:
        if not self._awake(node, lambda: self._at_decode(node, event)):
            return
        match event:
            case Received(peer, Released(request, attempt, ref, True)):
                node.confirmed.add((peer, request, attempt, ref))
            case Admitted(request_id) if request_id in node.done:
                return
        for effect in node.machine.handle(event, self.now + node.clock):
            self._do_decode(node, effect)

    def _do_prefill(self, node: PrefillNode, effect: Any) -> None:
        match effect:
            case Send(peer, message):
                self._send(peer, wire.encode(message), to_decode=True)
            case Start(request_id):
                node.running[request_id] = effect
                self.after(self.soon(0.3), lambda: self._compute(node, request_id, effect.start))
            case Stage(request_id, slot, chunk):
                node.memory[slot][0] = ("half packed", request_id)
                prompt_ids = node.machine.slots[slot].export.prompt.ids  # type: ignore[union-attr]  # a slot in use
                self.after(self.soon(0.05), lambda: self._staged(node, request_id, slot, chunk, prompt_ids))
            case FinishExport(request_id):
                del node.running[request_id]
            case Cancel(request_id):
                node.running.pop(request_id, None)
                self.after(0.0, lambda: self._at_prefill(node, Dropped(request_id)))

    def _compute(self, node: PrefillNode, request_id: RequestId, done: int) -> None:
        if not self._awake(node, lambda: self._compute(node, request_id, done)) or request_id not in node.running:
            return
        if not self.quiet and self.rng.random() < 0.01:
            del node.running[request_id]
            self._at_prefill(node, Dropped(request_id))
            return
        total = len(node.running[request_id].prompt.ids)
        done = min(done + self.rng.randint(1, 7), total)
        self._at_prefill(node, Computed(request_id, done, FirstToken(1) if done == total else None))
        if done < total:
            self.after(self.soon(0.3), lambda: self._compute(node, request_id, done))

    def _staged(
        self, node: PrefillNode, request_id: RequestId, slot: int, chunk: KVChunk, ids: tuple[int, ...]
    ) -> None:
        if self._awake(node, lambda: self._staged(node, request_id, slot, chunk, ids)):
            node.memory[slot][:] = words_of(ids, chunk)
            self._at_prefill(node, Staged(request_id, slot, chunk, checksums_of(node.memory[slot], chunk)))

    # ---------------------------------------------------------------- requests

    def _arrive(self) -> None:
        request_id, node = RequestId(next(self._request_ids)), self.decode
        ids = (request_id, *range(self.rng.randint(0, 20)))
        node.waiting[request_id], start = ids, self.rng.choice((0, 0, self.rng.randrange(len(ids))))
        node.imported[request_id] = start
        self._at_decode(node, Admitted(request_id, start, Prompt(ids, _GREEDY, 0)))
        if self.rng.random() < 0.1:
            self.after(self.soon(1.0), lambda: self._abort(node, request_id))

    def _abort(self, node: DecodeNode, request_id: RequestId) -> None:
        if self._awake(node, lambda: self._abort(node, request_id)) and request_id not in node.done:
            node.done[request_id] = "aborted"
            self._at_decode(node, Dropped(request_id))

    def _do_decode(self, node: DecodeNode, effect: Any) -> None:
        match effect:
            case Send(peer, message):
                self._send(peer, wire.encode(message), to_decode=False)
            case Pull():
                self._begin(node, effect)
            case Recv(request_id, slot):
                offered = node.pulls[slot]
                assert any(
                    c[:2] == (offered.peer, request_id) and c[3].slot == offered.remote_slot for c in node.confirmed
                )
                assert effect.chunk == offered.chunk
                node.import_s = max(node.import_s, self.now) + self.soon(0.1)
                node.received.append(effect)
                self.after(node.import_s - self.now, lambda: self._import(node))
            case PrefillLocally(request_id):
                node.done.setdefault(request_id, "locally")
            case Disconnect(peer):
                self.after(self.soon(0.5), lambda: self._session_ends(peer))

    def _import(self, node: DecodeNode) -> None:
        if not self._awake(node, lambda: self._import(node)):
            return
        received = node.received.popleft()
        request_id, chunk, words = received.request_id, received.chunk, node.memory[received.slot]
        alive = request_id not in node.done
        if alive and self.checks and received.checksums != checksums_of(words, chunk):
            self.refused += 1
            node.done[request_id] = "locally"
            self._at_decode(node, Dropped(request_id))
        elif alive:
            assert node.imported[request_id] == chunk.start, "chunks are imported in order"
            node.imported[request_id] = chunk.end
            self.wrong += words != words_of(node.waiting[request_id], chunk)
            if chunk.last:
                node.done[request_id] = "imported"
        self._at_decode(node, Imported(request_id, received.slot))

    # ---------------------------------------------------------------- network

    def _connect(self, node: PrefillNode) -> None:
        """Both sides meet, now or once they can."""
        if not node.alive or node not in self.prefills:
            return
        if max(node.stopped_until, self.decode.stopped_until) > self.now:
            self.after(1.0, lambda: self._connect(node))
            return
        peer = PeerId(next(self._peers))
        self.sessions[peer] = (node, self.decode)
        self._at_prefill(node, Connected(peer, META))
        self._at_decode(self.decode, Connected(peer, META))

    def _session_ends(self, peer: PeerId) -> None:
        """Each side sees it in its time, and they meet again."""
        if peer in self.sessions:
            prefill, decode = self.sessions.pop(peer)
            self.after(self.soon(0.5), lambda: self._at_prefill(prefill, Disconnected(peer)))
            self.after(self.soon(0.5), lambda: self._at_decode(decode, Disconnected(peer)))
            self.after(self.soon(1.0), lambda: self._connect(prefill))

    def _send(self, peer: PeerId, body: bytes, *, to_decode: bool) -> None:
        times = int(self.rng.random() >= self.odds.loss) + int(self.rng.random() < self.odds.twice)
        for _ in range(times):
            self.after(self.soon(self.odds.delay_s), lambda: self._arrives(peer, body, to_decode))

    def _arrives(self, peer: PeerId, body: bytes, to_decode: bool) -> None:
        if peer not in self.sessions:
            return
        prefill, decode = self.sessions[peer]
        if to_decode:
            answer = wire.decode_to_decode(body)
            assert answer is not None
            self._at_decode(decode, Received(peer, answer))
        else:
            asked = wire.decode_to_prefill(body)
            assert asked is not None
            self._at_prefill(prefill, Received(peer, asked))

    # ---------------------------------------------------------------- transfers

    def _begin(self, node: DecodeNode, pull: Pull) -> None:
        node.pulls[pull.slot] = pull
        if pull.peer not in self.sessions:
            self.after(0.01, lambda: self._at_decode(node, Pulled(pull.slot, "failed")))
            return
        source = self.sessions[pull.peer][0]
        before = node.transfers.get(pull.slot)
        self.overlaps += before is not None and not before.over
        words = self.rng.sample(range(WORDS), 1 if pull.chunk is None else WORDS)  # the link is timed quickly
        transfer = node.transfers[pull.slot] = Transfer(pull.slot, source, pull.remote_slot, words)
        self._copy(node, transfer)

    def _copy(self, node: DecodeNode, transfer: Transfer) -> None:
        """The next word, or the end. Memory is written by a device of its own: a stopped worker does not stop it."""
        if not transfer.source.alive and not transfer.told:
            transfer.told = True
            lag = self.soon(0.5)
            over = self.rng.random() < 0.5
            transfer.over = over
            self._tell(node, transfer, Pulled(transfer.slot, "failed" if over else "broken"))
            if over:
                return
            self.after(lag, lambda: self._end(node, transfer))
        if transfer.over:
            return
        if self.rng.random() < self.odds.broken and not transfer.told:
            transfer.over = True
            self._tell(node, transfer, Pulled(transfer.slot, "failed"))
            return
        if transfer.left and transfer.source.stopped_until <= self.now:
            word = transfer.left.pop()
            node.memory[transfer.slot][word] = transfer.source.memory[transfer.remote_slot][word]
        if transfer.left or transfer.told:
            stalled = self.rng.random() < self.odds.stall
            self.after(self.rng.uniform(3, 15) if stalled else self.soon(0.02), lambda: self._copy(node, transfer))
        else:
            transfer.over = True
            self._tell(node, transfer, Pulled(transfer.slot, "done"))

    def _end(self, node: DecodeNode, transfer: Transfer) -> None:
        transfer.over = True
        self._tell(node, transfer, Pulled(transfer.slot, "failed"))

    def _tell(self, node: DecodeNode, transfer: Transfer, event: Pulled) -> None:
        if node.transfers[transfer.slot] is transfer:
            self._at_decode(node, event)

    # ---------------------------------------------------------------- mishaps

    def _mishap(self) -> None:
        if self.quiet:
            return
        prefill = self.rng.choice(self.prefills)
        match self.rng.randrange(6):
            case 0:
                self._crash_prefill(prefill)
            case 1:
                self._crash_decode()
            case 2:
                prefill.stopped_until = self.now + self.rng.uniform(1, 20)
            case 3:
                self.decode.stopped_until = self.now + self.rng.uniform(1, 20)
            case 4:
                for peer in [*self.sessions]:
                    self._session_ends(peer)
            case 5:
                node = self.rng.choice([prefill, self.decode])
                node.clock += self.rng.choice((self.rng.uniform(0, 60), -self.rng.uniform(0, 5)))
        self.after(self.soon(self.odds.mishap_s), self._mishap)

    def _crash_prefill(self, node: PrefillNode) -> None:
        node.alive = False
        for peer in [peer for peer, ends in self.sessions.items() if ends[0] is node]:
            self._session_ends(peer)
        new = self.prefills[self.prefills.index(node)] = self._new_prefill()
        self.after(self.soon(2.0), lambda: self._connect(new))

    def _crash_decode(self) -> None:
        """Its requests die with it, and nothing writes its memory any more."""
        self.decode.alive = False
        for peer in [*self.sessions]:
            self._session_ends(peer)
        self.decode = self._new_decode()

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        for node in self.prefills:
            exports = set(node.machine.exports.values())
            held: list[int] = []
            for export in exports:
                held += export.slots
            assert len(held) == len(set(held)), "a slot of two exports"
            for index, slot in enumerate(node.machine.slots):
                assert (index in held) == (slot.export is not None)
                assert slot.export is None or (slot.export in exports and index in slot.export.slots)
                assert slot.export is None if slot.state == "free" else True
                assert slot.export is not None if slot.state == "offered" else True
        machine = self.decode.machine
        for slot in machine.slots:
            busy = slot.state in ("pulling", "releasing", "confirmed")
            assert (slot.attempt is not None) == (slot.offer is not None) == busy
            assert not busy or slot.attempt in machine.attempts.values()
        for request_id, attempt in machine.attempts.items():
            assert attempt.request_id == request_id

    def _check_end(self) -> None:
        decode = self.decode
        assert not decode.machine.attempts
        assert {*decode.waiting} == {*decode.done}, "a request waits for ever"
        assert all(slot.state == "free" for slot in decode.machine.slots), "a slot slot did not come back"
        for node in self.prefills:
            assert not node.machine.exports
            assert not node.running
            assert all(slot.state == "free" for slot in node.machine.slots), "a slot did not come back"
