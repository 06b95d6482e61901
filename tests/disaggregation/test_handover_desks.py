"""The state machines of both sides, in thousands of schedules that go wrong (`handover_world.py`)."""

from collections import Counter

import pytest
from msgspec.structs import replace

from support.examples import EVERYTHING
from support.handover_world import LAYOUT, META, Odds, World
from treetop.disaggregation.decode import DecodeMachine
from treetop.disaggregation.events import Connected, Disconnect, Effect, PrefillLocally, Pull, Pulled, Received
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import SlotRef
from treetop.types.kv_transfer.options import Deadlines
from treetop.types.kv_transfer.scheduling import Admitted, FirstToken, Prompt
from treetop.types.kv_transfer.transport import PeerId, State, Way
from treetop.types.kv_transfer.wire import Offer
from treetop.types.sampling import SamplingParams
from treetop_debug.transfer_faults import DISAGGREGATION_FAULTS

CALM = Odds()
LOSSY = Odds(loss=0.1, twice=0.1, delay_s=0.3)
SLOW = Odds(delay_s=0.05, stall=0.1, broken=0.02)
CHAOS = Odds(loss=0.05, twice=0.1, delay_s=0.3, stall=0.1, broken=0.02, mishap_s=6.0)
FAULTY = Odds(loss=0.1, delay_s=0.3, stall=0.05, broken=0.02, mishap_s=3.0)
CRASHES = Odds(mishap_s=4.0, stall=0.05)

SEEDS = range(150 if EVERYTHING else 80)
"""Of schedules."""


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
    ends = _worlds(odds, SEEDS)
    assert ends["wrong"] == ends["overlaps"] == 0, name
    assert ends["imported"] > 40
    assert ends["locally"] > 20


@pytest.mark.slow
def test_the_same_with_one_slot_a_side_and_with_several_prefill_workers() -> None:
    assert _worlds(CHAOS, range(1000, 1100), slots=1)["wrong"] == 0
    assert _worlds(CHAOS, range(1100, 1200), num_prefill=3)["wrong"] == 0


@pytest.mark.parametrize("name", DISAGGREGATION_FAULTS)
def test_a_fault_does_harm_without_checksums_and_none_with_them(name: str) -> None:
    """The harm is real: bytes of another request are imported. With its guard each is refused before it counts."""
    with DISAGGREGATION_FAULTS[name].active():
        unguarded, guarded = (_worlds(FAULTY, SEEDS, requests=30, checks=checks) for checks in (False, True))
    assert unguarded["wrong"] > 0
    assert guarded["wrong"] == 0
    assert guarded["refused"] > 0


PEER, PROMPT = PeerId(1), Prompt((1, 2, 3, 4, 5), SamplingParams(), 0)


def _decoding(read_s: float = 0.0, write_s: float = 0.0, state: State = "done") -> tuple[DecodeMachine, list[Effect]]:
    """A decode worker's machine that has met a prefill worker, and what it wanted done last.

    Its link was timed, twice each way, with transfers that took so long and ended so.
    """
    machine, now = DecodeMachine(3, 64, 4, LAYOUT, Deadlines()), 0.0
    effects = machine.handle(Connected(PEER, META), now)
    for way, took_s in (("read", read_s), ("read", read_s), ("write", write_s), ("write", write_s)):
        assert effects[-1:] == [Pull(0, PEER, 0, None, way)]  # type: ignore[arg-type]  # a way
        now += took_s
        effects = machine.handle(Pulled(0, state), now)
    return machine, effects


def _offer(chunk: KVChunk, slot: int = 0) -> Offer:
    first = FirstToken(1) if chunk.last else None
    return Offer(1, 1, SlotRef(slot, 0), chunk, (0,) * len(LAYOUT.segments(chunk)), first)


def _offered(machine: DecodeMachine, offer: Offer, now: float = 0.1) -> list[Effect]:
    return machine.handle(Received(PEER, offer), now)


@pytest.mark.parametrize(("read_s", "write_s", "way"), [(1.0, 0.5, "write"), (0.5, 1.0, "read")])
def test_chunks_come_by_the_faster_way(read_s: float, write_s: float, way: Way) -> None:
    machine, _ = _decoding(read_s, write_s)
    now = 2 * (read_s + write_s)
    machine.handle(Admitted(RequestId(1), 0, PROMPT), now)
    assert Pull(0, PEER, 2, KVChunk(0, 2, 5), way) in _offered(machine, _offer(KVChunk(0, 2, 5), 2), now)


def test_a_link_on_which_no_transfer_works_is_given_up_and_its_slot_is_free() -> None:
    machine, effects = _decoding(state="failed")
    assert Disconnect(PEER) in effects
    assert not machine.asks
    assert [slot.state for slot in machine.slots] == ["free"] * 3


@pytest.mark.parametrize("second", [KVChunk(3, 2, 5), KVChunk(2, 1, 5), KVChunk(1, 4, 5)])
def test_a_token_that_is_offered_twice_ends_the_attempt_and_no_slot_is_lost(second: KVChunk) -> None:
    """As by a worker that computes the same attempt again, in other chunks. The first chunk is on its way then."""
    machine, _ = _decoding()
    machine.handle(Admitted(RequestId(1), 1, PROMPT), 0.0)
    _offered(machine, _offer(KVChunk(2, 2, 5)))
    assert any(isinstance(each, PrefillLocally) for each in _offered(machine, _offer(second, 1)))
    machine.handle(Pulled(0, "done"), 0.3)
    assert [slot.state for slot in machine.slots] == ["free"] * 3


WRONG = {
    "a slot that its peer does not have": replace(_offer(KVChunk(0, 2, 5)), ref=SlotRef(100, 0)),
    "a slot below all": replace(_offer(KVChunk(0, 2, 5)), ref=SlotRef(-1, 0)),
    "a checksum too many": replace(_offer(KVChunk(0, 2, 5)), checksums=(0, 0)),
    "another prompt": _offer(KVChunk(0, 2, 6)),
    "more than a slot holds": _offer(KVChunk(0, 5, 5)),
    "no token": _offer(KVChunk(0, 0, 5)),
    "a first token before the last chunk": replace(_offer(KVChunk(0, 2, 5)), first=FirstToken(1)),
    "no first token": replace(_offer(KVChunk(1, 4, 5)), first=None),
}


@pytest.mark.parametrize("offer", WRONG.values(), ids=WRONG)
def test_an_offer_that_cannot_be_ends_the_attempt_before_anything_is_pulled(offer: Offer) -> None:
    machine, _ = _decoding()
    machine.handle(Admitted(RequestId(1), 0, PROMPT), 0.0)
    effects = _offered(machine, offer)
    assert any(isinstance(each, PrefillLocally) for each in effects)
    assert not any(isinstance(each, Pull) for each in effects)


@pytest.mark.slow
@pytest.mark.parametrize("odds", [LOSSY, SLOW, CHAOS, CRASHES])
def test_many_more_schedules(odds: Odds) -> None:
    for slots in (1, 2, 5):
        assert _worlds(odds, range(10_000, 11_500), slots=slots, num_prefill=2)["wrong"] == 0
