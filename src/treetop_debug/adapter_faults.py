"""Faults of adapters beside a target's products, put back by name (`tests/engine/test_lora.py`). They change tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treetop.types.messages import RowSetup
from treetop.weights.adapted import Adapters
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch


def _left_in_its_row(real: Callable[..., RowSetup]) -> Callable[..., RowSetup]:
    """A request without an adapter moves in and leaves the row's number as the one before it had it."""
    last = dict[int, int]()

    def setup(*args: Any) -> RowSetup:
        made = real(*args)
        last[made.row] = made.adapter or last.get(made.row, 0)
        return replace(made, adapter=last[made.row])

    return setup


def _salt_of_the_request_alone(real: property) -> property:
    return property(lambda self: self.cache_salt)


def _rows_of_the_batch_before(real: Callable[..., None]) -> Callable[..., None]:
    """Products go by what was selected for the first batch."""
    begun = set[int]()

    def select(self: Adapters, slots: Any, *more: Any) -> None:
        if id(self) not in begun and bool(slots.any()):
            begun.add(id(self))
            real(self, slots, *more)

    return select


ADAPTER_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "adapter-left-in-row",
            "a row keeps the adapter of the request that had it before",
            (Patch("treetop.scheduler.request:Request.setup", _left_in_its_row),),
            "oracle",
            None,
        ),
        Fault(
            "adapter-shared-pages",
            "the prefix cache gives a request pages that another adapter computed",
            (Patch("treetop.types.requests:Whose.salt", _salt_of_the_request_alone),),
            "oracle",
            None,
        ),
        Fault(
            "adapter-stale-batch",
            "a step's rows are given the adapters of an earlier step's",
            (Patch("treetop.weights.adapted:Adapters.select", _rows_of_the_batch_before),),
            "oracle",
            None,
        ),
    )
}
