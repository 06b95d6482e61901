"""What agents and front ends send beside the question: custom tools, namespaces, tools of a provider's own, hints."""

import json
import logging

import httpx
import pytest

from support.scripted import TEMPLATE, scripted
from support.tool_streams import hermes
from support.waiting import WAIT_S
from treetop.api.requests import hints

PATCH = '*** Begin Patch\n+print("é")\n*** End Patch\n'
LARK = {"syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'}
CUSTOM = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Edits.", "format": {"type": "grammar", "grammar": LARK}},
}
PLAIN = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
HI = [{"role": "user", "content": "Edit it."}]


def reply(prompt: str) -> str:
    return hermes("patch", {"input": PATCH}) if "<tool>" not in prompt else "Done."


@pytest.fixture(scope="module")
def server():
    with scripted(reply) as (url, core):
        yield url, core


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(hints, "_told", set())


def post(url: str, path: str, **body) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=WAIT_S)


def events_of(url: str, path: str, **body) -> list[dict]:
    with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=WAIT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------------------------------------------------- tools


def test_a_chat_calls_a_custom_tool_and_goes_on(server):
    url, core = server
    message = post(url, "/v1/chat/completions", messages=HI, tools=[CUSTOM, PLAIN]).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": PATCH})
    assert "this lark grammar" in core.prompts[-1]
    chunks = events_of(url, "/v1/chat/completions", messages=HI, tools=[CUSTOM, PLAIN])
    pieces = [call for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", ())]
    assert pieces[0]["type"] == "custom"
    assert "".join(piece["custom"]["input"] for piece in pieces) == PATCH
    talk = [*HI, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    assert post(url, "/v1/chat/completions", messages=talk, tools=[CUSTOM]).json()["choices"][0]["message"]["content"]
    assert "patch" + json.dumps({"input": PATCH}, ensure_ascii=False) in core.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_a_custom_tool_and_go_on(server, stream):
    url, core = server
    tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", **LARK}}
    if stream:
        seen = events_of(url, "/v1/responses", input="Edit it.", tools=[tool])
        kinds = [each["type"] for each in seen if "custom" in each["type"]]
        assert kinds == [f"response.custom_tool_call_input.{end}" for end in ("delta", "done")]
        assert [each["input"] for each in seen if each["type"].endswith("_input.done")] == [PATCH]
        answer = seen[-1]["response"]
    else:
        answer = post(url, "/v1/responses", input="Edit it.", tools=[tool]).json()
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["input"], item["id"][:4]) == ("custom_tool_call", "patch", PATCH, "ctc-")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    for body in ({"input": [{"role": "user", "content": "Edit it."}, item, result]},
                 {"input": [result], "previous_response_id": answer["id"]}):  # fmt: skip
        said = post(url, "/v1/responses", tools=[tool], **body).json()
        assert said["output"][0]["content"][0]["text"] == "Done."
        assert "patch" + json.dumps({"input": PATCH}, ensure_ascii=False) in core.prompts[-1]


def test_a_named_custom_tool_is_held_to_its_grammar():
    """The output is the text itself; a regular expression and any text are held, too."""
    asked = {"type": "custom", "custom": {"name": "patch"}}
    with scripted(lambda _: PATCH, can_constrain=True) as (url, core):
        for form in (
            {"type": "grammar", "grammar": LARK},
            {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(.|\\n)*"}},
        ):
            tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
            body = {"messages": HI, "tools": [tool, PLAIN], "tool_choice": asked}
            choice = post(url, "/v1/chat/completions", **body).json()["choices"][0]
            assert choice["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": PATCH}
            assert choice["finish_reason"] == "tool_calls"
        held = [params.structured_output for params in core.params]
        assert [(each.kind, each.spec) for each in held] == [("lark", LARK["definition"]), ("regex", "(.|\\n)*")]
        wrong = {
            "type": "custom",
            "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {**LARK, "definition": "start: ("}}},
        }
        answer = post(url, "/v1/chat/completions", messages=HI, tools=[wrong], tool_choice=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{IN_CHATS.format(0)}.definition")


IN_CHATS = "tools[{}].custom.format.grammar"


def test_a_grammar_that_is_none_is_a_400_by_its_place_whatever_the_choice():
    wrong = {"type": "grammar", "grammar": {**LARK, "definition": "start: ("}}
    bad = {"type": "custom", "custom": {"name": "bad", "format": wrong}}
    flat = {"type": "custom", "name": "bad", "format": {"type": "grammar", "syntax": "regex", "definition": "(a"}}
    plain = {"type": "function", "name": "now"}
    with scripted(lambda _: "Done.", can_constrain=True) as (url, core):
        allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
        for choice in (None, "auto", "none", "required", {"type": "allowed_tools", "allowed_tools": allowed}):
            answer = post(url, "/v1/chat/completions", messages=HI, tools=[CUSTOM, bad], tool_choice=choice)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{IN_CHATS.format(1)}.definition")
        for tools, place in (
            ([{"type": "web_search"}, plain, flat], "tools[2].format"),
            ([plain, {"type": "namespace", "name": "s", "tools": [plain, flat]}], "tools[1].tools[1].format"),
        ):
            answer = post(url, "/v1/responses", input="a", tools=tools)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{place}.definition")
        many = [{"type": "custom", "custom": {**CUSTOM["custom"], "name": f"p{i}"}} for i in range(33)]
        assert "at most 32" in post(url, "/v1/chat/completions", messages=HI, tools=many).text
        assert not core.params


@pytest.fixture(scope="module")
def holding():
    with scripted(lambda _: "Done.", can_constrain=True) as (url, core):
        yield url, core


NAMED = {"type": "custom", "custom": {"name": "patch"}}
CHOICES = (
    *("auto", "none", "required", NAMED),
    *({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}} for mode in ("auto", "required")),
)


@pytest.mark.parametrize(
    ("definition", "error"),
    [
        (f"{LARK['definition']} more\nmore: /x/", None),
        (f"%llguidance {{}}\n{LARK['definition']}", None),
        (f"// Of edits.\n?{LARK['definition']}", None),
        ('root ::= "*** Begin Patch" rest\nrest ::= [a-z]+', "1(7): Expected token"),
        ('# Of edits.\n\nstart ::= "*** Begin Patch"', "3(8): Expected token"),
        ('start: "a"\n}\nmore: "b"', "2(1): expecting rule"),
        ('start: "a" (\n', "1(13): Expected token"),
        ('root: "a"', "no start rule"),
    ],
)
def test_a_lark_grammar_is_lark_and_no_gbnf_whatever_the_choice(holding, definition, error):
    """Errors tell the lines of the grammar as it was given."""
    (url, core), place = holding, f"{IN_CHATS.format(1)}.definition"
    form = {"type": "grammar", "grammar": {**LARK, "definition": definition}}
    tools = [PLAIN, {"type": "custom", "custom": {"name": "patch", "format": form}}]
    core.params.clear()
    for choice in CHOICES:
        answer = post(url, "/v1/chat/completions", messages=HI, tools=tools, tool_choice=choice)
        if error is None:
            assert answer.status_code == 200, answer.text
            continue
        said = answer.json()["error"]
        assert (answer.status_code, said["param"]) == (400, place)
        assert said["message"].startswith(f"{place}: {error}")
    assert len(core.params) == (0 if error else len(CHOICES))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["required", "allowed_tools"])
def test_a_required_call_of_a_custom_tool_is_held_and_read(kind, stream):
    """A lark grammar's text comes as it is; regular expressions and functions in a list, several of them."""
    digits = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    number = {"type": "custom", "custom": {"name": "number", "format": digits}}
    listed = [{"name": "number", "parameters": {"input": "12"}}, {"name": "now", "parameters": {}}]
    said = {"Edit it.": f"patch\n{PATCH}", "Count.": json.dumps(listed)}
    tools = [CUSTOM, number, PLAIN]
    named = [{"type": each["type"], each["type"]: {"name": each[each["type"]]["name"]}} for each in tools]
    choice = kind if kind == "required" else {"type": kind, kind: {"mode": "required", "tools": named}}
    with scripted(lambda prompt: next(text for word, text in said.items() if word in prompt), True) as (url, core):
        for word, expected in (("Edit it.", [("patch", PATCH)]), ("Count.", [("number", "12"), ("now", "{}")])):
            body = {"messages": [{"role": "user", "content": word}], "tools": tools, "tool_choice": choice}
            found = dict[int, list[str]]()
            if stream:
                chunks = events_of(url, "/v1/chat/completions", **body)
                pieces = [
                    each for chunk in chunks for c in chunk["choices"] for each in c["delta"].get("tool_calls", ())
                ]
            else:
                message = post(url, "/v1/chat/completions", **body).json()["choices"][0]["message"]
                pieces = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            for each in pieces:
                call = each.get("custom") or each["function"]
                name, text = found.setdefault(each["index"], ["", ""])
                text += call.get("input", "") + call.get("arguments", "")
                found[each["index"]] = [name or call.get("name", ""), text]
            assert [tuple(each) for each in found.values()] == expected
        assert {params.structured_output.kind for params in core.params} == {"grammar"}


@pytest.mark.parametrize("form", [{"type": "grammar"}, {"type": "text", "grammar": LARK}, {"type": "json"}])
def test_a_format_is_a_text_or_a_whole_grammar(server, form):
    chat = {"messages": HI, "tools": [{"type": "custom", "custom": {"name": "patch", "format": form}}]}
    response = {"input": "a", "tools": [{"type": "custom", "name": "patch", "format": form}]}
    for path, body, place in (
        ("/v1/chat/completions", chat, "tools[0].custom.format"),
        ("/v1/responses", response, "tools[0].format"),
    ):
        error = post(server[0], path, **body)
        assert error.status_code == 400
        assert error.json()["error"]["param"].startswith(place)


def test_only_allowed_tools_are_shown(server):
    url, core = server
    allowed = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert post(url, "/v1/chat/completions", messages=HI, tools=[CUSTOM, PLAIN], tool_choice=choice).status_code == 200
    assert '"patch"' in core.prompts[-1]
    assert '"now"' not in core.prompts[-1]
    tools = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "now"}, {"type": "web_search"}]
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "now"}, {"type": "web_search"}],
    }
    assert post(url, "/v1/responses", input="a", tools=tools, tool_choice=choice).status_code == 200
    assert '"patch"' not in core.prompts[-1]
    assert '"now"' in core.prompts[-1]


def test_functions_of_a_namespace_are_called_by_both_names():
    tools = [
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "open", "defer_loading": True}]},
        {"type": "function", "name": "open"},
    ]
    with scripted(lambda p: hermes("files.open", {"a": 1}) if "<tool>" not in p else "Done.") as (url, core):
        (item,) = post(url, "/v1/responses", input="a", tools=tools).json()["output"]
        assert (item["name"], item["namespace"], json.loads(item["arguments"])) == ("open", "files", {"a": 1})
        assert '"files.open"' in core.prompts[-1]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        assert post(url, "/v1/responses", input=[item, result], tools=tools).status_code == 200
        assert 'files.open{"a": 1}' in core.prompts[-1]
        answer = post(url, "/v1/responses", input="a", tools=[tools[0], tools[0]])
        assert answer.json()["error"]["message"] == "tools: two have one name"


# ------------------------------------------------------------------------------------- a provider's own, and hints


def test_what_a_provider_alone_has_is_left_out_and_told_once(caplog):
    items = [{"type": "web_search_call", "id": "w"}, {"type": "reasoning", "encrypted_content": "x", "summary": []}]
    body = {
        "input": [*items, {"role": "user", "content": "Edit it."}],
        "tools": [{"type": "local_shell"}, {"type": "web_search"}],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "concise"},
        "prompt_cache_key": "k",
    }
    plain = TEMPLATE.replace("enable_thinking", "something")
    with scripted(reply, chat_template=plain) as (url, core), caplog.at_level(logging.WARNING, "treetop.api"):
        for _ in range(2):
            assert post(url, "/v1/responses", **body).status_code == 200
    assert "<tools>" not in core.prompts[-1]
    told = sorted(record.message for record in caplog.records)
    begins = [
        "effort: a hint",
        "input: web_search_call: ",
        "text.verbosity: a",
        "tools: local_shell: ",
        "tools: web_search: ",
    ]
    assert len(told) == len(begins)
    assert all(message.startswith(begin) for message, begin in zip(told, begins, strict=True))


def test_messages_take_what_claude_code_sends(server, caplog):
    url, core = server
    body = {
        "max_tokens": 99, "cache_control": {"type": "ephemeral"}, "speed": "fast",
        "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Edit it.", "cache_control": {"ttl": "1h"}}]},
            {"role": "system", "content": "A reminder."},
            {"role": "user", "content": "Now."},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "tool_use", "id": "t", "name": "find", "input": {}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "tool_reference", "tool_name": "patch"}]}]},
        ],
        "tools": [
            {"name": "patch", "input_schema": {"type": "object"}, "defer_loading": True, "allowed_callers": ["direct"]},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "tool_search_tool_regex_20251119", "name": "search"},
        ],
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "treetop.api"):
        answer = post(url, "/v1/messages", **body)
    assert answer.status_code == 200, answer.text
    assert "<user>Edit it.\n\nA reminder.\n\nNow.\n" in core.prompts[-1]
    assert "<tool>patch" in core.prompts[-1]
    assert "web_search" not in core.prompts[-1]
    told = sorted(record.message for record in caplog.records if "left out" in record.message)
    kinds = ["redacted_thinking", "server_tool_use", "tool_search_tool_regex_20251119", "web_search_20250305"]
    assert len(told) == len(kinds)
    assert all(kind in message for message, kind in zip(told, kinds, strict=True))
    body["context_management"]["edits"][0]["keep"] = {"type": "thinking_turns", "value": 1}
    with caplog.at_level(logging.WARNING, "treetop.api"):
        assert post(url, "/v1/messages", **body).status_code == 200
    assert caplog.records[-1].message.startswith("context_management: clear_thinking: a hint")


def test_how_front_ends_say_thinking(server):
    url, core = server
    for body, ends in (
        ({"enable_thinking": False}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"reasoning": {"effort": "none"}}, True),
        ({"enable_thinking": True}, False),
        ({"thinking": {"type": "enabled"}}, False),
    ):
        assert post(url, "/v1/chat/completions", messages=HI, **body).status_code == 200
        assert core.prompts[-1].endswith("<think></think>") == ends
    plain = TEMPLATE.replace("enable_thinking", "something")
    with scripted(reply, chat_template=plain, reasoning_parser="none") as (other, _):
        answer = post(other, "/v1/chat/completions", messages=HI, enable_thinking=True)
        assert answer.json()["error"]["message"].startswith("enable_thinking: thinking is nothing that this model")
        assert post(other, "/v1/chat/completions", messages=HI, enable_thinking=False).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_unknown_fields_are_left_out_where_that_is_asked(path, caplog):
    """At any depth; what is known and cannot be done is refused all the same."""
    said = {"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}
    body = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": [{"role": "user", "content": "a", "odd": 1}]},
        "/v1/messages": {"max_tokens": 9, "messages": [said]},
        "/v1/chat/completions": {"messages": [{**said, "timestamp": 1}], "options": {"num_ctx": 1}},
    }[path]
    refused = {"/v1/responses": {"truncation": "auto"}, "/v1/messages": {"mcp_servers": [{}]}}.get(
        path, {"use_beam_search": True}
    )
    with scripted(reply, ignore_unknown_fields=True) as (url, _), caplog.at_level(logging.WARNING, "treetop.api"):
        assert post(url, path, **body, session_id="x", temprature=1).status_code == 200
        assert post(url, path, **body, **refused).status_code == 400
        assert any(record.message.startswith("temprature: an unknown field") for record in caplog.records)
        for i in range(400):
            hints.left_out(f"field {i}" + "x" * 500, "many")
        assert len(caplog.records) <= 256
        assert all(len(record.message) < 200 for record in caplog.records)
    with scripted(reply) as (url, _):
        assert post(url, path, **body, session_id="x").status_code == 400
