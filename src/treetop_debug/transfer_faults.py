"""Faults of K/V and rows between workers, put back by name.

Those of a record need two engines (`test_handover.py`). Checksums catch the others: what was imported is not what was
packed.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from treetop.disaggregation.decode import RecvSlot
from treetop.disaggregation.prefill import SendSlot
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead


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


RECORD_FAULTS = by_name(
    Fault(
        "record-field-copied",
        "a field of an imported record is copied from another (sglang's disaggregation, at 000eaff)",
        (Patch("treetop.engine.row_record:parts_of", _tokens_from_hidden),),
        "imported record: row",
        1,
    ),
)


def _whatever_its_generation(slot: SendSlot, *_: object) -> bool:
    """Also if it was used again since it was offered."""
    return slot.state == "offered"


def _at_once(_: RecvSlot) -> str:
    """Also while a transfer still writes it."""
    return "free"


def _half_is_whole(real: Any) -> Any:
    def pulled(machine: Any, slot: int, state: str, now: float) -> None:
        real(machine, slot, "done" if state == "failed" else state, now)

    return pulled


DISAGGREGATION_FAULTS = by_name(
    Fault(
        "slot-without-generation",
        "a release is confirmed for a slot that has been used again since it was offered (vllm-52234)",
        (instead("treetop.disaggregation.prefill:still_offered", _whatever_its_generation),),
        "checksum",
        None,
    ),
    Fault(
        "landing-slot-freed",
        "a landing slot is used again while a transfer that was given up still writes it (nixl-2067)",
        (instead("treetop.disaggregation.decode:after_giving_up", _at_once),),
        "checksum",
        None,
    ),
    Fault(
        "half-a-transfer",
        "a transfer that broke off half way counts as whole",
        (Patch("treetop.disaggregation.decode:DecodeMachine._pulled", _half_is_whole),),
        "checksum",
        None,
    ),
)
