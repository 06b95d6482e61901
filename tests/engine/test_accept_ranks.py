"""Which of its parent's proposals each accepted draft was: told with the results that the host reads anyway."""

import pytest

from support.engines import build, greedy, sampled
from treetop.bench.compare import acceptance_by_depth, acceptance_by_rank
from treetop.types.layout import SpecShape


def ranks_of_trees(seen, row):
    """By the trees: how many siblings stand before each node of the path, for each round of a row."""
    found = []
    for tree, accepted in seen:
        length, parent = int(accepted.accept_len[row]), tree.parent[row].tolist()
        path = accepted.path[row, : length + 1].tolist()
        siblings = [[node for node in range(1, len(parent)) if parent[node] == up] for up in path]
        found.append(tuple(of.index(node) for of, node in zip(siblings, path[1:], strict=False)))
    return found


@pytest.mark.parametrize(("graphs", "overlap"), [("off", False), ("sim", False), ("off", True)])
def test_each_accepted_draft_has_its_rank(strong_pair, graphs, overlap):
    """Siblings stand in rank order, so that a node's rank is the number of those before it."""
    llm, seen = build(strong_pair, (4, 3, 12), graphs=graphs, overlap=overlap, max_running_requests=2), []
    llm.engine.observer = lambda plan, tree, accepted: seen.append((tree, accepted))
    outputs = llm.generate(strong_pair.prompts([5, 9]), [greedy(40), sampled(3, 40)])
    for row, output in enumerate(outputs):
        told = output.metrics.accept_ranks
        assert list(map(len, told)) == list(output.metrics.accept_lens)
        assert row or ranks_of_trees(seen, row)[: len(told)] == list(told)
    assert {rank for output in outputs for ranks in output.metrics.accept_ranks for rank in ranks} > {0}


def test_rates_by_rank_add_up_to_how_often_a_path_went_on(strong_pair):
    shape = SpecShape(4, 3, 12)
    llm = build(strong_pair, (4, 3, 12))
    outputs = llm.generate(strong_pair.prompts([5, 9, 7]), greedy(40))
    lens = [length for output in outputs for length in output.metrics.accept_lens]
    by_rank, by_depth = acceptance_by_rank(outputs, shape), acceptance_by_depth(lens, shape.num_steps)
    asked = sum(min(length + 1, shape.num_steps) for length in lens)
    assert sum(by_rank) == pytest.approx(sum(lens) / asked)
    assert len(by_rank) == shape.topk
    assert by_depth[0] == pytest.approx(sum(length > 0 for length in lens) / len(lens))


def test_plain_rounds_have_no_ranks(strong_pair):
    (output,) = build(strong_pair, None).generate(strong_pair.prompts([5]), greedy(6))
    assert set(output.metrics.accept_ranks) == {()}
