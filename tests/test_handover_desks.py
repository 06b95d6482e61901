"""The state machines of both sides, in thousands of schedules that go wrong (`handover_world.py`)."""

from collections import Counter

import pytest

from handover_world import LAYOUT, META, Odds, World
from treetop.debug.disaggregation_faults import DISAGGREGATION_FAULTS
from treetop.disaggregation.decode import DecodeMachine
from treetop.disaggregation.events import Connected, PrefillLocally, Pulled, Received
from treetop.disaggregation.layout import SlotRef
from treetop.disaggregation.options import Deadlines
from treetop.disaggregation.scheduling import Admitted, FirstToken, Prompt
from treetop.disaggregation.transport import PeerId
from treetop.disaggregation.wire import Offer
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.sampling import SamplingParams

CALM = Odds()
LOSSY = Odds(loss=0.1, twice=0.1, delay_s=0.3)
SLOW = Odds(delay_s=0.05, stall=0.1, broken=0.02)
CHAOS = Odds(loss=0.05, twice=0.1, delay_s=0.3, stall=0.1, broken=0.02, mishap_s=6.0)
FAULTY = Odds(loss=0.1, delay_s=0.3, stall=0.05, broken=0.02, mishap_s=3.0)
CRASHES = Odds(mishap_s=4.0, stall=0.05)


def _worlds(odds: Odds, seeds: range, requests: int = 8, **options: int | bool) -> Counter[str]:
    """Run schedules. Returns how requests ended, wrong imports, and pulls into a slot that was still written."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, odds, **options)  # type: ignore[arg-type]  # any options
        world.run(requests)
        ends.update(world.decode.done.values())
        ends["wrong"] += world.wrong
        ends["refused"] += world.refused
        ends["overlaps"] += world.overlaps
    return ends


def test_in_calm_every_request_that_is_not_aborted_is_handed_over() -> None:
    """But for the few that the prefill worker loses by itself."""
    ends = _worlds(CALM, range(40))
    assert ends["wrong"] == 0
    assert ends["locally"] < 0.15 * ends["imported"]


@pytest.mark.parametrize(("name", "odds"), [("lossy", LOSSY), ("slow", SLOW), ("chaos", CHAOS), ("crashes", CRASHES)])
def test_no_schedule_imports_a_wrong_byte_loses_a_slot_or_waits_for_ever(name: str, odds: Odds) -> None:
    """Without comparing a checksum: who owns what is enough. Both ways of ending happen."""
    ends = _worlds(odds, range(150))
    assert ends["wrong"] == ends["overlaps"] == 0, name
    assert ends["imported"] > 40
    assert ends["locally"] > 20


def test_the_same_with_one_slot_a_side_and_with_several_prefill_workers() -> None:
    assert _worlds(CHAOS, range(1000, 1100), slots=1)["wrong"] == 0
    assert _worlds(CHAOS, range(1100, 1200), num_prefill=3)["wrong"] == 0


@pytest.mark.parametrize("name", DISAGGREGATION_FAULTS)
def test_a_fault_does_harm_without_checksums_and_none_with_them(name: str) -> None:
    """The harm is real: bytes of another request are imported. With its guard each is refused before it counts."""
    with DISAGGREGATION_FAULTS[name].active():
        unguarded, guarded = (_worlds(FAULTY, range(150), requests=30, checks=checks) for checks in (False, True))
    assert unguarded["wrong"] > 0
    assert guarded["wrong"] == 0
    assert guarded["refused"] > 0


@pytest.mark.parametrize("second", [KVChunk(3, 2, 5), KVChunk(2, 1, 5), KVChunk(1, 4, 5)])
def test_a_token_that_is_offered_twice_ends_the_attempt_and_no_slot_is_lost(second: KVChunk) -> None:
    """As by a worker that computes the same attempt again, in other chunks. The first chunk is on its way then."""
    machine, peer, ref = DecodeMachine(3, 64, 4, LAYOUT, Deadlines()), PeerId(1), SlotRef(0, 0)

    def said(chunk: KVChunk, ref: SlotRef) -> Offer:
        return Offer(1, 1, ref, chunk, (0,) * len(LAYOUT.segments(chunk)), FirstToken(1) if chunk.last else None)

    machine.handle(Connected(peer, META), 0.0)
    for _ in range(4):  # the link is timed, twice each way
        machine.handle(Pulled(0, "done"), 0.0)
    machine.handle(Admitted(RequestId(1), 1, Prompt((1, 2, 3, 4, 5), SamplingParams(), 0)), 0.0)
    machine.handle(Received(peer, said(KVChunk(2, 2, 5), ref)), 0.1)
    effects = machine.handle(Received(peer, said(second, SlotRef(1, 0))), 0.1)
    assert any(isinstance(each, PrefillLocally) for each in effects)
    machine.handle(Pulled(0, "done"), 0.3)
    assert [slot.state for slot in machine.slots] == ["free"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("odds", [LOSSY, SLOW, CHAOS, CRASHES])
def test_many_more_schedules(odds: Odds) -> None:
    for slots in (1, 2, 5):
        assert _worlds(odds, range(10_000, 11_500), slots=slots, num_prefill=2)["wrong"] == 0
