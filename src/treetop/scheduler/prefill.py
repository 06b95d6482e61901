"""Who is admitted, and which chunks of which prompts a prefill step takes."""

from collections.abc import Callable, Sequence

from treetop.scheduler.handover import Handover
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request, logprobs_of, masks_of
from treetop.scheduler.rows import Rows
from treetop.scheduler.steps import StepsOut
from treetop.types.errors import InvariantError
from treetop.types.layout import Layout
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
    ) -> None:
        """tokens_per_round: most tokens of a step while requests decode; None for as many as otherwise."""
        self._layout, self._queues, self._rows, self._steps, self._clock = layout, queues, rows, steps, clock
        self._handover = handover
        self._tokens_per_round = min(tokens_per_round or layout.chunk, layout.chunk)

    def plan(self) -> PrefillPlan | None:
        """The next step; None if there is nothing to prefill, or no room for it."""
        setups: list[RowSetup] = []
        batch: Batch = []
        for request in self._queues.prefilling:
            count = min(self._room(batch), request.num_ids - request.num_computed_tokens)
            if self._may_join(batch, count):
                self._reserve_chunk(request, count)
                batch.append((request, count))
        while self._queues.waiting and self._rows.may_enter:
            request, room = self._queues.waiting[0], self._room(batch)
            if request.remote:  # its row is set up by its last import
                if not self._handover.admit(request):
                    break
                continue
            if room == 0 or not self._admit(request, batch, room):
                break
            self._queues.admitted(request)
            setups.append(request.setup(request.num_computed_tokens))
            batch.append((request, min(room, request.num_ids - request.num_computed_tokens)))
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

    def _room(self, batch: Batch) -> int:
        """Tokens that one more row may bring to a batch, whose size counts its padding; 0 for no row."""
        most = self._tokens_per_round if self._queues.decoding else self._layout.chunk
        room = most // self._layout.bucket_for(len(batch) + 1)
        return room if all(count <= room for _, count in batch) else 0

    def _may_join(self, batch: Batch, count: int) -> bool:
        """Whether a row with `count` tokens may join a batch: its padding is cheap, or a third of the whole at most."""
        counts = [each for _, each in batch] + [count]
        padding = self._layout.bucket_for(len(counts)) * max(counts) - sum(counts)
        return count > 0 and padding <= max(sum(counts) // 2, _CHEAP_PADDING)

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them. After its last chunk it can decode."""
        ids, start = request.ids, request.num_computed_tokens
        end = start + count
        request.num_computed_tokens = end
        self._handover.computed(request)
        if end == len(ids):
            self._queues.prefilled(request)
        return Chunk(request.held.row, start, ids[start:end], next_prompt_token(ids, end))

    def _reserve_chunk(self, request: Request, count: int) -> None:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        self._rows.slide(request, self._steps.num_known(request))
        end = request.num_computed_tokens + count
        if not self._rows.reserve(request, request.held.reserved, end):
            raise InvariantError("a window's pool does not hold the windows of all running requests")

    def _admit(self, request: Request, batch: Batch, budget: int) -> bool:
        """Give a waiting request a row and pages for all its tokens and one round; False if there is no room.

        False, too, if its first chunk, of `budget` tokens at most, does not suit the prefill `batch`.
        """
        kv_cache = self._rows.kv_cache
        lease, shared = kv_cache.open(request.ids)
        known = lease.shared * self._layout.page_size
        end = min(known + budget, request.num_ids)
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
