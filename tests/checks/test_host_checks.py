"""Level 1, host arithmetic on what the host holds, and the start-up proof of capacity."""

from dataclasses import replace
from functools import cached_property

import pytest
import torch

from support.engines import build, greedy, submit, tokens
from support.memory import all_tensors, state_tensors
from treetop.checks.host import check_cached, check_cells, check_emitted, check_padded, check_result
from treetop.engine.staging import check_own_memory
from treetop.types.errors import CheckError
from treetop.types.ids import DRAFT, FULL, PageId, Row
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import PageEdit, PrefillPlan, RowResult

SHAPE = (2, 3, 6)
INT_MIN = torch.iinfo(torch.int32).min
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------- level 1: host checks


def plans_of(pair, level):
    """An engine, and the plans of a prefill step that goes on in a next one and of a round; none has been run."""
    llm = build(pair, SHAPE, check_level=level, page_size=4, max_running_requests=3, chunked_prefill_size=16)
    submit(llm, pair.prompts([30, 6]), greedy(20))
    first = llm.scheduler.plan()
    return llm, first


def run_until_round(llm, first):
    plan = first
    while isinstance(plan, PrefillPlan):
        llm.scheduler.commit(plan, llm.engine.step(plan))
        plan = llm.scheduler.plan()
    return plan


def edited(plan, **changes):
    return replace(plan, edits=(*plan.edits[:-1], replace(plan.edits[-1], **changes)))


ROUND_MISTAKES = {
    "a row twice": (lambda p: replace(p, rows=(p.rows[0], p.rows[0])), ["twice"]),
    "the dummy row": (lambda p: replace(p, rows=(p.rows[0], Row(3))), ["row 3", "[0, 2]"]),
    "a negative row": (lambda p: replace(p, rows=(Row(-1),)), ["row -1", "[0, 2]"]),
    "a bound past the context": (lambda p: replace(p, committed_bound=257), ["committed_bound 257", "256"]),
    "a negative bound": (lambda p: replace(p, committed_bound=-1), ["committed_bound -1"]),
    "an unknown shape": (lambda p: replace(p, shape=SpecShape(2, 3, 5)), ["num_draft_tokens=5"]),
}
PREFILL_MISTAKES = {
    "an edit of the dummy row": (lambda p: edited(p, row=Row(3)), ["page_table.", "row 3", "[0, 2]"]),
    "an edit of no column": (
        lambda p: edited(p, columns=(65,), pages=(PageId(1),)),
        ["page_table.", "column", "65", "[0, 64]"],
    ),
    "an edit with no page": (lambda p: edited(p, columns=(0,), pages=(PageId(999),)), ["page_table.", "page", "999"]),
    "an edit with a negative page": (lambda p: edited(p, columns=(0,), pages=(PageId(-1),)), ["page", "-1"]),
    "a chunk in two rows": (lambda p: replace(p, chunks=(p.chunks[0], p.chunks[0])), ["twice"]),
    "a setup of the dummy row": (
        lambda p: replace(p, setups=(replace(p.setups[0], row=Row(3)), *p.setups[1:])),
        ["row 3"],
    ),
    "a chunk past the context": (
        lambda p: replace(p, chunks=(replace(p.chunks[0], start=250), *p.chunks[1:])),
        ["prefill extent", "[1, 256]"],
    ),
    "a batch of a size that is not captured": (lambda p: replace(p, packed=7, block=1), ["7 tokens in blocks of 1"]),
}


@pytest.mark.parametrize("name", [*ROUND_MISTAKES, *PREFILL_MISTAKES])
def test_a_plan_that_cannot_be_run_is_refused_before_it_touches_the_device(strong_pair, name):
    """The message names quantity, value and range, nothing on the device has changed, and the sound plan still runs."""
    llm, plan = plans_of(strong_pair, 1)
    if name in ROUND_MISTAKES:
        plan = run_until_round(llm, plan)
    mistake, words = {**ROUND_MISTAKES, **PREFILL_MISTAKES}[name]
    before = {key: tensor.clone() for key, tensor in all_tensors(llm).items()}
    with pytest.raises(CheckError) as error:
        llm.engine.step(mistake(plan))
    for word in words:
        assert word in str(error.value)
    for key, tensor in all_tensors(llm).items():
        assert torch.equal(tensor, before[key]), key
    llm.scheduler.commit(plan, llm.engine.step(plan))


@pytest.mark.parametrize("name", ["start", "token"])
def test_a_chunk_goes_on_where_the_one_before_it_ended_with_the_token_it_promised(strong_pair, name):
    """Each chunk after the first is held to what the chunk before it said (sgl-26329)."""
    llm, plan = plans_of(strong_pair, 1)
    llm.scheduler.commit(plan, llm.engine.step(plan))
    plan = llm.scheduler.plan()
    while not isinstance(plan, PrefillPlan) or plan.chunks[0].start == 0:  # a short prompt has passed the long one
        llm.scheduler.commit(plan, llm.engine.step(plan))
        plan = llm.scheduler.plan()
    chunk = plan.chunks[0]
    token = (chunk.token_ids[0] + 1) % 12
    wrong = replace(chunk, start=chunk.start + 1) if name == "start" else replace(chunk, token_ids=(token,))
    with pytest.raises(CheckError, match="chunk start" if name == "start" else "promised by the chunk before"):
        llm.engine.step(replace(plan, chunks=(wrong,)))


def test_at_level_0_no_plan_is_checked(strong_pair):
    """A bound that only the check would refuse passes: level 0 is off."""
    llm, plan = plans_of(strong_pair, 0)
    plan = run_until_round(llm, plan)
    llm.engine.step(replace(plan, committed_bound=257))


def test_padding_results_and_what_is_handed_out_are_checked(strong_pair):
    """The small host checks, one by one, on both sides of their bounds."""
    layout = build(strong_pair, SHAPE, max_running_requests=3).engine.layout
    check_padded([1, 3, 3, 3], [Row(1)], layout)
    with pytest.raises(CheckError, match="padding of the row list: row 2 has 2"):
        check_padded([1, 3, 2, 3], [Row(1)], layout)
    check_result(RowResult(Row(0), (0, 11, 5, 3), True), 12, 4)
    for wrong, words in [((0, 12), "token: row 0 has 12"), ((-1,), "has -1"), ((1,) * 5, "number of tokens.* 5")]:
        with pytest.raises(CheckError, match=words):
            check_result(RowResult(Row(0), wrong, True), 12, 4)
    check_cached(Row(2), 7, 7)
    with pytest.raises(CheckError, match=r"tokens for the prefix cache: row 2 has 8, outside \[0, 7\]"):
        check_cached(Row(2), 8, 7)
    check_cells(PageEdit(FULL, Row(2), (0, 1), (PageId(4), PageId(5))), [4, 5])
    for pages in ([4], [4, 6], None):
        column = 0 if pages is None else 1
        with pytest.raises(
            CheckError, match=rf"page_table\.full cell: row 2, column {column} is to hold page {4 + column}"
        ):
            check_cells(PageEdit(FULL, Row(2), (0, 1), (PageId(4), PageId(5))), pages)
    buffer = torch.zeros(8)
    check_own_memory("path", buffer[:2].clone(), buffer)
    with pytest.raises(CheckError, match="path"):
        check_own_memory("path", buffer[4:], buffer)


@pytest.mark.parametrize(
    ("ids", "reason", "limit", "words"),
    [
        ([5, 9, 7], "stop", 5, "stop token 9 at 1 of 3"),
        ([5, 9], None, 5, "stop token 9"),
        ([5, 9], "length", 2, "reason length"),
        ([5, 6, 7], "length", 2, "3, more than the 2"),
    ],
)
def test_what_is_emitted_ends_at_its_stop_and_within_its_limit(ids, reason, limit, words):
    check_emitted([5, 9], {9}, "stop", 2)
    check_emitted([5, 6], {9}, "length", 2)
    check_emitted([5, 6], {9}, None, 5)
    with pytest.raises(CheckError, match=words):
        check_emitted(ids, {9}, reason, limit)


# ---------------------------------------------------------------------------------------------- start-up proof


@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize(
    "name", ["draft_tail", "verify_tail", "commit_width", "headroom", "max_positions", "page_columns", "max_topk"]
)
def test_a_dimension_that_is_one_too_small_is_refused_at_construction(strong_pair, monkeypatch, name, graphs):
    """A layout that computes one dimension by another formula than the fill does not survive the start-up proof."""
    found = vars(Layout)[name]
    real = found.func if isinstance(found, cached_property) else found.fget
    monkeypatch.setattr(Layout, name, property(lambda self: real(self) - 1))
    options = {"page_size": 1, "context_length": 32, "max_running_requests": 2, "graphs": graphs}
    with pytest.raises((CheckError, RuntimeError, IndexError)) as error:
        build(strong_pair, SHAPE, check_level=1, **options)
    if name in ("draft_tail", "page_columns", "headroom", "max_positions"):
        assert isinstance(error.value, CheckError)
        assert "need" in str(error.value)
    build(strong_pair, SHAPE, check_level=0, **options)


def test_the_proof_leaves_no_trace(strong_pair):
    """After construction the state and the pools are what they are at level 0, where there is no proof."""
    fresh, proven = (build(strong_pair, SHAPE, check_level=level, max_running_requests=2) for level in (0, 1))
    assert all_tensors(fresh).keys() == all_tensors(proven).keys()
    device = proven.engine.runner
    kept = state_tensors(device.state) | {f"pool.{name}": pool.data for name, pool in device.pools.items()}
    for name, tensor in kept.items():
        assert torch.equal(tensor, all_tensors(fresh)[name]), name
    assert DRAFT in device.pools
    prompts = strong_pair.prompts([8, 3])
    assert tokens(fresh.generate(prompts, greedy(20))) == tokens(proven.generate(prompts, greedy(20)))
