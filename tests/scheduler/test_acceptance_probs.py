"""What a calibration's counts say of shapes: chances by depth and rank, and how far the paths of a tree get."""

import itertools

import pytest

from support.shape_loads import CONTEXT, SHAPES, Load
from treetop.scheduler.acceptance import AcceptanceEstimate
from treetop.scheduler.acceptance_probs import ENOUGH, accept_probs_of, path_probs
from treetop.types.costs import HeadAcceptance
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan, RowResult, StepResult
from treetop.types.sampling import SamplingMode

TREE, CHAIN = SpecShape(4, 5, 16), SpecShape(1, 5, 6)
DEPTHS, RANKS = 5, 4
HEAD = HeadAcceptance()


def counts(rates, nodes=1000.0, classes=(1, 0, 0)):
    """Of heads that choose the proposals of each depth at these rates. classes: which has been seen."""
    seen = [[[nodes * on] * RANKS for _ in range(DEPTHS)] for on in classes]
    chosen = [[[nodes * on * rate for rate in rates] for _ in range(DEPTHS)] for on in classes]
    return seen, chosen


def test_chances_are_rates_once_enough_was_seen():
    rates = [0.6, 0.2, 0.1, 0.02]
    assert accept_probs_of(counts(rates, ENOUGH - 1), [4, 0, 0], HEAD) is None
    found = accept_probs_of(counts(rates, 10**6), [4, 0, 0], HEAD)
    for of_depth in found:
        assert of_depth == pytest.approx(rates, rel=1e-3)
        assert sum(of_depth) <= 1


def test_a_batch_of_several_classes_has_their_mean():
    """A class that was hardly seen counts as all of them together."""
    low, high = counts([0.2, 0, 0, 0], 10**6), counts([0.8, 0, 0, 0], 10**6)
    seen = [low[0][0], high[0][0], [[0.0] * RANKS] * DEPTHS]
    both = seen, [low[1][0], high[1][0], [[0.0] * RANKS] * DEPTHS]
    assert accept_probs_of(both, [3, 1, 0], HEAD)[0][0] == pytest.approx(0.35)
    assert accept_probs_of(both, [0, 0, 2], HEAD)[0][0] == pytest.approx(0.5)


@pytest.mark.parametrize("nodes", [1.0, 20.0, 50.0])
def test_a_class_or_a_depth_that_was_hardly_seen_is_not_believed(nodes):
    """Some fifty nodes that nothing was accepted of say little beside a million: chance alone gives such luck."""
    many, few = counts([0.8, 0, 0, 0], 10**6), counts([0.0] * RANKS, nodes)
    unseen = [[0.0] * RANKS] * DEPTHS
    assert accept_probs_of(([few[0][0], unseen, unseen], [few[1][0], unseen, unseen]), [2, 0, 0], HEAD) is None
    both = [many[0][0], few[0][0], unseen], [many[1][0], few[1][0], unseen]
    assert accept_probs_of(both, [0, 2, 0], HEAD)[0][0] == pytest.approx(0.8, rel=1e-3)
    deeper = [many[0][0][:2] + few[0][0][2:], unseen, unseen], [many[1][0][:2] + few[1][0][2:], unseen, unseen]
    assert accept_probs_of(deeper, [2, 0, 0], HEAD)[4][0] == pytest.approx(0.8, rel=1e-3)


def test_a_rank_that_was_never_asked_for_has_a_guess_and_a_depth_that_of_the_one_before():
    """Chains ask for the best proposal only."""
    seen = [[[500.0, 0, 0, 0]] * 2 + [[0.0] * RANKS] * 3, *[[[0.0] * RANKS] * DEPTHS] * 2]
    chosen = [[[300.0, 0, 0, 0]] * 2 + [[0.0] * RANKS] * 3, *[[[0.0] * RANKS] * DEPTHS] * 2]
    found = accept_probs_of((seen, chosen), [1, 0, 0], HEAD)
    assert found[4] == found[1]
    assert found[0][0] == pytest.approx(0.6)
    assert 0.05 < found[0][3] < found[0][2] < found[0][1] < 0.2 or found[0][3] < 0.06


def paths_by_hand(shape, rate):
    """Of all paths the likeliest T - 1 that a frontier of k reaches."""
    frontier, listed = [()], []
    for _ in range(shape.num_steps):
        below = [(*path, rank) for path in frontier for rank in range(shape.topk)]
        listed += below
        frontier = sorted(below, key=lambda path: -chance(path, rate))[: shape.topk]
    best = sorted(listed, key=lambda path: (-chance(path, rate), len(path)))[: shape.num_draft_tokens - 1]
    return [sum(chance(path, rate) for path in best if len(path) == depth + 1) for depth in range(shape.num_steps)]


def chance(path, rate):
    found = 1.0
    for rank in path:
        found *= rate[rank]
    return found


@pytest.mark.parametrize("shape", [SpecShape(4, 3, 9), SpecShape(2, 4, 12), SpecShape(3, 1, 4), CHAIN])
def test_paths_get_as_far_as_the_best_nodes_say(shape):
    rate = [0.55, 0.23, 0.11, 0.05]
    got, by_best = path_probs(shape, [rate] * 8)
    assert all(0 < best <= path for best, path in zip(by_best, got, strict=True))
    want = paths_by_hand(shape, rate)[: len(got)]
    assert got == pytest.approx(want)
    assert all(a >= b for a, b in itertools.pairwise([1.0, *got]))


def test_shapes_that_never_ran_are_foretold():
    """Counts of a head that is good at its second proposals move the tree, and not the chain beside it."""
    known = AcceptanceEstimate([CHAIN, TREE], HEAD)
    for _ in range(300):
        known.note(CHAIN, [2, 1, 0, 3])
        known.learn(accept_probs_of(counts([0.6, 0.3, 0.05, 0.03]), [4, 0, 0], HEAD))
    plain = AcceptanceEstimate([CHAIN, TREE], HEAD)
    for _ in range(300):
        plain.note(CHAIN, [2, 1, 0, 3])
    assert known.tokens(CHAIN) == pytest.approx(plain.tokens(CHAIN), rel=0.05)
    assert known.tokens(TREE) > plain.tokens(TREE) + 0.2


def told(load, of_round):
    """A load whose results bring counts, as an engine's do that learns."""
    note = load.policy.note
    load.policy.note = lambda plan, result, seconds: note(plan, StepResult(result.rows, proposals=of_round), seconds)
    return load


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_what_a_calibration_says_loses_nothing_where_it_is_wrong(rows):
    """Counts of a head that is always right beside one that never is: the regret budget holds all the same."""
    load = told(Load(rows), counts([0.95, 0.04, 0.01, 0.0]))
    for _ in range(500):
        load.round(lambda shape, depth: 0.0)
    assert load.worst() >= 0.97
    assert load.shapes[-100:].count(PLAIN) > 85


def test_the_policy_reads_what_comes_with_results():
    load = Load(4)
    policy, shape = load.policy, SHAPES[-1]
    before = policy.acceptance.tokens(shape)
    plan = RoundPlan((), (), (0,), PLAIN, CONTEXT, SamplingMode.GREEDY)
    rows = (RowResult(0, (1,), True),)
    for _ in range(17):
        policy.choose([CONTEXT] * 4, [4, 0, 0])
        policy.note(plan, StepResult(rows, proposals=counts([0.9, 0.05, 0.02, 0.01])), 0.005)
    assert policy.acceptance.tokens(shape) > before + 0.5
