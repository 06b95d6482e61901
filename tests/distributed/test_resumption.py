"""An engine that dies costs a pause: requests go on behind what their clients have; no token is lost or comes twice."""

import asyncio
import random
import tempfile
import threading
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest
import zmq

from support.fake_core import ask, make_core
from support.waiting import WAIT_S
from treetop.core.wire import ID_RANGE, AddRequests, ChangeDone, ClientHello, Leave, decode_from_core
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.engine_process import EngineServer, Parts
from treetop.types.ids import RequestId
from treetop.types.layout import SpecShape
from treetop.types.messages import PrefillPlan, RowResult, StepResult
from treetop.types.requests import CoreInfo, EngineRequest, RequestUpdate
from treetop_debug.rank_faults import RESUME_FAULTS

POISON = 999


class PositionEngine:
    """A token is a function of the prompt's first and of its place, as if drawn by a uniform; rounds give one to four.

    It dies of a prompt that begins with POISON, in the round in which its output is `deadly` long or in its step
    `at_step`, and after `steps`.
    """

    def __init__(self, steps=None, deadly=0, at_step=None):
        self.at, self.first, self.random = {}, {}, random.Random(3)
        self.steps, self.deadly, self.at_step, self.given = steps, deadly, at_step, 0

    def launch(self, plan):
        return plan

    def collect(self, plan):
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                raise RuntimeError("a bit fell over")
        return StepResult(tuple(self._row(plan, i, row) for i, row in enumerate(plan.rows)))

    def _row(self, plan, i, row):
        if isinstance(plan, PrefillPlan):
            chunk = plan.chunks[i]
            if chunk.start == 0:
                self.first[row] = chunk.token_ids[0]
            self.at[row] = chunk.start + len(chunk.token_ids)
            count = int(chunk.next_token is None)
        else:
            count = self.random.randint(1, 4)
        at = self.at[row]
        if self.first[row] == POISON:
            self.given += 1
            if self.given == self.at_step or (self.at_step is None and at + count > self.deadly):
                raise RuntimeError("poisoned")
        self.at[row] = at + count
        return RowResult(row, tuple(token_at(self.first[row], i) for i in range(at, at + count)), True)


def token_at(first: int, position: int) -> int:
    return (first * 7919 + position * 104729) % 900


def output_of(prompt, count) -> list[int]:
    return [token_at(prompt[0], i) for i in range(len(prompt), len(prompt) + count)]


INFO = CoreInfo("/none", 1000, 512, 4, SpecShape(2, 3, 6))


class Engines:
    """Engines one after the other, each with its scheduler and socket on a thread, as in a process of its own.

    Each ends with a message that is nothing to its client: by then that has all that the engine has said.
    """

    def __init__(self, folder: str, core: EngineProcessClient) -> None:
        self.folder, self.count, self.core = folder, 0, core
        self.gone, (engine,) = asyncio.Event(), core.engines
        take, loop = engine._take, asyncio.get_running_loop()

        def taken(link, message):
            take(link, message)
            if isinstance(message, ChangeDone):
                loop.call_soon(self._lost, message.error)

        engine._take = taken

    def start(self, engine) -> tuple[str]:
        self.count += 1
        self.gone.clear()
        address = f"ipc://{self.folder}/{self.count}"
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)
        server = EngineServer(Parts(make_core(engine, max_in_flight=2, disable_radix_cache=True), INFO), socket)

        def run():
            failure = server.run()
            for identity in server._identities.values():
                server._send(identity, ChangeDone(0, f"{type(failure).__name__}: {failure}"))
            context.destroy(linger=2000)

        threading.Thread(target=run, daemon=True).start()
        return (address,)

    def _lost(self, reason: str) -> None:
        self.core.engines[0].lost(reason)
        self.gone.set()


@asynccontextmanager
async def connected(first):
    """A client, and a function that gives it another engine once the one before is gone."""
    with tempfile.TemporaryDirectory() as folder:
        core = EngineProcessClient()
        engines = Engines(folder, core)
        await core.engines[0].connect(engines.start(first))

        async def again(engine) -> None:
            await asyncio.wait_for(engines.gone.wait(), WAIT_S)
            await core.engines[0].connect(engines.start(engine))

        try:
            yield core, again, engines
        finally:
            core.engines[0].fail("the test is over")  # which ends its requests
            core.close()


class Heard:
    """What a request gets."""

    def __init__(self, core, request: EngineRequest) -> None:
        self.ids, self.updates, self.ended = [], [], asyncio.Event()
        core.add([request], self)

    def __call__(self, update: RequestUpdate) -> None:
        assert not self.ended.is_set(), "an update after the last"
        self.ids += update.new_ids
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    async def end(self) -> RequestUpdate:
        await asyncio.wait_for(self.ended.wait(), WAIT_S)
        return self.updates[-1]


def test_engines_that_die_at_any_step_lose_no_token_and_repeat_none():
    """One after the other, with more requests than rows, and some that come while there is none."""

    async def run():
        rng, engine = random.Random(1), PositionEngine(steps=3)
        async with connected(engine) as (core, again, engines):
            asked, heard = [], []

            def come(count, at_least=1):
                for _ in range(count):
                    prompt = [len(asked) + 1] * rng.randint(1, 9)
                    asked.append(ask(core.next_id(), prompt, rng.randint(at_least, 90)))
                    heard.append(Heard(core, asked[-1]))

            come(8)
            for _ in range(10):
                engine = PositionEngine()
                await again(engine)
                await asyncio.wait_for(core.engines[0].settled.wait(), WAIT_S)  # with trials over, nobody is blamed
                assert core.pause is None
                engine.steps = rng.randint(0, 12)
                come(2, at_least=60)  # rounds of up to four tokens: it dies before they end
                await asyncio.wait_for(engines.gone.wait(), WAIT_S)
                assert core.pause is not None
                come(2)
            await again(PositionEngine())
            for request, each in zip(asked, heard, strict=True):
                assert (await each.end()).finish_reason == "length"
                assert each.ids == output_of(request.prompt_ids, request.params.max_tokens)
                assert sum(update.num_cached_tokens is not None for update in each.updates) == 1

    asyncio.run(run())


@pytest.mark.parametrize("way", [{"deadly": 0}, {"deadly": 30}, {"at_step": 9}])
def test_a_request_that_kills_its_engines_is_ended_and_the_others_go_on(way):
    """In its prefill, in a round much later, or some steps after it came to each: whoever was with it is not blamed."""

    async def run():
        async with connected(PositionEngine(**way)) as (core, again, engines):
            good = [ask(core.next_id(), [i + 1] * 5, 60) for i in range(6)]
            heard = [Heard(core, each) for each in good[:3]]
            bad = Heard(core, ask(core.next_id(), [POISON] * 5, 200))
            heard += [Heard(core, each) for each in good[3:]]
            while not bad.ended.is_set():
                await again(PositionEngine(**way))
                await asyncio.wait_for(engines.gone.wait(), WAIT_S)
            await again(PositionEngine(**way))
            last = await bad.end()
            assert last.finish_reason == "abort"
            assert "with this request, which is not tried again" in last.error
            assert "RuntimeError: poisoned" in last.error
            assert not last.engine_failed
            for request, each in zip(good, heard, strict=True):
                assert (await each.end()).error is None
                assert each.ids == output_of(request.prompt_ids, 60)
            assert core.num_restarts in (2, 3), "three where another was at the same step twice"

    asyncio.run(run())


@pytest.mark.parametrize("name", RESUME_FAULTS)
def test_a_fault_of_resumption_is_caught_by_its_guard(name):
    async def run():
        async with connected(PositionEngine(steps=9)) as (core, again, _):
            heard = Heard(core, ask(core.next_id(), [5] * 3, 60))
            await again(PositionEngine())
            return await heard.end(), heard.ids

    found = RESUME_FAULTS[name]
    with found.active():
        last, ids = asyncio.run(run())
    assert found.guard in last.error
    assert ids == output_of([5] * 3, 60)[: len(ids)], "a wrong token was handed out"


def test_what_a_client_said_last_before_it_ended_starts_nothing():
    """Its words may come after the news of its end, by another way; the others' requests go on."""

    wire = Mock()
    core = make_core(PositionEngine(), max_in_flight=1, disable_radix_cache=True)
    server = EngineServer(Parts(core, INFO), wire)
    first, second = (RequestId(number * ID_RANGE) for number in (1, 2))
    for identity, number, request_id in ((b"a", 1, first), (b"b", 2, second)):
        server._apply(identity, ClientHello(number))
        server._apply(identity, AddRequests((ask(request_id, [number] * 5, 40),)))
    server._loop.step()
    server._apply(b"b", Leave(1))
    assert core.scheduler.queues.by_id.keys() == {second}
    num_sent = wire.send_multipart.call_count
    server._apply(b"a", AddRequests((ask(first + 1, [3] * 5, 40),)))
    server._apply(b"late", ClientHello(1))
    server._apply(b"late", AddRequests((ask(first + 2, [3] * 5, 40),)))
    assert core.scheduler.queues.by_id.keys() == {second}
    assert wire.send_multipart.call_count == num_sent
    while core.busy:
        server._loop.step()
    sent = [call.args[0] for call in wire.send_multipart.call_args_list]
    given = [decode_from_core(message) for identity, message in sent if identity == b"b"]
    ids = [token for each in given[1:] for update in each.updates for token in update.new_ids]
    assert ids == output_of([2] * 5, 40)
    core.scheduler.check_integrity()
