"""Graph semantics on a CPU: replays equal eager rounds bit for bit, and what a graph would get wrong shows."""

from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy, sampled, steps, submit, tokens
from support.grids import few_of
from support.memory import buffer_tensors
from treetop import LLM
from treetop.cache.allocator import FREE
from treetop.debug.two_group import write_two_group_pair
from treetop.engine import rounds
from treetop.engine.graphs import GraphSim
from treetop.engine.rounds import Eager
from treetop.types.errors import CheckError
from treetop.types.layout import SpecShape
from treetop.types.messages import RoundPlan
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode

SHAPE = (2, 3, 6)
SHAPES = [None, (1, 1, 2), (1, 4, 5), (2, 1, 3), (2, 3, 6), (4, 3, 12), (8, 2, 40)]
EVERY_OTHER = [pytest.param(each, marks=[pytest.mark.slow] * (i % 2)) for i, each in enumerate(SHAPES)]
"""Of a day."""


@pytest.fixture(scope="module")
def two_group(tmp_path_factory):
    return write_two_group_pair(tmp_path_factory.mktemp("two-group"), window=9)


def watch(llm, prompts, params, arrive=1):
    """Serve requests that arrive `arrive` steps apart: outputs, and (bucket, choice, rows, trees, paths) of rounds."""
    seen = []

    def observe(plan, tree, accepted):
        seen.append((tree.tokens.shape[0], plan.choice, plan.rows, tree, accepted))

    llm.engine.observer = observe
    requests, waiting = [], list(zip(prompts, params, strict=True))
    while waiting:
        prompt, each = waiting.pop(0)
        requests += submit(llm, [prompt], each)
        run = steps(llm)
        for _ in range(arrive if waiting else 10_000):
            if next(run, None) is None:
                break
    return [tuple(request.output_ids) for request in requests], seen


def assert_same(ours, theirs):
    """Every round has the same rows, and its live rows the same bits."""
    assert len(ours) == len(theirs)
    for (*key, tree, accepted), (*other_key, other_tree, other_accepted) in zip(ours, theirs, strict=True):
        assert key == other_key
        live = len(key[2])
        for value, other in ((tree, other_tree), (accepted, other_accepted)):
            for name in value.__dataclass_fields__:
                assert torch.equal(getattr(value, name)[:live], getattr(other, name)[:live]), name


def mixed(count):
    """Greedy, sampled and filtered requests of different lengths, so that a batch grows, shrinks and changes choice."""
    kinds = [greedy, lambda n: sampled(n, n), lambda n: sampled(n, n, top_k=4, top_p=0.9)]
    return [kinds[i % 3](6 + 5 * (i % 4)) for i in range(count)]


# ---------------------------------------------------------------------------------------------- equal to eager


@pytest.mark.parametrize("shape", few_of(EVERY_OTHER, 0, 2))
def test_replays_equal_eager_rounds_bit_for_bit(strong_pair, shape):
    """Batches that grow to eight rows and shrink to one: every bucket, partly and wholly filled, every choice.

    At levels 0 and 3, both against eager rounds at level 0, whose bits no poison may change.
    """
    prompts = strong_pair.prompts([9, 17, 3, 22, 5, 12, 8, 30])
    seen = {}
    for graphs, level in (("off", 0), ("sim", 0), ("sim", 3)):
        llm = build(strong_pair, shape, graphs=graphs, check_level=level, page_size=4, context_length=96)
        assert isinstance(llm.engine.launcher, GraphSim if graphs == "sim" else Eager)
        seen[graphs, level] = watch(llm, prompts, mixed(8), arrive=2)
    eager, eager_rounds = seen.pop(("off", 0))
    for ids, rounds_of_replays in seen.values():
        assert ids == eager
        assert_same(rounds_of_replays, eager_rounds)
        assert {bucket for bucket, *_ in rounds_of_replays} == {1, 2, 4, 8}


@pytest.mark.slow
def test_every_number_of_live_rows_in_a_bucket_equals_eager(strong_pair):
    """One to seven rows: each lies in (previous bucket, bucket], and every one occurs three times."""
    prompts = strong_pair.prompts([5] * 7)
    params = [greedy(16 * n) for n in range(1, 8)]
    seen = {}
    for graphs in ("off", "sim"):
        llm = build(strong_pair, SHAPE, graphs=graphs, page_size=4, context_length=128, max_running_requests=7)
        seen[graphs] = watch(llm, prompts, params)
    assert_same(seen["off"][1], seen["sim"][1])
    live = [len(rows) for _, _, rows, *_ in seen["sim"][1]]
    assert all(live.count(n) >= 3 for n in range(1, 8))
    assert {(bucket, len(rows)) for bucket, _, rows, *_ in seen["sim"][1]} == {
        (bucket, n) for n, bucket in zip(range(1, 8), (1, 2, 4, 4, 7, 7, 7), strict=True)
    }


@pytest.mark.parametrize("level", [0, 3])
def test_replays_equal_eager_rounds_with_a_window(two_group, level):
    """Two KV groups of the target, pages leaving the window, and the draft's."""
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    prompts = [[(5 * i + 3 * j) % 96 for j in range(n)] for i, n in enumerate((30, 4, 17))]
    seen = {}
    for graphs in ("off", "sim"):
        options = {"dtype": "float64", "page_size": 2, "context_length": 96, "check_level": level, "graphs": graphs}
        seen[graphs] = watch(LLM(str(two_group[0]), str(two_group[1]), **options, **shape), prompts, mixed(3))
    assert seen["off"][0] == seen["sim"][0]
    assert_same(seen["off"][1], seen["sim"][1])


def test_a_batch_without_live_rows_is_legal_and_leaves_no_trace(strong_pair):
    """Zero rows: the dummy row alone is run, and neither state nor pages change."""
    llm = build(strong_pair, SHAPE, graphs="sim", page_size=4)
    submit(llm, strong_pair.prompts([9]), greedy(20))
    run = steps(llm)
    while not isinstance((plan := next(run)[0]), RoundPlan):
        pass
    device = llm.engine.runner
    kept = [
        device.state.committed,
        device.state.root,
        device.state.draft.hidden,
        *(p.data for p in device.pools.values()),
    ]
    before = [tensor.clone() for tensor in kept]
    assert llm.engine.step(replace(plan, rows=(), edits=(), freed=(), committed_bound=0)).rows == ()
    for old, tensor in zip(before, kept, strict=True):
        assert torch.equal(old, tensor)


# ---------------------------------------------------------------------------------------------- what must not matter


def prepared(pair, graphs="sim", rows=3):
    """An engine whose next plan is a round of `rows` rows in a bucket of four, and that plan."""
    llm = build(pair, SHAPE, graphs=graphs, page_size=4, max_running_requests=4)
    submit(llm, pair.prompts([9, 20, 5][:rows]), greedy(40))
    run = steps(llm)
    while not isinstance(next(run)[0], RoundPlan):
        pass
    return llm, llm.scheduler.plan()


def outcome(llm, plan):
    """The round's trees and paths, and the state of its rows after it."""
    kept = []
    llm.engine.observer = lambda plan, tree, accepted: kept.extend([tree, accepted])
    llm.engine.step(plan)
    live = len(plan.rows)
    tensors = {name: getattr(value, name)[:live] for value in kept for name in value.__dataclass_fields__}
    state, rows = llm.engine.runner.state, list(plan.rows)
    return tensors | {
        "committed": state.committed[rows],
        "root": state.root[rows],
        "next": state.draft.tokens[rows],
        "score": state.draft.logprob[rows],
        "hidden": state.draft.hidden[rows],
    }


def scribble_padding(llm):
    """Other content in every buffer behind the live rows."""
    for name, tensor in buffer_tensors(llm.engine.runner.buffers).items():
        lanes = tensor[:, 3:] if "tails" in name else tensor[3:]
        lanes.fill_(1 if tensor.dtype != torch.bool else True)


def scribble_everything(llm):
    for tensor in buffer_tensors(llm.engine.runner.buffers).values():
        tensor.fill_(3 if tensor.dtype != torch.bool else True)


def scribble_free_rows(llm):
    """Other content in the row that no request has, and in pages that nobody owns."""
    state = llm.engine.runner.state
    for tensor in (state.committed, state.root, state.draft.tokens, state.numbers["seed"]):
        tensor[3] = 7
    state.draft.hidden[3] = 1e9
    for group, allocator in llm.scheduler.rows.kv_cache._allocators.items():
        for page in allocator.owned_by(FREE):
            llm.engine.runner.pools[group].data[:, page * 4 : page * 4 + 4] = -1e9


def scribble_dummy_proposals(llm):
    """The dummy row's proposal, root and hidden state: legal, but others."""
    state, dummy = llm.engine.runner.state, llm.engine.layout.dummy_row
    state.root[dummy] = 9
    state.draft.tokens[dummy] = 4
    state.draft.hidden[dummy] = 5.0


@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize(
    "scribble", [scribble_padding, scribble_everything, scribble_free_rows, scribble_dummy_proposals]
)
def test_content_that_no_live_row_owns_changes_no_bit_of_a_live_row(strong_pair, scribble, graphs):
    """Padding lanes, scratch, free rows, free pages, the dummy's own state: live rows give the same bits."""
    sound, scribbled = prepared(strong_pair, graphs), prepared(strong_pair, graphs)
    scribble(scribbled[0])
    expected, found = outcome(*sound), outcome(*scribbled)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------------------------------- what must show


def reads_the_tree_of_the_last_round(device, key, max_kv_len):
    """A draft phase that decides by what its output still holds."""
    tokens = device.buffers.tree_of(key.bucket, key.shape).tokens
    stale = tokens[:, -1].clone()
    SOUND[Phase.DRAFT](device, key, max_kv_len)
    tokens[:, -1] = torch.where(stale >= 0, tokens[:, -1], stale)


def adds_to_the_features(device, key, max_kv_len):
    """A verify phase that accumulates into an output it should overwrite."""
    aux_hidden = device.buffers.aux_hidden_of(key.bucket, key.shape)
    before = aux_hidden.clone()
    SOUND[Phase.VERIFY](device, key, max_kv_len)
    aux_hidden.add_(0 * before)


def keeps_k_v_in_a_tail(device, key, max_kv_len):
    """A draft extend that finds the verify tail as the phase before left it."""
    SOUND[Phase.EXTEND](device, key, max_kv_len)
    tail = next(iter(device.buffers.verify_tails.values()))
    device.state.draft.hidden[device.buffers.rows[: key.bucket]] += 0 * tail[0, : key.bucket, 0, 0, 0, :1]


SOUND = dict(rounds.ROUND)
PLANTED = [
    (Phase.DRAFT, reads_the_tree_of_the_last_round),
    (Phase.VERIFY, adds_to_the_features),
    (Phase.EXTEND, keeps_k_v_in_a_tail),
]


CAUGHT = r"detect_oob: tree_token|detect_nan: (features|hidden|topk_logprob)|padded batch: a round of the dummy row"


@pytest.mark.parametrize(("phase", "planted"), PLANTED)
def test_a_phase_that_reads_scratch_before_it_writes_it_shows(strong_pair, monkeypatch, phase, planted):
    """What an eager run leaves behind by luck is poison in a replay: at level 2 a probe names it."""
    prompts = strong_pair.prompts([9, 20, 5])
    expected = build(strong_pair, SHAPE, graphs="off", check_level=2).generate(prompts, greedy(30))
    monkeypatch.setitem(rounds.ROUND, phase, planted)
    lucky = build(strong_pair, SHAPE, graphs="off", check_level=2).generate(prompts, greedy(30))
    assert tokens(lucky) == tokens(expected), "eagerly the fault does not show"
    with pytest.raises(CheckError, match=CAUGHT):
        build(strong_pair, SHAPE, graphs="sim", check_level=2).generate(prompts, greedy(30))


@pytest.mark.parametrize(("phase", "planted"), PLANTED)
def test_a_phase_that_reads_scratch_shows_eagerly_at_level_3(strong_pair, monkeypatch, phase, planted):
    """Level 3 poisons tails and outputs between rounds, whoever launches them."""
    monkeypatch.setitem(rounds.ROUND, phase, planted)
    with pytest.raises(CheckError, match=CAUGHT):
        build(strong_pair, SHAPE, graphs="off", check_level=3).generate(strong_pair.prompts([9]), greedy(30))


def test_host_numbers_are_those_of_the_capture(strong_pair, monkeypatch):
    """A replay sees the key and the bound it was captured with, whatever the round's own bound is."""
    seen = []

    def noted(device, key, max_kv_len):
        seen.append((key, max_kv_len))
        SOUND[Phase.VERIFY](device, key, max_kv_len)

    monkeypatch.setitem(rounds.ROUND, Phase.VERIFY, noted)
    for graphs in ("off", "sim"):
        llm = build(strong_pair, SHAPE, graphs=graphs, check_level=0, context_length=96)
        seen.clear()
        llm.generate(strong_pair.prompts([9, 20, 5]), greedy(20))
        bounds = {max_kv_len for _, max_kv_len in seen}
        assert bounds == {96} if graphs == "sim" else len(bounds) > 3
        assert {key.bucket for key, _ in seen} <= {1, 2, 4}
    captured = set(llm.engine.launcher._captured)
    assert {key for key, _ in captured if key.bucket} == {  # the others are prompts alone
        rounds.RoundKey(bucket, SpecShape(*SHAPE), choice, held)
        for bucket in (1, 2, 4, 8)
        for choice in SamplingMode
        for held in ((False, True) if choice.processes else (False,))
    }
    assert all(phase in Phase for _, phase in captured)


def test_a_host_number_read_in_a_phase_is_baked_in(strong_pair, monkeypatch):
    """A phase that looks at the host's bound to save work is right eagerly and wrong as a graph, and GraphSim tells."""

    armed = []

    def skips(device, key, max_kv_len):
        SOUND[Phase.EXTEND](device, key, max_kv_len)
        if armed and max_kv_len > 30:  # a host decision: eagerly the number is the batch's own
            device.state.draft.hidden[device.buffers.rows[: key.bucket]] = float("nan")

    monkeypatch.setitem(rounds.ROUND, Phase.EXTEND, skips)
    prompts = strong_pair.prompts([9])
    eager, sim = (build(strong_pair, SHAPE, graphs=graphs, check_level=2) for graphs in ("off", "sim"))
    armed.append(True)
    eager.generate(prompts, greedy(20))
    with pytest.raises(CheckError, match="detect_nan: hidden"):
        sim.generate(prompts, greedy(20))


def test_the_next_replay_scribbles_over_what_the_last_one_left(strong_pair):
    """Outputs are poisoned before a replay: a view that was kept past it does not hold last round's numbers."""
    llm, plan = prepared(strong_pair)
    llm.scheduler.commit(plan, llm.engine.step(plan))
    buffers, poisoned = llm.engine.runner.buffers, []
    sound = llm.engine.launcher._captured
    key = next(k for k, _ in sound if (k.bucket, k.shape, k.choice) == (4, SpecShape(*SHAPE), SamplingMode.GREEDY))

    def look():
        poisoned.append((buffers.tree.logprob.isnan().all(), buffers.accepted.tokens.max() < 0))
        sound_draft()

    sound_draft = sound[key, Phase.DRAFT]
    sound[key, Phase.DRAFT] = look
    kept = buffers.accepted.tokens
    plan = llm.scheduler.plan()
    llm.engine.step(plan)
    assert poisoned == [(True, True)]
    assert kept[: len(plan.rows)].min() >= 0
