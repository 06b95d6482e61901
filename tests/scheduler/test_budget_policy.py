"""A budget of nodes among the shapes that a policy chooses from: what it is thought to accept, and when it is taken."""

import random
from math import exp

import pytest

from support.shape_loads import CONTEXT, layout
from treetop.bench.modelled_costs import costs_of_a_gpu
from treetop.scheduler.acceptance import AcceptanceEstimate
from treetop.scheduler.policy import AdaptiveShape
from treetop.types.costs import HeadAcceptance
from treetop.types.ids import Row
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan, RowResult, StepResult
from treetop.types.sampling import SamplingMode

BEST = (0.79, 0.79, 0.79, 0.77, 0.77, 0.75)
HEAD, LEAST = HeadAcceptance(BEST, 0.5), 1 / 3
SHORT, LONG, BUDGET = SpecShape(1, 3, 4), SpecShape(1, 4, 5), SpecShape(1, 6, 7, 256)


def chains(dice, eases):
    """Of each row the chances that a path gets to depth 1, 2, ..: the draft says of each node how sure it is."""
    found = []
    for ease in eases:
        path, line = 1.0, []
        for best in BEST:
            mean = (best - LEAST) / (1 - LEAST)
            own = 1 / (1 + (1 - mean) / mean * exp(-ease))
            path *= LEAST + (1 - LEAST) * dice.betavariate(own, 1 - own)
            line.append(path)
        found.append(line)
    return found


def cut(lines, total):
    """How many drafts each row has of the best `total`."""
    best = sorted(((chance, row) for row, line in enumerate(lines) for chance in line), reverse=True)[:total]
    return [sum(row == own for _, own in best) for row in range(len(lines))]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6])
def test_what_a_budget_accepts_is_foretold(nodes):
    """By mean chances alone, of rows that are alike but for what the draft says of each node."""
    dice, rows = random.Random(nodes), 1000
    lines = chains(dice, [0.0] * rows)
    kept = cut(lines, rows * (nodes - 1))
    true = 1 + sum(sum(line[:count]) for line, count in zip(lines, kept, strict=True)) / rows
    known = AcceptanceEstimate([BUDGET, SpecShape(1, 6, 7)], HEAD)
    assert known.tokens(BUDGET, nodes=nodes) == pytest.approx(true, rel=0.05)
    assert known.tokens(BUDGET, nodes=nodes - 1) < known.tokens(BUDGET, nodes=nodes)
    assert known.tokens(BUDGET, nodes=7) == known.tokens(SpecShape(1, 6, 7))


def played(shapes, rows, rounds, fixed=None):
    """(tokens a second, shapes) of rounds of rows that differ."""
    dice, table, room = random.Random(3), costs_of_a_gpu(shapes), layout()
    eases = [dice.gauss(0, 1) for _ in range(rows)]
    policy, chosen, seconds, tokens = AdaptiveShape(table, room, lambda: HEAD), [], 0.0, 0
    for index in range(rounds):
        shape = fixed or policy.choose([CONTEXT] * rows, [rows, 0, 0])
        lines = chains(dice, eases)
        kept = cut(lines, shape.nodes_at(rows) - rows) if shape.node_budget else [shape.num_steps] * rows
        lengths = []
        for line, count in zip(lines, kept, strict=True):
            uniform = dice.random()
            lengths.append(sum(chance > uniform for chance in line[:count]))
        took = table.seconds(rows, shape, CONTEXT)
        listed = tuple(Row(row) for row in range(rows))
        results = [RowResult(row, (5,) * (1 + n), True, ranks=(0,) * n) for row, n in zip(listed, lengths, strict=True)]
        policy.note(RoundPlan((), (), listed, shape, CONTEXT, SamplingMode.GREEDY), StepResult(tuple(results)), took)
        chosen.append(shape)
        if index >= rounds // 3:
            seconds, tokens = seconds + took, tokens + rows + sum(lengths)
    return tokens / seconds, chosen


def test_a_budget_is_taken_where_it_pays(monkeypatch):
    """At 64 rows that differ; the mean of what such rounds give is no less than of the best other shape."""
    shapes = (PLAIN, SHORT, LONG, BUDGET)
    monkeypatch.setattr("support.shape_loads.SHAPES", shapes)
    speed, chosen = played(shapes, 64, 180)
    fixed = {shape: played(shapes, 64, 120, shape)[0] for shape in shapes}
    assert chosen[60:].count(BUDGET) > 90
    assert speed > 0.97 * max(fixed.values())
    assert fixed[BUDGET] > 1.02 * max(fixed[shape] for shape in shapes if shape != BUDGET)
