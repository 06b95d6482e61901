"""The scheduler: turns waiting and running requests into plans, and results into updates.

waiting --admit--> prefilling --last chunk--> decoding --stop--> finished
   ^                                             |
   '----------------- retract -------------------'
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from treetop.cache.ledger import Columns, Lease, LedgerRules, PageLedger
from treetop.checks.host import check_emitted
from treetop.engine.pure import Pure
from treetop.scheduler.request import Request, RequestUpdate, Running
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError, InvariantError
from treetop.types.ids import PageId, RequestId, Row
from treetop.types.layout import Layout
from treetop.types.messages import Chunk, PageEdit, PrefillPlan, RoundPlan, RowResult, RowSetup, StepPlan, StepResult
from treetop.types.sampling import Choice, FinishReason, SamplingParams
from treetop.types.stopping import StopChecker


class Scheduler:
    """Owns requests, rows and leases. One plan is out at a time: `plan`, then `commit` its result."""

    def __init__(self, layout: Layout, config: EngineConfig, eos_ids: Sequence[int], pure: Pure | None = None) -> None:
        self._layout, self._config, self._eos_ids = layout, config, frozenset(eos_ids)
        self._pure = pure or Pure()
        rules = LedgerRules(self._pure.pages_to_free, self._pure.shared_groups)
        self._ledger = PageLedger(layout, config.radix_cache, rules, config.check_level)
        self._free_rows = [Row(row) for row in range(layout.max_requests - 1, -1, -1)]
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []  # oldest admission first
        self._by_id: dict[RequestId, Request] = {}
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
        """End a request between steps, wherever it stands; None if it is not alive."""
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
        """The next step, or None without work. Prefill goes first, but takes turns with rounds that could run."""
        turn_over = self._prefilled_last and self._decoding
        plan = None if turn_over else self._plan_prefill()
        self._prefilled_last = plan is not None
        if plan is None and self._decoding:
            return self._plan_round()
        return plan

    def _plan_prefill(self) -> PrefillPlan | None:
        edits: list[PageEdit] = []
        setups: list[RowSetup] = []
        budget = self._layout.chunk
        batch: list[tuple[Request, int]] = []
        for request in self._prefilling:
            if budget > 0:
                assert request.running is not None
                count = min(budget, request.num_ids - request.prefilled)
                edits += _edits(request.running.row, self._reserve_chunk(request, request.running.lease, count))
                batch.append((request, count))
                budget -= count
        while budget > 0 and self._waiting and self._free_rows:
            cells = self._admit(self._waiting[0], budget)
            if cells is None:
                break
            request = self._waiting.popleft()
            assert request.running is not None
            edits += _edits(request.running.row, cells)
            setups.append(RowSetup(request.running.row, request.prefilled, request.params, request.seed))
            self._prefilling.append(request)
            batch.append((request, min(budget, request.num_ids - request.prefilled)))
            budget -= batch[-1][1]
        if not batch:
            return None
        chunks = tuple(self._chunk(request, count) for request, count in batch)
        choice = Choice.of(request.params for request, _ in batch)
        return PrefillPlan(tuple(edits), self._ledger.take_freed(), tuple(setups), chunks, choice)

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them."""
        assert request.running is not None
        ids, start = request.ids, request.prefilled
        end = start + count
        return Chunk(request.running.row, start, ids[start:end], self._pure.next_prompt_token(ids, end))

    def _reserve_chunk(self, request: Request, lease: Lease, count: int) -> Columns:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        known, total = request.prefilled, request.num_ids + self._layout.headroom
        cells = self._ledger.slide(lease, known)
        more = self._ledger.reserve(lease, total, known, known + count)
        if more is None:
            raise InvariantError("a window's pool does not hold the windows of all running requests")
        return cells + more

    def _admit(self, request: Request, budget: int) -> Columns | None:
        """Give a waiting request a row and pages for all its tokens and one round; None if there is no room."""
        lease, shared = self._ledger.open(request.ids)
        known = lease.shared * self._layout.page_size
        end = min(known + budget, request.num_ids)
        reserved = self._ledger.reserve(lease, request.num_ids + self._layout.headroom, known, end)
        if reserved is None:
            self._ledger.release(lease)
            return None
        request.prefilled = lease.shared * self._layout.page_size
        request.running = Running(self._free_rows.pop(), lease)
        return shared + reserved

    def _plan_round(self) -> RoundPlan:
        edits: list[PageEdit] = []
        for request in list(self._decoding):
            if request.running is not None:  # not retracted by an older one just now
                edits += self._reserve_round(request)
        alive = {request.running.row for request in self._decoding if request.running is not None}
        rows = tuple(request.running.row for request in self._decoding if request.running is not None)
        return RoundPlan(
            edits=tuple(edit for edit in edits if edit.row in alive),
            freed=self._ledger.take_freed(),
            rows=rows,
            shape=self._config.shape,
            committed_bound=max(request.num_ids - 1 for request in self._decoding),
            choice=Choice.of(request.params for request in self._decoding),
        )

    def _reserve_round(self, request: Request) -> list[PageEdit]:
        """Pages for one more round of a request; the youngest others are retracted for them, or it itself."""
        assert request.running is not None
        known = request.num_ids - 1
        behind = self._ledger.slide(request.running.lease, known)
        while True:
            cells = self._ledger.reserve(request.running.lease, known + self._layout.headroom, known)
            if cells is not None:
                return _edits(request.running.row, behind + cells)
            victim = self._prefilling[-1] if self._prefilling else self._decoding[-1]
            if victim is request and len(self._decoding) == 1:
                raise InvariantError("the pools do not hold one request at the context wall")
            self._retract(victim)
            if victim is request:
                return []

    def _retract(self, request: Request) -> None:
        """Back to the head of the queue; it resumes by a prefill of its prompt and output (sgl-28254)."""
        self._leave(request, request.ids[: request.prefilled])
        request.prefilled = 0
        self._waiting.appendleft(request)
        self.num_retractions += 1

    # ---------------------------------------------------------------- results

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result. A request with non-finite logits fails alone."""
        by_row = {r.running.row: r for r in (*self._prefilling, *self._decoding) if r.running is not None}
        updates = []
        chunks = {chunk.row: len(chunk.token_ids) for chunk in plan.chunks} if isinstance(plan, PrefillPlan) else {}
        for row_result in result.rows:
            request = by_row.get(row_result.row)
            if request is None:  # aborted while the step ran
                continue
            if not row_result.finite:
                update = self._finish(request, (), "abort")
                updates.append(replace(update, error="the target's logits are not finite"))
                continue
            request.prefilled += chunks.get(row_result.row, 0)
            if isinstance(plan, RoundPlan):
                request.accept_lens.append(len(row_result.tokens) - 1)
            if row_result.tokens:
                updates.append(self._emit(request, row_result))
        return updates

    def _emit(self, request: Request, result: RowResult) -> RequestUpdate:
        if request in self._prefilling:
            self._prefilling.remove(request)
            self._decoding.append(request)
        else:
            request.prefilled += len(result.tokens)
        params = request.params
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        limit = min(params.max_tokens - len(request.output_ids), self._layout.max_context - request.num_ids)
        cut = self._pure.first_stop(result.tokens, stop_ids, request.stop.feed(result.tokens), limit)
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
        if request.running is not None:
            # The cache key is what the client received: a path past the stop is cut off (sgl-35694).
            self._leave(request, request.ids[: request.prefilled] if reason != "abort" else ())
        else:
            self._waiting.remove(request)
        del self._by_id[request.request_id]
        return RequestUpdate(request.request_id, new_ids, reason)

    def _leave(self, request: Request, ids: Sequence[int]) -> None:
        """Give back row and pages; `ids` are tokens whose K/V are complete."""
        assert request.running is not None
        self._ledger.release(request.running.lease, ids, request.num_ids)
        self._free_rows.append(request.running.row)
        request.running = None
        for queue in (self._prefilling, self._decoding):
            if request in queue:
                queue.remove(request)

    # ---------------------------------------------------------------- inspection

    def ids_by_row(self) -> dict[Row, tuple[int, ...]]:
        """Tokens of each decoding request, the root last, by its row."""
        return {r.running.row: r.ids for r in self._decoding if r.running is not None}

    def arrange_pages(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder the free pages of every group; for conformance, where luck must not hide a wrong address."""
        self._ledger.arrange(order)

    def check_integrity(self) -> None:
        """Raise unless rows and pages are all accounted for. O(pages); for tests and idle moments."""
        alive = [request for request in self._by_id.values() if request.running is not None]
        rows = [request.running.row for request in alive if request.running is not None]
        if sorted([*rows, *self._free_rows]) != list(range(self._layout.max_requests)):
            raise InvariantError(f"rows {rows} in use and {self._free_rows} free do not make up all rows")
        self._ledger.check([request.running.lease for request in alive if request.running is not None])


def _edits(row: Row, cells: Columns) -> list[PageEdit]:
    return [PageEdit(group, row, column, page) for group, column, page in cells]
