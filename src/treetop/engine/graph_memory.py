"""What capturing rounds took of the memory that was set aside for it, and whether what is left serves.

Rounds that are captured later, such as sampled ones, take what the others took after the first, which made the pool
that all share. Beside them the worst step must still find its activations.
"""

import math
from dataclasses import dataclass

from treetop.engine.memory import BYTES_PER_GRAPH, SLACK, Budget, gib
from treetop.types.errors import CapacityError


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Bytes. captured: rounds at a start, rounds: the most there can be, three graphs of prompts alone counted as one.

    first: of the largest, with the shared pool.
    others: of all others at a start.
    free: of the device afterwards.
    """

    captured: int
    rounds: int
    first: int
    others: int
    free: int

    @property
    def set_aside(self) -> int:
        """What was counted on for all rounds."""
        return self.rounds * BYTES_PER_GRAPH

    @property
    def taken(self) -> int:
        """By what is captured."""
        return self.first + self.others

    @property
    def to_come(self) -> int:
        """What the others will take, as far as those at a start tell."""
        each = self.others / (self.captured - 1) if self.captured > 1 else BYTES_PER_GRAPH
        return math.ceil(each * (self.rounds - self.captured))

    def __str__(self) -> str:
        return (
            f"{self.captured} of at most {self.rounds} rounds took {gib(self.taken)}, all will take about"
            f" {gib(self.taken + self.to_come)}, {gib(self.set_aside)} were set aside"
        )

    def missing(self, budget: Budget) -> int:
        """Bytes that the worst step and later graphs will lack; 0 or less if they fit."""
        activations = max(budget.allowance - self.set_aside - SLACK, 0)
        return activations + self.to_come - self.free

    def check(self, budget: Budget) -> None:
        """Raises CapacityError with the numbers and the options to change if what is left does not serve."""
        missing = self.missing(budget)
        if missing <= 0:
            return
        fraction = math.floor(100 * (budget.fraction - missing / budget.memory.total)) / 100
        lower = (
            f"lower --mem-fraction-static to {fraction:g} or less" if fraction > 0 else "lower --max-running-requests"
        )
        raise CapacityError(
            f"captured graphs: {self}; activations and later graphs need {gib(missing + self.free)}, have"
            f" {gib(self.free)} free: {gib(missing)} too little; {lower}, set a lower --max-total-tokens, or use"
            " --graphs off"
        )
