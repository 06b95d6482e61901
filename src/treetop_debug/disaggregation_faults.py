"""Faults of KV transfer, put back by name. Checksums catch each: what was imported is not what was packed."""

from typing import Any

from treetop.disaggregation.decode import RecvSlot
from treetop.disaggregation.prefill import SendSlot
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead


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


DISAGGREGATION_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
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
}
