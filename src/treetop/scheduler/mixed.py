"""When a prefill step and a round share a forward of the target: a mixed step reads the weights once for both.

What that saves is one reading of the weights, less what the round's nodes compute anyway. So plain rounds, chains and
small trees gain, large trees nothing (`benchmarks/log.md`). Nothing here has a clock.

Where rounds are captured a step's chunks are packed into a batch of one of a few sizes (`Layout.prompt_sizes`), which
is in the round's graph. Others are launched one by one, which takes the host longer than it takes a GPU.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from treetop.scheduler.budget import CostCurve, PrefillBudget
from treetop.types.config import MixedChunk
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import MixedPlan, PrefillPlan, RoundPlan, StepPlan

FEW_NODES = 128
"""Nodes of all rows beside which a chunk is taken under `auto`, at most. In the scheduler's simulation chains of 128
nodes gain 9 % of tokens/s, of 256 nothing, and trees of 128 nodes nothing (an 8B model, `benchmarks/log.md`). Of
captured ones measured costs decide up to `MAX_NODES_BESIDE_PROMPTS`."""

_GAIN, _GAIN_CAPTURED = 0.9, 1.0
"""Of the time of both apart, what a mixed step may take under `auto`: prompts that end in it decode a round later, and
that costs some of what is gained. Launched one by one on an H200 it took as long (`benchmarks/log.md`). A captured one
makes the gaps of streams several times shorter, so that as long is good enough."""

_TRIED = 8
"""Mixed steps of a size after which their measured times are believed: the first may compile or capture."""

_STEPS = 4
"""In which what waits should end, about: in fewer, larger ones first tokens come sooner, in more of them more rounds
cost next to nothing."""

_FEW, _TOKENS_OF_A_ROW = 512, 12
"""Prompt tokens of a captured step at most: so many, or so many for each row that decodes or waits to. Where clients
send 1,024 and get 128 rows are full with 8; far more leave rounds without any (`benchmarks/simulated_load.py`)."""


class MixedSteps:
    """Says whether the next prefill step takes a round along.

    budget: of prefill steps. apart, together: seconds of these, and of mixed ones by the rows and the size of captured
    ones, (0, 0) for others; by the work of their chunks.
    """

    def __init__(self, layout: Layout, mode: MixedChunk, budget: PrefillBudget) -> None:
        self._layout, self._mode, self.budget = layout, mode, budget
        self.apart, self.together = CostCurve(), defaultdict[tuple[int, int], CostCurve](CostCurve)
        self._num_tried = Counter[tuple[int, int]]()

    def wanted(self, rows: int, shape: SpecShape) -> bool:
        """Whether a round of so many rows, of this shape, is to have prompts beside it, if there are any."""
        if self._mode == "off" or not rows:
            return False
        if self._mode == "on":
            return True
        bucket, sizes = self._layout.bucket_for(rows), self._layout.prompt_sizes
        if not sizes:
            return shape.nodes_at(bucket) <= FEW_NODES and self._pays(bucket, 0)
        return self._is_captured(rows, shape) and any(self._pays(bucket, size) for size in sizes)

    def size(self, round: RoundPlan, waiting: int, work: Callable[[int], int]) -> int:
        """Of the batch that chunks beside a round are packed into; 0 where they are launched one by one.

        The smallest in which what waits ends in a few steps. waiting: requests of this. work: its tokens, up to as many
        as it is given.
        """
        sizes = self._layout.prompt_sizes
        if not sizes or round.masks or round.choice.processes:
            return 0
        rows = len(round.rows)
        if round.shape not in self._layout.shapes_at(self._layout.coarse_bucket_for(rows)):
            return 0  # it was chosen for fewer rows than the batch is widened to
        if self._mode == "auto" and not self._is_captured(rows, round.shape):
            return 0
        bucket = self._layout.bucket_for(rows)
        if self._mode == "auto":
            sizes = tuple(size for size in sizes if self._pays(bucket, size)) or sizes
        most = min(self.budget.most_packed(rows), max(_TOKENS_OF_A_ROW * (rows + waiting), _FEW))
        sizes = tuple(size for size in sizes if size <= most) or sizes[:1]
        need = work(_STEPS * sizes[-1])
        return next((size for size in sizes if _STEPS * size >= need), sizes[-1])

    def _is_captured(self, rows: int, shape: SpecShape) -> bool:
        """Whether a round of this shape has few enough nodes to be captured at start with packed chunks beside it."""
        return self._layout.few_nodes_beside_prompts(shape, self._layout.coarse_bucket_for(rows))

    def _pays(self, bucket: int, size: int) -> bool:
        """Whether a mixed step is, or may be, shorter than its chunks and its round apart. size: 0 for one that is not
        captured.

        Of captured ones a step apart holds more, so that they pay for their share of one.
        """
        work = size or self.budget.tokens(bucket, 0, mixed=True)
        whole = self.budget.tokens(bucket, 0) if size else work
        kind = self._kind(bucket, size)
        apart_s, together_s = self.apart.seconds(whole) * work / whole, self.together[kind].seconds(work)
        if not apart_s or self._num_tried[kind] < _TRIED:
            return True
        gain = _GAIN_CAPTURED if size else _GAIN
        return together_s <= gain * (apart_s + self.budget.rounds.seconds(bucket))

    def _kind(self, bucket: int, size: int) -> tuple[int, int]:
        return (self._layout.coarse_bucket_for(bucket), size) if size else (0, 0)

    def note(self, plan: StepPlan, seconds: float, late_s: float = 0.0) -> None:
        """A step took so long, as the host saw it. late_s: of `PrefillBudget`, before it has noted the step."""
        if self._mode != "auto":
            return
        if isinstance(plan, PrefillPlan):
            self.apart.note(self.budget.work_of(plan), seconds + late_s)
        elif isinstance(plan, MixedPlan):
            kind = self._kind(self._layout.bucket_for(len(plan.round.rows)), plan.prefill.packed)
            self._num_tried[kind] += 1
            self.together[kind].note(self.budget.work_of(plan.prefill), seconds + late_s)
