"""Faults of the router of replicas, put back by name."""

from typing import Any

from treetop_debug.faults import Fault
from treetop_debug.patching import instead


def keeps_the_dead(router: Any, alive: Any) -> None:
    """What a replica that has died held is still known, and so is the replica."""


ROUTER_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "dead-replica",
            "the router sends to a replica that is dead, for it held the prompt",
            (instead("treetop.distributed.router:PrefixRouter._forget_dead", keeps_the_dead),),
            "which is not one of the",
            None,
        ),
    )
}
