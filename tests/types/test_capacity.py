"""Capacity is an algebra: formulas, their errors, and runs at the context wall with nothing to spare."""

from dataclasses import replace

import pytest

from support.engines import build, finish, greedy, sampled, submit, tokens
from support.grids import few_values
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.ids import DRAFT, FULL, STATE, WINDOW, state_group
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, SpecShape
from treetop.types.state import StateGroup

FULL_GROUP, DRAFT_GROUP = KVGroup(FULL, 3, paired(2, 8)), KVGroup(DRAFT, 1, paired(2, 8))


SHAPES = (PLAIN, SpecShape(4, 5, 16))


def layout(
    shapes=SHAPES, page=16, *, requests=6, context=100, chunk=32, groups=(FULL_GROUP, DRAFT_GROUP), max_in_flight=1
):
    return Layout(shapes, page, requests, context, chunk, groups, 1000, max_in_flight=max_in_flight)


# ---------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("k", "s", "t"),
    [(1, 0, 1), (1, 1, 2), (1, 7, 8), (2, 1, 2), (2, 1, 3), (4, 5, 2), (4, 5, 69), (8, 1, 9), (10, 8, 60)],
)
def test_a_shape_within_the_bounds_exists(k, s, t):
    """2 <= T <= 1 + k + (S - 1) k^2, chains with T = S + 1, and plain decoding."""
    shape = SpecShape(k, s, t)
    assert shape.commit_width == s + 1
    assert shape.num_candidates == (k + (s - 1) * k * k if s else 0)
    assert shape.draft_tail == k * max(s - 1, 0)


@pytest.mark.parametrize(
    ("k", "s", "t", "limit"),
    [
        (4, 5, 70, "69"),
        (2, 1, 4, "3"),
        (1, 3, 3, "4"),
        (1, 3, 5, "4"),
        (4, 5, 1, ">= 2"),
        (0, 5, 16, ">= 1"),
        (4, 0, 16, ">= 1"),
        (-1, -1, -1, ">= 1"),
        (2, 0, 1, ">= 1"),
    ],
)
def test_an_impossible_shape_is_refused_with_its_bound(k, s, t, limit):
    """The message names the three options, their values and the bound."""
    with pytest.raises(ConfigError) as error:
        SpecShape(k, s, t)
    message = str(error.value)
    for part in (f"topk {k}", f"num-steps {s}", f"num-draft-tokens {t}", limit):
        assert part in message
    assert "\n" not in message


# ---------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_dimensions_follow_their_formulas(page, max_in_flight):
    """Every dimension is the maximum over the shapes, and positions reach past the context by the rounds in flight."""
    shapes = (PLAIN, SpecShape(4, 5, 16), SpecShape(8, 2, 40), SpecShape(1, 7, 8))
    made = layout(shapes, page, max_in_flight=max_in_flight)
    assert made.commit_width == 8
    assert made.max_positions == 100 + max_in_flight * 8
    assert made.page_columns == -(-(100 + max_in_flight * 8) // page)
    assert made.draft_tail == 16
    assert made.verify_tail == 40
    assert made.max_topk == 8
    assert (made.num_rows, made.dummy_row) == (7, 6)
    assert made.num_pages == {FULL: -(-1000 // page) + 1, DRAFT: -(-1000 // page) + 1}
    for dimension in made.dimensions().values():
        assert dimension.option.startswith("--")
        assert dimension.formula
    named = made.dimensions()
    assert {name: named[f"pages.{name}"].value for name in (FULL, DRAFT)} == made.num_pages
    for name in ("max_requests", "max_context", "chunk", "page_columns", "max_positions", "draft_tail", "verify_tail"):
        assert named[name].value == getattr(made, name)
    assert named["extend_tail"].value == made.commit_width


QWEN3_NEXT = StateGroup(STATE, 36, 8192, 4, 32, 16, 128, 128, True, False)


def test_bytes_of_states_are_those_of_published_models():
    """Qwen3-Next in 16 bits: 72 MiB of states and 1.7 of convolutions a row, 1.4 MiB a node, 0.85 a pending token."""
    mib = 2**20
    conv = 36 * 8192 * 3 * 2
    assert QWEN3_NEXT.row_bytes(2) == 36 * 32 * 128 * 128 * 4 + conv == 72 * mib + conv
    assert QWEN3_NEXT.pending_bytes(1, 2) == 36 * (16 * 128 + 32 * 128 + 32) * 4
    assert round(QWEN3_NEXT.pending_bytes(1, 2) / mib, 2) == 0.85
    assert QWEN3_NEXT.stash_bytes(16, 2) == 16 * (QWEN3_NEXT.pending_bytes(1, 2) + 36 * 8192 * 2)
    assert round(QWEN3_NEXT.stash_bytes(1, 2) / mib, 1) == 1.4
    assert QWEN3_NEXT.row_bytes(8) == 2 * 36 * 32 * 128 * 128 * 4 + 4 * conv, "states of float64 in an engine of it"


def test_a_recurrence_without_heads_keeps_its_convolution_and_one_without_taps_its_state():
    """A convolution alone has no updates; decays of each channel of a key are as many numbers as the keys'."""
    conv = StateGroup(state_group(1), 2, 64, 3, 0, 0, 0, 0, False, False)
    assert (conv.name, conv.row_bytes(2), conv.pending_bytes(6, 2)) == ("state1", 2 * 64 * 2 * 2, 0)
    assert conv.stash_bytes(5, 2) == 2 * 5 * 64 * 2
    state = StateGroup(STATE, 2, 0, 1, 4, 4, 8, 16, True, True)
    assert state.row_bytes(2) == 2 * 4 * 8 * 16 * 4
    assert state.pending_bytes(6, 2) == 2 * 6 * (4 * 8 + 4 * 16 + 4 * 8) * 4


@pytest.mark.parametrize("wrong", [(0, 8, 4, 2, 1), (1, 8, 1, 2, 1), (1, 0, 4, 2, 1), (1, 8, 4, 3, 2), (1, 8, 4, 2, 0)])
def test_a_recurrence_that_cannot_be_is_refused(wrong):
    """No layers, channels without taps, taps without channels, and heads that do not share key heads evenly."""
    layers, channels, taps, heads, key_heads = wrong
    with pytest.raises(ConfigError):
        StateGroup(STATE, layers, channels, taps, heads, key_heads, 4, 4, True, False)


def test_states_are_sized_by_rows_paths_and_nodes():
    """Every row and the dummy's, S + 1 pending updates a row, T nodes in a round."""
    made = replace(layout(), state_groups=(QWEN3_NEXT,)).dimensions()
    assert [made[f"{each}.state"].value for each in ("rows", "pending", "stash")] == [7, 6, 16]
    assert made["rows.state"].option == "--max-running-requests"
    assert not any(name.endswith(".state") for name in layout().dimensions())


def test_a_window_group_holds_the_window_and_what_is_in_flight():
    """ceil((window - 1 + max(chunk, max_in_flight (S + 1))) / page) + 1 pages, and never more than all columns."""
    made = layout(context=1000, chunk=32, groups=(FULL_GROUP, KVGroup(WINDOW, 3, paired(2, 8), window=50)))
    assert made.window_pages(50) == -(-(49 + 32) // 16) + 1
    assert made.pages_per_request(made.group(WINDOW)) == made.window_pages(50)
    assert made.window_pages(5000) == made.page_columns
    assert layout(context=1000, chunk=1).window_pages(50) == -(-(49 + 6) // 16) + 1
    assert layout(page=1, context=1000, chunk=32).window_pages(50) == 49 + 32 + 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_rounds_start_within_what_rounds_in_flight_may_have_committed(max_in_flight):
    """context + (max_in_flight - 1) (S + 1) committed, and S + 1 more positions make up all there are."""
    made = layout(max_in_flight=max_in_flight)
    assert made.max_committed == 100 + (max_in_flight - 1) * 6
    assert made.max_committed + made.commit_width == made.max_positions


def test_the_changes_of_a_plan_are_bounded_by_what_rows_grow_slide_and_are_admitted_with():
    """Each group: a row's pages and a chunk's, two chunks' exchanged, each row's next step's, twice a window's step."""
    made = layout(context=1000, chunk=32, requests=3, max_in_flight=2)
    rows = -(-12 // 16) + 1
    assert made.max_edits == 2 * (made.page_columns + 2 + 2 * (2 + 3) + 3 * rows)
    groups = (FULL_GROUP, KVGroup(WINDOW, 3, paired(2, 8), window=50))
    window = layout(context=1000, chunk=32, requests=3, max_in_flight=2, groups=groups)
    assert window.max_edits == made.max_edits + 3 * 2 * 2
    assert layout(context=20, page=16, requests=2).max_edits == 2 * 2 * 2, "never more than there are cells"
    assert made.dimensions()["max_edits"].value == made.max_edits


def test_buckets_are_powers_of_two_and_halves_up_to_the_most_requests():
    """Each number of live rows fits the smallest bucket that holds it; one more than all is a CapacityError."""
    made = layout(requests=6)
    assert made.buckets == (1, 2, 4, 6)
    assert [made.bucket_for(n) for n in range(7)] == [1, 1, 2, 4, 4, 6, 6]
    assert layout(requests=1).buckets == (1,)
    assert layout(requests=8).buckets == (1, 2, 4, 8)
    assert layout(requests=16).buckets == (1, 2, 4, 8, 16)
    assert layout(requests=24).buckets == (1, 2, 4, 8, 16, 24)
    large = layout(requests=200)
    assert large.buckets == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200)
    assert large.coarse_buckets == (1, 2, 4, 8, 16, 32, 64, 128, 200)
    with pytest.raises(CapacityError, match=r"need 7, have 6"):
        made.bucket_for(7)


def test_a_missing_group_is_an_error_that_names_those_there_are():
    with pytest.raises(ConfigError, match=r"window.*full, draft"):
        layout().group(WINDOW)


def test_asking_for_more_than_a_dimension_names_quantity_need_have_formula_and_option():
    """The message of a CapacityError is enough to act on."""
    made = layout()
    have = made.page_columns
    made.require("page_columns", have)
    with pytest.raises(CapacityError) as error:
        made.require("page_columns", have + 1)
    message = str(error.value)
    for part in ("page_columns", f"need {have + 1}", f"have {have}", "context 100", "(S + 1) 6", "--context-length"):
        assert part in message
    assert "\n" not in message


def test_pools_too_small_for_one_request_are_refused_with_the_number_that_works(strong_pair):
    """The smallest --max-total-tokens that the message gives is accepted, and one page less is not."""
    options = {"context_length": 100, "page_size": 16}
    with pytest.raises(CapacityError) as error:
        build(strong_pair, **options, max_total_tokens=50)
    message = str(error.value)
    assert "pages.full" in message
    assert "--max-total-tokens" in message
    enough = int(message.rsplit(" ", 1)[1])
    assert enough == -(-(100 + 6) // 16) * 16
    with pytest.raises(CapacityError):
        build(strong_pair, **options, max_total_tokens=enough - 16)
    llm = build(strong_pair, **options, max_total_tokens=enough)
    (output,) = llm.generate([[4] * 90], greedy(500))
    assert len(output.token_ids) == 10


# ---------------------------------------------------------------------------------------------- the context wall


@pytest.mark.parametrize(
    ("shape", "page", "context"),
    [
        (None, 16, 64),
        (None, 1, 50),
        ((1, 3, 4), 4, 48),
        ((4, 5, 16), 16, 64),
        ((4, 5, 16), 16, 59),
        ((4, 5, 69), 1, 40),
        ((8, 2, 40), 64, 63),
        ((2, 7, 20), 4, 45),
        ((1, 0, 1), 16, 48),
    ],
)
def test_all_rows_at_the_context_wall_with_the_last_page_nearly_full(strong_pair, shape, page, context):
    """Most rows, prompts that end just before the wall, pools without a page to spare: all fill the context exactly."""
    lengths = [context - 1, context - 2, context - 3, context - 5, context - 9]
    prompts = strong_pair.prompts(lengths)
    params = [greedy(10**9), sampled(1, 10**9), greedy(10**9), sampled(2, 10**9), sampled(3, 10**9)]
    width = 1 if shape is None else shape[1] + 1
    columns = -(-(context + width) // page)
    llm = build(
        strong_pair,
        shape,
        page_size=page,
        context_length=context,
        max_running_requests=5,
        max_total_tokens=5 * columns * page,
    )
    assert llm.engine.layout.page_columns == columns
    requests = submit(llm, prompts, params)
    finish(llm)
    assert [request.num_ids for request in requests] == [context] * 5
    assert {request.finish_reason for request in requests} == {"length"}
    assert llm.scheduler.num_retractions == 0
    roomy = build(strong_pair, None, context_length=256)
    shorter = [
        sampled(p.seed, context - n, whole=True) if p.seed is not None else greedy(context - n, whole=True)
        for p, n in zip(params, lengths, strict=True)
    ]
    assert [tuple(request.output_ids) for request in requests] == tokens(roomy.generate(prompts, shorter))


@pytest.mark.parametrize("shape", few_values([None, (4, 5, 16)], 0))
def test_a_pool_for_exactly_one_request_serves_many_one_after_another(strong_pair, shape):
    """With pages for a single context, requests are retracted and resumed until each has reached the wall."""
    columns = -(-(64 + (6 if shape else 1)) // 16)
    llm = build(strong_pair, shape, context_length=64, page_size=16, max_total_tokens=16 * columns)
    prompts = strong_pair.prompts([10, 20, 30, 60])
    requests = submit(llm, prompts, greedy(1000))
    finish(llm)
    assert [request.num_ids for request in requests] == [64] * 4
    roomy = build(strong_pair, None, context_length=64)
    assert [tuple(request.output_ids) for request in requests] == tokens(roomy.generate(prompts, greedy(1000)))


def test_the_context_may_be_all_positions_of_the_model(strong_pair):
    """At the model's own limit the rotation tables reach past it, so that the last rounds stay inside."""
    llm = build(strong_pair, (4, 5, 16), context_length=None, page_size=64)
    assert llm.engine.layout.max_context == 512
    (prompt,) = strong_pair.prompts([490])
    (output,) = llm.generate([prompt], sampled(1, 10**9))
    assert len(output.token_ids) == 22
    assert output.finish_reason == "length"
