"""Faults of the record that a row transfers, put back by name. They need two engines (`test_handover.py`)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from treetop_debug.faults import Fault
from treetop_debug.patching import Patch


def _tokens_from_hidden(real: Callable[..., Any]) -> Callable[..., Any]:
    """The bits of the hidden state, as many as there are, where the proposed tokens belong."""

    def parts_of(fields: Any, record: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = real(fields, record)
        if "hidden" in found:
            tokens, hidden = (found[name].view(-1).view(record.dtype) for name in ("tokens", "hidden"))
            count = min(len(tokens), len(hidden))
            tokens[:count] = hidden[:count]
        return found

    return parts_of


RECORD_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "record-field-copied",
            "a field of an imported record is copied from another (sglang's disaggregation, at 000eaff)",
            (Patch("treetop.engine.row_record:parts_of", _tokens_from_hidden),),
            "imported record: row",
            1,
        ),
    )
}
