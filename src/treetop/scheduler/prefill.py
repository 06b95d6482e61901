"""Who is admitted, which chunks of which prompts a prefill step takes, and when it is a round's turn.

A step is a batch of a line for each chunk, as wide as the longest, padding counted; or chunks are packed into blocks,
of which each has its last one padded (`Layout.prefill_blocks`). A small step of blocks may have a fixed size, for which
it is captured (`Layout.prefill_sizes`): one graph, where others are launched kernel by kernel, which takes the host
longer than few tokens take a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from treetop.cache.kv_cache_manager import Lease
from treetop.scheduler.adapters import Adapter, AdapterBooks
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.drafting import Drafting
from treetop.scheduler.kv_transfer import KVTransfers
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request, logprobs_of, masks_of, rows_without_draft
from treetop.scheduler.rows import Rows
from treetop.scheduler.shares import Shares
from treetop.scheduler.steps import StepsOut
from treetop.types.errors import InvariantError
from treetop.types.layout import Layout, num_blocks
from treetop.types.messages import Chunk, PrefillPlan, RowSetup, StepPlan, prefill_of, round_of
from treetop.types.sampling import SamplingMode

_CHEAP_PADDING = 512
"""Padding of a prefill step, in tokens, that costs no more than a step of its own: its launches and the weights."""

_MORE_PADDING = 4
"""A captured step may have a so-many-th more tokens than one of a line for each chunk: it saves launches alone."""

_NARROW = 8
"""Narrow blocks are taken where they save a so-many-th of the tokens: each block reads the keys before it."""

_PASSING = 8
"""Requests that wait among which some are looked for that may pass a long prompt."""

_MAX_PASSED = 32
"""Steps in which others may go before a request whose adapter finds no slot."""

Batch = list[tuple[Request, int]]
"""The requests of a prefill step, each with the tokens of its chunk."""


class PrefillPlanner:
    """Plans prefill steps: first chunks of prompts that have begun, then of requests that wait, in their order.

    A prompt that did not end in its step lets those behind it go first once that end in theirs.

    sizes: of captured steps, see `Layout.prefill_sizes`. It may be set between steps.
    """

    def __init__(
        self,
        layout: Layout,
        budget: PrefillBudget,
        queues: Queues,
        rows: Rows,
        steps: StepsOut,
        kv_transfer: KVTransfers,
        clock: Callable[[], float],
        *,
        adapters: AdapterBooks,
        drafting: Drafting,
    ) -> None:
        self._layout, self._queues, self._rows, self._steps, self._clock = layout, queues, rows, steps, clock
        self._kv_transfer, self._budget, self.shares = kv_transfer, budget, Shares(queues, rows)
        self._adapters, self._drafting, self.sizes = adapters, drafting, layout.prefill_sizes
        self._num_waiting = 0
        self._since_round = 0  # tokens of steps since the last round
        self._rounds_due = 0.0  # before the next step: a part of one is kept for the next
        self._last_s = float("-inf")  # when the last step was planned
        self.lacks_pages: Request | None = None
        """Who would have had the next row in the last step that was planned, had there been pages."""
        self.lacks_slots = set[Adapter]()
        """Adapters that found no slot in that step."""
        self._lacks_room = False  # whether one had no place in that step but for its room, and could have had a row
        self._cut_last = False  # whether a prompt did not end in it, and nobody has passed it
        self._mixed = False  # whether the step that is being planned has a round in its forward
        self._packed = 0  # see `PrefillPlan`
        self._blocks = dict[int, int]()  # of the step: width of blocks -> those that it fills; {} if it is not packed
        self._to_come: float | None = None  # tokens of who runs in the step that is being planned, once it was asked

    @property
    def gives_way(self) -> bool:
        """Whether rounds that could run go first: they are due, or what waits had better wait for more."""
        return self._rounds_due >= 1 or self._may_wait()

    def _may_wait(self) -> bool:
        """See `PrefillBudget.may_wait`."""
        budget, rows, now = self._budget, len(self._queues.decoding), self._clock()
        enough, work, waited, longest = budget.tokens(rows, 0), 0, 0.0, 0.0
        for request in self._candidates():
            work += request.num_ids - request.num_computed_tokens
            if work >= enough:
                return False
            since = now - max(request.arrival_s, self._last_s)
            waited, longest = waited + since, max(longest, since)
        return work > 0 and budget.may_wait(rows, work, waited, longest)

    def take_turns(self, plan: StepPlan) -> None:
        """A step was planned: a prefill step, after which rounds are due, a round, or one with both."""
        prefill = prefill_of(plan)
        if prefill is not None:
            self._rounds_due = self._rounds_due % 1 + self._rounds_after(prefill)
        if round_of(plan) is not None:
            self._rounds_due, self._since_round = max(self._rounds_due - 1, 0.0), 0

    def _rounds_after(self, plan: PrefillPlan) -> float:
        """Rounds that are due before the next step, where some can run. plan: the step that was planned last.

        None yet, while one waits that could have a row and lacked nothing but room in the step.
        """
        rows, budget = len(self._queues.decoding), self._budget
        self._since_round += budget.work_of(plan, at_least=True)
        begun = sum(request.num_ids - request.num_computed_tokens for request in self._queues.prefilling)
        if self._lacks_room and budget.goes_on(rows, self._since_round + begun):
            return 0.0
        return budget.rounds_after(plan, rows)

    @property
    def has_work(self) -> bool:
        """Whether a prompt has begun, or may have a row."""
        return any(True for _ in self._candidates())

    def _candidates(self) -> Iterator[Request]:
        yield from self._queues.prefilling
        yield from islice(self._queues.waiting, self._rows.num_free)

    @property
    def num_candidates(self) -> int:
        """Who is being prefilled, and who may have a row."""
        return len(self._queues.prefilling) + min(len(self._queues.waiting), self._rows.num_free)

    def work(self, enough: int) -> int:
        """Tokens that are to be prefilled of those who have a row or may have one, up to `enough`."""
        work = 0
        for request in self._candidates():
            work += request.num_ids - request.num_computed_tokens
            if work >= enough:
                break
        return min(work, enough)

    def plan(self, mixed: bool = False, packed: int = 0) -> PrefillPlan | None:
        """The next step; None if there is nothing to prefill, or no room for it. mixed: a round is in its forward.

        packed: as in `PrefillPlan`, if who comes first can be in such a batch.
        """
        first = self._queues.prefilling[0] if self._queues.prefilling else self.shares.first()
        packs = first is None or _may_be_packed(first)
        self._mixed, self._packed = mixed, packed if packs else 0
        widths = (*(block for _, block in self.sizes), *self._layout.prefill_blocks)
        self._blocks = dict.fromkeys(widths if packs and not mixed else (), 0)
        setups: list[RowSetup] = []
        batch: Batch = []
        self.lacks_pages = self._to_come = None
        self._lacks_room = False
        self.lacks_slots.clear()
        entering = min(len(self._queues.waiting), self._rows.num_free)
        self._num_waiting = max(len(self._queues.prefilling) + entering - 1, 0)  # beside the first
        if self._cut_last:
            self._pass(batch, setups)
        self._cut_last = not batch
        if not batch:
            self._in_order(batch, setups)
        if not batch:
            return None
        self._last_s = self._clock()
        batch.sort(key=lambda each: not each[0].held.lease.drafts)  # the draft reads the first ones
        chunks = tuple(self._chunk(request, count) for request, count in batch)
        last = (request for (request, _), chunk in zip(batch, chunks, strict=True) if chunk.next_token is None)
        size, block = (self._packed, self._layout.prompt_block) if self._packed else self._in_blocks(chunks)
        return PrefillPlan(
            edits=self._rows.take_edits(),
            freed=self._rows.kv_cache.take_freed(),
            setups=tuple(setups),
            chunks=chunks,
            choice=SamplingMode.costliest(request.choice for request, _ in batch),
            logprobs=logprobs_of([request for request, _ in batch]),
            masks=masks_of(last),
            adapters=self._adapters.take_edits(),
            packed=size,
            block=block,
            no_draft=rows_without_draft([request for request, _ in batch]),
        )

    def _in_order(self, batch: Batch, setups: list[RowSetup]) -> None:
        """Those that have begun, then those that wait, until one has no room. Where it is a slot for its adapter that
        one lacks, others go first.
        """
        for request in self._queues.prefilling:
            count = self._count(batch, request)
            if self._may_join(batch, request, request.num_computed_tokens, count):
                self._reserve_chunk(request, count)
                self._join(batch, request, count)
        while self._rows.may_enter and (first := self.shares.first(self.lacks_slots)) is not None:
            if not self._adapters.has_room(first.adapter, self._rows.adapters):
                self._pass_over(first)
            elif first.remote:  # its row is set up by its last import
                if not self._kv_transfer.admit(first):
                    break
            elif not self._admit(first, batch, setups):
                break

    def _pass_over(self, request: Request) -> None:
        """Others go first, until that has been so for long: then no adapter that has a slot comes in any more."""
        self.lacks_slots.add(request.adapter)
        request.num_passed += 1
        if request.num_passed > _MAX_PASSED:
            self.lacks_slots |= self._adapters.in_slots

    def _pass(self, batch: Batch, setups: list[RowSetup]) -> None:
        """Those behind a prompt that is being prefilled, of its priority, that end in this step; of few that wait."""
        first = self._queues.prefilling[0] if self._queues.prefilling else None
        if first is None:
            return
        for request in self._queues.prefilling[1:]:
            count = self._count(batch, request)
            if count == request.num_ids - request.num_computed_tokens and self._may_join(
                batch, request, request.num_computed_tokens, count
            ):
                self._reserve_chunk(request, count)
                self._join(batch, request, count)
        for request in self.shares.first_few(_PASSING):
            if request.order[0] != first.order[0] or not self._rows.may_enter:
                break
            if not request.remote:
                self._admit(request, batch, setups, whole=True)

    def _count(self, batch: Batch, request: Request) -> int:
        """Tokens that a request may bring to a batch; 0 for no row."""
        start = request.num_computed_tokens
        return self._cut(request, request.held.lease, start, self._share(batch, request, start))

    def _cut(self, request: Request, lease: Lease, start: int, count: int) -> int:
        """Of `count` tokens behind `start`, those up to where states of recurrent layers are to be kept."""
        end = self._rows.kv_cache.next_checkpoint(lease, start, request.num_ids)
        return count if end is None else min(count, end - start)

    def _share(self, batch: Batch, request: Request, start: int) -> int:
        """Of a request's tokens behind `start`, those for this step.

        Beside rounds, what does not fit into one step comes in about equal parts: a small rest costs nearly as much as
        a step. Into blocks one comes whole behind others, for a step that is not full costs no more than it holds.
        """
        room, rest = self._room(batch, request, start), request.num_ids - start
        if batch and room < rest and self._takes_blocks and _may_be_packed(request):
            return 0
        if not room or self._packed or not self._queues.decoding:
            return min(room, rest)
        return -(-rest // -(-rest // room))

    def _room(self, batch: Batch, request: Request, start: int) -> int:
        """Tokens that one more row may bring to a batch, whose size counts its padding; 0 for no row. start: behind so
        many.
        """
        if self._packed:
            width = self._layout.prompt_block
            return self._packed - width * sum(num_blocks(count, width) for _, count in batch)
        most = self._most(batch, start)
        room = most // self._layout.bucket_for(len(batch) + 1)
        in_lines = room if all(count <= room for _, count in batch) else 0
        return max(in_lines, self._room_in_blocks(most)) if _may_be_packed(request) else in_lines

    def _most(self, batch: Batch, start: int) -> int:
        """Tokens of the step, padding counted, with one more row that has `start` before its chunk."""
        deepest = max([start, *(each.num_computed_tokens for each, _ in batch)])
        return self._budget.tokens(len(self._queues.decoding), deepest, self._num_waiting, self._mixed)

    def _room_in_blocks(self, most: int) -> int:
        """Tokens that one more chunk may bring to the step as one of blocks, of `most` tokens at most; 0 if it is
        none.
        """
        sizes = ((size, block) for size, block in self.sizes if size <= most and block in self._blocks)
        larger = ((most - most % block, block) for block in self._layout.prefill_blocks if block in self._blocks)
        return max((size - self._blocks[block] * block for size, block in chain(sizes, larger)), default=0)

    def _join(self, batch: Batch, request: Request, count: int) -> None:
        batch.append((request, count))
        if not _may_be_packed(request):
            self._blocks.clear()
        for block in self._blocks:
            self._blocks[block] += num_blocks(count, block)

    def _in_blocks(self, chunks: Sequence[Chunk]) -> tuple[int, int]:
        """Tokens of the batch of blocks that holds these, and of a block; (0, 0) for a line each.

        The smallest captured one, but for one with so much more padding that it may take a device longer; else as many
        blocks as they take, where that is less than lines would have.
        """
        least, block = self._layout.bucket_for(len(chunks)) * max(len(chunk.token_ids) for chunk in chunks), 0
        for width in filter(self._blocks.__contains__, self._layout.prefill_blocks):
            size = self._blocks[width] * width
            if size <= self._layout.chunk and size < least - (block and least // _NARROW):
                least, block = size, width
        most = max(least + least // _MORE_PADDING, _CHEAP_PADDING)
        sizes = ((size, block) for size, block in self.sizes if block in self._blocks and size <= most)
        captured = next(((size, block) for size, block in sizes if size >= self._blocks[block] * block), None)
        return captured or ((least, block) if block else (0, 0))

    def _may_join(self, batch: Batch, request: Request, start: int, count: int) -> bool:
        """Whether a row with `count` tokens behind `start` may join a batch: it has room in blocks, or the padding of
        lines is cheap, or a third of the whole at most.
        """
        if self._packed:
            return count > 0 and _may_be_packed(request)
        if _may_be_packed(request) and 0 < count <= self._room_in_blocks(self._most(batch, start)):
            return True
        counts = [each for _, each in batch] + [count]
        padding = self._layout.bucket_for(len(counts)) * max(counts) - sum(counts)
        return count > 0 and padding <= max(sum(counts) // 2, _CHEAP_PADDING)

    @property
    def _takes_blocks(self) -> bool:
        """Whether the step may have as many blocks as its chunks take."""
        return any(width in self._blocks for width in self._layout.prefill_blocks)

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a request, and the token after them. After its last chunk it can decode."""
        ids, start = request.ids, request.num_computed_tokens
        of_prompt = request.params.prompt_logprobs if request.lacks_prompt_logprobs else None
        end, kv_cache, lease, keep = start + count, self._rows.kv_cache, request.held.lease, None
        if kv_cache.next_checkpoint(lease, start, len(ids)) == end:
            keep = kv_cache.lease_checkpoint(lease, end)
        request.num_computed_tokens = end
        self._kv_transfer.computed(request)
        if end == len(ids):
            self._queues.prefilled(request)
        place, told = (request.held.row, start, ids[start:end]), request.tell_experts(end)
        return Chunk(*place, next_prompt_token(ids, end), of_prompt, keep, told)

    def _will_fit(self, request: Request, num_tokens: int) -> bool:
        """Whether pages are there for so many tokens, and for what requests that run and this one will still bring, by
        what others have been.

        One alone may always enter. Nothing is set aside for it: who needs more than there is has others retracted.
        """
        running, lengths = (self._queues.prefilling, self._queues.decoding), self._rows.lengths
        if self._to_come is None:
            self._to_come = lengths.to_come(chain(*running))
        to_come = self._to_come + lengths.to_come([request])
        return not any(running) or not to_come or num_tokens + to_come <= self._rows.kv_cache.num_available

    def _reserve_chunk(self, request: Request, count: int) -> None:
        """Pages of the windows for one more chunk; the other groups got theirs at admission."""
        self._rows.slide(request, self._steps.num_known(request))
        end = request.num_computed_tokens + count
        if not self._rows.reserve(request, request.held.reserved, end):
            raise InvariantError("a window's pool does not hold the windows of all running requests")

    def _admit(self, request: Request, batch: Batch, setups: list[RowSetup], whole: bool = False) -> bool:
        """Give a waiting request a row, pages for all its tokens and one round, and a place in the prefill `batch`.

        False if there is no room, or its first chunk does not suit the batch. whole: that has to be its last.
        """
        kv_cache = self._rows.kv_cache
        if not self._adapters.place(request.adapter, self._rows.adapters):
            return False
        lease, shared = kv_cache.open(request.reusable_ids, request.cache_salt, self._drafting.begins(request))
        known = lease.shared * self._layout.page_size
        rest = request.num_ids - known
        count = self._cut(request, lease, known, self._share(batch, request, known))
        suits = self._may_join(batch, request, known, count) and (count == rest or not whole)
        total = request.tokens_at_entry(self._layout.headroom)
        reserved = None
        if suits and self._will_fit(request, total - known):
            reserved = kv_cache.reserve(lease, total, known, known + count)
        if reserved is None:
            self.lacks_pages = request if suits else None
            has_pages = total - known <= kv_cache.num_available and self._will_fit(request, total - known)
            self._lacks_room |= not suits and has_pages
            kv_cache.release(lease)
            return False
        request.num_computed_tokens = known
        self._rows.enter(request, lease, shared + reserved, total)
        if self._to_come is not None:
            self._to_come += self._rows.lengths.to_come([request])
        if request.admitted_s is None:
            request.admitted_s, request.num_cached_tokens = self._clock(), known
        self._queues.admitted(request)
        setups.append(request.setup(known, kv_cache.checkpoint_of(lease)))
        self._join(batch, request, count)
        return True


def _may_be_packed(request: Request) -> bool:
    """Whether all that a request asks of its prompt is its first token, which nobody has to be asked about."""
    return not (request.lacks_prompt_logprobs or request.choice.processes or request.constrained)


def next_prompt_token(ids: Sequence[int], end: int) -> int | None:
    """The token after a chunk that ends at `end`, from prompt and output alike; None at the end (sgl-26329)."""
    return ids[end] if end < len(ids) else None
