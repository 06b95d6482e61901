"""Whatever a client sends, it hears what is wrong with it: never a 500, and the engine lives on."""

import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.examples import EVERYTHING
from support.serving import mock, replayed
from support.waiting import WAIT_S
from treetop.api.requests.chat_body import ChatRequest
from treetop.api.requests.fields import NEUTRAL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    flags = ("--max-body-bytes", "2000000", "--max-running-requests", "8", "--max-queued-requests", "200")
    with mock(0, "4", *flags) as running:
        yield running
        assert running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 9}).json()["choices"][0]["text"] == replayed(
            1, 9
        )
        assert not any("Traceback" in line for line in running.said), "".join(running.said)


def told(server, path, body, status=400, **options) -> str:
    answer = server.post(path, body, **options)
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 10**9}, "n: Input should be less than or equal to 128"),
        ({"n": 0}, "n: "),
        ({"n": 128, "prompt": ["a", "b"]}, "at most 208"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"top_k": -7}, "top_k must be"),
        ({"min_p": 2}, "min_p must be"),
        ({"seed": -(2**63) - 1}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"stop": ""}, "stop strings must not be empty"),
        ({"stop": ["a"] * 17}, "stop: "),
        ({"stop": "a" * 1001}, "stop: "),
        ({"stop": [1]}, "stop[0]: "),
        ({"stop_token_ids": [10**9]}, "outside the vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must not be negative"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"stream_options": {"other": 1}, "stream": True}, "stream_options.other: unknown field"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [5000]}, "outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"prompt": [1] * 2048}, "leaves no room"),
        ({"prompt": "a b " * 100000}, "--context-length"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "\ud800"}, ""),
        ({"model": 5}, "model"),
        ({"best": 2}, "best: unknown field"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": -3.5}, "timeout must be"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": "9"}, "timeout"),
        ({"priority": 2**31}, "priority must be an integer in"),
        ({"priority": -(10**400)}, "priority"),
        ({"priority": 1}, "--schedule-policy priority"),
        ({"echo": 1}, "echo"),
    ],
    ids=repr,
)
def test_a_wrong_field_is_a_400_that_names_it(server, changes, words):
    assert words in told(server, COMPLETIONS, {"prompt": "a", "max_tokens": 4, **changes})


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETIONS, name) for name in NEUTRAL]
    + [(CHAT, name) for name in NEUTRAL if name not in ChatRequest.model_fields],
)
def test_what_cannot_be_honoured_is_a_400_that_names_it_unless_it_asks_for_nothing(server, path, name):
    body = {"max_tokens": 2} | ({"prompt": "a"} if path == COMPLETIONS else {"messages": HI})
    assert told(server, path, {**body, name: "something"}) == f"{name}: not supported"
    for neutral in (None, *NEUTRAL[name]):
        assert server.post(path, {**body, name: neutral}).status_code == 200
    if name == "priority":
        assert server.post(path, {**body, name: 0.0}).status_code == 200
        assert told(server, path, {**body, name: False}) == "priority: not supported"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type: only parts of text are supported, not 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "\u00e9" * 5000}]}]}, "only parts of text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the body is not JSON"),
        ({"messages": [{"role": "user", "content": "a b " * 50000}]}, "--context-length"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "give one of them"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt: unknown field"),
    ],
    ids=repr,
)
def test_a_wrong_conversation_is_a_400_that_says_so(server, changes, words):
    assert words in told(server, CHAT, {"messages": HI, "max_tokens": 4, **changes})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 1_000_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "a", "prompt": 5, "max_tokens": {}}',
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_is_a_400(server, path, body):
    assert told(server, path, body)


def test_a_number_too_large_for_a_message_is_no_number_too_large_for_a_client(server):
    """What exceeds context and vocabulary is off, as in `LLM`, and crosses the process boundary."""
    body = {"prompt": [1] * 2040, "top_k": 10**30, "temperature": 1}
    assert server.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 8
    assert "max_tokens: the prompt's 2040 tokens" in told(server, COMPLETIONS, {**body, "max_tokens": 10**30})


def test_a_body_that_is_too_large_is_a_413_however_its_size_is_told(server):
    large = json.dumps({"prompt": "a" * 3_000_000}).encode()
    assert "--max-body-bytes" in told(server, COMPLETIONS, large, status=413)

    def pieces():
        for start in range(0, len(large), 65536):
            yield large[start : start + 65536]

    import httpx

    try:
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(server.url + COMPLETIONS, content=pieces(), headers=headers, timeout=WAIT_S)
        assert answer.status_code == 413
    except httpx.NetworkError:  # the answer came, and the connection went, before all was sent
        pass


def test_a_body_that_does_not_call_itself_json_is_a_400(server):
    """So a web page of anybody cannot make a browser send one without asking first."""
    assert "Content-Type" in told(server, COMPLETIONS, {"prompt": "a"}, headers={"Content-Type": "text/plain"})


def test_floods_of_headers_and_wrong_methods_are_refused(server):
    host, port = server.url.removeprefix("http://").split(":")
    for head in (
        b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 500_000,
        b"\x00\x01\x02\r\n\r\n",
        b"GET " + b"/" * 200_000,
    ):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            try:
                connection.sendall(head + b"\r\n\r\n")
                answer = connection.recv(100)
            except ConnectionError:
                continue
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert server.get(COMPLETIONS).status_code == 405
    assert server.get("/health").status_code == 200


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
json_values = st.deferred(
    lambda: scalars | st.lists(json_values, max_size=4) | st.dictionaries(st.text(max_size=8), json_values, max_size=4)
)
names = ["prompt", "messages", "max_tokens", "n", "stop", "stop_token_ids", "temperature", "top_k", "stream", "echo"]
names += [
    "timeout",
    "priority",
    "seed",
    "logit_bias",
    "stream_options",
    "model",
    "tokens",
    "chat_template_kwargs",
    "user",
    "min_p",
    "tools",
]


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    fields=st.dictionaries(st.sampled_from(names), json_values, max_size=4),
    sound=st.booleans(),
)
def test_any_body_gets_an_answer_that_is_no_500(server, path, fields, sound):
    base = {COMPLETIONS: {"prompt": "a", "max_tokens": 2}, CHAT: {"messages": HI, "max_tokens": 2}}.get(path, {})
    body = {**(base if sound else {}), **fields}
    answer = server.post(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status_code in (200, 400, 404), answer.text[:500]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=st.binary(max_size=200), path=st.sampled_from([COMPLETIONS, CHAT]))
def test_any_bytes_get_an_answer_that_is_no_500(server, path, body):
    assert server.post(path, body).status_code == 400


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**12 }}",
        "{% for a in range(9999) %}{{ 'a' * 10**5 }}{% endfor %}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_is_a_400_in_bounded_time(template):
    """Time, memory and the sandbox's walls hold; the server and its other endpoints go on."""
    from treetop.text.chat_template import ChatTemplate
    from treetop.types.errors import InputError

    hostile = ChatTemplate(template, {})
    for _ in range(2 if EVERYTHING else 1):
        with pytest.raises(InputError, match="the chat template fails"):
            hostile.render(HI)
    hostile.close()
