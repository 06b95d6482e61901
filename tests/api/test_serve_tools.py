"""Tools and reasoning over `/v1/chat/completions`, by the official client: loops of calls in every format."""

import json

import httpx
import openai
import pytest

from support.scripted import TEMPLATE, scripted
from support.serving import serving
from support.tool_streams import ODD, coder, glm, harmony_call, hermes, kimi, minimax, v31
from support.waiting import WAIT_S, until
from treetop.api.requests.chat_body import ChatMessage
from treetop.text.chat_template import ChatTemplate

STEPS = [("get_weather", ODD), ("search", {"query": 'a "b"\n</c>'}), ("now", {})]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It does.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer" if key == "days" else "string"} for key in arguments},
            },
        },
    }
    for name, arguments in STEPS
]
ANSWER = "It is warm: 21 <b>C</b>."
HI = [{"role": "user", "content": "How is the weather?"}]
SAY = {
    "hermes": hermes,
    "qwen3_coder": lambda name, said: coder(name, **{key: str(value) for key, value in said.items()}),
    "glm45": lambda name, said: glm(name, **{key: str(value) for key, value in said.items()}),
    "minimax_m2": lambda name, said: (
        f"<minimax:tool_call>\n{minimax(name, **{k: str(v) for k, v in said.items()})}</minimax:tool_call>"
    ),
    "deepseek_v31": lambda name, said: f"<｜tool▁calls▁begin｜>{v31(name, said)}<｜tool▁calls▁end｜>",
    "kimi_k2": lambda name, said: f"<|tool_calls_section_begin|>{kimi(name, 0, said)}<|tool_calls_section_end|>",
    "llama3_json": lambda name, said: json.dumps({"name": name, "parameters": said}),
    "mistral": lambda name, said: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(said)}",
    "openai": harmony_call,
}


def reply_of(form: str):
    """What a model of this format says: a thought and a call, until three calls have been answered."""

    def reply(prompt: str) -> str:
        done = prompt.count("<tool>")
        said = SAY[form](*STEPS[done]) if done < len(STEPS) else ANSWER
        if form == "openai":
            thought = "<|channel|>analysis<|message|>Step 1.<|end|><|start|>assistant"
            return thought + (said if done < len(STEPS) else f"<|channel|>final<|message|>{ANSWER}")
        return f"<think>\nStep {done}.\n</think>\n\n{said}"

    return reply


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def at_once(client, **body) -> tuple[dict, str]:
    choice = client.chat.completions.create(model="scripted", **body).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def in_events(client, **body) -> tuple[dict, str]:
    """The message that the events make, put together as clients do."""
    message: dict = {"role": "assistant", "content": "", "tool_calls": []}
    reason, num_pieces = None, 0
    for chunk in client.chat.completions.create(model="scripted", stream=True, **body):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        message["content"] += delta.content or ""
        for name in ("reasoning", "reasoning_content"):
            if piece := (delta.model_extra or {}).get(name):
                message[name] = message.get(name, "") + piece
        for call in delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                assert call.id
                message["tool_calls"].append(
                    {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": ""}}
                )
            message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
            num_pieces += 1
    assert num_pieces > 1 or reason != "tool_calls" or message["tool_calls"][0]["function"]["arguments"] == "{}"
    return {name: value for name, value in message.items() if value}, reason


@pytest.mark.pairwise
@pytest.mark.parametrize("ask", [at_once, in_events])
@pytest.mark.parametrize("form", SAY)
def test_a_loop_of_three_calls(form, ask):
    """Each call's answer leads to the next; what the model thought and called reaches the template again."""
    with (
        scripted(
            reply_of(form),
            tool_call_parser=form,
            chat_template=TEMPLATE.replace("<assistant>", "<|start|>assistant") if form == "openai" else TEMPLATE,
        ) as (url, core),
        client_of(url) as client,
    ):
        messages = [*HI]
        for name, arguments in STEPS:
            message, reason = ask(client, messages=messages, tools=TOOLS)
            assert reason == "tool_calls"
            assert message["reasoning_content"] == message["reasoning"]
            assert message["reasoning"].startswith("Step ")
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
        message, reason = ask(client, messages=messages, tools=TOOLS)
        assert (message["content"], reason) == (ANSWER, "stop")
        last = core.prompts[-1]
        assert '"name": "get_weather"' in last
        assert "get_weather" + json.dumps(ODD, ensure_ascii=False) in last
        assert "[Step 1.]" in last
        assert not core.running


def test_choices_have_calls_of_their_own():
    with scripted(reply_of("hermes")) as (url, _), client_of(url) as client:
        answer = client.chat.completions.create(model="scripted", messages=HI, tools=TOOLS, n=3)
        assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
        assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_what_is_cut_off_ends_by_length():
    with scripted(reply_of("hermes")) as (url, _), client_of(url) as client:
        for ask in (at_once, in_events):
            message, reason = ask(client, messages=HI, tools=TOOLS, max_completion_tokens=45)
            assert reason == "length"
            assert message["reasoning"] == "Step 0."


def test_one_call_at_most_where_parallel_calls_are_off():
    two = hermes(*STEPS[0]) + hermes(*STEPS[1])
    with scripted(lambda _: two) as (url, _), client_of(url) as client:
        assert len(at_once(client, messages=HI, tools=TOOLS)[0]["tool_calls"]) == 2
        for ask in (at_once, in_events):
            message, _ = ask(client, messages=HI, tools=TOOLS, parallel_tool_calls=False)
            assert len(message["tool_calls"]) == 1


def test_with_tool_choice_none_the_model_sees_no_tools_and_calls_none():
    with scripted(reply_of("hermes")) as (url, core), client_of(url) as client:
        message, reason = at_once(client, messages=HI, tools=TOOLS, tool_choice="none")
        assert message["content"].startswith("<tool_call>")
        assert reason == "stop"
        assert "<tools>" not in core.prompts[-1]


def test_effort_and_options_reach_the_template():
    """Effort none closes the thought in the prompt: then all is content."""
    with scripted(lambda _: "<b> 1 </b>") as (url, core), client_of(url) as client:
        message, _ = at_once(client, messages=HI, reasoning_effort="none")
        assert core.prompts[-1].endswith("<assistant><think></think>")
        assert message == {"role": "assistant", "content": "<b> 1 </b>"}
        at_once(client, messages=HI, reasoning_effort="high")
        assert core.prompts[-1].endswith("<assistant>")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        at_once(client, messages=HI, reasoning_effort="high", extra_body=off)
        assert core.prompts[-1].endswith("<think></think>")


def test_a_text_goes_into_a_thought_that_the_prompt_opens():
    template = TEMPLATE + "<think>\n"
    with scripted(lambda _: "Hm.</think>Yes.", chat_template=template) as (url, _), client_of(url) as client:
        for ask in (at_once, in_events):
            message, _ = ask(client, messages=HI)
            assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


BAD = {
    "tools: two have one name": {"tools": [TOOLS[0], TOOLS[0]]},
    "tool_choice: there are no tools": {"tool_choice": "required"},
    "tool_choice: there is no tool 'x'": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "x"}},
    },
    "tool_choice": {"tools": TOOLS, "tool_choice": "any"},
    "tools[0].function.name: String should match pattern": {
        "tools": [{"type": "function", "function": {"name": "a b>"}}]
    },
    "is not supported, only 'function', 'custom'": {"tools": [{"type": "web_search"}]},
    "tool_choice: there is no custom tool 'get_weather'": {
        "tools": TOOLS,
        "tool_choice": {"type": "custom", "custom": {"name": "get_weather"}},
    },
    "tool_choice: there is no tool 'other'": {
        "tools": TOOLS,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        },
    },
    "enable_thinking and thinking: give one of them": {"enable_thinking": True, "thinking": {"type": "disabled"}},
    "reasoning_effort and reasoning.effort: give one": {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
    "reasoning.exclude: not supported": {"reasoning": {"exclude": True}},
    "tools: List should have at most 1024": {"tools": TOOLS * 400},
    "guided_regex: beside tools a JSON schema or object alone": {"tools": TOOLS, "guided_regex": "a"},
    "structured_output": {"tools": TOOLS, "tool_choice": "required"},
    "thinking_token_budget: this engine forces no tokens": {"thinking_token_budget": 3},
    "thinking.budget_tokens: this engine forces no tokens": {"thinking": {"type": "enabled", "budget_tokens": 3}},
    "thinking_token_budget and thinking.budget_tokens: give one of them": {
        "thinking_token_budget": 3,
        "thinking": {"type": "enabled", "budget_tokens": 4},
    },
}


@pytest.mark.parametrize("words", BAD)
def test_what_does_not_fit_together_is_a_400_by_name(words):
    with scripted(str) as (url, core):
        answer = httpx.post(url + "/v1/chat/completions", json={"messages": HI, **BAD[words]}, timeout=WAIT_S)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert not core.prompts


def test_what_a_model_cannot_do_is_a_400_by_name():
    """A template without tools, one of an unknown format, one that knows no effort."""
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for options, body, words in (
        ({"chat_template": plain}, {"tools": TOOLS}, "tools: the chat template shows none"),
        ({"tool_call_parser": None}, {"tools": TOOLS}, "serve with --tool-call-parser"),
        ({"tool_call_parser": "none"}, {"tools": TOOLS}, "serve with --tool-call-parser"),
        ({"chat_template": plain}, {"reasoning_effort": "low"}, "reasoning_effort: the model's chat template"),
    ):
        with scripted(str, **options) as (url, _):
            answer = httpx.post(url + "/v1/chat/completions", json={"messages": HI, **body}, timeout=WAIT_S)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]


def test_a_client_that_goes_frees_its_request():
    with scripted(lambda _: "<think>" + "word " * 3000) as (url, core), client_of(url) as client:
        stream = client.chat.completions.create(model="scripted", messages=HI, stream=True, max_tokens=15000)
        next(iter(stream))
        stream.close()
        httpx.get(url + "/health", timeout=WAIT_S)
        until(lambda: not core.running)


def test_templates_get_arguments_as_they_want_them():
    """Objects, but text where the template joins it; broken JSON as it is; `thinking` where a template has it."""
    said = {
        "role": "assistant",
        "content": None,
        "reasoning": "r",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
            for text in ('{"a": 1}', "{", "")
        ],
    }
    message = ChatMessage.model_validate(said)
    assert [call["function"]["arguments"] for call in message.flat()["tool_calls"]] == [{"a": 1}, "{", {}]
    assert [call["function"]["arguments"] for call in message.flat(True)["tool_calls"]] == ['{"a": 1}', "{", ""]
    assert message.flat()["reasoning_content"] == "r"
    assert message.flat(False, True)["thinking"] == "r"
    joins = "{{ '<x>' + tool['function']['name'] + tool['function']['arguments'] + '</x>' }}"
    assert ChatTemplate(joins, {}).joins_arguments
    assert not ChatTemplate("{{ tool.function.arguments | tojson + '' }}", {}).joins_arguments
    template = ChatTemplate("{% if enable_thinking %}{{ message.thinking }}{% endif %} tools {{ 'effort' }}", {})
    assert template.reads("enable_thinking")
    assert not any(template.reads(name) for name in ("thinking", "tools", "effort"))


# ------------------------------------------------------------------------------------------------ the embedded pair


@pytest.fixture(scope="module")
def pair():
    """The embedded pair, whose calls are forced by their structure: it has never seen a tool."""
    with serving("--chat-template", TEMPLATE, "--max-running-requests", "4", "--context-length", "1024") as server:
        yield server


REFS = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/default"}, "how": {"enum": ["walk", "run"]}},
            "required": ["to", "how"],
            "additionalProperties": False,
            "$defs": {
                "default": {"type": "array", "items": {"$ref": "/$defs/yes"}, "minItems": 2, "maxItems": 2},
                "yes": {"type": "boolean"},
            },
        },
    },
}
STRICT = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_pair_makes_three_forced_calls(pair, stream):
    """A named one, and any: valid by their schemas, references included."""
    client, ask, messages = pair.client(), in_events if stream else at_once, [*HI]
    for choice in ({"type": "function", "function": {"name": "move"}}, "required", "required"):
        message, reason = ask(
            client,
            messages=messages,
            tools=[REFS, STRICT],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_completion_tokens=200,
            seed=3,
            extra_body={"model": None, "chat_template_kwargs": {"enable_thinking": False}},
        )
        assert reason == "tool_calls"
        assert len(message["tool_calls"]) == 1
        for call in message["tool_calls"]:
            said = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "move":
                assert len(said["to"]) == 2
                assert {*map(type, said["to"])} == {bool}
                assert said["how"] in ("walk", "run")
            else:
                assert 0 <= said["n"] <= 9
        call = message["tool_calls"][0]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": 3},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_hostile_tool_is_a_400_by_name(pair, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 3}
        answer = pair.post("/v1/chat/completions", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("tools: ")
        assert answer.elapsed.total_seconds() < WAIT_S / 2
