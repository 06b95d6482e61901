"""Metrics of how long requests are and who waits, and what an engine is: each is of the page of `Metrics`."""

from prometheus_client import CollectorRegistry, Gauge, Histogram

from treetop.api.metric_names import OWN
from treetop.outputs import LiveRequest
from treetop.types.requests import CoreInfo

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**4, 2 * 10**4, 5 * 10**4, 10**5, 2 * 10**5, 10**6)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1, 5)
_WAIT_S = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_MOST_PRIORITY = 10
"""Of a label, either way: anybody may give any priority."""


class LengthMetrics:
    """Lengths of prompts and answers, and waiting by priority."""

    def __init__(self, model_name: str, info: CoreInfo, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            kind = Histogram(OWN + name, documentation, ["model_name"], registry=registry, buckets=buckets)
            return kind.labels(model_name)

        self._model_name, self._by_priority = model_name, info.by_priority
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens of an answer that has ended", _TOKENS)
        self._token_s = histogram(
            "time_per_output_token_seconds", "Of a request, seconds from the first token to the last by token", _TOKEN_S
        )
        self._wait_s = Histogram(
            OWN + "request_queue_time_by_priority_seconds",
            "From arrival in the engine to a row, by priority, from -10 to 10",
            ["model_name", "priority"],
            registry=registry,
            buckets=_WAIT_S,
        )
        if info.by_priority:
            self._wait_s.labels(model_name, "0")

    def admitted(self, live: LiveRequest, queue_s: float) -> None:
        if self._by_priority:
            priority = max(-_MOST_PRIORITY, min(live.priority, _MOST_PRIORITY))
            self._wait_s.labels(self._model_name, str(priority)).observe(queue_s)

    def ended(self, live: LiveRequest, num_tokens: int, decode_s: float) -> None:
        """Of a request that had a token. num_tokens: of its answer."""
        self._prompt.observe(len(live.prompt_ids))
        self._output.observe(num_tokens)
        if num_tokens > 1:
            self._token_s.observe(decode_s / (num_tokens - 1))


def add_infos(model_name: str, info: CoreInfo, registry: CollectorRegistry) -> None:
    """Gauges that are 1, whose labels say what an engine is."""

    def add(name: str, documentation: str, **labels: str) -> None:
        names = ["model_name", *labels]
        gauge = Gauge(OWN + name, documentation, names, registry=registry, multiprocess_mode="mostrecent")
        gauge.labels(model_name, *labels.values()).set(1)

    add("exactness_info", "1 for the --exactness in force", exactness=info.exactness)
    if info.prefix is not None:
        page_size, num_pages = str(info.prefix.page_size), str(info.prefix.capacity)
        told = {"block_size": page_size, "num_gpu_blocks": num_pages, "enable_prefix_caching": "True"}
        add("cache_config_info", "1 for what routers ask of the KV cache", **told)
