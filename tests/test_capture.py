"""Capturing at start, with a recorder that runs on a CPU: what is captured when, in which order, and that it serves."""

from collections import Counter
from dataclasses import dataclass

import pytest

from engines import accept_lens, build, greedy, sampled, tokens
from treetop.engine.cuda_graphs import CudaGraphs, greedy_keys, num_graphs
from treetop.engine.rounds import RoundKey
from treetop.spec.round_ops import TorchRoundOps
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import Choice

TREE = SpecShape(4, 5, 16)


@dataclass
class FakeGraph:
    run: object
    log: list

    def replay(self):
        self.log.append(_name(self.run))
        self.run()


class FakeRecorder:
    """Runs what it records once, as the real one does, and replays it by calling it."""

    def __init__(self):
        self.recorded, self.replayed, self.rows = [], [], []

    def record(self, run):
        run()
        self.recorded.append(_name(run))
        self.rows.append(run.args[0].buffers.rows.tolist())
        return FakeGraph(run, self.replayed)


def _name(run):
    """(phase, key) of a recorded call."""
    _, key, _ = run.args
    return Phase(run.func.__name__.removesuffix("_phase")), key


def with_fakes(pair, shape=(4, 5, 16), **options):
    llm, recorder = build(pair, shape, max_running_requests=6, **options), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.device, recorder)
    graphs.capture_all()
    return llm, graphs, recorder


def test_every_bucket_and_shape_is_captured_at_start_the_biggest_first(strong_pair):
    """Greedy only, widest tree first in a bucket, the phases of a round in their order, each once."""
    _, graphs, recorder = with_fakes(strong_pair)
    keys = [RoundKey(bucket, shape, Choice.GREEDY) for bucket in (6, 4, 2, 1) for shape in (TREE, PLAIN)]
    assert greedy_keys(graphs._device) == keys
    assert recorder.recorded == [(phase, key) for key in keys for phase in (Phase.DRAFT, Phase.VERIFY, Phase.EXTEND)]
    assert len(graphs) == 24
    assert graphs.seconds > 0
    assert num_graphs(graphs._device) == len(keys) * (2 + len(Choice))


def test_a_target_alone_has_no_extend_phase_to_capture(strong_pair):
    _, graphs, recorder = with_fakes(strong_pair, None)
    assert Counter(phase for phase, _ in recorder.recorded) == {Phase.DRAFT: 4, Phase.VERIFY: 4}
    assert len(graphs) == 8


def test_capturing_runs_on_dummy_rows_and_puts_the_row_list_back(strong_pair):
    llm, graphs, recorder = with_fakes(strong_pair)
    dummy = llm.engine.layout.dummy_row
    assert all(set(rows) == {dummy} for rows in recorder.rows)
    llm.engine.device.buffers.rows.copy_(llm.engine.device.buffers.rows.new_tensor([3, 1, 4, 0, 2, 5]))
    graphs.capture([RoundKey(4, TREE, Choice.SAMPLE)])
    assert llm.engine.device.buffers.rows.tolist() == [3, 1, 4, 0, 2, 5]


@pytest.mark.parametrize(
    "params", [greedy(30), sampled(3, 30), sampled(3, 30, top_p=0.9)], ids=["greedy", "sample", "filter"]
)
def test_captured_rounds_give_the_tokens_of_eager_ones(strong_pair, params):
    """The batch drains through the buckets; every choice; tokens and accepted lengths are the eager engine's."""
    prompts = strong_pair.prompts([9, 20, 5, 31, 12, 7])
    eager = build(strong_pair, max_running_requests=6, graphs="off").generate(prompts, params)
    llm, _, recorder = with_fakes(strong_pair)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(eager)
    assert accept_lens(outputs) == accept_lens(eager)
    assert len({key.bucket for _, key in recorder.replayed}) >= 2


def test_only_verify_is_captured_again_for_a_sampled_round_and_only_once(strong_pair):
    """Draft and extend do not read the choice: their greedy graphs serve."""
    llm, graphs, recorder = with_fakes(strong_pair)
    known = len(recorder.recorded)
    prompts = strong_pair.prompts([9])
    llm.generate(prompts, greedy(20))
    assert len(recorder.recorded) == known
    llm.generate(prompts, sampled(1, 20))
    llm.generate(prompts, sampled(2, 20))
    new = recorder.recorded[known:]
    assert new == [(Phase.VERIFY, RoundKey(1, TREE, Choice.SAMPLE))]
    recorder.replayed.clear()
    graphs.launch(RoundKey(1, TREE, Choice.SAMPLE), 10)
    greedy_key = RoundKey(1, TREE, Choice.GREEDY)
    assert recorder.replayed == [(Phase.DRAFT, greedy_key), *new, (Phase.EXTEND, greedy_key)]


@pytest.mark.parametrize("apart", [True, False])
def test_filters_share_the_graph_of_sampling_where_both_are_the_same_work(strong_pair, monkeypatch, apart):
    monkeypatch.setattr(TorchRoundOps, "filters_apart", apart)
    _, graphs, recorder = with_fakes(strong_pair)
    known = len(recorder.recorded)
    graphs.capture([RoundKey(4, TREE, Choice.SAMPLE), RoundKey(4, TREE, Choice.FILTER)])
    assert len(recorder.recorded) == known + (2 if apart else 1)
    assert num_graphs(graphs._device) == 8 * (5 if apart else 4)
