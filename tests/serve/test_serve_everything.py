"""Everything that one server can have, at once, while its engines are killed: the real pair, to the bit."""

import asyncio
import json
import os
import random
import signal
from importlib.util import find_spec

import httpx
import pytest

from support.certificates import Authority, needs_openssl
from support.holding import TIERS, Held
from support.serving import children_of, command_of, serving
from support.storms import NAME, PAIR, nothing_is_left, of_the_pair, storm
from support.waiting import WAIT_S, until

BATCH = 12
KILLS = 3
MANNERS = ("whole", "stream", "stream", "slow", "leaves")


@pytest.mark.slow
@needs_openssl
@pytest.mark.parametrize("seed", range(3))
def test_with_everything_on_no_text_is_wrong_and_nothing_is_left(tmp_path, monkeypatch, seed):
    """Two engines that hold bits, with tiers of K/V on the host and on disk; HTTPS, keys with limits, KV events, traces
    that nobody takes, batches, two front ends, spares. Engines are killed in a storm of clients of all kinds but one: a
    TLS connection that is cut before it stands leaks in `anyio`. Every text is plain decoding's, the batch comes to its
    end, and processes and pages are gone.
    """
    rng = random.Random(seed)
    ours = Authority(tmp_path, "ours")
    certificate, key = ours.certificate("server")
    monkeypatch.setenv("SSL_CERT_FILE", ours.file)
    traces = ("--otlp-traces-endpoint", "http://127.0.0.1:9") if find_spec("opentelemetry.exporter.otlp") else ()
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n- name: one\n  key: secret-one\n  max_rows: 5\n- name: two\n  key: secret-two\n  cache_salt: a\n",
        encoding="utf-8",
    )
    port = 20000 + 2 * rng.randrange(10000)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    flags = (
        *(
            *PAIR,
            "--dtype",
            "float32",
            "--dp-size",
            "2",
            "--api-workers",
            "2",
            "--spare-engine",
            "--engine-restarts",
            "20",
        ),
        *("--exactness", "bits", "--log-format", "json", "--max-total-tokens", "640", "--max-running-requests", "8"),
        *("--kv-offloading-size", "0.004", "--kv-offloading-folder", str(tmp_path / "kv")),
        *("--kv-offloading-disk-size", "0.01", "--ssl-certfile", certificate, "--ssl-keyfile", key),
        *("--api-keys-file", str(keys), "--batch-dir", str(tmp_path / "batches")),
        *("--kv-events-config", json.dumps(events), *traces),
    )
    held_folder = tmp_path / "held"
    held_folder.mkdir()
    environment = Held(held_folder, TIERS).environment
    asks = of_the_pair(8, 30, dtype="float32", exactness="bits")
    lines = b"".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"
        for i in range(BATCH)
        for body in [{"model": NAME, **asks[i % len(asks)].body}]
    )
    with serving(*flags, environment=environment) as server:
        client = server.client(api_key="secret-two", http_client=httpx.Client(timeout=WAIT_S))
        file = client.files.create(file=("a.jsonl", lines), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def engines():
            return [pid for pid in children_of(server.process.pid, "engine_process") if "treetop" in command_of(pid)]

        for _ in range(KILLS):
            outcomes = asyncio.run(
                storm(server, asks, 6, 4, MANNERS, lambda: os.kill(rng.choice(engines()), signal.SIGKILL), "secret-one")
            )
            assert outcomes.keys() <= {"result", "left"}, outcomes
            until(lambda: server.get("/health").status_code == 200)
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (BATCH, 0)
        answers = client.files.content(done.output_file_id).text.splitlines()
        texts = {
            int(each["custom_id"]): each["response"]["body"]["choices"][0]["text"] for each in map(json.loads, answers)
        }
        assert texts == {i: asks[i % len(asks)].text for i in range(BATCH)}
        assert server.post("/v1/completions", {"model": NAME, "prompt": "a"}).status_code == 401
        nothing_is_left(server)
        assert server.metric("treetop:num_engine_restarts") > 0
        assert [*(tmp_path / "kv").glob("engine-*/*.page")], "nothing went to the disk"
        assert server.metric("treetop:kv_offload_disk_damaged_pages") == 0
        last = engines()
        assert server.end() == 0
    until(lambda: not any(map(command_of, last)), "a process is left")
