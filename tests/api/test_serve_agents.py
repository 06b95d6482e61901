"""`/v1/responses` and `/v1/messages` by their official clients: loops of three calls, and what surrounds them."""

import json

import anthropic
import httpx
import openai
import pytest

from support.scripted import TEMPLATE, scripted
from support.serving import serving
from support.tool_streams import ODD, hermes
from support.waiting import WAIT_S, until

STEPS = [("get_weather", ODD), ("search", {"query": 'a "b"\n</c>'}), ("now", {})]
SCHEMAS = {name: {"type": "object", "properties": {key: {} for key in said}} for name, said in STEPS}
ANSWER = "It is warm: 21 <b>C</b>."
ASK = "How is the weather?"


def reply(prompt: str) -> str:
    """A thought, a word and a call, until three calls have been answered."""
    done = prompt.count("<tool>")
    return f"<think>\nStep {done}.\n</think>\n\n" + (f"Well.\n{hermes(*STEPS[done])}" if done < 3 else ANSWER)


@pytest.fixture(scope="module")
def server():
    with scripted(reply) as (url, core):
        yield url, core
        assert not core.running


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client.responses


@pytest.fixture
def messages(server):
    with anthropic.Anthropic(base_url=server[0], api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client.messages


# ------------------------------------------------------------------------------------------------------- Responses

FUNCTIONS = [
    {"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in SCHEMAS.items()
]


def respond(responses, stream: bool, **body):
    if not stream:
        return responses.create(model="scripted", **body)
    seen = [*responses.create(model="scripted", stream=True, **body)]
    assert [each.sequence_number for each in seen] == [*range(len(seen))]
    check_events([each.model_dump() for each in seen])
    return seen[-1].response


def check_events(seen: list[dict]) -> None:
    """Deltas add up to what `done` says, items open before they close, and the last response holds them all."""
    assert [each["type"] for each in seen[:2]] == ["response.created", "response.in_progress"]
    texts, opened, done = {}, [], []
    for each in seen:
        kind = each["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert len(opened) == len(done) == each["output_index"]
            opened.append(each["item"]["id"])
        elif kind.endswith(".delta"):
            assert each["item_id"] == opened[-1]
            texts[each["item_id"]] = texts.get(each["item_id"], "") + each["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert texts[each["item_id"]] == each["text"]
        elif kind == "function_call_arguments.done":
            assert texts[each["item_id"]] == each["arguments"]
        elif kind == "output_item.done":
            done.append(each["item"])
    assert [item["id"] for item in seen[-1]["response"]["output"]] == [item["id"] for item in done] == opened


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_loop_of_three_calls_by_responses(server, responses, stream, kept):
    """By items that are sent back, and by the id of the response before."""
    items, before = [{"role": "user", "content": ASK}], None
    for name, arguments in STEPS:
        answer = respond(
            responses, stream, input=items, tools=FUNCTIONS, previous_response_id=before, instructions="Be brief."
        )
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output[0].content[0].text.startswith("Step ")
        assert (answer.status, answer.output_text) == ("completed", "Well.")
        call = answer.output[2]
        assert (call.name, json.loads(call.arguments)) == (name, arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        if kept:
            items, before = [result], answer.id
        else:
            items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    answer = respond(
        responses, stream, input=items, tools=FUNCTIONS, previous_response_id=before, instructions="Be brief."
    )
    assert answer.output_text == ANSWER
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    last = server[1].prompts[-1]
    assert "<system>Be brief.\n<user>" + ASK in last
    assert "<assistant>[Step 1.]Well.search" in last
    assert last.count("<tool>done") == 3


def test_a_response_that_is_cut_off_is_incomplete(responses):
    for stream in (False, True):
        answer = respond(responses, stream, input=ASK, max_output_tokens=4)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"


def test_a_call_that_is_cut_off_is_incomplete_and_what_came_before_is_not(server):
    """In the event that ends the item as in the response; a tree of deltas or one."""
    seen = set()
    for count in range(30, 60, 5):
        body = {"input": ASK, "tools": FUNCTIONS, "max_output_tokens": count}
        answer = httpx.post(server[0] + "/v1/responses", json=body, timeout=WAIT_S).json()
        lines = httpx.post(server[0] + "/v1/responses", json={**body, "stream": True}, timeout=WAIT_S).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        said = [[(item["type"], item["status"]) for item in items] for items in (answer["output"], done)]
        assert said[0] == said[1] == [(item["type"], item["status"]) for item in events[-1]["response"]["output"]]
        assert answer["status"] == events[-1]["response"]["status"]
        if answer["status"] == "incomplete":
            assert [status for _, status in said[0]] == ["completed"] * (len(done) - 1) + ["incomplete"]
            seen.add(said[0][-1][0])
    assert "function_call" in seen


def test_text_and_parts_are_the_same_prompt(server, responses):
    for said in (ASK, [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]):
        respond(responses, False, input=said, store=False, metadata={"a": "b"}, user="u", truncation="disabled")
        assert server[1].prompts[-1].endswith(f"<user>{ASK}\n<assistant>")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id: 'resp_x' is not kept"),
        ({"input": "a", "background": True, "store": False}, "background: only with store"),
        ({"input": "a", "conversation": "c"}, "conversation: 'c' is not kept here"),
        (
            {"input": "a", "conversation": "c", "previous_response_id": "r"},
            "conversation: not with previous_response_id",
        ),
        ({"input": "a", "truncation": "auto"}, "truncation: not supported"),
        ({"input": "a", "tools": [{"type": "unheard_of"}]}, "is not supported, only 'function'"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "is not supported, only 'function'"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: 'item_reference' is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "is not supported, only",
        ),
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text: json_schema must be an"),
        ({"input": "a", "unheard_of": 1}, "unheard_of: unknown field"),
        ({"input": "a", "model": "other"}, "model: 'other' is not served"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "max_tokens"}, "tools": FUNCTIONS}, "'max_tokens'"),
        ({}, "input: Field required"),
    ],
)
def test_what_responses_cannot_do_is_refused_by_name(server, body, words):
    answer = httpx.post(server[0] + "/v1/responses", json=body, timeout=WAIT_S)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == error["message"].partition(":")[0].split()[0]


def test_several_api_processes_keep_no_responses():
    with scripted(reply, api_workers=2) as (url, _):
        for before, status in ((None, 200), ("resp_x", 400)):
            body = {"input": ASK, "previous_response_id": before}
            answer = httpx.post(url + "/v1/responses", json=body, timeout=WAIT_S)
            assert answer.status_code == status
        assert "--api-workers 1" in answer.json()["error"]["message"]


# -------------------------------------------------------------------------------------------------------- Messages

CUSTOM = [{"name": name, "description": "It does.", "input_schema": schema} for name, schema in SCHEMAS.items()]


def say(client, stream: bool, **body):
    body = {"model": "scripted", "max_tokens": 2000, **body}
    if not stream:
        return client.create(**body)
    with client.stream(**body) as events:
        kinds = [each.type for each in events]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_three_calls_by_messages(server, messages, stream):
    talk = [{"role": "user", "content": ASK}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for name, arguments in STEPS:
        answer = say(messages, stream, messages=talk, tools=CUSTOM, system=system)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        assert (answer.content[2].name, answer.content[2].input) == (name, arguments)
        result = {
            "type": "tool_result",
            "tool_use_id": answer.content[2].id,
            "content": [{"type": "text", "text": "done"}],
        }
        said = [block.model_dump(exclude_none=True) for block in answer.content]
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    answer = say(messages, stream, messages=talk, tools=CUSTOM, system="Be brief.")
    assert (answer.content[-1].text, answer.stop_reason) == (ANSWER, "end_turn")
    assert answer.usage.output_tokens > 0
    last = server[1].prompts[-1]
    assert "<system>Be brief.\n<user>" + ASK in last
    assert "<assistant>[Step 1.]Well.search" in last
    assert last.count("<tool>done") == 3
    count = messages.count_tokens(model="scripted", messages=talk, tools=CUSTOM, system="Be brief.")
    assert count.input_tokens == answer.usage.input_tokens


def test_a_message_ends_as_it_is_said(server, messages):
    talk = [{"role": "user", "content": ASK}]
    for stream in (False, True):
        answer = say(messages, stream, messages=talk, stop_sequences=["Well", "nothing"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Well")
        answer = say(messages, stream, messages=talk, tools=CUSTOM, max_tokens=45)
        assert answer.stop_reason == "max_tokens"
        assert answer.content[-1].type in ("tool_use", "text")


def test_an_answer_may_be_begun_by_the_client(server, messages):
    say(messages, False, messages=[{"role": "user", "content": ASK}, {"role": "assistant", "content": "It is"}])
    assert server[1].prompts[-1].endswith("<assistant>It is")


def test_thinking_is_switched_where_the_template_has_a_switch(server, messages):
    for kind, end in (("disabled", "<think></think>"), ("adaptive", "<assistant>")):
        say(messages, False, messages=[{"role": "user", "content": ASK}], thinking={"type": kind})
        assert server[1].prompts[-1].endswith(end)
    plain = "{{ messages[0].content }}"
    with scripted(reply, chat_template=plain, reasoning_parser="none") as (url, _):
        for kind, status in (("disabled", 200), ("enabled", 400)):
            body = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "thinking": {"type": kind}}
            assert httpx.post(url + "/v1/messages", json=body, timeout=WAIT_S).status_code == status
        for path, body in (  # agents say an effort to every model
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            effort = {"reasoning": {"effort": "high"}} if "input" in body else {"output_config": {"effort": "high"}}
            thinking = {} if "input" in body else {"thinking": {"type": "adaptive"}}
            assert httpx.post(url + path, json={**body, **effort, **thinking}, timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"mcp_servers": [{}]}, "mcp_servers: not supported"),
        ({"tools": [{"type": "fly_20250124", "name": "fly"}]}, "tools[0].type: 'fly_20250124' is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "is not supported, only 'clear"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: 'image' is not supported",
        ),
        ({"messages": []}, "messages: List should have at least 1"),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop_sequences": [""]}, "stop_sequences must not be empty"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"unheard_of": 1}, "unheard_of: unknown field"),
        ({"model": "other"}, "model: 'other' is not served"),
    ],
)
def test_what_messages_cannot_do_is_refused_by_name_in_anthropics_shape(server, body, words):
    said = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **body}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "unheard-of-2099"}
    answer = httpx.post(server[0] + "/v1/messages", json=said, headers=headers, timeout=WAIT_S)
    assert answer.status_code in (400, 404)
    told = answer.json()
    assert told["type"] == "error"
    assert told["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert words in told["error"]["message"]
    assert told["request_id"] == answer.headers["x-request-id"]


def test_keys_and_errors_are_anthropics():
    with scripted(reply, api_key=("sesame",)) as (url, _):
        talk = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
        with anthropic.Anthropic(base_url=url, api_key="sesame", max_retries=0) as client:
            assert client.messages.create(**talk).stop_reason == "max_tokens"
        with (
            anthropic.Anthropic(base_url=url, api_key="other", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"),
        ):
            client.messages.create(**talk)


# ------------------------------------------------------------------------------------------------------------ both


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_request(path, body, stream):
    with scripted(lambda _: "word " * 2000) as (url, core):
        core.pace_s = 0.05
        if stream:
            with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=WAIT_S) as answer:
                next(answer.iter_raw())
            until(lambda: core.prompts)
        if not stream:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + path, json=body, timeout=httpx.Timeout(WAIT_S, read=0.2))
        until(lambda: not core.running)


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "a"}), ("/v1/messages", {"max_tokens": 9})])
def test_an_error_in_a_stream_is_an_event_of_the_endpoint(path, body):
    body = {"messages": [{"role": "user", "content": "a"}], **body} if path.endswith("messages") else body
    with scripted(reply) as (url, core):
        core.fails = "the engine is tired"
        text = httpx.post(url + path, json={**body, "stream": True}, timeout=WAIT_S).text
        last = json.loads(text.strip().rsplit("data: ", 1)[1])
        assert last["type"] == "error"
        assert "tired" in json.dumps(last)
        assert httpx.post(url + path, json=body, timeout=WAIT_S).status_code == 500


@pytest.fixture(scope="module")
def pair():
    flags = ("--max-running-requests", "4", "--context-length", "1024", "--reasoning-parser", "none")
    with serving("--chat-template", TEMPLATE, *flags) as server:
        yield server


def test_the_pair_is_held_to_structures_by_both(pair):
    """A forced call, and a text of a schema."""
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    compact = {"x-guidance": {"whitespace_flexible": False}}  # a small model may write nothing but spaces
    client = pair.client().responses
    tools = [{"type": "function", "name": "f", "parameters": schema, "strict": True}]
    for choice in ("required", {"type": "function", "name": "f"}):
        answer = client.create(
            input="a", temperature=0, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
        )
        assert [*json.loads(answer.output[0].arguments)] == ["yes"]
    form = {"format": {"type": "json_schema", "name": "x", "schema": {**compact, **schema}}}
    assert [*json.loads(client.create(input="a", temperature=0, text=form, max_output_tokens=200).output_text)] == [
        "yes"
    ]
    with anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0) as both:
        answer = both.messages.create(
            model="builtin:nestling",
            max_tokens=200,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "a"}],
            tools=[{"name": "f", "input_schema": schema}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert (answer.stop_reason, [*answer.content[0].input]) == ("tool_use", ["yes"])
