"""What a step's result gives each request, when a request has ended, and what is told of it."""

from collections.abc import Callable, Sequence

from treetop.checks.host import check_emitted
from treetop.scheduler.kv_transfer import KVTransfers
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request
from treetop.scheduler.rows import Rows
from treetop.scheduler.steps import StepsOut
from treetop.scheduler.stops import first_stop
from treetop.types.errors import InputError
from treetop.types.kv_transfer.scheduling import FirstToken
from treetop.types.messages import (
    ExportPlan,
    ImportPlan,
    MixedPlan,
    OffloadPlan,
    PrefillPlan,
    RoundPlan,
    StepPlan,
    StepResult,
    parts_of_result,
)
from treetop.types.requests import RequestStats, RequestUpdate
from treetop.types.sampling import FinishReason


class Committer:
    """Turns results into updates.

    A request that ends while steps with its row are out keeps row and lease until the last of them is committed; what
    they give is dropped.
    """

    def __init__(
        self,
        queues: Queues,
        rows: Rows,
        steps: StepsOut,
        kv_transfer: KVTransfers,
        check_level: int,
        clock: Callable[[], float],
    ) -> None:
        self._queues, self._rows, self._steps, self._clock = queues, rows, steps, clock
        self._kv_transfer, self._check_level = kv_transfer, check_level

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Apply a step's result. A request with non-finite logits fails alone; one that has ended gets nothing more."""
        requests = self._steps.take(plan)
        match plan:
            case ExportPlan():
                updates = []
                self._kv_transfer.commit_exports(plan, requests, result)
            case ImportPlan():
                done = self._kv_transfer.commit_imports(plan, requests, result)
                updates = [self._emit_first(request, first) for request, first in done]
            case OffloadPlan():
                updates = []
            case MixedPlan():
                of_prefill, of_round = parts_of_result(plan, result)
                updates = self._commit_rows(plan.prefill, of_prefill) + self._commit_rows(plan.round, of_round)
            case _:
                updates = self._commit_rows(plan, result)
        for request in requests:
            if request.finish_reason is not None:
                self._settle(request)
        return updates

    def _commit_rows(self, plan: PrefillPlan | RoundPlan, result: StepResult) -> list[RequestUpdate]:
        """What a prefill or a round gave each row."""
        is_round = isinstance(plan, RoundPlan)
        num_drafted = plan.shape.num_draft_tokens - 1 if isinstance(plan, RoundPlan) else 0
        without_draft = {*plan.no_draft}
        replanted = {mask.row for mask in plan.masks} if isinstance(plan, RoundPlan) else ()
        updates = []
        for i, row_result in enumerate(result.rows):
            request = self._rows.by_row[row_result.row]
            if request.finish_reason is not None:
                continue
            if not row_result.finite:
                updates.append(self.finish(request, (), "abort", error="the target's logits are not finite"))
                continue
            tokens, logprobs = row_result.tokens, row_result.logprobs
            if tokens and request.export_from is not None:
                self._kv_transfer.computed(request, FirstToken(tokens[0], logprobs[0] if logprobs else None))
                continue
            if row_result.experts is not None:
                behind = request.num_computed_tokens if isinstance(plan, RoundPlan) else row_result.experts.start
                request.experts.append(row_result.experts._replace(start=behind))
            if isinstance(plan, RoundPlan):
                request.num_computed_tokens += len(tokens)
                request.tell_experts(request.num_computed_tokens)
            else:
                request.take_prompt_logprobs(plan.chunks[i].start, row_result.prompt_logprobs)
            if tokens:
                update = self._emit(request, tokens, len(tokens) - 1 if is_round else None)
                ranks = () if row_result.row in replanted else row_result.ranks
                drafted = row_result.num_nodes - 1 if row_result.num_nodes else num_drafted
                drafted = 0 if row_result.row in without_draft else drafted
                if drafted or ranks or row_result.tree is not None:
                    update = update._replace(num_drafted=drafted, accept_ranks=ranks, tree=row_result.tree)
                updates.append(update._replace(logprobs=logprobs[: len(update.new_ids)]) if logprobs else update)
                if request.prompt_logprobs is not None:
                    updates[-1] = updates[-1]._replace(prompt_logprobs=tuple(request.prompt_logprobs))
                    request.prompt_logprobs = None
                if request.experts:
                    updates[-1] = updates[-1]._replace(experts=request.take_experts())
        if isinstance(plan, PrefillPlan):
            self._cache_chunks(plan)
        return updates

    def finish(
        self,
        request: Request,
        new_ids: Sequence[int],
        reason: FinishReason,
        accept_len: int | None = None,
        *,
        error: str | None = None,
        timed_out: bool = False,
        user_error: bool = False,
    ) -> RequestUpdate:
        """End a request, wherever it stands; its last update."""
        start = len(request.output_ids)
        request.output_ids += new_ids
        request.finish_reason = reason
        self._queues.remove(request)
        if self._rows.host is not None:
            self._rows.host.forget(request.request_id)
        if reason in ("stop", "length") and request.export_from is None:
            self._rows.lengths.note(request)
        self._kv_transfer.ended(request)
        self._settle(request)
        stats = stats_of(request, self._clock())
        return RequestUpdate(
            request.request_id,
            tuple(new_ids),
            accept_len,
            reason,
            error,
            False,
            stats,
            timed_out=timed_out,
            start=start,
            user_error=user_error,
        )

    def _cache_chunks(self, plan: PrefillPlan) -> None:
        """The pages that a prefill step has filled enter the cache at once."""
        for chunk in plan.chunks:
            request = self._rows.by_row.get(chunk.row)
            if request is not None and request.finish_reason is None:
                end = chunk.start + len(chunk.token_ids)
                if chunk.keep is None:
                    self._rows.cache(request, request.ids[:end])
                else:  # its last page is complete: the draft was told the token after it
                    self._rows.cache(request, request.ids[: end + 1], end)

    def _emit_first(self, request: Request, first: FirstToken) -> RequestUpdate:
        """The token that another worker's prefill gave."""
        update = self._emit(request, (first.token,), None)
        return update if first.logprobs is None else update._replace(logprobs=(first.logprobs,))

    def _emit(self, request: Request, tokens: tuple[int, ...], accept_len: int | None) -> RequestUpdate:
        limit, start = request.tokens_left, len(request.output_ids)
        if not limit:  # of its prompt alone something is asked
            return self.finish(request, (), "length")
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        if request.constrained is not None:
            request.constrained.check(tokens)
        cut = first_stop(tokens, request.stop_ids, limit)
        if cut is None and request.constrained is not None:
            try:  # no answer yet: the scheduler asks again
                cut = (len(tokens), "stop") if request.constrained.advance(tokens) is False else None
            except InputError as error:
                return self.finish(request, tokens, "abort", accept_len, error=str(error), user_error=True)
        if self._check_level >= 1:
            count, reason = cut or (len(tokens), None)
            check_emitted(tokens[:count], request.stop_ids, reason, limit)
        if cut is None:
            request.output_ids += tokens
            update = RequestUpdate(request.request_id, tokens, accept_len, start=start)
        else:
            count, reason = cut
            update = self.finish(request, tokens[:count], reason, accept_len)
        if start:
            return update
        assert request.admitted_s is not None  # or it had no token
        return update._replace(
            num_cached_tokens=request.num_cached_tokens,
            queue_s=request.admitted_s - request.arrival_s,
            prefill_s=request.first_token_s - request.admitted_s,
        )

    def _settle(self, request: Request) -> None:
        """Let a request go that has ended, once no step with its row is out."""
        if request.running is None or request.running.steps_out:
            return
        # The cache key is what the client received: a path past the stop is cut off (sgl-35694).
        self._rows.leave(request, request.ids[: request.num_complete] if request.finish_reason != "abort" else ())


def stats_of(request: Request, end_s: float) -> RequestStats:
    """What is told of a request that ends now."""
    return RequestStats(
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_retractions=request.num_retractions,
        arrival_s=request.arrival_s,
        admitted_s=request.admitted_s,
        first_token_s=request.first_token_s,
        end_s=end_s,
    )
