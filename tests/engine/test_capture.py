"""Capturing at start, with a recorder that runs on a CPU: what is captured when, in which order, and that it serves."""

from dataclasses import replace

import pytest

from support.engines import accept_lens, build, greedy, sampled, tokens
from support.fake_recorder import FakeRecorder
from support.grids import few_values
from treetop.checks.host import check_round
from treetop.engine.cuda_graphs import CudaGraphs, greedy_keys, num_rounds
from treetop.engine.rounds import RoundKey
from treetop.kernels.table import Ops
from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.layout import PLAIN, SpecShape, shapes_beside
from treetop.types.messages import RoundPlan
from treetop.types.parallel import PlaceholderRank, SingleRank
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode

TREE = SpecShape(4, 5, 16)


def with_fakes(pair, shape=(4, 5, 16), **options):
    llm, recorder = build(pair, shape, max_running_requests=6, **options), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    return llm, graphs, recorder


@pytest.mark.parametrize("shape", [None, (4, 5, 16)])
def test_every_bucket_of_the_shape_that_is_planned_is_captured_at_start_the_biggest_first(strong_pair, shape):
    """Greedy only, a graph a round, and none that no plan asks for."""
    llm, graphs, recorder = with_fakes(strong_pair, shape)
    keys = [RoundKey(bucket, TREE if shape else PLAIN, SamplingMode.GREEDY) for bucket in (6, 4, 2, 1)]
    assert greedy_keys(graphs._runner.layout) == keys
    assert recorder.recorded == keys
    assert len(graphs) == 4
    assert graphs.seconds > 0
    processed = sum(choice.processes for choice in SamplingMode)
    assert num_rounds(graphs._runner) == len(keys) * (len(SamplingMode) + processed)
    llm.generate(strong_pair.prompts([9, 20, 5, 31, 12, 7]), [greedy(6 * n) for n in range(1, 7)])
    assert set(recorder.replayed) == set(keys), "a graph was captured for nothing"


@pytest.mark.parametrize("shape", [None, (4, 5, 16)])
def test_phases_are_recorded_one_by_one_to_be_measured_and_not_kept(strong_pair, shape):
    """A target alone has none to extend; the engine's own graphs stay as they are."""
    _, graphs, recorder = with_fakes(strong_pair, shape)
    known, key = len(graphs), RoundKey(2, TREE if shape else PLAIN, SamplingMode.GREEDY)
    recorder.recorded.clear()
    runs = graphs.phases(key)
    assert list(runs) == [Phase.DRAFT, Phase.VERIFY, *([Phase.EXTEND] if shape else [])]
    assert recorder.recorded == [(phase, key) for phase in runs]
    assert len(graphs) == known
    for run in runs.values():
        run()
    assert recorder.replayed == recorder.recorded


def test_a_start_captures_sampled_rounds_while_it_has_time(strong_pair):
    """Those with few nodes first, each once, then those with penalties; the first such requests then ask for none.
    Ranks stop together.
    """
    llm, graphs, recorder = with_fakes(strong_pair)
    greedy_ones, before = [*recorder.recorded], graphs.memory
    graphs.capture_sampled(0.0)
    assert recorder.recorded == greedy_ones
    graphs.capture_sampled(60.0)
    drawn = [RoundKey(b, TREE, choice) for choice in (SamplingMode.SAMPLE, SamplingMode.PROCESS) for b in (1, 2, 4, 6)]
    assert recorder.recorded[len(greedy_ones) :] == drawn
    assert (graphs.memory.captured, graphs.memory.rounds) == (12, before.rounds)
    params = [sampled(3, 12), sampled(4, 9, presence_penalty=0.5), greedy(7)]
    llm.generate(strong_pair.prompts([9, 20, 5]), params)
    assert len(recorder.recorded) == 12, "a request waited for a capture"

    class Late(SingleRank):
        def minimum(self, number):
            return 0

    llm, graphs, recorder = with_fakes(strong_pair)
    graphs._runner.ops.expert_ranks = Late()
    graphs.capture_sampled(60.0)
    assert recorder.recorded == greedy_ones, "another rank has no time left"


def test_capturing_runs_on_dummy_rows_and_puts_the_row_list_back(strong_pair):
    llm, graphs, recorder = with_fakes(strong_pair)
    dummy = llm.engine.layout.dummy_row
    assert all(set(rows) == {dummy} for lists in recorder.rows for rows in lists)
    row_lists = llm.engine.runner.buffers.row_lists
    row_lists.copy_(row_lists.new_tensor([[3, 1, 4, 0, 2, 5], [3, 1, 4, 6, 6, 5]]))
    graphs.capture([RoundKey(4, TREE, SamplingMode.SAMPLE)])
    assert row_lists.tolist() == [[3, 1, 4, 0, 2, 5], [3, 1, 4, 6, 6, 5]]


@pytest.fixture(scope="module")
def captured(strong_pair):
    """Without a prefix cache, so that each test begins as the first does."""
    return with_fakes(strong_pair, disable_radix_cache=True)


@pytest.mark.parametrize(
    "params",
    few_values(
        [
            greedy(30),
            sampled(3, 30),
            sampled(3, 30, top_p=0.9),
            sampled(3, 30, frequency_penalty=0.6),
            sampled(3, 30, repetition_penalty=1.5, logprobs=2),
        ],
        0,
        2,
        4,
    ),
    ids=[choice.value for choice in SamplingMode],
)
def test_captured_rounds_give_the_tokens_of_eager_ones(strong_pair, captured, params):
    """The batch drains through the buckets; every choice, one after another on one engine; tokens and accepted lengths
    are those of an eager engine of its own."""
    prompts = strong_pair.prompts([9, 20, 5, 31, 12, 7])
    eager = build(strong_pair, max_running_requests=6, graphs="off").generate(prompts, params)
    llm, _, recorder = captured
    recorder.replayed.clear()
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(eager)
    assert accept_lens(outputs) == accept_lens(eager)
    assert [each.logprobs for each in outputs] == [each.logprobs for each in eager]
    assert {key.choice for key in recorder.replayed} == {SamplingMode.of(params)}
    assert len({key.bucket for key in recorder.replayed}) >= 2


def test_a_sampled_round_is_captured_when_it_is_asked_for_and_only_once(strong_pair):
    llm, graphs, recorder = with_fakes(strong_pair)
    known = len(recorder.recorded)
    prompts = strong_pair.prompts([9])
    llm.generate(prompts, greedy(20))
    assert len(recorder.recorded) == known
    llm.generate(prompts, sampled(1, 20))
    llm.generate(prompts, sampled(2, 20))
    sampled_key = RoundKey(1, TREE, SamplingMode.SAMPLE)
    assert recorder.recorded[known:] == [sampled_key]
    recorder.replayed.clear()
    graphs.launch(sampled_key, 10)
    assert recorder.replayed == [sampled_key]


def test_ranks_that_share_experts_capture_what_may_be_held_with_what_may_not(strong_pair):
    """Capturing runs a round, with exchanges in it, and another rank's row may be the one that is constrained."""
    _, graphs, recorder = with_fakes(strong_pair)
    whole, held = (RoundKey(2, TREE, SamplingMode.PROCESS, grammar_masked=each) for each in (False, True))
    both = [whole, (Phase.DRAFT, held), held]
    for ranks, first, expected in ((1, whole, [whole]), (2, whole, both), (2, held, both)):
        graphs._runner.ops.expert_ranks = PlaceholderRank(ranks)
        graphs.release()
        recorder.recorded.clear()
        graphs.launch(first, 10)
        assert recorder.recorded == expected
        recorder.recorded.clear()
        graphs.launch(held if first is whole else whole, 10)
        assert not recorder.recorded or ranks == 1


@pytest.mark.parametrize("apart", [True, False])
def test_filters_share_the_graph_of_sampling_where_both_are_the_same_work(strong_pair, monkeypatch, apart):
    monkeypatch.setattr(Ops, "filters_apart", apart)
    _, graphs, recorder = with_fakes(strong_pair)
    known = len(recorder.recorded)
    graphs.capture([RoundKey(4, TREE, SamplingMode.SAMPLE), RoundKey(4, TREE, SamplingMode.FILTER)])
    assert len(recorder.recorded) == known + (2 if apart else 1)
    assert num_rounds(graphs._runner) == 4 * ((5 if apart else 4) + sum(choice.processes for choice in SamplingMode))


@pytest.mark.slow
def test_shapes_that_are_chosen_are_captured_in_all_buckets_before_anybody_waits(strong_pair, monkeypatch):
    """The round with most nodes comes first, for it makes the pool: a fault of the order makes a pool a shape.

    No greedy round is captured while requests are served, and what is captured then collects no garbage.
    """
    llm, recorder = build(strong_pair, speculative_policy="auto", max_running_requests=32), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    layout, rounds = llm.engine.layout, [key for key in recorder.recorded if not key.catches_up]
    assert {key.bucket for key in rounds} == {*layout.buckets} > {*layout.coarse_buckets}
    nodes = [key.bucket * key.shape.num_draft_tokens for key in rounds]
    assert nodes == sorted(nodes, reverse=True)
    known = len(recorder.recorded)
    collected = []
    monkeypatch.setattr("gc.collect", lambda *_: collected.append(1))
    llm.generate(strong_pair.prompts([9] * 20), [greedy(4 + n) for n in range(20)])
    assert len(recorder.recorded) == known
    llm.generate(strong_pair.prompts([9]), sampled(1, 8))
    assert len(recorder.recorded) > known
    assert not collected


def test_a_chosen_shape_has_rounds_of_few_nodes_only(strong_pair):
    """At 256 rows an engine that chooses has no graph of a tree of 16, and its table of costs none."""
    shapes = shapes_beside(TREE)
    layout = replace(build(strong_pair, max_running_requests=2).engine.layout, shapes=shapes, max_requests=256)
    at = {rows: {shape.num_draft_tokens for shape in layout.shapes_at(rows)} for rows in (1, 64, 96, 128, 192, 256)}
    assert at[1] == at[64] == {1, 3, 4, 6, 8, 16}
    assert at[96] == at[128] == {1, 3, 4, 6, 8}
    assert at[192] == {1, 3, 4}
    assert at[256] == {1, 3, 4}
    assert [layout.most_rows(shape) for shape in shapes] == [256, 256, 256, 128, 128, 64]
    assert replace(layout, shapes=(TREE,)).shapes_at(256) == (TREE,)
    rows = tuple(Row(row) for row in range(96))
    plan = RoundPlan((), (), rows, TREE, 10, SamplingMode.GREEDY)
    with pytest.raises(CheckError, match="of 96 rows is not one of those"):
        check_round(plan, layout)
    check_round(replace(plan, rows=rows[:64]), layout)
