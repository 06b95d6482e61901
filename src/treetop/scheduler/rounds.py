"""Who takes part in a decode round, and who gives way if pages run short."""

from collections.abc import Sequence
from operator import attrgetter

from treetop.scheduler.drafting import Drafting
from treetop.scheduler.kv_transfer import KVTransfers
from treetop.scheduler.policy import ChooseShape
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request, logprobs_of, masks_of, rows_without_draft
from treetop.scheduler.rows import Rows
from treetop.scheduler.steps import StepsOut
from treetop.types.errors import InvariantError
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingMode, class_of, num_classes

_ORDER = attrgetter("order")


class RoundPlanner:
    """Plans rounds of all that may decode, each in one shape. num_retractions: since the start."""

    def __init__(
        self,
        layout: Layout,
        choose: ChooseShape,
        queues: Queues,
        rows: Rows,
        steps: StepsOut,
        kv_transfer: KVTransfers,
        lora_slots: int,
        *,
        drafting: Drafting,
    ) -> None:
        """lora_slots: adapters on the device at a time."""
        self._layout, self._choose, self._queues, self._rows, self._steps = layout, choose, queues, rows, steps
        self._kv_transfer, self._classes, self._drafting = kv_transfer, num_classes(lora_slots), drafting
        self._commit_width = layout.commit_width
        self._has_windows = any(group.window is not None for group in layout.groups)
        self.num_retractions = 0

    def ready(self) -> list[Request]:
        """Decoding requests that may need a round more than those that are out, of which each emits a token."""
        return [request for request in self._queues.decoding if _may_go_on(request)]

    def plan(self, ready: Sequence[Request]) -> RoundPlan | None:
        """A round of all that are ready; None if pages are short while a step is in flight: whom to retract is
        known after its commit.

        Also None if all of them have been retracted for requests that keep their pages.
        """
        for request in ready:
            if not self._reserve(request):
                return None
        batch = [request for request in ready if request.running is not None]  # the others have been retracted
        if not batch:
            return None
        speculating = [0] * self._classes
        for request in batch:
            speculating[class_of(request.params.temperature, request.adapter.slot)] += request.params.speculative
        deferred = max(request.held.deferred for request in batch)
        drafting = sum(request.held.lease.drafts and request.params.speculative for request in batch)
        shape = self._choose([request.num_computed_tokens for request in batch], speculating, deferred, drafting)
        batch = self._drafting.settled(batch, shape)
        return RoundPlan(
            edits=self._rows.take_edits(),
            freed=self._rows.kv_cache.take_freed(),
            rows=tuple(request.held.row for request in batch),
            shape=shape,
            committed_bound=max(self._committed_bound(request) for request in batch),
            choice=SamplingMode.costliest(request.choice for request in batch),
            logprobs=logprobs_of(batch),
            masks=masks_of(batch),
            catches_up=self._catches_up(batch, shape),
            no_draft=rows_without_draft(batch),
            told_trees=tuple(request.held.row for request in batch if request.params.tells_trees),
            told_experts=tuple(request.held.row for request in batch if request.told is not None),
        )

    def _catches_up(self, batch: Sequence[Request], shape: SpecShape) -> bool:
        """Whether a round of this shape has to begin with what its rows have deferred, and what they defer after it."""
        defers, held = self._layout.defers(shape), [request.held for request in batch if request.held.lease.drafts]
        most = max((each.deferred for each in held), default=0)
        catches_up = most == self._layout.max_deferred if defers else most > 0
        for each in held:
            each.deferred = defers + (0 if catches_up else each.deferred)
        return catches_up

    def _committed_bound(self, request: Request) -> int:
        """Tokens that the device may have committed once all that is out has run; `num_computed_tokens` are known."""
        return request.num_computed_tokens + request.held.rounds_out * self._commit_width

    def _reserve(self, request: Request) -> bool:
        """Pages for one more round of a request; the last in order is retracted for them, which may be it itself.

        A request that this loop has retracted already, for an older one, is skipped: True.
        False if pages are short while something is out: whom to retract, and at which length, shows when it is
        committed; or while copies hold pages of their own.
        """
        held = request.running
        if held is None:
            return True
        need = request.num_computed_tokens + (held.rounds_out + 1) * self._commit_width
        if need <= held.reserved and not self._has_windows:
            return True
        self._rows.slide(request, self._steps.num_known(request))
        while not self._rows.reserve(request, need):
            if self._steps.has_rows:
                return False
            loose = [each for queue in self._queues.running for each in queue if not each.keeps_its_pages]
            if not loose or len(self._rows.by_row) == 1:
                if self._rows.host is not None and self._rows.host.leases:
                    return False  # the copies' pages come free with a step that is out
                raise InvariantError("the pools do not hold one request at the context wall")
            victim = max(loose, key=_ORDER)
            self._retract(victim)
            if victim is request:
                return True
        held.reserved = max(held.reserved, self._layout.pages_for(need) * self._layout.page_size)
        return True

    def put_back(self, request: Request) -> None:
        """Back to the queue; it resumes by a prefill of its prompt and output (sgl-28254)."""
        assert not self._steps.has_rows, "its length is not known"
        if not self._kv_transfer.retract(request):
            self._rows.leave(request, request.ids[: request.num_complete])
            self._queues.put_back(request)
            request.num_computed_tokens, request.asked_host = 0, False

    def _retract(self, request: Request) -> None:
        """Back to the queue, for want of pages."""
        self.put_back(request)
        request.num_retractions += 1
        self.num_retractions += 1


def _may_go_on(request: Request) -> bool:
    held = request.held
    if request.asks or (request.constrained is not None and held.steps_out):
        return False  # what may come next depends on the token that is on its way
    first = request.num_computed_tokens == request.num_ids  # its first token is out too
    return held.rounds_out + first < request.tokens_left
