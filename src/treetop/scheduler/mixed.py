"""When a prefill step and a round share a forward of the target: a mixed step reads the weights once for both.

What that saves is one reading of the weights, less what the round's nodes compute anyway. So plain rounds, chains and
small trees gain, large trees nothing (`docs/policy.md`). Nothing here has a clock.
"""

from treetop.scheduler.budget import CostCurve, PrefillBudget
from treetop.types.config import MixedChunk
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import MixedPlan, PrefillPlan, StepPlan

FEW_NODES = 128
"""Nodes of all rows beside which a chunk is taken under `auto`. In the scheduler's simulation chains of 128 nodes gain
9 % of tokens/s, of 256 nothing, and trees of 128 nodes nothing (an 8B model, `docs/policy.md`)."""


_GAIN = 0.9
"""Of the time of both apart, what a mixed step may take under `auto`: prompts that end in it decode a round later, and
that costs some of what is gained. Launched one by one on an H200 it took as long (`docs/policy.md`)."""

_TRIED = 8
"""Mixed steps after which their measured times are believed: the first may compile or capture."""


class MixedSteps:
    """Says whether the next prefill step takes a round along.

    budget: of prefill steps. apart, together: seconds of these and of mixed ones, by the work of their chunks.
    """

    def __init__(self, layout: Layout, mode: MixedChunk, budget: PrefillBudget) -> None:
        self._layout, self._mode, self.budget = layout, mode, budget
        self.apart, self.together, self._num_tried = CostCurve(), CostCurve(), 0

    def wanted(self, rows: int, shape: SpecShape) -> bool:
        """Whether a round of so many rows, of this shape, is to have prompts beside it, if there are any."""
        if self._mode == "off" or not rows:
            return False
        if self._mode == "on":
            return True
        bucket, work = self._layout.bucket_for(rows), self.budget.tokens(rows, 0, mixed=True)
        apart_s, together_s = self.apart.seconds(work), self.together.seconds(work)
        known = apart_s and self._num_tried >= _TRIED
        pays = not known or together_s <= _GAIN * (apart_s + self.budget.rounds.seconds(bucket))
        return pays and bucket * shape.num_draft_tokens <= FEW_NODES

    def note(self, plan: StepPlan, seconds: float, late_s: float = 0.0) -> None:
        """A step took so long, as the host saw it. late_s: of `PrefillBudget`, before it has noted the step."""
        if self._mode != "auto":
            return
        if isinstance(plan, PrefillPlan):
            self.apart.note(self.budget.work_of(plan), seconds + late_s)
        elif isinstance(plan, MixedPlan):
            self._num_tried += 1
            self.together.note(self.budget.work_of(plan.prefill), seconds + late_s)
