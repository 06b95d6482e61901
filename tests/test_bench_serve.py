"""`treetop bench serve`: arrivals, figures, and runs against a mock server and against servers that misbehave."""

import asyncio
import itertools
import json
import random
import re
import threading
from contextlib import contextmanager

import pytest

from serving import mock
from treetop.bench import serve_plot
from treetop.bench.arrivals import ARRIVALS
from treetop.bench.http_client import Address
from treetop.bench.serve import Answer, LoadOptions, point_of, run, summary
from treetop.bench.workload import conversations
from treetop.cli import main
from treetop.types.errors import ConfigError, EngineError, InputError
from waiting import until


@pytest.mark.parametrize("name", sorted(ARRIVALS))
def test_arrivals_come_in_order_and_at_the_rate(name):
    """Also the first half of them, which come evenly but for a ramp: that has a quarter of them by half its time."""
    times = ARRIVALS[name](4000, 50.0, 8, random.Random(1))
    assert len(times) == 4000
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(80, rel=0.08)
    share = sum(each < 40 for each in times) / 4000
    assert share == pytest.approx(0.25 if name == "ramp" else 0.5, rel=0.08)
    if name == "bursts":
        assert all(times.count(each) == 8 for each in times[:80])
    if name == "poisson":
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 / 50**2, rel=0.15)


def test_percentiles_are_values_that_so_many_do_not_exceed():
    assert summary([*range(1, 101)]) == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert summary([7.0]) == {"mean": 7, "p50": 7, "p90": 7, "p95": 7, "p99": 7}


def test_the_figures_of_a_run():
    """By hand: two good answers and a failed one in ten seconds."""
    answers = [
        Answer([1.0, 1.5, 2.0], 2.0, 11, 5, 2, ["a", "b", "c"]),
        Answer([3.0, 5.0], 5.0, 5, 6, 0, ["d", "e"]),
        Answer(end_s=0.5, error="HTTP 500: x"),
    ]
    point = point_of(answers, 10.0, 2, {"ttft": 2000, "itl": 600})
    assert (point.num_requests, point.num_failed, point.errors) == (3, 1, {"HTTP 500: x": 1})
    assert (point.tokens_per_s, point.requests_per_s, point.goodput) == (1.6, 0.2, 0.1)
    assert point.times_ms["ttft"]["mean"] == 2000
    assert point.times_ms["tpot"]["mean"] == (100 + 500) / 2
    assert point.times_ms["itl"]["p99"] == 2000
    assert point.times_ms["e2e"]["mean"] == 3500
    assert point.tokens_per_s_user == 1000 / 300
    assert (point.prompt_tokens, point.cached_tokens, point.output_tokens) == (11, 2, 16)
    assert point_of(answers[2:], 1.0, None, {}).times_ms == {}


def test_a_conversation_says_all_that_was_said():
    (talk,) = conversations(1, 2, 3, 4, None, random.Random(0))
    first = talk.ask(chat=False)["prompt"]
    assert len(first.split()) == 7
    talk.said.append("answer")
    again = talk.ask(chat=True)["messages"]
    assert [each["role"] for each in again] == ["system", "user", "assistant", "user"]
    assert again[0]["content"] + again[1]["content"] == first
    talk.said.append("end")
    assert talk.ended


@pytest.fixture(scope="module")
def server():
    with mock(2, "3", "--max-running-requests", "16", "--page-size", "4") as running:
        yield running


def test_a_run_counts_what_the_server_gave(server):
    """Tokens, prompts and hits are the server's; none fails."""
    options = LoadOptions(
        server.url, num_prompts=12, num_turns=2, shared_prefix_words=40, output_len=30, max_concurrency=(2, 12)
    )
    before = server.metric("treetop:generation_tokens_total")
    report = run(options)
    assert report.model == "builtin:nestling"
    for point in report.points:
        assert (point.num_requests, point.num_failed, point.output_tokens) == (24, 0, 720)
        assert point.cached_tokens > point.prompt_tokens / 3, "a second turn has the first in the cache"
        assert point.tokens_per_s_user > 0
        assert point.times_ms["ttft"]["mean"] <= point.times_ms["e2e"]["mean"]
    assert report.points[1].tokens_per_s > report.points[0].tokens_per_s
    assert server.metric("treetop:generation_tokens_total") - before == 1440


def test_the_command_writes_json_and_a_plot(server, tmp_path, capsys):
    plot = tmp_path / "plot.html"
    flags = ["--base-url", server.url + "/v1", "--endpoint", "chat", "--num-prompts", "6", "--output-len", "12"]
    flags += ["--request-rate", "200", "--arrivals", "ramp", "--goodput", "ttft:60000", "e2e:0.001"]
    assert main(["bench", "serve", *flags, "--json", "--plot", str(plot), "--max-concurrency", "3", "6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["max_concurrency"] for point in report["points"]] == [3, 6]
    assert [point["goodput"] for point in report["points"]] == [0, 0]
    assert "api_key" not in report["options"]
    data = re.search(r"id='data'>(.*?)</script>", plot.read_text())[1]
    assert json.loads(data) == report
    assert plot.read_text().count("<circle") == 2
    assert main(["bench", "serve", *flags]) == 0
    assert "6 requests in" in capsys.readouterr().out


def test_a_request_that_is_refused_is_counted_and_is_exit_code_1(server, capsys):
    flags = ["--base-url", server.url, "--num-prompts", "2", "--input-words", "9000"]
    assert main(["bench", "serve", *flags]) == 1
    said = capsys.readouterr().out
    assert "2 failed" in said
    assert said.count("times: HTTP 400: the prompt has") >= 1


@contextmanager
def answering(answer: bytes):
    """A server that says the same to everybody, whatever they ask, and hangs up."""
    ready, ended = threading.Event(), asyncio.Event()
    port, loop = [], asyncio.new_event_loop()

    async def serve():
        async def one(reader, writer):
            asked = await reader.readuntil(b"\r\n\r\n")
            models = b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "m"}]}'
            writer.write(models if b"/v1/models" in asked else answer)
            await writer.drain()
            writer.close()

        listening = await asyncio.start_server(one, "127.0.0.1", 0)
        port.append(listening.sockets[0].getsockname()[1])
        ready.set()
        await ended.wait()
        listening.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


SSE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "ended before an answer"),
        (b"HELLO\r\n\r\n", "no HTTP"),
        (b'HTTP/1.1 503 No\r\nContent-Length: 33\r\n\r\n{"error": {"message": "not now"}}', "HTTP 503: not now"),
        (b"HTTP/1.1 500 No\r\n\r\nwhat\xff", "HTTP 500"),
        (SSE + b"zz\r\n", "before the answer did"),
        (SSE + b"ff\r\ndata: {", "before the answer did"),
        (SSE + b"8\r\ndata: {\n\r\n0\r\n\r\n", "Expecting property name"),
        (SSE + b'1a\r\ndata: {"error": "so bad"}\n\n\r\n0\r\n\r\n', "an event says: so bad"),
        (SSE + b'18\r\ndata: {"choices": [{}]}\n\r\n0\r\n\r\n', "delta"),
    ],
)
def test_a_server_that_misbehaves_is_a_failed_request_not_a_crash(answer, words):
    with answering(answer) as url:
        point = run(LoadOptions(url, num_prompts=2, input_words=3)).points[0]
    assert point.num_failed == 2
    assert words in next(iter(point.errors))


def test_bad_options_are_one_line(capsys, tmp_path):
    wrong = {
        "--base-url ftp://x": "expected http://",
        "--goodput ttft": "NAME:MILLISECONDS",
        "--goodput speed:3": "NAME:MILLISECONDS",
        "--num-prompts 0": "--num-prompts must be at least 1",
        "--arrivals never": "--arrivals must be one of",
        "--max-concurrency 0": "--max-concurrency must be",
        f"--prompts {tmp_path}/none": "--prompts",
        "--plot x.png": "ends in .html",
    }
    for flags, words in wrong.items():
        code = main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *flags.split()])
        said = capsys.readouterr().err
        if "--prompts" in flags:
            assert code in (1, 2)  # nobody is there to be asked
            continue
        assert (code, said.count("\n")) == (2, 1), said
        assert words in said
    with pytest.raises(InputError, match="--prompts"):
        conversations(1, 1, 0, None, str(tmp_path / "none"), random.Random(0))
    with pytest.raises(EngineError, match=r"--base-url http://127\.0\.0\.1:9: /v1/models"):
        run(LoadOptions("http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="--base-url"):
        Address.of("http://[::1")
    assert Address.of("https://h/a/v1/") == Address("h", 443, True, "/a")


def test_the_plot_of_runs_without_answers_has_no_lines(server):
    report = run(LoadOptions(server.url, num_prompts=1, input_words=9000))
    assert "<svg" not in serve_plot.page(report)
    until(lambda: server.metric("treetop:num_requests_running") == 0)


def test_streams_are_written_while_the_engine_says_more():
    """However fast it is: its next words do not keep those from going out that have come."""
    with mock(2, "3", "--max-running-requests", "32") as busy:
        point = run(LoadOptions(busy.url, num_prompts=32, output_len=600, ignore_eos=True)).points[0]
    assert point.num_failed == 0
    assert point.times_ms["ttft"]["p50"] < point.times_ms["e2e"]["p50"] / 2
    assert "itl" in point.times_ms
