"""A request's life, in any order that hypothesis can think of: the real scheduler and engine against plain decoding."""

import tempfile
from collections import deque
from functools import cache
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.engines import hold_core_thread
from support.examples import some_of
from support.tiny_models import save_random_head, save_random_llama
from treetop import LLM, SamplingParams
from treetop.debug import two_group
from treetop.types.ids import NULL_PAGE, WINDOW, RequestId
from treetop.types.messages import PrefillPlan, RoundPlan
from treetop.types.requests import EngineRequest

IDS = count()
CONTEXT, VOCAB, SPAN = 40, 7, 9
SHAPES = [(1, 4, 5), (2, 3, 8), (3, 2, 10), (4, 5, 16)]


@cache
def pairs() -> dict[int | None, tuple[str, str]]:
    """Random pairs of seven tokens, with and without a window; their folder lives as long as the process."""
    pairs.folder = tempfile.TemporaryDirectory(prefix="treetop-machines-")
    folder, small = Path(pairs.folder.name), {"vocab_size": VOCAB}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        windowed = two_group.write_two_group_pair(folder, SPAN)
    target = save_random_llama(folder / "target", seed=8, vocab_size=VOCAB)
    head = save_random_head(folder / "head", target, draft_vocab=6, seed=2)
    return {SPAN: tuple(map(str, windowed)), None: (str(target), str(head))}


@cache
def plain(window) -> LLM:
    return LLM(pairs()[window][0], None, dtype="float64", context_length=CONTEXT, check_level=0)


def prompt_of(length, salt) -> list[int]:
    return [(5 * i + i * i + 3 * salt) % VOCAB for i in range(length)]


@cache
def plainly(window, length, salt, params):
    """What plain decoding, alone and with room, gives: the ids and why it ended."""
    (output,) = plain(window).generate([prompt_of(length, salt)], params)
    return output.token_ids, output.finish_reason


class RequestMachine(RuleBasedStateMachine):
    """Requests come, run, are stopped inside accepted paths, are retracted, aborted and drained.

    With overlap, launching and collecting are events of their own, and all others may come between. window: of the
    target, or None. At all times: pages and rows are all accounted for, also those of requests that ended while a step
    of theirs is out; tables say what leases say; the device has committed at least what the host knows and at most what
    it reckons with; a window's pages behind it are given back and never more are held than its capacity; every output
    is a beginning of what plain decoding gives.
    """

    window: int | None = None

    @initialize(
        shape=st.sampled_from(SHAPES),
        page=st.sampled_from([1, 2, 4, 16]),
        chunk=st.sampled_from([3, 8, 64]),
        spare=st.integers(0, 40),
        graphs=st.sampled_from(["off", "sim"]),
        radix=st.booleans(),
        level=st.sampled_from([1, 3]),
        overlap=st.booleans(),
    )
    def start(self, *, shape, page, chunk, spare, graphs, radix, level, overlap):
        topk, num_steps, size = shape
        columns = -(-(CONTEXT + (1 + overlap) * (num_steps + 1)) // page)
        self.llm = LLM(
            *pairs()[self.window],
            dtype="float64",
            context_length=CONTEXT,
            page_size=page,
            chunked_prefill_size=chunk,
            max_running_requests=3,
            max_total_tokens=columns * page + spare,
            graphs=graphs,
            overlap=overlap,
            disable_radix_cache=not radix,
            check_level=level,
            speculative_eagle_topk=topk,
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=size,
        )
        hold_core_thread(self.llm)
        self.alive = {}  # request id -> (request, expected ids, expected reason)
        self.tickets = deque()

    @rule(
        length=st.sampled_from([1, 4, 9, 16, 31, 39]),
        salt=st.integers(0, 1),
        max_tokens=st.sampled_from([1, 2, 7, 30]),
        sampled=st.sampled_from([None, 1, 2]),
        stop=st.sampled_from([(), (2,), (0, 5)]),
    )
    def add(self, length, salt, max_tokens, sampled, stop):
        if len(self.alive) == 6:
            return
        params = SamplingParams(
            temperature=0.0 if sampled is None else 1.0,
            seed=sampled,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            ignore_eos=True,
        )
        prompt = prompt_of(length, salt)
        request_id = RequestId(next(IDS))
        request = self.llm.scheduler.add(EngineRequest(request_id, tuple(prompt), params, params.seed or 0))
        self.alive[request_id] = (request, *plainly(self.window, length, salt, params))

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.advance()

    @precondition(lambda self: self.alive)
    @rule()
    def launch(self):
        llm = self.llm
        plan = llm.scheduler.plan()
        if plan is None:
            return
        assert len(self.tickets) < llm.engine.layout.max_in_flight
        assert set(plan.freed) == {(group, page) for group, page in plan.freed if page != NULL_PAGE}
        if isinstance(plan, PrefillPlan):
            assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= llm.engine.layout.chunk
        self.tickets.append(llm.engine.launch(plan))

    @precondition(lambda self: self.tickets)
    @rule()
    def collect(self):
        in_flight = self.tickets.popleft()
        result = self.llm.engine.collect(in_flight)
        for update in self.llm.scheduler.commit(in_flight.plan, result):
            assert update.error is None
            request, expected, reason = self.alive[update.request_id]
            if update.finish_reason is not None:
                assert (tuple(request.output_ids), request.finish_reason) == (expected, reason)
                del self.alive[update.request_id]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        request, expected, _ = self.alive.pop(request_id)
        update = self.llm.scheduler.abort(request_id)
        assert update.finish_reason == request.finish_reason == "abort"
        assert tuple(request.output_ids) == expected[: len(request.output_ids)]
        assert self.llm.scheduler.abort(request_id) is None

    @precondition(lambda self: self.alive)
    @rule()
    def drain(self):
        for _ in range(600):
            if not self.alive and not self.tickets:
                break
            self.advance()
        assert not self.alive
        assert not self.llm.scheduler.has_work
        assert not self.llm.scheduler.rows.by_row

    def advance(self):
        """Launch all that can be, then collect the oldest, as `LLM` does."""
        before = -1
        while len(self.tickets) > before:
            before = len(self.tickets)
            self.launch()
            self.check()
        if not self.tickets:
            assert not self.alive, "requests are alive, but nothing can run"
            return
        self.collect()
        self.check()

    @invariant()
    def check(self):
        if not hasattr(self, "llm"):
            return
        self.llm.scheduler.check_integrity()
        layout, state = self.llm.engine.layout, self.llm.engine.runner.state
        assert int(state.committed[layout.dummy_row]) == 0
        for request, expected, _ in self.alive.values():
            assert tuple(request.output_ids) == expected[: len(request.output_ids)]
            assert request.running is not None or request.num_computed_tokens == 0
        for row, request in self.llm.scheduler.rows.by_row.items():
            out = [in_flight.plan for in_flight in self.tickets if row in in_flight.plan.rows]
            assert request.finish_reason is None or out, "a request that ended keeps its row for nothing"
            rounds = sum(isinstance(plan, RoundPlan) for plan in out)
            ahead = int(state.committed[row]) - request.num_computed_tokens
            assert rounds <= ahead <= rounds * layout.commit_width
            assert ahead + request.num_computed_tokens <= layout.max_committed + layout.commit_width
            for group in layout.groups:
                self.check_pages(group, request.running.lease.pages[group.name], row, request)

    def check_pages(self, group, pages, row, request):
        """What a lease holds is in the row's table; in a window's group what lies behind the window is given back."""
        layout = self.llm.engine.layout
        owned = [page for page in pages if page != NULL_PAGE]
        if group.name != WINDOW:
            assert owned == pages
        else:
            in_flight = layout.max_in_flight * max(layout.chunk, layout.headroom)  # what is out may yet enter the cache
            assert len(owned) <= layout.pages_for(group.window - 1 + in_flight) + 1
            seen = max(request.num_computed_tokens - group.window + 1, 0) // layout.page_size
            last = [column for column in range(len(pages)) if pages[column] != NULL_PAGE][-1]
            needed = range(seen, min(last, max(request.num_computed_tokens - 1, 0) // layout.page_size) + 1)
            assert all(pages[column] != NULL_PAGE for column in needed), "a page that a query can see was given back"
        cells = self.llm.engine.runner.state.page_tables[group.name].data[row, : len(pages)].tolist()
        waiting = self.llm.scheduler.rows.cells.get((group.name, row), {})  # for the next plan
        assert [waiting.get(i, cell) for i, cell in enumerate(cells)] == list(pages)

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(600):
            if not self.alive and not self.tickets:
                break
            self.advance()
        assert not self.alive
        layout, journal = self.llm.engine.layout, self.llm.scheduler.rows.kv_cache
        for group in layout.groups:
            null = self.llm.engine.runner.pools[group.name].data[:, : layout.page_size]
            assert torch.equal(null, torch.zeros_like(null)), "the null page is not clean"
            if self.llm.config.disable_radix_cache:
                assert journal.usage == 0


class WindowMachine(RequestMachine):
    """The same with a target whose layers alternate between a window and everything."""

    window = SPAN


RequestMachine.TestCase.settings = some_of(10, 25, stateful_step_count=14)
WindowMachine.TestCase.settings = some_of(10, 25, stateful_step_count=14)
TestRequests = RequestMachine.TestCase
TestRequestsWithAWindow = WindowMachine.TestCase
