"""What a policy starts from: what rounds cost, by rows, shape and context, and what is thought of a head."""

from dataclasses import dataclass, field

from treetop.types.layout import PLAIN, SpecShape


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Rounds of a shape and a bucket of rows.

    seconds: of one whose rows have next to no context.
    seconds_per_token: more, for each token that each row has.
    """

    rows: int
    shape: SpecShape
    seconds: float
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class CatchUpCost:
    """A draft extend of what rows have deferred, by their number.

    seconds: of a token of each row. seconds_per_token: more, for each further one that each has; 0 where all columns
        are computed, whatever is deferred.
    """

    rows: int
    seconds: float
    seconds_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Each shape at some buckets of rows; between them costs lie on lines.

    made_for: machine, model and options, as `engine.startup.round_costs` tells them apart.
    """

    made_for: str
    rounds: tuple[RoundCost, ...]
    catch_ups: tuple[CatchUpCost, ...] = ()

    def seconds(self, rows: int, shape: SpecShape, tokens: float) -> float:
        """A round of `rows` rows with so many tokens each."""
        known = sorted((each.rows, each.seconds + each.seconds_per_token * tokens) for each in self._of(shape))
        return _on_line(known, rows)

    def catch_up_seconds(self, rows: int, tokens: int) -> float:
        """Of `rows` rows, one of which has deferred so many tokens, and none more. 0 where nothing may be deferred."""
        further = max(tokens - 1, 0)
        known = sorted((each.rows, each.seconds + each.seconds_per_token * further) for each in self.catch_ups)
        return _on_line(known, rows) if known else 0.0

    def _of(self, shape: SpecShape) -> list[RoundCost]:
        return [each for each in self.rounds if each.shape == shape]

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """Those that were measured, plain rounds first."""
        return tuple(dict.fromkeys([PLAIN, *(each.shape for each in self.rounds)]))


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """How often a head's proposals are thought to be the target's choice, before any was counted.

    best: of the first proposal at depth 1, 2, ...; the last holds for all that are deeper.
    share: what each further proposal takes of the chance that those before it leave.
    source: who says so, in words.
    """

    best: tuple[float, ...] = (0.76, 0.74, 0.72)
    share: float = 0.45
    source: str = field(default="of a head that nobody knows", compare=False)

    def at(self, depth: int) -> float:
        return self.best[min(depth, len(self.best) - 1)]

    def table(self, depths: int, ranks: int) -> list[list[float]]:
        """By depth and rank."""
        left = [self.share * (1.0 - self.share) ** rank for rank in range(ranks - 1)]
        return [[self.at(depth), *((1.0 - self.at(depth)) * part for part in left)] for depth in range(depths)]


def _on_line(known: list[tuple[int, float]], rows: int) -> float:
    """Between two measured numbers of rows on the line through them; past the largest in proportion."""
    if rows >= known[-1][0]:
        return known[-1][1] * rows / known[-1][0]
    after = next(index for index, (at, _) in enumerate(known) if at >= rows)
    if known[after][0] == rows or not after:
        return known[after][1]
    (low, cheap), (high, dear) = known[after - 1], known[after]
    return cheap + (dear - cheap) * (rows - low) / (high - low)
