"""`return_draft_depths` and `return_draft_trees`: what an answer says of its drafts, at once and in a stream."""

import json
from itertools import pairwise

import pytest

from support.serving import TOKENIZER, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "def area(r):\n    return 3 * r\n\ndef area(r):\n    return 3 *"
BODIES = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0, "ignore_eos": True},
}
ASKING = {"return_draft_depths": True, "return_draft_trees": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server():
    with serving("builtin:nestling", "--speculative-draft-model-path", "builtin:nestling-eagle3") as running:
        yield running


def streamed(server, path: str, body: dict) -> tuple[list[dict], dict]:
    """The choices of all events, and the last event."""
    answer = server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]], events[-1]


def text_of(choice: dict) -> str:
    said = choice.get("delta", choice.get("message", choice))
    return said.get("content") or said.get("text") or ""


def check_trees(said: dict, ids: list[int]) -> None:
    """Paths and depths spell the output: the first token comes of the prompt, then each round begins at the last."""
    spelled, depths = [ids[0]], [0]
    for tree in said["draft_trees"]:
        assert len(tree["tokens"]) == len(tree["texts"]) == len(tree["parents"]) == len(tree["logprobs"])
        assert all(tree["parents"][node] == up for up, node in pairwise(tree["accepted"]))
        assert tree["tokens"][0] == spelled[-1]
        spelled += [*(tree["tokens"][node] for node in tree["accepted"][1:]), tree["bonus"]]
        depths += [*range(1, len(tree["accepted"])), 0]
    assert spelled[: len(ids)] == ids
    assert depths[: len(ids)] == said["draft_depths"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_depths_texts_and_trees_add_up_to_the_answer(server, path):
    """The text is the same with them and without; the accept length they give is that of the metrics."""
    plain = server.post(path, BODIES[path]).json()
    asked = server.post(path, {**BODIES[path], **ASKING}).json()
    choice, said = asked["choices"][0], asked["choices"][0]["treetop"]
    assert text_of(choice) == text_of(plain["choices"][0])
    assert "treetop" not in plain["choices"][0]
    assert len(said["draft_depths"]) == len(said["texts"]) == asked["usage"]["completion_tokens"]
    assert "".join(said["texts"]) == text_of(choice)
    check_trees(said, choice["token_ids"])
    told = asked["metrics"]["speculative_decoding"]
    assert told == plain["metrics"]["speculative_decoding"]
    lengths = [len(tree["accepted"]) for tree in said["draft_trees"]]
    assert sum(lengths) / len(lengths) == pytest.approx(told["mean_acceptance_length"])
    assert told["mean_acceptance_length"] > 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_the_same_in_pieces(server, path):
    whole = server.post(path, {**BODIES[path], **ASKING}).json()["choices"][0]
    choices, last = streamed(server, path, {**BODIES[path], **ASKING})
    said = [choice["treetop"] for choice in choices if "treetop" in choice]
    joined = {name: [each for part in said for each in part[name]] for name in whole["treetop"]}
    assert joined == whole["treetop"]
    assert "".join(map(text_of, choices)) == text_of(whole)
    assert last["usage"]["completion_tokens"] == len(joined["draft_depths"])


def test_each_choice_of_each_prompt_has_its_own(server):
    """Also where requests are sampled and side by side."""
    body = {"prompt": [PROMPT, "Berlin is"], "n": 2, "max_tokens": 12, "temperature": 1, "seed": 3, **ASKING}
    for choice in server.post(COMPLETIONS, body).json()["choices"]:
        assert "".join(choice["treetop"]["texts"]) == choice["text"]
        check_trees(choice["treetop"], choice["token_ids"])


def test_texts_join_characters_of_several_tokens(server):
    """A token that only begins a character has no text."""
    ids = TOKENIZER.encode("naïve 日本", special=False)
    body = {"prompt": "x", "max_tokens": 1, "return_draft_depths": True, "allowed_token_ids": [ids[-1]]}
    said = server.post(COMPLETIONS, {**body, "max_tokens": 3}).json()["choices"][0]
    assert "".join(said["treetop"]["texts"]) == said["text"]
    assert said["treetop"].keys() == {"draft_depths", "texts"}


def test_an_engine_without_trees_has_depths_and_refuses_trees(mock_server):
    """The mock engine accepts what it likes, and has no trees; /v1/models says so."""
    answer = mock_server.post(COMPLETIONS, {"prompt": "a b", "max_tokens": 10, "return_draft_depths": True}).json()
    assert answer["choices"][0]["treetop"]["draft_depths"] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    refused = mock_server.post(COMPLETIONS, {"prompt": "a b", "return_draft_trees": True})
    assert refused.status_code == 400
    assert "return_draft_trees: this engine drafts no trees" in refused.json()["error"]["message"]
    assert mock_server.get("/v1/models").json()["data"][0]["treetop"] == {"chat": True, "draft_trees": False}


def test_the_list_of_models_says_what_may_be_asked(server):
    assert server.get("/v1/models").json()["data"][0]["treetop"] == {"chat": True, "draft_trees": True}
