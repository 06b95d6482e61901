"""Prometheus metrics under `treetop:`, and under the names that others have for them (`metric_names.py`)."""

import logging
import os
import time
from collections import Counter as Counts
from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from treetop.api.metric_names import OWN, AliasedMetrics
from treetop.api.telemetry.lengths import LengthMetrics, add_infos
from treetop.outputs import LiveRequest, RequestOutput
from treetop.types.requests import CoreInfo, CoreLoad, RequestUpdate

log = logging.getLogger("treetop.server")

_KV_TRANSFER = {
    "num_peers": "Workers at the other end",
    "num_requests_in_flight": "Requests on their way",
    "num_slots_busy": "Staging slots in use",
    "num_slots_quarantined": "Staging slots whose transfer was given up and has not ended",
    "num_chunks": "KV chunks offered or pulled, since the start",
    "num_bytes": "Bytes of these",
    "num_requests_done": "Requests transferred, since the start",
    "num_local_prefills": "Requests that a decode worker had to prefill itself, since the start",
    "time_seconds": "Seconds of transfers, since the start",
    "overlapped_time_seconds": "Of these, seconds while prefill went on",
    "num_dropped_messages": "Messages without a session, since the start",
    "read_gb_s": "GB/s of reads when a link was last tried",
    "write_gb_s": "GB/s of writes when a link was last tried",
}
"""Of `KVTransferStats`."""
_HEAD_FIT = {
    "before_update": "Mean tokens of rounds with drafts, of the weights before those in force",
    "after_update": "The same of the weights in force, of the last 256 rounds; a head that fits no longer shows here",
}
_HOST_TIER = {
    "saved_tokens": "Tokens whose K/V went to the host, since the start",
    "loaded_tokens": "Tokens whose K/V came back from the host, since the start",
    "failed_loads": "Loads from the host of which a page was not what had been saved, since the start",
    "usage_perc": "Share of the fullest group's pages on the host that hold K/V, 0 to 1",
    "disk_saved_tokens": "Tokens whose K/V went on to the disk, since the start",
    "disk_loaded_tokens": "Tokens whose K/V came back from the disk, since the start",
    "disk_damaged_pages": "Pages on the disk that were not what had been written, since the start",
    "disk_bytes": "Bytes of K/V on the disk",
}
"""Of `HostTierStats`."""
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1, 5)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)

_ADD_S = 0.1
"""Seconds that tokens and rounds may wait to be added to the counters of a running request."""
FEW_ACCEPTED, FEW_ROUNDS, WARN_S = 1.1, 500, 300.0
"""A mean accept length below the first over so many rounds is a warning, once in so many seconds."""


class Metrics:
    """Counts what one API process serves. Several are added up through files, if the environment names a place."""

    def __init__(self, model_name: str, info: CoreInfo) -> None:
        self._shape, self._model_name = info.shape, model_name
        self.registry = registry = CollectorRegistry()
        several = "PROMETHEUS_MULTIPROC_DIR" in os.environ

        def unset(name: str, documentation: str) -> Gauge:
            return Gauge(OWN + name, documentation, ["model_name"], registry=registry, multiprocess_mode="mostrecent")

        def gauge(name: str, documentation: str) -> Gauge:
            return unset(name, documentation).labels(model_name)

        def counter(name: str, documentation: str) -> Counter:
            return Counter(OWN + name, documentation, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(OWN + name, documentation, ["model_name"], registry=registry, buckets=buckets).labels(
                model_name
            )

        self._running = gauge("num_requests_running", "Requests that hold a row")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a row")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the fullest pool's pages that requests hold, 0 to 1")
        self._retractions = gauge("num_retractions", "Requests put back for want of pages, since the start")
        self._gave_way = gauge(
            "num_gave_way", "Requests put back so that others have their share of the rows, since the start"
        )
        self._restarts = gauge("num_engine_restarts", "Engines that took the place of one that had died")
        self._stalled = gauge("engine_stalled", "1 while the engine is silent for longer than --watchdog-timeout")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were queued")
        self._tokens = counter("generation_tokens", "Tokens that clients received")
        self._refused = counter("requests_refused", "Requests refused because the queue was full")
        self._timed_out = counter("requests_timed_out", "Requests that timed out")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that the prefix cache was asked for")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that the prefix cache had")
        self._first_s = histogram("time_to_first_token_seconds", "From arrival to the first token", _FIRST_S)
        self._token_s = histogram(
            "inter_token_latency_seconds", "Seconds since the tokens before, divided by the number that came", _TOKEN_S
        )
        self._whole_s = histogram("e2e_request_latency_seconds", "From arrival to the last token", _WHOLE_S)
        self._queue_s = histogram("request_queue_time_seconds", "From arrival in the engine to a row", _FIRST_S)
        self._prefill_s = histogram("request_prefill_time_seconds", "From a row to the first token", _FIRST_S)
        self._decode_s = histogram("request_decode_time_seconds", "From the first token to the last", _WHOLE_S)
        self._inference_s = histogram("request_inference_time_seconds", "From a row to the last token", _WHOLE_S)
        self._lengths = LengthMetrics(model_name, info, registry)
        self._drafts = counter("spec_decode_num_drafts", "Trees that were verified")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafts that were verified, roots excluded")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafts that were accepted")
        self._kv_transfer = {name: unset("kv_transfer_" + name, text) for name, text in _KV_TRANSFER.items()}
        self._host_tier, self._head_fit = (
            {name: unset(prefix + name, text) for name, text in texts.items()}
            for prefix, texts in (("kv_offload_", _HOST_TIER), ("accept_length_", _HEAD_FIT))
        )
        add_infos(model_name, info, registry)
        success = Counter(
            OWN + "request_success", "Requests that ended", ["model_name", "finished_reason"], registry=registry
        )
        self._ended = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}
        depths = Counter(
            OWN + "spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted a draft at this depth",
            ["model_name", "position"],
            registry=registry,
        )
        self._at_depth = [depths.labels(model_name, str(depth)) for depth in range(self._shape.num_steps)]
        ranks = Counter(
            OWN + "spec_decode_num_accepted_tokens_per_rank",
            "Drafts that were accepted, by their place among the proposals after their parents",
            ["model_name", "rank"],
            registry=registry,
        )
        self._of_rank = partial(ranks.labels, model_name)
        for rank in range(self._shape.topk if self._shape.num_steps else 0):
            self._of_rank(str(rank))
        self.of_keys = KeyMetrics(registry, model_name)
        self._http = Counter(
            OWN + "http_requests",
            "Answers by route; 499 if the client had gone before",
            ["model_name", "handler", "method", "status"],
            registry=registry,
        )
        every: Collector = MultiProcessCollector(CollectorRegistry()) if several else registry  # type: ignore[no-untyped-call]  # theirs
        self._page = CollectorRegistry()
        self._page.register(AliasedMetrics(every, model_name))
        ProcessCollector(registry=self._page)
        self._new_tokens, self._new_rounds, self._added_s = 0, Counts[int](), float("-inf")
        self._new_drafted, self._new_ranks = 0, Counts[int]()  # of these rounds
        self.interval = LogInterval()

    def arrived(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self.interval.prompt_tokens += num_prompt_tokens

    def refused(self) -> None:
        self._refused.inc()

    def answered(self, route: str, method: str, status: int) -> None:
        """route: as it is declared, or a word for all that are not."""
        self._http.labels(self._model_name, route, method, str(status)).inc()

    def observe(self, live: LiveRequest, update: RequestUpdate) -> None:
        """An update, cut to what the client gets, before the request takes it."""
        now, count = time.perf_counter(), len(update.new_ids)
        if count:
            self._new_tokens += count
            self.interval.tokens += count
            if live.tenant:
                self.of_keys.generated(live.tenant, count)
            if live.last_s is None:
                self._first_s.observe(now - live.started_s)
            else:
                self._token_s.observe((now - live.last_s) / count)
        if update.num_cached_tokens is not None:
            self._queries.inc(len(live.prompt_ids))
            self._hits.inc(update.num_cached_tokens)
        if update.queue_s is not None and update.prefill_s is not None:
            self._queue_s.observe(update.queue_s)
            self._lengths.admitted(live, update.queue_s)
            self._prefill_s.observe(update.prefill_s)
        if update.accept_len is not None and update.num_drafted:
            self._round(update.accept_len, update.num_drafted)
            self._new_ranks.update(update.accept_ranks)
        if update.finish_reason is not None:
            self._ended[update.finish_reason].inc()
            self._timed_out.inc(update.timed_out)
            self._whole_s.observe(now - live.started_s)
            self._ended_after(live, update, now)
        if update.finish_reason is not None or now - self._added_s > _ADD_S:
            self._added_s = now
            self._add()

    def _ended_after(self, live: LiveRequest, update: RequestUpdate, now: float) -> None:
        """How long a request decoded, if it ever had a token."""
        prefill_s = update.prefill_s if live.prefill_s is None else live.prefill_s
        if prefill_s is None:
            return
        last_s = now if update.new_ids or live.last_s is None else live.last_s
        decode_s = 0.0 if live.first_s is None else last_s - live.first_s
        self._decode_s.observe(decode_s)
        self._inference_s.observe(prefill_s + decode_s)
        self._lengths.ended(live, len(live.output_ids) + len(update.new_ids), decode_s)

    def _round(self, accept_len: int, num_drafted: int) -> None:
        self._new_rounds[accept_len] += 1
        self._new_drafted += num_drafted
        self.interval.rounds += 1
        self.interval.accepted += accept_len

    def _add(self) -> None:
        """Add tokens and rounds to their counters, each of which takes a lock."""
        self._tokens.inc(self._new_tokens)
        self.of_keys.add()
        self._new_tokens, rounds, self._new_rounds = 0, self._new_rounds, Counts[int]()
        self._drafts.inc(rounds.total())
        self._draft_tokens.inc(self._new_drafted)
        self._new_drafted, ranks, self._new_ranks = 0, self._new_ranks, Counts[int]()
        for rank, times in ranks.items():
            self._of_rank(str(rank)).inc(times)
        for depth, counter in enumerate(self._at_depth):
            deeper = sum(times for accept_len, times in rounds.items() if accept_len > depth)
            self._accepted.inc(deeper)
            counter.inc(deeper)

    def take(self, load: CoreLoad, num_restarts: int, is_stalled: bool = False) -> None:
        """What the engine last said of itself, which one in a row it is, and whether it says nothing any more."""
        self._restarts.set(num_restarts)
        self._stalled.set(is_stalled)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(load.kv_usage)
        self._retractions.set(load.num_retractions)
        self._gave_way.set(load.num_gave_way)
        if load.head_fit is not None:
            for gauge, tokens in zip(self._head_fit.values(), load.head_fit, strict=True):
                gauge.labels(self._model_name).set(tokens)
        if load.kv_transfer is not None:
            for name, gauge in self._kv_transfer.items():
                gauge.labels(self._model_name).set(getattr(load.kv_transfer, name))
        if load.host_tier is not None:
            for name, gauge in self._host_tier.items():
                gauge.labels(self._model_name).set(getattr(load.host_tier, name))

    def page(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        self._add()
        return generate_latest(self._page), CONTENT_TYPE_LATEST

    def of(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """Speculative statistics of one answer's rounds with drafts, all its choices together; None without a draft."""
        shape = self._shape
        if not shape.num_steps:
            return None
        each = [zip(o.metrics.accept_lens, o.metrics.num_drafted, strict=True) for o in outputs]
        rounds = [(accept_len, num_drafted) for of_one in each for accept_len, num_drafted in of_one if num_drafted]
        lens = [accept_len for accept_len, _ in rounds]
        accepted, drafted = sum(lens), sum(num_drafted for _, num_drafted in rounds)
        ranks = Counts(rank for o in outputs for of_round in o.metrics.accept_ranks for rank in of_round)
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / len(lens) if lens else None,
                "draft_acceptance_rate": accepted / drafted if drafted else None,
                "acceptance_histogram": [lens.count(depth) for depth in range(shape.num_steps + 1)],
                "accepted_by_rank": [ranks[rank] for rank in range(max([shape.topk - 1, *ranks]) + 1)],
                "num_spec_steps": len(lens),
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": shape.num_draft_tokens - 1,
            }
        }


class KeyMetrics:
    """What API keys use, by their names: those are the operator's, so no client can make one, and none is a key."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(OWN + name, documentation, ["model_name", "key", *labels], registry=registry)

        self._model_name, self._new = model_name, Counts[str]()
        self._requests = counter("key_requests", "Requests of an API key that are more than reads")
        self._refused = counter("key_requests_refused", "Of these, those beyond its limits a minute", "limit")
        self._prompt = counter("key_prompt_tokens", "Prompt tokens of an API key's requests that were queued")
        self._tokens = counter("key_generation_tokens", "Tokens that clients with an API key received")

    def asked(self, name: str, refused: str | None) -> None:
        """A request that is more than a read. refused: by which limit."""
        self._requests.labels(self._model_name, name).inc()
        if refused is not None:
            self._refused.labels(self._model_name, name, refused).inc()

    def arrived(self, name: str, num_prompt_tokens: int) -> None:
        self._prompt.labels(self._model_name, name).inc(num_prompt_tokens)

    def generated(self, name: str, count: int) -> None:
        self._new[name] += count

    def add(self) -> None:
        """Add what was generated to its counter."""
        new, self._new = self._new, Counts[str]()
        for name, count in new.items():
            self._tokens.labels(self._model_name, name).inc(count)


class LogInterval:
    """Counts since the last log line, and rounds since the last warning."""

    def __init__(self) -> None:
        self.prompt_tokens = self.tokens = self.rounds = self.accepted = 0
        self._since_s = time.monotonic()
        self._seen_rounds = self._seen_accepted = 0
        self._warned_s = float("-inf")

    def log_load(self, load: CoreLoad, who: str) -> None:
        """Log what has happened, if anything, and begin anew."""
        now = time.monotonic()
        elapsed_s = max(now - self._since_s, 1e-9)
        if self.tokens or self.prompt_tokens or load.num_running or load.num_waiting:
            length = f", accept len: {1 + self.accepted / self.rounds:.2f}" if self.rounds else ""
            log.info(
                "%srunning: %d, waiting: %d, KV usage: %.1f %%, prompt: %.1f tokens/s, generation: %.1f tokens/s%s",
                *(who, load.num_running, load.num_waiting, 100 * load.kv_usage),
                *(self.prompt_tokens / elapsed_s, self.tokens / elapsed_s, length),
            )
        self._seen_rounds += self.rounds
        self._seen_accepted += self.accepted
        self.prompt_tokens = self.tokens = self.rounds = self.accepted = 0
        self._since_s = now
        self._warn(now)

    def _warn(self, now: float) -> None:
        if self._seen_rounds < FEW_ROUNDS:
            return
        length = 1 + self._seen_accepted / self._seen_rounds
        if length < FEW_ACCEPTED and now - self._warned_s >= WARN_S:
            self._warned_s = now
            log.warning(
                "mean accept length %.2f over %d rounds: the draft is almost never right, and costs more than it gives."
                " Was --speculative-draft-model-path trained for this model, and for prompts this long? `treetop trace`"
                " shows its trees; --speculative-algorithm NONE decodes plainly",
                *(length, self._seen_rounds),
            )
        self._seen_rounds = self._seen_accepted = 0
