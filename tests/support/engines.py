"""Engines and requests as the tests use them. All batches come from the scheduler."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from threading import Event

from support.examples import fewer
from support.waiting import WAIT_S, until
from treetop import LLM, SamplingParams
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, Whose
from treetop.weights.cpu_products import ROW_CLASSES, Call
from treetop_debug.patching import Patch, replaced

_IDS = count(10**6)
"""Ids that the core's own clients do not reach."""


def build(pair, shape=(4, 5, 16), **options) -> LLM:
    """An engine in float64 for `pair` with tree `shape` (k, S, T); None decodes plainly without a head."""
    own = {"dtype": "float64", "context_length": 256, "max_running_requests": 8}
    own |= {"speculative_policy": "fixed", "speculative_calibration": "off"}
    options = {**own, **options}
    if shape is None:
        return LLM(model=str(pair.target), draft=None, **options)
    topk, num_steps, num_draft_tokens = shape
    return LLM(
        model=str(pair.target),
        draft=str(pair.head),
        speculative_eagle_topk=topk,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_draft_tokens,
        **options,
    )


@contextmanager
def products_timed_otherwise() -> Iterator[list]:
    """Each engine that is made inside finds another call fastest, as timing may. Yields (shape, calls) as each has."""
    asked, taken = count(), []

    def timed(real):
        def choose(shapes, dtype, orders):
            calls = (list(Call)[next(asked) % 3],) * len(ROW_CLASSES)
            return {shape: replace(each, calls=calls) for shape, each in real(shapes, dtype, orders).items()}

        return choose

    def noted(real):
        def build_runner(engine_plan):
            built = real(engine_plan)
            taken.append([(each.shape, each.calls) for each in built.products])
            return built

        return build_runner

    patches = (
        Patch("treetop.engine.startup.products:choose_products", timed),
        Patch("treetop.engine.engine:build_runner", noted),
    )
    with replaced(patches):
        yield taken


def greedy(max_tokens=48, *, whole=False) -> SamplingParams:
    """A day decodes fewer tokens where it is many, but for tests that need all (whole)."""
    return SamplingParams(max_tokens=max_tokens if whole else fewer(max_tokens), ignore_eos=True)


def sampled(seed, max_tokens=48, *, whole=False, **changes) -> SamplingParams:
    """As `greedy`."""
    limit = max_tokens if whole else fewer(max_tokens)
    return SamplingParams(max_tokens=limit, ignore_eos=True, seed=seed, **{"temperature": 1.0, **changes})


def tokens(outputs) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def accept_lens(outputs) -> list[tuple[int, ...]]:
    return [output.metrics.accept_lens for output in outputs]


class _Hold:
    """A command with which the core's thread does nothing until it is given another one."""

    def __init__(self, inbox) -> None:
        self.inbox, self.begun = inbox, Event()

    def __call__(self, loop) -> None:
        command = self
        while isinstance(command, _Hold):
            command.begun.set()
            command = self.inbox.get()
        if command is None:
            self.inbox.put(None)
        else:
            command(loop)


def hold_core_thread(llm) -> None:
    """What is given to the scheduler itself is the caller's to run: the core's thread leaves it alone.

    It would run it too if it came to its inbox, or back to it, only after that. It goes on with the next request of
    `generate`, and with all that is there.
    """
    hold = _Hold(llm._core._thread._inbox)
    hold.inbox.put(hold)
    assert hold.begun.wait(WAIT_S), "the core's thread does not come to its inbox"


def next_and_hold(llm, stream, count: int):
    """The first piece of a stream, whose request does not run on however slow the test is.

    After `count` steps, which its request must have, the core's thread does nothing until it is given a command.
    """
    core, hold = llm._core.core, _Hold(llm._core._thread._inbox)
    real, left = core.step, count

    def step():
        nonlocal left
        left -= 1
        if left == 0:
            del core.step
            hold.inbox.put(hold)
        return real()

    core.step = step
    piece = next(stream)
    assert hold.begun.wait(WAIT_S), f"there were fewer than {count} steps"
    return piece


def rest(llm) -> None:
    """Wait until there is no work. Asked on the core's thread: within a step the books are half changed."""
    answers: SimpleQueue[bool] = SimpleQueue()

    def has_none() -> bool:
        llm._core._thread._inbox.put(lambda loop: answers.put(not loop.core.busy))
        return answers.get(timeout=WAIT_S)

    until(has_none, "work is left")


def submit(llm, prompts, params, constraints=None, loras=None) -> list:
    """Queue requests beside the core's thread, for a test that runs the steps itself; returns them.

    loras: names, "" of no adapter.
    """
    if not llm.scheduler.has_work:
        hold_core_thread(llm)
    size = len(prompts)
    listed = params if isinstance(params, list) else [params] * size
    more = zip(constraints or [None] * size, loras or [""] * size, strict=True)
    asked = [
        EngineRequest(
            RequestId(next(_IDS)),
            tuple(prompt),
            each,
            each.seed or 0,
            constraint=constraint,
            lora=lora,
            cache_salt=Whose(lora=lora).salt,
        )
        for prompt, each, (constraint, lora) in zip(prompts, listed, more, strict=True)
    ]
    return [llm.scheduler.add(each) for each in asked]


def steps(llm, limit=10_000):
    """Run the scheduler and the engine until there is no work; yields (plan, result) after each step."""
    for _ in range(limit):
        plan = llm.scheduler.plan()
        if plan is None and llm.scheduler.rows.host is not None and llm.scheduler.rows.host.waits_for:
            llm.scheduler.await_answer(WAIT_S)
            continue
        if plan is None:
            assert not llm.scheduler.has_work, "work is left, but there is no plan"
            return
        result = llm.engine.step(plan)
        note(llm.scheduler.commit(plan, result))
        llm.scheduler.check_integrity()
        yield plan, result
    raise AssertionError(f"the work was not done after {limit} steps")


def pump(llm, limit=10_000):
    """As `steps`, with as many steps in flight as the engine allows; yields (plan, updates) after each commit."""
    tickets = deque()
    for _ in range(limit):
        while (plan := llm.scheduler.plan()) is not None:
            tickets.append(llm.engine.launch(plan))
        if not tickets:
            assert not llm.scheduler.has_work, "work is left, but there is no plan"
            return
        in_flight = tickets.popleft()
        updates = llm.scheduler.commit(in_flight.plan, llm.engine.collect(in_flight))
        note(updates)
        llm.scheduler.check_integrity()
        yield in_flight.plan, updates
    raise AssertionError(f"the work was not done after {limit} steps")


def accepted(request) -> list[int]:
    """Accepted drafts of each round of a request that `steps` or `pump` ran."""
    return _ACCEPTED.get(request.request_id, [])


_ACCEPTED: dict[RequestId, list[int]] = {}


def note(updates) -> None:
    """Remember accepted lengths, for `accepted`."""
    for update in updates:
        if update.accept_len is not None:
            _ACCEPTED.setdefault(update.request_id, []).append(update.accept_len)


def finish(llm) -> None:
    for _ in steps(llm):
        pass
