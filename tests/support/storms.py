"""Clients of every kind at once, for tests that disturb the server meanwhile."""

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx

from support import chats
from support.serving import Server, replayed
from support.waiting import until
from treetop.bench.workload import read_texts
from treetop.checkpoints.folder import resolve_folder

NAME = "builtin:nestling"

MANNERS = ("whole", "stream", "stream", "slow", "leaves", "hangs up")
"""Two kinds that want all, one that reads slowly, one that leaves after some text, one that leaves before any."""

PATIENCE_S = 600.0
"""A request behind 63 others may wait for long on a machine that others use; one that hangs waits for ever."""


@dataclass(frozen=True)
class Ask:
    """A request, and the text it must give whatever else goes on; of a chat all that is thought, said and called."""

    body: dict
    text: str
    path: str = "/v1/completions"

    def whole(self, answer: dict) -> str:
        return answer["choices"][0]["text"] if self.path == "/v1/completions" else chats.said_whole(self.path, answer)

    def piece(self, event: dict) -> str:
        """Of an event of its stream."""
        return event["choices"][0]["text"] if self.path == "/v1/completions" else chats.said_in(self.path, event)


async def send(server: Server, http: httpx.AsyncClient, ask: Ask, manner: str, rng: random.Random) -> str:
    """Returns what came of it: the result, a status, or why the connection ended. Checks all text that came."""
    body = {"model": NAME, **ask.body, "stream": manner not in ("whole", "hangs up")}
    url = server.url + ask.path
    if not body["stream"]:
        limit = rng.random() / 50 if manner == "hangs up" else PATIENCE_S
        try:
            answer = await asyncio.wait_for(http.post(url, json=body), limit)
        except TimeoutError:
            assert manner == "hangs up", "a request hangs"
            return "left"
        if answer.status_code == 200:
            assert ask.whole(answer.json()) == ask.text
            return "result"
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    text, ended = "", False
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code}: {json.loads(await answer.aread())['error']['message']}"
        async with aclosing(answer.aiter_lines()) as lines:
            async for line in lines:
                ended |= chats.ends(ask.path, line)
                if ended and line in ("", "data: [DONE]"):
                    assert text == ask.text
                    return "result"
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("type") == "error" or event.get("error"):
                    error = event.get("error", event)
                    return f"{error.get('type')}: {error['message']}"
                text += ask.piece(event)
                assert ask.text.startswith(text)
                if manner == "leaves" and rng.random() < 0.3:
                    return "left"
                if manner == "slow":
                    await asyncio.sleep(rng.random() / 100)  # a reader that has other things to do
    raise AssertionError("a stream ends without its last event")


async def storm(
    server: Server, asks: list[Ask], clients: int, each: int, manners=MANNERS, during=None, key: str = "none"
) -> Counter:
    """`clients` at once, `each` requests one after the other. during: called once a third of them have ended. key: of
    all.
    """
    outcomes: Counter = Counter()

    async def client(number: int) -> None:
        nonlocal during
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=PATIENCE_S, headers={"Authorization": f"Bearer {key}"}) as http:
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


def choices_are_put_back(server: Server, num_prompt_tokens: int, count: int, choices: int) -> None:
    """Requests whose choices find no room together, until some are put back; all say what each would have said alone.

    The choices of one request come at once, where requests of a slow machine's clients may come one after another.
    """
    body = {"prompt": [7] * num_prompt_tokens, "max_tokens": count, "n": choices}

    def put_back() -> bool:
        answer = server.post("/v1/completions", body).json()
        assert [choice["text"] for choice in answer["choices"]] == [replayed(num_prompt_tokens, count)] * choices
        return server.metric("treetop:num_retractions") > 0

    until(put_back, "nothing was put back")


def of_the_mock(with_chats: bool = False) -> list[Ask]:
    """Prompts of ids, some alike at the beginning; what the mock engine says depends on their length alone.

    with_chats: some are chats, of a server with `chats.FLAGS`.
    """
    rng = random.Random(5)
    lengths = [1, 3, 17, 40, 90, 90, 150]
    made = []
    for index, length in enumerate(lengths):
        count = rng.choice((1, 9, 40, 120))
        made.append(Ask({"prompt": [7 + index % 2] * length, "max_tokens": count}, replayed(length, count)))
    for path, said in chats.plain(120) if with_chats else ():
        body, chat = chats.as_chat(path, said, 120)
        text = chats.said_alone(chat, lambda ids, params: replayed(len(ids), params.max_tokens))
        made.append(Ask(body, text, path))
    return made


def of_the_pair(count: int, maximum: int, with_chats: bool = False, **options) -> list[Ask]:
    """Greedy and seeded requests, some with stop strings, some with a structure; and what `LLM.generate` gives each of
    them alone, in float64, decoded plainly. with_chats: of `of_the_mock`. options: of that engine.
    """
    from treetop import LLM, SamplingParams, StructuredOutput

    texts = read_texts(resolve_folder(NAME).parent / "prompts.jsonl")
    llm, made = LLM(NAME, **{"dtype": "float64", "context_length": 256, "max_running_requests": 1, **options}), []
    for index in range(count):
        prompt, sampled = texts[index][:120], index % 4 in (1, 3)
        body = {"prompt": prompt, "max_tokens": maximum, "temperature": 0.8 if sampled else 0, "seed": index}
        body |= {"stop": ["return", ":\n"]} if index % 4 == 2 else {}
        params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
        if index % 4 == 3:
            body["guided_regex"] = "([a-z]{2,9}_?){1,6}\\(\\)"
            params = replace(params, structured_output=StructuredOutput("regex", body["guided_regex"]))
        made.append(Ask(body, llm.generate(prompt, params)[0].text))
    for path, said in [*chats.held(60), *chats.plain(maximum)[::2]] if with_chats else ():
        body, chat = chats.as_chat(path, said, 60)
        text = chats.said_alone(chat, lambda ids, params: llm.generate(ids, params)[0].text)
        made.append(Ask(body, text, path))
    llm.close()
    return made


PAIR = ("--dtype", "float64", "--context-length", "256", "--page-size", "4", "--prefill-tokens-per-round", "48")
