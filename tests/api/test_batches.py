"""Files and batches of a server, and `treetop run-batch`: formats, keys, bounds, kills."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import httpx
import openai
import pytest

from support.scripted import scripted
from support.serving import TEMPLATE, replayed
from support.waiting import WAIT_S, until
from support.warm import Popen
from treetop.api.batches.lines import answer_line, answered_ids, read_input
from treetop.api.batches.routes import read_form
from treetop.api.batches.store import BatchStore, StoreFullError, new_id
from treetop.api.errors import ApiError
from treetop.types.errors import ConfigError, InputError


def asked(custom_id: str, url: str = "/v1/chat/completions", **body) -> dict:
    given = {"messages": [{"role": "user", "content": "Hi"}], **body} if "chat" in url else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: dict) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def reply(prompt: str) -> str:
    return f"Answer {prompt.count('<user>')}."


def clients(url: str, *keys: str) -> list[openai.OpenAI]:
    return [openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=WAIT_S) for key in keys]


def ended(client: openai.OpenAI, batch_id: str):
    until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch_id)


# ------------------------------------------------------------------------------------------------- over HTTP


def test_openais_client_has_a_batch_answered_and_no_other_key_sees_it(tmp_path):
    """Good requests in one file, bad ones in another, each with its id; lists, contents, deletion."""
    with scripted(reply, batch_dir=str(tmp_path), api_key=("one", "two")) as (url, _):
        client, other = clients(url, "one", "two")
        lines = [asked(f"r{i}", max_tokens=20) for i in range(9)] + [asked("bad", temperature=-1)]
        file = client.files.create(file=("my file.jsonl", jsonl(*lines)), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("my file.jsonl", len(jsonl(*lines)), "batch")
        begun = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        batch = ended(client, begun.id)
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (10, 9, 1)
        good = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(each["custom_id"] for each in good) == sorted(f"r{i}" for i in range(9))
        for each in good:
            assert each["response"]["status_code"] == 200
            assert each["error"] is None
            assert each["response"]["body"]["choices"][0]["message"]["content"] == "Answer 1."
        (bad,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"

        assert [each.id for each in client.batches.list()] == [batch.id]
        assert len(client.files.list().data) == 3
        assert [each.id for each in client.files.list(purpose="batch")] == [file.id]
        assert list(other.batches.list()) == list(other.files.list()) == []
        for call in (
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: client.batches.retrieve(file.id),
            lambda: client.files.retrieve("file-../../etc/passwd"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.BadRequestError):
            other.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def test_a_batch_whose_file_is_wrong_fails_with_every_line_that_is(tmp_path):
    with scripted(reply, batch_dir=str(tmp_path)) as (url, _):
        (client,) = clients(url, "none")
        content = jsonl(asked("a"), asked("a"), asked("b", "/v1/completions"), asked("c", stream=True)) + b"{\n[]\n"
        file = client.files.create(file=("x.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = ended(client, batch.id)
        assert batch.status == "failed"
        told = {each.line: each.code for each in batch.errors.data}
        assert told == {
            2: "duplicate_custom_id",
            3: "invalid_url",
            4: "unsupported_parameter",
            5: "invalid_json_line",
            6: "invalid_request",
        }
        assert batch.output_file_id is None
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


def test_a_batch_that_is_cancelled_keeps_what_it_has_and_one_that_was_cut_off_goes_on(tmp_path):
    """What a dead server has left: some answers, half a line, a record that says it runs."""
    store = BatchStore(tmp_path, 2**20)
    lines = [asked(f"r{i}") for i in range(6)]
    file = store.add_file("", "x.jsonl", "batch", jsonl(*lines))
    with scripted(reply, batch_dir=str(tmp_path)) as (url, _):
        (client,) = clients(url, "none")
        begun = client.batches.create(
            input_file_id=file["id"], endpoint="/v1/chat/completions", completion_window="24h"
        )
        first = ended(client, begun.id)
    record = store.get(first.id, "")
    answers = store.data(record["output_file_id"])
    kept = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(kept[:2]) + kept[2][:30])
    record |= {
        "status": "in_progress",
        "completed_at": None,
        "request_counts": {"total": 6, "completed": 6, "failed": 0},
    }
    store.put("", record)
    cancelled = {**record, "id": new_id("batch"), "output_file_id": new_id("file")}
    store.data(cancelled["output_file_id"]).write_bytes(kept[0])
    store.put("", cancelled)
    store.cancel(cancelled["id"])
    assert store.get(cancelled["id"], "")["status"] == "cancelling"
    with scripted(reply, batch_dir=str(tmp_path)) as (url, _):
        (client,) = clients(url, "none")
        batch, other = ended(client, record["id"]), ended(client, cancelled["id"])
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)
        ids = [json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert Counter(ids) == Counter(f"r{i}" for i in range(6))
        assert answers.read_bytes().startswith(b"".join(kept[:2])), "what was answered is not asked again"
        assert (other.status, other.request_counts.completed) == ("cancelled", 1)
        assert client.files.content(other.output_file_id).content == kept[0]


def test_a_store_is_bounded_and_one_owner_runs_a_batch(tmp_path):
    store = BatchStore(tmp_path / "deep" / "er", 20_000)
    record = store.add_file("a", "x", "batch", b"x" * 10_000)
    with pytest.raises(StoreFullError):
        store.add_file("a", "x", "batch", b"x" * 10_000)
    store.delete(record["id"])
    store.add_file("a", "x", "batch", b"x" * 10_000)
    with store.held("batch-" + "0" * 32) as first, store.held("batch-" + "0" * 32) as second:
        assert (first, second) == (True, False)
    assert (tmp_path / "deep" / "er").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-dir .*file: "):
        BatchStore(tmp_path / "file", 1)


def test_old_files_go_and_those_of_a_batch_that_runs_stay(tmp_path):
    store = BatchStore(tmp_path, 2**20)
    old, used, new = (store.add_file("", name, "batch", b"{}") for name in "abc")
    for record in (old, used):
        store.put("", {**record, "created_at": 1})
    batch = {"id": "batch-" + "1" * 32, "object": "batch", "status": "in_progress", "created_at": 1}
    store.put("", {**batch, "input_file_id": used["id"], "output_file_id": None, "error_file_id": None})
    store.add_file("", "d", "batch", b"")
    assert {each["id"] for each in store.list("file", "")} >= {used["id"], new["id"]}
    assert store.get(old["id"], "") is None
    assert not store.data(old["id"]).exists()


def test_uploads_that_are_no_form_of_ours_are_refused(tmp_path):
    with scripted(reply, batch_dir=str(tmp_path), max_body_bytes=4096, max_bodies_bytes=4096) as (url, _):
        path = f"{url}/v1/files"

        def refused(status: int, words: str, **given) -> None:
            answer = httpx.post(path, timeout=WAIT_S, **given)
            assert answer.status_code == status, answer.text
            assert words in answer.json()["error"]["message"]

        file = {"file": ("x", b"{}")}
        refused(400, "purpose is missing", files=file)
        refused(400, "purpose must be batch, got 'fine-tune'", files=file, data={"purpose": "fine-tune"})
        refused(400, "file is missing", files={"purpose": (None, b"batch")})
        refused(400, "more is not supported", files=file, data={"purpose": "batch", "more": "1"})
        refused(400, "must be a form", json={})
        refused(413, "4096", files={"file": ("x", b"{}" * 4096)}, data={"purpose": "batch"})
    with scripted(reply) as (url, _):
        assert "--batch-dir" in httpx.get(f"{url}/v1/batches", timeout=WAIT_S).json()["error"]["message"]


def test_a_form_is_read_as_it_was_written():
    """Beside httpx's writer: random bytes that look like boundaries and ends of lines."""
    rng = random.Random(0)
    for _ in range(200):
        content = b"".join(
            rng.choice([b"\r\n", b"--", b"x", b"\r\n--b", b"\n", b"\x00"]) for _ in range(rng.randrange(30))
        )
        request = httpx.Request("POST", "http://x", files={"file": ('ä"x.jsonl', content)}, data={"purpose": "batch"})
        parts = read_form(request.headers["content-type"], request.read())
        assert parts["file"][1] == content
        assert parts["purpose"] == ("", b"batch")
    for body in (b"", b"--b\r\n", b"--b\r\n\r\nx\r\n--b--", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--"):
        with pytest.raises(ApiError):
            read_form("multipart/form-data; boundary=b", body)


# ------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, "no JSON"),
        (b'{"custom_id": ""}', "custom_id must be"),
        (b'{"custom_id": "a", "method": "GET"}', "method must be POST"),
        (b'{"custom_id": "a", "method": "POST", "url": ["/v1/chat/completions"]}', "url must be"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}', "url must be"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "body must be an object"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, "x": 1}', "unknown members: 'x'"),
        (b"", "no request in the file"),
    ],
)
def test_what_is_no_request_is_told_by_its_line(line, words):
    with pytest.raises(InputError, match=f"in.jsonl: line 1: .*{words}"):
        read_input(BytesIO(line)).check("in.jsonl")


def test_lines_are_found_again_wherever_a_file_is_cut(tmp_path):
    """However much of its last line a kill has left: whole lines stay, the rest is cut off."""
    ids = ["a", "ß\u2028", "\ud800"]
    whole = [answer_line(each, 200, "id", b'{"x": 1}') for each in ids]
    path = tmp_path / "out"
    for end in range(len(b"".join(whole)) + 1):
        path.write_bytes(b"".join(whole)[:end])
        found = [*answered_ids(path)]
        assert len(found) == sum(len(b"".join(whole[: i + 1])) <= end for i in range(3))
        assert path.read_bytes() == b"".join(whole[: len(found)])
    path.write_text("mine\n")
    with pytest.raises(InputError, match="no answer of a batch"):
        [*answered_ids(path)]
    assert path.read_text() == "mine\n"


# ------------------------------------------------------------------------------------------------- run-batch


def run_batch(folder: Path, step_ms: str = "1") -> subprocess.Popen:
    command = [sys.executable, "-m", "treetop.cli", "run-batch", "-i", str(folder / "in"), "-o", str(folder / "out")]
    flags = ["--mock-engine", f"{step_ms},2", "--chat-template", TEMPLATE, "--max-running-requests", "2"]
    return Popen([*command, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ})


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path):
    """Every request is answered once, whatever was cut, with a server's text; a wrong one with its error."""
    lines = [asked(f"r{i}", "/v1/completions", prompt=[5] * (i + 1), max_tokens=12) for i in range(12)]
    (tmp_path / "in").write_bytes(jsonl(*lines, asked("bad", temperature=-1)))
    out = tmp_path / "out"
    first = run_batch(tmp_path, "60")
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3)
    first.send_signal(signal.SIGKILL)
    first.wait(WAIT_S)
    first.stderr.close()
    out.write_bytes(out.read_bytes()[:-1])  # as if in the middle of a line
    num_before = out.read_bytes().count(b"\n")
    second = run_batch(tmp_path)
    said = second.stderr.read()
    second.stderr.close()
    assert second.wait(WAIT_S) == 0, said
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(each["custom_id"] for each in answers) == Counter([*(f"r{i}" for i in range(12)), "bad"])
    assert 0 < num_before < len(answers)
    for each in answers:
        name, response = each["custom_id"], each["response"]
        if name != "bad":
            assert response["body"]["choices"][0]["text"] == replayed(int(name[1:]) + 1, 12)
        assert response["status_code"] == (400 if name == "bad" else 200)
    assert "13 of 13 requests, " in said or "13 of 13 requests (" in said


def test_a_run_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, capsys):
    from treetop.cli import main

    def refused(*words: str) -> str:
        assert main(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *words]) == 2
        return capsys.readouterr().err

    assert "in: No such file" in refused()
    (tmp_path / "in").write_bytes(jsonl(asked("a"), asked("a")))
    assert "line 2: custom_id 'a' is there twice" in refused()
    (tmp_path / "in").write_bytes(jsonl(asked("a")))
    (tmp_path / "out").write_bytes(answer_line("b", 200, "", b"{}"))
    assert "has an answer to 'b', which" in refused()
    with pytest.raises(SystemExit):
        main(["run-batch", "-i", "a", "-o", "b", "--port", "1"])
    assert "unrecognized arguments: --port" in capsys.readouterr().err
