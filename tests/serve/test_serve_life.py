"""Processes of a server: who ends with whom, with which exit code, and what clients hear of it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import openai
import pytest

from support.grids import few_of
from support.holding import LAST_WORDS, SHORT_TURNS, STEPS, WORKERS_END, Held
from support.serving import Server, command_of, mock, replayed, serving
from support.storms import choices_are_put_back
from support.threads import in_threads, joined
from support.waiting import WAIT_S, until
from treetop.serve.serve import start
from treetop.serve_options import ServeOptions
from treetop.types.errors import CheckpointError, ConfigError

NAME = "builtin:nestling"
LONG = {"model": NAME, "prompt": "a", "max_tokens": 2000}


def test_an_engine_that_is_killed_ends_everything_with_a_clear_error(tmp_path):
    """Requests in flight fail, streamed or not; new ones and health are 503; then exit code 1, and nothing is left."""
    held = Held(tmp_path, LAST_WORDS)
    with mock(100, "1", "--engine-restarts", "0", environment=held.environment) as server:
        heard = []

        def ask(index: int) -> None:
            try:
                answer = server.client().completions.create(**LONG, stream=bool(index % 2))
                heard.append([*answer])
            except openai.APIError as error:
                heard.append(str(error))

        threads = in_threads(4, ask)
        until(lambda: server.metric("treetop:num_requests_running") == 4)
        pids = server.children()
        os.kill(server.engine(), signal.SIGKILL)
        joined(threads)
        assert len(heard) == 4
        assert all("engine process has ended with exit code -9" in each for each in heard), heard
        for answer in (server.get("/health"), server.get("/health/ready"), server.post("/v1/completions", LONG)):
            assert answer.status_code == 503
            assert "engine process has ended" in answer.json()["error"]["message"]
        held.go()
        assert server.process.wait(WAIT_S) == 1
    until(lambda: not any("treetop" in command_of(pid) for pid in pids))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_api_that_is_killed_takes_the_engine_with_it(workers):
    """Also its workers and the process of the chat template; kill -9 leaves it no time to say goodbye."""
    with mock(5, "1", "--api-workers", str(workers)) as server:
        assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        pids = server.children()
        assert len(pids) >= workers
        folder = folder_of(server)
        server.process.kill()
        until(lambda: not any("treetop" in command_of(pid) for pid in pids), "a process is left")
        assert not folder.exists()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sigterm_finishes_what_was_accepted(workers, tmp_path):
    """Every answer is whole, streamed or not; whoever is new hears 503 until all is done; exit code 0."""
    held = Held(tmp_path, STEPS)
    with mock(250, "1", "--api-workers", str(workers), environment=held.environment) as server:
        texts = {}

        def ask(index: int) -> None:
            answer = server.client().completions.create(model=NAME, prompt="a", max_tokens=200, stream=bool(index % 2))
            texts[index] = "".join(chunk.choices[0].text for chunk in (answer if index % 2 else [answer]))

        threads = in_threads(8, ask)
        until(lambda: server.metric("treetop:num_requests_running") == 8)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not is_ready(server))
        refused = httpx.Response(200)

        def is_refused() -> bool:
            nonlocal refused
            with suppress(httpx.ReadTimeout):  # another process is not told yet, and takes what is held with all
                refused = server.post("/v1/completions", {"prompt": "a"}, timeout=5)
            return refused.status_code == 503

        until(is_refused)
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
        assert server.get("/health").status_code == 200
        assert not texts  # all of this while requests are decoded
        held.go()
        joined(threads)
        assert texts == dict.fromkeys(range(8), replayed(1, 200))
        assert server.process.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


@pytest.mark.parametrize(
    ("flags", "again"), few_of([(("--drain-timeout", "0.2"), False), ((), True), (("--api-workers", "2"), True)], 0, 2)
)
def test_a_drain_has_a_limit_and_a_second_signal_ends_it(flags, again, tmp_path):
    """A process of two that had nothing to do is on its way out by then, and says nothing of it."""
    held = Held(tmp_path, WORKERS_END)
    with mock(50, "1", *flags, environment=held.environment) as server:
        threads = in_threads(1, partial(cut_off, server))
        until(lambda: server.metric("treetop:num_requests_running") == 1)
        server.process.send_signal(signal.SIGINT)
        if again:
            until(lambda: not is_ready(server))
            if flags:
                server.wait_for("on its way out")
            server.process.send_signal(signal.SIGINT)
        held.go()
        assert server.wait() == 130
        joined(threads)
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


def cut_off(server: Server, _: int) -> None:
    with pytest.raises(openai.APIError):
        server.client().completions.create(**LONG)


def is_ready(server: Server) -> bool:
    """What a balancer hears, over a new connection."""
    status = server.get("/health/ready", headers={"Connection": "close"}).status_code
    assert status in (200, 503)
    return status == 200


def test_a_shutdown_delay_lets_a_balancer_see_that_the_server_leaves_before_it_refuses_anything():
    """Readiness is gone at once, and each answer ends its connection; work is taken until the delay is over."""
    with mock(1, "4", "--shutdown-delay", "600") as server:
        assert is_ready(server)
        assert "connection" not in server.get("/health").headers
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not is_ready(server))
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9})
        assert answer.json()["choices"][0]["text"] == replayed(1, 9)
        assert answer.headers["connection"] == "close"
        assert server.get("/health/live").status_code == 200
        assert server.end() == 0  # the second signal


def test_a_full_queue_is_a_429_and_harms_nobody(tmp_path):
    """Two run, two wait, the fifth is told to come again; more than can ever be is a 400."""
    held, flags = Held(tmp_path, STEPS), ("--max-running-requests", "2", "--max-queued-requests", "2")
    with mock(250, "1", *flags, environment=held.environment) as server:
        texts = []
        body = {"model": NAME, "prompt": "a", "max_tokens": 200}
        threads = in_threads(4, lambda _: texts.append(server.client().completions.create(**body).choices[0].text))
        until(lambda: server.metric("treetop:num_requests_waiting") == 2)
        with pytest.raises(openai.RateLimitError, match="max-queued-requests") as refused:
            server.client().completions.create(**body)
        assert refused.value.response.headers["retry-after"] == "1"
        assert server.metric("treetop:requests_refused_total") == 1
        with pytest.raises(openai.BadRequestError, match="at most 4"):
            server.client().completions.create(**body, n=5)
        held.go()
        joined(threads)
        assert texts == [replayed(1, 200)] * 4
        assert server.client().completions.create(**body, n=4).choices[3].text == texts[0]


def test_api_processes_share_one_queue(tmp_path):
    """Whoever of the two is asked, as many may run and wait as there is room for, and the next is told to come again.

    Each connection stays with the process that took it, so one of them alone holds more than half.
    """
    held = Held(tmp_path, STEPS)
    flags = ("--max-running-requests", "2", "--max-queued-requests", "4", "--api-workers", "2")
    with mock(250, "1", *flags, environment=held.environment) as server:
        texts = []
        body = {"model": NAME, "prompt": "a", "max_tokens": 200}
        with server.client() as one:
            threads = in_threads(6, lambda _: texts.append(one.completions.create(**body).choices[0].text))
            until(lambda: server.metric("treetop:num_requests_waiting") == 4)
            for _ in range(4):
                full = pytest.raises(openai.RateLimitError, match="6 requests run and wait, of 6")
                with server.client() as another, full:
                    another.completions.create(**body)
            held.go()
            joined(threads)
            assert texts == [replayed(1, 200)] * 6
            assert one.completions.create(**body, n=6).choices[5].text == texts[0]


def test_a_request_that_takes_too_long_ends_with_a_clear_error():
    """By its own `timeout`, or by the server's; streamed, after what came; another one is not touched."""
    with mock(10, "1", "--request-timeout", "60") as server, server.client() as client:
        other = []
        body = {"model": NAME, "prompt": "a"}
        threads = in_threads(1, lambda _: other.append(client.completions.create(**body, max_tokens=200)))
        with pytest.raises(openai.APIStatusError, match="request timed out") as late:
            client.completions.create(**body, max_tokens=1900, extra_body={"timeout": 0.3})
        assert late.value.status_code == 504
        for timeout_s in (0.3, 3.0, 10.0):  # a busy machine may say nothing in the first
            pieces: list[str] = []
            with pytest.raises(openai.APIError, match="request timed out"):
                pieces.extend(streamed(client, **body, max_tokens=1900, extra_body={"timeout": timeout_s}))
            assert replayed(1, 1900).startswith("".join(pieces))
            if pieces:
                break
        assert pieces
        for wrong, words in ((61, "request-timeout"), (0, "above 0"), (-1, "above 0"), ("1", "timeout")):
            answer = server.post("/v1/completions", {**body, "timeout": wrong})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
        joined(threads)
        assert other[0].choices[0].text == replayed(1, 200)


def streamed(client: openai.OpenAI, **body) -> Iterator[str]:
    for chunk in client.completions.create(**body, stream=True):
        yield chunk.choices[0].text


def test_priorities_need_their_policy_and_then_decide_who_waits():
    """Each leaves as soon as it has begun, so that the next may; the first once all wait."""
    body = {"model": NAME, "prompt": "a", "max_tokens": 20}
    with mock(5, "1") as server:
        answer = server.post("/v1/completions", {**body, "priority": 1})
        assert answer.status_code == 400
        assert "--schedule-policy priority" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", {**body, "priority": 0}).status_code == 200
    with mock(50, "1", "--schedule-policy", "priority", "--max-running-requests", "1") as server:
        begun, all_wait = [], threading.Event()

        def ask(index: int) -> None:
            fields = {**body, "max_tokens": 2000, "stream": True}
            stream = server.client().completions.create(**fields, extra_body={"priority": (0, 2, 1, -1)[index]})
            next(iter(stream))
            begun.append(index)
            if index == 0:
                assert all_wait.wait(WAIT_S)
            stream.close()

        threads = []
        for index in range(4):
            threads += in_threads(1, lambda _, index=index: ask(index))
            until(lambda there=index + 1: num_alive(server) == there)  # before the next comes
        all_wait.set()
        joined(threads)
        assert begun == [0, 3, 2, 1]


def num_alive(server: Server) -> float:
    return server.metric("treetop:num_requests_running") + server.metric("treetop:num_requests_waiting")


def test_memory_so_small_that_requests_are_put_back_changes_no_text():
    """Eight choices over pages for two and a half: all end, and with the text they would have had alone."""
    with mock(1, "1-4", "--max-total-tokens", "512", "--context-length", "200") as server:
        choices_are_put_back(server, 1, 190, 8)


def test_several_api_processes_share_socket_and_engine():
    """Each answers, and /metrics of either counts what both served."""
    with mock(1, "4", "--api-workers", "2", "--api-restarts", "0") as server:
        assert sum("serve.worker" in command_of(pid) for pid in server.children()) == 2
        for _ in range(12):
            assert server.client().completions.create(model=NAME, prompt="a", max_tokens=9).choices[0].text
        assert server.metric("sglang:gen_throughput") > 0  # first: it looks back five seconds from the last look
        assert server.metric("treetop:generation_tokens_total") == 12 * 9
        assert server.metric("vllm:request_success_total", finished_reason="length") == 12
        asked = {"handler": "/v1/completions", "method": "POST", "status": "200"}
        until(lambda: server.metric("treetop:http_requests_total", **asked) == 12)  # counted behind the answer
        for phase in ("queue", "prefill", "decode", "inference"):
            assert server.metric(f"vllm:request_{phase}_time_seconds_count") == 12
        assert server.metric("sglang:generation_tokens_total") == 12 * 9
        for worker in api_workers(server):
            os.kill(worker, signal.SIGKILL)
        assert server.wait() == 1
        assert any("no API process is left" in line for line in server.said)


def api_workers(server: Server) -> list[int]:
    return [pid for pid in server.children() if "serve.worker" in command_of(pid)]


def test_an_api_process_that_is_killed_is_started_again_and_cuts_no_streams_but_its_own(tmp_path):
    """Its requests end in the engine and in the queue's length at once; what others stream is whole, and exit code 0.

    While one process is stopped the other takes all that comes, so three streams are known to be with each.
    """
    held = Held(tmp_path, STEPS + SHORT_TURNS)
    flags = ("--api-workers", "2", "--max-running-requests", "6", "--max-queued-requests", "0")
    with mock(250, "1", *flags, environment=held.environment) as server:
        body, texts, cut = {"model": NAME, "prompt": "a", "max_tokens": 200, "stream": True}, [], []

        def ask(_: int) -> None:
            with server.client() as client:
                try:
                    texts.append("".join(event.choices[0].text for event in client.completions.create(**body)))
                except openai.APIConnectionError as error:  # it ends inside a stream
                    cut.append(str(error))

        threads, workers = [], api_workers(server)
        for away, count in zip(workers, (3, 6), strict=True):
            os.kill(away, signal.SIGSTOP)
            try:
                threads += in_threads(3, ask)
                until(lambda count=count: server.metric("treetop:num_requests_running") == count)
            finally:
                os.kill(away, signal.SIGCONT)
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len(cut) == 3)
        until(lambda: len(again := api_workers(server)) == 2 and workers[0] not in again)
        until(lambda: server.metric("treetop:num_requests_running") == 3)
        assert texts == []  # the others have not ended: it is not their end that was waited for
        os.kill(workers[1], signal.SIGSTOP)  # the new one takes these
        try:
            threads += in_threads(3, ask)
            until(lambda: server.metric("treetop:num_requests_running") == 6)
        finally:
            os.kill(workers[1], signal.SIGCONT)
        held.go()
        joined(threads)
        assert (texts, len(cut)) == ([replayed(1, 200)] * 6, 3)
        until(lambda: server.metric("treetop:kv_cache_usage_perc") == 0, "pages are leaked")
        until(lambda: any("API process" in line and "exit code -9" in line for line in server.said))
        os.kill(server.engine(), signal.SIGKILL)
        os.kill(workers[1], signal.SIGSTOP)
        try:
            answer = server.post("/v1/completions", body | {"stream": False, "max_tokens": 5})
        finally:
            os.kill(workers[1], signal.SIGCONT)
        assert answer.json()["choices"][0]["text"] == replayed(1, 5), "the new process was given no other engine"
        assert server.end() == 0


def test_api_processes_are_started_again_only_so_often():
    """With none left the server ends with exit code 1, as it did without."""
    with mock(20, "1", "--api-workers", "2", "--api-restarts", "1") as server:
        for left in (2, 1, 0):
            killed = api_workers(server)[0]
            os.kill(killed, signal.SIGKILL)
            until(lambda left=left, killed=killed: left == len(now := api_workers(server)) and killed not in now)
        assert server.wait() == 1
        assert sum("; restarting it" in line for line in server.said) == 1


def test_the_socket_lies_where_nobody_else_can_go():
    with mock(1, "1") as server:
        folder = folder_of(server)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.end() == 0
        assert not folder.exists()


def folder_of(server: Server) -> Path:
    """Where its sockets are."""
    addresses = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "treetop-" in line]
    return Path(next(each for each in addresses if is_of(server, each))).parent


def is_of(server: Server, address: str) -> bool:
    """Whether the server's engine has this socket: its folder is named on nobody else's."""
    maps = Path(f"/proc/{server.engine()}/fd")
    inodes = {os.readlink(each) for each in maps.iterdir() if "socket" in os.readlink(each)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(f"socket:[{line[6]}]" in inodes for line in lines if line[-1] == address)


# ---------------------------------------------------------------------------------------------- starting


def refused(*flags: str, code: int = 2, environment: dict[str, str] | None = None) -> str:
    """What a server that cannot start says: one line."""
    command = [sys.executable, "-m", "treetop.cli", "serve", "--port", "0", *flags]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, **(environment or {})}
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def test_what_cannot_start_is_one_line_and_exit_code_2(tmp_path):
    assert "no such folder" in refused(str(tmp_path / "nowhere"), "--mock-engine", "1,1")
    assert "--mock-engine must be" in refused("--mock-engine", "fast")
    assert "--port must lie" in refused("--port", "70000", "--mock-engine", "1,1")
    assert "only 1 for now" in refused("--pipeline-parallel-size", "2")
    assert "--api-workers must lie" in refused("--api-workers", "0")
    assert "--chat-template" in refused("--mock-engine", "1,1", "--chat-template", str(tmp_path / "none.jinja"))


def test_what_the_api_cannot_read_is_told_before_the_engine_has_loaded(tmp_path):
    """A tokenizer or a template: an engine may take minutes to load."""
    (tmp_path / "tokenizer.json").write_text("{}")

    async def load():
        await asyncio.Event().wait()

    async def run(*of):
        await asyncio.wait_for(start([Mock(meet=load)], *of), WAIT_S)

    with pytest.raises(CheckpointError, match="not a tokenizer"):
        asyncio.run(run(str(tmp_path), ServeOptions()))
    with pytest.raises(ConfigError, match="--chat-template /no/such"):
        asyncio.run(run(NAME, ServeOptions(chat_template="/no/such")))
    with pytest.raises(ConfigError, match="--chat-template: TemplateSyntaxError: unexpected end of template"):
        asyncio.run(run(NAME, ServeOptions(chat_template="{{ messages")))


def test_a_model_that_cannot_be_loaded_is_one_line_from_the_engine_process(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    assert "Unheard is not supported" in refused(str(tmp_path))


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(mock_server):
    port = mock_server.url.rsplit(":", 1)[1]
    assert f"--port {port}: Address already in use" in refused("--port", port, "--mock-engine", "1,1")


def test_a_signal_while_the_engine_loads_ends_it():
    server = Server("--mock-engine", "1,1")
    until(lambda: any("engine_process" in command_of(pid) for pid in server.children()))
    pids = server.children()
    assert server.end() == 0
    server.kill()
    until(lambda: not any("treetop" in command_of(pid) for pid in pids))


def test_a_file_may_hold_the_flags_in_anybodys_spelling(tmp_path):
    """The command line wins over the file; an unknown name is an error that names it."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        textwrap.dedent("""
            model: builtin:nestling
            max-model-len: 512
            max_num_seqs: 3
            enforce-eager: true
            served-model-name: [small, little]
            mock-engine: 1,2
        """)
    )
    with serving("--config", str(file), "--context-length", "256") as server:
        model = server.client().models.retrieve("small").model_extra
        assert model["max_model_len"] == 256
        assert "3 requests at a time" in "".join(server.said)
    file.write_text("max-modle-len: 512")
    assert "--max-modle-len" in refused("--config", str(file))
    file.write_text("- a\n- b")
    assert "flags and their values" in refused("--config", str(file))
    assert "No such file" in refused("--config", str(tmp_path / "none.yaml"))


def test_a_key_of_the_environment_is_asked_for():
    with mock(1, "1", environment={"TREETOP_API_KEY": "sesame"}) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200


# ---------------------------------------------------------------------------------------------- a real engine


def test_a_real_engine_gives_what_llm_gives(weak_pair):
    """Greedy and seeded, at once and beside others: the tokens of `LLM.generate` of the same prompt alone."""
    from support.engines import build, greedy, sampled, tokens

    llm = build(weak_pair)
    prompts = weak_pair.prompts([3, 9, 14, 30])
    params = [greedy(24), sampled(7, 24), greedy(30), sampled(8, 20, top_k=9, temperature=0.7)]
    expected = [llm.generate([each], one)[0] for each, one in zip(prompts, params, strict=True)]
    llm.close()
    flags = ("--speculative-draft-model-path", str(weak_pair.head), "--dtype", "float64", "--max-model-len", "256")
    names = ("--served-model-name", "weak")
    with serving(str(weak_pair.target), *flags, *names, start=subprocess.Popen) as server:

        async def all_of_them():
            async with server.async_client() as client:
                asked = [
                    client.completions.create(
                        model="weak",
                        prompt=each,
                        max_tokens=one.max_tokens,
                        temperature=one.temperature,
                        seed=one.seed,
                        extra_body={"ignore_eos": True, "top_k": one.top_k},
                    )
                    for each, one in zip(prompts, params, strict=True)
                ]
                return await asyncio.gather(*asked)

        answers = asyncio.run(all_of_them())
        assert [answer.choices[0].text for answer in answers] == [output.text for output in expected]
        assert [answer.usage.completion_tokens for answer in answers] == [len(ids) for ids in tokens(expected)]
        assert server.end() == 0
