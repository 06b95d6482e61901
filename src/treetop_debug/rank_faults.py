"""Faults of several processes, put back by name: ranks, engines that go on with requests, the router of replicas.

Those of ranks hold in one process: for groups of `ranks_on_threads` and `expert_ranks_on_threads`.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from treetop.distributed.journal import resumed
from treetop.distributed.lockstep import Lockstep, StepProposal
from treetop.distributed.lockstep import without_rows as real_without_rows
from treetop.engine.engine import Engine
from treetop.parallel.exchange import ExchangeRank
from treetop.types.layout import SpecShape
from treetop.types.messages import StepPlan
from treetop.types.requests import EngineRequest
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead
from treetop_debug.ranks import RankDied


def own_first(rank: ExchangeRank, parts: Tensor) -> Tensor:
    """Each rank adds its own share first, then what has come from the others."""
    shares = rank.gather(parts.sum(dim=0))
    return torch.cat([shares[rank.rank :], shares[: rank.rank]])


def own_bucket(real: Callable[[Engine, StepPlan], int]) -> Callable[[Engine, StepPlan], int]:
    """The ranks after the first take the bucket of one row more."""

    def bucket_of(engine: Engine, plan: StepPlan) -> int:
        rows = min(len(plan.rows) + 1, engine.layout.max_requests)
        return real(engine, plan) if engine.parallel.rank == 0 else engine.layout.bucket_for(rows)

    return bucket_of


def _at_step(step: int, act: Callable[[Any, bytes], None]) -> Callable[[Any], Any]:
    """What rank 0 tells the others is told as `act` does at one step."""

    def make(real: Any) -> Any:
        steps = count()

        def broadcast(ranks: Any, message: bytes) -> None:
            if next(steps) == step:
                act(lambda: real(ranks, message), message)
            else:
                real(ranks, message)

        return broadcast

    return make


_FAULTY_STEP = 5


def _twice(broadcast: Any, _: bytes) -> None:
    broadcast()
    broadcast()


def _never(_: Any, __: bytes) -> None:
    """It is lost."""


twice, never = _at_step(_FAULTY_STEP, _twice), _at_step(_FAULTY_STEP, _never)


def dies_inside(real: Any) -> Any:
    """The second rank is gone when it comes to the exchanges of a step in the middle."""
    exchanges = count()

    def gather(rank: ExchangeRank, piece: Tensor) -> Tensor:
        if rank.rank == 1 and next(exchanges) == _EXCHANGES:
            raise RankDied
        result: Tensor = real(rank, piece)
        return result

    return gather


_EXCHANGES = 400


_BROADCAST = "treetop.distributed.tp_executor:_Workers.broadcast"

RANK_FAULTS = by_name(
    Fault(
        "own-rank-order",
        "each rank adds its own share first, so that sums are rounded otherwise on every rank",
        (instead("treetop.parallel.exchange:ExchangeRank.sum", own_first),),
        "(trees, paths or tokens differ)",
        1,
        {"tp_size": 4, "dtype": "float32", "exactness": "ties"},
    ),
    Fault(
        "another-bucket",
        "a rank launches another graph than the first: both wait for ever for what never comes",
        (Patch("treetop.engine.engine:Engine.bucket_of", own_bucket),),
        "this rank would launch",
        None,
    ),
    Fault(
        "plan-twice",
        "a rank gets a plan twice, and stands one step behind from then on",
        (Patch(_BROADCAST, twice),),
        "expected: one was lost or sent twice",
        None,
    ),
    Fault(
        "plan-lost",
        "a rank does not get a plan, and the others wait for it",
        (Patch(_BROADCAST, never),),
        "did not answer in",
        None,
    ),
    Fault(
        "death-inside-exchange",
        "a rank dies while the others wait for it in the middle of a step",
        (Patch("treetop.parallel.exchange:ExchangeRank.gather", dies_inside),),
        "rank 1 has ended",
        None,
    ),
)


_SKIPPED_STEP = 3


def _skips(real: Callable[[Lockstep[Any]], None]) -> Callable[[Lockstep[Any]], None]:
    """One of a group's steps is agreed on, and then not launched."""
    steps = count()

    def execute_dummy_batch(lockstep: Lockstep[Any]) -> None:
        if next(steps) == _SKIPPED_STEP:
            lockstep._agree(StepProposal())
        else:
            real(lockstep)

    return execute_dummy_batch


def _smallest(step: StepProposal, shapes: Sequence[SpecShape]) -> StepPlan:
    """Nobody's rows in the smallest batch there is, as if no other rank had more."""
    return real_without_rows(StepProposal(min(step.rows, 1), 0, min(step.tokens, 1)), shapes)


LOCKSTEP_FAULTS = by_name(
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


def one_token_short(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine does not know of the last token that the client has."""
    return _real(request, received[:-1], timeout_s)


def none_received(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine begins anew."""
    return _real(request, (), timeout_s)


def one_token_more(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine is told of a token that never reached the client."""
    return _real(request, (*received, *received[-1:]), timeout_s)


_real = resumed
_RESUMED = "treetop.distributed.journal:resumed"
_GUARD = "its client has"

RESUME_FAULTS = by_name(
    Fault(
        "repeated-token",
        "a resumed stream repeats the token that came last",
        (instead(_RESUMED, one_token_short),),
        _GUARD,
        None,
    ),
    Fault("begun-anew", "a resumed stream begins again", (instead(_RESUMED, none_received),), _GUARD, None),
    Fault("lost-token", "a resumed stream leaves a token out", (instead(_RESUMED, one_token_more),), _GUARD, None),
)


def keeps_the_dead(router: Any, alive: Any) -> None:
    """What a replica that has died held is still known, and so is the replica."""


ROUTER_FAULTS = by_name(
    Fault(
        "dead-replica",
        "the router sends to a replica that is dead, for it held the prompt",
        (instead("treetop.distributed.router:PrefixRouter._forget_dead", keeps_the_dead),),
        "which is not one of the",
        None,
    ),
)
