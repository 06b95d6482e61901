"""OpenTelemetry traces: a span for each choice of a request, below the client's, with what it waited for within it.

llm_request
|-- queue      from arrival in the engine to a row
|-- prefill    from there to the first token
`-- decode     to the last; an event a round, with its accept length

The library's, and what it reads of the environment holds: sampling, the service's name, bounds of events, headers.
Source of names: OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`), and vLLM's of latencies.
"""

import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from treetop.async_llm import DeltaStream
from treetop.outputs import LiveRequest
from treetop.types.ids import RequestId
from treetop.types.requests import RequestUpdate
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

FLUSH_MS = 3000
"""For what is left at the end: a collector that does not answer holds up no shutdown for longer."""
_UNIT_NS = 10**9


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose request is answered: the client's span, if it says one, and the id of the request."""

    context: Context
    request_id: str


_asked: ContextVar[_Asked | None] = ContextVar("treetop_trace", default=None)


@dataclass(slots=True)
class _Traced:
    """A choice that has not ended. spans: its own and that of the stage in which it is."""

    span: Span
    stage: Span
    start_ns: int
    started_s: float
    num_rounds: int = 0
    num_accepted: int = 0


class RequestTracer:
    """Writes spans of requests as their updates come. Of one event loop."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "treetop"}
        self._provider = TracerProvider(resource=Resource.create({**named, "service.version": __version__}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("treetop", __version__)
        self._propagator, self._model = TraceContextTextMapPropagator(), model
        self._traced: dict[RequestId, _Traced] = {}

    @contextmanager
    def answering(self, headers: Mapping[str, str], request_id: str) -> Iterator[None]:
        """What is begun within belongs to a request with these headers (W3C's traceparent and tracestate)."""
        token = _asked.set(_Asked(self._propagator.extract(headers), request_id))
        try:
            yield
        finally:
            _asked.reset(token)

    def begin(self, stream: DeltaStream, params: SamplingParams, num_choices: int) -> None:
        """Of all choices of a call that has just been queued. Those that end without a word end with their stream."""
        asked, now_ns = _asked.get(), time.time_ns()
        context = None if asked is None else asked.context
        for request_id, live in stream.alive():
            attributes: dict[str, Any] = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.id": "" if asked is None else asked.request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": num_choices,
                "gen_ai.usage.prompt_tokens": len(live.prompt_ids),
                "treetop.choice": live.index,
            }
            span = self._tracer.start_span("llm_request", context, trace.SpanKind.SERVER, attributes, start_time=now_ns)
            stage = self._stage(span, "queue", now_ns)
            self._traced[request_id] = _Traced(span, stage, now_ns, live.started_s)
        ids = [request_id for request_id, _ in stream.alive()]
        weakref.finalize(stream, self._dropped, ids).atexit = False

    def observe(self, live: LiveRequest, update: RequestUpdate) -> None:
        """As `Observer`."""
        traced = self._traced.get(update.request_id)
        if traced is None:
            return
        now_ns = time.time_ns()
        if update.queue_s is not None and update.prefill_s is not None:
            admitted_ns = traced.start_ns + int(update.queue_s * _UNIT_NS)
            first_ns = admitted_ns + int(update.prefill_s * _UNIT_NS)
            traced.stage.end(admitted_ns)
            prefill = self._stage(traced.span, "prefill", admitted_ns)
            prefill.set_attribute("treetop.cached_tokens", update.num_cached_tokens or 0)
            prefill.end(first_ns)
            traced.stage = self._stage(traced.span, "decode", first_ns)
            traced.span.set_attributes(
                {
                    "gen_ai.latency.time_in_queue": update.queue_s,
                    "gen_ai.latency.time_in_model_prefill": update.prefill_s,
                    "gen_ai.latency.time_to_first_token": update.queue_s + update.prefill_s,
                }
            )
        if update.accept_len is not None:
            traced.num_rounds += 1
            traced.num_accepted += update.accept_len
            if traced.stage.is_recording():
                told = {
                    "treetop.accept_length": update.accept_len,
                    "treetop.draft_tokens": update.num_drafted,
                    "treetop.tokens": len(update.new_ids),
                }
                traced.stage.add_event("round", told, now_ns)
        if update.finish_reason is not None:
            self._end(update.request_id, live, update, now_ns)

    def close(self) -> None:
        """Send what is left."""
        for request_id in [*self._traced]:
            self._dropped([request_id])
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _stage(self, span: Span, name: str, start_ns: int) -> Span:
        return self._tracer.start_span(name, trace.set_span_in_context(span), start_time=start_ns)

    def _end(self, request_id: RequestId, live: LiveRequest, update: RequestUpdate, now_ns: int) -> None:
        traced = self._traced.pop(request_id)
        span, rounds = traced.span, traced.num_rounds
        e2e_s = time.perf_counter() - traced.started_s
        span.set_attributes(
            {
                "gen_ai.usage.completion_tokens": len(live.output_ids) + len(update.new_ids),
                "gen_ai.response.finish_reasons": (str(update.finish_reason),),
                "gen_ai.latency.e2e": e2e_s,
                "treetop.rounds": rounds,
                "treetop.retractions": 0 if update.stats is None else update.stats.num_retractions,
            }
        )
        if rounds:
            span.set_attribute("treetop.mean_accept_length", traced.num_accepted / rounds)
        if update.error is not None:
            span.set_status(trace.StatusCode.ERROR, update.error)
        traced.stage.end(now_ns)
        span.end(now_ns)

    def _dropped(self, request_ids: Sequence[RequestId]) -> None:
        """Nobody waits for them any more, or the engine has failed."""
        for request_id in request_ids:
            traced = self._traced.pop(request_id, None)
            if traced is not None:
                traced.span.set_attribute("gen_ai.response.finish_reasons", ("abort",))
                traced.span.set_status(trace.StatusCode.ERROR, "aborted")
                traced.stage.end()
                traced.span.end()
