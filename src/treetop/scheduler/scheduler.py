"""The scheduler: turns waiting and running requests into plans, and results into updates.

grammar --> waiting --admit--> prefilling --last chunk--> decoding --stop--> ended --last step committed--> gone
               ^                                             |
               '----------------- retract -------------------'

waiting_for_grammar: what may come first in a constrained request is not known yet. Before it is admitted, K/V of its
    prompt may be
loaded that the tier on the host has and the device has not (`cache/host_tier.py`).

What other workers prefill, and what is prefilled for them: `scheduler/kv_transfer.py`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Any

from treetop.cache.disk_tier import DiskTier
from treetop.cache.host_tier import HostTier
from treetop.cache.prefix_cache import CacheWatcher
from treetop.scheduler.adapters import Adapter, AdapterBooks
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.committer import Committer, stats_of
from treetop.scheduler.constrained import Structures
from treetop.scheduler.drafting import Drafting
from treetop.scheduler.kv_transfer import KVTransfers
from treetop.scheduler.lengths import RequestLengths
from treetop.scheduler.mixed import MixedSteps
from treetop.scheduler.policy import AdaptiveShape, FixedShape, ShapePolicy
from treetop.scheduler.prefill import PrefillPlanner
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request
from treetop.scheduler.rounds import RoundPlanner
from treetop.scheduler.rows import Rows
from treetop.scheduler.steps import StepsOut, StepTimes
from treetop.types.config import EngineConfig
from treetop.types.costs import CostTable, HeadAcceptance
from treetop.types.errors import ConfigError, InputError, InvariantError
from treetop.types.ids import PageId, RequestId, Row
from treetop.types.layout import Layout, PrefillCosts, SpecShape
from treetop.types.messages import (
    ExportPlan,
    ImportPlan,
    MixedPlan,
    NodeMasks,
    OffloadPlan,
    RoundPlan,
    RowTree,
    StepPlan,
    StepResult,
    parts_of_plan,
    parts_of_result,
)
from treetop.types.requests import (
    CoreLoad,
    EngineRequest,
    HostTierStats,
    RequestUpdate,
    Whose,
    check_prompt,
    late_error,
)

log = logging.getLogger("treetop")

_PATIENCE_S = 0.02
"""How long a step waits for a constraint that was just asked. Later its row sits rounds out."""


class Scheduler:
    """Requests in, plans out; results in, updates out. Up to `max_steps` plans are out at a time, and `commit`
    takes results in their order.

    Where requests stand: `queues`. What they hold: `rows`. What is in flight: `steps`. What goes to other workers and
    comes from them: `kv_transfer`. Two planners and a committer share these four. Which shape a round has: `policy`,
    and which have prompts in their forward: `mixing`; both may be set between steps, as conformance does.
    """

    def __init__(
        self,
        layout: Layout,
        config: EngineConfig,
        eos_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        vocab_size: int | None = None,
        prefill_costs: PrefillCosts | None = None,
        structures: Structures | None = None,
        *,
        costs: CostTable | None = None,
        head: Callable[[], HeadAcceptance] = HeadAcceptance,
        keep_head: Callable[[HeadAcceptance], object] = lambda learned: None,
        agree_on_shape: Callable[[SpecShape], SpecShape] = lambda wanted: wanted,
        keep_lengths: Callable[[float], object] = lambda tokens: None,
        work_clock: Callable[[], float] | None = None,
        disk: DiskTier | None = None,
        digest_of: Callable[[int], str] = lambda number: "",
    ) -> None:
        """clock: seconds, for the stats of requests and for their deadlines. vocab_size: None takes no constraints.

        prefill_costs: of prefill steps between rounds; None counts no attention. structures: None takes no structures.

        costs: of rounds, for a policy that chooses their shape; None for one shape. head, keep_head: see
        `AdaptiveShape`. agree_on_shape: from what the policy wants to what ranks run together. keep_lengths: see
        `RequestLengths`. work_clock: by which costs were measured; None is `clock`.

        disk: a tier of K/V below the one on the host. digest_of: see `AdapterBooks`.
        """
        self._vocab_size, self._structures = vocab_size, structures
        self._layout, self._config, self._eos_ids, self._clock = layout, config, frozenset(eos_ids), clock
        self._work_clock = work_clock or clock
        self._by_priority, self._numbers = config.schedule_policy == "priority", count()
        prefill_costs = prefill_costs or PrefillCosts(layout.chunk, layout.chunk, None)
        target_gap_s = None if config.target_gap_ms is None else config.target_gap_ms / 1000
        self._budget = PrefillBudget(
            layout, prefill_costs, target_gap_s, config.prefill_tokens_per_round, shape=lambda: self._last_shape
        )
        self.mixing = MixedSteps(layout, config.mixed_chunk, self._budget)
        self._lengths, self._agree_on_shape = RequestLengths(keep_lengths), agree_on_shape
        self.policy: ShapePolicy = (
            FixedShape(config.shape)
            if costs is None
            else AdaptiveShape(costs, layout, head, keep_head, self._lengths.read_per_token)
        )
        self._last_shape = self.policy.shape
        if isinstance(self.policy, AdaptiveShape):
            log.info("%s", self.policy.expectation())
        self.adapters = AdapterBooks(config.adapters, config.num_lora_slots, config.most_loras, digest_of)
        self._pending_outputs: dict[RequestId, Request] = {}  # those whose last update has not been handed out
        self._retractions_before = self._num_gave_way = 0
        self._cache_watcher: CacheWatcher | None = None
        self._host_watcher: CacheWatcher | None = None
        self._host_counts, self._disk = HostTierStats(), disk
        self._open_books()

    def watch_cache(self, watcher: CacheWatcher, host: CacheWatcher | None = None) -> None:
        """Tell what the prefix cache has from now on, also of those after this one. Nothing has been asked yet.

        host: is told the same of the tier on the host.
        """
        self._cache_watcher, self._host_watcher = watcher, host
        self._watch()

    def _watch(self) -> None:
        if self._host_watcher is not None and self.rows.host is not None:
            self.rows.host.watch(self._host_watcher)
        if self._cache_watcher is not None:
            self.rows.kv_cache.watch(self._cache_watcher)

    def _open_books(self) -> None:
        """Nobody waits or runs, every page is free, and nothing is out."""
        layout, config, clock = self._layout, self._config, self._clock
        self._deadlines: list[tuple[float, RequestId]] = []  # a heap; some may have ended
        self.queues, self.steps = Queues(), StepsOut()
        self._gaps, self._work = StepTimes(clock), StepTimes(self._work_clock)
        self.rows = Rows(layout, not config.disable_radix_cache, config.check_level, self._lengths, self._disk)
        if self.rows.host is not None:
            self.rows.host.counts = self._host_counts
        shared = self.queues, self.rows, self.steps
        self.kv_transfer = KVTransfers(layout, self.queues, self.rows, clock, self.adapters)
        self._drafting = Drafting(layout, lambda: self.policy, self.queues, self.rows)
        self._prefill = PrefillPlanner(
            layout, self._budget, *shared, self.kv_transfer, clock, adapters=self.adapters, drafting=self._drafting
        )
        self._rounds = RoundPlanner(
            layout, self._choose_shape, *shared, self.kv_transfer, config.num_lora_slots, drafting=self._drafting
        )
        self._committer = Committer(*shared, self.kv_transfer, config.check_level, clock)
        self._watch()
        self._ended_round = False  # whether the last step that computed was a round and nothing else

    # ---------------------------------------------------------------- requests in and out

    def add(
        self, asked: EngineRequest, remote: bool = False, export_from: int | None = None, digest: str = ""
    ) -> Request:
        """Queue a request. Raises InputError, before anything changes, for one that can never run.

        remote: another worker may prefill it, which its events tell the state machine; what has a constraint, bad
        words or a salt, asks for log-probabilities of its prompt, or goes on behind tokens of another engine, is
        prefilled here all the same. export_from: it is prefilled for another worker, which has the tokens before this
        one, and ends with `finish_export`. digest: of that worker's adapter.
        """
        check_prompt(asked.prompt_ids, self._layout.max_context)
        if remote or export_from is not None:
            self._check_kv_transfer(asked, remote, export_from)
        if export_from is None:
            adapter = self.adapters.named(asked.lora, asked.lora_version)
        else:
            adapter = self.adapters.same(asked.lora, digest)
        if asked.request_id in self.queues.by_id:
            raise InvariantError(f"request id {asked.request_id} is given twice")
        order, now = (asked.priority if self._by_priority else 0, next(self._numbers)), self._clock()
        maximum = self._layout.max_context
        request = Request.of(asked, self._eos_ids, maximum, order, now, self._vocab_size, self._structures)
        salted = asked.cache_salt not in ("", Whose(lora=asked.lora).salt)
        asks_more = asked.params.prompt_logprobs is not None or bool(asked.bad_words) or salted
        request.adapter = adapter
        request.cache_salt = adapter.salt(asked.cache_salt)
        request.remote = remote and request.constrained is None and not asked.received and not asks_more
        request.export_from = export_from
        if export_from is None:  # else events tell the desk
            self._pending_outputs[request.request_id] = request
        self.queues.add(request)
        if asked.timeout_s is not None:
            heappush(self._deadlines, (now + asked.timeout_s, request.request_id))
            if len(self._deadlines) > 2 * len(self.queues.by_id) + 64:  # most are of requests that have ended
                self._deadlines = [each for each in self._deadlines if each[1] in self.queues.by_id]
                heapify(self._deadlines)
        return request

    def expire(self) -> list[RequestUpdate]:
        """End the requests whose time is over. Steps with their rows may still be out."""
        updates, now = [], self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.queues.by_id.get(heappop(self._deadlines)[1])
            if request is not None:
                error = late_error(len(request.output_ids))
                updates.append(self._committer.finish(request, (), "abort", error=error, timed_out=True))
        return self._reported(updates)

    def answers(self) -> list[RequestUpdate]:
        """Take what constraints have answered: their requests go on, or end. It waits a moment for new questions."""
        updates: list[RequestUpdate] = []
        pending_grammars = self.queues.pending_grammars
        if not pending_grammars:
            return updates
        since = time.monotonic() - _PATIENCE_S
        fresh = [
            each.constrained for each in pending_grammars if each.running is not None and each.constrained is not None
        ]
        self._await([each.asked for each in fresh if each.asked_s > since], _PATIENCE_S, ALL_COMPLETED)
        for request in pending_grammars:
            assert request.constrained is not None
            try:
                may_go_on = request.constrained.answer()
            except InputError as error:
                updates.append(self._committer.finish(request, (), "abort", error=str(error), user_error=True))
                continue
            if may_go_on is False:
                updates.append(self._committer.finish(request, (), "stop"))
            elif may_go_on and request.running is None:
                self.queues.grammar_ready(request)
        return self._reported(updates)

    def node_masks(self, trees: Sequence[RowTree]) -> list[NodeMasks]:
        """What may follow the nodes of a round's trees, of those that are found in a moment: the round waits.

        trees: of the constrained rows of the round that was planned last.
        """
        states = [self.rows.by_row[tree.row].constrained for tree in trees]
        held = [(state, tree) for state, tree in zip(states, trees, strict=True) if state is not None]
        until_s = time.monotonic() + _PATIENCE_S
        self._await([state.walk(tree, until_s) for state, tree in held], _PATIENCE_S, ALL_COMPLETED)
        return [state.walked() for state, _ in held]

    def await_answer(self, patience_s: float) -> None:
        """Nothing else is to be done: wait so long for a constraint to answer, or for a disk, if one is asked."""
        asked = [each.constrained.asked for each in self.queues.pending_grammars if each.constrained is not None]
        self._await([*asked, *(self.rows.host.waits_for if self.rows.host else ())], patience_s, FIRST_COMPLETED)

    def _await(self, asked: Iterable["Future[Any] | None"], patience_s: float, until: str) -> None:
        futures = [each for each in asked if each is not None]
        if futures:
            wait(futures, patience_s, until)

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """End a request, wherever it stands; None if it is not alive. Steps with its row may still be out."""
        request = self.queues.by_id.get(request_id)
        return None if request is None else self._reported([self._committer.finish(request, (), "abort")])[0]

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None:
        """End a request whose client stops after `num_tokens` tokens of its output; None if it is not alive.

        Tokens past them are forgotten, and never reach the prefix cache (sgl-35694).
        """
        request = self.queues.by_id.get(request_id)
        if request is None:
            return None
        del request.output_ids[num_tokens:]
        return self._reported([self._committer.finish(request, (), "stop")])[0]

    def finish_export(self, request_id: RequestId) -> None:
        """All chunks of a request have been taken: its row and its pages go, to the prefix cache where that keeps them.

        Nothing if it is not alive.
        """
        request = self.queues.by_id.get(request_id)
        if request is not None:
            self._committer.finish(request, (), "stop")

    def _check_kv_transfer(self, asked: EngineRequest, remote: bool, export_from: int | None) -> None:
        if not self._layout.disaggregation_slots:
            raise ConfigError(
                "KV of a request is to be transferred, and there are no staging slots; set --disaggregation-slots"
            )
        if export_from is not None and (remote or not 0 <= export_from < len(asked.prompt_ids)):
            raise InvariantError(f"request {asked.request_id} is to be exported from token {export_from}")

    def _reported(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """Updates that are handed out now."""
        for update in updates:
            if update.finish_reason is not None:
                self._pending_outputs.pop(update.request_id, None)
        return updates

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or K/V are to be copied to the host."""
        return bool(self.queues.by_id) or (self.rows.host is not None and self.rows.host.has_work)

    @property
    def adapters_in_use(self) -> set[Adapter]:
        """Of requests that have not ended, and of those that hold a row yet."""
        return {each.adapter for each in chain(self.queues.by_id.values(), self.rows.by_row.values())}

    @property
    def num_retractions(self) -> int:
        return self._retractions_before + self._rounds.num_retractions

    @property
    def load(self) -> CoreLoad:
        """What it is busy with; requests that ended while a step of theirs is out count as running."""
        waiting = len(self.queues.waiting) + len(self.queues.waiting_for_grammar) + len(self.queues.loading)
        kv_usage, given_way = self.rows.kv_cache.usage, self._num_gave_way
        return CoreLoad(
            num_running=len(self.rows.by_row),
            num_waiting=waiting,
            kv_usage=kv_usage,
            num_retractions=self.num_retractions,
            num_gave_way=given_way,
            host_tier=None if self.rows.host is None else self.rows.host.stats,
        )

    # ---------------------------------------------------------------- planning and results

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do before the oldest plan that is out has been committed.

        Prefill goes first, but takes turns with rounds that could run, and lets them run while a larger step is worth
        the wait. What is transferred takes little, and goes before both.
        """
        if len(self.steps) == self._layout.max_steps:
            return None
        moved = self.kv_transfer.plan() or self._offload()
        if moved is not None:
            self._send(moved)
            return moved
        if self.steps.num_computing == self._layout.max_in_flight or not (self._gave_way() and self._drafts_again()):
            return None
        ready = self._rounds.ready()
        plan = None if ready and self._prefill.gives_way else self._prompts(ready)
        if plan is None and ready:
            plan = self._rounds.plan(ready) or (None if self.steps.has_rows else self._prefill.plan())
        if plan is not None:
            self._prefill.take_turns(plan)
            self._send(plan)
        return plan

    def _offload(self) -> OffloadPlan | None:
        """Copies to the host, or from there for those who would have the next rows."""
        host = self.rows.host
        if host is None:
            return None
        for request in self._prefill.shares.in_turn(self.rows.num_free, self.queues.loading):
            if not request.asked_host and not request.remote:
                request.asked_host = True
                wanted = request.reusable_ids, request.cache_salt, self._drafting.begins(request)
                if host.load(request.request_id, *wanted):
                    self.queues.loads(request)
        plan = host.plan()
        self._loaded(host)
        return plan

    def _loaded(self, host: HostTier) -> None:
        """Whose loads have ended wait for rows again, unless they have ended themselves."""
        for request in [self.queues.by_id.get(request_id) for request_id in host.loaded()]:
            if request is not None:
                self.queues.loaded(request)

    def _prompts(self, ready: Sequence[Request]) -> StepPlan | None:
        """A prefill step, with a round of all that are ready in its forward where that pays; None if there is nothing
        to prefill, or no room for it.

        The round is planned first, as it may have to put requests back: so it is what comes of it if the prefill then
        finds no room. Prompts that end in the step decode from the next round on.
        """
        if not self.mixing.wanted(len(ready), self.policy.shape) or not self._prefill.has_work:
            return self._prefill.plan()
        round = self._rounds.plan(ready)
        if round is None:  # pages are short
            return None if self.steps.has_rows else self._prefill.plan()
        self.rows.put_back(round.edits)  # in one list no cell is named twice, and `max_edits` bounds it
        size = self.mixing.size(round, self._prefill.num_candidates, self._prefill.work)
        prefill = self._prefill.plan(mixed=True, packed=size)
        if prefill is None:
            return replace(round, edits=self.rows.take_edits())
        rows = self._layout.coarse_bucket_for(len(round.rows)) if prefill.packed else round.min_rows
        return MixedPlan(prefill, replace(round, edits=(), min_rows=rows))

    def _gave_way(self) -> bool:
        """Put back who holds more rows than their share while others wait; False if steps are out, and whom it takes
        shows once they are committed.
        """
        over = self._prefill.shares.over(self._prefill.lacks_pages, self._prefill.lacks_slots)
        if over and self.steps.has_rows:
            return False
        for request in over:
            self._rounds.put_back(request)
        self._num_gave_way += len(over)
        return True

    def _drafts_again(self) -> bool:
        """Put back who is to have a draft again; False if steps are out, after which it may be."""
        wanted = self._drafting.wanted()
        if wanted is not None and self.steps.has_rows:
            return False
        if wanted is not None:
            request, cost = wanted
            self.policy.pay(cost)
            self._rounds.put_back(request)
        return True

    def _choose_shape(
        self, lengths: Sequence[int], speculating: Sequence[int], deferred: int, drafting: int
    ) -> SpecShape:
        self._last_shape = self._agree_on_shape(self.policy.choose(lengths, speculating, deferred, drafting))
        return self._last_shape

    def _send(self, plan: StepPlan) -> None:
        self.steps.send(plan, [self.rows.by_row[row] for row in plan.rows])
        self._gaps.planned()
        self._work.planned()

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result. A request with non-finite logits fails alone; one that has ended gets nothing more.

        A round tells what rounds take where the step before it was a round, too: the end of a prefill step is seen
        late, as the host launches what comes behind it, and the round after it seems short. Trees are often tried
        there. Where one step is out at a time nothing is launched behind.
        """
        tokens = self.steps.mean_tokens
        updates = self._committer.commit(plan, result)
        if isinstance(plan, OffloadPlan) and self.rows.host is not None:
            self.rows.host.commit(result.intact)
            self._loaded(self.rows.host)
        seconds, worked = self._gaps.ended(), self._work.ended()
        self.mixing.note(plan, seconds, self._budget.late_s)
        self._budget.note(plan, seconds, self.steps.has_prefill)
        mixed, alone = isinstance(plan, MixedPlan), not self.steps.has_prefill
        after_round = self._ended_round or self._layout.max_in_flight == 1
        if not isinstance(plan, ExportPlan | ImportPlan | OffloadPlan):
            self._ended_round = isinstance(plan, RoundPlan)
        if mixed:
            self.policy.note(plan, result, worked if alone else None, tokens)
        for part, of_part in zip(parts_of_plan(plan), parts_of_result(plan, result), strict=True):
            told = alone and not mixed and (after_round or not isinstance(part, RoundPlan))
            self.policy.note(part, of_part, worked if told else None, tokens)
        return self._reported(updates)

    def fail(self, error: str, engine_failed: bool = True) -> list[RequestUpdate]:
        """The engine broke, or these books: every request ends, and the books begin anew, without a prefix cache.

        engine_failed: false where the K/V of all that is known has lost its meaning otherwise.

        What is out is lost, and with it what the host knows of its rows. An exception may also have left something
        half done, and no check sees all of that. So nothing is kept; page tables are written as rows are given out.
        """
        old, now = self.kv_transfer, self._clock()
        self._retractions_before = self.num_retractions
        self.adapters.lose_slots()
        if self.rows.host is not None:
            self._host_counts = self.rows.host.counts
        self._open_books()
        self.kv_transfer.lose_all(old)
        self.rows.kv_cache.note_all_freed()
        failed = [
            RequestUpdate(
                r.request_id, (), None, "abort", error, engine_failed, stats_of(r, now), start=len(r.output_ids)
            )
            for r in self._pending_outputs.values()
        ]
        return self._reported(failed)

    def begin_anew(self) -> None:
        """All K/V have lost their meaning, and no step is out: whoever runs is put back, and goes on by a prefill.

        The books begin anew, without a prefix cache; who waits keeps its place.
        """
        assert not self.steps
        for request in [*self.queues.prefilling, *self.queues.decoding]:
            self._rounds.put_back(request)
        alive, deadlines, old = [*self.queues.by_id.values()], self._deadlines, self.kv_transfer
        self._retractions_before = self.num_retractions
        if self.rows.host is not None:
            self._host_counts = self.rows.host.counts
        self._open_books()
        self.kv_transfer.lose_all(old)
        self.rows.kv_cache.note_all_freed()
        self._deadlines = deadlines
        for request in alive:
            if request.prompt_logprobs:
                request.prompt_logprobs.clear()  # they were the old weights'
            self.queues.add(request)

    # ---------------------------------------------------------------- inspection

    def ids_by_row(self) -> dict[Row, tuple[int, ...]]:
        """Tokens of each decoding request, the root last, by its row."""
        return {r.running.row: r.ids for r in self.queues.decoding if r.running is not None}

    def arrange_pages(self, order: Callable[[list[PageId]], list[PageId]]) -> None:
        """Reorder the free pages of every group; for conformance, where luck must not hide a wrong address."""
        self.rows.kv_cache.arrange(order)

    def check_integrity(self, num_pages: int | None = None) -> None:
        """Raise unless rows and pages are all accounted for.

        num_pages: look at so many pages of each group, and go on from there in the next call, which takes time
        O(num_pages + rows) and may be done while requests are served. None looks at all, for tests and idle moments.
        """
        self.rows.check(self.steps.num_known, num_pages)
