"""The scheduler: turns waiting and running requests into plans, and results into updates.

waiting --admit--> prefilling --last chunk--> decoding --stop--> ended --last step committed--> gone
   ^                                             |
   '----------------- retract -------------------'
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treetop.cache.kv_cache_manager import Columns, KVCacheManager
from treetop.checks.host import check_cached, check_cell, check_emitted
from treetop.scheduler.request import Request, Running
from treetop.scheduler.stops import first_stop
from treetop.types.config import EngineConfig
from treetop.types.errors import InvariantError
from treetop.types.ids import GroupName, PageId, RequestId, Row
from treetop.types.layout import Layout
from treetop.types.messages import Chunk, PageEdit, PrefillPlan, RoundPlan, RowSetup, StepPlan, StepResult
from treetop.types.requests import CoreLoad, EngineRequest, RequestStats, RequestUpdate, check_prompt
from treetop.types.sampling import Choice, FinishReason

_CHEAP_PADDING = 512
"""Padding of a prefill step, in tokens, that costs no more than a step of its own: its launches and the weights."""


@dataclass(frozen=True, slots=True)
class _Out:
    """A plan whose result has not been committed, and its requests in the order of its rows."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Owns requests, rows and leases. Up to `max_in_flight` plans are out at a time, and `commit` takes results in
    their order.

    A request that ends while steps with its row are out keeps row and lease until the last of them is committed; what
    they give is dropped. Page-table changes wait in `_cells` for the next plan, whatever becomes of the one that made
    them.
    """

    def __init__(
        self, layout: Layout, config: EngineConfig, eos_ids: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds, for the stats of requests."""
        self._layout, self._config, self._eos_ids, self._clock = layout, config, frozenset(eos_ids), clock
        self._kv_cache = KVCacheManager(layout, not config.disable_radix_cache, config.check_level)
        self._free_rows = [Row(row) for row in range(layout.max_requests - 1, -1, -1)]
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []  # oldest admission first
        self._by_id: dict[RequestId, Request] = {}  # those that have not ended
        self._by_row: dict[Row, Request] = {}
        self._out: deque[_Out] = deque()
        self._cells: dict[tuple[GroupName, Row, int], PageId] = {}
        self._commit_width = layout.commit_width
        self._has_windows = any(group.window is not None for group in layout.groups)
        self._prefilled_last = False
        self.num_retractions = 0

    # ---------------------------------------------------------------- requests in and out

    def add(self, asked: EngineRequest) -> Request:
        """Queue a request. Raises InputError, before anything changes, for a prompt that can never run."""
        check_prompt(asked.prompt_ids, self._layout.max_context)
        if asked.request_id in self._by_id:
            raise InvariantError(f"request id {asked.request_id} is given twice")
        request = Request.of(asked, self._eos_ids, self._layout.max_context, self._clock())
        self._by_id[request.request_id] = request
        self._waiting.append(request)
        return request

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """End a request, wherever it stands; None if it is not alive. Steps with its row may still be out."""
        request = self._by_id.get(request_id)
        return None if request is None else self._finish(request, (), "abort")

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None:
        """End a request whose client stops after `num_tokens` tokens of its output; None if it is not alive.

        Tokens past them are forgotten, and never reach the prefix cache (sgl-35694).
        """
        request = self._by_id.get(request_id)
        if request is None:
            return None
        del request.output_ids[num_tokens:]
        return self._finish(request, (), "stop")

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def load(self) -> CoreLoad:
        """What it is busy with; requests that ended while a step of theirs is out count as running."""
        return CoreLoad(len(self._by_row), len(self._waiting), self._kv_cache.usage, self.num_retractions)

    # ---------------------------------------------------------------- planning

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before the oldest plan that is out has been committed.

        Prefill goes first, but takes turns with rounds that could run.
        """
        if len(self._out) == self._layout.max_in_flight:
            return None
        ready = [request for request in self._decoding if self._may_go_on(request)]
        plan: StepPlan | None = None if self._prefilled_last and ready else self._plan_prefill()
        if plan is None and ready:
            plan = self._plan_round(ready)
        if plan is not None:
            self._prefilled_last = isinstance(plan, PrefillPlan)
            self._send_out(plan)
        return plan

    def _send_out(self, plan: StepPlan) -> None:
        requests, rounds = [self._by_row[row] for row in plan.rows], int(isinstance(plan, RoundPlan))
        for request in requests:
            held = _held(request)
            held.steps_out += 1
            held.rounds_out += rounds
        self._out.append(_Out(plan, requests))

    def _plan_prefill(self) -> PrefillPlan | None:
        setups: list[RowSetup] = []
        batch: list[tuple[Request, int]] = []
        for request in self._prefilling:
            count = min(self._prefill_room(batch), request.num_ids - request.num_computed_tokens)
            if self._may_join(batch, count):
                self._reserve_chunk(request, count)
                batch.append((request, count))
        while self._waiting and self._free_rows and self._cells_left():
            request, room = self._waiting[0], self._prefill_room(batch)
            if room == 0 or not self._admit(request, batch, room):
                break
            self._waiting.popleft()
            self._prefilling.append(request)
            setups.append(request.setup())
            batch.append((request, min(room, request.num_ids - request.num_computed_tokens)))
        if not batch:
            return None
        return PrefillPlan(
            edits=self._take_edits(),
            freed=self._kv_cache.take_freed(),
            setups=tuple(setups),
            chunks=tuple(self._chunk(request, count) for request, count in batch),
            choice=Choice.costliest(request.choice for request, _ in batch),
            logprobs=_logprobs([request for request, _ in batch]),
        )

    def _prefill_room(self, batch: list[tuple[Request, int]]) -> int:
        """Tokens that one more row may bring to a prefill batch, which holds `chunk` with its padding; 0 for no row."""
        room = self._layout.chunk // self._layout.bucket_for(len(batch) + 1)
        return room if all(count <= room for _, count in batch) else 0

    def _may_join(self, batch: list[tuple[Request, int]], count: int) -> bool:
        """Whether a row with `count` tokens may join a batch: its padding is cheap, or a third of the whole at most."""
        counts = [each for _, each in batch] + [count]
        padding = self._layout.bucket_for(len(counts)) * max(counts) - sum(counts)
        return count > 0 and padding <= max(sum(counts) // 2, _CHEAP_PADDING)

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them. After its last chunk it can decode."""
        ids, start = request.ids, request.num_computed_tokens
        end = start + count
        request.num_computed_tokens = end
        if end == len(ids):
            self._prefilling.remove(request)
            self._decoding.append(request)
        return Chunk(_held(request).row, start, ids[start:end], next_prompt_token(ids, end))

    def _reserve_chunk(self, request: Request, count: int) -> None:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        self._slide(request, self._num_known(request))
        end = request.num_computed_tokens + count
        if not self._reserve(request, request.num_ids + self._layout.headroom, end):
            raise InvariantError("a window's pool does not hold the windows of all running requests")

    def _reserve(self, request: Request, num_tokens: int, end: int | None = None) -> bool:
        """Pages for a running request; False if they are short.

        Pages behind a window stay until the cache has them, which it has once their chunk is committed. If pages are
        short they are given up, everybody's.
        """
        held, known = _held(request), request.num_computed_tokens
        cells = self._kv_cache.reserve(held.lease, num_tokens, known, end)
        if cells is None:
            for other in self._by_row.values():
                self._slide(other, other.num_computed_tokens)
            cells = self._kv_cache.reserve(held.lease, num_tokens, known, end)
        self._write(held.row, cells or [])
        return cells is not None

    def _slide(self, request: Request, known: int) -> None:
        held = _held(request)
        self._write(held.row, self._kv_cache.slide(held.lease, known))

    def _num_known(self, request: Request) -> int:
        """Tokens whose K/V the pages hold for certain: `num_computed_tokens` without chunks that are out."""
        held = _held(request)
        if held.steps_out > held.rounds_out:
            for out in self._out:
                if request in out.requests and isinstance(out.plan, PrefillPlan):
                    return next(chunk.start for chunk in out.plan.chunks if chunk.row == held.row)
        return request.num_computed_tokens

    def _admit(self, request: Request, batch: list[tuple[Request, int]], budget: int) -> bool:
        """Give a waiting request a row and pages for all its tokens and one round; False if there is no room.

        Also if its first chunk, of `budget` tokens at most, does not suit the prefill `batch`.
        """
        lease, shared = self._kv_cache.open(request.ids)
        known = lease.shared * self._layout.page_size
        end = min(known + budget, request.num_ids)
        suits = self._may_join(batch, end - known)
        total = request.num_ids + self._layout.headroom
        reserved = self._kv_cache.reserve(lease, total, known, end) if suits else None
        if reserved is None:
            self._kv_cache.release(lease)
            return False
        request.num_computed_tokens = known
        request.running = Running(self._free_rows.pop(), lease, request.num_ids + self._layout.headroom)
        self._by_row[request.running.row] = request
        if request.admitted_s is None:
            request.admitted_s, request.num_cached_tokens = self._clock(), known
        self._write(request.running.row, shared + reserved)
        return True

    def _plan_round(self, ready: list[Request]) -> RoundPlan | None:
        """A round of all that are ready; None if it needs pages that only a commit can tell how to find."""
        for request in ready:
            if not self._reserve_round(request):
                return None
        batch = [request for request in ready if request.running is not None]  # the others have been retracted
        return RoundPlan(
            edits=self._take_edits(),
            freed=self._kv_cache.take_freed(),
            rows=tuple(_held(request).row for request in batch),
            shape=self._config.shape,
            committed_bound=max(self._committed_bound(request) for request in batch),
            choice=Choice.costliest(request.choice for request in batch),
            logprobs=_logprobs(batch),
        )

    def _may_go_on(self, request: Request) -> bool:
        """Whether a decoding request may need a round more than those that are out, of which each emits a token."""
        first = request.num_computed_tokens == request.num_ids  # its first token is out too
        return _held(request).rounds_out + first < self._tokens_left(request)

    def _tokens_left(self, request: Request) -> int:
        """Tokens that max_tokens and the context still allow."""
        return request.max_output - len(request.output_ids)

    def _committed_bound(self, request: Request) -> int:
        """Tokens that the device may have committed once all that is out has run; `num_computed_tokens` are known."""
        return request.num_computed_tokens + _held(request).rounds_out * self._commit_width

    def _reserve_round(self, request: Request) -> bool:
        """Pages for one more round of a request; the youngest others are retracted for them, or it itself.

        Nothing for one that has been retracted for an older one.
        False if pages are short while something is out: whom to retract, and at which length, shows when it is
        committed.
        """
        held = request.running
        if held is None:
            return True
        need = request.num_computed_tokens + (held.rounds_out + 1) * self._commit_width
        if need <= held.reserved and not self._has_windows:
            return True
        self._slide(request, self._num_known(request))
        while not self._reserve(request, need):
            if self._out:
                return False
            victim = self._prefilling[-1] if self._prefilling else self._decoding[-1]
            if victim is request and len(self._decoding) == 1:
                raise InvariantError("the pools do not hold one request at the context wall")
            self._retract(victim)
            if victim is request:
                return True
        held.reserved = self._layout.pages_for(need) * self._layout.page_size
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
        self._leave(request, request.ids[: request.num_computed_tokens])
        self._queue_of(request).remove(request)
        request.num_computed_tokens = 0
        request.num_retractions += 1
        self._waiting.appendleft(request)
        self.num_retractions += 1

    # ---------------------------------------------------------------- results

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result. A request with non-finite logits fails alone; one that has ended gets nothing more."""
        if not self._out or self._out[0].plan is not plan:
            raise InvariantError("results are committed in the order of their plans, each once")
        requests = self._out.popleft().requests
        is_round = isinstance(plan, RoundPlan)
        for request in requests:
            held = _held(request)
            held.steps_out -= 1
            held.rounds_out -= is_round
        updates = []
        for row_result in result.rows:
            request = self._by_row[row_result.row]
            if request.finish_reason is not None:
                continue
            if not row_result.finite:
                updates.append(self._finish(request, (), "abort", error="the target's logits are not finite"))
                continue
            tokens = row_result.tokens
            if is_round:
                request.num_computed_tokens += len(tokens)
            if tokens:
                update = self._emit(request, tokens, len(tokens) - 1 if is_round else None)
                updates.append(update._replace(logprobs=row_result.logprobs[: len(update.new_ids)]))
        if isinstance(plan, PrefillPlan):
            self._cache_chunks(plan)
        for request in requests:
            if request.finish_reason is not None:
                self._settle(request)
        return updates

    def _cache_chunks(self, plan: PrefillPlan) -> None:
        """The pages that a prefill step has filled enter the cache at once, so that the next request finds them."""
        for chunk in plan.chunks:
            request = self._by_row.get(chunk.row)
            if request is not None and request.finish_reason is None:
                ids = request.ids[: chunk.start + len(chunk.token_ids)]
                self._write(chunk.row, self._kv_cache.insert(_held(request).lease, ids))

    def fail(self, error: str) -> list[RequestUpdate]:
        """The engine broke: what is out is lost, and with it what the host knows of its rows. Every request ends."""
        for out in self._out:
            for request in out.requests:
                held = _held(request)
                held.steps_out = held.rounds_out = 0
        self._out.clear()
        alive = [*self._by_id.values()]
        updates = [self._finish(request, (), "abort", error=error, engine_failed=True) for request in alive]
        for request in [*self._by_row.values()]:  # those that had ended before, too
            self._settle(request)
        return updates

    def _emit(self, request: Request, tokens: tuple[int, ...], accept_len: int | None) -> RequestUpdate:
        limit, first = self._tokens_left(request), request.first_token_s is None
        if first:
            request.first_token_s = self._clock()
        cut = first_stop(tokens, request.stop_ids, limit)
        if self._config.check_level >= 1:
            count, reason = cut or (len(tokens), None)
            check_emitted(tokens[:count], request.stop_ids, reason, limit)
        if cut is None:
            request.output_ids += tokens
            update = RequestUpdate(request.request_id, tokens, accept_len)
        else:
            count, reason = cut
            update = self._finish(request, tokens[:count], reason, accept_len)
        return update._replace(num_cached_tokens=request.num_cached_tokens) if first else update

    def _finish(
        self,
        request: Request,
        new_ids: tuple[int, ...],
        reason: FinishReason,
        accept_len: int | None = None,
        error: str | None = None,
        engine_failed: bool = False,
    ) -> RequestUpdate:
        request.output_ids += new_ids
        request.finish_reason = reason
        del self._by_id[request.request_id]
        if request.running is None:
            self._waiting.remove(request)
        else:
            self._queue_of(request).remove(request)
            self._settle(request)
        stats = RequestStats(
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_retractions=request.num_retractions,
            arrival_s=request.arrival_s,
            admitted_s=request.admitted_s,
            first_token_s=request.first_token_s,
            end_s=self._clock(),
        )
        return RequestUpdate(request.request_id, new_ids, accept_len, reason, error, engine_failed, stats)

    def _settle(self, request: Request) -> None:
        """Let a request go that has ended, once no step with its row is out."""
        if request.running is None or request.running.steps_out:
            return
        # The cache key is what the client received: a path past the stop is cut off (sgl-35694).
        self._leave(request, request.ids[: request.num_computed_tokens] if request.finish_reason != "abort" else ())

    def _queue_of(self, request: Request) -> list[Request]:
        """Where a running request stands."""
        return self._prefilling if request in self._prefilling else self._decoding

    def _leave(self, request: Request, ids: Sequence[int]) -> None:
        """Give back row and pages; `ids` are tokens whose K/V are complete."""
        held = _held(request)
        if self._config.check_level >= 1:
            check_cached(held.row, len(ids), request.num_computed_tokens)
        self._kv_cache.release(held.lease, ids)
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
        self._kv_cache.arrange(order)

    def check_integrity(self, count: int | None = None) -> None:
        """Raise unless rows and pages are all accounted for.

        count: look at so many pages of each group, and go on from there in the next call, which takes time O(count +
        rows) and may be done while requests are served. None looks at all, for tests and idle moments.
        """
        if sorted([*self._by_row, *self._free_rows]) != list(range(self._layout.max_requests)):
            raise InvariantError(f"rows {[*self._by_row]} in use and {self._free_rows} free do not make up all rows")
        for row, request in self._by_row.items():
            shared, known = _held(request).lease.shared * self._layout.page_size, self._num_known(request)
            if shared > known:
                raise InvariantError(f"row {row}: {shared} tokens are cached, {known} committed")
        leases = [_held(request).lease for request in self._by_row.values()]
        if count is None:
            self._kv_cache.check(leases)
        else:
            self._kv_cache.check_some(leases, count)


def _logprobs(batch: Sequence[Request]) -> tuple[int | None, ...]:
    """What each row of a plan asks for, () if none does."""
    wanted = tuple(request.params.logprobs for request in batch)
    return () if all(each is None for each in wanted) else wanted


def next_prompt_token(ids: Sequence[int], end: int) -> int | None:
    """The token after a chunk that ends at `end`, from prompt and output alike; None at the end (sgl-26329)."""
    return ids[end] if end < len(ids) else None


def _held(request: Request) -> Running:
    """Row and lease of a request that runs."""
    assert request.running is not None
    return request.running
