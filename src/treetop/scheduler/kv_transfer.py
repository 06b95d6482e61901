"""Requests that another worker prefills, and requests that are prefilled for another worker.

decode    waiting --admit--> importing --last chunk imported--> decoding
             ^                   |
             '-- to be prefilled here, from what the prefix cache now has
prefill   waiting --admit--> prefilling --last chunk--> exporting --all chunks taken--> gone

The state machine of the worker's side (`disaggregation/`) says which chunk goes into which slot, and is told what it
must know by events.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treetop.scheduler.adapters import AdapterBooks
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request
from treetop.scheduler.rows import Rows
from treetop.types.errors import InvariantError
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.scheduling import (
    Admitted,
    Computed,
    Dropped,
    FirstToken,
    Imported,
    Prompt,
    Recv,
    SchedulerEvent,
    Stage,
    Staged,
)
from treetop.types.layout import Layout
from treetop.types.messages import Export, ExportPlan, Import, ImportPlan, StepResult


@dataclass(slots=True)
class PendingImport:
    """What is known of a request in `importing`.

    received: its tokens before this one are in its pages, in slots, or on the way between.
    first: came with the last chunk.
    local: nothing more counts; it leaves once no step with its row is out.
    """

    received: int
    first: FirstToken | None = None
    local: bool = False


class FirstOutput(NamedTuple):
    """A request whose last chunk has been imported, and what it emits: the root."""

    request: Request
    first: FirstToken


class KVTransfers:
    """Chunks that wait to be staged or imported, requests that wait for them, and events for the state machine.

    Every slot that a command names comes back in exactly one `Staged` or `Imported`.
    """

    def __init__(
        self, layout: Layout, queues: Queues, rows: Rows, clock: Callable[[], float], adapters: AdapterBooks
    ) -> None:
        self._layout, self._queues, self._rows, self._clock = layout, queues, rows, clock
        self._adapters = adapters
        self._pending: dict[RequestId, PendingImport] = {}
        self._exports: list[Stage] = []
        self._imports: list[Recv] = []
        self._owed: dict[int, Staged | Imported] = {}  # by slot, as it will be said if nothing comes of it
        self._events: list[SchedulerEvent] = []

    @property
    def has_events(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._events)

    def take_events(self) -> list[SchedulerEvent]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- decode: requests come

    def admit(self, request: Request) -> bool:
        """Give a waiting request a row, and pages for all its tokens and one round; False if there is no room."""
        kv_cache, adapter = self._rows.kv_cache, request.adapter
        if not self._adapters.place(adapter, self._rows.adapters):
            return False
        lease, shared = kv_cache.open(request.ids, request.cache_salt)
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
        self._pending[request.request_id] = PendingImport(known)
        prompt = Prompt(request.ids, request.params, request.seed, adapter.name, self._adapters.digest(adapter))
        self._events.append(Admitted(request.request_id, known, prompt))
        return True

    def recv(self, recv: Recv) -> None:
        """A slot holds the next chunk of a request. Raises InvariantError for another chunk than the next."""
        request_id, slot, chunk, _, first = recv
        self._check_slot(slot)
        pending, request = self._pending.get(request_id), self._queues.by_id.get(request_id)
        if pending is None or pending.local or request is None:
            self._events.append(Imported(request_id, slot))
            return
        if chunk.start != pending.received or chunk.total != request.num_ids or chunk.last != (first is not None):
            raise InvariantError(f"request {request_id}: {chunk} was received after {pending.received} tokens")
        pending.received, pending.first = chunk.end, first
        self._owed[slot] = Imported(request_id, slot)
        self._imports.append(recv)

    def prefill_locally(self, request_id: RequestId) -> None:
        """Nothing more comes for a request. It is prefilled here, as soon as no step with its row is out."""
        request = self._queues.by_id.get(request_id)
        if request is None:
            return
        if request.running is None:
            request.remote = False
        elif request_id in self._pending:
            self._pending[request_id].local = True
            self._drop_chunks(request)
            self._go_on_locally(request)

    # ---------------------------------------------------------------- prefill: requests go

    def computed(self, request: Request, first: FirstToken | None = None) -> None:
        """A chunk of a request to export has been planned; or its last one has been committed, and gave `first`.

        Whatever is packed from now on runs after the chunk.
        """
        if request.export_from is not None:
            self._events.append(Computed(request.request_id, request.num_computed_tokens, first))

    def stage(self, stage: Stage) -> None:
        """Pack a chunk of a request into a slot. Raises InvariantError for one that has not been computed."""
        request_id, slot, chunk = stage
        self._check_slot(slot)
        request = self._queues.by_id.get(request_id)
        if request is None:
            self._events.append(Staged(*stage, ()))
            return
        begin = request.export_from
        if begin is None or not begin <= chunk.start < chunk.end <= request.num_computed_tokens:
            raise InvariantError(f"request {request_id}: {chunk} is to be packed, {request.num_computed_tokens} tokens")
        if chunk.total != request.num_ids or chunk.count > self._layout.slot_tokens:
            raise InvariantError(f"request {request_id} of {request.num_ids} tokens: {chunk} is to be packed")
        self._owed[slot] = Staged(*stage, ())
        self._exports.append(stage)

    # ---------------------------------------------------------------- steps

    def plan(self) -> ExportPlan | ImportPlan | None:
        """All chunks that wait to be packed, or else imported; None if none do."""
        by_id = self._queues.by_id
        if self._exports:
            exports = tuple(Export(by_id[each.request_id].held.row, each.slot, each.chunk) for each in self._exports)
            self._exports = []
            return ExportPlan(self._rows.take_edits(), self._rows.kv_cache.take_freed(), exports)
        if self._imports:
            moved = [(by_id[each.request_id], each) for each in self._imports]
            imports = tuple(Import(r.held.row, each.slot, each.chunk, each.checksums) for r, each in moved)
            setups = tuple(request.setup(each.chunk.total) for request, each in moved if each.chunk.last)
            self._imports = []
            edits, freed = self._rows.take_edits(), self._rows.kv_cache.take_freed()
            return ImportPlan(edits, freed, setups, imports, self._adapters.take_edits())
        return None

    def commit_exports(self, plan: ExportPlan, requests: Sequence[Request], result: StepResult) -> None:
        for request, export, checksums in zip(requests, plan.exports, result.exports, strict=True):
            self._give_back(Staged(request.request_id, export.slot, export.chunk, checksums))

    def commit_imports(self, plan: ImportPlan, requests: Sequence[Request], result: StepResult) -> list[FirstOutput]:
        """Returns the requests that can decode now. One with a chunk that is not intact is prefilled here."""
        done = []
        for request, each, got in zip(requests, plan.imports, result.imports, strict=True):
            self._give_back(self._owed[each.slot])
            pending = self._pending.get(request.request_id)
            if pending is None or pending.local:
                continue
            first = pending.first
            if not got.intact or (each.chunk.last and not _agrees(request, first, got.root)):
                self._give_up(request, pending)
                continue
            request.num_computed_tokens = each.chunk.end
            self._rows.cache(request, request.ids[: each.chunk.end])
            if each.chunk.last and first is not None:
                del self._pending[request.request_id]
                request.remote, request.num_imported_tokens = False, request.num_ids - request.num_cached_tokens
                self._queues.imported(request)
                done.append(FirstOutput(request, first))
        for request in dict.fromkeys(requests):
            self._go_on_locally(request)
        return done

    # ---------------------------------------------------------------- ends

    def lose_all(self, old: "KVTransfers") -> None:
        """Tell what was not told of books that are given up, and of all in them that the state machine waits for."""
        gone = [*old._pending, *(r.request_id for r in old._queues.by_id.values() if r.export_from is not None)]
        self._events += [*old._events, *map(Dropped, gone), *old._owed.values()]

    def ended(self, request: Request) -> None:
        """A request has ended, wherever it stood."""
        if self._pending.pop(request.request_id, None) is not None or request.export_from is not None:
            self._events.append(Dropped(request.request_id))
        self._drop_chunks(request)

    def retract(self, request: Request) -> bool:
        """Take row and pages from a request whose KV is transferred; False for any other. No step with its row is out.

        One that is exported ends: who asked for it can prefill it, too.
        """
        pending = self._pending.get(request.request_id)
        if pending is not None:
            self._give_up(request, pending)
            self._go_on_locally(request)
        elif request.export_from is not None:
            request.finish_reason = "abort"
            self._queues.remove(request)
            self.ended(request)
            self._rows.leave(request, request.ids[: request.num_computed_tokens])
        return pending is not None or request.export_from is not None

    def _give_up(self, request: Request, pending: PendingImport) -> None:
        """Without being asked to: the state machine hears of it."""
        pending.local = True
        self._events.append(Dropped(request.request_id))
        self._drop_chunks(request)

    def _go_on_locally(self, request: Request) -> None:
        """Back to the queue, if that is due. What was imported is found again in the prefix cache."""
        pending = self._pending.get(request.request_id)
        if pending is None or not pending.local or request.held.steps_out:
            return
        del self._pending[request.request_id]
        request.remote = False
        self._rows.leave(request, request.ids[: request.num_computed_tokens])
        self._queues.put_back(request)
        request.num_computed_tokens = 0

    def _drop_chunks(self, request: Request) -> None:
        """Forget the chunks of a request that no step has taken."""
        mine = request.request_id
        slots = [each.slot for each in self._exports if each.request_id == mine]
        slots += [each.slot for each in self._imports if each.request_id == mine]
        for slot in slots:
            self._give_back(self._owed[slot])
        self._exports = [each for each in self._exports if each.request_id != mine]
        self._imports = [each for each in self._imports if each.request_id != mine]

    def _give_back(self, event: Staged | Imported) -> None:
        """A slot comes back."""
        del self._owed[event.slot]
        self._events.append(event)

    def _check_slot(self, slot: int) -> None:
        """No slot is packed or imported twice at a time."""
        if not 0 <= slot < self._layout.disaggregation_slots or slot in self._owed:
            raise InvariantError(
                f"slot {slot} is named, of {self._layout.disaggregation_slots}; {[*self._owed]} are in use"
            )


def _agrees(request: Request, first: FirstToken | None, root: int | None) -> bool:
    """What was offered as the first token is the record's root, with log-probabilities if the request asks for them."""
    asks = request.params.logprobs is not None
    return first is not None and first.token == root and (first.logprobs is not None) == asks
