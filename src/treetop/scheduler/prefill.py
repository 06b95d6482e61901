"""Who is admitted, and which chunks of which prompts a prefill step takes."""

from collections.abc import Callable, Sequence

from treetop.scheduler.handover import Handover
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request, logprobs_of, masks_of
from treetop.scheduler.rows import Rows
from treetop.scheduler.steps import StepsOut
from treetop.types.errors import InvariantError
from treetop.types.layout import Layout, PrefillPace
from treetop.types.messages import Chunk, PrefillPlan, RowSetup
from treetop.types.sampling import Choice

_CHEAP_PADDING = 512
"""Padding of a prefill step, in tokens, that costs no more than a step of its own: its launches and the weights."""

Batch = list[tuple[Request, int]]
"""The requests of a prefill step, each with the tokens of its chunk."""


class PrefillPlanner:
    """Plans prefill steps: first chunks of prompts that have begun, then of requests that wait, in their order."""

    def __init__(
        self,
        layout: Layout,
        tokens_per_round: int | None,
        queues: Queues,
        rows: Rows,
        steps: StepsOut,
        handover: Handover,
        clock: Callable[[], float],
        *,
        pace: PrefillPace | None,
    ) -> None:
        """tokens_per_round: most tokens of a step while requests decode; None goes by the pace. pace: None counts no
        attention, and without tokens_per_round a step is as large as any.
        """
        self._layout, self._queues, self._rows, self._steps, self._clock = layout, queues, rows, steps, clock
        self._handover = handover
        self._tokens_per_round, self._pace = tokens_per_round, pace or PrefillPace(layout.chunk, None)

    def plan(self) -> PrefillPlan | None:
        """The next step; None if there is nothing to prefill, or no room for it."""
        setups: list[RowSetup] = []
        batch: Batch = []
        for request in self._queues.prefilling:
            count = self._count(batch, request)
            if self._may_join(batch, count):
                self._reserve_chunk(request, count)
                batch.append((request, count))
        while self._queues.waiting and self._rows.may_enter:
            request = self._queues.waiting[0]
            if request.remote:  # its row is set up by its last import
                if not self._handover.admit(request):
                    break
                continue
            if not self._admit(request, batch):
                break
            self._queues.admitted(request)
            setups.append(request.setup(request.num_computed_tokens))
            batch.append((request, self._count(batch, request)))
        if not batch:
            return None
        chunks = tuple(self._chunk(request, count) for request, count in batch)
        last = (request for (request, _), chunk in zip(batch, chunks, strict=True) if chunk.next_token is None)
        return PrefillPlan(
            edits=self._rows.take_edits(),
            freed=self._rows.kv_cache.take_freed(),
            setups=tuple(setups),
            chunks=chunks,
            choice=Choice.costliest(request.choice for request, _ in batch),
            logprobs=logprobs_of([request for request, _ in batch]),
            masks=masks_of(last),
        )

    def _count(self, batch: Batch, request: Request) -> int:
        """Tokens that a request may bring to a batch; 0 for no row."""
        start = request.num_computed_tokens
        return min(self._room(batch, start), request.num_ids - start)

    def _room(self, batch: Batch, start: int) -> int:
        """Tokens that one more row may bring to a batch, whose size counts its padding; 0 for no row. start: behind so
        many."""
        most = self._most(max([start, *(request.num_computed_tokens for request, _ in batch)]))
        room = most // self._layout.bucket_for(len(batch) + 1)
        return room if all(count <= room for _, count in batch) else 0

    def _most(self, start: int) -> int:
        """Tokens of a step, whose deepest chunk has `start` before it.

        While requests decode, it may take about as long as their round: as many tokens as that computes, fewer the more
        each of them attends to.
        """
        layout, pace, decoding = self._layout, self._pace, len(self._queues.decoding)
        if not decoding:
            return layout.chunk
        most = min(self._tokens_per_round or max(decoding * layout.verify_tail, pace.least), layout.chunk)
        if pace.attended is None:
            return most
        return max(most * pace.attended // (pace.attended + start), min(most, layout.page_size))

    def _may_join(self, batch: Batch, count: int) -> bool:
        """Whether a row with `count` tokens may join a batch: its padding is cheap, or a third of the whole at most."""
        counts = [each for _, each in batch] + [count]
        padding = self._layout.bucket_for(len(counts)) * max(counts) - sum(counts)
        return count > 0 and padding <= max(sum(counts) // 2, _CHEAP_PADDING)

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them. After its last chunk it can decode."""
        ids, start = request.ids, request.num_computed_tokens
        of_prompt = request.params.prompt_logprobs if request.lacks_prompt_logprobs else None
        end = start + count
        request.num_computed_tokens = end
        self._handover.computed(request)
        if end == len(ids):
            self._queues.prefilled(request)
        return Chunk(request.held.row, start, ids[start:end], next_prompt_token(ids, end), of_prompt)

    def _reserve_chunk(self, request: Request, count: int) -> None:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        self._rows.slide(request, self._steps.num_known(request))
        end = request.num_computed_tokens + count
        if not self._rows.reserve(request, request.held.reserved, end):
            raise InvariantError("a window's pool does not hold the windows of all running requests")

    def _admit(self, request: Request, batch: Batch) -> bool:
        """Give a waiting request a row and pages for all its tokens and one round; False if there is no room.

        False, too, if its first chunk does not suit the prefill `batch`.
        """
        kv_cache = self._rows.kv_cache
        lease, shared = kv_cache.open(request.reusable_ids)
        known = lease.shared * self._layout.page_size
        end = min(known + self._room(batch, known), request.num_ids)
        suits = self._may_join(batch, end - known)
        total = request.tokens_at_entry(self._layout.headroom)
        reserved = kv_cache.reserve(lease, total, known, end) if suits else None
        if reserved is None:
            kv_cache.release(lease)
            return False
        request.num_computed_tokens = known
        self._rows.enter(request, lease, shared + reserved, total)
        if request.admitted_s is None:
            request.admitted_s, request.num_cached_tokens = self._clock(), known
        return True


def next_prompt_token(ids: Sequence[int], end: int) -> int | None:
    """The token after a chunk that ends at `end`, from prompt and output alike; None at the end (sgl-26329)."""
    return ids[end] if end < len(ids) else None
