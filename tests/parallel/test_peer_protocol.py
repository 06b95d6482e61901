"""The protocol of peer memory, all that can happen: for two and three ranks, every order of their steps and stores.

The model is `support/peer_protocol.py`. No word is read before it has come or taken for another's, none is written over
or emptied before its reader has used it, and from wherever one is everybody still gets on. Each way to get it wrong is
found.
"""

import pytest

from support.grids import few_of
from support.peer_protocol import BrokenProtocolError, Protocol, explore, wrong

SUM, GATHER = Protocol(2), Protocol(2, numbered=True)
DYING = Protocol(2, uses=2, deaths=True)
WARPS_WAIT = Protocol(2, two_look_for_one=True, uses=1, deaths=True)


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("sound", [SUM, GATHER], ids=["sum", "gather"])
def test_two_ranks_exchange_for_ever(sound, words):
    assert explore(wrong(sound, words=words)) > 500


@pytest.mark.slow
@pytest.mark.parametrize("sound", few_of([SUM, GATHER], 0), ids=["sum", "gather"])
def test_three_ranks_exchange_for_ever(sound):
    assert explore(wrong(sound, ranks=3)) > 10_000


@pytest.mark.parametrize("sound", [DYING, WARPS_WAIT], ids=["sums", "warps"])
def test_who_waits_for_the_dead_or_the_late_leaves_with_all_its_warps_and_waits_no_more(sound):
    assert explore(sound) > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("sound", [wrong(GATHER, ranks=3, uses=1, deaths=True), wrong(DYING, uses=3)], ids=str)
def test_the_same_with_more_ranks_and_uses(sound):
    assert explore(sound) > 50_000


@pytest.mark.parametrize(
    ("sound", "mistake", "says"),
    [
        (SUM, {"boxes": 1}, "before rank . has read it"),
        (GATHER, {"boxes": 1}, "before rank . has read it"),
        (wrong(SUM, ranks=3), {"boxes": 1}, "before rank . has read it"),
        # more threads than numbers: one emptied a box before another that looked for the same number had seen it
        (SUM, {"two_look_for_one": True, "agrees": False}, "before rank . has read it"),
        (wrong(SUM, words=2), {"agrees": False}, "before rank . has read it"),
        (SUM, {"empties": False}, "a box with 0 gets 2"),
        (SUM, {"first_counts": (0, 1)}, "no way leads home"),
        (GATHER, {"first_counts": (0, 1)}, "no way leads home"),
        (SUM, {"counts": False}, "before rank . has read it"),
        (SUM, {"drains": False}, "takes a word of use 0 for one of 1"),
        (GATHER, {"drains": False}, "before rank . has read it"),
        (SUM, {"sends_first": False}, "no way leads home"),
        (GATHER, {"compares": False}, "takes a word of use 0 for one of 2"),
        (WARPS_WAIT, {"leaves_together": False}, "no way leads home"),
        (DYING, {"ends_all": False}, "waits in use 1, though it gave up in use 0"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_found(sound, mistake, says):
    with pytest.raises(BrokenProtocolError, match=says):
        explore(wrong(sound, **mistake))


def test_two_that_look_for_one_number_do_no_harm_if_they_agree():
    """So it is their leaving apart that does."""
    assert explore(wrong(SUM, two_look_for_one=True)) > 500
