"""Prefill steps of as many blocks as their chunks take: no token changes, no step is padded to its longest prompt, and
who waits for empty rows comes in before the next round.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, islice

import pytest
import torch

from support.engines import accept_lens, build, greedy, sampled, submit, tokens
from support.families import FAMILIES
from support.prefill_runs import KINDS, LAYERS, OPTIONS, SHAPE, run
from support.tiny_models import Pair, save_random_llama
from treetop.engine.prompt_blocks import block_lines, block_numbers, num_numbers
from treetop.engine.startup.aot_compile import blocks_of
from treetop.engine.startup.profile_run import profile_steps
from treetop.scheduler.budget import PrefillBudget
from treetop.scheduler.scheduler import Scheduler
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckError
from treetop.types.ids import FULL, RequestId, Row
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape
from treetop.types.messages import Chunk, PrefillPlan, RowResult, StepResult, prefill_of
from treetop.types.requests import EngineRequest, Tenant
from treetop.types.sampling import SamplingMode, SamplingParams
from treetop_debug.mixed_faults import PACKED_FAULTS

IN_BLOCKS = OPTIONS | {"prefill_graph_max_tokens": 0, "chunked_prefill_size": 64, "max_running_requests": 8}
"""Steps of 64 tokens at most, in blocks of 4 and of 1; none is captured."""
LENGTHS = [9, 60, 1, 17, 70, 22, 8, 5, 33, 2, 30, 14, 40, 3, 12, 27, 61, 6, 19, 11, 25, 4, 90, 13]


@pytest.fixture(autouse=True)
def _leaves_tokens_out(monkeypatch):
    """As extends of many tokens do: the draft's states of lines that nobody reads are not made."""
    monkeypatch.setattr("treetop.engine.model_runner.FEW_TOKENS", 0)


def asked(count):
    """Short answers, so that several rows are free at once: greedy, sampled and filtered; each fifth asks what is not
    packed.
    """
    kinds = [
        lambda i: greedy(4 + i % 3),
        lambda i: sampled(i, 5),
        lambda i: sampled(i, 6, top_k=4),
        lambda i: greedy(6),
        lambda i: sampled(i, 4, logprobs=2, temperature=0.8),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def packed(sizes):
    """How many steps were of blocks."""
    return sum(count for (size, _), count in sizes.items() if size)


@pytest.fixture(scope="module")
def plainly(strong_pair):
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None).generate(prompts, params))


@pytest.mark.parametrize("shape", [None, pytest.param((1, 3, 4), marks=pytest.mark.slow), SHAPE])
def test_no_token_changes(strong_pair, plainly, shape):
    """Also of what a prefix cache leaves of prompts; log-probabilities go in lines, as they did."""
    prompts, params, expected = plainly
    llm = build(strong_pair, shape, **IN_BLOCKS)
    assert llm.engine.layout.prefill_sizes == ()
    sizes = Counter()
    for dice in (random.Random(1), None, random.Random(2)):
        got, of_run = run(llm, prompts, params, dice)
        assert got == expected
        assert of_run[0, 0], "log-probabilities"
        sizes += of_run
    assert packed(sizes) > 4, sizes
    assert {block for _, block in sizes} >= {1, 4}, sizes
    assert not llm.scheduler.rows.by_row


def test_beside_captured_ones(strong_pair, plainly):
    """Steps of up to 8 tokens are captured here, larger ones are of as many blocks as they take."""
    prompts, params, expected = plainly
    llm = build(strong_pair, SHAPE, **IN_BLOCKS | {"prefill_graph_max_tokens": 8})
    got, sizes = run(llm, prompts, params, random.Random(3))
    again, more = run(llm, prompts, params)
    assert got == again == expected
    sizes += more
    assert any(size in llm.engine.layout.prefill_sizes for size in sizes), sizes
    assert any(size and (size, block) not in llm.engine.layout.prefill_sizes for size, block in sizes), sizes


@pytest.mark.parametrize("seed", range(2))
def test_retracted_ones_and_rows_without_a_draft_get_the_same(strong_pair, seed):
    """Steps in which nobody drafts, some do, and all do; who is put back comes with all that it has."""
    dice, prompts = random.Random(seed), strong_pair.prompts(LENGTHS[:16], seed=seed)
    params = [replace(greedy(12 + i), speculative=dice.random() < 0.5) for i in range(16)]
    expected = tokens(build(strong_pair, None).generate(prompts, params))
    llm = build(strong_pair, SHAPE, **IN_BLOCKS, context_length=96, max_total_tokens=200)
    got, sizes = run(llm, prompts, params)
    assert got == [tuple(each) for each in expected]
    assert packed(sizes) > 2, sizes
    assert llm.scheduler.num_retractions > 0


def test_a_draft_that_reads_the_text_accepts_what_it_did(tmp_path):
    pair = Pair(*(save_random_llama(tmp_path / name, seed=5, head_dim=16, num_hidden_layers=n) for name, n in LAYERS))
    prompts = pair.prompts([1, 9, 40, 33, 17, 5, 60], seed=3)
    found = []
    for blocks in (True, False):
        llm = build(pair, (4, 4, 14), **IN_BLOCKS | {"speculative_algorithm": "STANDALONE"}, context_length=128)
        if not blocks:
            in_lines(llm.scheduler)
        outputs = llm.generate(prompts, [greedy(30)] * len(prompts))
        found.append((tokens(outputs), accept_lens(outputs)))
    assert found[0] == found[1]
    assert sum(map(sum, found[0][1]))


def in_lines(scheduler):
    """Has prompts planned in lines alone."""
    planner = scheduler._prefill
    planner._layout = replace(planner._layout, prefill_blocks=())


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in KINDS else pytest.mark.slow, id=each) for each in FAMILIES]
)
def test_no_token_of_any_family_changes(name, tmp_path):
    """Blocks of recurrent layers would go on from each other's states, and are not packed."""
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    dice = random.Random(name)
    prompts = [[dice.randrange(4, 12) for _ in range(length)] for length in (5, 40, 13, 1, 27, 33)]
    options = IN_BLOCKS | {"max_running_requests": 4, "context_length": 96}
    plain = build(pair, None, **options | {"graphs": "off"})
    assert plain.engine.layout.prefill_blocks == ()
    expected = tokens(plain.generate(prompts, greedy(14)))
    llm = build(pair, SHAPE, **options)
    got, sizes = run(llm, prompts, [greedy(14)] * len(prompts))
    assert got == expected
    assert (packed(sizes) == 0) == bool(llm.engine.layout.state_groups), (
        "recurrent blocks would go on from each other's"
    )


@pytest.mark.parametrize("name", ["packed-blocks-change-state", "packed-blocks-without-offset"])
def test_each_fault_shows(strong_pair, name):
    fault, prompts = PACKED_FAULTS[name], strong_pair.prompts([9, 30, 17, 44, 26])
    options = IN_BLOCKS | {"disable_radix_cache": True, "check_level": 1}
    expected = tokens(build(strong_pair, None, **options).generate(prompts, greedy(16)))
    with fault.active(), suppress(IndexError):
        assert run(build(strong_pair, SHAPE, **options), prompts, [greedy(16)] * 5)[0] != expected


@pytest.mark.parametrize("blocks", range(1, 8))
def test_columns_of_blocks_are_aligned(blocks):
    """To 16 bytes, as kernels are compiled for at a start, and they hold what their chunks say."""
    chunks = [Chunk(Row(3), 7, tuple(range(100, 100 + 4 * blocks - 1)), None)]
    numbers = torch.tensor(block_numbers(chunks, 4 * blocks, 4, 9))
    assert len(numbers) == num_numbers(4 * blocks, 4)
    lines = block_lines(numbers, 4 * blocks, 4)
    assert all(each.storage_offset() % 2 == 0 and each.is_contiguous() for each in lines)
    assert [*lines.rows] == [3] * blocks
    assert [*lines.ends] == [3] + [9] * (blocks - 1)
    assert [*lines.offset] == [4 * blocks - 4, *range(0, 4 * blocks - 4, 4)]
    assert [*lines.query_len] == [3] + [4] * (blocks - 1)
    assert [*lines.next_token] == [-1, *range(104, 100 + 4 * blocks, 4)][:blocks]


def test_blocks_wider_than_a_step_are_none_that_a_start_tries(strong_pair):
    """Few tokens in all: what is profiled and compiled ahead on a GPU has a block at least, and fits in a step."""
    llm = build(strong_pair, None, graphs="sim", chunked_prefill_size=512, max_running_requests=1, context_length=20)
    runner = llm.engine.runner
    assert (runner.layout.chunk, runner.layout.prefill_blocks) == (20, (32, 8))
    assert runner.layout.largest_in_blocks == ((2, 8),)
    assert {*blocks_of(runner.layout)} == {(2, 8), (1, 8)}
    with torch.inference_mode():
        for step in profile_steps(runner, SamplingMode.SAMPLE):
            step()
    assert tokens(llm.generate(strong_pair.prompts([15]), [greedy(3)]))


def test_a_start_tries_steps_whose_tokens_are_of_the_vocabulary(strong_pair):
    """With a draft, which reads what stands behind each line: of more blocks than rows can end in one step. A GPU would
    read the embedding of a token of -1 somewhere before it.
    """
    llm = build(strong_pair, SHAPE, graphs="sim", chunked_prefill_size=64, max_running_requests=3, context_length=64)
    runner = llm.engine.runner
    assert any(blocks > runner.layout.max_requests for blocks, _ in runner.layout.largest_in_blocks)
    with torch.inference_mode():
        for choice in (SamplingMode.SAMPLE, SamplingMode.LOGPROBS):
            for step in profile_steps(runner, choice):
                step()
    assert tokens(llm.generate(strong_pair.prompts([15]), [greedy(3)]))


def test_a_draft_reads_no_more_lines_than_it_has_to(strong_pair):
    """Of a step in which one of five rows drafts: all last blocks, and its own before."""
    llm = build(strong_pair, SHAPE, **IN_BLOCKS | {"chunked_prefill_size": 128})
    params = [replace(greedy(4), speculative=i == 2) for i in range(5)]
    submit(llm, strong_pair.prompts([33, 30, 10, 20, 18]), params)
    read, extend = [], llm.engine.runner.drafter.extend
    llm.engine.runner.drafter.extend = lambda tokens, *others: (
        read.append(tuple(tokens.shape)) or extend(tokens, *others)
    )
    plan = llm.scheduler.plan()
    assert (len(plan.chunks), plan.block) == (5, 2)
    step = llm.engine.launch(plan)
    llm.scheduler.commit(plan, llm.engine.collect(step))
    assert read == [(5 + 10 // 2 - 1, 2)]


def test_a_step_that_no_layout_has_is_refused(strong_pair):
    """By its size, before anything runs."""
    llm = build(strong_pair, None, **IN_BLOCKS)
    submit(llm, strong_pair.prompts([9, 30]), [greedy(2)] * 2)
    plan = llm.scheduler.plan()
    assert plan.packed
    for size, block in ((68, 4), (30, 4), (32, 8)):
        with pytest.raises(CheckError, match=f"prefill step: {size} tokens in blocks of {block}"):
            llm.engine.launch(replace(plan, packed=size, block=block))


def scheduler_of(rows=64, shape=PLAIN, blocks=(64, 16), pool_tokens=2_000_000, **options):
    layout = Layout(
        (shape,), 16, rows, 16_384, 8192, (KVGroup(FULL, 1, paired(1, 8)),), pool_tokens, prefill_blocks=blocks
    )  # fmt: skip
    config = EngineConfig(disable_radix_cache=True, **options)
    return Scheduler(layout, config, (), prefill_costs=PrefillCosts(512, 2048, None, 1024))


def add(scheduler, i, length, tenant="", max_rows=None, **params):
    params = SamplingParams(**{"max_tokens": 200, "ignore_eos": True} | params)
    scheduler.add(EngineRequest(RequestId(i), (5,) * length, params, i, tenant=Tenant(tenant, max_rows)))


def first_step(lengths, blocks=(64, 16), rows=64, beside=0, **kinds):
    """The chunks of the first step of prompts of so many tokens, and its batch. kinds: what request i asks. beside: so
    many streams.
    """
    scheduler = scheduler_of(rows=rows, blocks=blocks)
    for i in range(beside):
        add(scheduler, 1000 + i, 10)
    list(islice(driven(scheduler), 2 if beside else 0))
    for i, length in enumerate(lengths):
        add(scheduler, i, length, **kinds.get(f"of_{i}", {}))
    plan = scheduler.plan()
    return [len(chunk.token_ids) for chunk in plan.chunks], plan.packed, plan.block


def test_the_batch_with_the_least_padding_is_chosen():
    """A line each, or blocks: narrow ones where they save an eighth. Behind others a prompt comes whole or not yet."""
    assert first_step([1024] * 8) == ([1024] * 8, 0, 0)
    assert first_step([1024] * 7) == ([1024] * 7, 7168, 64)
    assert first_step([1000, 200, 30, 700]) == ([1000, 200, 30, 700], 2048, 64)
    assert first_step([100] * 30) == ([100] * 30, 0, 0)
    assert first_step([100, 90, 120, 40] * 5) == ([100, 90, 120, 40] * 5, 1920, 16)
    assert first_step([120, 64, 128, 64] * 5) == ([120, 64, 128, 64] * 5, 1920, 64)
    assert first_step([3000]) == ([3000], 0, 0)
    assert first_step([8000, 200, 100]) == ([8000], 0, 0), "200 would be in two parts"
    assert first_step([8000, 190, 100]) == ([8000, 190], 8192, 64)
    assert first_step([9000, 100]) == ([8192], 0, 0)
    assert first_step([5000, 700], of_1={"logprobs": 2}) == ([5000], 0, 0), "in lines they would be 10,000"
    assert first_step([500, 400], of_0={"logprobs": 2}) == ([500, 400], 0, 0)
    assert first_step([1000, 200, 30, 700], blocks=()) != ([1000, 200, 30, 700], 2048, 64)


def test_no_batch_is_larger_than_the_most_of_a_step():
    """Any prompts, at any place."""
    dice = random.Random(0)
    for _ in range(150):
        lengths = [int(2 ** dice.uniform(0, 13.5)) for _ in range(dice.randint(1, 64))]
        counts, size, block = first_step(lengths)
        layout = scheduler_of()._layout
        lines = layout.bucket_for(len(counts)) * max(counts)
        blocks = sum(-(-count // block) * block for count in counts) if size else lines
        assert (size or lines) <= 8192
        assert size in (0, blocks)
        assert blocks <= lines


def steps_of(scheduler, prompts):
    """`driven` with prompts of so many tokens."""
    for i, length in enumerate(prompts):
        add(scheduler, i, length)
    return driven(scheduler)


def driven(scheduler):
    """Kinds of steps, in order: tokens of a prefill step, 0 for a round. Each ends before the next is planned."""
    while (plan := scheduler.plan()) is not None:
        prefill = prefill_of(plan)
        parts = prefill.chunks if prefill is not None else plan.rows
        rows = [RowResult(getattr(p, "row", p), () if getattr(p, "next_token", None) else (1,), True) for p in parts]
        scheduler.commit(plan, StepResult(tuple(rows)))
        yield 0 if prefill is None else sum(len(chunk.token_ids) for chunk in prefill.chunks)


def between_rounds(kinds):
    return [[*group] for is_round, group in groupby(kinds, lambda kind: kind == 0) if not is_round]


def test_who_waits_for_empty_rows_comes_in_before_the_next_round():
    """In steps of the usual size, of 8,192 tokens together at most; the first has nobody beside it."""
    kinds = list(islice(steps_of(scheduler_of(), [1024] * 40), 60))
    groups = between_rounds(kinds)
    assert groups[0][0] == 8192
    assert all(step == 2048 for group in groups for step in group[group is groups[0] :])
    assert max(map(sum, groups[1:])) == 8192
    assert sum(map(sum, groups)) == 40 * 1024
    assert len(groups) <= 6


@pytest.mark.parametrize("options", [{"target_gap_ms": 50}, {"prefill_tokens_per_round": 2048}])
def test_where_a_gap_is_bounded_rounds_take_turns(options):
    kinds = list(islice(steps_of(scheduler_of(**options), [1024] * 40), 60))
    assert all(len(group) == 1 for group in between_rounds(kinds)[1:])


def test_beside_one_long_prompt_rounds_take_turns():
    """Nobody else waits for a row, so a large step would only make streams wait."""
    groups = between_rounds(list(islice(steps_of(scheduler_of(), [100] * 8 + [14_000]), 40)))
    assert len(groups) > 4
    assert all(len(group) == 1 for group in groups[1:]), groups


def test_goes_on_while_rows_stand_empty():
    layout = scheduler_of(shape=SpecShape(3, 1, 4))._layout
    usual = PrefillBudget(layout, PrefillCosts(512, 2048, None), None, shape=lambda: PLAIN)
    assert [usual.goes_on(8, since) for since in (2048, 6144, 6145, 8192)] == [True, True, False, False]
    assert not PrefillBudget(layout, PrefillCosts(512, 2048, None), 0.05, shape=lambda: PLAIN).goes_on(8, 2048)
    assert not PrefillBudget(layout, PrefillCosts(512, 2048, None), None, 2048, shape=lambda: PLAIN).goes_on(8, 2048)


@pytest.mark.parametrize("blocked", ["tenant", "pages"])
def test_who_cannot_have_a_row_lets_no_steps_go_on(blocked):
    """One waits all the time whose tenant has its rows, or for whom there are no pages: streams wait for one step."""
    scheduler, kinds = scheduler_of(pool_tokens=30_000 if blocked == "pages" else 2_000_000), []
    for i in range(8):
        add(scheduler, i, 100)
    add(scheduler, 8, 100, tenant="capped", max_rows=1)
    list(islice(driven(scheduler), 12))
    add(scheduler, 9, 14_000, tenant="free")
    add(scheduler, 10, *((15_900, "other") if blocked == "pages" else (100, "capped", 1)))
    kinds = list(islice(driven(scheduler), 16))
    groups = between_rounds(kinds)
    assert len(groups) >= 6, kinds
    assert all(len(group) == 1 for group in groups), kinds
    assert 10 in [request.request_id for request in scheduler.queues.waiting]


def test_small_steps_count_as_what_they_take():
    """A step of few tokens takes as long as one of 512: sixteen of these stand between two rounds at most."""
    scheduler = scheduler_of(rows=256, blocks=())
    for i in range(8):
        add(scheduler, i, 100)
    list(islice(driven(scheduler), 10))
    for i in range(100):
        add(scheduler, 8 + i, 600 if i % 2 else 10)  # lines of these have too much padding together
    groups = between_rounds(list(islice(driven(scheduler), 80)))
    assert max(map(len, groups)) > 4
    assert all(sum(max(512, each) for each in group) <= 8192 for group in groups), groups


def test_tiny_prompts_in_lines_keep_their_padding_cheap():
    """More of one token than blocks have room for: not all in lines as wide as one of ten."""
    counts, size, _ = first_step([1] * 130 + [10], rows=256, beside=64)
    assert size == 0
    assert counts == [1] * 130


def test_captured_batches_larger_than_a_step_are_taken(strong_pair):
    """One row of few tokens: the layout's chunk is its context, its captured sizes are those of the option."""
    llm = build(strong_pair, None, graphs="sim", max_running_requests=1, context_length=101, check_level=1)
    assert any(size > llm.engine.layout.chunk for size, _ in llm.engine.layout.prefill_sizes)
    prompts = strong_pair.prompts([98, 90])
    got, sizes = run(llm, prompts, [greedy(2)] * 2)
    assert got == tokens(build(strong_pair, None).generate(prompts, greedy(2)))
    assert any(size > llm.engine.layout.chunk for size, _ in sizes), sizes


def test_padding_of_steps_of_any_prompts_is_small():
    """By the scheduler alone: of what steps compute 0.9 are prompts, where lines would have about 0.8."""
    dice, found = random.Random(2), Counter()
    for blocks in ((64, 16), ()):
        scheduler = scheduler_of(rows=256, blocks=blocks)
        layout = scheduler._layout
        for i in range(300):
            length = dice.randint(32, 1024)
            scheduler.add(EngineRequest(RequestId(i), (5,) * length, SamplingParams(max_tokens=4), i))
        while isinstance(plan := scheduler.plan(), PrefillPlan):
            counts = [len(chunk.token_ids) for chunk in plan.chunks]
            found[blocks, "real"] += sum(counts)
            found[blocks, "all"] += plan.packed or layout.bucket_for(len(counts)) * max(counts)
            if len(scheduler.steps) > 1:
                break
    share = {blocks: found[blocks, "real"] / found[blocks, "all"] for blocks in ((64, 16), ())}
    assert share[64, 16] > 0.9
    assert share[64, 16] > share[()] + 0.05


def test_sampled_first_tokens_are_those_of_lines(strong_pair):
    """One request alone, and in a step of many."""
    prompts = strong_pair.prompts([7, 30, 11, 19, 3, 23], seed=9)
    params = [sampled(i, 6, temperature=1.3) for i in range(6)]
    alone = [tokens(build(strong_pair, None).generate([p], [each]))[0] for p, each in zip(prompts, params, strict=True)]
    got, sizes = run(build(strong_pair, None, **IN_BLOCKS), prompts, params)
    assert [*map(list, got)] == [*map(list, alone)]
    assert packed(sizes)
