"""Faults of ranks that share experts, put back by name: for groups of `expert_ranks_on_threads`, in one process."""

from collections.abc import Callable
from itertools import count
from typing import Any

from treetop.distributed.lockstep import Lockstep, StepProposal
from treetop.distributed.lockstep import without_rows as real_without_rows
from treetop.types.layout import SpecShape
from treetop.types.messages import StepPlan
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead

_FAULTY_STEP = 3


def _skips(real: Callable[[Lockstep[Any]], None]) -> Callable[[Lockstep[Any]], None]:
    """One of a group's steps is agreed on, and then not launched."""
    steps = count()

    def execute_dummy_batch(lockstep: Lockstep[Any]) -> None:
        if next(steps) == _FAULTY_STEP:
            lockstep._agree(StepProposal())
        else:
            real(lockstep)

    return execute_dummy_batch


def _smallest(step: StepProposal, shape: SpecShape) -> StepPlan:
    """Nobody's rows in the smallest batch there is, as if no other rank had more."""
    return real_without_rows(StepProposal(min(step.rows, 1), 0, min(step.tokens, 1)), shape)


LOCKSTEP_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "idle-rank-skips",
            "a rank without requests leaves a step out, and the others wait for its experts",
            (Patch("treetop.distributed.lockstep:Lockstep.execute_dummy_batch", _skips),),
            "a rank did not answer in",
            None,
        ),
        Fault(
            "idle-rank-another-graph",
            "a rank without requests runs a smaller batch than the others, whose exchanges then do not match",
            (instead("treetop.distributed.lockstep:without_rows", _smallest),),
            "this rank would launch",
            None,
        ),
    )
}
