"""Requests that another worker prefills, and requests that are prefilled for another worker.

decode    waiting --admit--> importing --last piece imported--> decoding
             ^                   |
             '-- to be prefilled here, from what the prefix cache now has
prefill   waiting --admit--> prefilling --last chunk--> exporting --all pieces taken--> gone

The desk (`transfer/`) says which piece goes into which slot, and is told what it must know by events.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request
from treetop.scheduler.rows import Rows
from treetop.types.errors import InvariantError
from treetop.types.handover import (
    Admitted,
    Computed,
    DecodeEvent,
    FirstToken,
    Gone,
    Imported,
    Packed,
    Piece,
    PrefillEvent,
)
from treetop.types.ids import RequestId
from treetop.types.layout import Layout
from treetop.types.messages import Export, ExportPlan, Import, ImportPlan, StepResult


@dataclass(slots=True)
class Coming:
    """What is known of a request in `importing`.

    landed: its tokens before this one are in its pages, in landing slots, or on the way between. first: came with the
    last piece. local: nothing more counts; it leaves once no step with its row is out.
    """

    landed: int
    first: FirstToken | None = None
    local: bool = False


class FirstOutput(NamedTuple):
    """A request whose last piece has been imported, and what it emits: the root."""

    request: Request
    first: FirstToken


class Handover:
    """Pieces that wait to be packed or imported, requests that wait for them, and events for the desk.

    Every slot that a command names comes back in exactly one `Packed` or `Imported`.
    """

    def __init__(self, layout: Layout, queues: Queues, rows: Rows, clock: Callable[[], float]) -> None:
        self._layout, self._queues, self._rows, self._clock = layout, queues, rows, clock
        self._coming: dict[RequestId, Coming] = {}
        self._exports: list[tuple[Request, int, Piece]] = []
        self._imports: list[tuple[Request, int, Piece, tuple[int, ...]]] = []
        self._owed: dict[int, Packed | Imported] = {}  # by slot, as it will be said if nothing comes of it
        self._events: list[DecodeEvent | PrefillEvent] = []

    @property
    def has_events(self) -> bool:
        """Whether the desk is to be told of something."""
        return bool(self._events)

    def take_events(self) -> list[DecodeEvent | PrefillEvent]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- decode: requests come

    def admit(self, request: Request) -> bool:
        """Give a waiting request a row, and pages for all its tokens and one round; False if there is no room."""
        kv_cache = self._rows.kv_cache
        lease, shared = kv_cache.open(request.ids)
        known, total = lease.shared * self._layout.page_size, request.tokens_at_entry(self._layout.headroom)
        reserved = kv_cache.reserve_import(lease, total, request.num_ids)
        if reserved is None:
            kv_cache.release(lease)
            return False
        request.num_computed_tokens = known
        self._rows.enter(request, lease, shared + reserved, total)
        self._queues.admitted(request)
        if request.admitted_s is None:
            request.admitted_s, request.num_cached_tokens = self._clock(), known
        self._coming[request.request_id] = Coming(known)
        self._events.append(Admitted(request.request_id, known))
        return True

    def landed(
        self, request_id: RequestId, slot: int, piece: Piece, checksums: Sequence[int], first: FirstToken | None
    ) -> None:
        """A landing slot holds the next piece of a request. first: with the last piece.

        Raises InvariantError for another piece than the next.
        """
        self._check_slot(slot)
        coming, request = self._coming.get(request_id), self._queues.by_id.get(request_id)
        if coming is None or coming.local or request is None:
            self._events.append(Imported(request_id, slot))
            return
        if piece.start != coming.landed or piece.total != request.num_ids or piece.last != (first is not None):
            raise InvariantError(f"request {request_id}: {piece} has landed after {coming.landed} tokens")
        coming.landed, coming.first = piece.end, first
        self._owed[slot] = Imported(request_id, slot)
        self._imports.append((request, slot, piece, tuple(checksums)))

    def prefill_locally(self, request_id: RequestId) -> None:
        """Nothing more comes for a request. It is prefilled here, as soon as no step with its row is out."""
        request = self._queues.by_id.get(request_id)
        if request is None:
            return
        if request.running is None:
            request.remote = False
        elif request_id in self._coming:
            self._coming[request_id].local = True
            self._drop_pieces(request)
            self._go_on_locally(request)

    # ---------------------------------------------------------------- prefill: requests go

    def computed(self, request: Request, first: FirstToken | None = None) -> None:
        """A chunk of a request to export has been planned; or its last one has been committed, and gave `first`.

        Whatever is packed from now on runs after the chunk.
        """
        if request.export_from is not None:
            self._events.append(Computed(request.request_id, request.num_computed_tokens, first))

    def export(self, request_id: RequestId, slot: int, piece: Piece) -> None:
        """Pack a piece of a request into a slot. Raises InvariantError for one that has not been computed."""
        self._check_slot(slot)
        request = self._queues.by_id.get(request_id)
        if request is None:
            self._events.append(Packed(request_id, slot, piece, ()))
            return
        begin = request.export_from
        if begin is None or not begin <= piece.start < piece.end <= request.num_computed_tokens:
            raise InvariantError(f"request {request_id}: {piece} is to be packed, {request.num_computed_tokens} tokens")
        if piece.total != request.num_ids or piece.count > self._layout.slot_tokens:
            raise InvariantError(f"request {request_id} of {request.num_ids} tokens: {piece} is to be packed")
        self._owed[slot] = Packed(request_id, slot, piece, ())
        self._exports.append((request, slot, piece))

    # ---------------------------------------------------------------- steps

    def plan(self) -> ExportPlan | ImportPlan | None:
        """All pieces that wait to be packed, or else imported; None if none do."""
        if self._exports:
            exports = tuple(Export(request.held.row, slot, piece) for request, slot, piece in self._exports)
            self._exports = []
            return ExportPlan(self._rows.take_edits(), self._rows.kv_cache.take_freed(), exports)
        if self._imports:
            imports = tuple(Import(r.held.row, slot, piece, sums) for r, slot, piece, sums in self._imports)
            setups = tuple(request.setup(piece.total) for request, _, piece, _ in self._imports if piece.last)
            self._imports = []
            return ImportPlan(self._rows.take_edits(), self._rows.kv_cache.take_freed(), setups, imports)
        return None

    def commit_exports(self, plan: ExportPlan, requests: Sequence[Request], result: StepResult) -> None:
        for request, export, checksums in zip(requests, plan.exports, result.exports, strict=True):
            self._give_back(Packed(request.request_id, export.slot, export.piece, checksums))

    def commit_imports(self, plan: ImportPlan, requests: Sequence[Request], result: StepResult) -> list[FirstOutput]:
        """Returns the requests that can decode now. One with a piece that is not intact is prefilled here."""
        done = []
        for request, each, got in zip(requests, plan.imports, result.imports, strict=True):
            self._give_back(self._owed[each.slot])
            coming = self._coming.get(request.request_id)
            if coming is None or coming.local:
                continue
            first = coming.first
            if not got.intact or (each.piece.last and not _agrees(request, first, got.root)):
                self._give_up(request, coming)
                continue
            request.num_computed_tokens = each.piece.end
            self._rows.cache(request, request.ids[: each.piece.end])
            if each.piece.last and first is not None:
                del self._coming[request.request_id]
                request.remote = False
                self._queues.imported(request)
                done.append(FirstOutput(request, first))
        for request in dict.fromkeys(requests):
            self._go_on_locally(request)
        return done

    # ---------------------------------------------------------------- ends

    def lose_all(self, old: "Handover") -> None:
        """Tell the desk what it has not heard of books that are given up, and of all in them that it waits for."""
        gone = [*old._coming, *(r.request_id for r in old._queues.by_id.values() if r.export_from is not None)]
        self._events += [*old._events, *map(Gone, gone), *old._owed.values()]

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it stood."""
        if self._coming.pop(request.request_id, None) is not None or request.export_from is not None:
            self._events.append(Gone(request.request_id))
        self._drop_pieces(request)

    def retract(self, request: Request) -> bool:
        """Take row and pages from a request of a hand-over, no step with its row being out; False if it is of none.

        One that is exported ends: who asked for it can prefill it, too.
        """
        coming = self._coming.get(request.request_id)
        if coming is not None:
            self._give_up(request, coming)
            self._go_on_locally(request)
        elif request.export_from is not None:
            request.finish_reason = "abort"
            self._queues.remove(request)
            self.ended(request)
            self._rows.leave(request, request.ids[: request.num_computed_tokens])
        return coming is not None or request.export_from is not None

    def _give_up(self, request: Request, coming: Coming) -> None:
        """Without being asked to: the desk hears of it."""
        coming.local = True
        self._events.append(Gone(request.request_id))
        self._drop_pieces(request)

    def _go_on_locally(self, request: Request) -> None:
        """Back to the queue, if that is due. What was imported is found again in the prefix cache."""
        coming = self._coming.get(request.request_id)
        if coming is None or not coming.local or request.held.steps_out:
            return
        del self._coming[request.request_id]
        request.remote = False
        self._rows.leave(request, request.ids[: request.num_computed_tokens])
        self._queues.put_back(request)
        request.num_computed_tokens = 0

    def _drop_pieces(self, request: Request) -> None:
        """Forget the pieces of a request that no step has taken."""
        slots = [slot for each, slot, _ in self._exports if each is request]
        slots += [slot for each, slot, *_ in self._imports if each is request]
        for slot in slots:
            self._give_back(self._owed[slot])
        self._exports = [each for each in self._exports if each[0] is not request]
        self._imports = [each for each in self._imports if each[0] is not request]

    def _give_back(self, event: Packed | Imported) -> None:
        """A slot comes back."""
        del self._owed[event.slot]
        self._events.append(event)

    def _check_slot(self, slot: int) -> None:
        """No slot is packed or imported twice at a time."""
        if not 0 <= slot < self._layout.handover_slots or slot in self._owed:
            raise InvariantError(f"slot {slot} is named, of {self._layout.handover_slots}; {[*self._owed]} are in use")


def _agrees(request: Request, first: FirstToken | None, root: int | None) -> bool:
    """What was offered as the first token is the record's root, with log-probabilities if the request asks for them."""
    asks = request.params.logprobs is not None
    return first is not None and first.token == root and (first.logprobs is not None) == asks
