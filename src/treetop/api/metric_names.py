"""Names of metrics: treetop's own, and those of vLLM and SGLang that dashboards and routers know.

A metric has another's name where it means the same. Gauges of what happened lately, which SGLang's board reads, are
worked out of counters when /metrics is read, so they hold for all API processes together.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OWN = "treetop:"
ALIASES = {
    "num_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "sglang:cached_tokens"),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "request_generation_tokens": ("vllm:request_generation_tokens",),
    "time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "cache_config_info": ("vllm:cache_config_info",),
    "request_queue_time_seconds": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "request_success": ("vllm:request_success",),
    "spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}
"""Names of others by ours, all without `_total` and the like."""

_COUNTED = tuple(
    OWN + name
    for name in (
        "generation_tokens_total",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_drafts_total",
    )
)
MIN_WINDOW_S = 5.0
"""Seconds that a gauge of what happened lately looks back at least, however often it is read."""


class RecentRates:
    """Rates since /metrics was read last, or over a few seconds if it is read more often.

    A ratio of nothing keeps its value.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._seen = deque([(clock(), (0.0,) * len(_COUNTED))])
        self._hit_rate, self._accept_length = 0.0, 1.0

    def gauges(self, totals: dict[str, float], model_name: str) -> Iterator[Metric]:
        """totals: counters by name, of all API processes."""
        now, counted = self._clock(), tuple(totals.get(name, 0.0) for name in _COUNTED)
        while len(self._seen) > 1 and now - self._seen[1][0] >= MIN_WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        tokens, hits, queries, accepted, drafts = (new - old for new, old in zip(counted, before, strict=True))
        self._seen.append((now, counted))
        if queries:
            self._hit_rate = hits / queries
        if drafts:
            self._accept_length = 1 + accepted / drafts
        throughput = tokens / max(now - since_s, 1e-9)
        for name, documentation, value in (
            ("sglang:gen_throughput", "Tokens a second that clients received lately", throughput),
            ("sglang:cache_hit_rate", "Share of prompt tokens that the prefix cache had lately", self._hit_rate),
            ("sglang:spec_accept_length", "Tokens of a round lately, its bonus included", self._accept_length),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=["model_name"])
            gauge.add_metric([model_name], value)
            yield gauge


class AliasedMetrics(Collector):
    """Each metric under its own name and those that others have for it, and the gauges of `RecentRates`."""

    def __init__(self, source: Collector, model_name: str) -> None:
        self._source, self._model_name, self._lately = source, model_name, RecentRates()

    def collect(self) -> Iterator[Metric]:
        totals: dict[str, float] = {}
        for metric in self._source.collect():
            if metric.name == OWN + "num_retractions":
                yield self._preemptions(metric)
            yield metric
            totals |= {each.name: each.value for each in metric.samples if each.name in _COUNTED}
            for alias in ALIASES.get(metric.name.removeprefix(OWN), ()):
                yield _renamed(metric, alias)
        yield from self._lately.gauges(totals, self._model_name)

    def _preemptions(self, retractions: Metric) -> Metric:
        """The same under vLLM's name, as a counter, which it is: engines tell what they have counted themselves."""
        counter = CounterMetricFamily("vllm:num_preemptions", retractions.documentation, labels=["model_name"])
        counter.add_metric([self._model_name], sum(sample.value for sample in retractions.samples))
        return counter


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [Sample(name + each.name.removeprefix(metric.name), *each[1:]) for each in metric.samples]
    return copy
