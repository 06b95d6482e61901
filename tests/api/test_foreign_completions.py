"""llama.cpp's `/completion` and SGLang's `/generate`, whole and streamed, and what routers ask a server."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from support.scripted import scripted
from support.waiting import WAIT_S, until
from treetop.api.sglang import GenerateAnswer, GenerateRequest
from treetop.outputs import RequestMetrics, RequestOutput
from treetop.types.sampling import TokenLogprobs


def reply(prompt: str) -> str:
    return f"Said {prompt}. " * 3


@pytest.fixture(scope="module")
def server():
    with scripted(reply, can_constrain=True) as (url, core):
        yield url, core
        assert not core.running


def post(url: str, path: str, status: int = 200, **body):
    answer = httpx.post(url + path, json=body, timeout=WAIT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def events(url: str, path: str, **body) -> list[dict]:
    text = httpx.post(url + path, json={**body, "stream": True}, timeout=WAIT_S).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_llama_cpps_completion(server):
    url, core = server
    whole = post(
        url, "/completion", prompt="a", temperature=0.5, repeat_penalty=1.1, seed=-1, cache_prompt=True, n_keep=3
    )
    assert (whole["content"], whole["stop_type"], whole["tokens_evaluated"]) == (reply("a"), "eos", 1)
    params = core.params[-1]
    assert (params.temperature, params.repetition_penalty, params.seed) == (0.5, 1.1, None)
    assert params.max_tokens > 1000
    seen = events(url, "/completion", prompt="a")
    assert "".join(each["content"] for each in seen) == whole["content"]
    assert [each["stop"] for each in seen] == [False] * (len(seen) - 1) + [True]
    cut = post(url, "/completion", prompt="a", n_predict=3, grammar='root ::= "x"', stop="zzz")
    assert (cut["stop_type"], cut["tokens_predicted"]) == ("limit", 3)
    assert (core.params[-1].structured_output.kind, core.params[-1].stop) == ("grammar", ("zzz",))
    assert post(url, "/completion", prompt="a", stop=["Sa"])["stopping_word"] == "Sa"
    props = httpx.get(url + "/props", timeout=WAIT_S).json()
    assert props["default_generation_settings"]["n_ctx"] == core.info.max_context
    assert props["total_slots"] == core.info.max_requests


def test_sglangs_generate(server):
    url, core = server
    params = {"max_new_tokens": 1000, "temperature": 0.5, "sampling_seed": 3, "stop": "zzz", "top_k": -1}
    whole = post(url, "/generate", text="a", sampling_params=params, rid="mine")
    assert whole["text"] == reply("a")
    meta = whole["meta_info"]
    assert (meta["id"], meta["finish_reason"], meta["prompt_tokens"]) == ("mine", {"type": "stop"}, 1)
    assert (core.params[-1].seed, core.params[-1].stop) == (3, ("zzz",))
    seen = events(url, "/generate", text="a", sampling_params=params)
    assert all(later["text"].startswith(each["text"]) for each, later in pairwise(seen))
    assert (seen[-1]["text"], seen[-1]["meta_info"]["finish_reason"]["type"]) == (reply("a"), "stop")
    many = post(url, "/generate", text=["a", "b"], sampling_params={"n": 2, "max_new_tokens": 2})
    assert [each["meta_info"]["finish_reason"] for each in many] == [{"type": "length", "length": 2}] * 4
    assert {each["index"] for each in events(url, "/generate", input_ids=[[20], [21]])} == {0, 1}
    post(url, "/generate", text="a", sampling_params={"regex": "[ab]+"})
    assert core.params[-1].structured_output.kind == "regex"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/completion", {"prompt": "a", "mirostat": 2}, "mirostat: not supported"),
        ("/completion", {"prompt": "a", "n_probs": 3}, "n_probs: not supported"),
        ("/completion", {"prompt": "a", "temperature": -1.0}, "temperature must be"),
        ("/completion", {"prompt": "a", "unheard_of": 1}, "unheard_of: unknown field"),
        ("/completion", {}, "prompt: Field required"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text, input_ids: give one of them"),
        ("/generate", {"sampling_params": {}}, "text, input_ids: give one of them"),
        ("/generate", {"text": "a", "top_logprobs_num": 2}, "top_logprobs_num: not supported"),
        ("/generate", {"text": "a", "sampling_params": {"unheard_of": 1}}, "sampling_params.unheard_of: unknown field"),
        ("/generate", {"text": []}, "prompt: the list is empty"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, path, body, words):
    assert words in post(server[0], path, 400, **body)["error"]["message"]


def test_a_client_that_goes_frees_its_request():
    with scripted(lambda _: "word " * 2000, api_key=("secret-key",)) as (url, core):
        core.pace_s = 0.05
        key = {"Authorization": "Bearer secret-key"}
        for path, body in (("/completion", {"prompt": "a"}), ("/generate", {"text": "a"})):
            said = {"json": {**body, "stream": True}, "headers": key, "timeout": WAIT_S}
            with httpx.stream("POST", url + path, **said) as answer:
                lines = answer.iter_lines()
                next(lines)
                load = httpx.get(url + "/load", headers=key, timeout=WAIT_S).json()
                assert load["server_load"] == load["num_running"] == 1
            until(lambda: not core.running)
        assert httpx.get(url + "/ping", timeout=WAIT_S).status_code == 200
        assert httpx.get(url + "/server_info", timeout=WAIT_S).status_code == 401
        told = httpx.get(url + "/server_info", headers=key, timeout=WAIT_S)
        assert told.json()["max_model_len"] == core.info.max_context
        assert "secret-key" not in told.text


def test_a_request_ends_by_its_rid_with_what_it_has(tmp_path):
    """Only of the key that it came with; an admin ends those of all."""
    with scripted(lambda _: "word " * 2000, api_key=("one", "two"), admin_api_key="three") as (url, core):
        core.pace_s = 0.05

        def asked(path: str, key: str, **body) -> httpx.Response:
            return httpx.post(url + path, json=body, headers={"X-Api-Key": key}, timeout=WAIT_S)

        def abort(key: str, status: int = 200, **body) -> None:
            assert asked("/abort_request", key, **body).status_code == status

        for ends in ({"rid": "mine"}, {"abort_all": True}):
            with ThreadPoolExecutor() as threads:
                whole = threads.submit(asked, "/generate", "one", text=["a", "b"], rid="mine")
                until(lambda: len(core.running) == 2)
                with httpx.stream(
                    "POST",
                    url + "/generate",
                    json={"text": "a", "stream": True},
                    headers={"X-Api-Key": "two"},
                    timeout=WAIT_S,
                ) as other:
                    lines = other.iter_lines()
                    next(lines)
                    abort("two", **ends) if "rid" in ends else abort("one", rid="none")
                    assert len(core.running) == 3
                    abort("one", **ends)
                    for each in whole.result().json():
                        assert each["meta_info"]["finish_reason"] == {"type": "abort"}
                        assert len(each["output_ids"]) == each["meta_info"]["completion_tokens"]
                    assert len(core.running) == 1
                    abort("three", abort_all=True)
                    *_, last, _, done, _ = lines
                    assert (json.loads(last[6:])["meta_info"]["finish_reason"], done) == (
                        {"type": "abort"},
                        "data: [DONE]",
                    )
        for wrong in ({}, {"rid": "a", "abort_all": True}):
            abort("one", 400, **wrong)
    with scripted(reply, api_workers=2) as (url, _):
        assert "--api-workers 1" in post(url, "/abort_request", 400, rid="a")["error"]["message"]


def test_a_trainer_gets_the_log_probability_of_every_token():
    """`return_logprob`, in SGLang's triples; what is minus infinity is a number all the same."""
    body = GenerateRequest.model_validate({"input_ids": [1, 2], "return_logprob": True})
    assert body.completion.logprobs == 0
    assert GenerateRequest.model_validate({"text": "a"}).completion.logprobs is None
    logprobs = TokenLogprobs(-0.5, (), -0.25), TokenLogprobs(float("-inf"), (), 0.0)
    output = RequestOutput((1, 2), (7, 8), "", "length", RequestMetrics(None, 1, 1.0, ()), logprobs=logprobs)
    said = GenerateAnswer(body, None)._body(0, "", output)
    assert said["output_ids"] == (7, 8)
    assert said["meta_info"]["output_token_logprobs"] == [[-0.5, 7, None], [-9999.0, 8, None]]
    drawn = body.model_copy(update={"logprobs_mode": "processed_logprobs"})
    said = GenerateAnswer(drawn, None)._body(0, "", output)
    assert said["meta_info"]["output_token_logprobs"] == [[-0.25, 7, None], [0.0, 8, None]]
