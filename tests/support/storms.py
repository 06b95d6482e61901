"""Clients of every kind at once, for tests that disturb the server meanwhile."""

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx

from support.serving import Server, replayed
from support.waiting import until
from treetop.bench.workload import read_texts
from treetop.models.folder import resolve_folder

NAME = "builtin:nestling"

MANNERS = ("whole", "stream", "stream", "slow", "leaves", "hangs up")
"""Two kinds that want all, one that reads slowly, one that leaves after some text, one that leaves before any."""

PATIENCE_S = 600.0
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


def of_the_pair(count: int, maximum: int) -> list[Ask]:
    """Greedy and seeded requests, some with stop strings, some with a structure; and what `LLM.generate` gives each of
    them alone, in float64, decoded plainly.
    """
    from treetop import LLM, SamplingParams, StructuredOutput

    texts = read_texts(resolve_folder(NAME).parent / "prompts.jsonl")
    llm, made = LLM(NAME, dtype="float64", context_length=256, max_running_requests=1), []
    for index in range(count):
        prompt, sampled = texts[index][:120], index % 4 in (1, 3)
        body = {"prompt": prompt, "max_tokens": maximum, "temperature": 0.8 if sampled else 0, "seed": index}
        body |= {"stop": ["return", ":\n"]} if index % 4 == 2 else {}
        params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
        if index % 4 == 3:
            body["guided_regex"] = "([a-z]{2,9}_?){1,6}\\(\\)"
            params = replace(params, structured_output=StructuredOutput("regex", body["guided_regex"]))
        made.append(Ask(body, llm.generate(prompt, params)[0].text))
    llm.close()
    return made


PAIR = ("--dtype", "float64", "--context-length", "256", "--page-size", "4", "--prefill-tokens-per-round", "48")
