"""The scheduler: chunks, turns, retraction, aborts, padding and poison never change what a request receives."""

import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from support.engines import accept_lens, build, finish, greedy, next_and_hold, pump, sampled, steps, submit, tokens
from support.grids import few_of
from treetop.scheduler.rows import Rows
from treetop.types.errors import CheckError
from treetop.types.ids import RequestId
from treetop.types.messages import PrefillPlan, RoundPlan, StepPlan

SHAPE = (2, 3, 6)


def outputs_of(requests):
    return [tuple(request.output_ids) for request in requests]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_rounds_take_is_told_of_those_behind_rounds_with_the_mean_of_what_their_rows_have(strong_pair, overlap):
    """The round behind a prefill step begins when the host has seen that step end, which is late where it launches
    what comes next meanwhile.
    """
    llm = build(strong_pair, SHAPE, overlap=overlap, max_running_requests=4)
    prompts, told, before = strong_pair.prompts([5, 40, 17, 33, 9]), list[tuple[float | None, bool]](), "nothing"
    scheduler = llm.scheduler
    commit, note = scheduler.commit, scheduler.policy.note

    def committed(plan, result):
        nonlocal before
        running = [each for queue in scheduler.queues.running for each in queue]
        rows = [each.num_computed_tokens for each in running if each.running.row in plan.rows]
        behind = not overlap or before == "round"
        due = behind and not any(isinstance(out.plan, PrefillPlan) for out in [*scheduler.steps][1:])

        def noted(part, of_part, seconds, tokens):
            if isinstance(part, RoundPlan):
                assert len(rows) < len(part.rows) or tokens == sum(rows) / len(rows)
                told.append((seconds, due))
            note(part, of_part, seconds, tokens)

        scheduler.policy.note = noted
        before = "round" if isinstance(plan, RoundPlan) else "another"
        return commit(plan, result)

    scheduler.commit = committed
    submit(llm, prompts, greedy(12))
    deque(pump(llm), maxlen=0)
    assert all((seconds is not None) == due for seconds, due in told)
    assert {due for _, due in told} == ({True, False} if overlap else {True})


# ---------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("chunk", [1, 3, 16, 37, 512])
def test_chunks_cover_each_prompt_once_and_know_the_token_after_them(strong_pair, chunk):
    """No step exceeds the chunk size, padding counted; chunks are contiguous; only the last one has no next token."""
    llm = build(strong_pair, SHAPE, chunked_prefill_size=chunk)
    prompts = strong_pair.prompts([5, 40, 1, 17, 33])
    requests = submit(llm, prompts, greedy(3))
    seen: dict[tuple[int, ...], list[int]] = {request.prompt_ids: [] for request in requests}
    by_row = {}
    for plan, result in steps(llm):
        by_row.update({request.running.row: request for request in requests if request.running is not None})
        if isinstance(plan, PrefillPlan):
            widest = max(len(piece.token_ids) for piece in plan.chunks)
            assert 0 < widest * llm.engine.layout.bucket_for(len(plan.chunks)) <= chunk
            for piece, row_result in zip(plan.chunks, result.rows, strict=True):
                ids = by_row[piece.row].prompt_ids
                assert len(seen[ids]) == piece.start
                seen[ids] += piece.token_ids
                end = len(seen[ids])
                assert piece.next_token == (ids[end] if end < len(ids) else None)
                assert len(row_result.tokens) == (1 if end == len(ids) else 0)
    assert all(tuple(pieces) == ids for ids, pieces in seen.items())


@pytest.mark.parametrize("radix", few_of([False, True], 1))
@pytest.mark.parametrize("lengths", [[240] + 15 * [3], 15 * [3] + [240], 5 * [240] + 3 * [3], 12 * [200]])
def test_a_large_step_is_not_filled_with_the_padding_of_short_prompts(strong_pair, radix, lengths):
    """Padding is 512 tokens or a third of a step at most; all prompts run, and get what they get in small steps."""
    options = {"disable_radix_cache": not radix, "max_running_requests": 16, "page_size": 4}
    llm = build(strong_pair, None, chunked_prefill_size=4096, **options)
    prompts = strong_pair.prompts(lengths)
    requests, maximum = submit(llm, prompts, greedy(3)), 0
    for plan, _ in steps(llm):
        if isinstance(plan, PrefillPlan):
            counts = [len(chunk.token_ids) for chunk in plan.chunks]
            padding = llm.engine.layout.bucket_for(len(counts)) * max(counts) - sum(counts)
            assert padding <= max(sum(counts) // 2, 512), counts
            maximum = max(maximum, len(counts))
    assert maximum > 2, "prompts still share steps"
    assert outputs_of(requests) == tokens(build(strong_pair, None, **options).generate(prompts, greedy(3)))


def test_a_cached_prefix_counts_as_what_is_left_of_it(strong_pair):
    """A prompt that is nearly all cached is a short one beside a new one, however long it is."""
    llm = build(strong_pair, None, chunked_prefill_size=4096, max_running_requests=16, page_size=4)
    known, new = strong_pair.prompts([240]), strong_pair.prompts([241], seed=5)
    llm.generate(known, greedy(1))
    submit(llm, [*new, *known, *known, *known], greedy(2))
    plan, _ = next(steps(llm))
    counts = [len(chunk.token_ids) for chunk in plan.chunks]
    assert counts[0] == 241
    assert max(counts[1:], default=0) < 8
    assert len(counts) == 2, "a third row would make it four of 241"


def test_a_long_prompt_takes_turns_with_running_requests(strong_pair):
    """While a prompt is prefilled in chunks, rounds of others run between its chunks."""
    llm = build(strong_pair, None, chunked_prefill_size=8)
    submit(llm, strong_pair.prompts([4]), greedy(60))
    run = steps(llm)
    for _ in range(4):
        next(run)
    submit(llm, strong_pair.prompts([80], seed=1), greedy(2))
    kinds = [isinstance(next(run)[0], PrefillPlan) for _ in range(18)]
    assert sum(kinds) >= 9
    assert not any(a and b for a, b in pairwise(kinds)), "two prefill steps in a row"


def test_more_requests_than_rows_wait_their_turn_and_all_finish(strong_pair):
    """Eleven requests in three rows give what they give alone."""
    prompts = strong_pair.prompts([3, 9, 20, 4, 31, 8, 2, 17, 5, 12, 6])
    params = [sampled(i, max_tokens=5 + 3 * i) for i in range(11)]
    expected = build(strong_pair, None).generate(prompts, params)
    llm = build(strong_pair, SHAPE, max_running_requests=3)
    requests = submit(llm, prompts, params)
    maximum = max(len(plan.rows) for plan, _ in steps(llm) if isinstance(plan, RoundPlan))
    assert maximum == 3
    assert outputs_of(requests) == tokens(expected)


# ---------------------------------------------------------------------------------------------- retraction


@pytest.fixture(scope="module")
def roomy(strong_pair):
    """Requests, and what plain decoding gives where there are pages for all."""
    prompts = strong_pair.prompts([30, 12, 25, 7, 18])
    params = [greedy(60), sampled(1, 60), sampled(2, 50), greedy(64), sampled(3, 60, temperature=0.7)]
    return prompts, params, tokens(build(strong_pair, None, context_length=128).generate(prompts, params))


SHORT = [(None, 4, 512), (SHAPE, 4, 7), ((4, 3, 12), 1, 16), (SHAPE, 16, 5)]


@pytest.mark.parametrize(
    ("shape", "page", "chunk", "radix"),
    few_of([(*sizes, radix) for sizes in SHORT for radix in (False, True)], 2, 5),
)
def test_retraction_and_resumption_do_not_change_the_tokens(strong_pair, roomy, shape, page, chunk, radix):
    """With too few pages for all, requests are retracted, resume by a prefill, and give the same tokens."""
    prompts, params, expected = roomy
    llm = build(
        strong_pair,
        shape,
        context_length=128,
        max_total_tokens=192,
        page_size=page,
        chunked_prefill_size=chunk,
        disable_radix_cache=not radix,
    )
    requests = submit(llm, prompts, params)
    finish(llm)
    assert llm.scheduler.num_retractions > 0
    assert outputs_of(requests) == expected
    assert {request.finish_reason for request in requests} == {"length"}


def test_a_request_is_retracted_in_the_middle_of_its_prompt(strong_pair):
    """A prompt that is half prefilled gives its pages to older requests, and starts again."""
    prompts = [*strong_pair.prompts([20, 20]), *strong_pair.prompts([90], seed=2)]
    params = [greedy(80), greedy(80), greedy(20)]
    expected = build(strong_pair, None, context_length=128).generate(prompts, params)
    llm = build(strong_pair, SHAPE, context_length=128, max_total_tokens=160, page_size=4, chunked_prefill_size=4)
    requests = submit(llm, prompts, params)
    began, retracted = False, False
    for _ in steps(llm):
        long = requests[2]
        began |= 0 < long.num_computed_tokens < 90
        retracted |= began and long.running is None and not long.output_ids and long.finish_reason is None
    assert retracted, "the long prompt was never retracted while it was prefilled"
    assert outputs_of(requests) == tokens(expected)


# ---------------------------------------------------------------------------------------------- aborts


def test_an_abort_in_any_state_frees_everything_and_leaves_the_others_alone(strong_pair):
    """Waiting, prefilling, decoding, between plan and result, finished: the survivor's tokens are unchanged."""
    prompts = strong_pair.prompts([11, 6, 60, 9])
    (expected,) = tokens(build(strong_pair, None).generate([prompts[0]], greedy(50)))
    llm = build(strong_pair, SHAPE, max_running_requests=3, chunked_prefill_size=8)
    survivor, decoding, prefilling, waiting = submit(llm, prompts, greedy(50))
    run = steps(llm)
    while not (decoding.output_ids and prefilling.num_computed_tokens):
        next(run)
    assert prefilling.num_computed_tokens < 60
    assert waiting.running is None
    for request in (waiting, prefilling):
        update = llm.scheduler.abort(request.request_id)
        assert (update.finish_reason, update.new_ids) == ("abort", ())
        assert request.finish_reason == "abort"
        assert request.running is None
        llm.scheduler.check_integrity()
    plan = llm.scheduler.plan()
    result = llm.engine.step(plan)
    before = list(decoding.output_ids)
    llm.scheduler.abort(decoding.request_id)
    updates = llm.scheduler.commit(plan, result)
    assert decoding.request_id not in {update.request_id for update in updates}
    assert decoding.output_ids == before
    finish(llm)
    assert tuple(survivor.output_ids) == expected
    assert llm.scheduler.abort(survivor.request_id) is None
    assert llm.scheduler.abort(RequestId(12345)) is None
    llm.scheduler.check_integrity()


def test_leaving_a_stream_aborts_its_requests(strong_pair):
    """A stream that is closed early leaves no request, row or page behind, and the engine serves on."""
    llm = build(strong_pair, SHAPE, max_running_requests=2)
    prompts = strong_pair.prompts([5, 6, 7])
    expected = tokens(llm.generate(prompts, greedy(20)))
    stream = llm.stream(prompts, greedy(200))
    next_and_hold(llm, stream, 3)
    assert llm.scheduler.has_work
    stream.close()
    assert not llm.scheduler.has_work
    llm.scheduler.check_integrity()
    assert tokens(llm.generate(prompts, greedy(20))) == expected


def test_two_streams_at_once_each_get_their_own_outputs(strong_pair):
    """Streams of one LLM that are read in turns do not take each other's updates."""
    llm = build(strong_pair, SHAPE)
    prompts, lengths = strong_pair.prompts([5, 12]), [30, 8]
    expected = [tokens(llm.generate([p], greedy(n)))[0] for p, n in zip(prompts, lengths, strict=True)]
    streams = [llm.stream([p], greedy(n)) for p, n in zip(prompts, lengths, strict=True)]
    for stream in streams:
        next(stream)
    ends = [[delta.output.token_ids for delta in stream if delta.output is not None] for stream in streams]
    assert ends == [[each] for each in expected]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", few_of([False, True], 1))
def test_streams_in_several_threads_get_what_they_would_alone(strong_pair, overlap):
    """Threads take turns at running one engine; nobody's request is lost, and nothing stays behind."""
    prompts = strong_pair.prompts([3 + i % 9 for i in range(24)])
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(30)))
    llm = build(strong_pair, SHAPE, max_running_requests=5, overlap=overlap)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate([prompt], greedy(30))[0], prompts))
    assert tokens(outputs) == expected
    assert not llm.scheduler.has_work
    llm.scheduler.check_integrity()


# ---------------------------------------------------------------------------------------------- padding and poison


def test_a_round_and_a_prefill_without_live_rows_run_and_change_nothing(strong_pair):
    """Zero live rows are a legal batch of either kind; the request that runs meanwhile does not notice."""
    prompts = strong_pair.prompts([9])
    for params in (greedy(20), sampled(1, 20), sampled(2, 20, top_k=4)):
        llm = build(strong_pair, SHAPE)
        (expected,) = tokens(build(strong_pair, None).generate(prompts, params))
        (request,) = submit(llm, prompts, params)
        for plan, _ in steps(llm):
            if isinstance(plan, PrefillPlan):
                empty: StepPlan = replace(plan, edits=(), setups=(), chunks=())
            else:
                empty = replace(plan, edits=(), rows=(), committed_bound=0)
            assert llm.engine.step(empty).rows == ()
        assert tuple(request.output_ids) == expected


def poison(llm, requests, plan) -> None:
    """NaN in every place that `plan` must write before it reads: tails, and all slots but those of known tokens."""
    starts = {chunk.row: chunk.start for chunk in plan.chunks} if isinstance(plan, PrefillPlan) else {}
    runner, page = llm.engine.runner, llm.engine.layout.page_size
    buffers = runner.buffers
    for tails in (buffers.verify_tails, buffers.draft_tails, buffers.extend_tails):
        for tail in tails.values():
            tail.fill_(float("nan"))
    for group, pool in runner.pools.items():
        layers = [layer.kv for layer in pool.layers()]
        keep = torch.zeros(layers[0].k.shape[0], dtype=torch.bool)
        keep[:page] = True  # the null page
        for request in requests:
            if request.running is not None:
                pages = torch.tensor(request.running.lease.pages[group])
                position = torch.arange(starts.get(request.running.row, request.num_computed_tokens))
                keep[pages[position // page] * page + position % page] = True
        for kv in layers:
            kv.k[~keep] = kv.v[~keep] = float("nan")


@pytest.mark.parametrize("page", few_of([1, 16], 0))
def test_stale_memory_does_not_change_a_row_bitwise(strong_pair, page):
    """Three rows in a bucket of four: NaN in padding rows, tails, free pages and unused slots changes no bit."""
    results, states = [], []
    for poisoned in (False, True):
        llm = build(strong_pair, (4, 3, 16), max_running_requests=4, page_size=page, chunked_prefill_size=9)
        requests = submit(llm, strong_pair.prompts([5, 18, 30]), [greedy(30), sampled(1, 24), greedy(36)])
        listed = []
        while (plan := llm.scheduler.plan()) is not None:
            if poisoned:
                poison(llm, requests, plan)
            result = llm.engine.step(plan)
            llm.scheduler.commit(plan, result)
            listed.append(result)
        results.append(listed)
        draft = llm.engine.runner.state.draft
        states.append([draft.hidden.clone(), draft.logprob.clone(), draft.tokens.clone()])
    assert results[0] == results[1]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_dummy_row_stays_as_it_was_made(strong_pair):
    """After work in padded batches the dummy row has nothing committed and only null pages."""
    llm = build(strong_pair, SHAPE, max_running_requests=4)
    llm.generate(strong_pair.prompts([5, 18, 30]), greedy(20))
    state, dummy = llm.engine.runner.state, llm.engine.layout.dummy_row
    assert int(state.committed[dummy]) == 0
    assert all(not table.data[dummy].any() for table in state.page_tables.values())
    for pool in llm.engine.runner.pools.values():
        for layer in pool.layers():
            assert not layer.kv.k[0].any(), "the null slot was written"
            assert not layer.kv.v[0].any(), "the null slot was written"


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_a_request_whose_logits_are_not_finite_fails_alone(strong_pair, shape):
    """A token whose embedding is NaN aborts its own request with an error; the others give their usual tokens."""
    (hidden,) = set(range(12)) - set(drafted_tokens(strong_pair))  # a tree never holds it
    prompts = [[token for token in prompt if token != hidden] for prompt in strong_pair.prompts([9, 30, 14])]
    llm = build(strong_pair, shape, page_size=4)
    expected = build(strong_pair, None).generate(prompts, greedy(8))
    llm.engine.runner.target.embedding[hidden] = float("nan")
    bad = [[*prompts[0], hidden], [hidden], [*[4] * 20, hidden, 5]]
    mixed = [bad[0], prompts[0], bad[1], prompts[1], bad[2], prompts[2]]
    outputs = llm.generate(mixed, greedy(8))
    for output in outputs[0::2]:
        assert output.finish_reason == "abort"
        assert "not finite" in output.error
    for output, want in zip(outputs[1::2], expected, strict=True):
        emitted = hidden in want.token_ids[:-1]  # and then fed back
        assert output.token_ids == (want.token_ids[: want.token_ids.index(hidden) + 1] if emitted else want.token_ids)
        assert output.finish_reason == ("abort" if emitted else "length")
    assert any(output.finish_reason == "length" for output in outputs)
    llm.scheduler.check_integrity()


def drafted_tokens(pair) -> list[int]:
    """Target tokens that the head can propose."""
    offset = load_file(pair.head / "model.safetensors")["d2t"]
    return (torch.arange(len(offset)) + offset).tolist()


def test_metrics_count_rounds_and_accepted_drafts(strong_pair):
    """Rounds times one plus accepted drafts give the tokens after the first, up to the cut of the last round."""
    llm = build(strong_pair, (4, 3, 16))
    for output in llm.generate(strong_pair.prompts([5, 18, 30]), greedy(40, whole=True)):
        metrics = output.metrics
        assert metrics.target_forwards == len(metrics.accept_lens)
        assert metrics.accept_length == pytest.approx(39 / metrics.target_forwards)
        produced = 1 + sum(a + 1 for a in metrics.accept_lens)
        assert 40 <= produced < 40 + metrics.accept_lens[-1] + 1
    (one,) = llm.generate([[4, 5]], greedy(1))
    assert one.metrics.accept_length is None
    assert accept_lens([one]) == [()]


def test_a_forced_accept_length_makes_every_round_emit_as_many_tokens(strong_pair):
    """For benchmarks: whatever is right, each round commits a path of that length, and the books stay right."""
    llm = build(strong_pair, SHAPE, simulate_accept_length=3)
    outputs = llm.generate(strong_pair.prompts([5, 18]), greedy(31, whole=True))
    assert all(set(each) == {2} for each in accept_lens(outputs))
    assert [output.metrics.target_forwards for output in outputs] == [10, 10]
    llm.scheduler.check_integrity()


# ---------------------------------------------------------------------------------------------- leaving


CROWDED = {"context_length": 128, "max_total_tokens": 192, "page_size": 4, "chunked_prefill_size": 7}


def crowd(pair, **options):
    """Five requests in pages for two: they retract each other, and leave at different times."""
    llm = build(pair, SHAPE, **CROWDED, **options)
    submit(
        llm,
        pair.prompts([30, 12, 25, 7, 18]),
        [
            greedy(60, whole=True),
            greedy(21, whole=True),
            greedy(50, whole=True),
            greedy(64, whole=True),
            greedy(33, whole=True),
        ],
    )
    for _ in pump(llm):
        pass
    return llm


def test_a_retraction_that_caches_a_token_more_than_is_committed_is_refused(strong_pair, monkeypatch):
    """The root's K/V are nowhere yet: a prefix that holds it would be read before it is written."""
    assert crowd(strong_pair).scheduler.num_retractions > 0
    leave = Rows.leave
    monkeypatch.setattr(Rows, "leave", lambda self, request, ids: leave(self, request, request.ids[: len(ids) + 1]))
    with pytest.raises(CheckError, match=r"tokens for the prefix cache: row \d+ has \d+, outside \[0, \d+\]"):
        crowd(strong_pair)


def abort_who_waits_for_pages(pair) -> int:
    """Two steps in flight; whoever has got pages for a round that others have none for is aborted. Returns how many."""
    llm, aborted = build(pair, SHAPE, overlap=True, **CROWDED), 0
    scheduler, tickets = llm.scheduler, deque()
    submit(llm, pair.prompts([30, 12, 25, 7, 18, 22, 9, 16]), greedy(64, whole=True))
    while scheduler.has_work:
        while (plan := scheduler.plan()) is not None:
            tickets.append(llm.engine.launch(plan))
        rows = {row for _, row in scheduler.rows.cells}
        for request in [each for row, each in scheduler.rows.by_row.items() if row in rows]:
            aborted += scheduler.abort(request.request_id) is not None
        if tickets:
            in_flight = tickets.popleft()
            scheduler.commit(in_flight.plan, llm.engine.collect(in_flight))
        scheduler.check_integrity()
    return aborted


def test_page_table_cells_of_a_row_that_was_left_are_refused(strong_pair, monkeypatch):
    """They wait for the next plan, and would give the row's next request pages that it does not hold."""
    assert abort_who_waits_for_pages(strong_pair) > 0
    leave = Rows.leave

    def forgetful(self, request, ids):
        cells = dict(self.cells)
        leave(self, request, ids)
        self.cells = cells

    monkeypatch.setattr(Rows, "leave", forgetful)
    with pytest.raises(CheckError, match=r"page_table\.\w+ cell: row \d+, column \d+ is to hold page \d+"):
        abort_who_waits_for_pages(strong_pair)


def test_the_scheduler_comes_without_torch():
    """Importing it imports no tensor library, directly or through others."""
    code = "import sys, treetop.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
