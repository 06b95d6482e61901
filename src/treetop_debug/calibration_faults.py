"""Faults of calibration, put back by name. They change which drafts are verified, and no token."""

from collections.abc import Callable
from dataclasses import replace

from treetop.kernels.calibration import Calibration
from treetop.kernels.grow import TreeBuilder
from treetop.kernels.learn import Observed
from treetop.types.tree import Accepted
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead, kernel_twin


def _of_the_target_alone(pair: str) -> str:
    return f"{pair.partition('-')[0]}.json"


def _choices_of_the_next_row(real: Callable[..., None]) -> Callable[..., None]:
    """A row's proposals beside what the target chose in another's tree, where nearly all are rejected."""

    def _add_up(calibration: Calibration, growth: TreeBuilder, accepted: Accepted, observed: Observed) -> None:
        real(calibration, growth, replace(accepted, choice=accepted.choice.roll(-1, 0)), observed)

    return _add_up


CALIBRATION_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "calibration-of-another-pair",
            "what is learned is kept by target, so another draft head begins with it",
            (instead("treetop.engine.kept_calibration:file_name", _of_the_target_alone),),
            "was learned of the pair",
            0,
        ),
        Fault(
            "calibration-of-another-row",
            "a row learns from the target's choices in the tree of the next row",
            (
                Patch("treetop.kernels.learn:_add_up", _choices_of_the_next_row),
                kernel_twin(
                    "treetop.kernels.learn:_add_up_kernel",
                    ("choice + item * choice_row", "choice + (item + 1) % tl.num_programs(0) * choice_row"),
                ),
            ),
            "calibration: what rows of a tree",
            1,
        ),
    )
}
