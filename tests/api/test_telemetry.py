"""Traces, logs as JSON, and metrics of lengths, priorities, preemptions and processes."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from support.scripted import scripted
from support.serving import mock
from support.waiting import WAIT_S, until
from treetop.api import api_state
from treetop.api.metrics import Metrics
from treetop.api.telemetry.spans import RequestTracer
from treetop.api.telemetry.tracing import PROTOCOL, check_tracing, open_tracer
from treetop.async_llm import DeltaStream
from treetop.outputs import LiveRequest
from treetop.types.errors import ConfigError
from treetop.types.ids import RequestId
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, PrefixPages, RequestStats, RequestUpdate
from treetop.types.sampling import SamplingParams

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def traced():
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter, "m")

    def spans(*, every: bool = False):
        """The last of each name, or every one."""
        tracer._provider.force_flush()
        found = exporter.get_finished_spans()
        return found if every else {each.name: each for each in found}

    yield tracer, spans
    tracer.close()


def stream_of(tracer, params: SamplingParams) -> DeltaStream:
    core = SimpleNamespace(add=lambda *_: None, abort=lambda _: None, finish=lambda *_: None)
    return DeltaStream(core, [EngineRequest(RequestId(7), (1, 2, 3), params, 0)], None, tracer.observe)


def test_a_request_is_a_span_below_its_clients_with_what_it_waited_for(traced):
    """Stages follow each other without a gap; an event a round; the mean accept length is of all rounds."""
    tracer, spans = traced
    params = SamplingParams(max_tokens=9, temperature=0.5)

    async def answer() -> None:
        with tracer.answering(PARENT, "req-1"):
            stream = stream_of(tracer, params)
            tracer.begin(stream, params, 1)
        stats = RequestStats(3, 2, 1, 0.0, 0.5, 0.75, 2.0)
        for update in (
            RequestUpdate(RequestId(7), (4,), num_cached_tokens=2, queue_s=0.5, prefill_s=0.25),
            RequestUpdate(RequestId(7), (5, 6, 7), 2, num_drafted=5, start=1),
            RequestUpdate(RequestId(7), (8,), 0, "length", stats=stats, num_drafted=5, start=4),
        ):
            stream.take(update)

    asyncio.run(answer())
    found = spans()
    assert {*found} == {"llm_request", "queue", "prefill", "decode"}
    root, queue, prefill, decode = (found[name] for name in ("llm_request", "queue", "prefill", "decode"))
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert {each.parent.span_id for each in (queue, prefill, decode)} == {root.context.span_id}
    assert root.start_time == queue.start_time
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert (queue.end_time - queue.start_time, prefill.end_time - prefill.start_time) == (5 * 10**8, 25 * 10**7)
    assert [dict(each.attributes) for each in decode.events] == [
        {"treetop.accept_length": 2, "treetop.draft_tokens": 5, "treetop.tokens": 3},
        {"treetop.accept_length": 0, "treetop.draft_tokens": 5, "treetop.tokens": 1},
    ]
    told = dict(root.attributes)
    assert told["gen_ai.request.id"] == "req-1"
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (3, 5)
    assert (told["treetop.rounds"], told["treetop.mean_accept_length"], told["treetop.retractions"]) == (2, 1.0, 1)
    assert told["gen_ai.latency.time_to_first_token"] == 0.75
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert prefill.attributes["treetop.cached_tokens"] == 2
    assert root.status.status_code is StatusCode.UNSET


def test_a_request_that_nobody_waits_for_ends_its_spans(traced):
    """Aborted, and failed with its error; nothing is held of either."""
    tracer, spans = traced
    params = SamplingParams()

    async def leave() -> None:
        stream = stream_of(tracer, params)
        tracer.begin(stream, params, 1)
        stream.close()

    asyncio.run(leave())
    assert spans()["llm_request"].status.description == "aborted"
    assert spans()["llm_request"].parent is None

    async def fail() -> None:
        stream = stream_of(tracer, params)
        tracer.begin(stream, params, 1)
        stream.take(RequestUpdate(RequestId(7), (), None, "abort", "late", timed_out=True))

    asyncio.run(fail())
    assert spans()["llm_request"].status.description == "late"
    assert tracer._traced == {}


def test_every_choice_that_comes_over_http_is_traced_below_the_clients_span(traced, monkeypatch):
    tracer, spans = traced
    monkeypatch.setattr(api_state, "open_tracer", lambda endpoint, model: tracer)
    with scripted(lambda prompt: "Hi.") as (url, core):
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
        headers = {**PARENT, "X-Request-Id": "mine"}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S).raise_for_status()
        until(lambda: not core.running)
    roots = [each for each in spans(every=True) if each.name == "llm_request"]
    assert sorted(each.attributes["treetop.choice"] for each in roots) == [0, 1]
    for each in roots:
        assert (f"{each.context.trace_id:032x}", f"{each.parent.span_id:016x}") == (TRACE, SPAN)
        assert (each.attributes["gen_ai.request.id"], each.attributes["gen_ai.request.n"]) == ("mine", 2)
        assert each.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert tracer._traced == {}


def test_traces_that_cannot_be_are_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv(PROTOCOL, "smoke")
    with pytest.raises(ConfigError, match=f"{PROTOCOL} must be grpc or http/protobuf, got 'smoke'"):
        check_tracing("http://x")
    monkeypatch.setattr("treetop.api.telemetry.tracing.is_installed", lambda name: "exporter" not in name)
    monkeypatch.setenv(PROTOCOL, "http/protobuf")
    words = r"opentelemetry\.exporter\.otlp\.proto\.http\.trace_exporter; pip install treetop-llm\[otel\]"
    with pytest.raises(ConfigError, match=words):
        check_tracing("http://x")
    check_tracing(None)
    assert open_tracer(None, "m") is None


def test_every_line_of_a_server_is_an_object_if_that_is_asked_for():
    """Of the engine's process too; an answer's line says its parts by name."""
    with mock(0, "4", "--log-format", "json", "--access-log") as server:
        server.post("/v1/completions", {"prompt": [5]}, headers={"X-Request-Id": "mine"})
        assert server.end() == 0
        lines = [json.loads(line) for line in server.said]
    assert all({"time", "level", "logger", "message", "pid"} <= {*line} for line in lines)
    assert any(line["message"].startswith("treetop: serving") for line in lines)
    (answered,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (answered["method"], answered["path"], answered["status"]) == ("POST", "/v1/completions", 200)


# ------------------------------------------------------------------------------------------------- metrics


def samples(metrics: Metrics) -> dict[tuple, float]:
    families = text_string_to_metric_families(metrics.page()[0].decode())
    return {
        (
            each.name,
            *(f"{key}={value}" for key, value in sorted(each.labels.items()) if key != "model_name"),
        ): each.value
        for family in families
        for each in family.samples
    }


def test_lengths_waiting_by_priority_preemptions_and_the_cache_are_counted():
    pages = PrefixPages(16, 1, 99)
    metrics = Metrics("m", CoreInfo("/none", 100, 64, 4, SpecShape(2, 3, 6), by_priority=True, prefix=pages))
    for priority in (-1000, 0, 3):
        asked = EngineRequest(RequestId(1), (1,) * 30, SamplingParams(), 0, priority)
        live = LiveRequest.of(0, asked, None)
        for update in (
            RequestUpdate(RequestId(1), (4,), queue_s=0.05, prefill_s=0.1),
            RequestUpdate(RequestId(1), (5, 6), 1, "length", num_drafted=5),
        ):
            metrics.observe(live, update)
            live.apply(update)
    metrics.take(CoreLoad(num_retractions=7), 0)
    seen = samples(metrics)
    for own in ("treetop:", "vllm:"):
        assert seen[f"{own}request_prompt_tokens_bucket", "le=50.0"] == 3
        assert seen[f"{own}request_prompt_tokens_bucket", "le=20.0"] == 0
        assert seen[f"{own}request_generation_tokens_sum",] == 9
        labels = ("block_size=16", "enable_prefix_caching=True", "num_gpu_blocks=99")
        assert seen[(f"{own}cache_config_info", *labels)] == 1
    assert seen["vllm:num_preemptions_total",] == 7
    assert seen["treetop:time_per_output_token_seconds_count",] == 3
    waits = {key[1:] for key in seen if key[0] == "treetop:request_queue_time_by_priority_seconds_count"}
    assert waits == {("priority=-10",), ("priority=0",), ("priority=3",)}
    assert seen["process_resident_memory_bytes",] > 2**20
    assert seen["process_open_fds",] > 0
