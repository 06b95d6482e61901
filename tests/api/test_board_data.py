"""The Grafana board with the metrics of a server that has answered: every curve has something to show."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from support.holding import LONG_MINUTES, Held
from support.serving import serving

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
QUIET = {
    "treetop:num_requests_running",
    "treetop:num_requests_waiting",
    "treetop:kv_cache_usage_perc",
    "treetop:num_retractions",
    "treetop:num_engine_restarts",
    "treetop:engine_stalled",
    "treetop:num_gave_way",
    "treetop:requests_refused_total",
    "treetop:requests_timed_out_total",
}
"""0 once a few requests have been answered one after the other, and nothing went wrong."""
ABSENT = "treetop:kv_offload_"
"""Of a tier that a CPU has not."""


def test_every_query_of_the_board_finds_data_after_a_load(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: team, key: sk-team, requests_per_minute: 3}\n")
    more = (
        "--speculative-draft-model-path",
        "builtin:nestling-eagle3",
        "--context-length",
        "256",
        "--schedule-policy",
        "priority",
    )
    environment = Held(tmp_path, LONG_MINUTES).environment
    with serving("builtin:nestling", *more, "--api-keys-file", str(keys), environment=environment) as server:
        headers = {"x-api-key": "sk-team"}
        body = {"prompt": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return", "max_tokens": 24}
        statuses = [server.post("/v1/completions", body, headers=headers).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        model = server.get("/v1/models", headers=headers).json()["data"][0]["id"]
        page = server.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.labels.get("model_name") == model:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"\btreetop:\w+", target["expr"]):
                if not name.startswith(ABSENT):
                    assert name in found, (panel["title"], name)
                    assert found[name] > 0 or name in QUIET, (panel["title"], name)
