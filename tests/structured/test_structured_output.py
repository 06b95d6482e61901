"""A constraint may take its time: its request waits, alone, and all that ends or moves a request ends or moves it."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from support.fake_core import CountingEngine, ask, make_core
from support.waiting import WAIT_S, until
from treetop import StructuredOutput
from treetop.async_llm import DeltaStream
from treetop.core.clients import InProcessClient
from treetop.core.engine_core import EngineCore
from treetop.core.loop import CoreThread
from treetop.llm import WaitingClient
from treetop.scheduler.scheduler import Scheduler
from treetop.structured.structured_output import Work
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError
from treetop.types.messages import RowResult, StepResult

VOCAB = 600
ALL = b"\xff" * (VOCAB // 8)
STRUCTURE = StructuredOutput("regex", "a*")


class OneEach(CountingEngine):
    """One token a row, as of constrained requests."""

    def collect(self, plan):
        rows = super().collect(plan).rows
        for row in rows:
            self.last[row.row] -= max(len(row.tokens) - 1, 0)
        return StepResult(tuple(RowResult(row.row, row.tokens[:1], True) for row in rows))


class Slow:
    """Answers when the test says so."""

    overdue, forced = None, ()

    def __init__(self, without):
        self.without, self.questions, self.answers = without, [], []

    def ask(self, new_ids):
        self.questions.append(new_ids)
        self.answers.append(Future())
        return self.answers[-1]

    def say(self, mask=ALL):
        self.answers[-1].set_result(mask)


class Structures:
    def __init__(self):
        self.made = []

    def constraint(self, asked, without=()):
        self.made.append(Slow(without))
        return self.made[-1]


def slow_core(clock=None, **options):
    plain = make_core(OneEach(), **options)
    layout, config = plain.scheduler._layout, EngineConfig(max_running_requests=4, page_size=4)
    more = {} if clock is None else {"clock": clock}
    structures = Structures()
    core = EngineCore(
        OneEach(), Scheduler(layout, config, [VOCAB - 1], vocab_size=VOCAB, structures=structures, **more)
    )
    return core, structures


def constrained(number, prompt=(1, 2, 3), **params):
    return ask(number, prompt, structured_output=STRUCTURE, **params)


def steps(core, count=6):
    return [update for _ in range(count) for update in core.step()]


def of(updates, number):
    mine = [update for update in updates if update.request_id == number]
    return [token for update in mine for token in update.new_ids], [u.finish_reason for u in mine if u.finish_reason]


def test_a_request_whose_structure_is_compiled_waits_and_the_others_go_on():
    core, structures = slow_core()
    core.add(constrained(1, max_tokens=3))
    core.add(ask(2, [7, 8], max_tokens=4))
    assert (core.busy, core.load.num_waiting) == (True, 2)
    updates = steps(core)
    assert of(updates, 2) == ([9, 10, 11, 12], ["length"])
    assert of(updates, 1) == ([], [])
    assert (core.busy, core.stalled, core.load.num_waiting) == (True, True, 1)
    (slow,) = structures.made
    slow.say()
    updates = steps(core, 2)
    assert of(updates, 1)[0] == [4]
    assert slow.questions == [(), (4,)]
    core.scheduler.check_integrity()


@pytest.mark.parametrize("answered", [0, 1, 2])
@pytest.mark.parametrize("way", ["abort", "finish", "fail", "timeout", "leave"])
def test_whatever_ends_a_request_ends_one_whose_constraint_is_asked(answered, way):
    """Before the first answer, after it, and in the middle; what the constraint says later counts no more."""
    now = [0.0]
    core, structures = slow_core(clock=lambda: now[0])
    core.add(constrained(1, timeout_s=5.0 if way == "timeout" else None))
    (slow,) = structures.made
    for _ in range(answered):
        slow.say()
        steps(core, 3)
    if way == "timeout":
        now[0] = 6.0
        (update,) = core.step()
        assert update.timed_out
    elif way == "fail":
        (update,) = core.fail(ValueError("x"))
    else:
        update = core.finish(1, 0) if way == "finish" else core.abort(1)
    assert update.finish_reason == ("stop" if way == "finish" else "abort")
    slow.say()
    assert steps(core) == []
    assert not core.busy
    core.scheduler.check_integrity()


def test_a_row_sits_out_while_its_mask_is_computed():
    core, structures = slow_core()
    core.add(constrained(1, max_tokens=8))
    (slow,) = structures.made
    slow.say()
    assert of(steps(core, 2), 1)[0] == [4]
    core.add(ask(2, [20], max_tokens=5))
    updates = steps(core, 8)
    assert of(updates, 2) == ([21, 22, 23, 24, 25], ["length"])
    assert of(updates, 1) == ([], [])
    slow.say()
    assert of(steps(core, 2), 1)[0] == [5]
    slow.say(b"")
    assert of(steps(core, 2), 1) == ([], ["stop"])
    assert not core.busy
    core.scheduler.check_integrity()


def test_a_mask_that_takes_too_long_ends_its_request_alone():
    core, structures = slow_core()
    core.add(constrained(1))
    core.add(ask(2, [20], max_tokens=9))
    (slow,) = structures.made
    slow.say()
    got = of(steps(core, 3), 1)[0]
    slow.overdue = "structured_output: too long"
    updates = steps(core, 12)
    (last,) = [update for update in updates if update.request_id == 1]
    assert got == [4]
    assert (last.error, last.user_error, last.finish_reason) == ("structured_output: too long", True, "abort")
    assert of(updates, 2)[1] == ["length"]
    core.scheduler.check_integrity()


@pytest.mark.parametrize("error", [InputError("too complex"), KeyboardInterrupt(), MemoryError()])
def test_a_parser_that_fails_ends_its_request_alone(error):
    core, structures = slow_core()
    core.add(constrained(1))
    structures.made[0].answers[0].set_exception(error)
    (update,) = steps(core)
    assert update.user_error
    assert str(error) in update.error
    assert not core.busy


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="this system has no clock of a thread")
def test_a_limit_counts_what_a_thread_works_not_what_it_waits():
    """A busy machine, on which a thread stands still, makes no structure hostile."""
    go_on, begun = threading.Event(), threading.Event()

    def wait():
        begun.set()
        go_on.wait()

    def work():
        while not go_on.is_set():
            sum(range(1000))

    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = Work(pool, wait)
            begun.wait()
            working = Work(pool, work)
            until(lambda: working.takes_s > 0.2)
            assert waiting.takes_s < 0.1
        finally:
            go_on.set()
        waiting.future.result()
        assert waiting.takes_s == 0


def test_a_request_that_is_put_back_waits_for_its_mask():
    """Pages run out while it is asked: it comes back to a row once it is answered, and goes on where it was."""
    core, structures = slow_core(pages=20)
    core.add(ask(2, [100], max_tokens=60))
    core.add(constrained(1, max_tokens=40))
    (slow,) = structures.made
    slow.say()
    updates = []
    while sum(len(update.new_ids) for update in updates if update.request_id == 1) < 20:
        updates += core.step()
        if not slow.answers[-1].done():
            slow.say()
    updates += steps(core, 40)
    (request,) = core.scheduler.queues.waiting_for_grammar
    assert core.scheduler.num_retractions == 1
    while core.busy:
        if not slow.answers[-1].done():
            slow.say()
        updates += core.step()
    assert of(updates, 1) == ([*range(4, 44)], ["length"])
    assert of(updates, 2) == ([*range(101, 161)], ["length"])
    assert request.running is None
    core.scheduler.check_integrity()


def test_what_another_engine_gave_is_asked_for_first():
    core, structures = slow_core()
    core.add(constrained(1, max_tokens=4)._replace(received=(4, 5)))
    (slow,) = structures.made
    slow.say()
    steps(core, 2)
    assert slow.questions == [(), (4, 5)]
    slow.say()
    assert of(steps(core, 2), 1)[0] == [6]


def test_an_ignored_end_is_never_allowed():
    """But where it is a stop id of the request's own."""
    core, structures = slow_core()
    core.add(constrained(1))
    core.add(constrained(2, ignore_eos=True))
    core.add(constrained(3, ignore_eos=True, stop_token_ids=(VOCAB - 1,)))
    assert [list(each.without) for each in structures.made] == [[], [VOCAB - 1], []]


def test_a_client_flushes_and_closes_while_a_structure_is_compiled():
    core, _ = slow_core()
    thread = CoreThread(core)
    with WaitingClient(InProcessClient(thread, None)) as client:
        stream, given = DeltaStream(client, [constrained(1), ask(2, [7], max_tokens=2)], None), []
        while len(given) < 2 and client.step(stream):
            given += [token for delta in stream.taken() for token in delta.token_ids]
        assert given == [8, 9]
        thread.flush()
    assert thread.alive
    done = threading.Thread(target=thread.close)
    done.start()
    done.join(WAIT_S)
    assert not thread.alive


def test_an_engine_without_structures_refuses_them():
    core = make_core()
    with pytest.raises(InputError, match="structured_output"):
        core.add(constrained(1))
    core, _ = slow_core()
    with pytest.raises(InputError, match="give one of them"):
        core.add(constrained(1)._replace(constraint=object()))
