"""`return_routed_experts` over HTTP: in vLLM's form of choices, and in SGLang's, to what trainers decode."""

import io
import json
import shutil
from base64 import b64decode

import numpy as np
import pytest

from support.serving import TEMPLATE, serving
from support.tiny_models import save_random_experts
from treetop.checkpoints.folder import resolve_folder

LAYERS, TOP_K, IDS = 2, 3, [20, 21, 22, 23, 24]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The last of three layers has no experts: it has no place in what is told but in vLLM's form."""
    folder = tmp_path_factory.mktemp("served")
    more = {"vocab_size": 4096, "num_hidden_layers": 3, "mlp_only_layers": [2]}
    save_random_experts(folder, "qwen3_moe", seed=4, **more)
    shutil.copy(resolve_folder("builtin:nestling") / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    flags = ["--enable-return-routed-experts", "--speculative-algorithm", "NGRAM", "--max-running-requests", "4"]
    with serving(str(folder), *flags, "--context-length", "256") as running:
        yield running


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(b64decode(text)))


def events(server, path: str, body: dict) -> list[dict]:
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def generated(server, **asked) -> dict:
    params = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": IDS, "sampling_params": params, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]


def test_sglangs_generate_gives_int32_as_trainers_decode_it(server):
    """Of all but the last token, or of those from a start on; nothing without being asked."""
    said = generated(server, return_routed_experts=True)
    whole = np.frombuffer(b64decode(said["routed_experts"]), dtype="<i4").reshape(len(IDS) + 9 - 1, LAYERS, TOP_K)
    assert said["routed_experts_shape"] == [*whole.shape]
    assert 0 <= whole.min() <= whole.max() < 7
    assert all(len({*line}) == TOP_K for line in whole.reshape(-1, TOP_K).tolist())
    rest = generated(server, return_routed_experts=True, routed_experts_start_len=3)
    assert rest["routed_experts_shape"] == [len(IDS) + 9 - 1 - 3, LAYERS, TOP_K]
    assert np.array_equal(np.frombuffer(b64decode(rest["routed_experts"]), "<i4").reshape(-1, LAYERS, TOP_K), whole[3:])
    assert "routed_experts" not in generated(server)


def test_completions_give_files_of_numpys_for_each_choice_also_in_streams(server):
    """In vLLM's form: bytes, and zeros for the layer without experts."""
    want = np.frombuffer(b64decode(generated(server, return_routed_experts=True)["routed_experts"]), "<i4")
    body = {"prompt": IDS, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "n": 2, "return_routed_experts": True}
    choices = server.post("/v1/completions", body).json()["choices"]
    for choice in choices:
        told = decoded(choice["routed_experts"])
        assert told.dtype == np.uint8
        assert told.shape == (len(IDS) + 9 - 1, LAYERS + 1, TOP_K)
        assert np.array_equal(told[:, :LAYERS], want.reshape(-1, LAYERS, TOP_K))
        assert not told[:, LAYERS:].any()
    for name in ("routed_experts_prompt_start", "routed_experts_start_len"):
        (rest, _) = server.post("/v1/completions", {**body, name: 4}).json()["choices"]
        assert np.array_equal(decoded(rest["routed_experts"]), told[4:])
    told = [choice for event in events(server, "/v1/completions", body) for choice in event["choices"]]
    ends = [choice for choice in told if "routed_experts" in choice]
    assert [choice["finish_reason"] for choice in ends] == ["length"] * 2
    assert {choice["routed_experts"] for choice in ends} == {choices[0]["routed_experts"]}


def test_chats_give_them_and_count_all_that_the_target_has_processed(server):
    messages = [{"role": "user", "content": "ab"}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}
    said = server.post("/v1/chat/completions", body).json()
    used = said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"]
    told = decoded(said["choices"][0]["routed_experts"])
    assert told.shape == (used - 1, LAYERS + 1, TOP_K)
    (last,) = [
        c for event in events(server, "/v1/chat/completions", body) for c in event["choices"] if c["finish_reason"]
    ]
    assert np.array_equal(decoded(last["routed_experts"]), told)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/generate", "routed_experts_start_len"),
        ("/v1/completions", "routed_experts_start_len"),
        ("/v1/completions", "routed_experts_prompt_start"),
    ],
)
def test_a_start_past_the_prompt_is_refused_by_name(server, path, name):
    body = {"input_ids": IDS} if path == "/generate" else {"prompt": IDS}
    for start, words in ((6, f"{name} 6: at most the prompt's 5 tokens"), (-1, "greater than or equal")):
        answer = server.post(path, {**body, "return_routed_experts": True, name: start})
        assert answer.status_code == 400
        assert words in answer.text


def test_without_the_option_who_asks_is_told_which(folder):
    with serving(str(folder), "--context-length", "64", "--max-running-requests", "1") as server:
        for path, body in (("/generate", {"input_ids": IDS}), ("/v1/completions", {"prompt": IDS})):
            answer = server.post(path, {**body, "return_routed_experts": True})
            assert answer.status_code == 400
            assert "--enable-return-routed-experts" in answer.text
            assert server.post(path, {**body, "return_routed_experts": False}).status_code == 200
