"""The scheduler: turns waiting and running requests into plans, and results into updates.

waiting --admit--> prefilling --last chunk--> decoding --stop--> ended --last step committed--> gone
   ^                                             |
   '----------------- retract -------------------'
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treetop.cache.ledger import Columns, PageLedger
from treetop.checks.host import check_cached, check_cell, check_emitted
from treetop.scheduler.request import Request, RequestUpdate, Running
from treetop.scheduler.stops import first_stop
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError, InvariantError
from treetop.types.ids import GroupName, PageId, RequestId, Row
from treetop.types.layout import Layout
from treetop.types.messages import Chunk, PageEdit, PrefillPlan, RoundPlan, RowResult, RowSetup, StepPlan, StepResult
from treetop.types.sampling import Choice, FinishReason, SamplingParams
from treetop.types.stopping import StopChecker


@dataclass(frozen=True, slots=True)
class _Out:
    """A plan whose result has not been committed."""

    plan: StepPlan
    rows: frozenset[Row]


class Scheduler:
    """Owns requests, rows and leases. Up to `lag` plans are out at a time, and `commit` takes results in their order.

    A request that ends while steps with its row are out keeps row and lease until the last of them is committed; what
    they give is dropped. Page-table changes wait in `_cells` for the next plan, whatever becomes of the one that made
    them.
    """

    def __init__(self, layout: Layout, config: EngineConfig, eos_ids: Sequence[int]) -> None:
        self._layout, self._config, self._eos_ids = layout, config, frozenset(eos_ids)
        self._ledger = PageLedger(layout, config.radix_cache, config.check_level)
        self._free_rows = [Row(row) for row in range(layout.max_requests - 1, -1, -1)]
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []  # oldest admission first
        self._by_id: dict[RequestId, Request] = {}  # those that have not ended
        self._by_row: dict[Row, Request] = {}
        self._out: deque[_Out] = deque()
        self._cells: dict[tuple[GroupName, Row, int], PageId] = {}
        self._next_id = 0
        self._prefilled_last = False
        self.num_retractions = 0

    # ---------------------------------------------------------------- requests in and out

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, stop: StopChecker) -> RequestId:
        """Queue a request. Raises InputError, before anything changes, for a prompt that can never run."""
        self.check_prompt(prompt_ids)
        request = Request(RequestId(self._next_id), tuple(prompt_ids), params, seed, stop)
        self._next_id += 1
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        return request.request_id

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise InputError for a prompt that is empty or leaves no room for one token."""
        if not prompt_ids:
            raise InputError("the prompt is empty: it has no token after encoding")
        if len(prompt_ids) >= self._layout.max_context:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens and leaves no room for one more in a context of"
                f" {self._layout.max_context}; shorten it or raise --context-length"
            )

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """End a request, wherever it stands; None if it is not alive. Steps with its row may still be out."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        return self._finish(request, (), "abort")

    def request(self, request_id: RequestId) -> Request:
        return self._by_id[request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    # ---------------------------------------------------------------- planning

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before the oldest plan that is out has been committed.

        Prefill goes first, but takes turns with rounds that could run.
        """
        if len(self._out) == self._layout.lag:
            return None
        ready = [request for request in self._decoding if self._may_go_on(request)]
        plan: StepPlan | None = None if self._prefilled_last and ready else self._plan_prefill()
        if plan is None and ready:
            plan = self._plan_round(ready)
        if plan is not None:
            self._prefilled_last = isinstance(plan, PrefillPlan)
            self._out.append(_Out(plan, frozenset(plan.rows)))
        return plan

    def _plan_prefill(self) -> PrefillPlan | None:
        setups: list[RowSetup] = []
        batch: list[tuple[Request, int]] = []
        for request in self._prefilling:
            room = self._prefill_room(batch)
            if room > 0:
                count = min(room, request.num_ids - request.prefilled)
                self._reserve_chunk(request, count)
                batch.append((request, count))
        while self._waiting and self._free_rows and self._cells_left():
            request, room = self._waiting[0], self._prefill_room(batch)
            if room == 0 or not self._admit(request, room):
                break
            self._waiting.popleft()
            self._prefilling.append(request)
            setups.append(RowSetup(_held(request).row, request.prefilled, request.params, request.seed))
            batch.append((request, min(room, request.num_ids - request.prefilled)))
        if not batch:
            return None
        return PrefillPlan(
            edits=self._take_edits(),
            freed=self._ledger.take_freed(),
            setups=tuple(setups),
            chunks=tuple(self._chunk(request, count) for request, count in batch),
            choice=Choice.of(request.params for request, _ in batch),
        )

    def _prefill_room(self, batch: list[tuple[Request, int]]) -> int:
        """Tokens that one more row may bring to a prefill batch, which holds `chunk` with its padding; 0 for no row."""
        room = self._layout.chunk // self._layout.bucket_for(len(batch) + 1)
        return room if all(count <= room for _, count in batch) else 0

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them. After its last chunk it can decode."""
        ids, start = request.ids, request.prefilled
        end = start + count
        request.prefilled = end
        if end == len(ids):
            self._prefilling.remove(request)
            self._decoding.append(request)
        return Chunk(_held(request).row, start, ids[start:end], next_prompt_token(ids, end))

    def _reserve_chunk(self, request: Request, count: int) -> None:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        known, total, held = request.prefilled, request.num_ids + self._layout.headroom, _held(request)
        self._write(held.row, self._ledger.slide(held.lease, known))
        more = self._ledger.reserve(held.lease, total, known, known + count)
        if more is None:
            raise InvariantError("a window's pool does not hold the windows of all running requests")
        self._write(held.row, more)

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a row and pages for all its tokens and one round; False if there is no room."""
        lease, shared = self._ledger.open(request.ids)
        known = lease.shared * self._layout.page_size
        end = min(known + budget, request.num_ids)
        reserved = self._ledger.reserve(lease, request.num_ids + self._layout.headroom, known, end)
        if reserved is None:
            self._ledger.release(lease)
            return False
        request.prefilled = known
        request.running = Running(self._free_rows.pop(), lease)
        self._by_row[request.running.row] = request
        self._write(request.running.row, shared + reserved)
        return True

    def _plan_round(self, ready: list[Request]) -> RoundPlan | None:
        """A round of all that are ready; None if it needs pages that only a commit can tell how to find."""
        for request in ready:
            if request.running is not None and not self._reserve_round(request):  # None: retracted for an older one
                return None
        batch = [request for request in ready if request.running is not None]
        return RoundPlan(
            edits=self._take_edits(),
            freed=self._ledger.take_freed(),
            rows=tuple(_held(request).row for request in batch),
            shape=self._config.shape,
            committed_bound=max(self._committed_bound(request) for request in batch),
            choice=Choice.of(request.params for request in batch),
        )

    def _may_go_on(self, request: Request) -> bool:
        """Whether a decoding request may need a round more than those that are out, of which each emits a token."""
        first = request.prefilled == request.num_ids  # its first token is out too
        return self._rounds_out(request) + first < self._tokens_left(request)

    def _tokens_left(self, request: Request) -> int:
        """Tokens that max_tokens and the context still allow."""
        return min(request.params.max_tokens - len(request.output_ids), self._layout.max_context - request.num_ids)

    def _rounds_out(self, request: Request) -> int:
        row = _held(request).row
        return sum(row in out.rows and isinstance(out.plan, RoundPlan) for out in self._out)

    def _committed_bound(self, request: Request) -> int:
        """Tokens that the device may have committed once all that is out has run; `prefilled` are known."""
        return request.prefilled + self._rounds_out(request) * self._layout.commit_width

    def _reserve_round(self, request: Request) -> bool:
        """Pages for one more round of a request; the youngest others are retracted for them, or it itself.

        False if pages are short while something is out: whom to retract, and at which length, shows when it is
        committed.
        """
        held, known = _held(request), request.prefilled
        self._write(held.row, self._ledger.slide(held.lease, known))
        need = self._committed_bound(request) + self._layout.commit_width
        while (cells := self._ledger.reserve(held.lease, need, known)) is None:
            if self._out:
                return False
            victim = self._prefilling[-1] if self._prefilling else self._decoding[-1]
            if victim is request and len(self._decoding) == 1:
                raise InvariantError("the pools do not hold one request at the context wall")
            self._retract(victim)
            if victim is request:
                return True
        self._write(held.row, cells)
        return True

    def _write(self, row: Row, cells: Columns) -> None:
        """Page-table cells of a row, for the next plan; of two writes to a cell the later one counts."""
        for group, column, page in cells:
            self._cells[group, row, column] = page

    def _cells_left(self) -> bool:
        """Whether the next plan can carry one more admission."""
        layout = self._layout
        return len(self._cells) + len(layout.groups) * layout.page_columns <= layout.max_edits

    def _take_edits(self) -> tuple[PageEdit, ...]:
        edits = tuple(PageEdit(group, row, column, page) for (group, row, column), page in self._cells.items())
        self._cells.clear()
        if self._config.check_level >= 1:
            for edit in edits:
                owner = self._by_row.get(edit.row)
                check_cell(edit, None if owner is None else _held(owner).lease.pages[edit.group])
        return edits

    def _retract(self, request: Request) -> None:
        """Back to the head of the queue; it resumes by a prefill of its prompt and output (sgl-28254)."""
        assert not self._out, "its length is not known"
        self._leave(request, request.ids[: request.prefilled])
        self._queue_of(request).remove(request)
        request.prefilled = 0
        self._waiting.appendleft(request)
        self.num_retractions += 1

    # ---------------------------------------------------------------- results

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result. A request with non-finite logits fails alone; one that has ended gets nothing more."""
        if not self._out or self._out[0].plan is not plan:
            raise InvariantError("results are committed in the order of their plans, each once")
        self._out.popleft()
        requests = [self._by_row[row] for row in plan.rows]
        updates = []
        for row_result in result.rows:
            request = self._by_row[row_result.row]
            if request.finish_reason is not None:
                continue
            if not row_result.finite:
                update = self._finish(request, (), "abort")
                updates.append(replace(update, error="the target's logits are not finite"))
                continue
            if isinstance(plan, RoundPlan):
                request.prefilled += len(row_result.tokens)
                request.accept_lens.append(len(row_result.tokens) - 1)
            if row_result.tokens:
                updates.append(self._emit(request, row_result))
        for request in requests:
            self._settle(request)
        return updates

    def fail(self, error: str) -> list[RequestUpdate]:
        """The engine broke: what is out is lost, and with it what the host knows of its rows. Every request ends."""
        self._out.clear()
        updates = [replace(self._finish(request, (), "abort"), error=error) for request in [*self._by_id.values()]]
        for request in [*self._by_row.values()]:
            self._settle(request)
        return updates

    def _emit(self, request: Request, result: RowResult) -> RequestUpdate:
        params, limit = request.params, self._tokens_left(request)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        cut = first_stop(result.tokens, stop_ids, request.stop.feed(result.tokens), limit)
        if self._config.check_level >= 1:
            count, reason = cut or (len(result.tokens), None)
            check_emitted(result.tokens[:count], stop_ids, reason, limit)
        if cut is None:
            request.output_ids += result.tokens
            return RequestUpdate(request.request_id, result.tokens, None)
        count, reason = cut
        return self._finish(request, result.tokens[:count], reason)

    def _finish(self, request: Request, new_ids: tuple[int, ...], reason: FinishReason) -> RequestUpdate:
        request.output_ids += new_ids
        request.finish_reason = reason
        del self._by_id[request.request_id]
        if request.running is None:
            self._waiting.remove(request)
        else:
            self._queue_of(request).remove(request)
            self._settle(request)
        return RequestUpdate(request.request_id, new_ids, reason)

    def _settle(self, request: Request) -> None:
        """Let a request go that has ended, once no step with its row is out."""
        if request.finish_reason is None or request.running is None:
            return
        if not any(request.running.row in out.rows for out in self._out):
            # The cache key is what the client received: a path past the stop is cut off (sgl-35694).
            self._leave(request, request.ids[: request.prefilled] if request.finish_reason != "abort" else ())

    def _queue_of(self, request: Request) -> list[Request]:
        """Where a running request stands."""
        return self._prefilling if request in self._prefilling else self._decoding

    def _leave(self, request: Request, ids: Sequence[int]) -> None:
        """Give back row and pages; `ids` are tokens whose K/V are complete."""
        held = _held(request)
        if self._config.check_level >= 1:
            check_cached(held.row, len(ids), request.prefilled)
        self._ledger.release(held.lease, ids)
        self._free_rows.append(held.row)
        del self._by_row[held.row]
        self._cells = {cell: page for cell, page in self._cells.items() if cell[1] != held.row}
        request.running = None

    # ---------------------------------------------------------------- inspection

    def ids_by_row(self) -> dict[Row, tuple[int, ...]]:
        """Tokens of each decoding request, the root last, by its row."""
        return {r.running.row: r.ids for r in self._decoding if r.running is not None}

    def arrange_pages(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder the free pages of every group; for conformance, where luck must not hide a wrong address."""
        self._ledger.arrange(order)

    def check_integrity(self) -> None:
        """Raise unless rows and pages are all accounted for. O(pages); for tests and idle moments."""
        if sorted([*self._by_row, *self._free_rows]) != list(range(self._layout.max_requests)):
            raise InvariantError(f"rows {[*self._by_row]} in use and {self._free_rows} free do not make up all rows")
        self._ledger.check([_held(request).lease for request in self._by_row.values()])


def next_prompt_token(ids: Sequence[int], end: int) -> int | None:
    """The token after a chunk that ends at `end`, from prompt and output alike; None at the end (sgl-26329)."""
    return ids[end] if end < len(ids) else None


def _held(request: Request) -> Running:
    """Row and lease of a request that runs."""
    assert request.running is not None
    return request.running
