"""Overlap: a step is launched before the last one's results are known, and no token changes."""

from functools import cache, partial
from itertools import pairwise

import pytest

from support.engines import accept_lens, build, finish, greedy, next_and_hold, pump, sampled, steps, submit, tokens
from support.grids import few_of
from support.memory import all_tensors
from treetop import LLM, SamplingParams
from treetop.debug.two_group import write_two_group_pair
from treetop.engine.staging import collect
from treetop.engine.startup.plan import choose_max_in_flight
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckError, ConfigError, EngineError, InvariantError
from treetop.types.ids import DRAFT, FULL
from treetop.types.messages import PageEdit, PrefillPlan, RoundPlan, StepResult

SHAPE = (2, 3, 6)
LENGTHS = [9, 30, 1, 17, 4, 22, 13]


def mixed(count, longest=40):
    """Greedy, sampled and filtered requests of different lengths, some with a stop token."""
    kinds = [
        lambda i: SamplingParams(max_tokens=longest - 3 * i, ignore_eos=True, stop_token_ids=(i % 12,)),
        lambda i: sampled(i, longest - 2 * i),
        lambda i: sampled(i, longest - i, top_k=4, temperature=0.8),
        lambda i: greedy(longest - 4 * i),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def outcome(outputs):
    return [(output.token_ids, output.finish_reason, output.error) for output in outputs]


def idle(llm) -> bool:
    """No step, request, row or page is held."""
    llm.scheduler.check_integrity()
    busy = llm.scheduler.has_work or llm.scheduler.rows.by_row or llm.scheduler.steps
    return not busy


# ---------------------------------------------------------------------------------------------- the same tokens


@pytest.fixture(scope="module")
def one_step_at_a_time(strong_pair):
    """What mixed requests give without overlap, by shape."""

    @cache
    def outputs(shape):
        prompts = strong_pair.prompts(LENGTHS)
        return build(strong_pair, shape, overlap=False).generate(prompts * 2, mixed(14, 45))

    return outputs


@pytest.mark.parametrize(
    ("shape", "page", "chunk", "rows", "radix", "graphs"),
    few_of(
        [
            (None, 4, 512, 3, False, "sim"),
            (None, 4, 512, 3, True, "off"),
            pytest.param(SHAPE, 1, 5, 3, False, "off", marks=pytest.mark.slow),
            (SHAPE, 1, 5, 3, True, "sim"),
            pytest.param((4, 3, 16), 4, 16, 8, False, "sim", marks=pytest.mark.slow),
            ((4, 3, 16), 4, 16, 8, True, "off"),
            (SHAPE, 16, 7, 1, True, "sim"),
        ],
        0,
        3,
        5,
    ),
)
def test_overlap_changes_no_token_no_round_and_no_reason(
    strong_pair, one_step_at_a_time, *, shape, page, chunk, rows, radix, graphs
):
    """Stops in paths, mixed sampling, chunks, more requests than rows: all as without it, rounds counted alike.

    Without it pages, chunks, rows and the prefix cache are others, of which no round depends either.
    """
    prompts = strong_pair.prompts(LENGTHS)
    options = {
        "page_size": page,
        "chunked_prefill_size": chunk,
        "max_running_requests": rows,
        "disable_radix_cache": not radix,
    }
    expected = one_step_at_a_time(shape)
    llm = build(strong_pair, shape, **options, overlap=True, graphs=graphs)
    outputs = llm.generate(prompts * 2, mixed(14, 45))
    assert outcome(outputs) == outcome(expected)
    assert accept_lens(outputs) == accept_lens(expected)
    assert idle(llm)


@pytest.fixture(scope="module")
def unhurried(strong_pair):
    """Prompts, what is asked for, and what plain decoding gives where memory is ample."""
    prompts = strong_pair.prompts([30, 12, 25, 7, 18])
    params = [greedy(60), sampled(1, 60), sampled(2, 50), greedy(64), sampled(3, 60, temperature=0.7)]
    return prompts, params, build(strong_pair, None, context_length=128).generate(prompts, params)


@pytest.mark.parametrize(
    ("shape", "page", "chunk", "level", "radix"),
    few_of(
        [
            pytest.param(None, 4, 512, 1, True, marks=pytest.mark.slow),
            (None, 4, 512, 3, False),
            pytest.param(SHAPE, 4, 7, 1, False, marks=pytest.mark.slow),
            (SHAPE, 4, 7, 3, True),
            ((4, 3, 12), 1, 16, 1, True),
            ((4, 3, 12), 1, 16, 3, False),
            (SHAPE, 16, 5, 3, True),
        ],
        3,
        5,
    ),
)
def test_overlap_changes_no_token_when_requests_are_retracted(
    strong_pair, unhurried, *, shape, page, chunk, level, radix
):
    """Pools for little more than one request: retraction waits until lengths are known, and nothing is lost."""
    prompts, params, expected = unhurried
    tight = {"context_length": 128, "max_total_tokens": 192, "page_size": page, "chunked_prefill_size": chunk}
    llm = build(strong_pair, shape, **tight, overlap=True, disable_radix_cache=not radix, check_level=level)
    outputs = llm.generate(prompts, params)
    assert llm.scheduler.num_retractions > 0
    assert outcome(outputs) == outcome(expected)
    assert idle(llm)


@pytest.fixture(scope="module")
def behind_a_window(tmp_path_factory):
    """Prompts, an engine of such options, and what it gives without overlap."""
    target, head = write_two_group_pair(tmp_path_factory.mktemp("windows"), window=12)
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    make = partial(LLM, str(target), str(head), dtype="float64", context_length=128, **shape)
    prompts = [[(7 * i + 3 * j) % 96 for j in range(n)] for i, n in enumerate((40, 3, 61, 12))]
    return prompts, make, make().generate(prompts, mixed(4, 50))


@pytest.mark.parametrize(("page", "chunk", "level"), few_of([(1, 9, 1), (4, 512, 3), (16, 5, 3), (16, 5, 1)], 0, 1))
def test_overlap_changes_no_token_behind_a_window(behind_a_window, page, chunk, level):
    """Pages leave the window by the length that is known, while a round further on may run."""
    prompts, make, expected = behind_a_window
    llm = make(page_size=page, chunked_prefill_size=chunk, overlap=True, check_level=level)
    assert outcome(llm.generate(prompts, mixed(4, 50))) == outcome(expected)
    assert idle(llm)


def test_overlap_reaches_the_context_wall_as_without_it(strong_pair):
    """Rounds that run past the wall before the host knows have their pages and positions, and give nothing."""
    prompts, params = strong_pair.prompts([20, 1, 35]), greedy(1000)
    options = {"context_length": 40, "page_size": 1, "check_level": 3}
    expected = build(strong_pair, (4, 5, 16), **options).generate(prompts, params)
    outputs = build(strong_pair, (4, 5, 16), **options, overlap=True, graphs="sim").generate(prompts, params)
    assert outcome(outputs) == outcome(expected)
    assert {output.finish_reason for output in outputs} == {"length"}
    assert [len(output.token_ids) for output in outputs] == [20, 39, 5]


# ---------------------------------------------------------------------------------------------- what is in flight


def test_a_step_is_planned_before_the_last_ones_result_is_known(strong_pair):
    """Two plans are out and no third; the second bounds what the first may commit; a root may still be unknown."""
    llm = build(strong_pair, SHAPE, overlap=True)
    (request,) = submit(llm, strong_pair.prompts([9]), greedy(30))
    prompt, first = llm.scheduler.plan(), llm.scheduler.plan()
    assert isinstance(prompt, PrefillPlan)
    assert isinstance(first, RoundPlan)
    assert first.committed_bound == 9
    assert llm.scheduler.plan() is None
    tickets = [llm.engine.launch(plan) for plan in (prompt, first)]
    llm.scheduler.commit(prompt, llm.engine.collect(tickets[0]))
    assert len(request.output_ids) == 1
    second = llm.scheduler.plan()
    assert second.committed_bound == 9 + 4
    assert 9 < int(llm.engine.runner.state.committed[request.running.row]) <= 13
    last = llm.engine.launch(second)
    llm.scheduler.commit(first, llm.engine.collect(tickets[1]))
    llm.scheduler.commit(second, llm.engine.collect(last))
    finish(llm)
    assert (
        tuple(request.output_ids) == tokens(build(strong_pair, None).generate(strong_pair.prompts([9]), greedy(30)))[0]
    )


def test_without_overlap_one_plan_is_out(strong_pair):
    llm = build(strong_pair, SHAPE)
    submit(llm, strong_pair.prompts([9]), greedy(30))
    plan = llm.scheduler.plan()
    assert llm.scheduler.plan() is None
    llm.scheduler.commit(plan, llm.engine.step(plan))
    assert llm.scheduler.plan() is not None


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_a_request_whose_limit_is_surely_reached_is_not_planned_again(strong_pair, max_tokens):
    """Plain rounds give one token each, so overlap runs not one round more."""
    counts = []
    for overlap in (False, True):
        llm = build(strong_pair, None, overlap=overlap)
        submit(llm, strong_pair.prompts([9, 4]), greedy(max_tokens, whole=True))
        counts.append(sum(isinstance(plan, RoundPlan) for plan, _ in pump(llm)))
    assert counts == [max_tokens - 1] * 2


def test_results_are_committed_in_order_and_once(strong_pair):
    llm = build(strong_pair, SHAPE, overlap=True)
    submit(llm, strong_pair.prompts([9]), greedy(30))
    first, second = llm.scheduler.plan(), llm.scheduler.plan()
    results = [llm.engine.step(plan) for plan in (first, second)]
    with pytest.raises(InvariantError, match="order"):
        llm.scheduler.commit(second, results[1])
    llm.scheduler.commit(first, results[0])
    with pytest.raises(InvariantError, match="once"):
        llm.scheduler.commit(first, results[0])
    llm.scheduler.commit(second, results[1])


def test_a_result_survives_the_steps_that_may_follow_it_and_is_refused_after_that(strong_pair):
    """The slots are `max_in_flight + 1`; a step that is collected too late does not get another step's numbers."""
    llm = build(strong_pair, SHAPE, overlap=True)
    submit(llm, strong_pair.prompts([9, 5]), greedy(60))
    run = steps(llm)
    while not isinstance(next(run)[0], RoundPlan):
        pass
    plan = llm.scheduler.plan()
    in_flight = llm.engine.launch(plan)
    early = collect(in_flight.posted[0])
    llm.engine.launch(plan)
    llm.engine.launch(plan)
    assert collect(in_flight.posted[0]) == early
    llm.engine.launch(plan)
    with pytest.raises(InvariantError, match="too late"):
        llm.engine.collect(in_flight)


# ---------------------------------------------------------------------------------------------- endings in flight


def test_a_request_that_is_aborted_in_flight_keeps_row_and_pages_until_its_steps_are_in(strong_pair):
    """Prefilling, just prefilled, decoding: nothing of it is emitted, nobody gets its row or pages too early."""
    prompts = strong_pair.prompts([11, 6, 60, 9])
    (expected,) = tokens(build(strong_pair, None).generate([prompts[0]], greedy(50)))
    for after in range(12):
        llm = build(strong_pair, SHAPE, max_running_requests=3, chunked_prefill_size=8, overlap=True, check_level=3)
        requests = submit(llm, prompts, greedy(50))
        run = pump(llm)
        for _ in range(after):
            next(run)
        out = [llm.scheduler.plan()]  # one is out, and the next is planned
        held = {row for plan in [*(o.plan for o in llm.scheduler.steps), *out] if plan is not None for row in plan.rows}
        for request in requests[1:]:
            ids, row = list(request.output_ids), request.running and request.running.row
            update = llm.scheduler.abort(request.request_id)
            assert (update is None) == (request.finish_reason != "abort")
            assert (request.running is not None) == (row in held)
            assert request.output_ids == ids
            llm.scheduler.check_integrity()
        for plan in [o.plan for o in llm.scheduler.steps]:
            updates = llm.scheduler.commit(plan, StepResult(()))
            assert updates == []
        assert all(request.running is None for request in requests[1:])
    llm = build(strong_pair, SHAPE, max_running_requests=3, chunked_prefill_size=8, overlap=True)
    requests = submit(llm, prompts, greedy(50))
    for count, _ in enumerate(pump(llm)):
        if count in (3, 5, 9):
            llm.scheduler.abort(requests[{3: 1, 5: 2, 9: 3}[count]].request_id)
    assert tuple(requests[0].output_ids) == expected


def test_a_stream_that_is_left_leaves_nothing_in_flight(strong_pair):
    """Closed after any number of pieces; then the engine serves on, and the other stream has lost nothing."""
    prompts = strong_pair.prompts([5, 6, 7])
    llm = build(strong_pair, SHAPE, max_running_requests=2, overlap=True)
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(20)))
    for pieces in (1, 2, 5, 9):
        stream = llm.stream(prompts, greedy(20))
        for _ in range(pieces):
            next(stream)
        stream.close()
        assert idle(llm)
    kept, left = llm.stream(prompts[:1], greedy(20)), llm.stream(prompts[1:], greedy(20))
    next(kept)
    next(left)
    left.close()
    assert [delta.output.token_ids for delta in kept if delta.output is not None] == expected[:1]
    assert idle(llm)
    assert tokens(llm.generate(prompts, greedy(20))) == expected


def test_streams_that_are_read_in_turns_share_what_is_in_flight(strong_pair):
    prompts, lengths = strong_pair.prompts([5, 12]), [30, 8]
    expected = [
        tokens(build(strong_pair, None).generate([p], greedy(n)))[0] for p, n in zip(prompts, lengths, strict=True)
    ]
    llm = build(strong_pair, SHAPE, overlap=True)
    streams = [llm.stream([p], greedy(n)) for p, n in zip(prompts, lengths, strict=True)]
    ends = {}
    while len(ends) < 2:
        for index, stream in enumerate(streams):
            delta = next(stream, None)
            if delta is not None and delta.output is not None:
                ends[index] = delta.output.token_ids
    assert [ends[0], ends[1]] == expected
    for stream in streams:
        stream.close()
    assert idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_an_engine_that_fails_ends_every_request_and_can_go_on(strong_pair, monkeypatch, method, overlap):
    """What was in flight is unknown: every stream raises what the engine did, and the next call is right."""
    llm = build(strong_pair, SHAPE, overlap=overlap)
    prompts = strong_pair.prompts([5, 12, 20])
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(20)))
    streams = [llm.stream([prompt], greedy(200)) for prompt in prompts[:2]]
    for stream in streams:  # and none runs on before all are broken
        next_and_hold(llm, stream, 4)

    def broken(_):
        raise CheckError("planted")

    monkeypatch.setattr(llm.engine, method, broken)
    llm._core.flush()
    for stream in streams:
        with pytest.raises(EngineError, match="planted"):
            list(stream)
    assert idle(llm)
    monkeypatch.undo()
    assert tokens(llm.generate(prompts, greedy(20))) == expected


# ---------------------------------------------------------------------------------------------- inputs


def test_a_plan_with_more_changes_than_there_is_room_for_is_refused(strong_pair):
    llm = build(strong_pair, SHAPE, page_size=64)
    submit(llm, strong_pair.prompts([9]), greedy(30))
    plan = llm.scheduler.plan()
    edits = tuple(
        PageEdit(FULL, plan.rows[0], (0,), plan.edits[0].pages[:1]) for _ in range(llm.engine.layout.max_edits + 1)
    )
    with pytest.raises(CapacityError, match="max_edits"):
        llm.engine.launch(RoundPlan(edits, (), (), llm.config.shape, 0, plan.choice))


def test_admission_keeps_to_what_a_plan_can_carry(strong_pair):
    """Long cached prefixes bring many cells and few tokens: not all requests that a chunk could hold are admitted."""
    prefix = strong_pair.prompts([220])[0]
    prompts = [[*prefix, i] for i in range(8)]
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(6)))
    llm = build(strong_pair, SHAPE, page_size=1, chunked_prefill_size=32)
    llm.generate([prefix], greedy(1))
    requests = submit(llm, prompts, greedy(6))
    admitted, maximum = [], 0
    for plan, _ in steps(llm):
        maximum = max(maximum, sum(len(edit.columns) for edit in plan.edits))
        admitted += [len(plan.setups)] if isinstance(plan, PrefillPlan) else []
    assert maximum > 2 * 220
    assert 1 <= max(admitted) < 8
    assert [tuple(request.output_ids) for request in requests] == expected


def test_a_cell_is_written_once_a_plan_and_padding_never(strong_pair):
    """Two writes to a cell in one plan would have no order on a GPU."""
    tight = {"context_length": 128, "max_total_tokens": 192, "page_size": 4, "chunked_prefill_size": 7}
    llm = build(strong_pair, SHAPE, **tight, overlap=True)
    submit(llm, strong_pair.prompts([30, 12, 25, 7]), greedy(60, whole=True))
    for plan, _ in pump(llm):
        cells = [(edit.group, edit.row, column) for edit in plan.edits for column in edit.columns]
        assert len(set(cells)) == len(cells)
        assert {edit.group for edit in plan.edits} <= {FULL, DRAFT}
        assert llm.engine.layout.dummy_row not in {edit.row for edit in plan.edits}
    assert llm.scheduler.num_retractions > 0


def test_sampling_parameters_arrive_as_they_are_given(strong_pair):
    """They travel as bits beside integers, and land in float32 as PyTorch rounds them."""
    llm = build(strong_pair, SHAPE, overlap=True)
    given = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=1e-3, seed=2**62 + 1, max_tokens=4)
    (request,) = submit(llm, strong_pair.prompts([5]), [given])
    llm.engine.launch(llm.scheduler.plan())
    state, row = llm.engine.runner.state, request.running.row
    floats = [state.numbers[name] for name in ("temperature", "top_p", "min_p")]
    assert [float(x[row]) for x in floats] == [
        float(x.new_tensor(v)) for x, v in zip(floats, (0.7, 0.9, 1e-3), strict=True)
    ]
    assert (int(state.numbers["top_k"][row]), int(state.numbers["seed"][row])) == (5, 2**62 + 1)


# ---------------------------------------------------------------------------------------------- the option


def test_overlap_is_off_on_a_cpu_unless_asked_for(strong_pair):
    assert build(strong_pair, SHAPE, device="cpu").engine.layout.max_in_flight == 1
    assert build(strong_pair, SHAPE, device="cpu", overlap=False).engine.layout.max_in_flight == 1
    layout = build(strong_pair, SHAPE, device="cpu", overlap=True).engine.layout
    assert layout.max_in_flight == 2
    assert layout.max_positions == 256 + 2 * 4
    assert layout.max_committed == 256 + 4
    with pytest.raises(ConfigError, match="--overlap must be True, False or None"):
        EngineConfig(overlap="yes")


def test_a_backend_that_needs_exact_lengths_on_the_host_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="--overlap: attention backend flashinfer plans with exact lengths"):
        choose_max_in_flight(EngineConfig(attention_backend="flashinfer", overlap=True))
    assert choose_max_in_flight(EngineConfig(attention_backend="flashinfer")) == 1
    assert choose_max_in_flight(EngineConfig(attention_backend="torch", overlap=True)) == 2


def test_overlap_makes_positions_pages_and_slots_for_the_step_more(strong_pair):
    """Every buffer that grows with the max_in_flight does, and no other."""
    options = {"page_size": 1, "context_length": 32, "max_running_requests": 2, "max_total_tokens": 100}
    one, two = (build(strong_pair, SHAPE, **options, overlap=overlap) for overlap in (False, True))
    a, b = all_tensors(one), all_tensors(two)
    grown = {name for name in a if a[name].shape != b[name].shape}
    assert len(grown) == 2
    assert all("page_table" in name for name in grown)
    assert one.engine.layout.page_columns + 4 == two.engine.layout.page_columns
    assert [len(llm.engine._staging._slots) for llm in (one, two)] == [2, 3]


def test_prefill_and_rounds_take_turns_with_overlap_too(strong_pair):
    """While a prompt is prefilled in chunks, rounds of others run between its chunks."""
    llm = build(strong_pair, None, chunked_prefill_size=8, overlap=True)
    submit(llm, strong_pair.prompts([4]), greedy(60))
    run = pump(llm)
    for _ in range(4):
        next(run)
    submit(llm, strong_pair.prompts([80], seed=1), greedy(2))
    kinds = [isinstance(next(run)[0], PrefillPlan) for _ in range(20)]
    assert sum(kinds) >= 9
    assert not any(a and b for a, b in pairwise(kinds)), "two prefill steps in a row"
