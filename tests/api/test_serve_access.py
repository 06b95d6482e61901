"""What each request passes first, and what errors say: ids, headers, counts, the access log, `param` and `code`."""

import asyncio
import logging
import re
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from starlette.responses import PlainTextResponse

from support.serving import serving
from support.waiting import WAIT_S, until
from treetop.api.access import AccessMiddleware
from treetop.cli.config_file import words_of
from treetop.serve_options import ServeOptions
from treetop.types.errors import ConfigError

KEY = {"Authorization": "Bearer sesame"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% if not silent %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"


@pytest.fixture(scope="module")
def server():
    flags = ("--access-log", "--api-key", "sesame", "--max-body-bytes", "200000", "--allow-origin", "https://a.example")
    with serving("--mock-engine", "1,4", "--chat-template", TEMPLATE, *flags) as running:
        yield running


def told(answer) -> tuple[int, str | None, str]:
    """Status, param and code."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", ["a b " * 2000, "a b " * 40000], ids=["encoded", "too long to encode"])
def test_a_conversation_longer_than_the_context_is_a_400_that_clients_know(server, content, stream):
    """Before anything is streamed, and by the code and words of a completion's prompt."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "stream": stream}
    answer = server.post(CHAT, body, headers=KEY)
    assert told(answer) == (400, "messages", "context_length_exceeded")
    same = server.post(COMPLETIONS, {"prompt": content, "max_tokens": 3}, headers=KEY)
    assert told(same) == (400, "prompt", "context_length_exceeded")
    items = server.post("/v1/responses", {"input": content, "max_output_tokens": 3, "stream": stream}, headers=KEY)
    assert told(items) == (400, "input", "context_length_exceeded")
    assert "--context-length" in answer.json()["error"]["message"]


def test_several_prompts_of_which_one_is_too_long_are_a_400_that_clients_know(server):
    answer = server.post(COMPLETIONS, {"prompt": [[1], [1] * 3000]}, headers=KEY)
    assert told(answer) == (400, "prompt", "context_length_exceeded")
    assert "prompt 1: " in answer.json()["error"]["message"]


def test_a_template_that_makes_no_text_is_a_400(server):
    body = {"messages": HI, "max_tokens": 3, "chat_template_kwargs": {"silent": True}}
    assert told(server.post(CHAT, body, headers=KEY)) == (400, "messages", "empty_prompt")
    assert server.post(CHAT, {**body, "chat_template_kwargs": {"silent": False}}, headers=KEY).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["self", "messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "", "a b", "1"],
)
def test_a_template_option_of_a_name_that_means_something_else_is_a_400_that_names_it(server, name):
    answer = server.post(CHAT, {"messages": HI, "max_tokens": 3, "chat_template_kwargs": {name: 1}}, headers=KEY)
    assert told(answer) == (400, "chat_template_kwargs", "invalid_value")
    assert (name or "''") in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["args", "kwargs", "context", "environment", "template", "source", "enable_thinking"])
def test_a_template_option_may_have_any_other_name(server, name):
    body = {"messages": HI, "max_tokens": 3, "chat_template_kwargs": {name: {"deep": [1]}}}
    assert server.post(CHAT, body, headers=KEY).status_code == 200


LONG_CHOICES = {"prompt": "a", "structured_outputs": {"choice": ["a" * 70_000]}}


@pytest.mark.parametrize(
    ("path", "body", "want"),
    [
        (COMPLETIONS, {}, (400, "prompt", "missing_required_parameter")),
        (COMPLETIONS, {"prompt": "a", "best": 1}, (400, "best", "unknown_parameter")),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, (400, "max_tokens", "invalid_type")),
        (COMPLETIONS, {"prompt": "a", "n": 0}, (400, "n", "invalid_value")),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, (400, "temperature", "invalid_value")),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, (400, "logit_bias", "invalid_value")),
        (COMPLETIONS, {"prompt": "a", "timeout": 0}, (400, "timeout", "invalid_value")),
        (COMPLETIONS, {"prompt": ""}, (400, "prompt", "invalid_value")),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, (400, "suffix", "unsupported_parameter")),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, (404, "model", "model_not_found")),
        (COMPLETIONS, b"{", (400, None, "invalid_json")),
        (COMPLETIONS, b"[]", (400, None, "invalid_json")),
        (COMPLETIONS, {"prompt": "a" * 300_000}, (413, None, "request_too_large")),
        (CHAT, {"messages": HI, "top_logprobs": 2}, (400, "top_logprobs", "invalid_value")),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a" * 70_000}, (400, "guided_regex", "invalid_value")),
        (COMPLETIONS, LONG_CHOICES, (400, "structured_outputs", "invalid_value")),
        ("/detokenize", {"tokens": [10**9]}, (400, "tokens", "invalid_value")),
        ("/nowhere", {}, (404, None, "not_found")),
        ("/health", {}, (405, None, "method_not_supported")),
    ],
)
def test_every_error_says_its_code_and_the_field_it_is_about(server, path, body, want):
    assert told(server.post(path, body, headers=KEY)) == want


# ---------------------------------------------------------------------------------------------- headers


def test_what_is_not_allowed_says_what_is(server):
    """A method by Allow, HEAD included, and whoever has no key by WWW-Authenticate."""
    assert server.get(CHAT, headers=KEY).headers["allow"] == "POST"
    assert server.post("/health", {}, headers=KEY).headers["allow"] == "GET, HEAD"
    for headers in ({}, {"Authorization": "Bearer sesam"}):
        answer = server.get("/v1/models", headers=headers)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert told(answer) == (401, None, "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics", "/version"])
def test_head_is_answered_as_get_without_a_body(server, path):
    with httpx.Client(timeout=WAIT_S) as client:
        for _ in range(2):  # over one connection, which a body would confuse
            answer = client.head(server.url + path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert client.get(server.url + path).headers["content-type"] == answer.headers["content-type"]
        assert client.head(server.url + COMPLETIONS, headers=KEY).status_code == 405


def test_the_id_of_a_request_comes_back_with_every_answer_and_stands_in_the_log(server):
    """Of answers, streams, errors and what is refused at the gate; CORS shows it to web pages."""
    body = {"prompt": "a", "max_tokens": 4}
    asked = [
        lambda own: server.get("/health", headers=own),
        lambda own: server.get("/nowhere?secret=xyzzy", headers={**KEY, **own}),
        lambda own: server.get("/v1/models", headers=own),
        lambda own: server.post(COMPLETIONS, body, headers={**KEY, **own, "Origin": "https://a.example"}),
        lambda own: server.post(COMPLETIONS, {**body, "stream": True}, headers={**KEY, **own}),
        lambda own: server.post(COMPLETIONS, {"prompt": 5}, headers={**KEY, **own}),
        lambda own: server.post(COMPLETIONS, {"prompt": "a" * 300_000}, headers={**KEY, **own}),
    ]
    for number, ask in enumerate(asked):
        name = f"trace-{number}/a:b=c"
        answer = ask({"X-Request-Id": name})
        assert answer.headers["x-request-id"] == name
        lines = re.compile(rf"127\.0\.0\.1 (GET|POST) (\S+) {answer.status_code} (\d+\.\d{{4}}) s {name}\n$")
        until(lambda lines=lines: any(lines.search(line) for line in server.said), "no line of the access log")
    exposed = asked[3]({}).headers
    shown = exposed["access-control-expose-headers"].split(", ")
    assert {"X-Request-Id", "Retry-After", "x-ratelimit-remaining-tokens"} <= {*shown}
    assert not any("xyzzy" in line for line in server.said), "a query was logged"


@pytest.mark.parametrize("wrong", ["", "a b", 'a"b', "x" * 129, "a\tb", "ü"])
def test_an_id_that_is_none_is_not_taken_over(server, wrong):
    """It could be anything, and would stand in the log: a new one takes its place, another for each request."""
    sent = {b"X-Request-Id": wrong.encode("latin-1")}
    made = {httpx.get(server.url + "/health", headers=sent, timeout=WAIT_S).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_paths_and_methods_of_anybody_make_no_metrics(server):
    """Counts are by route: what is none is one word, and methods that are none another."""
    for path in ("/x1", "/x2/y", "/v1/models/a", "/v1/models/b/c"):
        server.get(path, headers=KEY)
    with httpx.Client(timeout=WAIT_S) as client:
        client.request("BREW", server.url + "/health")
    brewed = {"handler": "/health", "method": "other", "status": "405"}
    until(lambda: server.metric("treetop:http_requests_total", **brewed) == 1)  # counted behind the answer
    text = server.get("/metrics").text
    routes = {*re.findall(r'http_requests_total{handler="([^"]*)"', text)}
    assert {"other", "/health", "/v1/models/{name:path}"} <= routes
    assert not any(re.search("x1|x2|models/[ab]", route) for route in routes)
    assert server.metric("treetop:http_requests_total", handler="other", method="GET", status="404") >= 2
    assert "BREW" not in text


# ---------------------------------------------------------------------------------------------- alone


def front_of(**changes) -> SimpleNamespace:
    options = SimpleNamespace(access_log=False)
    watched = {"options": options, "metrics": Mock(), "tracer": None}
    defaults = {"leaving": False, "draining": False, "num_working": 0, **watched}
    return SimpleNamespace(**{**defaults, **changes})


def ask(app, method: str = "POST", **headers) -> httpx.Response:
    async def run():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", timeout=WAIT_S
        ) as client:
            return await client.request(method, "/v1/completions", headers=headers)

    return asyncio.run(run())


def test_a_server_that_drains_answers_reads_and_refuses_work():
    api = front_of(draining=True, leaving=True)
    app = AccessMiddleware(PlainTextResponse("an answer"), api)
    for method, status in (("GET", 200), ("HEAD", 200), ("OPTIONS", 200), ("POST", 503), ("DELETE", 503)):
        answer = ask(app, method)
        assert (answer.status_code, answer.headers["connection"]) == (status, "close")
        assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
        api.metrics.answered.assert_called_with("other", method, status)


def test_work_counts_until_its_last_byte_whatever_becomes_of_it():
    """What a drain waits for: not reads, and not what has failed."""
    api, seen = front_of(), []

    async def fails(scope, receive, send):
        seen.append(api.num_working)
        raise ValueError("no")

    for method in ("POST", "GET"):
        with pytest.raises(ValueError, match="no"):
            ask(AccessMiddleware(fails, api), method)
    assert (seen, api.num_working) == ([1, 0], 0)
    assert api.metrics.answered.call_args == (("other", "GET", 499),)  # nobody has heard anything


@pytest.mark.parametrize("leaving", [True, False])
def test_what_the_end_of_a_drain_cuts_off_hears_503_if_it_has_heard_nothing(leaving):
    async def cut(scope, receive, send):
        raise asyncio.CancelledError

    app = AccessMiddleware(cut, front_of(leaving=leaving))
    if leaving:
        assert told(ask(app)) == (503, None, "shutting_down")
    else:
        with pytest.raises(asyncio.CancelledError):
            ask(app)


def test_its_options_are_checked_and_may_stand_in_a_file():
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="--shutdown-delay must be a number of seconds"):
            ServeOptions(shutdown_delay=wrong)
    assert words_of({"access-log": True, "shutdown_delay": 5}, "") == ["--access-log", "--shutdown-delay=5"]
    assert words_of({"access-log": False}, "") == []


def test_there_is_no_access_log_unless_it_is_asked_for(caplog):
    caplog.set_level(logging.INFO, "treetop.access")
    ask(AccessMiddleware(PlainTextResponse("an answer"), front_of()))
    assert not caplog.records
    ask(AccessMiddleware(PlainTextResponse("an answer"), front_of(options=SimpleNamespace(access_log=True))))
    assert len(caplog.records) == 1


class Inner:
    """An application that notes in which turn of the loop each request begins."""

    def __init__(self) -> None:
        self.turn, self.begun = 0, list[tuple[int, str]]()

    async def __call__(self, scope, receive, send) -> None:
        self.begun.append((self.turn, scope["path"]))
        await asyncio.sleep(0)

    async def until(self, count: int) -> None:
        while len(self.begun) < count:
            self.turn += 1
            await asyncio.sleep(0)


def access_of(inner: Inner) -> AccessMiddleware:
    options, metrics = SimpleNamespace(access_log=False), SimpleNamespace(answered=lambda *_: None)
    state = SimpleNamespace(draining=False, leaving=False, num_working=0, options=options, metrics=metrics, tracer=None)
    return AccessMiddleware(inner, state)


def test_of_many_requests_at_once_few_begin_in_a_turn():
    """In the order of their coming, whatever is cancelled; reads wait for none of them."""

    async def run() -> list[tuple[int, str]]:
        inner = Inner()
        app = access_of(inner)

        def asked(method: str, path: str) -> asyncio.Task[None]:
            scope = {"type": "http", "method": method, "path": path, "headers": []}
            return asyncio.create_task(app(scope, None, None))

        work = [asked("POST", str(number)) for number in range(200)]
        read = asked("GET", "read")
        await inner.until(1)
        await asyncio.sleep(0)
        assert inner.begun[-1][1] == "read"
        for each in work[100:110]:
            each.cancel()
        await inner.until(191)
        done = await asyncio.gather(*work, read, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in done) == 10
        work = [asked("POST", "later")]
        await inner.until(192)
        await work[0]
        return [each for each in inner.begun if each[1] != "read"]

    begun = asyncio.run(run())
    assert max(Counter(turn for turn, _ in begun).values()) <= 4
    assert [path for _, path in begun] == [*map(str, range(100)), *map(str, range(110, 200)), "later"]
