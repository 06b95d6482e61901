"""The buggy twins of the faults of several ranks."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from treetop.engine.engine import Engine
from treetop.parallel.exchange import ExchangeRank
from treetop.types.messages import StepPlan
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
