"""A client reads where its request is wrong, and what to write instead; what asks for nothing is taken."""

import pytest

from support.serving import mock, serving
from treetop.api.error_paths import problems_of
from treetop.api.requests.tools import Calls, Function, Tool

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
HI = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "1"}


@pytest.fixture(scope="module")
def server():
    """The embedded model as it is: with its own chat template."""
    with serving("--mock-engine", "0,4") as running:
        yield running


def of_user(*parts) -> dict:
    return {"role": "user", "content": [*parts]}


def error_of(server, path, body) -> dict:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text[:500]
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"messages": [HI] * 30 + [of_user({"type": "text"})]}, "messages[30].content[0].text", "Field required"),
        ({"messages": [of_user({"type": "text", "text": "a", "x": 1})]}, "messages[0].content[0].x", "unknown field"),
        ({"messages": [of_user({"type": "input_image"})]}, "messages[0].content[0].type", "not 'input_image'"),
        (
            {"tools": [FUNCTION, FUNCTION, {"type": "function", "function": {"name": "g", "parametrs": {}}}]},
            "tools[2].function.parametrs",
            "did you mean `parameters`?",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported, only 'fun"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "unknown field"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not supported",
        ),
        ({"tempertaure": 1}, "tempertaure", "did you mean `temperature`?"),
        ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents", "did you mean `content`?"),
        ({"messages": [HI, {**HI, "mood": "good"}]}, "messages[1].mood", "unknown field, which the chat template"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "needs text"),
        ({"messages": [{"role": "system"}, HI]}, "messages[0].content", "needs text"),
        ({"messages": [HI, CALL, {"role": "tool", "content": "1"}]}, "messages[2].tool_call_id", "needs it"),
        (
            {"messages": [HI, CALL, {"role": "tool", "content": "1", "tool_call_id": "b"}]},
            "messages[2].tool_call_id",
            "no call before it has the id 'b'",
        ),
    ],
)
def test_an_error_of_a_chat_names_the_place(server, changes, param, words):
    """`param` is the path, the message begins with it, and says nothing of alternatives that were not meant."""
    error = error_of(server, CHAT, {"messages": [HI], "max_tokens": 4, **changes})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]
    assert "; " not in error["message"].replace("; did you mean", "")


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        (MESSAGES, {"messages": [of_user({"type": "image"})]}, "messages[0].content[0].type: 'image' is not supported"),
        (MESSAGES, {"tools": [{"type": "web_seek_20250305", "name": "s"}]}, "tools[0].type: 'web_seek_20250305'"),
        (
            MESSAGES,
            {
                "system": "be brief",
                "messages": [USED, of_user({"type": "text", "text": "a"}, RESULT, {**RESULT, "tool_use_id": "x"})],
            },
            "messages[1].content[2].tool_use_id: no call before it has the id 'x'",
        ),
        (
            MESSAGES,
            {"messages": [of_user(USED["content"][0])]},
            "messages[0].content[0].type: no 'tool_use' in a message",
        ),
        (
            MESSAGES,
            {"messages": [HI, {**USED, "content": [RESULT]}]},
            "messages[1].content[0].type: no 'tool_result' in",
        ),
        (RESPONSES, {"tools": [{"type": "web_seek"}]}, "tools[0].type: 'web_seek' is not supported"),
        (RESPONSES, {"input": [of_user({"type": "input_image"})]}, "input[0].content[0].type: 'input_image'"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type: 'item_reference' is not supported"),
        (
            RESPONSES,
            {"input": [OUTPUT], "instructions": "be brief"},
            "input[0].call_id: no call before it has the id 'a'",
        ),
        (
            RESPONSES,
            {
                "input": [
                    HI,
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
                    OUTPUT,
                    {**OUTPUT, "call_id": "x"},
                ]
            },
            "input[3].call_id: no call before it has the id 'x'",
        ),
    ],
)
def test_what_other_servers_do_themselves_is_refused_by_name(server, path, changes, words):
    sound = {"messages": [HI], "max_tokens": 4} if path == MESSAGES else {"input": "hi"}
    message = error_of(server, path, {**sound, **changes})["message"]
    assert message.startswith(words)
    assert "Field required" not in message


def test_a_wrong_call_id_behind_a_kept_conversation_is_that_of_the_request(server):
    """Places count the request's own items, whatever was said before."""
    called = [HI, {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}, OUTPUT]
    kept = server.post(RESPONSES, {"input": called, "max_output_tokens": 4}).json()["id"]
    error = error_of(server, RESPONSES, {"previous_response_id": kept, "input": [OUTPUT, {**OUTPUT, "call_id": "x"}]})
    assert error["param"] == "input[1].call_id"


@pytest.mark.parametrize(
    "message",
    [
        {**HI, "name": "ada", "mood": None, "moods": [], "tone": ""},
        {
            "role": "assistant",
            "content": "Hello.",
            "refusal": "no",
            "annotations": [{"type": "url_citation"}],
            "provider_specific_fields": {"refusal": None, "citations": []},
            "audio": {"id": "a"},
            "function_call": {"name": "f", "arguments": "{}"},
        },
    ],
)
def test_members_that_clients_send_back_or_that_say_nothing_are_taken(server, message):
    answer = server.post(CHAT, {"messages": [message, HI], "max_tokens": 4})
    assert answer.status_code == 200, answer.text


def test_a_member_that_the_template_reads_is_taken():
    with mock(0, "4", "--chat-template", "{% for m in messages %}{{ m.mood }}{{ m.content }}{% endfor %}") as running:
        assert running.post(CHAT, {"messages": [{**HI, "mood": "good"}], "max_tokens": 4}).status_code == 200


def test_what_asks_for_nothing_is_taken_by_chats_and_responses_alike(server):
    streams = {"stream": True, "stream_options": {"include_obfuscation": False}}
    for path, body in (
        (CHAT, {"messages": [HI], "max_tokens": 4, "verbosity": "medium", **streams}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 4, "text": {"verbosity": "medium"}, **streams}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text


def test_more_output_than_the_context_holds_is_refused_with_the_numbers(server):
    """In chats and completions. The default of completions is nobody's wish, and is cut."""
    for path, body in ((CHAT, {"messages": [HI]}), (COMPLETIONS, {"prompt": "hi"})):
        error = error_of(server, path, {**body, "max_tokens": 5000})
        assert error["param"] == "max_tokens"
        assert error["code"] == "context_length_exceeded"
        assert "5000 of output" in error["message"]
        assert "it has 2048; ask for at most 20" in error["message"]
    long = server.post(COMPLETIONS, {"prompt": [9] * 2040})
    assert long.json()["usage"]["completion_tokens"] == 8


def test_agents_that_ask_for_more_than_the_context_holds_are_told_that_it_was_cut(server):
    """Messages by the stop reason, Responses by the most tokens that were left."""
    text = "def f(x): " * 380
    said = server.post(MESSAGES, {"messages": [{**HI, "content": text}], "max_tokens": 32000}).json()
    assert said["stop_reason"] == "model_context_window_exceeded"
    response = server.post(RESPONSES, {"input": text, "max_output_tokens": 32000}).json()
    assert response["max_output_tokens"] == response["usage"]["output_tokens"] < 2048
    assert response["status"] == "incomplete"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "embeddings, scores and ranks are not supported"),
        ("POST", "/v1/score", "not supported"),
        ("POST", "/embedding", "embeddings, scores and ranks are not supported"),
        ("POST", "/infill", "POST /completion"),
        ("GET", "/get_model_info", "/server_info"),
        ("GET", "/v1/responses/resp_1", "is not kept here"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/reset_prefix_cache", "/flush_cache"),
        ("GET", "/docs", "/openapi.json"),
        ("GET", "/nothing", "/openapi.json lists what there is"),
    ],
)
def test_a_path_that_is_no_route_says_what_to_use(server, method, path, words):
    answer = server.get(path) if method == "GET" else server.post(path, {})
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


def test_the_embedded_model_chats_and_calls_without_options(server):
    """Chats, tools (left to the model), Responses and Messages, through its own template."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    called = [HI, CALL, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    chat = server.post(CHAT, {"messages": called, "tools": tools, "max_tokens": 4})
    assert chat.status_code == 200, chat.text
    assert server.post(RESPONSES, {"input": "hi", "max_output_tokens": 4}).status_code == 200
    assert server.post(MESSAGES, {"messages": [HI], "max_tokens": 4}).status_code == 200


def test_a_name_that_is_a_kind_and_a_member_at_once_is_read_by_what_the_body_has():
    """pydantic's location `[0, "text", "text"]` is a member of a part of kind text, `[0, "text", "x"]` is no member of
    its text.
    """
    body = {"parts": [{"type": "text", "text": "a", "x": 1}, {"type": "text"}]}
    errors = [
        {"loc": ("body", "parts", 0, "text", "x"), "type": "extra_forbidden", "msg": ""},
        {"loc": ("body", "parts", 1, "text", "text"), "type": "missing", "msg": "Field required"},
        {"loc": ("body", "parts", "str"), "type": "string_type", "msg": "Input should be a valid string"},
    ]
    assert [path for path, _, _ in problems_of(errors, body)] == ["parts[0].x", "parts[1].text"]


def test_a_forced_tool_without_parameters_takes_none():
    """An empty schema is another thing: it says nothing of the arguments."""
    for function, closed in (({"name": "f"}, True), ({"name": "f", "parameters": {}}, False)):
        calls = Calls([Tool(type="function", function=Function(**function))], "required", True)
        assert ('"properties": {}, "additionalProperties": false' in calls.structure.spec) is closed
