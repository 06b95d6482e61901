"""Two replicas behind Ray Serve, with mock engines: where prompts go, a replica that dies, a rolling restart."""

import asyncio
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from support.addresses import addresses
from support.holding import STEPS, Held
from support.serving import TOKENIZER, command_of, replayed
from support.waiting import WAIT_S, until
from treetop.cli.replicas import app
from treetop.core.engine_core import ASLEEP
from treetop.core.wire import MockOptions, ProcessOptions
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, UserError
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, EngineRequest, RequestUpdate
from treetop.types.sampling import SamplingParams
from treetop_debug.rank_faults import RESUME_FAULTS

with warnings.catch_warnings():  # of Ray's own modules, as they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.serve", reason="Ray is not installed (treetop-llm[ray])")

MOVED = "its stream goes on with another"
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a proxy that takes longer to start would be killed
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",  # a replica that answers later is passed over
}
START_S = 240.0
"""Ray starts a dozen processes; ten seconds will do on a machine that has nothing else to do."""


class Replicas:
    """The driver's process, and all that Ray has started below it."""

    def __init__(self, held: Held, **given: str) -> None:
        """held: steps of the engines are, where streams are to last."""
        self.held = held
        held.go()
        (address,) = addresses(1)
        self.url, self.said = f"http://{address}", list[str]()
        driver, port = Path(__file__).parents[1] / "support" / "ray_driver.py", address.rpartition(":")[2]
        command = [sys.executable, str(driver), port]
        self.process = subprocess.Popen(
            [*command, *(f"{name.replace('_', '-')}={value}" for name, value in given.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **RAY, **held.environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.append(line.rstrip())

    def wait_for(self, word: str, count: int = 1) -> None:
        deadline = time.monotonic() + START_S
        while self.said.count(word) < count:
            assert self.process.poll() is None, "\n".join(self.said)
            assert time.monotonic() < deadline, "\n".join(self.said)
            time.sleep(0.02)

    def num_moved(self) -> int:
        return sum(MOVED in line for line in self.said)

    def processes(self) -> dict[int, int]:
        """All below the driver: process ids, with that of the parent."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        found, new = {}, {self.process.pid}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new and pid not in found}
            found |= {pid: parents[pid] for pid in new}
        return found

    def engines(self) -> dict[int, int]:
        """Engine processes, with their replica's."""
        return {pid: parent for pid, parent in self.processes().items() if "engine_process" in command_of(pid)}

    def ask_again(self) -> None:
        self.process.stdin.write("again\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    held = Held(tmp_path_factory.mktemp("held"), STEPS)
    running = Replicas(held, mock_engine="250,1-3", replicas="2", max_running_requests="8", model="builtin:nestling")
    try:
        running.wait_for("up")
        yield running
    finally:
        everything = running.processes()
        running.close()
        assert running.process.returncode == 0
        until(lambda: not any(command_of(pid) for pid in everything), "processes are left")


def prompt(topic: int, length: int, end: int = 0) -> list[int]:
    """Prompts of one topic begin alike, up to the last token."""
    return [4 + (topic * 37 + i * (topic + 1)) % 150 for i in range(length - 1)] + [4 + end]


async def stream(
    http: httpx.AsyncClient, url: str, ids: list[int], count: int, begun: asyncio.Event
) -> tuple[str, float]:
    """The text, and the longest pause in it. begun: is set with the first of it."""
    body = {"prompt": ids, "max_tokens": count, "stream": True}
    text, last_s, pause_s = "", time.monotonic(), 0.0
    async with http.stream("POST", url + "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text, pause_s
            if line:
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                begun.set()
                last_s, pause_s = time.monotonic(), max(pause_s, time.monotonic() - last_s)
    raise AssertionError(f"the stream ends after {len(text)} characters")


async def streams(replicas: Replicas, count: int, tokens: int, during) -> list[float]:
    """So many streams of so many tokens each, all of which must be right, and their pauses. during: meanwhile."""
    url = replicas.url
    replicas.held.hold()
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        begun = [asyncio.Event() for _ in range(count)]
        asked = [asyncio.ensure_future(stream(http, url, prompt(n, 20 + n), tokens, begun[n])) for n in range(count)]
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), WAIT_S)
        await asyncio.to_thread(during)
        replicas.held.go()
        answers = await asyncio.gather(*asked)
    for number, (text, _) in enumerate(answers):
        assert text == replayed(20 + number, tokens)
    return [pause_s for _, pause_s in answers]


def test_prompts_go_where_their_prefix_is(replicas):
    """The replicas' own prefix caches say how much they had: all but the last page, after the first of each topic."""
    http, missed, engines = httpx.Client(timeout=WAIT_S), [], replicas.engines()
    assert len(set(engines.values())) == 2
    with http:
        for turn in range(6):
            for topic in range(4):
                body = {"prompt": prompt(topic, 100, turn), "max_tokens": 2}
                usage = http.post(replicas.url + "/v1/completions", json=body).json()["usage"]
                if turn and usage["prompt_tokens_details"]["cached_tokens"] != 96:
                    missed.append((topic, turn))
        chat = http.get(replicas.url + "/v1/models").json()
        text = http.post(replicas.url + "/v1/completions", json={"prompt": "def area(r):", "max_tokens": 9}).json()
    assert missed == []
    assert chat["data"][0]["id"] == "builtin:nestling"
    assert text["choices"][0]["text"] == replayed(len(TOKENIZER.encode("def area(r):")), 9)


def test_a_stream_whose_replica_is_killed_goes_on_with_another(replicas):
    """No token comes twice and none is lost, for all that were on it; what is asked then finds the other replica."""
    before, engines = replicas.num_moved(), replicas.engines()
    victim = next(iter(engines.values()))

    def kill():
        os.kill(victim, signal.SIGKILL)

    pauses = asyncio.run(streams(replicas, 8, 150, kill))
    until(lambda: replicas.num_moved() > before, "no stream moved")  # Ray brings the line when its log has been read
    moved = replicas.num_moved() - before
    assert moved < 8, "all of them were on one replica"
    print(f"{moved} of 8 streams moved, longest pause {max(pauses):.3f} s")
    with httpx.Client(timeout=WAIT_S) as http:
        for number in range(10):
            body = {"prompt": prompt(number, 30), "max_tokens": 3}
            assert http.post(replicas.url + "/v1/completions", json=body).status_code == 200
    until(lambda: not any(command_of(pid) for pid, parent in engines.items() if parent == victim), "its engine is left")
    until(lambda: len(set(replicas.engines().values())) == 2, "Ray starts another one")


@pytest.mark.slow
def test_a_rolling_restart_drains(replicas):
    """Every replica is replaced while streams run, and no stream has to move for it."""
    before, engines, done = replicas.num_moved(), replicas.engines(), replicas.said.count("again")

    def restart():
        replicas.ask_again()
        replicas.wait_for("again", done + 1)

    asyncio.run(streams(replicas, 6, 400, restart))
    until(lambda: len(now := replicas.engines()) == 2 and not now.keys() & engines.keys(), "the old ones are left")
    assert replicas.num_moved() == before


@pytest.mark.slow
def test_an_api_that_is_killed_comes_back_and_its_streams_do_not_end_as_if_they_were_whole(replicas):
    (api,) = [pid for pid in replicas.processes() if "ServeReplica:default:Api" in command_of(pid)]

    async def cut_off() -> None:
        replicas.held.hold()
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            begun = [asyncio.Event() for _ in range(3)]
            asked = [asyncio.ensure_future(stream(http, replicas.url, prompt(n, 20), 400, begun[n])) for n in range(3)]
            await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), WAIT_S)
            os.kill(api, signal.SIGKILL)
            replicas.held.go()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, (AssertionError, httpx.HTTPError)) for answer in answers), answers

    asyncio.run(cut_off())
    with httpx.Client(timeout=WAIT_S) as http:
        answer = http.post(replicas.url + "/v1/completions", json={"prompt": prompt(1, 30), "max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == replayed(30, 5)


# ------------------------------------------------------------------------------------------------ without a cluster


class MortalReplicas:
    """A deployment's handle. A stream goes on behind what its request has received, and may die after any piece.

    A request whose prompt is 13 kills its replica always, one of 14 never gets one, and one of 15 none after its first.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.num_streams, self.num_cancelled = random.Random(seed), 0, 0
        self.generate = self

    def options(self, stream: bool) -> "MortalReplicas":
        assert stream
        return self

    def remote(self, asked: EngineRequest) -> "MortalStream":
        self.num_streams += 1
        return MortalStream(self, asked)


class MortalStream:
    def __init__(self, replicas: MortalReplicas, asked: EngineRequest) -> None:
        self.replicas, self.asked, self.at = replicas, asked, len(asked.received)

    def __aiter__(self) -> "MortalStream":
        return self

    async def __anext__(self) -> list[RequestUpdate]:
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        first = self.asked.prompt_ids[0]
        await asyncio.sleep(WAIT_S if first == 14 or (first == 15 and self.asked.received) else 0)
        if first == 15 and self.at:
            raise ActorDiedError
        rng, maximum = self.replicas.rng, self.asked.params.max_tokens
        # more than the steps of a trial apart, so that nothing is thought to have killed its replica
        if self.asked.prompt_ids[0] == 13 or (self.at > len(self.asked.received) + 20 and rng.random() < 0.2):
            kinds = [ActorDiedError(), ActorUnavailableError("gone", None), EngineError("dead"), StopAsyncIteration()]
            raise rng.choice(kinds)
        end = min(self.at + rng.randint(1, 4), maximum)
        new, start = tuple(range(self.at, end)), self.at
        self.at = end
        reason = "length" if end == maximum else None
        return [RequestUpdate(self.asked.request_id, new, finish_reason=reason, start=start)]

    def cancel(self) -> None:
        self.replicas.num_cancelled += 1


async def through(replicas: MortalReplicas, prompts: list[int], count: int, timeout_s: float | None = None):
    """Tokens of each request, and its last update."""
    from treetop.ray.core import RayClient

    core = RayClient(replicas, CoreInfo("", 1000, 10**4, 4, SpecShape(1, 0, 1)))
    tokens, ends, ended = {}, {}, asyncio.Event()

    def take(update: RequestUpdate) -> None:
        tokens.setdefault(update.request_id, []).extend(update.new_ids)
        if update.finish_reason is not None:
            assert update.request_id not in ends, "an end that comes twice"
            ends[update.request_id] = update
        if len(ends) == len(prompts):
            ended.set()

    params = SamplingParams(max_tokens=count)
    core.add([EngineRequest(core.next_id(), (first,), params, 0, timeout_s=timeout_s) for first in prompts], take)
    await asyncio.wait_for(ended.wait(), WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while core.load.num_running:
            await asyncio.sleep(0.001)
    return tokens, ends


def test_a_replica_whose_engine_is_dead_for_good_ends_and_leaves_no_files(monkeypatch):
    from treetop.ray import replica

    ended, folders = [], []
    monkeypatch.setattr(replica.os, "_exit", lambda code: ended.append((code, Path(folders[0]).exists())))
    ours = type("Ours", (replica.Replica,), {"__del__": lambda self: None})  # Ray's is awaited
    one = ours.__new__(ours)

    async def killed():
        mocked = MockOptions((1, 2), 0.01, 1, 1)
        await one.__init__(ProcessOptions("", EngineConfig(), mocked), 0)
        folders.append(one._engines.addresses[0].removeprefix("ipc://").rpartition("/")[0])
        assert Path(folders[0]).exists()
        one._engines.kill()
        await asyncio.wait_for(one._watching, WAIT_S)
        one._engines.core.close()

    asyncio.run(killed())
    assert ended == [(1, False)]


@pytest.mark.parametrize("seed", range(20))
def test_streams_of_replicas_that_die_at_any_time_are_whole(seed):
    replicas = MortalReplicas(seed)
    tokens, ends = asyncio.run(through(replicas, [1, 2, 3, 13, 4], 150))
    for number in (0, 1, 2, 4):
        assert tokens[number] == list(range(150))
        assert ends[number].finish_reason == "length"
    assert replicas.num_streams > 7, "nobody died"
    assert "ended twice with this request" in ends[3].error, "what kills replicas is tried for ever"


def test_a_request_that_no_replica_takes_ends_with_its_time(monkeypatch):
    monkeypatch.setattr("treetop.ray.core._LATE_S", 0.0)
    replicas = MortalReplicas(0)
    _, ends = asyncio.run(through(replicas, [14], 5, timeout_s=0.2))
    assert ends[0].timed_out
    assert replicas.num_cancelled == 1


def test_a_request_whose_replica_ends_and_that_no_other_takes_ends_with_its_time(monkeypatch):
    """It waited for a replica: nothing is said of a second one that has ended."""
    monkeypatch.setattr("treetop.ray.core._LATE_S", 0.0)
    for timeout_s in (0.2, 3.0, 10.0):  # in the first a busy machine may not get as far as that
        replicas = MortalReplicas(0)
        tokens, ends = asyncio.run(through(replicas, [15], 50, timeout_s))
        assert ends[0].timed_out
        if replicas.num_streams == 2:
            break
    assert f"request timed out after {len(tokens[0])} tokens" in ends[0].error
    assert replicas.num_streams == 2


@pytest.mark.parametrize("name", RESUME_FAULTS)
def test_a_moved_stream_that_is_not_whole_is_an_error(name):
    fault = RESUME_FAULTS[name]
    with fault.active():
        tokens, ends = asyncio.run(through(MortalReplicas(0), [1, 2, 3], 400))
    for number, end in ends.items():
        assert tokens[number] == list(range(len(tokens[number])))
        assert fault.guard in end.error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": "0"}, "replicas: must be N or A-B with"),
        ({"replicas": "4-2"}, "replicas: must be N or A-B with"),
        ({"replicas": "many"}, "replicas must be N or A-B"),
        ({"queue-bound": "-1"}, "queue-bound a number"),
        ({"port": 8001}, "serve start --http-port"),
        ({"dp-size": 2}, "--dp-size: Ray starts replicas"),
        ({"hoste": "x"}, "unrecognized arguments: --hoste=x"),
        ({5: "x"}, "unrecognized arguments: --5=x"),
        ({"help": "true"}, "help: see treetop serve --help"),
        ({"queue_bound": "1", "queue-bound": "2"}, "queue-bound: it is given twice"),
        ({"page-size": "x"}, "--page-size"),
        ({"model": "/no/such"}, "/no/such: no such folder"),
        ({"mock-engine": "1,1", "chat-template": "/no/such"}, "--chat-template /no/such"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, words):
    """Before a replica is started. Also elsewhere than in the process of the command line, where Ray pickles it."""
    with pytest.raises(UserError, match=words) as caught:
        app(given)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_ray_shows_a_refusal_in_one_line():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from click.testing import CliRunner
        from ray.serve import scripts
    ended = CliRunner().invoke(scripts.cli, ["run", "treetop.cli.replicas:app", "model=/no/such"])
    assert ended.exit_code == 2
    assert ended.stderr.splitlines()[-1] == "Error: model /no/such: no such folder"
    assert "Traceback" not in ended.output


def test_a_request_goes_to_no_replica_that_refuses_all_while_another_serves():
    """An engine that sleeps, waits for weights, restarts or hangs; where none serves, one of these answers."""
    from treetop.ray.router import PrefixRequestRouter, standing_of

    def replica(name, refuses=None, pause=None):
        info = CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1), refuses_now=refuses)
        said = standing_of(SimpleNamespace(info=info, pause=pause))
        return SimpleNamespace(
            replica_id=name, replica_metadata={}, max_ongoing_requests=8, routing_stats=json.loads(json.dumps(said))
        )

    def chosen(*replicas):
        router = PrefixRequestRouter.__new__(PrefixRequestRouter)
        router.initialize_state()
        router._replica_queue_len_cache = SimpleNamespace(get=lambda name: 0)
        asked = EngineRequest(1, (5, 6), SamplingParams(), 0)
        pending = SimpleNamespace(args=[asked], metadata=SimpleNamespace(internal_request_id="r"), future=None)
        ranks = asyncio.run(router.choose_replicas([*replicas], pending))
        return [each.replica_id for rank in ranks for each in rank]

    asleep, hangs = replica("asleep", refuses=ASLEEP), replica("hangs", pause="the engine hangs")
    assert chosen(asleep, replica("serves"), hangs) == ["serves"]
    assert sorted(chosen(asleep, hangs)) == ["asleep", "hangs"]
    fresh = replica("fresh")
    fresh.routing_stats = None  # it has said nothing yet
    assert chosen(asleep, fresh) == ["fresh"]


def test_what_replicas_cannot_do_is_refused():
    from treetop.ray.app import Scale, build_app
    from treetop.serve_options import ServeOptions
    from treetop.types.kv_transfer.options import DisaggregationOptions

    disaggregation = DisaggregationOptions(mode="prefill", listen="tcp://127.0.0.1:7001")
    with pytest.raises(ConfigError, match="would answer none"):
        build_app(ProcessOptions("", EngineConfig(), disaggregation=disaggregation), ServeOptions(), Scale())
    with pytest.raises(ConfigError, match="--shutdown-delay: Ray's proxy"):
        build_app(ProcessOptions("", EngineConfig()), ServeOptions(shutdown_delay=5), Scale())


@pytest.mark.slow
def test_the_application_says_ray_what_was_asked():
    given = {"replicas": "2-5", "max_running_requests": 8, "drain_timeout": 7, "api_workers": 3, "queue_bound": 2}
    switches = {"disable_radix_cache": "true", "overlap": "false", "allow_origin": ["a", "b"]}
    api = app({"mock-engine": "1,1", **given, **switches})._bound_deployment
    assert api.init_args[1].allow_origin == ("a", "b")
    replica = api.init_args[0]._bound_deployment
    config = replica.init_args[0].config
    assert (config.disable_radix_cache, config.overlap, config.max_running_requests) == (True, False, 8)
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 6)
    assert replica._deployment_config.graceful_shutdown_timeout_s == 7
    assert replica._deployment_config.max_ongoing_requests == 16
    assert replica._deployment_config.request_router_config.request_router_kwargs == {"queue_bound": 2}
    assert api.num_replicas == 3
