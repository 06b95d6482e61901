"""Whether requests are traced, and where their spans go (`spans.py`, which needs the `otel` extra)."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from treetop.serve_options import is_installed
from treetop.types.errors import ConfigError
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:
    from treetop.api.telemetry.spans import RequestTracer  # needs the otel extra

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PROTOCOLS = ("grpc", "http/protobuf")


def check_tracing(endpoint: str | None) -> None:
    """Raise ConfigError, with what to install, if traces are asked for and cannot be."""
    if endpoint is not None:
        missing = [name for name in ("opentelemetry.sdk.trace", _exporter()) if not is_installed(name)]
        if missing:
            raise ConfigError(f"--otlp-traces-endpoint needs {', '.join(missing)}; pip install {DISTRIBUTION}[otel]")


def open_tracer(endpoint: str | None, model: str) -> "RequestTracer | None":
    """None where nobody asks for traces. endpoint: a collector's, of OTLP."""
    if endpoint is None:
        return None
    from treetop.api.telemetry.spans import FLUSH_MS, RequestTracer  # noqa: PLC0415  # needs the otel extra

    exporter = import_module(_exporter()).OTLPSpanExporter
    return RequestTracer(exporter(endpoint=endpoint, timeout=FLUSH_MS / 1000), model)


def _exporter() -> str:
    """A module. Raises ConfigError for a protocol that is none."""
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{PROTOCOL} must be {' or '.join(_PROTOCOLS)}, got {protocol!r}")
    return f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
