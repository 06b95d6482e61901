"""The reliability diagram of a bench: what it counts, and that calibrated trees are nearer to it."""

import pytest
import torch

from support.engines import build, greedy
from treetop.bench.reliability import ReliabilityCounter
from treetop.types.tree import Accepted, DraftTree


def test_every_verified_node_but_the_root_is_counted_once():
    """By its estimate; padding is not."""
    logprob = torch.tensor([[0.0, 0.95, 0.32, 0.31, 0.04]]).log().nan_to_num(neginf=0.0).repeat(2, 1)
    long = torch.zeros(2, 5, dtype=torch.int64)
    tree = DraftTree(long, long, long, torch.zeros(2, 5, 5, dtype=torch.bool), logprob)
    path = torch.tensor([[0, 1, 3], [0, 2, 0]])
    lens = torch.tensor([2, 1])
    accepted = Accepted(path, lens, path, lens, torch.ones(2, dtype=torch.bool), long)
    counter = ReliabilityCounter()
    counter(type("Plan", (), {"rows": (0,)})(), tree, accepted)
    found = counter.diagram()
    assert found.nodes == (1, 0, 0, 2, 0, 0, 0, 0, 0, 1)
    assert found.accepted == (0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    torch.testing.assert_close(torch.tensor(found.estimated)[[0, 3, 9]], torch.tensor([0.04, 0.315, 0.95]))
    assert abs(found.error - (0.04 + 2 * 0.185 + 0.05) / 4) < 1e-5
    assert len(found.lines()) == 4


@pytest.mark.slow
def test_learning_brings_estimates_nearer_to_what_is_accepted(strong_pair):
    """Of a head that is far too sure, on the second pass."""
    errors = {}
    for mode in ("off", "learn"):
        llm = build(strong_pair, (4, 3, 9), speculative_calibration=mode)
        prompts = strong_pair.prompts([5, 9, 7, 11])
        llm.generate(prompts, greedy(60))
        llm.engine.observer = counter = ReliabilityCounter()
        llm.generate(prompts, greedy(60))
        errors[mode] = counter.diagram().error
    assert errors["learn"] < 0.6 * errors["off"]
