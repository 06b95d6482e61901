"""Prompts in captured rounds: chunks packed in blocks into a batch of fixed size change no token."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.fake_recorder import FakeRecorder
from support.families import FAMILIES
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.prompt_blocks import block_numbers
from treetop.engine.rounds import RoundKey
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.mixed import MixedSteps
from treetop.types.errors import CheckError
from treetop.types.ids import FULL, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape
from treetop.types.messages import Chunk, MixedPlan, PrefillPlan, RoundPlan
from treetop.types.sampling import SamplingMode
from treetop_debug.mixed_faults import PACKED_FAULTS

SHAPE = (2, 3, 6)
LENGTHS = [9, 60, 1, 17, 70, 22, 61, 5, 33]
OPTIONS = {
    "chunked_prefill_size": 32, "page_size": 4, "max_running_requests": 4, "graphs": "sim", "check_level": 3,
    "prefill_graph_max_tokens": 0,
}  # fmt: skip
"""Batches of 4, 8, 16 and 32 tokens in blocks of 2, beside rounds alone."""


def asked(count):
    """Greedy, sampled and filtered requests; each fifth asks what is not packed."""
    kinds = [
        lambda i: greedy(26 - i),
        lambda i: sampled(i, 22),
        lambda i: sampled(i, 18 + i, top_k=4),
        lambda i: greedy(20),
        lambda i: sampled(i, 12, logprobs=2, temperature=0.8),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def run(llm, prompts, params):
    """What requests get, and how many mixed steps there were of each size."""
    requests = submit(llm, prompts, params)
    plans = [plan for plan, _ in pump(llm)]
    sizes = Counter(plan.prefill.packed for plan in plans if isinstance(plan, MixedPlan))
    return [tuple(request.output_ids) for request in requests], sizes


@pytest.fixture(scope="module")
def plainly(strong_pair):
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None).generate(prompts, params))


@pytest.mark.parametrize("shape", [None, (1, 3, 4), SHAPE])
def test_no_token_changes_in_blocks(strong_pair, plainly, shape, monkeypatch):
    """Every size comes up, several chunks share a batch, and what is not packed goes as it did; all poisoned."""
    prompts, params, expected = plainly
    monkeypatch.setattr("treetop.scheduler.mixed._STEPS", 2)  # all sizes come up
    llm = build(strong_pair, shape, mixed_chunk="on", **OPTIONS)
    got, sizes = run(llm, prompts, params)
    assert got == expected
    assert len({*sizes} - {0}) > 2, sizes
    assert run(llm, prompts, params)[0] == expected, "with prefixes that are found"
    assert not llm.scheduler.rows.by_row


def test_several_chunks_share_a_batch():
    """Line i ends chunk i; blocks of nobody are the dummy row's."""
    chunks = [Chunk(Row(3), 10, (1, 2, 3, 4, 5, 6, 7, 8, 9), 77), Chunk(Row(1), 0, (11, 12), None)]
    numbers = block_numbers(chunks, 20, 4, dummy_row=8, no_draft=(Row(1),))
    *columns, drafting = [numbers[i * 6 : i * 6 + 5] for i in range(6)]  # five blocks, and one for the alignment
    assert columns == [[3, 1, 3, 3, 8], [3, 1, 8, 8, 8], [8, 0, 0, 4, 0], [1, 2, 4, 4, 0], [77, -1, 5, 9, 0]]
    assert drafting == [3, 8, 3, 3, 8]
    assert numbers[36:] == [9, 0, 0, 0, 11, 12, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]
    with pytest.raises(CheckError, match="need 4 blocks of 4, have 3"):
        block_numbers(chunks, 12, 4, dummy_row=8)


def test_retracted_requests_get_the_same(strong_pair, plainly):
    prompts, params, expected = plainly
    options = OPTIONS | {"context_length": 96, "max_total_tokens": 130}
    llm = build(strong_pair, SHAPE, mixed_chunk="on", **options)
    assert run(llm, prompts, params)[0] == expected
    assert llm.scheduler.num_retractions > 0


def test_one_graph_holds_a_round_with_its_prompts(strong_pair, plainly):
    """Greedy ones are captured at start, of coarse buckets alone; nothing is launched between two graphs."""
    prompts, params, expected = plainly
    llm, recorder = build(strong_pair, SHAPE, mixed_chunk="on", **OPTIONS), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    at_start = {key for key in recorder.recorded if isinstance(key, RoundKey) and key.prompts}
    assert {(key.bucket, key.prompts) for key in at_start} == {(b, size) for b in (1, 2, 4) for size in (4, 8, 16, 32)}
    assert recorder.recorded[0] == max(at_start, key=lambda key: 6 * key.bucket + key.prompts), (
        "the largest makes the pool"
    )
    got, sizes = run(llm, prompts, params)
    assert got == expected
    replayed = Counter(key.prompts for key in recorder.replayed if isinstance(key, RoundKey) and key.prompts)
    assert replayed == {size: count for size, count in sizes.items() if size}


@pytest.mark.parametrize(("budget", "buckets"), [(None, {1}), (8, {1, 2, 4})])
def test_a_start_counts_nodes_as_rounds_do(strong_pair, budget, buckets, monkeypatch):
    """Rounds of too many nodes are not captured with prompts; a budget has fewer."""
    monkeypatch.setattr("treetop.types.layout.MAX_NODES_BESIDE_PROMPTS", 8)
    llm, recorder = (
        build(strong_pair, SHAPE, mixed_chunk="on", speculative_node_budget=budget, **OPTIONS),
        FakeRecorder(),
    )
    CudaGraphs(llm.engine.runner, recorder).capture_all()
    assert {key.bucket for key in recorder.recorded if isinstance(key, RoundKey) and key.prompts} == buckets


KINDS = ("gemma4", "glm 5.2")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in KINDS else pytest.mark.slow, id=each) for each in FAMILIES]
)
def test_no_token_of_any_family_changes(name, tmp_path):
    """Windows, sinks, latents, indexers, experts; recurrent layers, whose blocks would go on from each other, are not
    packed.
    """
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    dice = random.Random(name)
    prompts = [[dice.randrange(4, 12) for _ in range(length)] for length in (5, 40, 13, 1, 27, 33)]
    options = OPTIONS | {"max_running_requests": 3, "context_length": 96}
    expected = tokens(build(pair, None, **options).generate(prompts, greedy(14)))
    llm = build(pair, SHAPE, mixed_chunk="on", **options)
    got, sizes = run(llm, prompts, greedy(14))
    assert got == expected
    assert sum(sizes.values()) > 2
    assert all(sizes) == (not llm.engine.layout.state_groups)


@pytest.mark.parametrize("name", PACKED_FAULTS)
def test_each_fault_shows(strong_pair, name):
    """By its guard's words, or in the tokens."""
    fault, prompts = PACKED_FAULTS[name], strong_pair.prompts([9, 30, 17, 44, 26])
    options = OPTIONS | {"max_running_requests": 3, "disable_radix_cache": True}

    def got():
        return run(build(strong_pair, SHAPE, mixed_chunk="on", **options), prompts, greedy(16))[0]

    expected = tokens(build(strong_pair, None, **options).generate(prompts, greedy(16)))
    with fault.active():
        if fault.level is None:
            assert got() != expected
        else:
            with pytest.raises(CheckError, match=fault.guard):
                got()


def round_of_rows(rows, choice=SamplingMode.GREEDY):
    return RoundPlan((), (), tuple(map(Row, range(rows))), PLAIN, 0, choice)


def packed_step(size, rows):
    chunk = Chunk(Row(40), 0, (5,) * size, None)
    return MixedPlan(PrefillPlan((), (), (), (chunk,), SamplingMode.GREEDY, packed=size), round_of_rows(rows))


def test_costs_choose_whether_and_how_large():
    """The smallest batch in which what waits ends in four steps, larger than 512 for many rows alone; under `auto` of
    those that pay.
    """
    groups = (KVGroup(FULL, 1, paired(1, 8)),)
    sizes = (128, 256, 512, 1024)
    layout = Layout((PLAIN,), 16, 256, 4096, 8192, groups, 4096, mixed=True, prompt_sizes=sizes)
    budget = PrefillBudget(layout, PrefillCosts(512, 2048, None, 1024), None, shape=lambda: PLAIN)
    mixing = MixedSteps(layout, "auto", budget)

    def size(work, rows=32, choice=SamplingMode.GREEDY, waiting=1):
        return mixing.size(round_of_rows(rows, choice), waiting, lambda enough: min(work, enough))

    assert [size(work) for work in (1, 512, 513, 1024, 2000, 9000)] == [128, 128, 256, 256, 512, 512]
    assert (size(9000, rows=100), size(9000, rows=2, waiting=99), size(900, rows=100)) == (1024, 1024, 256)
    assert size(512, choice=SamplingMode.LOGPROBS) == size(512, choice=SamplingMode.PROCESS) == 0
    shapes = PLAIN, SpecShape(1, 3, 4), SpecShape(4, 5, 16)
    assert [mixing.wanted(64, shape) for shape in shapes] == [True, True, False]
    prefill = PrefillPlan((), (), (), (Chunk(Row(40), 0, (5,) * 2048, None),), SamplingMode.GREEDY)
    for plan, seconds in ((round_of_rows(32), 0.005), (prefill, 0.048)):
        mixing.note(plan, seconds)
        budget.note(plan, seconds, False)
    for _ in range(8):
        mixing.note(packed_step(512, 32), 0.0172)  # apart it is 12 + 5
        mixing.note(packed_step(512, 16), 0.0158)
        mixing.note(packed_step(128, 32), 0.0065)  # 3 + 5
    assert [size(work) for work in (1, 512, 513, 2000)] == [128, 128, 256, 256]
    for _ in range(8):
        mixing.note(packed_step(256, 32), 0.0116)
    assert size(2000) == 128
    assert mixing.wanted(32, PLAIN)
    assert size(9000, rows=16) == 512, "of other rows"
    fixed = MixedSteps(
        layout, "on", PrefillBudget(layout, PrefillCosts(512, 2048, None, 1024), None, tokens=256, shape=lambda: PLAIN)
    )
    assert fixed.size(round_of_rows(32), 9, lambda enough: enough) == 256


@pytest.mark.parametrize(("mode", "expected"), [("on", [512, 0, 512, 512]), ("auto", [512, 0, 0, 0])])
def test_a_widened_round_has_a_shape_that_is_allowed_and_ready(mode, expected):
    """A packed step has a coarse bucket: 40 rows may have trees of 20 at 48 rows, and not at 64. Under `auto` a round
    on trial may have more nodes than are captured at start.
    """
    tree = SpecShape(4, 5, 20)
    layout = Layout(
        (PLAIN, SpecShape(1, 3, 4), tree), 16, 64, 512, 2048, (KVGroup(FULL, 1, paired(1, 8)),), 4096, mixed=True,
        prompt_sizes=(128, 256, 512, 1024),
    )  # fmt: skip
    assert tree in layout.shapes_at(layout.bucket_for(40))
    mixing = MixedSteps(
        layout, mode, PrefillBudget(layout, PrefillCosts(512, 2048, None, 1024), None, shape=lambda: PLAIN)
    )
    rounds = [
        replace(round_of_rows(rows), shape=shape) for rows, shape in ((40, PLAIN), (40, tree), (32, tree), (16, tree))
    ]
    assert [mixing.size(round, 1, lambda enough: enough) for round in rounds] == expected
    assert not mixing.wanted(0, tree)
    assert mixing.wanted(12, tree) == (mode == "on"), "240 nodes, and 320 once it is widened"
