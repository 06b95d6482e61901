"""The policy that chooses shapes, in modelled time: what it may lose, what it gains, and what it costs."""

import re
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from support.shape_loads import CONTEXT, SHAPES, DrawnHead, DrawnLoad, Load, layout
from treetop.bench.modelled_costs import costs_of_a_gpu
from treetop.scheduler.acceptance import AcceptanceEstimate
from treetop.scheduler.policy import INTEREST, REGRET_BUDGET, AdaptiveShape, RoundCosts
from treetop.types.costs import CatchUpCost, CostTable, HeadAcceptance, RoundCost
from treetop.types.ids import Row
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import Chunk, MixedPlan, PrefillPlan, RoundPlan, RowMask, RowResult, StepResult
from treetop.types.sampling import SamplingMode

TREE = SHAPES[-1]


def profile(chain, tree):
    return lambda shape, depth: chain if shape.topk == 1 else tree + (0.04 if shape.num_draft_tokens > 8 else 0.0)


NEVER, ALWAYS, GOOD, FAIR = profile(0.0, -1.0), profile(1.0, 1.0), profile(0.75, 0.78), profile(0.5, 0.56)


class Adversary(RuleBasedStateMachine):
    """Chooses what holds for some rounds. Rounds cost what the table says."""

    def __init__(self):
        super().__init__()
        self.load = Load(8)

    @rule(kind=st.sampled_from([NEVER, ALWAYS, GOOD, FAIR]), rounds=st.sampled_from([1, 7, 40, 150]))
    def hold(self, kind, rounds):
        for _ in range(rounds):
            self.load.round(kind)

    @rule(rounds=st.sampled_from([20, 101]), first=st.booleans())
    def alternate(self, rounds, first):
        for index in range(rounds):
            self.load.round(ALWAYS if index % 2 == first else NEVER)

    @rule(rounds=st.sampled_from([60, 200]))
    def lie_while_it_speculates(self, rounds):
        """Plain rounds are told that all would hold, trees find that nothing does."""
        for _ in range(rounds):
            self.load.round(NEVER if self.load.policy.shape != PLAIN else ALWAYS)

    def teardown(self):
        if len(self.load.rounds) > 250:
            assert self.load.worst() >= 0.97


TestAdversary = Adversary.TestCase
TestAdversary.settings = settings(
    max_examples=40, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_a_head_that_becomes_worthless_after_a_long_run_costs_little(rows):
    """The worst window begins where everything was accepted and nothing is any more."""
    load = Load(rows)
    for kind, rounds in ((ALWAYS, 150), (NEVER, 400)):
        for _ in range(rounds):
            load.round(kind)
    assert load.speed(0, 150) > 1.5
    assert load.worst() >= 0.97
    assert load.shapes[-100:].count(PLAIN) > 90


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("chance", [NEVER, GOOD], ids=["never", "good"])
def test_it_comes_near_the_best_of_its_shapes(rows, chance):
    """After the first rounds, of all fixed shapes at this load, plain ones too."""
    load = Load(rows)
    for _ in range(700):
        load.round(chance)
    best = max(load.fixed_speed(shape, chance) for shape in SHAPES)
    assert load.speed(100) >= 0.95 * best


HEADS = {
    "good": HeadAcceptance((0.8, 0.79, 0.78), 0.5),
    "mediocre": HeadAcceptance((0.55, 0.5, 0.45), 0.4),
    "useless": HeadAcceptance((0.02, 0.02), 0.02),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_nobody_knows_gets_the_best_shape_of_its_load(name, rows):
    """From an engine's start, by what a calibration counts: beside the best fixed shape, and plain rounds alone."""
    load = DrawnLoad(rows, DrawnHead(HEADS[name]))
    for _ in range(300):
        load.round(None)
    assert load.mean_speed(50) >= 0.96 * load.best_speed()
    assert load.mean_speed(50) >= 0.985


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 128, 256])
def test_a_head_that_is_wrong_from_one_moment_on_costs_two_percent_of_200_rounds(rows):
    """With what plain rounds lose by keeping the draft up with them."""
    load = DrawnLoad(rows, DrawnHead(HEADS["good"]))
    for _ in range(150):
        load.round(None)
    load.head.become(HeadAcceptance((0.001,), 0.001))
    for _ in range(200):
        load.round(None)
    assert load.speed(0, 150) > 1.1
    assert load.speed(150) >= 0.98 - 0.002


def of_a_cpu(rounds: dict[int, dict[str, float]], catch_up: float) -> CostTable:
    """By rows and shape S,k,T, in plain rounds of one row."""
    found = [
        RoundCost(rows, SpecShape.parse(text, "here"), cost, 0.0)
        for rows, costs in rounds.items()
        for text, cost in costs.items()
    ]
    return CostTable("", tuple(found), tuple(CatchUpCost(rows, catch_up) for rows in rounds))


NESTLING = of_a_cpu(
    {
        1: {"0,1,1": 1.0, "2,1,3": 2.16, "3,1,4": 2.41, "5,1,6": 3.15, "5,4,8": 3.15, "5,4,16": 3.51},
        4: {"0,1,1": 1.34, "2,1,3": 2.63, "3,1,4": 3.01, "5,1,6": 4.25, "5,4,8": 4.77, "5,4,16": 5.44},
    },
    1.22,
)
"""The embedded pair's on one core of a busy Xeon, and what catching up 128 tokens takes there."""


class OnACpu(DrawnLoad):
    """Rounds of a small model on a CPU. known: what the policy thinks of the head at first."""

    def __init__(self, rows, head, known):
        super().__init__(rows, head, NESTLING, layout(128), lambda: known)
        self.life = 300


KNOWN = HeadAcceptance((0.913, 0.895, 0.895, 0.897, 0.897), 0.5)


@pytest.mark.parametrize(("rows", "least"), [(1, 0.965), (4, 0.99)])
@pytest.mark.parametrize("known", [KNOWN, HeadAcceptance()], ids=["known", "unknown"])
def test_a_small_model_on_a_cpu_gains_by_a_good_head_though_a_round_stakes_most_of_the_credit(rows, least, known):
    """Beside the best fixed shape, from the start, in the mean of runs: a round stakes no more than half of what may be
    lost, and whatever was accepted beyond what rounds cost may be risked again."""
    found = []
    for seed in range(6):
        load = OnACpu(rows, DrawnHead(KNOWN, seed), known)
        for _ in range(2000):
            load.round(None)
        found.append(load.mean_speed(0) / load.best_speed())
    assert sum(found) / len(found) >= least


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_head_that_becomes_wrong_on_a_cpu_costs_what_the_start_says(rows):
    """Of 200 rounds, with what a plain round leaves to the draft: at one row of a small model three stakes, which the
    start says of the fewest rows, else 2 %."""
    told = OnACpu(1, DrawnHead(KNOWN), KNOWN).policy.expectation()
    said = re.search(r"in 200 rounds it loses ([\d.]+) % of them at most", told)
    most = float(said[1]) / 100 if rows == 1 else 0.02
    for seed in range(8):
        load = OnACpu(rows, DrawnHead(KNOWN, seed), KNOWN)
        for _ in range(300):
            load.round(None)
        load.head.become(HeadAcceptance((0.001,), 0.001))
        for _ in range(200):
            load.round(None)
        assert load.speed(300) >= 1.0 - most - 0.002


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
def test_more_rows_lose_no_more_than_is_said_of_what_one_has_saved(rows):
    """One row whose drafts all hold saves three stakes; so many follow of which nothing is accepted."""
    alone = Load(1, NESTLING, layout(128), lambda: KNOWN)
    for _ in range(100):
        alone.round(ALWAYS)
    assert alone.policy.regret_budget > 2 * REGRET_BUDGET
    load = Load(rows, NESTLING, layout(128), lambda: KNOWN)
    load.policy = alone.policy
    for _ in range(200):
        load.round(NEVER)
    assert load.speed(0, 200) >= 0.98 - 0.001


def test_rounds_cost_what_they_take_at_the_mean_of_their_rows_tokens():
    """A row of 8,192 tokens among seven of 32, plain: by the longest, all shapes would be thought cheap."""
    table = costs_of_a_gpu(SHAPES)
    policy, mean = AdaptiveShape(table, layout()), (8192 + 7 * 32) / 8
    plan = RoundPlan((), (), tuple(range(8)), PLAIN, 8192, SamplingMode.GREEDY)
    for _ in range(50):
        policy.note(plan, StepResult(tuple(RowResult(row, (1,), True) for row in range(8))), 0.01, mean)
    assert policy._costs.seconds(8, PLAIN, mean) == pytest.approx(0.01, rel=0.02)


LOADED = CostTable(
    "",
    tuple(
        RoundCost(1, SpecShape.parse(text, "here"), cost, 0.0)
        for text, cost in (("0,1,1", 1.0), ("2,1,3", 1.92), ("5,4,8", 3.38))
    ),
    (CatchUpCost(1, 0.35, 0.0055),),
)
"""The embedded pair's two shapes at one row of a CPU that others use, and what a token more costs to catch up."""


def test_what_was_gained_at_one_row_is_not_given_up_whatever_shape_is_best():
    """A head of which a small chain gains a seventh: a row accepts nothing three times now and then, and what the
    budget holds is by the dearest shape, though that does not pay here. By near shapes alone 0.90 is reached."""
    found = []
    for seed in range(8):
        load = DrawnLoad(1, DrawnHead(HeadAcceptance((0.7, 0.7, 0.72), 0.5), seed), LOADED, layout(128), lambda: KNOWN)
        load.life = 100
        for _ in range(2000):
            load.round(None)
        found.append(load.mean_speed(0) / load.best_speed())
    assert sum(found) / len(found) >= 0.97


@pytest.mark.parametrize("budget", [3.0, 2.0, 1.2, 1.0])
def test_a_round_stakes_half_of_what_may_be_lost_at_most_or_the_least_that_pays(budget):
    policy, cost = AdaptiveShape(NESTLING, layout(128), lambda: KNOWN), Load(1, NESTLING).cost
    policy.regret_budget = budget - INTEREST
    shape = policy.choose([CONTEXT], [1, 0, 0])
    stakes = {each: cost(each) - 1.0 for each in SHAPES}
    assert (shape == PLAIN) == (budget < stakes[SpecShape(1, 2, 3)])
    if any(0.0 < stake <= budget / 2 for stake in stakes.values()):
        assert 0.0 < stakes[shape] <= budget / 2
    elif shape != PLAIN:
        assert stakes[shape] == min(stake for stake in stakes.values() if stake > 0.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("known", [HEADS["useless"], HeadAcceptance(), KNOWN], ids=["known", "unknown", "thought good"])
def test_a_useless_head_on_a_cpu_costs_next_to_nothing(rows, known):
    """Known to be useless it is hardly tried; over 3,000 rounds of any."""
    load = OnACpu(rows, DrawnHead(HEADS["useless"]), known)
    for _ in range(3000):
        load.round(None)
    assert load.speed() >= (0.996 if known is HEADS["useless"] else 0.994)


def test_a_shape_that_could_not_win_if_all_were_accepted_is_never_tried():
    """A chain of two drafts whose round costs three plain ones."""
    table = of_a_cpu({1: {"0,1,1": 1.0, "2,1,3": 3.0, "5,1,6": 3.2}}, 0.1)
    policy = AdaptiveShape(table, layout())
    chain, seen = SpecShape(1, 2, 3), set()
    for _ in range(3000):
        shape = policy.choose([CONTEXT], [1, 0, 0])
        seen.add(shape)
        row = RowResult(Row(0), (0,) * (1 + shape.num_steps), True)
        policy.note(RoundPlan((), (), (Row(0),), shape, CONTEXT, SamplingMode.GREEDY), StepResult((row,)), None)
    assert SpecShape(1, 5, 6) in seen
    assert chain not in seen


def test_it_finds_out_that_drafts_hold_again():
    """A batch that decodes plainly tries again now and then, and goes back to a tree."""
    load = Load(8, life=150)
    for kind, rounds in ((NEVER, 600), (GOOD, 700)):
        for _ in range(rounds):
            load.round(kind)
    assert load.shapes[-50:].count(PLAIN) == 0
    assert load.speed(-200) > 1.8


def test_a_larger_batch_gets_a_smaller_shape():
    """The same acceptance pays for 16 nodes of one row, and for two of a hundred."""
    sizes = []
    for rows in (1, 8, 32, 128):
        load = Load(rows)
        for _ in range(400):
            load.round(GOOD)
        taken = load.shapes[-200:]
        sizes.append(max(set(taken), key=taken.count).num_draft_tokens)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-1] <= 3


def test_a_machine_that_is_slow_in_all_shapes_changes_no_choice():
    """What the clock says of the shape that runs is mostly said of all."""
    load = Load(8, busy=3.0)
    for _ in range(500):
        load.round(GOOD)
    best = max(SHAPES, key=lambda shape: load.fixed_speed(shape, GOOD))
    assert load.speed(100) >= 0.95 * load.fixed_speed(best, GOOD)


def test_a_shape_that_is_dearer_than_measured_is_left():
    """A table from a moment when the machine was slow is corrected by rounds."""
    table = costs_of_a_gpu(SHAPES)
    wrong = tuple(
        RoundCost(each.rows, each.shape, each.seconds / (2.5 if each.shape == TREE else 1.0), each.seconds_per_token)
        for each in table.rounds
    )
    load = Load(32)
    load.policy = AdaptiveShape(CostTable("", wrong, table.catch_ups), load.layout)
    for _ in range(1500):
        load.round(GOOD)
    assert load.shapes[:300].count(TREE) > 200
    assert load.shapes[-200:].count(TREE) < 100


@pytest.mark.parametrize(("rows", "tokens"), [(16, 1000.0), (1, 8000.0), (1, 100.0), (4, 8000.0)])
def test_where_the_load_changes_with_the_shape_nothing_is_said_of_what_shapes_cost_beside_each_other(rows, tokens):
    """A table that is wrong at one load makes no tree dear or cheap that is first tried when the load is another; one
    that is tried at the load of the rounds before it is found out.
    """

    def ratio() -> float:
        return costs.seconds(4, TREE, 100.0) / costs.seconds(4, PLAIN, 100.0)

    costs = RoundCosts(costs_of_a_gpu(SHAPES))
    thought = ratio()
    for _ in range(5):
        for _ in range(40):
            costs.note(rows, PLAIN, tokens, 1.7 * costs_of_a_gpu(SHAPES).seconds(rows, PLAIN, tokens))
        costs.note(4, TREE, 100.0, costs_of_a_gpu(SHAPES).seconds(4, TREE, 100.0))
        assert ratio() == pytest.approx(thought)
    for _ in range(20):
        for _ in range(40):
            costs.note(4, PLAIN, 100.0, costs_of_a_gpu(SHAPES).seconds(4, PLAIN, 100.0))
        costs.note(4, TREE, 103.0, 1.25 * costs_of_a_gpu(SHAPES).seconds(4, TREE, 103.0))
    assert 1.1 < ratio() / thought < 1.3


def dear_catch_ups(plain_rounds: float) -> CostTable:
    """A GPU's costs, but a draft extend of all that is deferred takes as long as so many plain rounds."""
    table = costs_of_a_gpu(SHAPES)
    of_rows = {each.rows: each.seconds for each in table.rounds if each.shape == PLAIN}
    ups = tuple(CatchUpCost(rows, plain_rounds * seconds) for rows, seconds in of_rows.items())
    return CostTable("", table.rounds, ups)


def test_what_is_caught_up_before_a_tree_is_paid_for_in_advance():
    """A round whose rows have deferred something is charged with both; where none has there is nothing to catch up."""
    table, costs = dear_catch_ups(1.5), []
    policy = AdaptiveShape(table, layout())
    for deferred in (1, 0):
        policy.regret_budget = 2.9  # below its bound
        shape = policy.choose([CONTEXT] * 8, [8, 0, 0], deferred)
        assert shape != PLAIN
        paid = 2.9 + INTEREST - policy.regret_budget
        costs.append(paid + 1.0 - table.seconds(8, shape, CONTEXT) / table.seconds(8, PLAIN, CONTEXT))
    behind = table.catch_up_seconds(8, 1) / table.seconds(8, PLAIN, CONTEXT)
    assert behind > 1.4
    assert costs == pytest.approx([behind, 0.0], abs=0.01)


def test_trees_that_only_gain_if_nobody_catches_up_are_not_paid_for():
    """More than all credit stands against the first of them, so that none runs, however much it would have given."""
    load = Load(8, dear_catch_ups(REGRET_BUDGET + 1.0), deferred=1)
    for _ in range(300):
        load.round(ALWAYS)
    assert set(load.shapes) == {PLAIN}


@pytest.mark.parametrize("masked_drafts", ["no_draft", "masks"])
def test_rows_whose_drafts_were_withheld_say_nothing_of_the_head(masked_drafts):
    """A constrained row, or one that accepts no draft, gives one token a round: its drafts were not rejected."""
    told, alone = (AdaptiveShape(costs_of_a_gpu(SHAPES), layout()) for _ in range(2))
    rows = tuple(RowResult(row, (1,) * (5 if row < 4 else 1), True) for row in range(8))
    kept = {"no_draft": tuple(range(4, 8)), "masks": tuple(RowMask(row, b"") for row in range(4, 8))}
    mixed = RoundPlan(
        (), (), tuple(range(8)), TREE, CONTEXT, SamplingMode.GREEDY, **{masked_drafts: kept[masked_drafts]}
    )
    free = RoundPlan((), (), tuple(range(4)), TREE, CONTEXT, SamplingMode.GREEDY)
    for _ in range(40):
        told.note(mixed, StepResult(rows), None)
        alone.note(free, StepResult(rows[:4]), None)
    assert told.acceptance.tokens(TREE) == alone.acceptance.tokens(TREE) > 4.0


def test_costs_lie_on_lines_between_what_was_measured():
    table = CostTable("", tuple(RoundCost(rows, PLAIN, rows / 4, 0.5) for rows in (1, 4, 8)))
    assert [table.seconds(rows, PLAIN, 0) for rows in (1, 2, 4, 6, 8, 16)] == [0.25, 0.5, 1.0, 1.5, 2.0, 4.0]
    assert table.seconds(4, PLAIN, 10) == 6.0
    assert table.catch_up_seconds(4, 1) == 0.0
    behind = CostTable("", (), (CatchUpCost(1, 1.0, 0.5), CatchUpCost(4, 4.0, 2.0)))
    assert [behind.catch_up_seconds(*given) for given in ((1, 1), (1, 3), (2, 1), (4, 3), (8, 1))] == [1, 2, 2, 8, 8]


@pytest.mark.parametrize("rows", [1, 16])
def test_what_is_accepted_is_estimated(rows):
    """Of the shape that ran closely, of others roughly; one that never ran hopes for more than it expects."""
    load = Load(rows)
    known = AcceptanceEstimate([shape for shape in SHAPES if shape != PLAIN], HeadAcceptance())
    for _ in range(600):
        known.note(TREE, [load._accepted(TREE, lambda shape, depth: 0.6) for _ in range(rows)])
    assert known.tokens(TREE) == pytest.approx(sum(0.6**depth for depth in range(6)), rel=0.15)
    chain = SpecShape(1, 5, 6)
    assert 1.0 < known.tokens(chain) < known.tokens(TREE) < known.tokens(TREE, 1.0)
    assert known.tokens(chain, 1.0) / known.tokens(chain) > known.tokens(TREE, 1.0) / known.tokens(TREE)


def test_a_round_of_64_rows_takes_the_host_little_time():
    """Choosing and learning: about half of what a small sum takes here and now, in processor time."""
    policy, rows = AdaptiveShape(costs_of_a_gpu(SHAPES), layout()), tuple(range(64))
    plan = RoundPlan((), (), rows, TREE, CONTEXT, SamplingMode.GREEDY)
    result, lengths = StepResult(tuple(RowResult(row, (1, 2, 3), True) for row in rows)), [CONTEXT] * 64

    def round_s() -> float:
        started_s = time.thread_time()
        for _ in range(50):
            policy.choose(lengths, [64, 0, 0])
            policy.note(plan, result, 0.01)
        return (time.thread_time() - started_s) / 50

    def sum_s() -> float:
        started_s = time.thread_time()
        sum(number * number for number in range(100_000))
        return (time.thread_time() - started_s) / 25

    assert min(round_s() for _ in range(20)) < min(sum_s() for _ in range(20))


def test_a_start_says_what_is_expected_where_drafts_pay_and_what_may_be_lost():
    """By costs: where a tree costs twenty plain rounds plain ones are expected, and nothing is promised."""
    told = AdaptiveShape(costs_of_a_gpu(SHAPES), layout()).expectation()
    assert re.search(r"[12]\.\d\dx at 1 rows \(S=5 k=4 T=16, pays from 1\.\d\d tokens a round on\)", told)
    assert "at 256 rows (S=" in told
    assert "loses 2.0 % of them at most" in told
    assert "loses 4.3 % of them at most" in AdaptiveShape(NESTLING, layout(128), lambda: KNOWN).expectation()
    dear = CostTable("x", tuple(RoundCost(1, shape, 0.1 if shape == PLAIN else 2.0, 0.0) for shape in SHAPES))
    assert "1.00x at 1 rows (S=0 k=1 T=1)" in AdaptiveShape(dear, layout()).expectation()


@pytest.mark.parametrize(("name", "most"), [("useless", 400), ("good", 620)])
def test_a_round_asks_the_host_for_little(name, most):
    """Trees are not searched for chances that are the same, what rows gave is added up at once, and plain rounds do not
    weigh all shapes each time."""
    load, calls = DrawnLoad(64, DrawnHead(HEADS[name])), Counter[str]()
    for _ in range(100):
        load.round(None)

    def count(frame, event, argument) -> None:
        calls[event] += event in ("call", "c_call")

    def counted(run):
        def counting(*given):
            sys.setprofile(count)
            try:
                return run(*given)
            finally:
                sys.setprofile(before)

        return counting

    before = sys.getprofile()
    load.policy.choose, load.policy.note = counted(load.policy.choose), counted(load.policy.note)
    for _ in range(64):
        load.round(None)
    assert (load.shapes[100:].count(PLAIN) > 60) == (name == "useless")
    assert 0 < calls.total() < most * 64


def test_a_table_of_chances_that_is_hardly_another_changes_nothing():
    shape, known = SpecShape(1, 3, 4), [[0.6], [0.5], [0.4]]
    estimate = AcceptanceEstimate([shape], HeadAcceptance((0.6, 0.5, 0.4)))
    expected = estimate.tokens(shape)
    estimate.learn([[0.604], [0.5], [0.4]])
    assert estimate.tokens(shape) == expected
    estimate.turn_to([[0.61], [0.5], [0.4]])
    assert estimate.tokens(shape) > expected > 1.0
    estimate.turn_to(known)
    assert estimate.tokens(shape) == expected


def test_a_row_without_a_draft_gets_one_where_it_gains_twice_what_that_costs_and_that_is_saved():
    """From prefill steps' time and tokens left, with all rows waiting; the budget is full, and one follows another
    after some rounds.
    """
    load = DrawnLoad(4, DrawnHead(HEADS["good"]), costs_of_a_gpu(SHAPES), layout(), lambda: HEADS["good"])
    policy = load.policy
    for _ in range(104):  # it is thought of every eighth round
        load.round(None)
    plain_s = load.cost(PLAIN)
    assert policy.cost_of_draft(4, 400, 1000) is None, "nobody knows what a prefill takes"
    chunk = Chunk(Row(0), 0, tuple(range(400)), None)
    policy.note(PrefillPlan((), (), (), (chunk,), SamplingMode.GREEDY), StepResult(()), 5.0 * plain_s)
    assert policy.savings > 6.0
    cost = policy.cost_of_draft(4, 400, 1000)
    assert cost == pytest.approx(5.0, rel=0.2)
    assert policy.cost_of_draft(4, 800, 1000) == pytest.approx(2 * cost)
    assert policy.cost_of_draft(4, 400, int(8 * cost)) is None, "it would have to gain all of these rounds"
    assert policy.cost_of_draft(16, 400, 160) is None, "all rows wait"
    saved = policy.savings
    policy.pay(cost)
    assert policy.savings == pytest.approx(saved - cost)
    policy.savings = saved
    for _ in range(8):
        assert policy.cost_of_draft(4, 400, 1000) is None, "it follows at once"
        load.round(None)
    assert policy.cost_of_draft(4, 400, 1000) is not None
    policy.savings = cost / 2
    assert policy.cost_of_draft(4, 400, 1000) is None, "that is not saved"
    policy.savings = saved
    policy.regret_budget = REGRET_BUDGET - 0.1
    assert policy.cost_of_draft(4, 400, 1000) is None, "its trees could not be paid"


def test_what_prefill_takes_is_learned_from_mixed_steps_too():
    """They bound what a prefill takes: where all prompts come so, rows are put back all the same. A small one says
    nothing of a large one.
    """
    load = DrawnLoad(4, DrawnHead(HEADS["good"]), costs_of_a_gpu(SHAPES), layout(), lambda: HEADS["good"])
    for _ in range(104):
        load.round(None)
    policy, rows, plain_s = load.policy, tuple(Row(row) for row in range(4)), load.cost(PLAIN)
    assert policy.cost_of_draft(4, 400, 1000) is None, "nobody knows what a prefill takes"
    chunk = Chunk(Row(4), 0, tuple(range(400)), None)
    prompts = PrefillPlan((), (), (), (chunk,), SamplingMode.GREEDY)
    mixed = MixedPlan(prompts, RoundPlan((), (), rows, PLAIN, CONTEXT, SamplingMode.GREEDY))
    policy.note(mixed, StepResult(()), None)
    assert policy.cost_of_draft(4, 400, 1000) is None, "that said nothing"
    policy.note(mixed, StepResult(()), 6.0 * plain_s)
    assert policy.cost_of_draft(4, 400, 1000) == pytest.approx(6.0, rel=0.2)
    few = replace(prompts, chunks=(replace(chunk, token_ids=tuple(range(16))),))
    policy.note(replace(mixed, prefill=few), StepResult(()), 0.99 * plain_s)
    assert policy.cost_of_draft(4, 400, 1000) == pytest.approx(6.0, rel=0.2)


def test_who_comes_has_no_draft_where_reading_prompts_costs_more_than_trees_gain():
    """A mediocre head at many rows: with long prompts and short answers it is worth less than it reads, and a crowd is
    judged by the rows that it will be. Of requests that are not known nothing is thought.
    """
    head, table = HEADS["mediocre"], costs_of_a_gpu(SHAPES)
    few, many = (DrawnLoad(rows, DrawnHead(head), table, layout(), lambda: head) for rows in (4, 128))
    for read_per_token in (0.0, 20.0):
        for load in (few, many):
            load.policy._read_per_token = lambda each=read_per_token: each
            for _ in range(16):
                load.round(None)
        assert not few.policy.watches
        assert many.policy.watches == (read_per_token > 0.0)
        assert few.policy.pays_to_read(4, 4, 0, 0)
        assert few.policy.pays_to_read(4, 4, 124, 0) == (read_per_token == 0.0)
    many.rows, many.drafting = 4, 0
    for _ in range(32):
        many.round(None)
    assert not many.policy.watches, "of so few rows it is worth it"


def test_a_crowd_has_drafts_as_those_that_are_there_whatever_the_last_rounds_gave():
    """Where trees gain what the draft reads, chance must not decide of each request: a batch of both waits for rows
    without a draft. But where reading has lost for long, drafts end.
    """
    head = HEADS["mediocre"]
    load = DrawnLoad(32, DrawnHead(head), costs_of_a_gpu(SHAPES), layout(), lambda: head)
    for _ in range(100):
        load.round(None)
    policy, shape = load.policy, SHAPES[1]

    def reads(worth: float) -> None:
        """So much that trees are worth this."""
        policy._read_per_token = lambda: 0.0
        gives = load.cost(PLAIN) / policy._worth(32, policy._seconds(32, CONTEXT), 1.0)
        policy._read_per_token = lambda: (load.cost(PLAIN) / worth - gives) / policy._read_s / 32
        policy._reads_worth.clear()

    reads(0.99)
    for lengths in ([0] * 4, [shape.num_steps] * 4, [0] * 4):
        for _ in range(3):
            policy.acceptance.note(shape, lengths)
            policy._reads_worth.clear()
            assert policy.pays_to_read(28, 28, 4, 0), "those that are there have one"
            assert not policy.pays_to_read(28, 0, 4, 0), "those that are there have none"
    load.life = 60
    for worth, ends in ((1.05, False), (0.97, True)):
        reads(worth)
        for _ in range(200):
            load.round(None)
        assert any(drafted == 0.0 for _, drafted in load.parts[-200:]) == ends


def test_while_the_head_is_watched_rows_have_a_draft_only_for_a_trial():
    """Prompts and rounds cost what they do in plain decoding, but for few; and it finds out when drafts hold again."""
    load = DrawnLoad(16, DrawnHead(HEADS["useless"]), costs_of_a_gpu(SHAPES), layout())
    load.life = 60
    for _ in range(3000):
        load.round(None)
    assert load.policy.watches
    drafting = [drafted > 0.0 for _, drafted in load.parts[1000:]]
    trials = sum(shape != PLAIN for shape in load.shapes[1000:])
    assert 0 < trials <= sum(drafting) <= 0.1 * len(drafting)
    load.head.become(HEADS["good"])
    for _ in range(3000):
        load.round(None)
    assert not load.policy.watches


def test_time_that_passes_makes_less_certain_at_once_as_round_by_round():
    """Plain rounds say nothing, so what they change is done when the next is asked."""
    one, other = (AcceptanceEstimate(SHAPES[1:], HeadAcceptance()) for _ in range(2))
    for each in (one, other):
        each.note(TREE, [2, 0, 1])
    for _ in range(40):
        one.note(PLAIN, ())
        one.tokens(TREE)
        other.note(PLAIN, ())
    for deviations in (0.0, 1.0):
        assert one.tokens(TREE, deviations) == pytest.approx(other.tokens(TREE, deviations), rel=1e-9)
    for each in (one, other):
        each.note(TREE, [4, 4, 4])
    assert one.tokens(TREE) == pytest.approx(other.tokens(TREE), rel=1e-9)


@pytest.mark.parametrize("head", ["useless", "mediocre"])
def test_what_is_saved_is_what_was_gained_or_not_lost(head):
    """Interest that the budget has no room for, and never more than the most."""
    load = DrawnLoad(64, DrawnHead(HEADS[head]))
    load.life = 300
    for _ in range(1000):
        load.round(None)
    gained = sum(tokens - seconds / load.cost(PLAIN) for seconds, tokens in load.rounds)
    policy = load.policy
    assert 0.0 <= policy.savings <= 32.0
    assert policy.savings + policy.regret_budget <= REGRET_BUDGET + 1000 * INTEREST + max(gained, 0.0) + 0.5
