"""Responses and conversations that are kept: bounded, by key, in memory or a file; responses in the background."""

import json
import random
import threading

import httpx
import openai
import pytest

from support.refusing import refused
from support.scripted import scripted
from support.waiting import WAIT_S, until
from treetop.api.response_store import ResponseStore
from treetop.types.errors import ConfigError

ASK, LONG = "How is the weather?", "word " * 400


def reply(prompt: str) -> str:
    return "<think>\nHm.\n</think>\n\n" + (LONG if "long" in prompt else f"Answer {prompt.count('<user>')}.")


def text_of(response: dict) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@pytest.fixture
def server():
    with scripted(reply) as (url, core):
        yield url, core
        until(lambda: not core.running)


def call(url: str, method: str, path: str, body: dict | None = None, key: str = "none", status: int = 200) -> dict:
    answer = httpx.request(method, url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S)
    assert answer.status_code == status, answer.text
    return answer.json()


def respond(url: str, said: str, key: str = "none", **body) -> dict:
    return call(url, "POST", "/v1/responses", {"input": said, **body}, key)


# ----------------------------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_is_a_bounded_table_of_the_last_records(tmp_path, seed, in_file):
    """Random work beside a model of it: places by last writing, bytes counted, times, owners."""
    rng, now = random.Random(seed), [0.0]
    path = str(tmp_path / "kept.db") if in_file else None
    store = ResponseStore(path, most_bytes=5000, kept_s=50, clock=lambda: now[0])
    model: dict[str, tuple[str, dict, float, int]] = {}

    def keep(name, owner, record):
        model.pop(name, None)
        size = len(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
        size += len(name) + 256
        if size <= 5000:
            model[name] = owner, record, now[0] + 50, size
        for each in [each for each, held in model.items() if held[2] <= now[0]]:
            del model[each]
        while sum(held[3] for held in model.values()) > 5000:
            del model[next(iter(model))]

    for _ in range(300):
        now[0] += rng.choice([0, 0, 1, 7])
        name, owner = f"r{rng.randrange(12)}", rng.choice("ab")
        known = name in model and model[name][0] == owner and model[name][2] > now[0]
        kind = rng.choice(["put", "put", "get", "change", "delete"])
        record = {"text": rng.choice(["é🦊\ud800", "x"]) * rng.choice([1, 200, 600, 3000])}
        if kind == "put":
            store.put(name, owner, record).result()
            keep(name, owner, record)
        elif kind == "get":
            assert store.get(name, owner).result() == (model[name][1] if known else None)
        elif kind == "change":
            changed = store.change(name, owner, lambda held: {**held, "n": held.get("n", 0) + 1}).result()
            want = {**model[name][1], "n": model[name][1].get("n", 0) + 1} if known else None
            assert changed == want
            if want is not None:
                keep(name, owner, want)
        else:
            assert store.delete(name, owner).result() == known
            if known:
                del model[name]
    store.close()


def test_a_file_is_no_larger_than_what_it_keeps(tmp_path):
    path = tmp_path / "kept.db"
    store = ResponseStore(str(path), most_bytes=2**20)
    for number in range(2000):
        store.put(f"resp_{number}", "", {"text": "x" * random.Random(number).choice([10, 1000, 5000])})
    store.close()
    assert 2**19 < path.stat().st_size < 1.5 * 2**20


def test_two_processes_share_a_file_and_what_is_no_file_is_refused(tmp_path):
    path = str(tmp_path / "kept.db")
    stores = [ResponseStore(path) for _ in range(2)]
    stores[0].put("n", "", {"count": 0}).result()

    def add(store):
        for _ in range(50):
            store.change("n", "", lambda held: {"count": held["count"] + 1}).result()

    threads = [threading.Thread(target=add, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert stores[1].get("n", "").result() == {"count": 100}
    for store in stores:
        store.close()
    assert (tmp_path / "kept.db").stat().st_mode & 0o777 == 0o600
    (tmp_path / "text.db").write_text("no database at all, only words " * 40)
    for wrong in (tmp_path, tmp_path / "missing" / "kept.db", tmp_path / "text.db"):
        refused(ConfigError, lambda wrong=wrong: ResponseStore(str(wrong)), f"--responses-db {wrong}: ")


# ------------------------------------------------------------------------------------------------------- responses


def test_a_response_is_handed_out_listed_and_deleted(server):
    url, _ = server
    first = respond(url, ASK)
    then = respond(url, "And now?", previous_response_id=first["id"])
    assert [text_of(each) for each in (first, then)] == ["Answer 1.", "Answer 2."]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        assert client.responses.retrieve(then["id"]).output_text == "Answer 2."
        items = [*client.responses.input_items.list(then["id"], limit=1, order="asc")]  # a page an item
        assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
        assert items[0].content[0].text == ASK
        client.responses.delete(first["id"])
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            client.responses.retrieve(first["id"])
    assert text_of(respond(url, "Still?", previous_response_id=then["id"])) == "Answer 3."
    path = f"/v1/responses/{then['id']}"
    for method, rest, words in (
        ("POST", "/cancel", "only one in the background"), ("GET", "?stream=true", "stream: events are kept"),
        ("GET", "/input_items?limit=0", "limit: from 1"), ("GET", "/input_items?order=up", "order: asc or desc"),
        ("GET", "/input_items?after=x", "after: there is no item"),
    ):  # fmt: skip
        assert words in call(url, method, path + rest, status=400)["error"]["message"]
    gone = respond(url, ASK, store=False)["id"]
    call(url, "GET", f"/v1/responses/{gone}", status=404)


def test_what_one_key_keeps_no_other_sees():
    with scripted(reply, api_key=("one", "two")) as (url, _):
        kept = respond(url, ASK, "one")["id"]
        name = call(url, "POST", "/v1/conversations", {}, "one")["id"]
        for path in (f"/v1/responses/{kept}", f"/v1/responses/{kept}/input_items", f"/v1/conversations/{name}"):
            call(url, "GET", path, key="one")
            call(url, "GET", path, key="two", status=404)
        call(url, "DELETE", f"/v1/responses/{kept}", key="two", status=404)
        call(url, "POST", "/v1/responses", {"input": "a", "previous_response_id": kept}, "two", 400)
        call(url, "POST", "/v1/responses", {"input": "a", "conversation": name}, "two", 404)
        call(url, "GET", f"/v1/responses/{kept}", key="one")


def test_a_file_outlives_the_server_and_serves_several_processes(tmp_path):
    path = str(tmp_path / "kept.db")
    with scripted(reply, responses_db=path) as (url, _):
        first = respond(url, ASK)["id"]
    with scripted(reply, responses_db=path, api_workers=2) as (url, _):
        assert text_of(respond(url, "And now?", previous_response_id=first)) == "Answer 2."
        body = {"input": "a", "background": True}
        assert "--api-workers 1" in call(url, "POST", "/v1/responses", body, status=400)["error"]["message"]


# ---------------------------------------------------------------------------------------------------- conversations


def test_a_conversation_grows_by_its_responses(server):
    url, core = server
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        said = [{"type": "message", "role": "user", "content": "Hello."}]
        held = client.conversations.create(items=said, metadata={"a": "b"})
        for number in (2, 3):
            answer = client.responses.create(input=ASK, conversation=held.id)
            assert answer.output_text == f"Answer {number}."
            assert answer.conversation.id == held.id
        items = [*client.conversations.items.list(held.id, order="asc", limit=2)]
        assert [item.type for item in items] == ["message"] + ["message", "reasoning", "message"] * 2
        assert len({item.id for item in items}) == 7
        assert client.conversations.items.retrieve(items[1].id, conversation_id=held.id).content[0].text == ASK
        client.conversations.items.delete(items[1].id, conversation_id=held.id)
        client.conversations.items.create(held.id, items=[{"role": "user", "content": "More."}])
        assert len([*client.conversations.items.list(held.id)]) == 7
        assert client.conversations.update(held.id, metadata={"c": "d"}).metadata == {"c": "d"}
        assert client.conversations.retrieve(held.id).metadata == {"c": "d"}
        assert client.conversations.delete(held.id).deleted
    assert "<user>Hello.\n<user>How is the weather?\n<assistant>[Hm.]Answer 2." in core.prompts[-1]
    call(url, "GET", f"/v1/conversations/{held.id}", status=404)
    call(url, "POST", f"/v1/conversations/{held.id}/items", {"items": said}, status=404)
    call(url, "POST", "/v1/conversations", {"items": said * 21}, status=400)


# ------------------------------------------------------------------------------------------------------- background


def events_of(answer: httpx.Response) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]


def test_a_response_in_the_background_ends_without_its_client(server):
    url, core = server
    core.pace_s = 0.01
    begun = respond(url, ASK, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    path = f"/v1/responses/{begun['id']}"
    until(lambda: call(url, "GET", path)["status"] == "completed")
    assert text_of(call(url, "GET", path)) == "Answer 1."
    assert text_of(respond(url, "On.", previous_response_id=begun["id"])) == "Answer 2."
    assert call(url, "POST", path + "/cancel")["status"] == "completed"


def test_its_events_may_be_left_and_taken_up_again(server):
    url, core = server
    core.pace_s = 0.005
    body = {"input": "long", "background": True, "stream": True}
    seen: list[dict] = []
    with httpx.stream("POST", url + "/v1/responses", json=body, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == 9:
                break
    name = seen[0]["response"]["id"]
    with httpx.stream("GET", f"{url}/v1/responses/{name}?stream=true&starting_after=8", timeout=WAIT_S) as answer:
        seen += events_of(answer)
    assert [each["sequence_number"] for each in seen] == [*range(len(seen))]
    deltas = "".join(each["delta"] for each in seen if each["type"] == "response.output_text.delta")
    assert deltas == text_of(seen[-1]["response"]) == LONG
    with httpx.stream("GET", f"{url}/v1/responses/{name}?stream=true", timeout=WAIT_S) as answer:
        assert events_of(answer) == seen


def test_it_may_be_cancelled_or_fail(server):
    url, core = server
    core.pace_s = 0.05
    begun = respond(url, "long", background=True)
    path = f"/v1/responses/{begun['id']}"
    call(url, "POST", "/v1/responses", {"input": "a", "previous_response_id": begun["id"]}, status=400)
    with httpx.stream("GET", url + path + "?stream=true", timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        assert any("response.output_text.delta" in line for line in lines)  # something has come
    ended = call(url, "POST", path + "/cancel")
    assert ended["status"] == "cancelled"
    assert text_of(ended)
    assert LONG.startswith(text_of(ended))
    assert not core.running
    assert call(url, "GET", path)["status"] == "cancelled"
    begun = respond(url, "long", background=True)
    call(url, "DELETE", f"/v1/responses/{begun['id']}")
    until(lambda: not core.running)
    call(url, "GET", f"/v1/responses/{begun['id']}", status=404)
    core.fails = "the engine is tired"
    begun = respond(url, ASK, background=True)
    until(lambda: call(url, "GET", f"/v1/responses/{begun['id']}")["status"] == "failed")
    assert "tired" in call(url, "GET", f"/v1/responses/{begun['id']}")["error"]["message"]


def test_a_response_that_failed_or_runs_is_nothing_to_go_on_with(server):
    url, core = server
    core.fails = "the engine is tired"
    begun = respond(url, ASK, background=True)
    until(lambda: call(url, "GET", f"/v1/responses/{begun['id']}")["status"] == "failed")
    body = {"input": "a", "previous_response_id": begun["id"]}
    error = call(url, "POST", "/v1/responses", body, status=400)["error"]
    assert "that response is failed" in error["message"]
