"""What a prefill step beside rounds may take, by what steps have cost."""

import pytest

from treetop.scheduler.budget import CostCurve, PrefillBudget
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts
from treetop.types.messages import Chunk, PrefillPlan, RoundPlan
from treetop.types.sampling import SamplingMode

LAYOUT = Layout((PLAIN,), 16, 256, 40_000, 8192, (KVGroup(FULL, 1, paired(1, 8)),), 10**6)


def learned(gap_ms=50.0, tokens=None, attended=None, prefill_s=lambda n: 0.004 + n / 40_000, round_s=0.005):
    budget = PrefillBudget(LAYOUT, PrefillCosts(512, 2048, attended), gap_ms / 1000, tokens, shape=lambda: PLAIN)
    for _ in range(5):
        for work in (512, 1024, 2048, 8192):
            budget.prefills.note(work, prefill_s(work))
        for rows in (1, 8, 64):
            budget.rounds.note(rows, round_s)
    return budget


def test_a_curve_knows_what_it_has_seen_and_bounds_the_rest():
    """A smaller step takes no longer than a larger, a larger no more than in proportion; nothing known is no bound."""
    curve = CostCurve()
    assert (curve.seconds(10), curve.size_within(1.0), curve.lost_s(10)) == (0.0, None, 0.0)
    curve.note(1000, 0.02)
    curve.note(4000, 0.06)
    assert [curve.seconds(size) for size in (1, 1000, 2000, 4000, 8000)] == pytest.approx(
        [0.02, 0.02, 0.04, 0.06, 0.12]
    )
    assert curve.size_within(0.01) is None
    assert curve.size_within(0.04) == pytest.approx(2000)
    assert curve.size_within(0.12) == pytest.approx(8000)
    assert curve.lost_s(1000) == pytest.approx(0.02 - 1000 * 0.06 / 4000)
    assert curve.lost_s(4000) == 0


def test_a_late_step_counts_for_nothing_once_another_was_not():
    """The first of a size may wait for a compiler; even alone in its class it bounds nothing that others bound."""
    curve = CostCurve()
    curve.note(2048, 3.0)
    assert curve.size_within(0.04) is None
    curve.note(512, 0.01)
    assert curve.seconds(2048) == pytest.approx(0.04)
    assert curve.size_within(0.04) == pytest.approx(2048)
    for _ in range(3):
        curve.note(2048, 0.03)
    assert curve.seconds(2048) == pytest.approx(0.03)


def test_a_curve_forgets_what_steps_cost_long_ago():
    """A device that was throttled, or contexts that grew."""
    curve = CostCurve()
    for _ in range(100):
        curve.note(1000, 0.01)
    for _ in range(64):
        curve.note(1000, 0.02)
    assert curve.seconds(1000) == pytest.approx(0.02)


def test_step_and_round_take_the_target_together():
    for gap_ms in (30, 50, 100):
        budget = learned(gap_ms)
        tokens = budget.tokens(64, 0)
        assert 512 < tokens < 8192
        assert 0.9 * gap_ms < 1000 * (0.004 + tokens / 40_000 + 0.005) <= gap_ms


def test_a_step_takes_little_where_rounds_are_slow_and_never_nothing():
    """Rounds of 80 ms leave nothing of 50: half a round then. Where even that is little, what a step takes in for
    little more than reading the weights."""
    assert learned(round_s=0.08).tokens(64, 0) == pytest.approx(1440, rel=0.05)
    assert learned(gap_ms=1).tokens(64, 0) == 512
    assert learned(gap_ms=1, attended=10_000).tokens(64, 30_000) == 128


@pytest.mark.parametrize("start", [0, 10_000, 30_000])
def test_what_a_token_attends_to_counts(start):
    budget = learned(attended=10_000)
    assert budget.tokens(64, start) == pytest.approx(budget.tokens(64, 0) * 10_000 / (10_000 + start), abs=1)


def test_nobody_who_decodes_waits_and_an_option_or_no_target_says_how_much():
    assert learned().tokens(0, 20_000) == 8192
    assert learned(gap_ms=0).tokens(64, 0) == 8192
    assert learned(tokens=300).tokens(64, 0) == 300
    assert not learned(tokens=300).may_wait(64, 1, 0.0, 0.0)


def test_small_prompts_wait_for_each_other_as_long_as_they_cost_others():
    """A step of 512 tokens takes 17 ms, of which a share of the best step's would be 12.9: 64 rows lose 4 ms each."""
    budget = learned()
    lost_s = 0.004 + 512 / 40_000 - 512 * (0.004 + 8192 / 40_000) / 8192
    assert budget.may_wait(64, 512, 63 * lost_s, 0.01)
    assert not budget.may_wait(64, 512, 65 * lost_s, 0.01)
    assert not budget.may_wait(64, 512, 63 * lost_s, 0.05), "longer than the target for gaps"
    assert not budget.may_wait(64, 8192, 0.0, 0.0), "a full step has nothing to wait for"
    assert not learned(prefill_s=lambda n: n / 40_000).may_wait(64, 512, 0.001, 0.001), "nothing is lost"


def test_a_round_whose_end_is_seen_late_is_no_measure_and_the_step_behind_it_took_longer():
    """A round of 5 ms whose end the host saw after 15, for it was launching a prefill step of 25 ms: with 15 ms left of
    that, both took 30."""
    budget = PrefillBudget(LAYOUT, PrefillCosts(512, 2048, None), 0.05, shape=lambda: PLAIN)
    chunk = Chunk(Row(0), 0, (1,) * 1000, None)
    step = PrefillPlan((), (), (), (chunk,), SamplingMode.GREEDY)
    round = RoundPlan((), (), (Row(0),), PLAIN, 1, SamplingMode.GREEDY)
    budget.note(round, 0.005, before_prefill=False)
    for _ in range(3):
        budget.note(round, 0.015, before_prefill=True)
        budget.note(step, 0.015, before_prefill=False)
    assert budget.rounds.seconds(1) == pytest.approx(0.005)
    assert budget.prefills.seconds(1000) == pytest.approx(0.025)
    budget.note(step, 0.025, before_prefill=False)
    assert budget.prefills.seconds(1000) == pytest.approx(0.025)
