"""Load with clients of every kind: each accepted request ends in its result or a clear error, and nothing leaks."""

import asyncio
import json
import os
import signal
from functools import partial
from importlib.util import find_spec

import pytest
import zmq

from support import chats
from support.grids import few_of, few_values
from support.serving import children_of, command_of, mock, serving
from support.storms import (
    MANNERS,
    NAME,
    PAIR,
    Ask,
    choices_are_put_back,
    nothing_is_left,
    of_the_mock,
    of_the_pair,
    storm,
)
from support.threads import in_threads, joined
from support.waiting import WAIT_S, until
from treetop.bench.http_client import Address, HttpClient
from treetop.distributed.kv_events import END

TIGHT = ("--max-total-tokens", "340", "--context-length", "300", "--page-size", "4", "--max-running-requests", "6")


@pytest.mark.parametrize(
    "flags", few_values([(), TIGHT, ("--api-workers", "2", *TIGHT, "--no-overlap")], 1), ids=["", "tight", "2"]
)
def test_clients_of_every_kind_over_the_mock_engine(flags):
    """Aborts, disconnects and slow readers, also where memory is so small that requests are put back all the time."""
    with mock(1, "1-4", *chats.FLAGS, "--prefill-tokens-per-round", "32", *flags) as server:
        outcomes = asyncio.run(storm(server, of_the_mock(with_chats=not flags), 16, 6))
        assert outcomes.keys() == {"result", "left"}, outcomes
        assert outcomes["result"] > 48
        if TIGHT[0] in flags:
            choices_are_put_back(server, 90, 120, 6)  # a storm puts some back only if it comes fast enough
        nothing_is_left(server)


def test_a_full_queue_refuses_and_what_it_took_is_served():
    with mock(2, "1-4", *chats.FLAGS, "--max-running-requests", "2", "--max-queued-requests", "3") as server:
        os.kill(server.engine(), signal.SIGSTOP)  # so that nothing ends before the queue is full
        going_on = in_threads(1, lambda _: go_on_once_it_refuses(server))
        outcomes = asyncio.run(storm(server, of_the_mock(), 16, 4))
        joined(going_on)
        refused = {said for said in outcomes if said not in ("result", "left")}
        assert refused
        assert all(said.startswith("429: the queue is full") for said in refused), refused
        assert outcomes["result"] > 0
        nothing_is_left(server)


def go_on_once_it_refuses(server) -> None:
    try:
        until(lambda: server.metric("treetop:requests_refused_total") > 0)
    finally:
        os.kill(server.engine(), signal.SIGCONT)


REFUSED = "503: the server is shutting down"
LOST = {"ConnectError", "ReadError", "RemoteProtocolError", "WriteError"}
"""What a client that comes too late finds: nobody listens, or the connection that it kept is closed."""


@pytest.mark.parametrize("workers", few_of(["1", "2"], 0))
def test_sigterm_in_a_storm_loses_nothing_that_was_accepted(workers):
    """Whoever was answered at all gets all of the answer; then exit code 0."""
    with mock(2, "1-4", *chats.FLAGS, "--api-workers", workers) as server:
        stop = partial(server.process.send_signal, signal.SIGTERM)
        outcomes = asyncio.run(storm(server, of_the_mock(), 12, 8, ("whole", "stream", "slow"), stop))
        assert outcomes.keys() <= {"result", REFUSED, *LOST}, outcomes
        assert outcomes["result"] > 32
        assert server.process.wait(WAIT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_kill_of_the_engine_in_a_storm_is_a_clear_error_for_all(workers):
    """Those in flight and those who come in the next moment are told; then exit code 1, and no process is left."""
    with mock(2, "1-4", *chats.FLAGS, "--api-workers", workers, "--engine-restarts", "0") as server:
        pids = server.children()
        kill = partial(os.kill, server.engine(), signal.SIGKILL)
        outcomes = asyncio.run(storm(server, of_the_mock(), 12, 8, during=kill))
        told = [said for said in outcomes if said not in ("result", "left", *LOST)]
        assert told
        words = "the engine process has ended with exit code -9"
        kinds = ("503: ", "service_unavailable_error: ", "overloaded_error: ", "error: ")  # of each endpoint
        assert all(said.startswith(kinds) and words in said for said in told), told
        assert server.process.wait(WAIT_S) == 1
    until(lambda: not any("treetop" in command_of(pid) for pid in pids), "a process is left")


# ---------------------------------------------------------------------------------------------- the embedded pair


def over_the_pair(clients: int, each: int, asks: list[Ask], manners) -> None:
    with serving(*PAIR, "--max-total-tokens", "640", "--max-running-requests", "8") as server:
        outcomes = asyncio.run(storm(server, asks, clients, each, manners))
        assert outcomes.keys() <= {"result", "left"}, outcomes
        if manners == ("whole", "stream"):
            assert outcomes == {"result": clients * each}
        nothing_is_left(server)


@pytest.mark.slow
def test_what_the_pair_says_under_load_is_what_it_says_alone():
    """Speculative, together, put back and resumed; against plain decoding of each prompt alone. Aborts beside."""
    over_the_pair(8, 3, of_the_pair(6, 20), MANNERS)


@pytest.mark.slow
def test_64_clients_of_20_requests_get_what_each_would_alone():
    """Zero errors, zero leaked pages, equal outputs, streamed or not."""
    over_the_pair(64, 20, of_the_pair(24, 32), ("whole", "stream"))


@pytest.mark.slow
def test_64_clients_of_every_kind_over_the_pair():
    over_the_pair(64, 20, of_the_pair(24, 32), MANNERS)


def test_the_benchmarks_client_sees_the_same_events():
    """What `treetop bench serve` reads is the text that a request gives."""
    with mock(1, "1-4", *chats.FLAGS) as server:
        ask = of_the_mock()[3]

        async def read() -> str:
            client = HttpClient(Address.of(server.url), None)
            events = client.events("/v1/completions", {**ask.body, "stream": True})
            text = "".join([choice["text"] async for event in events for choice in event["choices"]])
            await client.close()
            return text

        assert asyncio.run(read()) == ask.text


@pytest.mark.slow
def test_with_everything_on_engines_that_are_killed_cost_a_pause(tmp_path):
    """KV events that somebody hears, traces that nobody takes (where their exporter is installed), keys, batches, a
    spare, the log as JSON, two front ends: every answer is whole, the batch comes to its end, each engine tells events.
    """
    traces = (
        () if find_spec("opentelemetry.exporter.otlp") is None else ("--otlp-traces-endpoint", "http://127.0.0.1:9")
    )
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- name: one\n  key: secret-one\n- name: two\n  key: secret-two\n", encoding="utf-8")
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    flags = (
        *(*chats.FLAGS, "--api-workers", "2", "--spare-engine", "--log-format", "json", "--page-size", "4"),
        *("--api-keys-file", str(keys), "--batch-dir", str(tmp_path / "batches")),
        *("--kv-events-config", json.dumps(events), *traces),
    )
    context = zmq.Context()
    asked = context.socket(zmq.DEALER)
    asked.RCVTIMEO = int(1000 * WAIT_S)
    asked.connect(events["replay_endpoint"])
    lines = b"".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"
        for i in range(30)
        for body in [{"model": NAME, "prompt": "a b c", "max_tokens": 30}]
    )
    try:
        with mock(2, "1-4", *flags) as server:
            client = server.client(api_key="secret-two")
            file = client.files.create(file=("a.jsonl", lines), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

            def processes():
                return sorted(children_of(server.process.pid, "engine_process"))

            for _ in range(2):
                until(lambda: len(processes()) == 2)
                kill = partial(os.kill, processes()[0], signal.SIGKILL)  # the other is younger, the spare
                outcomes = asyncio.run(storm(server, of_the_mock(), 8, 4, during=kill, key="secret-one"))
                assert outcomes.keys() <= {"result", "left"}, outcomes
                until(lambda: server.get("/health").status_code == 200)
            until(lambda: client.batches.retrieve(batch.id).status == "completed")
            done = client.batches.retrieve(batch.id)
            assert (done.request_counts.completed, done.request_counts.failed) == (30, 0)
            assert server.post("/v1/completions", {"model": NAME, "prompt": "a"}).status_code == 401
            until(lambda: server.metric("treetop:num_engine_restarts") >= 2)
            nothing_is_left(server)
            asked.send_multipart([b"", (0).to_bytes(8, "big")])
            told = [asked.recv_multipart()]
            while told[-1][1] != END:
                told.append(asked.recv_multipart())
            assert told[0][1] == (0).to_bytes(8, "big"), "the last engine begins anew"
            assert b"AllBlocksCleared" in told[0][2]
            assert b"BlockStored" in b"".join(payload for _, _, payload in told)
            last = processes()
        until(lambda: not any(map(command_of, last)))
    finally:
        context.destroy(linger=0)
