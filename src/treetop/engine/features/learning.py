"""Calibration as it is learned: after each round with a tree, from what the target chose in it."""

from dataclasses import dataclass

from treetop.engine.features.feature import AcceptedRound, RowFeature
from treetop.engine.features.sampling import RowNumbers
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.learn import Observed


@dataclass(frozen=True, slots=True)
class Learning(RowFeature):
    """In the list where rounds teach. calibration: of the pair; it is no row's. makes_logits: of the drafter's spec."""

    calibration: Calibration
    numbers: RowNumbers
    makes_logits: bool

    def accepted(self, ops: Ops, of: AcceptedRound) -> None:
        if of.growth is not None:
            constrained = self.numbers["constrained"] if of.choice.processes else None
            observed = Observed(of.draft_rows, of.paths.dummy_row, constrained, self.makes_logits)
            ops.learn(self.calibration, of.growth, of.accepted, observed)
