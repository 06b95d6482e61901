"""Fields that real clients send: what is null, what says whose a request is, and what an answer is to show."""

import json

import pytest

from support.serving import STREAM, TOKENIZER, replayed
from treetop import SamplingParams
from treetop.outputs import LiveRequest
from treetop.text.text import IncrementalDetokenizer
from treetop.types.errors import InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.version import __version__

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
NULLS = ["n", "stream", "logprobs", "stream_options", "temperature", "top_p", "seed", "stop", "user", "max_tokens"]
NULLS += ["logit_bias", "ignore_eos", "priority", "tools", "response_format", "metadata", "skip_special_tokens"]


@pytest.fixture(scope="module")
def server(mock_server):
    return mock_server


def ask(server, path: str, **body):
    base = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    answer = server.post(path, {**base, "max_tokens": 9, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server, path: str, **body) -> list[dict]:
    base = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    text = server.post(path, {**base, "max_tokens": 9, "stream": True, **body}).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line[6:7] == "{"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_as_good_as_nothing_said(server, path):
    """One at a time and all at once; what must be given must not be null."""
    own = (
        ["echo", "best_of"]
        if path == COMPLETIONS
        else ["top_logprobs", "max_completion_tokens", "chat_template_kwargs"]
    )
    own += [] if path == COMPLETIONS else ["add_generation_prompt", "continue_final_message"]
    plain = ask(server, path, max_tokens=None if path == COMPLETIONS else 9)["usage"]
    names = [name for name in NULLS + own if path == COMPLETIONS or name != "max_tokens"]
    for name in names:
        ask(server, path, **{name: None})
    assert ask(server, path, **dict.fromkeys(names))["usage"] == plain
    assert server.post(path, {"prompt": None, "messages": None}).status_code == 400
    ask(server, path, stream=False, stream_options=None)
    assert server.post(path, {"prompt": "a", "messages": HI, "unheard_of": None}).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_says_whose_a_request_is_changes_nothing(server, path):
    whose = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    plain, told = ask(server, path)["choices"], ask(server, path, **whose)["choices"]
    assert plain == told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_answer_and_event_names_the_exactness_in_force(server, path):
    assert ask(server, path)["system_fingerprint"] == f"treetop-{__version__}-ties"
    pieces = events(server, path, stream_options={"include_usage": True})
    assert {piece["system_fingerprint"] for piece in pieces} == {f"treetop-{__version__}-ties"}


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_any_signed_seed_is_taken(server, seed):
    """A negative one is the same modulo 2^63, also where choices have seeds of their own."""
    assert SamplingParams(seed=seed).seed == seed % 2**63
    ask(server, COMPLETIONS, seed=seed, n=2)


def test_a_seed_beyond_64_bits_is_refused():
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(InputError, match="seed must be in"):
            SamplingParams(seed=seed)


def test_messages_of_real_clients_are_taken(server):
    """Each says in the prompt what it would as plain text."""

    def size(*messages: dict) -> int:
        return ask(server, CHAT, messages=[*messages])["usage"]["prompt_tokens"]

    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert size({"role": "user", "content": [part]}) == size(*HI)
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": None}
    said = {"role": "assistant", "content": "no"}
    assert size(*HI, refusal) == size(*HI, said)
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        answers = {"tool_call_id": "a"} if role == "tool" else {}
        ask(server, CHAT, messages=[*HI, call, {"role": role, "content": "x", "name": "f", **answers}])
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": refusal["content"]}]})
    assert answer.status_code == 400
    assert "'refusal'" in answer.json()["error"]["message"]


def test_token_ids_come_with_the_text(server):
    """Whole and streamed, on both endpoints: those of the prompt once, those of the output as they come."""
    prompt = TOKENIZER.encode("a")
    whole = ask(server, COMPLETIONS, return_token_ids=True, n=2)["choices"]
    want = [STREAM[i % len(STREAM)] for i in range(len(prompt), len(prompt) + 9)]
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in whole] == [(prompt, want)] * 2
    pieces = events(server, COMPLETIONS, return_token_ids=True)
    assert pieces[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [token for each in pieces for token in each["choices"][0]["token_ids"]] == want
    assert sum("prompt_token_ids" in each["choices"][0] for each in pieces) == 1
    chat = ask(server, CHAT, return_token_ids=True)
    asked = server.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert chat["prompt_token_ids"] == asked
    pieces = events(server, CHAT, return_token_ids=True)
    assert [each.get("prompt_token_ids") for each in pieces] == [asked, *[None] * (len(pieces) - 1)]
    got = [token for each in pieces for token in each["choices"][0]["token_ids"]]
    assert got == chat["choices"][0]["token_ids"]
    assert "token_ids" not in ask(server, CHAT)["choices"][0]


def test_a_stop_string_may_stay_in_the_text(server):
    text = replayed(1, 200)
    end = text.index("lazy dog")
    body = {"max_tokens": 200, "stop": ["lazy dog", "lazy dogs"]}
    assert ask(server, COMPLETIONS, **body)["choices"][0]["text"] == text[:end]
    kept = ask(server, COMPLETIONS, **body, include_stop_str_in_output=True)["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (text[: end + len("lazy dog")], "stop")
    pieces = events(server, COMPLETIONS, **body, include_stop_str_in_output=True)
    assert "".join(each["choices"][0]["text"] for each in pieces) == kept["text"]


def test_a_prompt_is_cut_to_its_last_tokens(server):
    """Text and ids, longer than the context or not; echo shows what is left."""
    ids = TOKENIZER.encode("def area(r):\n    return r ** 2\n")
    body = {"truncate_prompt_tokens": 3, "return_token_ids": True, "echo": True}
    for prompt in ("def area(r):\n    return r ** 2\n", ids):
        choice = ask(server, COMPLETIONS, prompt=prompt, **body)["choices"][0]
        assert choice["prompt_token_ids"] == ids[-3:]
        assert choice["text"].startswith(TOKENIZER.decode(ids[-3:]))
        assert not choice["text"].startswith("def")
    for prompt in ("a b " * 4000, [7] * 5000):
        usage = ask(server, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1)["usage"]
        assert usage["prompt_tokens"] == 2048 - 9
        assert server.post(COMPLETIONS, {"prompt": prompt}).status_code == 400
    long = [{"role": "user", "content": "a b " * 4000}]
    assert ask(server, CHAT, messages=long, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 2048
    assert ask(server, CHAT, truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
    for wrong in (0, -2):
        answer = server.post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": wrong})
        assert "truncate_prompt_tokens must be in" in answer.json()["error"]["message"]


def test_spaces_between_special_tokens_are_as_the_tokenizer_has_them(server):
    ask(server, COMPLETIONS, spaces_between_special_tokens=False)
    body = {"prompt": "a", "spaces_between_special_tokens": False, "skip_special_tokens": False}
    assert "spaces_between_special_tokens" in server.post(COMPLETIONS, body).json()["error"]["message"]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_shortest_of_stop_strings_at_one_place_ends_the_text(one_by_one):
    ids = TOKENIZER.encode("x = area(r)", special=False)
    for keeps, want in ((False, "x = "), (True, "x = are")):
        text = IncrementalDetokenizer(TOKENIZER.stream(), ("area", "are"), keeps)
        for part in [[token] for token in ids] if one_by_one else [ids]:
            text.feed(part)
        text.finish()
        assert text.full() == want


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, "x"),
        ({"skip_special_tokens": False}, "x<|pad|>"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "x<|pad|><|endoftext|>"),
    ],
)
def test_special_tokens_may_be_shown(options, want):
    """All but one that ended the request, unless the stop is to stay; one that comes at the limit is shown."""
    (x,) = TOKENIZER.encode("x", special=False)
    for reason, end in (("stop", want), ("length", want if "<|pad|>" not in want else "x<|pad|><|endoftext|>")):
        asked = EngineRequest(RequestId(0), (x,), SamplingParams(**options), 0)
        live = LiveRequest.of(0, asked, TOKENIZER)
        update = live.cut(RequestUpdate(RequestId(0), (x, 1, 0), finish_reason=reason))
        output = live.apply(update).output
        assert (output.text, output.token_ids) == (end, (x, 1, 0))
