"""The HTTP API over the mock engine, by the official client: what is asked is what comes, streamed or not."""

import asyncio
import random

import openai
import pytest

from support.serving import TOKENIZER, Server, mock, replayed
from support.waiting import until

NAME = "builtin:nestling"


@pytest.fixture(scope="module")
def server():
    with mock(1, "1-4", "--max-running-requests", "16") as running:
        yield running


def complete(server: Server, **body):
    return server.client().completions.create(**{"model": NAME, "prompt": "def f(", "max_tokens": 24, **body})


def chat(server: Server, content="hello", **body):
    messages = [{"role": "user", "content": content}]
    return server.client().chat.completions.create(**{"model": NAME, "messages": messages, "max_tokens": 24, **body})


def streamed(server: Server, **body):
    """Text of each choice, the last finish reason of each, the usage, and the number of events with text."""
    texts, reasons, usage, events = {}, {}, None, 0
    for chunk in complete(server, stream=True, stream_options={"include_usage": True}, **body):
        for choice in chunk.choices:
            assert choice.index not in reasons, "a choice goes on after its end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            events += bool(choice.text)
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    return texts, reasons, usage, events


def test_a_completion_is_what_the_engine_gave(server):
    prompt = "def area(r):"
    count = len(TOKENIZER.encode(prompt))
    answer = complete(server, prompt=prompt, max_tokens=30)
    assert (answer.object, answer.model) == ("text_completion", NAME)
    assert answer.choices[0].text == replayed(count, 30)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (count, 30)
    assert answer.usage.total_tokens == count + 30


def test_sixteen_tokens_are_the_default_of_completions_and_the_context_that_of_chat(server):
    client = server.client()
    assert client.completions.create(model=NAME, prompt="x").usage.completion_tokens == 16
    messages = [{"role": "user", "content": "x" * 40}]
    usage = client.chat.completions.create(model=NAME, messages=messages).usage
    assert usage.total_tokens == 2048


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_equals_text_at_once(server, seed):
    """For several prompts and choices, with stop strings and without: text, reasons and usage."""
    rng = random.Random(seed)
    prompts = [TOKENIZER.encode("some text to begin with")[: rng.randint(1, 5)] for _ in range(rng.randint(1, 3))]
    body = {"prompt": prompts, "n": rng.randint(1, 3), "max_tokens": rng.randint(1, 200)}
    if seed % 2:
        body["stop"] = rng.sample(["Deich", " dog", "素早い", "r ** 2", "ö", "🦊"], 2)
    whole = complete(server, **body)
    texts, reasons, usage, _ = streamed(server, **body)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == whole.usage.model_dump(
        include={"prompt_tokens", "completion_tokens"}
    )
    assert len(whole.choices) == len(prompts) * body["n"]
    assert not any(stop in text for text in texts.values() for stop in body.get("stop", []))


def test_an_event_carries_the_tokens_of_a_round():
    """With rounds of eight tokens there are about an eighth as many events as tokens."""
    with mock(20, "8") as server:
        _, _, usage, events = streamed(server, max_tokens=81)
    assert usage.completion_tokens == 81
    assert events <= 12


def test_a_stop_string_ends_a_request_and_counts_what_was_received(server):
    answer = complete(server, prompt="a", max_tokens=500, stop="lazy dog")
    text = replayed(1, 500)
    assert answer.choices[0].text == text[: text.index("lazy dog")]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 40
    ids = TOKENIZER.encode(text)
    token = ids[9]
    answer = complete(server, prompt="a", max_tokens=500, extra_body={"stop_token_ids": [token]})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", ids.index(token) + 1)


def test_prompts_may_be_text_ids_or_lists_of_either(server):
    texts = ["def f(", "import os"]
    ids = [TOKENIZER.encode(text) for text in texts]
    for alone, listed in ((texts[0], texts), (ids[0], ids)):
        assert complete(server, prompt=alone).choices[0].text == replayed(len(ids[0]), 24)
        answers = complete(server, prompt=listed).choices
        assert [(each.index, each.text) for each in answers] == [(i, replayed(len(ids[i]), 24)) for i in range(2)]


def test_echo_puts_the_prompt_before_each_choice(server):
    plain, echoed = complete(server, n=2), complete(server, n=2, echo=True)
    assert [each.text for each in echoed.choices] == ["def f(" + each.text for each in plain.choices]
    assert streamed(server, n=2, echo=True)[0] == {0: echoed.choices[0].text, 1: echoed.choices[1].text}
    assert complete(server, prompt=TOKENIZER.encode("def f("), echo=True).choices[0].text == echoed.choices[0].text


def test_chat_goes_through_the_template(server):
    """The prompt is the template's text, without the tokenizer's special tokens added; parts are joined."""
    count = len(TOKENIZER.encode("<user>hello\n<assistant>", special=False))
    answer = chat(server)
    assert answer.choices[0].message.content == replayed(count, 24)
    assert answer.usage.prompt_tokens == count
    parts = chat(server, content=[{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])
    assert parts.usage.prompt_tokens == len(TOKENIZER.encode("<user>hel\nlo\n<assistant>", special=False))
    without = chat(server, extra_body={"add_generation_prompt": False})
    assert without.usage.prompt_tokens == len(TOKENIZER.encode("<user>hello\n", special=False))


def test_streamed_chat_equals_chat_at_once(server):
    whole = chat(server, n=2, max_tokens=150)
    roles, texts, reasons, usage = {}, {}, {}, None
    for chunk in chat(server, n=2, max_tokens=150, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert roles == {0: "assistant", 1: "assistant"}
    assert reasons == {0: "length", 1: "length"}
    assert usage.completion_tokens == whole.usage.completion_tokens == 300


def test_answers_carry_speculative_statistics(server):
    """Rounds, accepted drafts and their histogram agree with each other; a stream has them beside the usage."""
    answer = complete(server, max_tokens=100)
    stats = answer.model_extra["metrics"]["speculative_decoding"]
    rounds, histogram = stats["num_spec_steps"], stats["acceptance_histogram"]
    assert sum(histogram) == rounds
    assert sum(depth * count for depth, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["num_accepted_draft_tokens"] / rounds)
    assert stats["num_draft_tokens"] == rounds * 3
    assert sum(stats["accepted_by_rank"]) == stats["num_accepted_draft_tokens"]
    last = [*complete(server, stream=True, stream_options={"include_usage": True})][-1]
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("ask", [complete, chat])
def test_each_event_may_have_its_choices_usage_so_far(server, ask):
    """It grows by what came, and ends with what the whole answer counts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    so_far, whole = {0: [], 1: []}, None
    for chunk in ask(server, n=2, max_tokens=40, stream=True, stream_options=options):
        for choice in chunk.choices:
            so_far[choice.index].append(chunk.usage.completion_tokens)
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        whole = chunk.usage
    for counts in so_far.values():
        assert counts == sorted(counts)
        assert len({*counts}) > 3
        assert counts[-1] == 40
    assert whole.completion_tokens == 80


def test_a_prefix_hit_shows_in_the_usage(server):
    prompt = TOKENIZER.encode(
        "class Rectangle:\n    def __init__(self, width, height):\n        self.width = width\n" * 3
    )
    complete(server, prompt=prompt)
    answer = complete(server, prompt=prompt)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert len(prompt) - 32 < cached < len(prompt)
    assert server.metric("treetop:prefix_cache_hits_total") >= cached


def test_models_tokens_health_and_version(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_extra["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("other")
    ids = TOKENIZER.encode("def f(x):")
    told = server.post("/tokenize", {"prompt": "def f(x):"}).json()
    assert told == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "def f(x):"}
    messages = [{"role": "user", "content": "hi"}]
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == TOKENIZER.encode(
        "<user>hi\n<assistant>", special=False
    )
    for path in ("/health", "/health/live", "/health/ready", "/version"):
        assert server.get(path).status_code == 200
    assert server.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.get("/openapi.json").json()["paths"].keys() >= {"/v1/completions", "/v1/chat/completions"}


def test_a_client_that_goes_aborts_its_request():
    """Streaming or not: the engine stops, long before the requests would have ended, and nothing is left."""
    with mock(20, "1") as slow:
        asyncio.run(leave_from(slow))
        until(lambda: slow.metric("treetop:num_requests_running") == 0, "still running")
        assert slow.metric("treetop:generation_tokens_total") < 2000


async def leave_from(server: Server) -> None:
    async with server.async_client() as client:
        stream = await client.completions.create(model=NAME, prompt="a", max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.completions.create(model=NAME, prompt="a", max_tokens=2000), 0.3)


def test_many_clients_at_once_each_get_their_own(server):
    """Forty requests over sixteen rows, streamed and not: each text is its prompt's."""

    async def one(client, index: int) -> None:
        count = 1 + index % 23
        ids = TOKENIZER.encode("x = 1\n" * 20)[:count]
        body = {"model": NAME, "prompt": ids, "max_tokens": 10 + index}
        if index % 2:
            answer = await client.completions.create(**body)
            text = answer.choices[0].text
        else:
            chunks = await client.completions.create(**body, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in chunks])
        assert text == replayed(count, 10 + index)

    async def all_of_them() -> None:
        async with server.async_client() as client:
            await asyncio.gather(*(one(client, index) for index in range(40)))

    asyncio.run(all_of_them())


def test_keys_origins_and_names():
    """A key is asked for everywhere but for health and metrics; CORS is for the origins that are named."""
    flags = ("--served-model-name", "one", "two", "--allow-origin", "https://app.example", "--api-key", "sesame")
    with mock(1, "4", *flags) as server:
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 401
        wrong = server.get("/v1/models", headers={"Authorization": "Bearer sesam"})
        assert wrong.json()["error"]["type"] == "authentication_error"
        assert server.get("/health").status_code == server.get("/metrics").status_code == 200
        key = {"Authorization": "Bearer sesame", "Origin": "https://app.example"}
        models = server.get("/v1/models", headers=key)
        assert [model["id"] for model in models.json()["data"]] == ["one", "two"]
        assert models.headers["access-control-allow-origin"] == "https://app.example"
        other = server.get("/v1/models", headers={**key, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        assert server.post("/v1/completions", {"prompt": "a", "model": "two"}, headers=key).json()["model"] == "two"


def test_no_prompt_reaches_the_log(server):
    secret = "xyzzy-plugh"
    complete(server, prompt=secret)
    chat(server, content=secret)
    server.post("/v1/completions", {"prompt": secret, "temperature": secret})
    server.post("/v1/completions", {"prompt": [secret, 3]})
    assert not any(secret in line for line in server.said)
