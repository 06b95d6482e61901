"""Processes of engines that are killed, stopped or never come up: another is started, and every answer comes whole."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import DEVNULL
from unittest.mock import AsyncMock, Mock

import pytest
import zmq

from support import chats
from support.grids import few_of
from support.holding import ENGINE_START, LAST_WORDS, STEPS, Held
from support.serving import child_of, children_of, command_of, mock, replayed, serving
from support.storms import NAME, PAIR, nothing_is_left, of_the_mock, of_the_pair, storm
from support.waiting import WAIT_S, until
from treetop import LLM, AsyncLLM, SamplingParams
from treetop.core.wire import Load, MockOptions, ProcessOptions, encode
from treetop.distributed import process, supervisor
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.remote_engine import RankLink
from treetop.distributed.supervisor import EngineSupervisor
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, CoreLoad


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_engines_that_are_killed_in_a_storm_cost_a_pause(workers):
    """Twice: every answer is what it would have been, streamed or not, and nothing else reaches a client."""
    with mock(2, "1-4", *chats.FLAGS, "--api-workers", workers) as server:
        killed = []

        def kill():
            killed.append(server.engine())
            os.kill(killed[-1], signal.SIGKILL)

        for _ in range(2):
            outcomes = asyncio.run(storm(server, of_the_mock(), 12, 5, during=kill))
            assert outcomes.keys() <= {"result", "left"}, outcomes
            until(lambda: server.get("/health").status_code == 200)
        assert len(set(killed)) == 2
        until(lambda: server.metric("treetop:num_engine_restarts") == 2)
        until(lambda: sum("the engine is up again, after" in line for line in server.said) == 2)
        assert sum("restarting it" in line for line in server.said) == 2
        nothing_is_left(server)
        assert server.end() == 0


@pytest.mark.slow
def test_the_pair_goes_on_in_another_engine_as_it_would_have():
    """Real rounds in float64: greedy, sampled and with stop strings, against plain decoding of each prompt alone."""
    with serving(*PAIR, "--max-running-requests", "8") as server:
        outcomes = asyncio.run(
            storm(server, of_the_pair(6, 40), 6, 3, ("whole", "stream"), lambda: os.kill(server.engine(), 9))
        )
        assert outcomes == {"result": 18}
        assert server.metric("treetop:num_engine_restarts") == 1


def test_a_spare_takes_the_place_of_an_engine_that_dies():
    """It becomes the engine, requests go on with it, and another spare waits; none is left at the end."""
    with mock(2, "1-4", *chats.FLAGS, "--spare-engine") as server:

        def processes():
            return sorted(children_of(server.process.pid, "engine_process"))

        until(lambda: len(processes()) == 2)
        (spare,) = (pid for pid in processes() if "--spare" in command_of(pid))
        (engine,) = (pid for pid in processes() if pid != spare)
        outcomes = asyncio.run(storm(server, of_the_mock(), 6, 3, during=lambda: os.kill(engine, signal.SIGKILL)))
        assert outcomes.keys() <= {"result", "left"}, outcomes
        until(lambda: server.get("/health").status_code == 200)
        until(lambda: server.metric("treetop:num_engine_restarts") == 1)
        until(lambda: len(processes()) == 2)
        assert spare in processes(), "it is the engine"
        last = processes()
        nothing_is_left(server)
    until(lambda: not any(map(command_of, last)))


def test_health_while_an_engine_is_started_again_and_after_the_last_restart(tmp_path):
    """The next engine is held at its start, so the time between two is seen; and the end, once there is none."""
    held = Held(tmp_path, ENGINE_START + LAST_WORDS)
    held.go()
    with mock(20, "1", "--engine-restarts", "1", environment=held.environment) as server:
        body = {"model": NAME, "prompt": "a", "max_tokens": 20}
        server.post("/v1/completions", body)
        held.hold()
        os.kill(server.engine(), signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health/ready").status_code == 503
        assert server.get("/health/live").status_code == 200
        late = server.post("/v1/completions", {**body, "timeout": 0.05})
        assert late.status_code == 504
        held.go()
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == replayed(1, 20)
        until(lambda: server.get("/health").status_code == 200)
        held.hold()
        os.kill(server.engine(), signal.SIGKILL)
        assert "exit code -9" in server.post("/v1/completions", body).json()["error"]["message"]
        held.go()
        assert server.process.wait(WAIT_S) == 1


@pytest.mark.parametrize("workers", few_of(["1", "2"], 0))
def test_an_engine_that_hangs_is_told_of_and_goes_on(workers, tmp_path):
    """One step that takes long: health is 503 with the reason until it has ended, and no answer is another."""
    held, flags = Held(tmp_path, STEPS), ("--watchdog-timeout", "4", "--api-workers", workers)
    with mock(10**7, "1", *flags, environment=held.environment) as server:
        body = {"model": NAME, "prompt": "a", "max_tokens": 2}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.post, "/v1/completions", body)
            until(lambda: server.get("/health").status_code == 503)
            assert "has not finished a step or a command in 4 s" in server.get("/health").json()["error"]["message"]
            assert server.get("/health/live").status_code == 200
            until(lambda: server.metric("treetop:engine_stalled") == 1)
            held.go()
            assert answer.result().json()["choices"][0]["text"] == replayed(1, 2)
        until(lambda: server.get("/health").status_code == 200)
        until(lambda: server.metric("treetop:engine_stalled") == 0)
        assert server.metric("treetop:num_engine_restarts") == 0
        until(lambda: any("has not finished a step" in line for line in server.said))
        until(lambda: any("the engine responds again" in line for line in server.said))


def test_an_engine_that_hangs_is_started_again_where_that_is_asked_for():
    """It is stopped, with streams open: they go on with the next as if it had died."""
    with mock(20, "1", *chats.FLAGS, "--watchdog-timeout", "4", "--watchdog-restart", "--api-workers", "2") as server:
        stuck = server.engine()

        def stop():
            os.kill(stuck, signal.SIGSTOP)

        outcomes = asyncio.run(storm(server, of_the_mock(), 6, 3, ("whole", "stream"), stop))
        assert outcomes == {"result": 18}
        until(lambda: not command_of(stuck), "the engine that hangs is left")
        until(lambda: server.metric("treetop:num_engine_restarts") >= 1)  # another may be stopped by a busy machine
        until(lambda: any("restarting it" in line for line in server.said))


def test_time_in_which_the_client_stood_still_is_not_the_engines():
    """The event loop is blocked for longer than the watchdog allows, while words of the engine wait; then none come."""

    class Words:
        silent = False

        async def recv(self, flags=0):
            if flags:
                raise zmq.Again
            await (asyncio.Event().wait() if self.silent else asyncio.sleep(0.001))
            return encode(Load(CoreLoad()))

        def close(self):
            pass

    async def run():
        core, words = EngineProcessClient(watchdog_s=0.4), Words()
        (engine,) = core.engines
        engine._begin([RankLink(0, 0, words, CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)))], ("x",))
        await asyncio.sleep(0)
        time.sleep(0.5)  # that is it
        for _ in range(10):
            assert not core.is_stalled
            await asyncio.sleep(0.05)
        words.silent = True
        await engine.stalled.wait()
        core.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize(
    ("rank", "number", "deadline_s"),
    [
        (1, signal.SIGKILL, "300"),
        pytest.param(0, signal.SIGKILL, "300", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, "8", marks=pytest.mark.slow),
    ],
)
def test_a_group_of_ranks_dies_and_comes_back_as_one(rank, number, deadline_s):
    """A rank is killed, or rank 0, or one stops for longer than its deadline: a pause, and nothing is left of it."""
    with serving(*PAIR, "--tp-size", "2", "--device", "cpu", "--step-timeout", deadline_s) as server:
        ranks = [server.engine(), child_of(server.engine(), "tp_worker")]
        strike = partial(os.kill, ranks[rank], number)
        outcomes = asyncio.run(storm(server, of_the_pair(4, 24), 4, 2, ("whole", "stream"), strike))
        assert outcomes == {"result": 8}
        until(lambda: server.get("/health").status_code == 200)
        until(lambda: server.metric("treetop:num_engine_restarts") == 1)
        until(lambda: not any(map(command_of, ranks)), "a rank is left")
        ranks = [server.engine(), child_of(server.engine(), "tp_worker")]
        assert server.end() == 0
        until(lambda: not any(map(command_of, ranks)), "a rank is left")


def test_a_rank_that_dies_while_nobody_asks_for_anything_ends_its_group():
    """Nobody is left to find out by a request, which would have to wait for another group."""
    with serving(*PAIR, "--tp-size", "2", "--device", "cpu") as server:
        engine = server.engine()
        os.kill(child_of(server.engine(), "tp_worker"), signal.SIGKILL)
        until(lambda: not command_of(engine), "the first rank lives on")
        until(lambda: server.metric("treetop:num_engine_restarts") == 1)
        until(lambda: server.get("/health").status_code == 200)
        until(lambda: any("rank 1 has ended with exit code -9" in line for line in server.said))


def test_a_front_end_that_hangs_does_not_keep_others_from_the_next_engine(monkeypatch):
    """Each has its turn, and one that is stopped only so long; all are waited for, and an error is nobody's secret."""
    monkeypatch.setattr(supervisor, "TURN_S", 0.05)
    given, answers = [], [asyncio.Event() for _ in range(4)]
    refuses = Mock(resume=AsyncMock(side_effect=ConfigError("no")))

    def front(number):
        async def resume(address):
            given.append(number)
            await answers[number].wait()

        return Mock(resume=resume)

    async def resumed():
        for number in (0, 2):
            answers[number].set()
        asked = asyncio.ensure_future(supervisor._resume([front(number) for number in range(4)], "here"))
        await asyncio.sleep(0)
        while given != [0, 1, 2, 3]:
            await asyncio.sleep(0.01)
        assert not asked.done()
        for number in (1, 3):
            answers[number].set()
        await asked
        with pytest.raises(ConfigError):
            await supervisor._resume([refuses, front(0)], "here")
        assert given == [0, 1, 2, 3]

    asyncio.run(asyncio.wait_for(resumed(), WAIT_S))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_of_its_own_process_serves_an_event_loop(ranks):
    """`AsyncLLM` over it: the engine, or another rank, is killed in the middle, and the output is that of `LLM`."""
    options = {"dtype": "float64", "context_length": 128, "device": "cpu"}
    llm = LLM(**options)
    params = [SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=60, temperature=0.9, seed=4)]
    prompts = ["def area(radius):", "import os\n\nclass"]
    want = [output.token_ids for output in llm.generate(prompts, params)]
    llm.close()

    async def run():
        async with AsyncLLM(tp_size=ranks, restarts=3, **options) as llm:
            stream = await llm.stream(prompts, params)
            for _ in range(3):
                await anext(stream)
            engine = child_of(os.getpid(), "engine_process")
            os.kill(engine if ranks == 1 else child_of(engine, "tp_worker"), signal.SIGKILL)
            outputs = await stream.outputs()
            while not llm.core.num_restarts:  # on a slow machine all may have been said before the kill
                await asyncio.sleep(0.01)
            return [output.token_ids for output in outputs], llm.core.num_restarts

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == (want, 1)


def test_what_ends_an_engine_before_it_is_up_is_said_and_not_what_ended_the_one_before(monkeypatch):
    """The first is killed; the second ends of its own."""
    mock_of = MockOptions((1, 2), 0.01, 1, 1)
    engines = EngineSupervisor(ProcessOptions("", EngineConfig(), mock_of), restarts=1)
    start = process.start_process

    def second(module, options):
        return start("this_module_is_not_there", options, stderr=DEVNULL)

    async def both():
        await engines.start()
        monkeypatch.setattr(process, "start_process", second)
        engines.kill()
        try:
            return await asyncio.wait_for(engines.watch(), WAIT_S)
        finally:
            engines.core.close()

    assert asyncio.run(both()) == "the engine process has ended with exit code 1 before it was up"
