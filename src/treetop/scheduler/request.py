"""A request's life on the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

from treetop.cache.kv_cache_manager import Lease
from treetop.scheduler.adapters import NO_ADAPTER, Adapter
from treetop.scheduler.constrained import ConstraintState, Structures, constrained_by
from treetop.types.ids import RequestId, Row
from treetop.types.messages import RowHistory, RowMask, RowSetup
from treetop.types.requests import EngineRequest, Tenant, check_received
from treetop.types.routed_experts import TokenExperts
from treetop.types.sampling import FinishReason, SamplingMode, SamplingParams, TokenLogprobs

MAX_RETRACTIONS = 3
"""How often a request may be put back for want of pages. Then it waits until there are pages for all it may become."""


@dataclass(slots=True)
class Running:
    """What a request holds while it runs.

    reserved: tokens that the lease holds in every group without a window.
    steps_out, rounds_out: steps with its row, and rounds among them, whose results have not been committed.
    deferred: tokens whose draft extend is yet to be planned.
    """

    row: Row
    lease: Lease
    reserved: int
    steps_out: int = 0
    rounds_out: int = 0
    deferred: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the scheduler.

    order: lower runs first, and is put back last; no two are equal.
    tenant, group: who shares rows with it (`scheduler/shares.py`).
    stop_ids: EOS, unless it is ignored, and the request's own.
    max_output: tokens that max_tokens and the context allow.
    num_computed_tokens: tokens whose K/V the pages hold, as far as the host knows; a chunk counts once it is planned, a
        round once its result is committed. A request decodes once all its ids are num_computed_tokens: the token after
        them, the root, is on its way then, and once it is here `num_computed_tokens == num_ids - 1`.
    running: None while it waits; an ended request keeps it until no step with its row is out.
    constrained: None if any token may come, but for never_ids.
    remote: another worker is to prefill it. num_imported_tokens: of its prompt, whose K/V one has computed.
    export_from: it is prefilled for another worker, which wants its tokens from here on, and never decodes.
    adapter: its own, or that of none.
    num_passed: steps that were planned while it was next, and its adapter found no slot.
    asked_host: whether the tier on the host has been asked for its prompt.
    prompt_logprobs: those that are known, from the prompt's second token on; None if they are not asked for, or were
        told with the first token.
    told: tokens whose experts steps tell of, those that are out too; None if they are not asked for. experts: those
        that came and are not told the client, up to the last of them that a step gave. The rest is for the stats.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_output: int
    choice: SamplingMode
    order: tuple[int, int]
    arrival_s: float
    tenant: Tenant
    group: RequestId
    cache_salt: str
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    running: Running | None = None
    constrained: ConstraintState | None = None
    never_ids: frozenset[int] = frozenset()
    prompt_logprobs: list[TokenLogprobs] | None = None
    told: int | None = None
    experts: list[TokenExperts] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_retractions: int = 0
    num_passed: int = 0
    remote: bool = False
    num_imported_tokens: int = 0
    export_from: int | None = None
    asked_host: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    adapter: Adapter = NO_ADAPTER

    @classmethod
    def of(
        cls,
        asked: EngineRequest,
        eos_ids: frozenset[int],
        max_context: int,
        order: tuple[int, int],
        arrival_s: float,
        vocab_size: int | None = None,
        structures: Structures | None = None,
    ) -> "Request":
        """A request that waits. The rest is as in `constrained_by`.

        Raises InputError if its constraint cannot be kept, or if it has received all that it may have.
        """
        params, choice = asked.params, SamplingMode.of(asked.params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        maximum = min(params.max_tokens, max_context - len(asked.prompt_ids))
        check_received(asked.received, maximum)
        constrained = constrained_by(asked, stop_ids, eos_ids, vocab_size, structures)
        if constrained is not None:
            choice = SamplingMode.costliest((choice, SamplingMode.PROCESS))
        received = [*asked.received]  # as if it had been put back
        request = cls(
            asked.request_id,
            asked.prompt_ids,
            params,
            asked.seed,
            stop_ids,
            maximum,
            choice,
            order,
            arrival_s,
            asked.tenant,
            asked.request_id if asked.group is None else asked.group,
            asked.cache_salt,
            received,
        )
        request.constrained = constrained
        request.never_ids = frozenset(word[0] for word in asked.bad_words if len(word) == 1)
        if params.prompt_logprobs is not None and not received:
            request.prompt_logprobs = []
        request.told = 0 if params.return_routed_experts else None
        return request

    def setup(self, known: int, checkpoint: int | None = None) -> RowSetup:
        """Its entry into the row that it has been given, with `known` tokens in its pages, and their states."""
        history = None
        if self.params.changes_logits or self.constrained is not None:
            history = RowHistory(self.prompt_ids, tuple(self.output_ids), self.stop_ids, self.never_ids)
        return RowSetup(
            self.held.row,
            known,
            self.params,
            self.seed,
            history,
            prefix_ids=tuple(self.ids[:known]),
            constrained=self.constrained is not None,
            checkpoint=checkpoint,
            adapter=self.adapter.slot,
            owner=owner_of(self.cache_salt),
            drafts=self.held.lease.drafts,
        )

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.output_ids)

    @property
    def num_ids(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_complete(self) -> int:
        """Of its computed tokens, those whose K/V the pages hold in every group, the draft's too if it has one.

        A round that is out has deferred nothing of them: its token counts once it is committed.
        """
        held = self.running
        return self.num_computed_tokens - (0 if held is None else max(held.deferred - held.rounds_out, 0))

    @property
    def asks(self) -> bool:
        """Its constraint has not said yet what may come next."""
        return self.constrained is not None and self.constrained.asked is not None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) + 1 < len(self.prompt_ids)

    @property
    def reusable_ids(self) -> tuple[int, ...]:
        """The ids of which a cached prefix is of use: up to where the log-probabilities of the prompt are known."""
        if self.prompt_logprobs is None or not self.lacks_prompt_logprobs:
            return self.ids
        return self.prompt_ids[: len(self.prompt_logprobs) + 1]

    def take_prompt_logprobs(self, start: int, given: Sequence[TokenLogprobs]) -> None:
        """Those that a chunk from token `start` on gave; it may begin before what is known after a retraction."""
        if self.prompt_logprobs is not None and given:
            assert start <= len(self.prompt_logprobs)
            self.prompt_logprobs += given[len(self.prompt_logprobs) - start :]

    def tell_experts(self, end: int) -> int | None:
        """A step tells of its tokens up to `end`: from which one on. None if it does not ask, or knows of all."""
        if self.told is None or self.told >= end:
            return None
        start, self.told = self.told, end
        return start

    def take_experts(self) -> TokenExperts | None:
        """What came since the client was told last."""
        came, self.experts = self.experts, []
        return came[0]._replace(ids=b"".join(each.ids for each in came)) if came else None

    @property
    def held(self) -> Running:
        """Row and lease of a request that runs."""
        assert self.running is not None
        return self.running

    @property
    def keeps_its_pages(self) -> bool:
        """It has been put back often enough: it gets pages for its longest output at once, and nobody takes them."""
        return self.num_retractions >= MAX_RETRACTIONS

    def tokens_at_entry(self, headroom: int) -> int:
        """Tokens that it gets pages for when it is given a row: all it has, and one round if it will decode.

        For all it may become, if it may not be put back again.
        """
        if self.export_from is not None:
            return self.num_ids
        return self.num_ids + headroom + (self.tokens_left if self.keeps_its_pages else 0)

    @property
    def tokens_left(self) -> int:
        """Tokens that max_tokens and the context still allow."""
        return self.max_output - len(self.output_ids)


def logprobs_of(batch: Sequence[Request]) -> tuple[int | None, ...]:
    """What each row of a plan asks for, () if none asks."""
    wanted = tuple(request.params.logprobs for request in batch)
    return () if all(each is None for each in wanted) else wanted


def rows_without_draft(batch: Iterable[Request]) -> tuple[Row, ...]:
    """Rows of running requests that are padding to the draft."""
    return tuple(each.held.row for each in batch if not each.held.lease.drafts)


def masks_of(batch: Iterable[Request]) -> tuple[RowMask, ...]:
    """Of requests that get a token in a plan, those that are constrained."""
    held = ((each.held.row, each.constrained) for each in batch if each.constrained is not None)
    return tuple(RowMask(row, constrained.mask(), constrained.forced) for row, constrained in held)


@lru_cache(maxsize=4096)
def owner_of(salt: str) -> int:
    """A number of 63 bits for a salt, 0 for none; the same in every process."""
    return int.from_bytes(sha256(salt.encode()).digest()[:8], "big") >> 1 if salt else 0
