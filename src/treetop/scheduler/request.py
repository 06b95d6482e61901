"""A request's life on the host."""

from dataclasses import dataclass, field

from treetop.cache.ledger import Lease
from treetop.types.ids import RequestId, Row
from treetop.types.sampling import FinishReason, SamplingParams
from treetop.types.stopping import StopChecker


@dataclass(frozen=True, slots=True)
class Running:
    """What a request holds while it runs."""

    row: Row
    lease: Lease


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the scheduler.

    prefilled: tokens whose K/V the pages hold, as far as the host knows; a chunk counts once it is planned, a round
    once its result is committed. A request decodes once all its ids are prefilled: the token after them, the root, is
    on its way then, and once it is here `prefilled == num_ids - 1`. accept_lens: accepted drafts of each round it took
    part in, before any cut. running: None while it waits; an ended request keeps it until no step with its row is out.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop: StopChecker
    output_ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    accept_lens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    running: Running | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.output_ids)

    @property
    def num_ids(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step added to one request. new_ids: emitted now, cut at the stop. error: why it failed, if it did."""

    request_id: RequestId
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None = None
