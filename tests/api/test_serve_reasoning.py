"""Reasoning before an answer, by the embedded pair: budgets to the token, and structures that begin behind it."""

import json

import httpx
import pytest

from support.scripted import TEMPLATE, scripted
from support.serving import TOKENIZER, serving
from support.waiting import WAIT_S

CLOSES = TOKENIZER.encode("</think>", False)
THINKS = TEMPLATE.replace("<assistant>", "<assistant>{% if enable_thinking %}<think>{% endif %}")
HI = [{"role": "user", "content": "Say x."}]
ON, OFF = ({"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def pair():
    flags = ("--max-running-requests", "4", "--context-length", "1024", "--tool-call-parser", "hermes")
    with serving("--chat-template", THINKS, *flags) as server:
        yield server


def chat(server, stream: bool, **body) -> dict:
    """The message, with its finish_reason and token_ids."""
    body = {"messages": HI, "return_token_ids": True, "max_tokens": 100, "seed": 0, **body}
    if not stream:
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"], "token_ids": choice["token_ids"]}
    said = {"content": "", "reasoning_content": "", "arguments": "", "token_ids": [], "finish_reason": None}
    lines = server.post("/v1/chat/completions", {**body, "stream": True}).text.splitlines()
    for line in lines:
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            said[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            said["arguments"] += call["function"].get("arguments") or ""
        said["token_ids"] += choice["token_ids"]
        said["finish_reason"] = choice["finish_reason"]
    return said


@pytest.fixture(scope="module")
def free(pair):
    """By stream: the message without a budget."""
    return {stream: chat(pair, stream, max_tokens=24, **ON) for stream in (False, True)}


@pytest.mark.pairwise
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_budget_that_is_spent_ends_the_reasoning_to_the_token(pair, free, budget, stream):
    free = free[stream]
    said = chat(pair, stream, max_tokens=24, thinking_token_budget=budget, **ON)
    assert "</think>" not in TOKENIZER.decode(free["token_ids"])
    assert said["token_ids"][:budget] == free["token_ids"][:budget]
    assert said["token_ids"][budget : budget + len(CLOSES)] == CLOSES
    assert (said.get("reasoning_content") or "") == TOKENIZER.decode(said["token_ids"][:budget]).strip()
    assert said["content"] == TOKENIZER.decode(said["token_ids"][budget + len(CLOSES) :]).lstrip()


@pytest.mark.parametrize("stream", [False, True])
def test_a_structure_begins_behind_the_reasoning(pair, stream):
    said = chat(pair, stream, thinking_token_budget=6, **JSON, **ON)
    assert said["token_ids"][6 : 6 + len(CLOSES)] == CLOSES
    assert said["reasoning_content"] == TOKENIZER.decode(said["token_ids"][:6]).strip()
    assert json.loads(said["content"]).keys() == {"n", "ok"}
    assert said["finish_reason"] == "stop"
    assert not chat(pair, stream, **JSON, **OFF).get("reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "count"}}])
def test_a_forced_call_comes_behind_the_reasoning(pair, stream, choice):
    said = chat(
        pair, stream, thinking_token_budget=6, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **ON
    )
    arguments = said["arguments"] if stream else said["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments).keys() == {"n", "ok"}
    assert said["reasoning_content"] == TOKENIZER.decode(said["token_ids"][:6]).strip()
    assert said["finish_reason"] == "tool_calls"


def test_strict_tools_leave_text_and_reasoning_free(pair):
    tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    said = chat(pair, False, thinking_token_budget=6, tools=[tool], max_tokens=30, **ON)
    assert len(said["token_ids"]) == 30
    assert said["reasoning_content"] == TOKENIZER.decode(said["token_ids"][:6]).strip()
    assert said["content"]


def test_messages_have_thinking_of_their_budget(pair):
    body = {"messages": HI, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 6}}
    answer = pair.post("/v1/messages", {**body, "temperature": 0}).json()
    thought, text = answer["content"]
    assert thought["thinking"] == chat(pair, False, temperature=0, thinking_token_budget=6, **ON)["reasoning_content"]
    assert (thought["type"], text["type"]) == ("thinking", "text")
    said = chat(pair, False, temperature=0, thinking={"type": "enabled", "budget_tokens": 6})
    assert said["reasoning_content"] == thought["thinking"]
    asked = {"input": HI, "temperature": 0, "max_output_tokens": 60, "thinking_token_budget": 6, **ON}
    answer = pair.post("/v1/responses", asked).json()
    assert answer["output"][0]["content"][0]["text"] == thought["thinking"]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = pair.post("/v1/messages", {**body, "output_config": form}).json()
    assert json.loads(answer["content"][1]["text"]).keys() == {"n", "ok"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"thinking_token_budget": 3}, "thinking_token_budget: the chat template does not say"),
        (
            "messages",
            {"max_tokens": 3, "thinking": {"type": "enabled", "budget_tokens": 3}},
            "thinking: budget_tokens: the chat template does not say",
        ),
    ],
)
def test_a_budget_without_a_format_of_reasoning_is_a_400_by_name(path, body, words):
    with scripted(str, reasoning_parser="none") as (url, core):
        answer = httpx.post(f"{url}/v1/{path}", json={"messages": HI, **body}, timeout=WAIT_S)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(words)
        assert not core.prompts


@pytest.fixture(scope="module")
def harmonic():
    """The pair as if it were gpt-oss: marks are text to it."""
    said = TEMPLATE.replace("<assistant>", "<|start|>assistant{% if open %}<|channel|>analysis<|message|>{% endif %}")
    flags = ("--max-running-requests", "4", "--context-length", "1024", "--tool-call-parser", "openai")
    with serving("--chat-template", said, *flags) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_analysis_of_harmony_to_the_token(harmonic, stream):
    on, end = {"chat_template_kwargs": {"open": True}}, TOKENIZER.encode("<|end|>", False)
    free = chat(harmonic, stream, max_tokens=40, **on)
    said = chat(harmonic, stream, max_tokens=40, thinking_token_budget=9, **on)
    assert said["token_ids"][:9] == free["token_ids"][:9]
    assert said["token_ids"][9 : 9 + len(end)] == end
    assert said["reasoning_content"] == TOKENIZER.decode(said["token_ids"][:9]).strip()


@pytest.mark.parametrize("stream", [False, True])
def test_harmony_calls_and_answers_in_messages_of_their_schema(harmonic, stream):
    """A forced call and a schema, which an output that ends has, whatever came before."""
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for body in (tools, JSON):
        said = chat(harmonic, stream, thinking_token_budget=2, seed=1, temperature=0.5, max_tokens=300, **body)
        text = TOKENIZER.decode(said["token_ids"])
        assert text.startswith(("<|channel|>analysis<|message|>", "<|channel|>commentary", "<|channel|>final"))
        if said["finish_reason"] == "length":
            continue  # a small model may say anything in a commentary
        found = said["content"]
        if body is tools:
            found = said["arguments"] if stream else said["tool_calls"][0]["function"]["arguments"]
        assert json.loads(found).keys() == {"n", "ok"}
