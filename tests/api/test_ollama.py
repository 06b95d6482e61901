"""Ollama's API: chats with tools and thoughts, texts that go on, models; what it says that nothing here has."""

import json
import logging

import httpx
import pytest

from support.scripted import scripted
from support.tool_streams import hermes
from support.waiting import WAIT_S, until
from treetop.api.requests import hints

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}]
HI = [{"role": "user", "content": "Look."}]


def reply(prompt: str) -> str:
    done = prompt.count("<tool>")
    calls = hermes("look", {"at": "é"}) + hermes("look", {"at": "b"})
    return f"<think>\nStep {done}.\n</think>\n\n" + (calls if "<tools>" in prompt and not done else "It is there.")


@pytest.fixture(scope="module")
def server():
    with scripted(reply) as (url, core):
        yield url, core
        assert not core.running


def post(url: str, path: str, status: int = 200, **body) -> dict:
    said = {"model": "scripted", **({} if path == "/api/show" else {"stream": False}), **body}
    answer = httpx.post(url + path, json=said, timeout=WAIT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def lines(url: str, path: str, **body) -> list[dict]:
    answer = httpx.post(url + path, json={"model": "scripted", **body}, timeout=WAIT_S)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_two_tools_and_goes_on(server, stream):
    url, core = server
    if stream:
        seen = lines(url, "/api/chat", messages=HI, tools=TOOLS, model="scripted:latest")
        assert [each["done"] for each in seen] == [False] * (len(seen) - 1) + [True]
        message = {"role": "assistant", "content": "".join(each["message"]["content"] for each in seen)}
        message["thinking"] = "".join(each["message"].get("thinking", "") for each in seen)
        message["tool_calls"] = [call for each in seen for call in each["message"].get("tool_calls", ())]
        last = seen[-1]
    else:
        last = post(url, "/api/chat", messages=HI, tools=TOOLS)
        message = last["message"]
    assert (message["thinking"], message["content"]) == ("Step 0.", "")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"at": "é"}, {"at": "b"}]
    assert (last["done_reason"], last["eval_count"] > 0, last["prompt_eval_count"] > 0) == ("stop", True, True)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    for call in message["tool_calls"]:
        del call["id"]  # older clients know none
    results = [{"role": "tool", "tool_name": "look", "content": each} for each in ("one", "two")]
    said = post(url, "/api/chat", messages=[*HI, message, *results], tools=TOOLS)
    assert said["message"]["content"] == "It is there."
    assert '[Step 0.]look{"at": "é"}look{"at": "b"}\n<tool>one\n<tool>two\n' in core.prompts[-1]


def test_a_prompt_is_a_chat_or_goes_on(server):
    url, core = server
    said = post(url, "/api/generate", prompt="Say.", system="Be brief.")
    assert (said["response"], said["thinking"], said["done"]) == ("It is there.", "Step 0.", True)
    assert core.prompts[-1].startswith("<system>Be brief.\n<user>Say.")
    seen = lines(url, "/api/generate", prompt="Say.", raw=True, options={"num_predict": 5, "temperature": 0, "seed": 3})
    assert core.prompts[-1] == "Say."
    assert (seen[-1]["done_reason"], seen[-1]["eval_count"]) == ("length", 5)
    assert "".join(each["response"] for each in seen).startswith("<think>")
    post(url, "/api/generate", prompt="Say.", raw=True, options={"num_predict": -1})
    assert core.params[-1].max_tokens > 1000


def test_options_are_a_requests_own_and_hints_are_told(server, caplog, monkeypatch):
    url, core = server
    monkeypatch.setattr(hints, "_told", set())
    options = {
        "num_ctx": 2048, "num_gpu": 1, "mirostat": 0, "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.1,
        "seed": 4, "stop": ["zzz"], "frequency_penalty": 0.0, "num_predict": 33,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "treetop.api"):
        post(url, "/api/chat", messages=HI, options=options, keep_alive="5m", think=False)
    params = core.params[-1]
    got = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.stop, params.max_tokens)
    assert got == (0.25, 7, 0.5, 0.1, 4, ("zzz",), 33)
    assert core.prompts[-1].endswith("<think></think>")
    assert sorted(record.message.split(":")[0] for record in caplog.records) == ["num_ctx", "num_gpu"]
    for name in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in httpx.get(url + name, timeout=WAIT_S).json()["models"]] == ["scripted"]
    assert {"completion", "tools"} <= set(post(url, "/api/show")["capabilities"])
    assert httpx.get(url + "/api/version", timeout=WAIT_S).json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"messages": HI, "model": "other"}, 404, "model: 'other' is not served here"),
        ("/api/chat", {"messages": HI, "options": {"mirostat": 1}}, 400, "options.mirostat: not supported"),
        ("/api/chat", {"messages": HI, "options": {"temperature": -1}}, 400, "options.temperature must be"),
        ("/api/chat", {"messages": HI, "format": "xml"}, 400, "format: json, or a JSON schema"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images: not supported"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages[0]: no open call before it"),
        ("/api/chat", {"messages": []}, 400, "messages: List should have at least 1"),
        ("/api/chat", {"messages": HI, "unheard_of": 1}, 400, "unheard_of: unknown field"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: not supported"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, 400, "think: not where a text goes on"),
        ("/api/show", {"model": "other"}, 404, "is not served here"),
        ("/api/embed", {"input": "a"}, 404, "embeddings, scores and ranks are not supported"),
        ("/api/pull", {}, 404, "models are not fetched here"),
    ],
)
def test_what_cannot_be_is_refused_in_ollamas_shape(server, path, body, status, words):
    assert words in post(server[0], path, status, **body)["error"]


def test_a_client_that_goes_frees_its_request_and_an_error_is_a_line():
    """The text would last for minutes; its thoughts end at once, so that the first line does not wait for its end."""
    with scripted(lambda _: "<think>\nA.\n</think>\n\n" + "word " * 2000) as (url, core):
        core.pace_s = 0.5
        with httpx.stream(
            "POST", url + "/api/chat", json={"model": "scripted", "messages": HI}, timeout=WAIT_S
        ) as answer:
            next(answer.iter_lines())
        until(lambda: not core.running)
        core.fails = "the engine is tired"
        assert "tired" in lines(url, "/api/chat", messages=HI)[-1]["error"]
        assert "tired" in post(url, "/api/chat", 500, messages=HI)["error"]
