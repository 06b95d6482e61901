"""Metrics as counted in one process: every name, the figures of a round, log lines, the warning, and the dashboard."""

import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from treetop.api.metric_names import ALIASES, MIN_WINDOW_S, RecentRates
from treetop.api.metrics import FEW_ROUNDS, LogInterval, Metrics
from treetop.outputs import LiveRequest
from treetop.types.ids import RequestId
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, HostTierStats, PrefixPages, RequestUpdate
from treetop.types.sampling import SamplingParams

ROUTERS = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_hits prefix_cache_queries
    spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos time_to_first_token_seconds inter_token_latency_seconds
    e2e_request_latency_seconds prompt_tokens generation_tokens request_success request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds"""
"""What dashboards and routers read, under vLLM's names."""
BOARD = """e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum time_to_first_token_seconds_bucket
    time_to_first_token_seconds_count num_running_reqs gen_throughput cache_hit_rate num_queue_reqs token_usage
    inter_token_latency_seconds_bucket prompt_tokens_total generation_tokens_total"""
"""What SGLang's board reads, its former versions' included."""


TREE = SpecShape(2, 3, 6)


def made(shape=TREE) -> Metrics:
    return Metrics("m", CoreInfo("/none", 100, 64, 4, shape, prefix=PrefixPages(16, 1, 9), by_priority=True))


@pytest.mark.parametrize("exactness", ["bits", "ties"])
def test_the_exactness_in_force_is_named(exactness):
    metrics = Metrics("m", CoreInfo("/none", 100, 64, 4, TREE, exactness=exactness))
    found = {name: value for name, value in samples(metrics).items() if "exactness" in name}
    assert found == {f"treetop:exactness_info{[('exactness', exactness)]}": 1}


def asked_for(prompt: list[int]) -> EngineRequest:
    return EngineRequest(RequestId(0), tuple(prompt), SamplingParams(), 0)


def samples(metrics: Metrics) -> dict[str, float]:
    """Samples by name and labels, the model's left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.page()[0].decode()):
        for each in family.samples:
            labels = {key: value for key, value in each.labels.items() if key != "model_name"}
            found[each.name + (str(sorted(labels.items())) if labels else "")] = each.value
    return found


def exported(metrics: Metrics) -> set[str]:
    metrics.answered("/health", "GET", 200)  # there is no count of answers before the first
    return {re.split(r"\[", name)[0] for name in samples(metrics)}


def test_a_request_is_counted_under_every_name():
    metrics, live = made(), LiveRequest.of(0, asked_for([1, 2, 3]), None)
    metrics.arrived(3)
    metrics.take(CoreLoad(2, 5, 0.25, 7), 2)
    updates = [
        RequestUpdate(1, (4,), num_cached_tokens=2),
        RequestUpdate(1, (5, 6, 7), 2, num_drafted=5, accept_ranks=(0, 1)),
        RequestUpdate(1, (9,), 0),  # a plain round is no tree
        RequestUpdate(1, (8,), 0, "length", num_drafted=3),
    ]
    for update in updates:
        metrics.observe(live, update)
        live.apply(update)
    late = LiveRequest.of(0, asked_for([1]), None)
    metrics.observe(late, RequestUpdate(2, (), None, "abort", "late", timed_out=True))
    seen = samples(metrics)
    want = {
        "num_requests_running": 2,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 3,
        "generation_tokens_total": 6,
        "prefix_cache_queries_total": 3,
        "prefix_cache_hits_total": 2,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 2,
        "spec_decode_num_accepted_tokens_per_pos_total[('position', '0')]": 1,
        "spec_decode_num_accepted_tokens_per_pos_total[('position', '1')]": 1,
        "spec_decode_num_accepted_tokens_per_pos_total[('position', '2')]": 0,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 3,
        "e2e_request_latency_seconds_count": 2,
        "request_success_total[('finished_reason', 'length')]": 1,
        "request_success_total[('finished_reason', 'abort')]": 1,
    }
    for name, value in want.items():
        assert seen["treetop:" + name] == seen["vllm:" + name] == value, name
    for name, ours in (
        ("num_running_reqs", 2),
        ("num_queue_reqs", 5),
        ("token_usage", 0.25),
        ("cache_hit_rate", 2 / 3),
    ):
        assert seen["sglang:" + name] == pytest.approx(ours), name
    assert seen["sglang:cached_tokens_total"] == 2
    assert seen["sglang:spec_accept_length"] == 2
    assert seen["treetop:num_retractions"] == 7
    assert [seen[f"treetop:spec_decode_num_accepted_tokens_per_rank_total[('rank', '{at}')]"] for at in "01"] == [1, 1]
    assert seen["treetop:requests_timed_out_total"] == 1


def test_routers_and_boards_find_the_names_they_know():
    """Each name of the table stands for one figure, which there is."""
    names = exported(made())
    for name in ROUTERS.split():
        assert any(each.startswith("vllm:" + name) for each in names), name
    assert {"sglang:" + name for name in BOARD.split()} <= names
    own = {re.sub("_(total|created|bucket|sum|count)$", "", each) for each in names if each.startswith("treetop:")}
    assert {"treetop:" + name for name in ALIASES} <= own
    given = [alias for aliases in ALIASES.values() for alias in aliases]
    assert len({*given}) == len(given)


def test_times_of_a_request_are_those_of_its_phases(monkeypatch):
    """Queue and prefill as the engine tells them, decode from the first token to the last, whenever the end is told."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    metrics, live = made(), LiveRequest.of(0, asked_for([1, 2, 3]), None)
    updates = [
        (100.5, RequestUpdate(1, (4,), num_cached_tokens=0, queue_s=0.25, prefill_s=0.125)),
        (101.0, RequestUpdate(1, (5, 6), 1, num_drafted=5)),
        (107.0, RequestUpdate(1, (), None, "stop")),
    ]
    for seconds, update in updates:
        now[0] = seconds
        metrics.observe(live, update)
        live.apply(update)
    never = LiveRequest.of(0, asked_for([1]), None)
    metrics.observe(never, RequestUpdate(2, (), None, "abort", "late", timed_out=True))
    seen = samples(metrics)
    for phase, seconds in (("queue", 0.25), ("prefill", 0.125), ("decode", 0.5), ("inference", 0.625)):
        name = f"vllm:request_{phase}_time_seconds"
        assert (seen[name + "_sum"], seen[name + "_count"]) == (pytest.approx(seconds), 1), phase
    assert seen["sglang:queue_time_seconds_sum"] == 0.25


def test_what_happened_lately_does_not_depend_on_how_often_it_is_asked_for():
    """Rates are over the time since the last look, or a few seconds; a ratio of nothing stays what it was."""
    now, totals = [0.0], dict[str, float]()

    def read(**changes: float) -> tuple[float, float]:
        totals.update({f"treetop:{name}_total": value for name, value in changes.items()})
        seen = {each.name: each.samples[0].value for each in lately.gauges(totals, "m")}
        return seen["sglang:gen_throughput"], seen["sglang:cache_hit_rate"]

    lately = RecentRates(lambda: now[0])
    now[0] = 20.0
    assert read(generation_tokens=200, prefix_cache_hits=30, prefix_cache_queries=40) == (10, 0.75)
    for later_s in (MIN_WINDOW_S, MIN_WINDOW_S + 1, MIN_WINDOW_S + 2):
        now[0] = 20 + later_s
        assert read(generation_tokens=200 + 40 * later_s) == (pytest.approx(40), 0.75)


def test_answers_are_counted_by_route_method_and_status():
    metrics = made()
    for status in (200, 200, 404):
        metrics.answered("/v1/models/{name:path}", "GET", status)
    seen = samples(metrics)
    counts = {name: value for name, value in seen.items() if name.startswith("treetop:http_requests_total")}
    labels = "[('handler', '/v1/models/{name:path}'), ('method', 'GET'), ('status', '%s')]"
    assert counts == {"treetop:http_requests_total" + labels % status: n for status, n in (("200", 2), ("404", 1))}


def test_the_dashboard_asks_for_what_is_exported():
    """Every metric of every panel and variable exists, and every metric but times of creation stands on some panel."""
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    used = {name for expression in asked for name in re.findall(r"\btreetop:\w+", expression)}
    metrics = made()
    metrics.of_keys.asked("team", "requests")  # by names of keys: there are none without one
    metrics.of_keys.arrived("team", 3)
    metrics.of_keys.generated("team", 3)
    metrics.take(CoreLoad(host_tier=HostTierStats()), 0)  # too
    names = exported(metrics)
    assert used <= names
    parts = r"_(total|bucket|sum|count|created)$"
    base = {re.sub(parts, "", name) for name in names if name.startswith("treetop:")}
    assert base - {re.sub(parts, "", name) for name in used} == {
        "treetop:spec_decode_num_draft_tokens",
        "treetop:exactness_info",
        "treetop:cache_config_info",
    }
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for expression in asked:
        assert expression.count("(") == expression.count(")"), expression
        assert "model_name" in expression, expression


def test_a_log_line_says_what_was_done_and_none_that_nothing_was(caplog):
    caplog.set_level(logging.INFO, "treetop.server")
    interval = LogInterval()
    interval.log_load(CoreLoad(), "")
    assert not caplog.records
    interval.tokens, interval.rounds, interval.accepted = 30, 10, 15
    interval.log_load(CoreLoad(3, 4, 0.5), "[1] ")
    said = caplog.records[0].getMessage()
    assert said.startswith("[1] running: 3, waiting: 4, KV usage: 50.0 %")
    assert said.endswith("accept len: 2.50")
    interval.log_load(CoreLoad(1), "")
    assert "accept len" not in caplog.records[1].getMessage()


@pytest.mark.parametrize(("accepted", "warns"), [(0, True), (0.09, True), (0.2, False)])
def test_a_draft_that_is_never_right_is_a_warning_that_says_what_to_do(caplog, accepted, warns):
    """Once in a while, and only after many rounds, which may come in several intervals."""
    interval = LogInterval()
    for _ in range(4):
        interval.rounds, interval.accepted = FEW_ROUNDS // 2, int(accepted * FEW_ROUNDS // 2)
        interval.log_load(CoreLoad(1), "")
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == int(warns)
    assert all("--speculative-algorithm NONE" in each and "trained for this model" in each for each in said)


def test_plain_decoding_counts_no_drafts():
    metrics, live = made(PLAIN), LiveRequest.of(0, asked_for([1]), None)
    metrics.observe(live, RequestUpdate(1, (4,), 0))
    assert samples(metrics)["treetop:spec_decode_num_drafts_total"] == 0
    assert metrics.of([]) is None
