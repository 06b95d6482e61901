"""Which rows have a draft: those whose requests want one, but where the policy only watches the head. Then none do but
few that have just come while a trial is due: without a draft a prompt and a round cost what they do in plain decoding.

    begins with one ---- its catch-up, or the head, does not pay --> goes on without
          ^                                                             |
          '---- put back, where it gains more than it computes again ---'

A row without one cannot catch up: nobody kept the target's states that the draft reads. So it is put back like one for
which pages were short, and finds in the prefix cache what the draft has of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from treetop.scheduler.policy import ShapePolicy, num_watched
from treetop.scheduler.queues import Queues
from treetop.scheduler.request import Request
from treetop.scheduler.rows import Rows
from treetop.types.layout import PLAIN, Layout, SpecShape

_SOON = 8
"""Tokens that one that has just come may defer, at most, until its trial: who has more is dearer to try."""


class Drafting:
    """Says who begins with a draft, who goes on without, and who is to be put back for one."""

    def __init__(self, layout: Layout, policy: Callable[[], ShapePolicy], queues: Queues, rows: Rows) -> None:
        self._layout, self._policy, self._queues, self._rows = layout, policy, queues, rows

    def begins(self, request: Request) -> bool:
        """Whether the draft reads a request's prompt. What is handed over is always whole: its record has proposals."""
        if request.remote or request.export_from is not None:
            return True
        policy, rows = self._policy(), self._rows.by_row.values()
        if not request.params.speculative:
            return False
        able = [each for each in rows if each.params.speculative]
        room = self._layout.max_requests - len(rows)
        coming = [each for each in islice(self._queues.waiting, room) if each.params.speculative]
        others = len(rows) - len(able) + min(len(self._queues.waiting), room) - len(coming)
        if policy.pays_to_read(len(able), sum(map(_drafts, able)), max(len(coming), 1), others):
            return True
        if not policy.watches or not policy.looks or request.constrained is not None:
            return False
        return sum(map(_drafts, rows)) < num_watched(len(rows) + 1)

    def wanted(self) -> tuple[Request, float] | None:
        """Who is to be put back for a draft, and what it costs; None for nobody, as while others wait or begin.

        It is the one that has most tokens left: few are put back one after another, and streams wait for each.
        """
        rows, queues = self._rows.by_row.values(), self._queues
        if queues.waiting or queues.prefilling or queues.loading:
            return None
        if self._policy().cost_of_draft(len(rows), 1, self._layout.max_context) is None or all(map(_drafts, rows)):
            return None
        able = [each for each in queues.decoding if each.params.speculative and not _drafts(each) and not each.asks]
        if not able:
            return None
        request = max(able, key=lambda each: each.tokens_left)
        kv_cache, salt = self._rows.kv_cache, request.cache_salt
        if request.tokens_at_entry(self._layout.headroom) > kv_cache.num_available:
            return None  # of the draft's pages it holds none
        cost_of = partial(self._policy().cost_of_draft, len(rows), left=request.tokens_left)
        if cost_of(1) is None:
            return None
        cost = cost_of(request.num_ids - kv_cache.num_known(request.reusable_ids, salt))
        return None if cost is None else (request, cost)

    def settled(self, batch: Sequence[Request], shape: SpecShape) -> list[Request]:
        """Who takes part in a round of this shape of those that are ready: all, those with a draft first, so that who
        catches up is a smaller batch; or these alone, where a tree is only to tell of the head and that costs less.

        Rows that have no room for more deferred tokens catch up if the policy pays for it; else all go on without a
        draft. So they do in plain rounds while the head is watched, but for the few of a trial that is due.
        """
        policy, defers = self._policy(), self._layout.defers(shape)
        drafting = [request for request in batch if _drafts(request)]
        kept = [request for request in drafting if request.params.speculative]
        due = defers and any(request.held.deferred == self._layout.max_deferred for request in kept)
        if due and not policy.pays_to_catch_up(len(batch), len(kept)):
            kept = []
        elif defers and policy.watches:
            few = [request for request in kept if request.constrained is None and request.held.deferred < _SOON]
            few.sort(key=lambda request: request.held.deferred)
            kept = few[: num_watched(len(batch))] if policy.looks else []
        if len(kept) < len(drafting):
            stay = {*kept}
            for request in drafting:
                if request not in stay:
                    self._rows.stop_drafting(request)
        if kept and policy.alone and shape != PLAIN:
            return kept
        return [*kept, *(request for request in batch if not _drafts(request))]


def _drafts(request: Request) -> bool:
    return request.held.lease.drafts
