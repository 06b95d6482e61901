"""Faults of several ranks, put back by name. They hold in one process: for groups of `ranks_on_threads`."""

from treetop_debug import rank_twins as twins
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead

_BROADCAST = "treetop.distributed.tp_executor:_Workers.broadcast"

RANK_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "own-rank-order",
            "each rank adds its own share first, so that sums are rounded otherwise on every rank",
            (instead("treetop.parallel.exchange:ExchangeRank.sum", twins.own_first),),
            "(trees, paths or tokens differ)",
            1,
            {"tp_size": 4, "dtype": "float32"},
        ),
        Fault(
            "another-bucket",
            "a rank launches another graph than the first: both wait for ever for what never comes",
            (Patch("treetop.engine.engine:Engine.bucket_of", twins.own_bucket),),
            "this rank would launch",
            None,
        ),
        Fault(
            "plan-twice",
            "a rank gets a plan twice, and stands one step behind from then on",
            (Patch(_BROADCAST, twins.twice),),
            "expected: one was lost or sent twice",
            None,
        ),
        Fault(
            "plan-lost",
            "a rank does not get a plan, and the others wait for it",
            (Patch(_BROADCAST, twins.never),),
            "did not answer in",
            None,
        ),
        Fault(
            "death-inside-exchange",
            "a rank dies while the others wait for it in the middle of a step",
            (Patch("treetop.parallel.exchange:ExchangeRank.gather", twins.dies_inside),),
            "rank 1 has ended",
            None,
        ),
    )
}
