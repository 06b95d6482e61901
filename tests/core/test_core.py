"""The engine core: updates that stand alone, clients that wait for nobody, interrupts that lose nothing."""

import asyncio
import gc
import os
import pickle
import random
import sys
import threading
import weakref

import pytest

from support.callers import Caller
from support.engines import build, greedy, tokens
from support.fake_core import CountingEngine, ask, collected, drained, make_core
from support.grids import few_of
from support.waiting import WAIT_S
from treetop.async_llm import DeltaStream
from treetop.core.clients import InProcessClient
from treetop.core.loop import CoreThread
from treetop.llm import WaitingClient
from treetop.types.errors import EngineError
from treetop.types.ids import RequestId

SHAPE = (2, 3, 6)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_updates_alone_tell_a_client_everything(max_in_flight):
    """Ids, reason, accepted drafts, counts and times come in the updates, which survive a process boundary."""
    core = make_core(max_in_flight=max_in_flight)
    core.add(ask(1, [5, 6, 7], max_tokens=13))
    core.add(ask(2, [50], max_tokens=40, stop_token_ids=(60,)))
    updates = [pickle.loads(pickle.dumps(update)) for update in drained(core)]
    ids, last = collected(updates)
    assert ids == {1: [*range(8, 21)], 2: [*range(51, 61)]}
    assert (last[1].finish_reason, last[2].finish_reason) == ("length", "stop")
    mine = [update for update in updates if update.request_id == 1]
    assert mine[0].accept_len is None, "the first token is the prompt's"
    assert all(update.accept_len >= len(update.new_ids) - 1 for update in mine[1:])
    stats = last[1].stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_retractions) == (3, 0, 0)
    assert stats.arrival_s <= stats.admitted_s <= stats.first_token_s <= stats.end_s
    assert all(update.stats is None for update in mine[:-1])
    times = stats.admitted_s - stats.arrival_s, stats.first_token_s - stats.admitted_s
    assert [(update.queue_s, update.prefill_s) for update in mine] == [times, *[(None, None)] * (len(mine) - 1)]
    core.scheduler.check_integrity()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_client_may_finish_a_request_at_any_time(max_in_flight):
    """It ends where the client says, also behind what the core has done since; twice and too late change nothing."""
    for moment in range(12):
        core = make_core(max_in_flight=max_in_flight)
        core.add(ask(1, [5], max_tokens=30))
        core.add(ask(2, [50], max_tokens=30))
        ids = []
        for _ in range(moment):
            ids += [token for update in core.step() if update.request_id == 1 for token in update.new_ids]
        update = core.finish(RequestId(1), max(len(ids) - 2, 0))
        assert update is None or (update.finish_reason, update.new_ids) == ("stop", ())
        assert core.finish(RequestId(1), 0) is None
        assert core.abort(RequestId(1)) is None
        rest, last = collected(drained(core))
        assert 1 not in rest
        assert (rest[2][-1], last[2].finish_reason) == (80, "length")
        core.scheduler.check_integrity()
        assert not core.scheduler.rows.by_row


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_tokens_behind_what_a_client_took_never_reach_the_prefix_cache(max_in_flight):
    """A client that found a stop string keeps two tokens of many: the next prompt finds the pages of these alone."""
    core, prompt = make_core(max_in_flight=max_in_flight), [*range(5, 15)]
    core.add(ask(1, prompt, max_tokens=200))
    output = []
    while len(output) < 12:
        output += [token for update in core.step() for token in update.new_ids]
    assert core.finish(RequestId(1), 2).finish_reason == "stop"
    assert collected(drained(core))[1] == {}
    core.add(ask(2, [*prompt, *output], max_tokens=3))
    _, last = collected(drained(core))
    assert last[2].stats.num_cached_tokens == (len(prompt) + 2) // 4 * 4


def test_a_failed_step_ends_every_request_and_the_core_goes_on():
    """Whatever the engine raises, in a launch or in a collect, each request is told; later ones run."""
    for method, error in [("launch", ValueError("a")), ("collect", MemoryError("b")), ("collect", SystemExit("c"))]:
        engine = CountingEngine()
        core = make_core(engine, rows=2, max_in_flight=2)
        for number in range(5):
            core.add(ask(number, [5 + number]))
        early = [update for _ in range(3) for update in core.step()]

        def broken(_, error=error):
            raise error

        setattr(engine, method, broken)
        _, last = collected([*early, *core.step()])
        assert core.failure is error
        assert {number: (u.finish_reason, u.engine_failed) for number, u in last.items()} == dict.fromkeys(
            range(5), ("abort", True)
        )
        assert type(error).__name__ in last[4].error
        assert not core.busy
        core.scheduler.check_integrity()
        delattr(engine, method)
        core.add(ask(9, [5], max_tokens=3))
        assert collected(drained(core))[0] == {9: [6, 7, 8]}


def test_no_delta_waits_for_more_than_one_prefill_step_of_others():
    """While long prompts of others come in chunks, a running request gets tokens after each chunk."""
    core = make_core(rows=4, chunk=8)
    core.add(ask(0, [5], max_tokens=500))
    while not any(update.accept_len is not None for update in core.step()):
        pass
    for number in (1, 2, 3):
        core.add(ask(number, range(1000 * number, 1000 * number + 300), max_tokens=3))
    silent, longest = 0, 0
    for _ in range(100):
        silent = 0 if any(update.request_id == 0 for update in core.step()) else silent + 1
        longest = max(longest, silent)
    assert longest == 1


def test_clients_of_one_thread_each_get_their_own_updates_in_order():
    thread = CoreThread(make_core(rows=3, max_in_flight=2))
    outputs = {}

    def serve(base):
        caller, numbers = Caller(thread.add), [thread.next_id() for _ in range(4)]
        caller.add([ask(number, [base + 100 * i]) for i, number in enumerate(numbers)])
        ids, left = {number: [] for number in numbers}, set(numbers)
        while left:
            for update in caller.get():
                ids[update.request_id] += update.new_ids
                if update.finish_reason is not None:
                    left.remove(update.request_id)
        outputs[base] = [*ids.values()]

    clients = [threading.Thread(target=serve, args=(1000 * i,)) for i in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(WAIT_S)
    assert outputs == {
        1000 * i: [[*range(1000 * i + 100 * j + 1, 1000 * i + 100 * j + 21)] for j in range(4)] for i in range(8)
    }
    thread.close()


def test_a_prompt_that_can_never_run_is_refused_in_its_update_alone():
    thread = CoreThread(make_core(context=32))
    caller, last = Caller(thread.add), {}
    caller.add([ask(1, range(40)), ask(2, [5], max_tokens=2)])
    while len(last) < 2:
        last |= {update.request_id: update for update in caller.get() if update.finish_reason is not None}
    assert "--context-length" in last[1].error
    assert (last[2].error, last[2].finish_reason) == (None, "length")


def test_closing_tells_whoever_waits_and_refuses_what_comes_later():
    """Nobody waits for ever: not a reader of a core that is closed, not one who asks it later."""

    class Held(CountingEngine):
        def __init__(self):
            super().__init__()
            self.reached, self.go = threading.Event(), threading.Event()

        def collect(self, plan):
            self.reached.set()
            self.go.wait(WAIT_S)
            return super().collect(plan)

    engine = Held()
    thread = CoreThread(make_core(engine))
    core = InProcessClient(thread, None)
    client, silenced = WaitingClient(core), WaitingClient(core)
    stream = DeltaStream(client, [ask(1, [5], max_tokens=400)], None)
    core.submit = lambda requests, deliver: None
    unheard = DeltaStream(silenced, [ask(2, [5])], None)
    assert engine.reached.wait(WAIT_S)
    closing = threading.Thread(target=thread.close)
    closing.start()
    engine.go.set()
    with pytest.raises(EngineError, match="the engine core has been closed"):
        [client.step(stream) and stream.taken() for _ in range(1000)]
    closing.join(WAIT_S)
    assert not thread.alive
    with pytest.raises(EngineError, match="closed"):
        DeltaStream(client, [ask(3, [5])], None)
    with pytest.raises(EngineError, match="ended"):
        silenced.step(unheard)
    for each in (client, silenced):
        each.close()


def test_a_client_that_the_collector_closes_on_the_cores_thread_waits_for_nothing():
    """A stream that was abandoned in a cycle goes whenever some thread allocates, the core's among them."""
    thread = CoreThread(make_core())
    client = WaitingClient(InProcessClient(thread, None))
    DeltaStream(client, [ask(1, [5], max_tokens=400)], None)
    closed = threading.Event()

    def collect(updates):
        client.close()
        closed.set()

    thread.add([ask(2, [])], collect)
    if not closed.wait(WAIT_S):
        thread.close.detach()  # which would wait for it, too
        pytest.fail("the core waits for itself")
    other = Caller(thread.add)
    other.add([ask(3, [5], max_tokens=1)])
    assert other.get()[-1].finish_reason == "length"
    thread.close()


def test_an_engine_nobody_holds_is_gone_with_its_thread(strong_pair):
    llm = build(strong_pair, SHAPE)
    llm.generate([[4, 5]], greedy(3))
    thread, engine = llm._core._thread._thread, weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert not thread.is_alive()
    assert engine() is None


def test_an_engine_that_is_closed_is_gone_before_anything_is_collected(strong_pair):
    """In no circle, or its memory would be in use as the next one starts."""
    llm = build(strong_pair, SHAPE)
    llm.generate([[4, 5]], greedy(3))
    engine = weakref.ref(llm.engine)
    gc.disable()
    try:
        llm.close()
        del llm
        assert engine() is None
    finally:
        gc.enable()


def test_a_stream_that_is_left_or_dropped_aborts_and_one_that_was_never_read_runs_nothing(strong_pair):
    """Also in an event loop that runs already, as in a notebook; the next call gives what a fresh engine gives."""
    llm = build(strong_pair, SHAPE, max_running_requests=2)
    prompts = strong_pair.prompts([5, 9, 3])
    expected = tokens(llm.generate(prompts, greedy(12)))

    async def in_a_loop():
        left, dropped, unread = (llm.stream(prompts, greedy(200)) for _ in range(3))
        next(left)
        next(dropped)
        left.close()
        del dropped
        llm._core.flush()
        assert not llm._core.core.busy
        assert tokens(llm.generate(prompts, greedy(12))) == expected
        return unread

    asyncio.run(in_a_loop())
    llm.scheduler.check_integrity()
    llm.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_engine(strong_pair):
    """Its threads stay with the parent, which goes on; waiting for them would last for ever."""
    llm = build(strong_pair, SHAPE)
    expected = tokens(llm.generate([[4, 5]], greedy(3)))
    child = os.fork()
    if not child:
        try:
            llm.generate([[4, 5]], greedy(3))
        except EngineError as error:
            os._exit(7 if "closed" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert tokens(llm.generate([[4, 5]], greedy(3))) == expected
    llm.close()


# ---------------------------------------------------------------------------------------------- interrupts


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that this thread runs."""

    def __init__(self, line: int):
        self.left = line

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def _call(self, frame, event, arg):
        code = frame.f_code  # Python itself swallows what is raised in a finalizer
        traced = ("treetop" in code.co_filename or "queue" in code.co_filename) and code.co_name != "__del__"
        return self._line if traced else None

    def _line(self, frame, event, arg):
        self.left -= event == "line"
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


def lines_of(work) -> int:
    counter = Interrupt(0)
    with counter:
        work()
    return -counter.left


@pytest.mark.parametrize("runs", [30, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlap", few_of([False, True], 1))
def test_an_interrupt_at_any_line_loses_nothing(strong_pair, overlap, runs):
    """Afterwards no request, row or page is held, and the same LLM gives the right tokens."""
    llm = build(strong_pair, SHAPE, overlap=overlap, max_running_requests=2)
    prompts, params = strong_pair.prompts([5, 9, 3]), greedy(12)
    expected = tokens(llm.generate(prompts, params))
    maximum = lines_of(lambda: llm.generate(prompts, params))
    rng, left, lost = random.Random(int(overlap)), runs, 0
    while left:
        line = rng.randint(1, maximum)
        with Interrupt(line) as interrupt:
            try:
                llm.generate(prompts, params)
            except KeyboardInterrupt:
                left -= 1
            else:
                lost += interrupt.left == 0
                assert lost < runs / 5
                maximum = line - interrupt.left  # it had fewer lines: how often it waits is for threads to say
        llm._core.flush()
        assert not llm._core.core.busy
        assert not llm.scheduler.rows.by_row
        llm.scheduler.check_integrity()
    assert tokens(llm.generate(prompts, params)) == expected
