"""Faults of several ranks, put back by name. They hold in one process: for groups of `ranks_on_threads`."""

from treetop.debug import rank_twins as twins
from treetop.debug.faults import Fault
from treetop.debug.patching import Patch, instead

_TELL = "treetop.distributed.tp_executor:_Workers.tell"

RANK_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "own-rank-order",
            "each rank adds its own share first, so that sums are rounded otherwise on every rank",
            (instead("treetop.parallel.exchange:ExchangeRank.sum", twins.own_first),),
            "came to other trees, paths or tokens",
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
            (Patch(_TELL, twins.twice),),
            "came where plan",
            None,
        ),
        Fault(
            "plan-lost",
            "a rank does not get a plan, and the others wait for it",
            (Patch(_TELL, twins.never),),
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
