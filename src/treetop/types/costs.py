"""What rounds cost: seconds by rows, shape and context, as an engine measures them at its start."""

from dataclasses import dataclass

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
    """A draft extend of all that rows may have deferred, by their number."""

    rows: int
    seconds: float


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

    def catch_up_seconds(self, rows: int) -> float:
        """0 where nothing may be deferred."""
        return _on_line(sorted((each.rows, each.seconds) for each in self.catch_ups), rows) if self.catch_ups else 0.0

    def _of(self, shape: SpecShape) -> list[RoundCost]:
        return [each for each in self.rounds if each.shape == shape]

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """Those that were measured, plain rounds first."""
        return tuple(dict.fromkeys([PLAIN, *(each.shape for each in self.rounds)]))


def _on_line(known: list[tuple[int, float]], rows: int) -> float:
    """Between two measured numbers of rows on the line through them; past the largest in proportion."""
    if rows >= known[-1][0]:
        return known[-1][1] * rows / known[-1][0]
    after = next(index for index, (at, _) in enumerate(known) if at >= rows)
    if known[after][0] == rows or not after:
        return known[after][1]
    (low, cheap), (high, dear) = known[after - 1], known[after]
    return cheap + (dear - cheap) * (rows - low) / (high - low)
