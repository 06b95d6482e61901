"""`treetop bench serve`: arrivals, figures, and runs against a mock server and against servers that misbehave."""

import asyncio
import itertools
import json
import random
import re
import threading
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from support.serving import mock
from support.waiting import until
from treetop.bench import serve_plot
from treetop.bench.arrivals import ARRIVALS
from treetop.bench.http_client import Address, HttpClient
from treetop.bench.lengths import lengths_of
from treetop.bench.serve import LoadOptions, TimedAnswer, point_of, run, summary
from treetop.bench.serve_compare import read_reports
from treetop.bench.workload import conversations
from treetop.cli import main
from treetop.types.errors import ConfigError, EngineError, InputError


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
        TimedAnswer([1.0, 1.5, 2.0], 2.0, 11, 5, 2, ["a", "b", "c"]),
        TimedAnswer([3.0, 5.0], 5.0, 5, 6, 0, ["d", "e"]),
        TimedAnswer(end_s=0.5, error="HTTP 500: x"),
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
    talk.texts.append("answer")
    again = talk.ask(chat=True)["messages"]
    assert [each["role"] for each in again] == ["system", "user", "assistant", "user"]
    assert again[0]["content"] + again[1]["content"] == first
    talk.texts.append("end")
    assert talk.ended


@pytest.fixture(scope="module")
def server():
    with mock(2, "3", "--max-running-requests", "16", "--page-size", "4") as running:
        yield running


def test_a_run_counts_what_the_server_gave(server, monkeypatch):
    """Tokens, prompts and hits are the server's; none fails. As many requests are on their way at once as was asked."""
    under_way, most, events = 0, [], HttpClient.events

    async def counted(*args):
        nonlocal under_way
        under_way += 1
        most.append(under_way)
        try:
            async for event in events(*args):
                yield event
        finally:
            under_way -= 1

    monkeypatch.setattr(HttpClient, "events", counted)
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
        assert point.tokens_per_s == pytest.approx(point.output_tokens / point.elapsed_s)
    assert (max(most[:24]), max(most[24:])) == (2, 12)
    assert server.metric("treetop:generation_tokens_total") - before == 1440


@pytest.mark.parametrize(
    ("keep_alive_s", "at_a_time", "opened"), [("600", (1, 1, 3, 3), [1, 1, 3, 3]), ("1", (1, -1, 1), [1, 1, 2])]
)
def test_connections_are_kept_and_one_that_the_server_has_closed_is_replaced(keep_alive_s, at_a_time, opened):
    """As of clients with a pool: as many connections as requests at a time. -1: until the server has let go of them."""

    async def talked(url) -> list[int]:
        client, found = HttpClient(Address.of(url), None), []
        body = {"prompt": "a", "max_tokens": 3, "stream": True}

        async def ask() -> None:
            assert [event async for event in client.events("/v1/completions", body)]

        for count in at_a_time:
            while count < 0 and not all(kept.reader.at_eof() for kept in client._idle):
                await asyncio.sleep(0.01)
            await asyncio.gather(*(ask() for _ in range(count)))
            found.append(client.num_opened)
        await client.close()
        return found

    with mock(2, "1", "--timeout-keep-alive", keep_alive_s) as server:
        assert asyncio.run(talked(server.url)) == opened


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
    texts = capsys.readouterr().out
    assert "2 failed" in texts
    assert texts.count("times: HTTP 400: the prompt has") >= 1


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
        texts = capsys.readouterr().err
        if "--prompts" in flags:
            assert code in (1, 2)  # nobody is there to be asked
            continue
        assert (code, texts.count("\n")) == (2, 1), texts
        assert words in texts
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
        for _ in range(5):  # a pause of the machine at the beginning looks alike, but comes once
            point = run(LoadOptions(busy.url, num_prompts=32, output_len=600, ignore_eos=True)).points[0]
            assert point.num_failed == 0
            assert "itl" in point.times_ms
            if point.times_ms["ttft"]["p50"] < point.times_ms["e2e"]["p50"] / 2:
                break
    assert point.times_ms["ttft"]["p50"] < point.times_ms["e2e"]["p50"] / 2


@pytest.mark.parametrize(
    ("given", "least", "most", "mean"),
    [("7", 7, 7, 7), ("4-8", 4, 8, 6), ("9*10,1*1000", 10, 1000, 109), ("100~0.5", 1, 10**4, 113)],
)
def test_lengths_are_drawn_as_the_specification_says(given, least, most, mean):
    """Constant, even, of several kinds by weight, log-normal with a median."""
    draw, rng = lengths_of(given, "--input-len"), random.Random(3)
    drawn = [draw(rng) for _ in range(4000)]
    assert least <= min(drawn) <= max(drawn) <= most
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("given", ["", "0", "x", "9-4", "10~", "0*5", "5,", "-3", "10~9", "nan*4", "1e3"])
def test_lengths_that_are_none_are_refused_by_name(given):
    with pytest.raises(ConfigError, match="--input-len"):
        LoadOptions(input_len=given)


def test_prompts_of_ids_have_their_lengths_and_answers_theirs(server, tmp_path):
    """Over HTTP: as many prompt tokens and answers as a file of real lengths says, for each client."""
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"input_len": 30, "output_len": 5}\n{"input_len": 50, "output_len": 7}\n')
    options = {"base_url": server.url, "ignore_eos": True, "return_token_ids": True, "prompts_per_client": 2}
    report = run(LoadOptions(lengths=str(file), max_concurrency=(1, 3), **options))
    assert [point.num_requests for point in report.points] == [2, 6]
    assert [(point.prompt_tokens, point.output_tokens) for point in report.points] == [(80, 12), (240, 36)]
    for bad in ("", '{"input_len": 0, "output_len": 5}', '{"input_len": 3}', "[]", "{"):
        file.write_text(bad)
        with pytest.raises(InputError, match="--lengths"):
            run(LoadOptions(lengths=str(file), max_concurrency=(1,), **options))


def test_reports_of_several_servers_are_compared(tmp_path, capsys):
    """A value for each figure, server and number of clients; names are given or the files'; the last run counts."""
    answers = [TimedAnswer([1.0, 1.5, 2.0], 2.0, 11, 5, 2, ["a", "b", "c"])]
    for name, most in (("ours", (1, 8, 8)), ("theirs", (8, None))):
        points = [asdict(point_of(answers, 10.0 / (at + 1), each, {})) for at, each in enumerate(most)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"options": {}, "model": f"<{name}>", "points": points}))
    page = tmp_path / "page.html"
    argv = ["bench-serve", "--compare", str(tmp_path / "ours.json"), f"other={tmp_path / 'theirs.json'}"]
    assert main([*argv, "--plot", str(page)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["no", "limit", "1", "8"] in lines
    assert ["tokens/s", "ours", "1.1", "3.3"] in lines
    assert ["tokens/s", "other", "2.2", "1.1"] in lines
    written = page.read_text()
    assert "&lt;ours&gt;" in written
    assert "<ours>" not in written
    assert written.count("<polyline") == 2
    (tmp_path / "bad.json").write_text('{"points": [{}]}')
    for bad in ([str(tmp_path / "bad.json")], [str(tmp_path / "none.json")], [f"a={tmp_path}/ours.json"] * 2):
        with pytest.raises(InputError, match="--compare"):
            read_reports(bad)
