"""The OpenAPI schema says what may be sent and what comes back: never a 500, and nothing that it does not say."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.examples import EVERYTHING
from support.serving import mock
from treetop.api.keys.administration import ADMIN_PATHS

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis (pip install treetop-llm[dev])")

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
STREAMED = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": MESSAGES,
    "/generate": {"text": "Hello"},
    "/completion": {"prompt": "Hello", "n_predict": 3},
    "/api/chat": {"model": "", "messages": MESSAGES["messages"]},
    "/api/generate": {"model": "", "prompt": "Hello"},
}
MANY = 300
"""Examples of an operation and a mode, at most, however long the search."""
ADMIN, ORDINARY = "boss", "plain"
WRONG = st.binary(min_size=1, max_size=20).filter(
    lambda key: min(key) > 0x20 and 0x7F not in key and key.decode("latin-1").strip() not in (ADMIN, ORDINARY)
)
HEADERS = {
    "admin": st.sampled_from([{"X-Api-Key": ADMIN}, {"Authorization": f"Bearer {ADMIN}"}]),
    "ordinary": st.just({"X-Api-Key": ORDINARY}),
    "wrong": WRONG.map(lambda key: {"X-Api-Key": key}) | WRONG.map(lambda key: {"Authorization": b"Bearer " + key}),
    "none": st.just({}),
}
"""Headers of requests by whose key they bring."""
STATUSES = {
    "/flush_cache": {"admin": {200}, "ordinary": {403}, "wrong": {401}, "none": {401}},
    "/abort_request": {"admin": {200, 400}, "ordinary": {200, 400}, "wrong": {401}, "none": {401}},
}
"""What each key gets, whatever is asked."""


@pytest.fixture(scope="module")
def server(mock_server):
    """Its teardown finds that it serves on."""
    return mock_server


@pytest.fixture(scope="module")
def keyed_server():
    """A server that has an ordinary key and an admin's. What it was sent has shown no traceback."""
    with mock(0, "4", "--api-key", ORDINARY, "--admin-api-key", ADMIN) as server:
        yield server
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


def read_schema(server, key: str = ""):
    return schemathesis.openapi.from_dict(server.get("/openapi.json", headers={"X-Api-Key": key}).json())


def checks():
    from schemathesis.specs.openapi import checks as said

    return [said.status_code_conformance, said.content_type_conformance, said.response_schema_conformance]


def ask_what_the_schema_generates(server, examples: int) -> set[int]:
    """What fits the schema and what does not, in turn, of every method of every path. Returns the statuses."""
    seen: set[int] = set()
    for operation in (each.ok() for each in read_schema(server).get_all_operations()):
        count = examples if operation.body or operation.path_parameters or operation.query else 2  # else one case
        for mode in schemathesis.GenerationMode:
            if mode.is_positive or operation.body or operation.query:  # any text is a path's parameter
                search(server, operation.as_strategy(generation_mode=mode), min(count, MANY), seen)
    return seen


def ask_with_every_key(server, examples: int) -> None:
    """What fits the schema of `STATUSES` and what does not, with every kind of key."""
    for path, expected in STATUSES.items():
        operation = read_schema(server, ORDINARY)[path]["POST"]
        for whose, headers in HEADERS.items():
            seen: set[int] = set()
            for mode in schemathesis.GenerationMode:
                if mode.is_positive or operation.body:
                    search(server, operation.as_strategy(generation_mode=mode), examples, seen, headers)
            assert seen, (path, whose)
            assert seen <= expected[whose], (path, whose)


def search(server, cases, examples: int, seen: set[int], all_headers=HEADERS["none"]) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=cases, headers=all_headers)
    def ask(case, headers):
        answer = case.call(base_url=server.url, timeout=300, headers=headers)
        asked_for = answer.status_code == 504 and "timeout" in (
            case.body or ()
        )  # a request may say how long it may take
        assert answer.status_code < 500 or asked_for, (case.path, case.body, answer.text[:500])
        case.validate_response(answer, checks=checks())
        seen.add(answer.status_code)

    ask()


def test_what_the_schema_allows_and_what_it_does_not_is_never_a_500(server):
    assert set(PATHS) <= set(server.get("/openapi.json").json()["paths"])
    assert {200, 400} <= ask_what_the_schema_generates(server, 6 if EVERYTHING else 3)


def test_every_key_gets_what_the_schema_says(keyed_server):
    ask_with_every_key(keyed_server, 3)
    abort = keyed_server.post("/abort_request", {"abort_all": True}, headers={"X-Api-Key": ORDINARY})
    assert (abort.status_code, abort.json()) == (200, {})


def test_the_schema_says_of_every_error_that_it_is_json_and_of_an_admins_routes_whom_they_refuse(server):
    """An answer may be text or nothing all the same."""
    paths = server.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for operation in methods.values():
            answers = operation["responses"]
            assert {kind for status in answers if status[0] in "45" for kind in answers[status]["content"]} == {
                "application/json"
            }, path
            assert ({"401", "403"} <= answers.keys()) is (path in ADMIN_PATHS), path
    kinds = {path: [*paths[path]["post"]["responses"]["200"].get("content", ())] for path in ADMIN_PATHS}
    assert (kinds["/flush_cache"], kinds["/v1/load_lora_adapter"]) == (["text/plain"], ["text/plain"])
    assert kinds["/sleep"] == kinds["/wake_up"] == []


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_is_what_the_schema_says(server, path):
    operation = read_schema(server)[path]["POST"]
    body = {**STREAMED[path], "stream": True}
    if "model" in body:
        body["model"] = server.get("/v1/models").json()["data"][0]["id"]
    case = operation.Case(body=body, media_type="application/json")
    answer = case.call(base_url=server.url, timeout=300)
    assert answer.status_code == 200, answer.text
    case.validate_response(answer, checks=checks())


def test_every_path_that_streams_is_among_them(server):
    bodies = server.get("/openapi.json").json()
    streams = {name for name, kind in bodies["components"]["schemas"].items() if "stream" in kind.get("properties", {})}
    takes = {
        path
        for path, methods in bodies["paths"].items()
        for reference in [methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})]
        if reference.get("schema", {}).get("$ref", "").rsplit("/")[-1] in streams
    }
    assert takes == set(STREAMED)


@pytest.mark.slow
def test_a_long_search_finds_no_500(server):
    ask_what_the_schema_generates(server, 300)


@pytest.mark.slow
def test_a_long_search_with_every_key_finds_no_500(keyed_server):
    ask_with_every_key(keyed_server, MANY)
