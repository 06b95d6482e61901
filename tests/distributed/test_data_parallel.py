"""Several engines behind one server (`--dp-size`): what one says, wherever a request goes and whichever dies."""

import asyncio
import os
import signal
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import torch

from support import chats
from support.fake_core import make_core
from support.grids import few_of
from support.serving import Server, command_of, mock, replayed, serving
from support.storms import NAME, PAIR, nothing_is_left, of_the_mock, of_the_pair, storm
from support.waiting import WAIT_S, until
from treetop.core.engine_core import WEIGHTS_LOST
from treetop.core.wire import AddRequests, ProcessOptions, decode_to_core
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.engine_process import ChangesNote, restored, take_share
from treetop.distributed.remote_engine import RankLink
from treetop.serve import serve
from treetop.serve_options import ServeOptions
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError
from treetop.types.ids import RequestId
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, PrefixPages, RequestUpdate
from treetop.types.sampling import SamplingParams


def engines(server: Server) -> list[int]:
    return [pid for pid in server.children() if "engine_process" in command_of(pid)]


@pytest.mark.parametrize("workers", few_of(["1", "2"], 0))
def test_replicas_in_a_storm_give_what_one_gives_and_one_that_is_killed_costs_a_pause(workers):
    """Its requests wait for it and go on; health stays good, for the other serves. A drain finishes what was taken."""
    with mock(2, "1-4", *chats.FLAGS, "--dp-size", "2", "--api-workers", workers) as server:
        first, second = engines(server)
        health = []

        def kill():
            os.kill(first, signal.SIGKILL)
            health.append(server.get("/health").status_code)

        outcomes = asyncio.run(storm(server, of_the_mock(), 12, 5, during=kill))
        assert outcomes.keys() <= {"result", "left"}, outcomes
        until(lambda: server.metric("treetop:num_engine_restarts") == 1)
        assert health == [200]
        assert second in engines(server)
        until(lambda: len(engines(server)) == 2)
        nothing_is_left(server)
        outcomes = asyncio.run(storm(server, of_the_mock(), 4, 2, ("stream",), lambda: server.process.send_signal(15)))
        assert outcomes["result"] >= 3, outcomes  # those that had ended by then
        assert server.process.wait(WAIT_S) == 0
    until(lambda: not command_of(second), "an engine is left")


@pytest.mark.slow
def test_an_engine_that_is_stopped_gets_no_new_requests():
    """SIGSTOP, and a watchdog of 300 s: after some heartbeats all that is new is answered by the other."""
    body = {"prompt": "a", "max_tokens": 2}
    with mock(2, "1", "--dp-size", "2") as server:
        stopped, _ = engines(server)
        os.kill(stopped, signal.SIGSTOP)

        def answers() -> bool:
            with suppress(httpx.TimeoutException):
                return all(server.post("/v1/completions", body, timeout=1).status_code == 200 for _ in range(8))
            return False

        try:
            until(answers)
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_counters_of_drafts_add_up_over_replicas_and_api_processes():
    """Accepted drafts by depth are accepted drafts by rank are all accepted drafts, and tokens are those and bonuses.

    speculators#1095: per-position counters of one replica alone.
    """
    count, length = 16, 41
    with mock(2, "1-4", *chats.FLAGS, "--dp-size", "2", "--api-workers", "2") as server:

        async def ask() -> list[int]:
            async def one() -> int:
                async with httpx.AsyncClient(timeout=WAIT_S) as client:
                    body = {"prompt": "a", "max_tokens": length, "ignore_eos": True}
                    answer = await client.post(server.url + "/v1/completions", json=body)
                return answer.json()["usage"]["completion_tokens"]

            return await asyncio.gather(*(one() for _ in range(count)))

        assert asyncio.run(ask()) == [length] * count
        accepted, rounds, tokens = (
            server.metric(f"treetop:{name}_total")
            for name in ("spec_decode_num_accepted_tokens", "spec_decode_num_drafts", "generation_tokens")
        )
        depths, ranks = (
            [
                server.metric(f"treetop:spec_decode_num_accepted_tokens_per_{kind}_total", **{label: str(index)})
                for index in range(8)
            ]
            for kind, label in (("pos", "position"), ("rank", "rank"))
        )
    assert tokens == count * length
    assert accepted == sum(depths) == sum(ranks) > 0
    assert sorted(depths, reverse=True) == depths
    assert depths[0] <= rounds
    assert tokens - count <= accepted + rounds <= tokens + 4 * count  # the last round of each may have had more


def test_a_replica_that_is_dead_for_good_ends_the_server():
    """As an engine that is alone: exit code 1, and the other ends with it."""
    with mock(2, "1", "--dp-size", "2", "--engine-restarts", "1") as server:
        kept, killed = engines(server)
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.metric("treetop:num_engine_restarts") == 1)
        until(lambda: len(engines(server)) == 2)
        os.kill(next(pid for pid in engines(server) if pid != kept), signal.SIGKILL)
        assert server.process.wait(WAIT_S) == 1
    until(lambda: not command_of(kept), "an engine is left")


@pytest.mark.slow
def test_replicas_of_the_pair_give_what_one_process_gives():
    """Real rounds in float64: greedy, sampled and with stop strings, against plain decoding of each prompt alone."""
    with serving(*PAIR, "--max-running-requests", "4", "--dp-size", "2", "--device", "cpu") as server:
        first, second = engines(server)
        outcomes = asyncio.run(
            storm(server, of_the_pair(6, 40), 6, 3, ("whole", "stream"), lambda: os.kill(first, signal.SIGKILL))
        )
        assert outcomes == {"result": 18}
        assert server.metric("treetop:num_engine_restarts") == 1
        assert command_of(second)
        assert server.end() == 0


@pytest.mark.slow
def test_an_api_process_that_comes_later_reaches_all_replicas():
    with mock(2, "1", "--dp-size", "2", "--api-workers", "2") as server:
        workers = [pid for pid in server.children() if "serve.worker" in command_of(pid)]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(command_of, workers)))
        body = {"model": NAME, "prompt": "a", "max_tokens": 20}
        with server.client() as client:
            until(lambda: sum("restarting it" in line for line in server.said) == 2)
            for _ in range(4):
                assert client.completions.create(**body).choices[0].text == replayed(1, 20)
        assert server.end() == 0


# ------------------------------------------------------------------------------------------------ without processes

INFO = CoreInfo("/none", 1000, 512, 8, SpecShape(2, 3, 6), prefix=PrefixPages(4, 0, 100))


class FakeReplica:
    """An engine that keeps what it is given. ranks: that share its experts."""

    def __init__(self, index, ranks=1) -> None:
        self.links = [RankLink(index, rank, None, INFO) for rank in range(ranks)]
        self.pause = self.failure = None
        self.silent_s, self.given, self.aborted = 0.0, {}, []

    @property
    def standings(self):
        return {link: link.standing for link in self.links}

    def add(self, requests, sink, link) -> None:
        self.given.update((request.request_id, sink) for request in requests)
        link.placed.update(request.request_id for request in requests)

    def abort(self, request_ids) -> None:
        self.aborted += [request_id for request_id in request_ids if request_id in self.given]


def replicated(count=2, ranks=1) -> tuple[EngineProcessClient, list[FakeReplica]]:
    core = EngineProcessClient()
    core.close()
    core.engines = [FakeReplica(index, ranks) for index in range(count)]
    return core, core.engines


def asked(number: int, ids) -> EngineRequest:
    return EngineRequest(RequestId(number), tuple(ids), SamplingParams(), 0)


def test_requests_go_where_their_prefix_is_or_the_least_to_do_and_to_nobody_who_is_restarting():
    core, replicas = replicated()
    core.add([asked(i, [i] * 3) for i in range(4)], lambda update: None)
    assert [len(each.given) for each in replicas] == [2, 2]
    core.add([asked(4, range(20))], lambda update: None)
    with_prefix = replicas[4 in replicas[1].given]
    core.add([asked(5, [*range(20), 3])], lambda update: None)
    assert 5 in with_prefix.given
    with_prefix.pause = "it is started again"
    core.add([asked(6, [*range(20), 4])], lambda update: None)
    assert 6 not in with_prefix.given
    assert core.pause is None
    assert core.info.max_requests == 16
    replicas[0].pause = replicas[1].pause = "both are"
    assert core.pause == "both are"
    core.add([asked(7, [1])], lambda update: None)  # it waits
    assert any(7 in each.given for each in replicas)


@pytest.mark.parametrize("chosen", [("bits", "ties"), ("ties", "ties")])
def test_replicas_that_come_to_another_exactness_are_refused_with_both_as_they_start(monkeypatch, chosen):
    """As `--exactness auto` could on unlike devices; which row said so is no difference."""
    killed = []

    class Supervisor:
        """Of an engine that is up at once."""

        def __init__(self, own, restarts, watchdog, core, spare) -> None:
            self.core, self.index = core, own.replica

        def launch(self) -> None:
            fake = FakeReplica(self.index)
            fake.links[0].info = INFO._replace(exactness=chosen[self.index], exactness_by=f"dense.Card-{self.index}")
            fake.close = self.core.engines[self.index].close
            self.core.engines[self.index] = fake

        async def meet(self) -> None: ...

        async def close(self) -> None:
            killed.append(self.index)

    monkeypatch.setattr(serve, "EngineSupervisor", Supervisor)
    monkeypatch.setattr(serve, "check_files", lambda *_: None)

    async def start() -> int:
        process = ProcessOptions("ipc:///nowhere", EngineConfig(model="m"))
        async with serve.started_engines(
            process, ServeOptions(dp_size=2), asyncio.get_running_loop().create_future()
        ) as (core, _):
            return core.info.max_requests

    if len(set(chosen)) == 1:
        assert asyncio.run(start()) == 16
    else:
        words = "engine 0 is bits by dense.Card-0, engine 1 is ties by dense.Card-1; use --exactness bits or ties"
        with pytest.raises(ConfigError, match=words):
            asyncio.run(start())
    assert sorted(killed) == [0, 1]


def test_unlike_devices_are_refused_where_bits_are_asked_for_and_so_is_an_engine_unlike_the_one_before_it():
    """Before it has a request of it: an engine that is started again finds what there is then."""
    small, large = (
        INFO._replace(exactness="bits", device=f"GPU, compute capability {each}") for each in ("8.9", "9.0")
    )
    core, replicas = replicated()
    for exactness in ("bits", "ties"):
        replicas[0].links[0].info, replicas[1].links[0].info = (
            each._replace(exactness=exactness) for each in (small, large)
        )
        if exactness == "ties":
            core.check_alike()
        else:
            with pytest.raises(ConfigError, match=r"8\.9, engine 1 is on GPU.*9\.0.*or --exactness ties"):
                core.check_alike()

    async def start_again(info: CoreInfo) -> list[RequestId]:
        client = EngineProcessClient()
        (engine,), given = client.engines, []

        async def handshake(socket, address) -> CoreInfo:
            return info

        def socket():
            return Mock(send=lambda message: given.append(decode_to_core(message).requests[0].request_id))

        engine._context.destroy()
        engine._context, engine._handshake = Mock(socket=lambda kind: socket(), destroy=lambda linger: None), handshake
        engine.links = [RankLink(0, 0, Mock(), small)]
        engine.add([asked(1, [1])], lambda update: None)
        try:
            await engine.connect(["ipc:///nowhere"])
        finally:
            client.close()
        return given

    assert asyncio.run(start_again(small)) == [1]
    with pytest.raises(ConfigError, match=r"--exactness bits: engine 0 was on GPU.*8\.9, engine 0 is on GPU.*9\.0"):
        asyncio.run(start_again(large))
    with pytest.raises(ConfigError, match=r"engine 0 was bits, engine 0 is ties by dense\.Card"):
        asyncio.run(start_again(small._replace(exactness="ties", exactness_by="dense.Card")))


def test_new_requests_go_to_no_engine_that_is_silent_while_another_speaks():
    """Long before a watchdog calls it stalled. Where all are silent they may be in long steps: all count again."""
    core, replicas = replicated()
    replicas[0].silent_s = 10.0
    core.add([asked(i, [i] * 3) for i in range(6)], lambda update: None)
    assert [len(each.given) for each in replicas] == [0, 6]
    replicas[1].silent_s = 10.0
    core.add([asked(i, [i] * 3) for i in range(6, 12)], lambda update: None)
    assert [len(each.given) for each in replicas] == [6, 6]


def test_new_requests_go_to_no_engine_that_refuses_all_while_another_serves():
    """It ends each at once and so has the shortest queue; one that is silent may be in a long step. Where all refuse,
    whoever asks is told why.
    """
    core, replicas = replicated()
    (link,) = replicas[0].links
    link.info = INFO._replace(refuses_now="its weights are lost")
    replicas[1].silent_s = 10.0
    core.add([asked(i, [i] * 3) for i in range(6)], lambda update: None)
    assert [len(each.given) for each in replicas] == [0, 6]
    assert core.info.refuses is None
    link.info = INFO
    core.add([asked(6, [6])], lambda update: None)
    assert 6 in replicas[0].given
    for each in replicas:
        each.links[0].info = INFO._replace(refuses_now="its weights are lost")
    core.add([asked(i, [i] * 3) for i in range(7, 9)], lambda update: None)
    assert sum(len(each.given) for each in replicas) == 9


def test_an_engine_whose_weights_are_lost_tells_its_clients_that_it_refuses_all():
    """Until they are sent again, and apart from what no engine of its role takes."""
    core = make_core()
    info = restored(core, INFO, ChangesNote(lost=("model",)))
    assert (info.refuses, info.refuses_now) == (None, WEIGHTS_LOST)
    core.lost = ()
    assert core.current(info).refuses_now is None


def test_ranks_of_engines_are_one_list_and_what_an_engine_has_stays_there():
    """Two engines of two ranks each get one of four requests. One that is given out again goes to its engine's ranks,
    though others have less to do, and what the others hold is remembered: a prompt goes where its prefix is.
    """
    core, replicas = replicated(2, 2)
    links = [link for each in replicas for link in each.links]
    core.add([asked(i, [i] * 30) for i in range(4)], lambda update: None)
    assert [len(link.placed) for link in links] == [1] * 4
    with_prefix = next(link for link in links if 0 in link.placed)
    busy = replicas[1 - with_prefix.engine]
    for link in busy.links:
        link.placed.add(RequestId(9))
    assert core.choose(asked(5, [7] * 30), busy.links[0].engine) in busy.links
    assert core.choose(asked(6, [0] * 30)) is with_prefix


def test_what_is_said_of_a_request_reaches_its_own_replica_and_nothing_after_its_end():
    (core, replicas), heard = replicated(), []
    core.add([asked(0, [1]), asked(1, [2])], heard.append)
    last = RequestUpdate(RequestId(0), (), finish_reason="stop")
    replicas[0].given.pop(RequestId(0))(last)
    assert heard == [last]
    core.abort([RequestId(0), RequestId(1)])
    assert (replicas[0].aborted, replicas[1].aborted) == ([], [RequestId(1)])
    replicas[1].failure = EngineError("it has ended")
    with pytest.raises(EngineError, match="it has ended"):
        core.add([asked(2, [3])], heard.append)


def test_each_replica_has_gpus_of_its_own_and_too_few_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,2,0")
    options = SimpleNamespace(tp_size=2, ep_size=1, device="auto")
    take_share(ProcessOptions("", options, replica=1, num_replicas=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,2"
    with pytest.raises(ConfigError, match="--dp-size 3: 6 GPUs are needed, 2 a replica, and this machine shows 5"):
        take_share(ProcessOptions("", options, replica=0, num_replicas=3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    take_share(ProcessOptions("", EngineConfig(), replica=1, num_replicas=9))  # on a CPU they share its threads


@pytest.mark.parametrize(
    "unfit",
    few_of([{"load": CoreLoad(num_waiting=1)}, {"silent_s": 60.0}, {"info": INFO._replace(refuses_now="asleep")}], 0),
)
def test_an_engine_with_room_takes_over_what_one_had_that_died_and_the_rest_waits(unfit):
    """As many as it runs. One in which requests wait, that hangs, or that refuses all has no room."""

    async def run() -> list[list[int]]:
        client = EngineProcessClient(num_engines=3)
        links = [RankLink(each._index, 0, Mock(), INFO) for each in client.engines]
        for each, link in zip(client.engines, links, strict=True):
            each.links, each._up, each.num_restarts = [link], True, 0
            each._journal.opened(8)
            each.settled.set()
        dies, well, other = client.engines
        for name, value in unfit.items():
            setattr(other.links[0], name, value)
        dies.add([asked(i, [i]) for i in range(8)], lambda update: None)
        well.add([asked(8 + i, [i]) for i in range(5)], lambda update: None)
        dies.lost("gone")
        assert client.pause is None
        given = [
            [request.request_id for each in link.socket.send.call_args_list for request in sent(each).requests]
            for link in links
        ]
        client.abort([RequestId(0)])  # wherever it is now
        assert (len(dies._journal), len(well._journal)) == (5, 7)
        client.close()
        return given

    def sent(call) -> AddRequests:
        return decode_to_core(call.args[0])

    assert asyncio.run(run()) == [[*range(8)], [8, 9, 10, 11, 12, 0, 1, 2], []]
