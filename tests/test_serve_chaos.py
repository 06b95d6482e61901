"""Load with clients of every kind: each accepted request ends in its result or a clear error, and nothing leaks."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import httpx
import pytest

from serving import Server, command_of, mock, replayed, serving
from treetop.bench.http_client import Address, Connection
from treetop.bench.workload import read_texts
from treetop.models.folder import resolve_folder
from waiting import WAIT_S, until

NAME = "builtin:nestling"
MANNERS = ("whole", "stream", "stream", "slow", "leaves", "hangs up")
"""Two kinds that want all, one that reads slowly, one that leaves after some text, one that leaves before any."""


PATIENCE_S = 10 * WAIT_S
"""A request behind 63 others may wait for long on a machine that others use; one that hangs waits for ever."""


@dataclass(frozen=True)
class Ask:
    """A request, and the text it must give whatever else goes on."""

    body: dict
    text: str


async def send(server: Server, http: httpx.AsyncClient, ask: Ask, manner: str, rng: random.Random) -> str:
    """Returns what came of it: the result, a status, or why the connection ended. Checks all text that came."""
    body = {"model": NAME, **ask.body, "stream": manner not in ("whole", "hangs up")}
    url = server.url + "/v1/completions"
    if not body["stream"]:
        limit = rng.random() / 50 if manner == "hangs up" else PATIENCE_S
        try:
            answer = await asyncio.wait_for(http.post(url, json=body), limit)
        except TimeoutError:
            assert manner == "hangs up", "a request hangs"
            return "left"
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == ask.text
            return "result"
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    text = ""
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code}: {json.loads(await answer.aread())['error']['message']}"
        async with aclosing(answer.aiter_lines()) as lines:
            async for line in lines:
                if line == "data: [DONE]":
                    assert text == ask.text
                    return "result"
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"{event['error']['type']}: {event['error']['message']}"
                text += event["choices"][0]["text"]
                assert ask.text.startswith(text)
                if manner == "leaves" and rng.random() < 0.3:
                    return "left"
                if manner == "slow":
                    await asyncio.sleep(rng.random() / 100)  # a reader that has other things to do
    raise AssertionError("a stream ends without [DONE]")


async def storm(server: Server, asks: list[Ask], clients: int, each: int, manners=MANNERS, during=None) -> Counter:
    """`clients` at once, `each` requests one after the other. during: called once a third of them have ended."""
    outcomes: Counter = Counter()

    async def client(number: int) -> None:
        nonlocal during
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            for _ in range(each):
                try:
                    said = await send(server, http, rng.choice(asks), rng.choice(manners), rng)
                except httpx.TransportError as error:
                    said = type(error).__name__
                outcomes[said] += 1
                if during is not None and outcomes.total() > clients * each / 3:
                    during, now = None, during
                    now()

    await asyncio.wait_for(asyncio.gather(*map(client, range(clients))), 2 * PATIENCE_S)
    assert outcomes.total() == clients * each
    return outcomes


def nothing_is_left(server: Server) -> None:
    """No row, no request and no page is held by anybody, and the next request is served."""
    until(lambda: server.metric("treetop:num_requests_running") == server.metric("treetop:num_requests_waiting") == 0)
    until(lambda: server.metric("treetop:kv_cache_usage_perc") == 0, "pages are leaked")
    assert server.get("/health/ready").status_code == 200
    assert not any("Traceback" in line for line in server.said), "".join(server.said)


def of_the_mock() -> list[Ask]:
    """Prompts of ids, some alike at the beginning; what the mock engine says depends on their length alone."""
    rng = random.Random(5)
    lengths = [1, 3, 17, 40, 90, 90, 150]
    made = []
    for index, length in enumerate(lengths):
        count = rng.choice((1, 9, 40, 120))
        made.append(Ask({"prompt": [7 + index % 2] * length, "max_tokens": count}, replayed(length, count)))
    return made


TIGHT = ("--max-total-tokens", "340", "--context-length", "300", "--page-size", "4", "--max-running-requests", "6")


@pytest.mark.parametrize("flags", [(), TIGHT, ("--api-workers", "2", *TIGHT, "--no-overlap")], ids=["", "tight", "2"])
def test_clients_of_every_kind_over_the_mock_engine(flags):
    """Aborts, disconnects and slow readers, also where memory is so small that requests are put back all the time."""
    with mock(1, "1-4", "--prefill-tokens-per-round", "32", *flags) as server:
        outcomes = asyncio.run(storm(server, of_the_mock(), 16, 6))
        assert outcomes.keys() == {"result", "left"}, outcomes
        assert outcomes["result"] > 48
        if TIGHT[0] in flags:
            assert server.metric("treetop:num_retractions") > 0
        nothing_is_left(server)


def test_a_full_queue_refuses_and_what_it_took_is_served():
    with mock(2, "1-4", "--max-running-requests", "2", "--max-queued-requests", "3") as server:
        outcomes = asyncio.run(storm(server, of_the_mock(), 16, 4))
        refused = {said for said in outcomes if said not in ("result", "left")}
        assert refused
        assert all(said.startswith("429: the queue is full") for said in refused), refused
        assert outcomes["result"] > 0
        nothing_is_left(server)


REFUSED = "503: the server is shutting down"
LOST = {"ConnectError", "ReadError", "RemoteProtocolError", "WriteError"}
"""What a client that comes too late finds: nobody listens, or the connection that it kept is closed."""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_in_a_storm_loses_nothing_that_was_accepted(workers):
    """Whoever was answered at all gets all of the answer; then exit code 0."""
    with mock(2, "1-4", "--api-workers", workers) as server:
        stop = partial(server.process.send_signal, signal.SIGTERM)
        outcomes = asyncio.run(storm(server, of_the_mock(), 12, 8, ("whole", "stream", "slow"), stop))
        assert outcomes.keys() <= {"result", REFUSED, *LOST}, outcomes
        assert outcomes["result"] > 32
        assert server.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_kill_of_the_engine_in_a_storm_is_a_clear_error_for_all(workers):
    """Those in flight and those who come in the next moment are told; then exit code 1, and no process is left."""
    with mock(2, "1-4", "--api-workers", workers, "--engine-restarts", "0") as server:
        pids = server.children()
        started = time.monotonic()
        kill = partial(os.kill, server.engine(), signal.SIGKILL)
        outcomes = asyncio.run(storm(server, of_the_mock(), 12, 8, during=kill))
        told = [said for said in outcomes if said not in ("result", "left", *LOST)]
        assert told
        words = "the engine process has ended with exit code -9"
        kinds = ("503: ", "service_unavailable_error: ")
        assert all(said.startswith(kinds) and words in said for said in told), told
        assert server.process.wait(WAIT_S) == 1
        assert time.monotonic() - started < WAIT_S
    until(lambda: not any("treetop" in command_of(pid) for pid in pids), "a process is left")


# ---------------------------------------------------------------------------------------------- the embedded pair


def of_the_pair(count: int, most: int) -> list[Ask]:
    """Greedy and seeded requests, some with stop strings, some with a structure; and what `LLM.generate` gives each of
    them alone, in float64, decoded plainly.
    """
    from treetop import LLM, SamplingParams, StructuredOutput

    texts = read_texts(resolve_folder(NAME).parent / "prompts.jsonl")
    llm, made = LLM(NAME, dtype="float64", context_length=256, max_running_requests=1), []
    for index in range(count):
        prompt, sampled = texts[index][:120], index % 4 in (1, 3)
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0.8 if sampled else 0, "seed": index}
        body |= {"stop": ["return", ":\n"]} if index % 4 == 2 else {}
        params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
        if index % 4 == 3:
            body["guided_regex"] = "([a-z]{2,9}_?){1,6}\\(\\)"
            params = replace(params, structured_output=StructuredOutput("regex", body["guided_regex"]))
        made.append(Ask(body, llm.generate(prompt, params)[0].text))
    llm.close()
    return made


PAIR = ("--dtype", "float64", "--context-length", "256", "--page-size", "4", "--prefill-tokens-per-round", "48")


def over_the_pair(clients: int, each: int, asks: list[Ask], manners) -> None:
    with serving(*PAIR, "--max-total-tokens", "640", "--max-running-requests", "8") as server:
        outcomes = asyncio.run(storm(server, asks, clients, each, manners))
        assert outcomes.keys() <= {"result", "left"}, outcomes
        if manners == ("whole", "stream"):
            assert outcomes == {"result": clients * each}
        nothing_is_left(server)


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
    with mock(1, "1-4") as server:
        ask = of_the_mock()[3]

        async def read() -> str:
            connection = Connection(Address.of(server.url), None)
            events = connection.events("/v1/completions", {**ask.body, "stream": True})
            return "".join([choice["text"] async for event in events for choice in event["choices"]])

        assert asyncio.run(read()) == ask.text
